"""What both shells share: settings, and operations made of arguments. No I/O."""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from psycopg_pool import AsyncNullConnectionPool, NullConnectionPool

from commandbus.bus.call_listener import Listening, WaitingCall
from commandbus.db.bus_pool import AsyncBusPool, BusPool, leave_to_parent
from commandbus.db.database_address import Database
from commandbus.errors import ConfigurationError, InvalidCommandError, InvalidOperationError
from commandbus.flow.commands import send
from commandbus.flow.operation import Operation, Plan, then
from commandbus.lazy import lazy
from commandbus.logger import safe_logger
from commandbus.model import names, payload, unique_key
from commandbus.model.command import NewCommand, SentCommand
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.handle import given_by
from commandbus.settings import Settings, load_settings

if TYPE_CHECKING:
    from commandbus.flow.breakers import operate as breaker_operate
    from commandbus.flow.breakers.operate import Guard
    from commandbus.flow.commands import call, inspect, operate, prune, send_unique
    from commandbus.flow.commands.prune import PruneReport, Retention
    from commandbus.flow.commands.query_filters import CommandQuery
    from commandbus.flow.queues.messages import Shapes
    from commandbus.flow.setup import migrate, roles
    from commandbus.flow.setup.schema_state import SchemaState
    from commandbus.model.process import NewProcess
    from commandbus.model.to_json import JsonDefault
else:
    breaker_operate = lazy("commandbus.flow.breakers.operate")
    call = lazy("commandbus.flow.commands.call")
    inspect = lazy("commandbus.flow.commands.inspect")
    migrate = lazy("commandbus.flow.setup.migrate")
    operate = lazy("commandbus.flow.commands.operate")
    prune = lazy("commandbus.flow.commands.prune")
    send_unique = lazy("commandbus.flow.commands.send_unique")
    roles = lazy("commandbus.flow.setup.roles")

logger = safe_logger("commandbus.bus")
T = TypeVar("T")
N = TypeVar("N", "NewCommand", "NewProcess")
CHUNK = 1000
POOL_SIZE = 8


class BusBase:
    """What both shells share: settings, and operations made of arguments."""

    settings: Settings
    _limit_clients: Any  # a LimitClientHolder
    _own_pool: Any = None
    _session_name: str = "bus"
    _chain: Any = None  # a Chain: what is around its sends

    def __init__(
        self,
        database_url: str | None,
        settings: Settings | None,
        lent_pool: Any,
        json_default: JsonDefault | None = None,
    ) -> None:
        if json_default is not None and not callable(json_default):
            raise TypeError(
                f"json_default must be a function that makes JSON of an object, not {json_default!r:.80}"
            )
        self._json_default = json_default
        if settings is None:
            settings = load_settings({"database_url": database_url})
        elif database_url is not None:
            raise TypeError("give database_url or settings, not both")
        self.settings = settings
        self._database = Database(settings)
        self._listening = Listening()
        self._lent_pool = lent_pool
        self._lent_is_parents = False
        self._queue_shapes: Shapes = {}
        _buses.add(self)

    def _check_search(self, query: CommandQuery) -> None:
        """Programs may search for anything. A bus whose answers people see refuses what its rules hide."""

    def _leave_to_parent(self) -> None:
        """Called in a forked process: open pools and sockets belong to the parent. The next use opens new ones."""
        self._listening.leave_to_parent()
        self._database.leave_to_parent()
        if (limit_clients := getattr(self, "_limit_clients", None)) is not None:
            limit_clients.leave_to_parent()
        pool, self._own_pool = self._own_pool, None
        if isinstance(pool, BusPool | AsyncBusPool):
            leave_to_parent(pool)
        self._lent_is_parents = _cannot_be_shared(self._lent_pool)

    def _check_lent(self) -> None:
        if self._lent_is_parents:
            raise ConfigurationError(
                "the pool that was lent to this bus was open when this process was forked: its connections are "
                "the parent's, and its threads are not here. Open the pool after the fork (preforking servers "
                "have a hook for that), or make the bus without a pool: then it opens its own in each process"
            )

    def _send(self, domain: str, new: NewCommand) -> Operation[SentCommand]:
        return self._prepare(domain, new)[1]

    def _prepare(self, domain: str, new: NewCommand) -> tuple[str, Operation[SentCommand]]:
        """Returns the command_id that it will have, and what sends it."""
        new, rule = unique_key.split(new if self._json_default is None else self._plain(new))
        if rule is not None and new.key is not None:
            raise InvalidCommandError(
                f"key ({names.shown(new.key)}) cannot be given with unique; leave one of them out"
            )
        outgoing = send.prepare(new, max_bytes=self.settings.max_payload_bytes)
        names.check_domain(domain)
        if rule is None:
            sending = send.send(domain, outgoing, self)
        else:
            sending = then(send_unique.send_unique(domain, outgoing, rule), lambda sent: given_by(self, sent))
        return outgoing.command_id, self._unless_refused(domain, sending, [new.command_type])

    def _call(
        self,
        domain: str,
        new: NewCommand,
        *,
        timeout: Duration | None,
        wait: Duration,
        conn: object,
        listen_at: Callable[[], Settings],
    ) -> WaitingCall:
        if conn is not None:
            raise InvalidOperationError(
                "call takes no conn: a command does not run before its transaction is committed, so call could "
                "not wait for it; use send(..., conn=conn), or call outside the transaction"
            )
        seconds = parse_seconds(wait, name="wait", error=InvalidCommandError)
        new.timeout = timeout
        sending = call.send_call(domain, self._plain(new), max_bytes=self.settings.max_payload_bytes)
        sending = self._unless_refused(domain, sending, [new.command_type])
        return WaitingCall(sending, self._listening.get(listen_at), seconds=seconds)

    def _chunks(
        self, domain: str, commands: Iterable[send.Sendable], size: int
    ) -> Iterator[Operation[list[SentCommand]]]:
        outgoing = self._outgoing(domain, commands, size)
        while chunk := list(islice(outgoing, size)):
            yield self._send_chunk(domain, chunk)

    def _outgoing(
        self, domain: str, commands: Iterable[send.Sendable], chunk_size: int
    ) -> Iterator[send.Outgoing]:
        """The commands of `send_many`, each checked when it is read."""
        names.check_domain(domain)
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
            raise ValueError(f"chunk_size must be a whole number of at least 1, not {chunk_size!r}")
        limit = self.settings.max_payload_bytes
        return send.prepare_all(commands, max_bytes=limit, domain=domain, plain=self._plain_or_none)

    def _send_chunk(self, domain: str, chunk: Sequence[send.Outgoing]) -> Operation[list[SentCommand]]:
        sending = send.send_chunk(domain, chunk, self)
        return self._unless_refused(domain, sending, (item.command_type for item in chunk))

    @property
    def _plain_or_none(self) -> Callable[[NewCommand], NewCommand] | None:
        """`_plain`, if it does anything."""
        return None if self._json_default is None else self._plain

    def _plain(self, new: N) -> N:
        """The same, with the application's own objects in its data made JSON (`json_default`)."""
        if self._json_default is None:
            return new
        return replace(new, data=payload.plain(new.data, what="data", default=self._json_default))

    def _guard(self, domain: str) -> Guard | None:
        """Returns a Guard that refuses commands whose breaker is open; None if no command type is configured
        so."""
        settings = self.settings
        if not any(rule.refuses for rule in settings.breakers.values()):
            return None
        return breaker_operate.Guard(
            domain, lambda command_type: settings.breaker_of(domain, command_type).refuses
        )

    def _unless_refused(self, domain: str, sending: Operation[T], types: Iterable[str]) -> Operation[T]:
        guard = self._guard(domain)
        if guard is None or not (refusable := {each for each in types if guard.may_refuse(each)}):
            return sending
        return guard.before(sending, sorted(refusable))

    def _migration(self, domains: Sequence[str], wait: Duration) -> Plan[SchemaState]:
        def told(by: str) -> None:
            logger.warning("the migration waits for %s", by)

        return migrate.migrate(domains, wait_seconds=parse_seconds(wait, name="wait"), on_wait=told)

    def _roles(
        self, prefix: str, domains: Sequence[str], queues: Sequence[str], keep: Duration | None
    ) -> Operation[dict[str, str]]:
        seconds = None if keep is None else parse_seconds(keep, name="keep")
        return roles.create_roles(prefix, domains=domains, queues=queues, keep_seconds=seconds)

    def _retention(self, age: Duration | None, count: int | None) -> Retention:
        if age is None and count is None:
            return prune.Retention.of(self.settings)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise ValueError(f"count must be a whole number of at least 0, not {count!r}")
        return prune.Retention(None if age is None else parse_seconds(age, name="age"), count)

    def _prune(
        self,
        age: Duration | None,
        count: int | None,
        *,
        portion: int | None,
        go_on_from: str | None,
        operator: str | None,
        reason: str | None,
    ) -> Plan[PruneReport]:
        retention = self._retention(age, count)
        if portion is not None:
            names.check_count(portion, "portion", most=1_000_000)
        if operator is None and reason is None:
            return prune.prune_all(retention, portion=portion, go_on_from=go_on_from)
        action = operate.operator_action(operator or whoami(), reason)
        return prune.prune_for_operator(retention, action, portion=portion, go_on_from=go_on_from)


_buses: WeakSet[BusBase] = WeakSet()


def _begin_anew() -> None:
    for bus in list(_buses):
        bus._leave_to_parent()


os.register_at_fork(after_in_child=_begin_anew)


def _cannot_be_shared(pool: Any) -> bool:
    """Is it a pool with connections and threads? A pool that is not open yet has none, and a null pool never
    has."""
    if pool is None or isinstance(pool, NullConnectionPool | AsyncNullConnectionPool):
        return False
    return not getattr(pool, "closed", True)


def warn_on_loop() -> bool:
    """Warn if the caller's thread runs an event loop, which a sync bus blocks. Returns whether it does."""
    if asyncio._get_running_loop() is None:
        return False
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("commandbus."):
        depth, frame = depth + 1, frame.f_back
    text = (
        "CommandBus is used on a running event loop, and blocks it until the database has answered: use "
        "AsyncCommandBus there and await its methods, or `await asyncio.to_thread(bus.send, …)`"
    )
    warnings.warn(text, RuntimeWarning, stacklevel=depth)
    return True


def whoami() -> str:
    """The name of the person at the keyboard, for the audit trail."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
