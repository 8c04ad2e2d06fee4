"""What both shells share: settings, and operations made of arguments. No I/O."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

from commandbus.bus.listening import Call, Listening
from commandbus.errors import InvalidOperationError
from commandbus.flow import call, migrate, roles, send
from commandbus.flow.breaker_operate import Guard
from commandbus.flow.inspect import CommandQuery
from commandbus.flow.migrate import SchemaState
from commandbus.flow.prune import Retention
from commandbus.flow.statement import Operation, Plan
from commandbus.logger import safe_logger
from commandbus.model import names
from commandbus.model.command import NewCommand, SentCommand
from commandbus.model.durations import Duration, parse_seconds
from commandbus.settings import Settings, load_settings

logger = safe_logger("commandbus.bus")
T = TypeVar("T")
CHUNK = 1000
POOL_SIZE = 8


class Shell:
    """What both shells share: settings, and operations made of arguments."""

    settings: Settings

    def __init__(self, database_url: str | None, settings: Settings | None) -> None:
        if settings is None:
            settings = load_settings({"database_url": database_url})
        elif database_url is not None:
            raise TypeError("give database_url or settings, not both")
        self.settings = settings
        self._listening = Listening()

    def _send(self, domain: str, new: NewCommand) -> Operation[SentCommand]:
        outgoing = send.prepare(new, max_bytes=self.settings.max_payload_bytes)
        return self._unless_refused(domain, send.send(names.check_domain(domain), outgoing), [new.command_type])

    def _call(
        self,
        domain: str,
        new: NewCommand,
        *,
        deadline: Duration | None,
        timeout: Duration,
        conn: object,
        listen_at: Callable[[], Settings],
    ) -> Call:
        if conn is not None:
            raise InvalidOperationError(
                "call takes no conn: what is not committed does not run, so its outcome cannot be waited for; "
                "use send(..., conn=conn), or call outside the transaction"
            )
        seconds = call.seconds_of(timeout, "timeout")
        new.timeout = None if deadline is None else call.seconds_of(deadline, "deadline")
        sending = call.send_call(domain, new, max_bytes=self.settings.max_payload_bytes)
        sending = self._unless_refused(domain, sending, [new.command_type])
        return Call(sending, self._listening.get(listen_at), seconds=seconds)

    def _chunks(
        self, domain: str, commands: Iterable[NewCommand | Mapping[str, Any]], size: int
    ) -> Iterator[Operation[list[SentCommand]]]:
        names.check_domain(domain)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"chunk_size must be a whole number of at least 1, not {size!r}")
        limit = self.settings.max_payload_bytes
        outgoing = send.prepare_all(commands, max_bytes=limit)
        while chunk := list(islice(outgoing, size)):
            yield self._unless_refused(
                domain, send.send_chunk(domain, chunk), (item.command_type for item in chunk)
            )

    def _guard(self, domain: str) -> Guard | None:
        """Who refuses commands whose breaker is open; None if these settings want that of no command type."""
        settings = self.settings
        if not any(rule.refuses for rule in settings.breakers.values()):
            return None
        return Guard(domain, lambda command_type: settings.breaker_of(domain, command_type).refuses)

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

    def _retention(self, age: float | str | timedelta | None, count: int | None) -> Retention:
        if age is None and count is None:
            return Retention.of(self.settings)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise ValueError(f"count must be a whole number of at least 0, not {count!r}")
        return Retention(None if age is None else parse_seconds(age, name="age"), count)


def command_query(query: CommandQuery | None, filters: dict[str, Any]) -> CommandQuery:
    return query if query is not None else CommandQuery(**filters)


def whoami() -> str:
    """The name of the person at the keyboard, for the audit trail."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
