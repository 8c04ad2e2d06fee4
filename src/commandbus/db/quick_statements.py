"""Statements that run without a cursor, which takes 25 of the 70 µs that a send costs its client.

psycopg's cursor converts each parameter by its type, looks up whether the statement is prepared, and makes objects
for the result. A statement whose parameters are texts needs nothing of that. It is prepared when it is run for the
third time, as psycopg would do.

A prepared statement is named by its text. Behind a pooler a session may have been another client's before: what
it has prepared under the same name is the same statement.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from psycopg import errors, generators
from psycopg.abc import PQGen
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

if TYPE_CHECKING:
    from commandbus.db.drivers import OwnAsyncConnection, OwnConnection

USES_BEFORE: Final = 2
MOST: Final = 100
"""A session has no more of them. psycopg prepares as many."""


class QuickStatements:
    """The quick statements of one connection, which is in autocommit mode. Nobody but us may run statements on it,
    so what was prepared stays, until psycopg drops everything that is prepared (after a ROLLBACK, for example)."""

    def __init__(self, conn: OwnConnection | OwnAsyncConnection) -> None:
        encoding = conn.info.encoding
        self._encoding = "utf-8" if encoding == "ascii" else encoding  # as psycopg writes text
        self._pgconn = conn.pgconn
        self._uses: Counter[bytes] = Counter()
        self._names: dict[bytes, bytes] = {}

    def steps(self, statement: Any) -> PQGen[list[tuple[bytes | None, ...]]] | None:
        """What the connection must wait for. Returns None if a cursor must run the statement: in a transaction, a
        statement that psycopg has dropped could not be tried again."""
        if self._pgconn.transaction_status != TransactionStatus.IDLE:
            return None
        name = self._names.get(statement.sql)
        if name is None:
            self._uses[statement.sql] += 1
            if self._uses[statement.sql] <= USES_BEFORE or len(self._names) >= MOST:
                return None
        return self._run(name, statement)

    def _run(self, name: bytes | None, statement: Any) -> PQGen[list[tuple[bytes | None, ...]]]:
        if name is None:
            name = _name(statement.sql)
            self._pgconn.send_prepare(name, _numbered(statement.sql))
            with suppress(errors.DuplicatePreparedStatement):
                yield from self._result()
            self._names[statement.sql] = name
        params = [text.encode(self._encoding) for text in statement.params]
        self._pgconn.send_query_prepared(name, params)
        try:
            result = yield from self._result()
        except errors.InvalidSqlStatementName:
            # psycopg has dropped all that was prepared, or a pooler gave us another session; nothing was done
            self._names.clear()
            self._pgconn.send_query_params(_numbered(statement.sql), params)
            result = yield from self._result()
        columns = range(result.nfields)
        return [tuple([result.get_value(row, column) for column in columns]) for row in range(result.ntuples)]

    def _result(self) -> PQGen[PGresult]:
        results: list[PGresult] = yield from generators.execute(self._pgconn)
        for result in results:
            if result.status not in {ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK}:
                raise errors.error_from_result(result, encoding=self._encoding)
        return results[-1]


@lru_cache(maxsize=1024)
def _name(statement: bytes) -> bytes:
    return b"commandbus_" + sha256(statement).hexdigest()[:32].encode()


@lru_cache(maxsize=1024)
def _numbered(statement: bytes) -> bytes:
    """The text of a statement with the server's own placeholders."""
    first, *rest = statement.split(b"%s")
    return first + b"".join(b"$%d%s" % (number, part) for number, part in enumerate(rest, 1))
