"""CommandBus: the shell for sync code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast, overload

import psycopg
from psycopg import Connection
from psycopg import errors as pg
from psycopg_pool import ConnectionPool, PoolTimeout

from commandbus.bus.base import POOL_SIZE, warn_on_loop, whoami
from commandbus.bus.breakers import BreakerMethods
from commandbus.bus.call_listener import LAST_LOOK_SECONDS, WaitingCall, address_of
from commandbus.bus.data_access import DataAccess
from commandbus.bus.fleet import FleetMethods
from commandbus.bus.limits import LimitClientHolder, LimitMethods
from commandbus.bus.repositories.new_processes import Manager
from commandbus.bus.send_middleware import Chain, Given, SendMiddlewareMethods
from commandbus.bus.send_within import TimedSend
from commandbus.bus.sending import CallOptions, SendMethods
from commandbus.bus.waiting import WaitMethods
from commandbus.clock import monotonic
from commandbus.db.answer_clock import NoAnswerError, run_until
from commandbus.db.bus_pool import BusPool, make_bus_pool, no_connection, unavailable
from commandbus.db.drivers import run
from commandbus.db.lent_connection import borrow
from commandbus.db.pool import lasting_conninfo
from commandbus.errors import CommandBusError, DatabaseUnavailableError
from commandbus.flow.operation import Operation, Plan, explain_absence, then
from commandbus.lazy import lazy
from commandbus.model import names
from commandbus.model.command import NewCommand, SentCommand
from commandbus.model.command_class import addressed
from commandbus.model.durations import Duration
from commandbus.model.json_values import Json, JsonValue, PayloadObject
from commandbus.model.page import Page
from commandbus.model.priority import Priority
from commandbus.model.retry import OnExhausted
from commandbus.model.timeouts import MIGRATION_WAIT_SECONDS
from commandbus.settings import Settings

if TYPE_CHECKING:
    from commandbus.flow.commands import call as calls
    from commandbus.flow.commands import find_id, inspect, operate, pause, prune
    from commandbus.flow.commands.find_id import FoundId
    from commandbus.flow.commands.inspect import DomainStatus, WorkerInfo
    from commandbus.flow.commands.pause import PauseInfo
    from commandbus.flow.commands.prune import PrunePreview, PruneReport
    from commandbus.flow.database import report
    from commandbus.flow.database.report import DatabaseReport
    from commandbus.flow.setup import domains, schema_state
    from commandbus.flow.setup.domains import DomainInfo
    from commandbus.flow.setup.schema_state import SchemaState
    from commandbus.model import process
    from commandbus.model.process import StartedProcess
    from commandbus.model.to_json import JsonDefault
else:
    calls = lazy("commandbus.flow.commands.call")
    domains = lazy("commandbus.flow.setup.domains")
    find_id = lazy("commandbus.flow.commands.find_id")
    report = lazy("commandbus.flow.database.report")
    inspect = lazy("commandbus.flow.commands.inspect")
    schema_state = lazy("commandbus.flow.setup.schema_state")
    operate = lazy("commandbus.flow.commands.operate")
    pause = lazy("commandbus.flow.commands.pause")
    process = lazy("commandbus.model.process")
    prune = lazy("commandbus.flow.commands.prune")

T = TypeVar("T")


class CommandBus(
    SendMethods, BreakerMethods, LimitMethods, FleetMethods, WaitMethods, SendMiddlewareMethods, DataAccess
):
    """The bus for sync code. Safe to share between threads; close it, or use it as a context manager.

    `CommandBus()` takes its database from the settings (environment, commandbus.toml). With `pool=` it uses a
    psycopg pool of the application, and leaves it open. `json_default` makes JSON of objects in payloads that are
    of a type that is unknown here. `middleware` is what is around its sends: functions, or a HandlerRegistry with
    `send_middleware`.
    """

    def __init__(
        self,
        database_url: str | None = None,
        *,
        pool: ConnectionPool[Any] | None = None,
        settings: Settings | None = None,
        json_default: JsonDefault | None = None,
        middleware: Given = None,
    ) -> None:
        if middleware is not None:
            self._chain = Chain(middleware, "sync", "this CommandBus")
        self._limit_clients = LimitClientHolder()
        self._own_pool: BusPool | None = None
        self._has_warned = False
        super().__init__(database_url, settings, pool, json_default)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what this bus opened. Callers that wait in `call` or `wait` get BusClosedError."""
        self._listening.close()
        self._limit_clients.close()
        if self._own_pool is not None:
            self._own_pool.close()
            self._own_pool = None
        self._database.close()

    def run(self, operation: Operation[T], conn: object = None) -> T:
        """Run an operation of `commandbus.flow`; on `conn` it joins the caller's transaction."""
        try:
            if conn is not None:
                lent = borrow(conn)
                self._mind_the_loop()
                return run(lent, operation)
            return self._run(operation)
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_absence(error) from None

    def _run(self, operation: Operation[T], seconds: float | None = None) -> T:
        """Run an operation on a connection of a pool; with `seconds` it ends in that time, or a little later."""
        self._mind_the_loop()
        until = None if seconds is None else monotonic() + seconds
        if self._lent_pool is not None:
            with self._lent_connection(seconds) as lent:
                return run(lent, operation) if until is None else run_until(until, lent, operation, commits=True)
        pool = self._pool
        own = pool.take(seconds)  # in autocommit mode, so that there is no round trip for a commit
        try:
            return run(own, operation) if until is None else run_until(until, own, operation)
        finally:
            pool.putconn(own)

    @contextmanager
    def _lent_connection(self, seconds: float | None) -> Iterator[Connection[Any]]:
        self._check_lent()
        pool: ConnectionPool[Any] = self._lent_pool
        with ExitStack() as stack:
            try:
                conn = stack.enter_context(pool.connection(seconds))
            except PoolTimeout as error:
                raise no_connection(pool, error, seconds) from error
            yield conn

    def _mind_the_loop(self) -> None:
        if not self._has_warned:
            self._has_warned = warn_on_loop()

    def follow(self, plan: Plan[T], conn: object = None) -> T:
        """Run operations one after the other, each a transaction of its own (unless `conn` is lent)."""
        try:
            operation = next(plan)
            while True:
                try:
                    answer = CommandBus.run(self, operation, conn)  # as it is: a subclass may mask it
                except CommandBusError as error:
                    operation = plan.throw(error)
                else:
                    operation = plan.send(answer)
        except StopIteration as stop:
            return cast(T, stop.value)

    @property
    def _pool(self) -> BusPool:
        if self._own_pool is None:
            with self._database.lock:
                if self._own_pool is None:
                    settings = self._database.resolve()
                    size = settings.pool_max_size or POOL_SIZE
                    pool = make_bus_pool(settings, max_size=size, is_patient=self._database.revives)
                    pool.open()
                    self._own_pool = pool
        return self._own_pool

    def _resolved(self) -> Settings:
        return self._database.resolve()

    def connect(self) -> Connection[tuple[Any, ...]]:
        """A new psycopg connection to the bus's database. You must close it.

        For scripts and tests: each call opens a new database session, which takes milliseconds and one server
        process. An application usually has a pool or an ORM session: lend that to `send(…, conn=…)`.
        """
        self._mind_the_loop()
        try:
            return Connection.connect(lasting_conninfo(self._database.resolve().database_url))
        except psycopg.OperationalError as error:
            raise unavailable(error) from error

    # --- set-up -------------------------------------------------------------------------------------------

    def migrate(self, *, domains: Sequence[str] = (), wait: Duration = MIGRATION_WAIT_SECONDS) -> SchemaState:
        """Upgrade the schema to this release, and create domains; see `flow/setup/migrate.py`.

        While another transaction is in the way, it gives up its locks and tries again, for about as long as
        `wait`.
        """
        return self.follow(self._migration(domains, wait))

    def schema_state(self) -> SchemaState:
        """What the database has and what `migrate` would add."""
        return self.run(schema_state.look())

    def create_domain(self, domain: str) -> bool:
        """Create a domain's queue. Returns False if it existed already."""
        return self.run(domains.create_domain(names.check_domain(domain)))

    def list_domains(self) -> Page[DomainInfo]:
        """All domains."""
        return self.run(then(domains.list_domains(), Page))

    def create_roles(
        self,
        prefix: str = "commandbus",
        *,
        domains: Sequence[str] = (),
        queues: Sequence[str] = (),
        keep: Duration | None = None,
    ) -> dict[str, str]:
        """Create and grant the least-privilege roles. With `domains` (and reply `queues`), create the roles of a
        tenant that has only these. `keep`: nobody can prune a finished command before that time is over."""
        return self.run(self._roles(prefix, domains, queues, keep))

    # --- sending ------------------------------------------------------------------------------------------

    def _send_within(self, send: TimedSend, conn: object) -> SentCommand:
        if conn is None:
            with send.explained():
                return self._run(send.sending, send.seconds)
        lent = borrow(conn)
        self._mind_the_loop()
        with send.explained(is_transaction=not lent.autocommit):
            try:
                return run_until(send.until, lent, send.sending)
            except NoAnswerError:
                lent.close()
                raise

    @overload
    def call(
        self, domain: str, command_type: str, data: JsonValue = None, **options: Unpack[CallOptions]
    ) -> Json: ...
    @overload
    def call(self, command: PayloadObject, /, **options: Unpack[CallOptions]) -> Json: ...
    def call(
        self,
        domain: str | PayloadObject,
        command_type: str | None = None,
        data: JsonValue = None,
        *,
        command_id: str | None = None,
        correlation_id: str | None = None,
        max_attempts: int | None = None,
        headers: Mapping[str, JsonValue] | None = None,
        timeout: Duration | None = None,
        expires: Duration | datetime | None = None,
        on_exhausted: OnExhausted | None = None,
        priority: Priority | None = None,
        wait: Duration = 30.0,
        conn: object = None,
    ) -> Json:
        """Send a command, wait for its outcome, and return its result; any other outcome raises CallError.

        Instead of `domain`, `command_type` and `data`, give one object whose class is marked with `@command`.
        `wait` is how long the caller waits. After that it gets CallTimeoutError, and the command goes on.
        `timeout` is how long one attempt of the command may take, as in `send`. A call with the `command_id`
        and content of an earlier call or send waits for that command. If the command enters the troubleshooting
        queue, the caller gets CommandInTroubleshootingError at once.
        """
        if command_type is None:
            domain, command_type, data = addressed(domain)
        new = NewCommand(
            command_type, data, command_id, correlation_id, max_attempts=max_attempts, headers=headers,
            timeout=timeout, expires=expires, on_exhausted=on_exhausted, priority=priority,
        )  # fmt: skip
        listen_at = partial(address_of, self._database, self.settings, self._lent_pool)
        address = cast(str, domain)  # checked when it is prepared
        begun: list[WaitingCall] = []

        def send(new: NewCommand) -> SentCommand:
            begun.append(self._call(address, new, timeout=new.timeout, wait=wait, conn=conn, listen_at=listen_at))
            return self._send_call(begun[0])

        sent = send(new) if self._chain is None else self._send_one(address, new, send)
        if not begun:  # a middleware has returned the receipt of another command
            return self.wait(sent, wait=wait)
        call = begun[0]
        with call.awaiting(sent) as heard:
            try:
                outcome = heard.result(call.remaining())
            except TimeoutError:
                outcome = None
        if outcome is None:  # the outcome was not notified in time, or the listener does not see the command
            try:
                outcome = self._run(calls.outcomes([sent[:2]]), LAST_LOOK_SECONDS).get(sent.id)
            except (psycopg.OperationalError, DatabaseUnavailableError) as error:
                raise call.timed_out(sent) from error
        return call.conclude(sent, outcome)

    def _send_call(self, call: WaitingCall) -> SentCommand:
        try:
            return self._run(call.send, call.seconds_to_send())
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_absence(error) from None

    def start_process(
        self,
        manager: Manager,
        data: object = None,
        *,
        process_id: str | None = None,
        deadline: Duration | None = None,
        reply_to: str | None = None,
        correlation_id: str | None = None,
        domain: str | None = None,
        conn: object = None,
    ) -> StartedProcess:
        """Start a process, with `conn` in the caller's transaction; `manager` is its manager, or its process_type.

        `process_id` is an idempotency key, like command_id. `deadline` is how long the process may take in all;
        after that it is undone. When it ends, a reply is sent to the queue `reply_to`.
        """
        new = process.NewProcess(data, process_id, deadline, reply_to, correlation_id)
        return self.processes.save(manager, new, domain=domain, conn=conn)

    # --- looking ------------------------------------------------------------------------------------------

    def status(self, *domains: str) -> Page[DomainStatus]:
        """Returns how many commands wait, run or need a person, for these domains or for all."""
        return self.run(then(inspect.domain_status(domains or None), Page))

    def find_id(self, id: str, *, domain: str | None = None) -> Page[FoundId]:  # noqa: A002 - the word that people use
        """Returns all that have this id: commands, batches, processes, workers, and commands with it as their
        correlation_id."""
        return self.run(then(find_id.find_id(id, domain), Page))

    def database_report(self) -> DatabaseReport:
        """Returns what the server says about our tables, open transactions, connections and slow statements."""
        return self.run(report.database_report())

    def workers(self) -> Page[WorkerInfo]:
        """The registry of workers."""
        return self.run(then(inspect.list_workers(), Page))

    # --- operating ----------------------------------------------------------------------------------------

    def pause(
        self,
        domain: str,
        command_type: str | None = None,
        *,
        operator: str | None = None,
        reason: str | None = None,
    ) -> bool:
        """Pause a domain or one of its command types. Returns False if it was paused already."""
        operator_action = operate.operator_action(operator or whoami(), reason)
        return self.run(pause.pause(names.check_domain(domain), command_type, operator_action))

    def resume(
        self,
        domain: str,
        command_type: str | None = None,
        *,
        operator: str | None = None,
        reason: str | None = None,
    ) -> int:
        """Resume a domain or command type. Returns how many parked commands went back to the queue."""
        operator_action = operate.operator_action(operator or whoami(), reason)
        return self.follow(pause.resume(names.check_domain(domain), command_type, operator_action))

    def pauses(self) -> Page[PauseInfo]:
        """What is paused."""
        return self.run(then(pause.list_pauses(), Page))

    def prune(
        self,
        *,
        age: Duration | None = None,
        count: int | None = None,
        portion: int | None = None,
        go_on_from: str | None = None,
        operator: str | None = None,
        reason: str | None = None,
    ) -> PruneReport:
        """Delete finished commands older than `age` or beyond the newest `count` (default: the settings).

        With a `portion` it stops after it has looked at about so many rows (in thousands). Give the report's
        `go_on_from` to go on, until that is None. If a person prunes, name the `operator`: it is
        recorded in the audit, with the `reason` and with what was deleted.
        """
        asked = self._prune(age, count, portion=portion, go_on_from=go_on_from, operator=operator, reason=reason)
        return self.follow(asked)

    def preview_prune(self, *, age: Duration | None = None, count: int | None = None) -> PrunePreview:
        """Returns what `prune` would delete now, in counts that stop at 10,000. Nothing is deleted."""
        return self.run(prune.preview_prune(self._retention(age, count)))
