"""OneTransaction: notices when the handler itself ends the transaction of ctx.transaction().

The writes in the block commit with the command's completion, or not at all. A handler that runs COMMIT or ROLLBACK
in between, in SQL or through an ORM session, breaks that silently. So `commit()`, autocommit, and any statement
after the transaction's end raise where they are called. `rollback()` rolls back, and then the block must end with
an error.

SQL text is not parsed. The first statement's BEGIN is sent together with the transaction's timeouts and a SET
LOCAL of a setting that the server reports to its clients when it changes (`default_transaction_read_only`, which
does not affect a transaction that has begun). While libpq knows the changed value, the transaction is the same.
After its end, even by COMMIT AND CHAIN or `COMMIT; BEGIN` in one text, the server has reported the old value. That
is checked before each statement and at the end, and costs no round trip. After the transaction has failed, the
value says nothing, but then the transaction cannot commit.

If somebody in this process has closed the connection's socket, its number may be another connection's, and libpq
has read that one's answers. Then nothing is known of the transaction, and the attempt is tried again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, Connection, generators
from psycopg.abc import PQGen
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from commandbus.db.descriptors import FileId, file_behind
from commandbus.db.drivers import LostSocketError
from commandbus.errors import TransactionEndedError

AnyKind = Connection[Any] | AsyncConnection[Any]
_SETTING: Final = b"default_transaction_read_only"
_OTHER: Final = {b"on": b"off", b"off": b"on"}
_REPLACED: Final = (
    *("commit", "rollback", "set_autocommit", "transaction"),
    *("_start_query", "_get_tx_start_command"),
)
IDLE: Final = TransactionStatus.IDLE
INTRANS: Final = TransactionStatus.INTRANS


class OneTransaction:
    """Watches a connection from before its transaction begins until the handler's block ends."""

    def __init__(self, command_id: str) -> None:
        self._command_id = command_id
        self._conn: AnyKind | None = None
        self._has_begun = False
        self._mark: bytes | None = None  # what the setting is as long as the transaction lasts
        self._socket: FileId = None
        self._refused: str | None = None
        self._was_rolled_back = False
        self._beginning: Callable[[], Sequence[bytes]] = tuple

    def watch(self, conn: AnyKind, beginning: Callable[[], Sequence[bytes]] = tuple) -> None:
        """The handler has the connection, and has begun nothing. Calling this again begins anew.

        `beginning`: called when the transaction begins; these statements are sent with its BEGIN.
        """
        self.release()
        self._beginning = beginning
        self._has_begun = False
        self._conn = conn
        self._socket = _socket_file(conn)
        own: dict[str, Any] = vars(conn)
        own["_start_query"] = self._start_query
        own["_get_tx_start_command"] = self._start_command
        if isinstance(conn, AsyncConnection):
            own["commit"] = self._commit_async
            own["rollback"] = self._rollback_async
            own["set_autocommit"] = self._set_autocommit_async
            own["transaction"] = self._savepoint_async
        else:
            own["commit"] = self._commit
            own["rollback"] = self._rollback
            own["set_autocommit"] = self._set_autocommit
            own["transaction"] = self._savepoint

    def release(self) -> None:
        """Leave the connection as it was. What was noticed is remembered."""
        if self._conn is not None:
            for name in _REPLACED:
                vars(self._conn).pop(name, None)
            self._conn = None

    @contextmanager
    def judged(self, conn: AnyKind) -> Iterator[None]:
        """The handler's block: raises TransactionEndedError if it has ended the transaction, whatever else it
        raises. A rollback before an error does no harm: the error would roll back anyway."""
        try:
            yield
        except TransactionEndedError:
            raise
        except BaseException as error:
            if self._refused is None and self._has_lost_socket(conn):
                raise
            if self._refused is not None or (not self._was_rolled_back and self._is_over(conn)):
                raise self._error() from error
            raise
        if self._refused is None and self._has_lost_socket(conn):
            raise _lost_socket()
        if self._refused is not None or self._was_rolled_back or self._is_over(conn):
            raise self._error()

    def _is_over(self, conn: AnyKind) -> bool:
        """Has the transaction ended, or another one begun since? By what libpq knows."""
        if conn.autocommit:
            return True
        if not self._has_begun:
            return False
        status = conn.pgconn.transaction_status
        return status == IDLE or (status == INTRANS and self._has_lost_mark(conn))

    def _has_lost_socket(self, conn: AnyKind) -> bool:
        """Has somebody closed it? Asked only where the transaction seems to have ended."""
        return self._is_over(conn) and _socket_file(conn) != self._socket

    def _has_lost_mark(self, conn: AnyKind) -> bool:
        """Not to be asked of a transaction that has failed, or whose connection is lost: the server takes settings
        back when it fails."""
        return self._mark is not None and conn.pgconn.parameter_status(_SETTING) != self._mark

    def _error(self) -> TransactionEndedError:
        how = self._refused or ("rollback()" if self._was_rolled_back else "COMMIT or ROLLBACK")
        return TransactionEndedError(self._command_id, how)

    def _refuse(self, what: str) -> TransactionEndedError:
        self._refused = what
        return self._error()

    # --- in place of the connection's own methods --------------------------------------------------------------

    @property
    def _watched(self) -> Any:
        return self._conn

    def _commit(self) -> None:
        raise self._refuse("commit()")

    def _rollback(self) -> None:
        type(self._watched).rollback(self._watched)
        self._was_rolled_back = True

    def _set_autocommit(self, value: bool) -> None:  # noqa: FBT001 - as psycopg's
        if value:
            raise self._refuse("autocommit")

    @contextmanager
    def _savepoint(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """psycopg's block, inside this transaction. If it came first, its end would be a COMMIT."""
        conn = self._watched
        with conn.lock:
            conn.wait(self._start_query())
        with type(conn).transaction(conn, *args, **kwargs) as block:
            yield block

    async def _commit_async(self) -> None:
        raise self._refuse("commit()")

    async def _rollback_async(self) -> None:
        await type(self._watched).rollback(self._watched)
        self._was_rolled_back = True

    async def _set_autocommit_async(self, value: bool) -> None:  # noqa: FBT001
        if value:
            raise self._refuse("autocommit")

    @asynccontextmanager
    async def _savepoint_async(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        conn = self._watched
        async with conn.lock:
            await conn.wait(self._start_query())
        async with type(conn).transaction(conn, *args, **kwargs) as block:
            yield block

    def _start_query(self) -> PQGen[None]:
        """Begin before the first statement. If that becomes necessary again, the transaction has ended."""
        conn = self._watched
        status = conn.pgconn.transaction_status
        if self._has_begun and self._has_lost_socket(conn):
            raise _lost_socket()
        if status == INTRANS and self._has_lost_mark(conn):
            raise self._refuse("COMMIT or ROLLBACK")
        if conn.autocommit or status != IDLE:
            return
        begin, mark = self._start_command(), self._make_mark(conn)
        statements = [begin, *self._beginning(), *(() if mark is None else (_set_local(mark),))]
        if conn._pipeline:
            for statement in statements:
                yield from conn._exec_command(statement)
            yield from conn._pipeline._sync_gen()
        else:
            raise_first_error((yield from send_together(conn, statements)), conn.pgconn._encoding)
        if mark is not None and conn.pgconn.parameter_status(_SETTING) == mark:  # else a pooler hides it
            self._mark = mark

    def _start_command(self) -> bytes:
        if self._has_begun:
            raise self._error() if self._was_rolled_back else self._refuse("COMMIT or ROLLBACK")
        self._has_begun = True
        command: bytes = type(self._watched)._get_tx_start_command(self._watched)
        return command

    @staticmethod
    def _make_mark(conn: AnyKind) -> bytes | None:
        """The other value than the session has; None if the server does not report it."""
        return _OTHER.get(conn.pgconn.parameter_status(_SETTING) or b"")


def _socket_file(conn: AnyKind) -> FileId:
    """The file behind its socket; None if it is closed."""
    return None if conn.closed else file_behind(conn.pgconn.socket)


def _lost_socket() -> LostSocketError:
    return LostSocketError("somebody in this process has closed the socket of the handler's connection")


def _set_local(mark: bytes) -> bytes:
    return b"SET LOCAL " + _SETTING + b" = " + mark


def send_together(conn: AnyKind, statements: Sequence[bytes]) -> PQGen[list[PGresult]]:
    """Run statements without parameters in one round trip. After one that fails the others are not run."""
    conn._check_connection_ok()
    conn.pgconn.send_query(b"; ".join(statements))
    results: list[PGresult] = yield from generators.execute(conn.pgconn)
    return results


def raise_first_error(results: list[Any], encoding: str) -> None:
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result, encoding=encoding)
