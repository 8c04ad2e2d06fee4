"""CommandBus and AsyncCommandBus: what an application holds. Two thin shells over one set of operations.

Each method builds an operation (`flow/`) and runs it on a pooled connection, or on the one that the caller lends
with `conn=`, whose transaction it then is part of. There is no logic here that the two could disagree about.
"""

from __future__ import annotations

import getpass
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from psycopg import AsyncConnection, Connection
from psycopg import errors as pg
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from commandbus.db.borrow import borrow, borrow_async
from commandbus.db.drive import OwnAsyncConnection, OwnConnection, run, run_async
from commandbus.db.pool import check_conninfo, make_async_pool, open_pool
from commandbus.db.resolve import Database
from commandbus.flow import domains, history, inspect, migrate, operate, pause, prune, roles, send
from commandbus.flow.domains import DomainInfo
from commandbus.flow.history import AttemptRecord
from commandbus.flow.inspect import CommandQuery, DomainStatus, Page, RejectedMessage, WorkerInfo
from commandbus.flow.migrate import SchemaState
from commandbus.flow.pause import PauseInfo
from commandbus.flow.prune import PruneReport, Retention
from commandbus.flow.statement import Operation, Plan, explain_absence
from commandbus.model import names
from commandbus.model.command import AuditEntry, CommandRecord, NewCommand, SentCommand
from commandbus.model.durations import parse_seconds
from commandbus.settings import Settings, load_settings

T = TypeVar("T")
CHUNK = 1000
POOL_SIZE = 8


class _Shell:
    """What both shells share: settings, and operations made of arguments."""

    settings: Settings

    def __init__(self, database_url: str | None, settings: Settings | None) -> None:
        if settings is None:
            settings = load_settings({"database_url": database_url})
        elif database_url is not None:
            raise TypeError("give database_url or settings, not both")
        self.settings = settings

    def _send(self, domain: str, new: NewCommand) -> Operation[SentCommand]:
        return send.send(names.check_domain(domain), send.prepare(new, max_bytes=self.settings.max_payload_bytes))

    def _chunks(
        self, domain: str, commands: Iterable[NewCommand | Mapping[str, Any]], size: int
    ) -> Iterator[Operation[list[SentCommand]]]:
        names.check_domain(domain)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"chunk_size must be a whole number of at least 1, not {size!r}")
        limit = self.settings.max_payload_bytes
        outgoing = (send.prepare(send.to_new_command(item), max_bytes=limit) for item in commands)
        while chunk := list(islice(outgoing, size)):
            yield send.send_chunk(domain, chunk)

    def _retention(self, age: float | str | timedelta | None, count: int | None) -> Retention:
        if age is None and count is None:
            return Retention(self.settings.retention_age, self.settings.retention_count)
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
            raise ValueError(f"count must be a whole number of at least 0, not {count!r}")
        return Retention(None if age is None else parse_seconds(age, name="age"), count)


def _command_query(query: CommandQuery | None, filters: dict[str, Any]) -> CommandQuery:
    return query if query is not None else CommandQuery(**filters)


def whoami() -> str:
    """The name of the person at the keyboard, for the audit trail."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


class CommandBus(_Shell):
    """The bus for sync code. Safe to share between threads; close it, or use it as a context manager.

    `CommandBus()` takes its database from the settings (environment, commandbus.toml); `pool=` uses a psycopg
    pool that the application has anyway, and leaves it open.
    """

    def __init__(
        self,
        database_url: str | None = None,
        *,
        pool: ConnectionPool[Any] | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(database_url, settings)
        self._database = Database(self.settings)
        self._lent_pool = pool
        self._own_pool: ConnectionPool[OwnConnection] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what this bus opened."""
        if self._own_pool is not None:
            self._own_pool.close()
            self._own_pool = None
        self._database.close()

    def run(self, operation: Operation[T], conn: object = None) -> T:
        """Run an operation of `commandbus.flow`; on `conn` it joins the caller's transaction."""
        try:
            if conn is not None:
                return run(borrow(conn), operation)
            pool = self._pool
            if pool is self._lent_pool:
                with pool.connection() as lent:
                    return run(lent, operation)
            own = pool.getconn()  # in autocommit mode: there is nothing to commit, the round trip is ours alone
            try:
                return run(own, operation)
            finally:
                pool.putconn(own)
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_absence(error) from None

    def follow(self, plan: Plan[T], conn: object = None) -> T:
        """Run operations one after the other, each a transaction of its own (unless `conn` is lent)."""
        try:
            operation = next(plan)
            while True:
                operation = plan.send(self.run(operation, conn))
        except StopIteration as stop:
            return cast(T, stop.value)

    @property
    def _pool(self) -> ConnectionPool[Any]:
        if self._lent_pool is not None:
            return self._lent_pool
        if self._own_pool is None:
            with self._database.lock:
                if self._own_pool is None:
                    settings = self._database.resolve()
                    size = settings.pool_max_size or POOL_SIZE
                    self._own_pool = open_pool(settings, name="bus", max_size=size)
        return self._own_pool

    def connect(self) -> Connection[tuple[Any, ...]]:
        """A new psycopg connection to the bus's database, for the application's own use; close it."""
        return Connection.connect(check_conninfo(self._database.resolve().database_url))

    # --- set-up -------------------------------------------------------------------------------------------

    def migrate(self, *, domains: Sequence[str] = ()) -> SchemaState:
        """Bring the schema to this release, and create domains; see `flow/migrate.py`."""
        return self.run(migrate.migrate(domains))

    def schema_state(self) -> SchemaState:
        """What the database has and what `migrate` would add."""
        return self.run(migrate.look())

    def create_domain(self, domain: str) -> bool:
        """Create a domain's queue; False if it was there."""
        return self.run(domains.create_domain(names.check_domain(domain)))

    def create_queue(self, queue: str) -> None:
        """Create a PGMQ queue for replies."""
        self.run(domains.create_queue(queue))

    def list_domains(self) -> list[DomainInfo]:
        """All domains."""
        return self.run(domains.list_domains())

    def create_roles(self, prefix: str = "commandbus") -> dict[str, str]:
        """Create and grant the four least-privilege roles."""
        return self.run(roles.create_roles(prefix))

    # --- sending ------------------------------------------------------------------------------------------

    def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        *,
        command_id: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        max_attempts: int | None = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        headers: Mapping[str, Any] | None = None,
        conn: object = None,
    ) -> SentCommand:
        """Send a command; with `conn` in the caller's transaction.

        `command_id` is an idempotency key: the same id with the same content answers the existing command
        (`created=False`), with other content it is DuplicateCommandError.
        """
        new = NewCommand(
            command_type, data, command_id, correlation_id, reply_to, max_attempts, delay, at, headers
        )  # fmt: skip
        return self.run(self._send(domain, new), conn)

    def send_many(
        self,
        domain: str,
        commands: Iterable[NewCommand | Mapping[str, Any]],
        *,
        chunk_size: int = CHUNK,
        conn: object = None,
    ) -> list[SentCommand]:
        """Send many commands, each chunk all or none (all of them all or none with `conn`)."""
        sent: list[SentCommand] = []
        chunks = self._chunks(domain, commands, chunk_size)
        if conn is not None:
            for chunk in chunks:
                receipts = self.run(chunk, conn)
                sent += receipts
            return sent
        with ThreadPoolExecutor(1, "commandbus-send") as sender:
            under_way: Future[list[SentCommand]] | None = None
            for chunk in chunks:  # the next chunk is prepared while the server works on the last one
                sent += under_way.result() if under_way is not None else []
                under_way = sender.submit(self.run, chunk)
            sent += under_way.result() if under_way is not None else []
        return sent

    def cancel(
        self,
        domain: str,
        command_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Cancel a command that nobody is running yet."""
        deed = operate.deed("CANCEL", operator or whoami(), reason)
        self.run(operate.cancel(names.check_domain(domain), command_id, deed), conn)

    # --- looking ------------------------------------------------------------------------------------------

    def get_command(self, domain: str, command_id: str, *, conn: object = None) -> CommandRecord | None:
        """What is known of a command; None if there is none."""
        query = CommandQuery(domain=names.check_domain(domain), command_id=names.to_id(command_id))
        page = self.run(inspect.query_commands(query, limit=1, before_id=None), conn)
        return page.items[0] if page.items else None

    def query_commands(
        self,
        query: CommandQuery | None = None,
        *,
        limit: int = 50,
        before_id: int | None = None,
        **filters: Any,
    ) -> Page:
        """A page of commands, newest first; the next begins at `before_id=page.next_before_id`."""
        return self.run(inspect.query_commands(_command_query(query, filters), limit=limit, before_id=before_id))

    def get_audit_trail(self, domain: str, command_id: str) -> list[AuditEntry]:
        """Every event of a command, in order."""
        return self.run(inspect.get_audit_trail(domain, command_id))

    def get_attempts(self, domain: str, command_id: str) -> list[AttemptRecord]:
        """The attempts that did not simply complete, with error, code and traceback, in order."""
        return self.run(history.list_attempts(domain, command_id))

    def rejected(
        self, domain: str | None = None, *, limit: int = 50, before_id: int | None = None
    ) -> list[RejectedMessage]:
        """Raw messages that were no commands and were moved aside, newest first."""
        return self.run(inspect.list_rejected(domain=domain, limit=limit, before_id=before_id))

    def status(self, *domains: str) -> list[DomainStatus]:
        """Figures of these domains, or of all."""
        return self.run(inspect.domain_status(domains or None))

    def workers(self) -> list[WorkerInfo]:
        """The registry of workers."""
        return self.run(inspect.list_workers())

    # --- operating ----------------------------------------------------------------------------------------

    def pause(
        self,
        domain: str,
        command_type: str | None = None,
        *,
        operator: str | None = None,
        reason: str | None = None,
    ) -> bool:
        """Pause a domain or one of its command types; False if it was."""
        deed = operate.deed("CANCEL", operator or whoami(), reason)
        return self.run(pause.pause(names.check_domain(domain), command_type, deed))

    def resume(self, domain: str, command_type: str | None = None) -> int:
        """Resume; answers how many parked commands went back to the queue."""
        return self.run(pause.resume(names.check_domain(domain), command_type))

    def pauses(self) -> list[PauseInfo]:
        """What is paused."""
        return self.run(pause.list_pauses())

    def prune(self, *, age: float | str | timedelta | None = None, count: int | None = None) -> PruneReport:
        """Forget finished commands older than `age` or beyond the newest `count` (default: the settings)."""
        return self.follow(prune.prune_all(self._retention(age, count)))


class AsyncCommandBus(_Shell):
    """The bus for async code: the same methods, awaited. One bus belongs to one event loop."""

    def __init__(
        self,
        database_url: str | None = None,
        *,
        pool: AsyncConnectionPool[Any] | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(database_url, settings)
        self._database = Database(self.settings)
        self._lent_pool = pool
        self._own_pool: AsyncConnectionPool[OwnAsyncConnection] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close what this bus opened."""
        if self._own_pool is not None:
            await self._own_pool.close()
            self._own_pool = None
        self._database.close()

    async def run(self, operation: Operation[T], conn: object = None) -> T:
        """Run an operation of `commandbus.flow`; on `conn` it joins the caller's transaction."""
        try:
            if conn is not None:
                return await run_async(await borrow_async(conn), operation)
            pool = await self._pool()
            async with pool.connection() as own:
                return await run_async(own, operation)
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_absence(error) from None

    async def follow(self, plan: Plan[T], conn: object = None) -> T:
        """Run operations one after the other, each a transaction of its own (unless `conn` is lent)."""
        try:
            operation = next(plan)
            while True:
                operation = plan.send(await self.run(operation, conn))
        except StopIteration as stop:
            return cast(T, stop.value)

    async def _pool(self) -> AsyncConnectionPool[Any]:
        if self._lent_pool is not None:
            return self._lent_pool
        if self._own_pool is None:
            settings = self._database.resolve()
            self._own_pool = make_async_pool(
                settings, name="bus", max_size=settings.pool_max_size or POOL_SIZE
            )  # assigned before the await: a second task must not make another
            await self._own_pool.open()
        return self._own_pool

    async def connect(self) -> AsyncConnection[tuple[Any, ...]]:
        """A new psycopg connection to the bus's database, for the application's own use; close it."""
        return await AsyncConnection.connect(check_conninfo(self._database.resolve().database_url))

    # --- set-up -------------------------------------------------------------------------------------------

    async def migrate(self, *, domains: Sequence[str] = ()) -> SchemaState:
        """Bring the schema to this release, and create domains; see `flow/migrate.py`."""
        return await self.run(migrate.migrate(domains))

    async def schema_state(self) -> SchemaState:
        """What the database has and what `migrate` would add."""
        return await self.run(migrate.look())

    async def create_domain(self, domain: str) -> bool:
        """Create a domain's queue; False if it was there."""
        return await self.run(domains.create_domain(names.check_domain(domain)))

    async def create_queue(self, queue: str) -> None:
        """Create a PGMQ queue for replies."""
        await self.run(domains.create_queue(queue))

    async def list_domains(self) -> list[DomainInfo]:
        """All domains."""
        return await self.run(domains.list_domains())

    async def create_roles(self, prefix: str = "commandbus") -> dict[str, str]:
        """Create and grant the four least-privilege roles."""
        return await self.run(roles.create_roles(prefix))

    # --- sending ------------------------------------------------------------------------------------------

    async def send(
        self,
        domain: str,
        command_type: str,
        data: Any = None,
        *,
        command_id: str | None = None,
        correlation_id: str | None = None,
        reply_to: str | None = None,
        max_attempts: int | None = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        headers: Mapping[str, Any] | None = None,
        conn: object = None,
    ) -> SentCommand:
        """Send a command; see CommandBus.send."""
        new = NewCommand(
            command_type, data, command_id, correlation_id, reply_to, max_attempts, delay, at, headers
        )  # fmt: skip
        return await self.run(self._send(domain, new), conn)

    async def send_many(
        self,
        domain: str,
        commands: Iterable[NewCommand | Mapping[str, Any]],
        *,
        chunk_size: int = CHUNK,
        conn: object = None,
    ) -> list[SentCommand]:
        """Send many commands; see CommandBus.send_many."""
        sent: list[SentCommand] = []
        for chunk in self._chunks(domain, commands, chunk_size):
            receipts = await self.run(chunk, conn)
            sent += receipts
        return sent

    async def cancel(
        self,
        domain: str,
        command_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Cancel a command that nobody is running yet."""
        deed = operate.deed("CANCEL", operator or whoami(), reason)
        await self.run(operate.cancel(names.check_domain(domain), command_id, deed), conn)

    # --- looking ------------------------------------------------------------------------------------------

    async def get_command(self, domain: str, command_id: str, *, conn: object = None) -> CommandRecord | None:
        """What is known of a command; None if there is none."""
        query = CommandQuery(domain=names.check_domain(domain), command_id=names.to_id(command_id))
        page = await self.run(inspect.query_commands(query, limit=1, before_id=None), conn)
        return page.items[0] if page.items else None

    async def query_commands(
        self,
        query: CommandQuery | None = None,
        *,
        limit: int = 50,
        before_id: int | None = None,
        **filters: Any,
    ) -> Page:
        """A page of commands, newest first; the next begins at `before_id=page.next_before_id`."""
        return await self.run(
            inspect.query_commands(_command_query(query, filters), limit=limit, before_id=before_id)
        )

    async def get_audit_trail(self, domain: str, command_id: str) -> list[AuditEntry]:
        """Every event of a command, in order."""
        return await self.run(inspect.get_audit_trail(domain, command_id))

    async def get_attempts(self, domain: str, command_id: str) -> list[AttemptRecord]:
        """The attempts that did not simply complete, with error, code and traceback, in order."""
        return await self.run(history.list_attempts(domain, command_id))

    async def rejected(
        self, domain: str | None = None, *, limit: int = 50, before_id: int | None = None
    ) -> list[RejectedMessage]:
        """Raw messages that were no commands and were moved aside, newest first."""
        return await self.run(inspect.list_rejected(domain=domain, limit=limit, before_id=before_id))

    async def status(self, *domains: str) -> list[DomainStatus]:
        """Figures of these domains, or of all."""
        return await self.run(inspect.domain_status(domains or None))

    async def workers(self) -> list[WorkerInfo]:
        """The registry of workers."""
        return await self.run(inspect.list_workers())

    # --- operating ----------------------------------------------------------------------------------------

    async def pause(
        self,
        domain: str,
        command_type: str | None = None,
        *,
        operator: str | None = None,
        reason: str | None = None,
    ) -> bool:
        """Pause a domain or one of its command types; False if it was."""
        deed = operate.deed("CANCEL", operator or whoami(), reason)
        return await self.run(pause.pause(names.check_domain(domain), command_type, deed))

    async def resume(self, domain: str, command_type: str | None = None) -> int:
        """Resume; answers how many parked commands went back to the queue."""
        return await self.run(pause.resume(names.check_domain(domain), command_type))

    async def pauses(self) -> list[PauseInfo]:
        """What is paused."""
        return await self.run(pause.list_pauses())

    async def prune(self, *, age: float | str | timedelta | None = None, count: int | None = None) -> PruneReport:
        """Forget finished commands older than `age` or beyond the newest `count` (default: the settings)."""
        return await self.follow(prune.prune_all(self._retention(age, count)))
