"""A worker by hand: it handles the messages of processes with the real router, and can be interrupted.

`Desk.handle` is what a worker does with one attempt, without its threads: the router in a transaction whose commit
also settles the message. `Interruption` says what happens before which statement: the connection breaks (whatever
was not committed is gone), or somebody else does something at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from commandbus.db.drivers import run
from commandbus.errors import AttemptFencedError, ProcessMovedError
from commandbus.flow.commands.settle import settle
from commandbus.worker.execution.attempt import Attempt

MAX_BYTES = 100_000


class Broken(BaseException):
    """The worker died, or its connection did; nothing may take it for an error of the handler's."""


@dataclass
class Interruption:
    """What happens before the n-th statement of a transaction (the commit is the last one), once."""

    before: int
    what: Callable[[], None] | None = None  # None: the connection breaks

    def statement(self) -> None:
        self.before -= 1
        if self.before == 0:
            if self.what is None:
                raise Broken
            self.what()


class _Cursor(psycopg.Cursor[Any]):
    def execute(self, query: Any, params: Any = None, **options: Any) -> _Cursor:
        interruption = getattr(self.connection, "interruption", None)
        if interruption is not None:
            interruption.statement()
        return super().execute(query, params, **options)


class _Connection(psycopg.Connection[Any]):
    interruption: Interruption | None = None


class Transaction:
    """What the router needs of ctx.transaction()."""

    def __init__(self, connection: _Connection) -> None:
        self.connection = connection
        self.max_bytes = MAX_BYTES


class Context:
    """What the router needs of a handler's context; `moved` counts how often it had to begin again."""

    def __init__(self, connection: _Connection, worker: str, attempt: Attempt) -> None:
        self._connection = connection
        self._worker = worker
        self._attempt = attempt
        self.internal_id = attempt.id
        self.moved = 0

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        conn, attempt = self._connection, self._attempt
        try:
            yield Transaction(conn)
            operation = settle(attempt.domain, self._worker, [attempt.complete(None)], waiting=True)
            if run(conn, operation):
                raise AttemptFencedError("fenced")
            if conn.interruption is not None:
                conn.interruption.statement()
            conn.commit()
        except BaseException as error:
            conn.rollback()
            self.moved += isinstance(error, ProcessMovedError)
            raise

    @contextmanager
    def connection(self) -> Iterator[_Connection]:
        """After the transaction; interruptions are not meant for it."""
        self._connection.interruption = None
        with self._connection.transaction():
            yield self._connection
        self._connection.commit()

    def raise_if_canceled(self) -> None:
        """Nobody asks it to stop."""


class Harness:
    """A connection to handle messages on."""

    def __init__(self, database: str) -> None:
        self.connection = _Connection.connect(database, cursor_factory=_Cursor)

    def handle(
        self, handler: Callable[..., None], worker: str, attempt: Attempt, interruption: Interruption | None = None
    ) -> Context:
        """Handle one message; `Broken` if it was interrupted, or whatever the handler raises."""
        context = Context(self.connection, worker, attempt)
        self.connection.interruption = interruption
        try:
            handler(attempt.command(), context)
        finally:
            self.connection.interruption = None
        return context

    def close(self) -> None:
        self.connection.close()
