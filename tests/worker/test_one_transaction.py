"""ctx.transaction() is one transaction: a handler that ends it itself is found out, and is not tried again."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import Connection, Transaction

from commandbus import CommandBus, HandlerRegistry, TransactionEndedError, Worker
from support.waiting import one, until_settled, verdicts
from support.workers import AT_ONCE, add, done, either

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]
INSERT = "INSERT INTO ledger VALUES (%s)"
TSQ = "IN_TROUBLESHOOTING_QUEUE"


@pytest.fixture(autouse=True)
def ledger(db: Db) -> None:
    """A table of the application's own."""
    db.execute("CREATE TABLE ledger (what text)")


class Lab:
    """Runs one body as the handler of one command, in either lane."""

    def __init__(
        self, bus: CommandBus, db: Db, start: StartWorker, lane: str, *, session: str = "fresh session"
    ) -> None:
        self._bus, self.db, self._start, self.lane, self._session = bus, db, start, lane, session

    def run(self, body: Any, *, options: dict[str, Any] | None = None, **changes: Any) -> None:
        handlers = HandlerRegistry()

        async def work(command: Any, ctx: Any) -> None:
            async with either(ctx.transaction(**(options or {}))) as tx:
                await body(tx)

        async def before(command: Any, ctx: Any) -> None:
            async with either(ctx.connection()):
                pass

        add(handlers, self.lane, "work", work)
        add(handlers, self.lane, "before", before)
        if self._session == "known session":
            changes["concurrency"] = 1
            self._start(handlers, retry_policy=AT_ONCE, **changes)
            self._bus.send("orders", "before")
            until_settled(self.db)
            self.db.execute("DELETE FROM commandbus.command")
            self._bus.send("orders", "work", command_id="c")
        else:
            self._bus.send("orders", "work", command_id="c")
            self._start(handlers, retry_policy=AT_ONCE, **changes)
        until_settled(self.db)

    @property
    def written(self) -> list[str]:
        return [what for (what,) in self.db.execute("SELECT what FROM ledger ORDER BY 1")]

    @property
    def status(self) -> str:
        return str(one(self.db, "SELECT status::text FROM commandbus.command"))

    def assert_refused(self, *, written: list[str], how: str) -> None:
        """One attempt, and a person must look."""
        assert (self.status, verdicts(self.db, "c")) == (TSQ, [(1, "PERMANENT")])
        (attempt,) = self._bus.get_attempts("orders", "c")
        assert (attempt.error_type, attempt.error_code) == ("TransactionEndedError", "TRANSACTION_ENDED")
        assert f"has ended the transaction of ctx.transaction() with {how}" in (attempt.error or "")
        assert self.written == written


@pytest.fixture(params=["fresh session", "known session"])
def lab(bus: CommandBus, db: Db, start_worker: StartWorker, lane: str, request: pytest.FixtureRequest) -> Lab:
    """On a session that has served a handler, limits are sent with BEGIN and the reset with COMMIT."""
    return Lab(bus, db, start_worker, lane, session=request.param)


@pytest.mark.parametrize(
    "text",
    ["COMMIT", "END", "ROLLBACK", "COMMIT AND CHAIN", "ROLLBACK AND CHAIN", "COMMIT; BEGIN", "  commit ; -- ok"],
)
@pytest.mark.parametrize("writes_on", [False, True], ids=["last", "goes-on"])
def test_an_end_in_sql_is_noticed(lab: Lab, text: str, writes_on: bool) -> None:
    """What was committed then is committed. What comes after it is not, and nothing is tried again."""

    async def body(tx: Any) -> None:
        await done(tx.execute(INSERT, ("before",)))
        await done(tx.execute(text))
        if writes_on:
            await done(tx.execute(INSERT, ("after",)))

    lab.run(body)
    committed = "before" if "ROLLBACK" not in text else None
    lab.assert_refused(written=[committed] if committed else [], how="COMMIT or ROLLBACK")


@pytest.mark.parametrize("lane", ["sync"])  # an event loop does not hear the answers of the other connection
def test_a_socket_that_became_another_sessions_is_no_end(lab: Lab, database: str) -> None:
    """Somebody closes the handler's socket, and another connection gets its number. libpq reads that one's
    answers: no transaction is open. The handler did not end it, and is tried again."""
    attempts = 0

    async def body(tx: Any) -> None:
        nonlocal attempts
        attempts += 1
        await done(tx.execute(INSERT, (f"attempt {attempts}",)))
        if attempts == 1:
            with psycopg.connect(database, autocommit=True) as other:
                os.dup2(other.fileno(), tx.connection.fileno())
                await done(tx.execute("SELECT 1"))
            await done(tx.execute(INSERT, ("in the wrong session",)))

    lab.run(body)
    assert (lab.status, attempts) == ("COMPLETED", 2)
    assert lab.written == ["attempt 2"]


def test_a_statement_after_the_end_is_refused_at_once(lab: Lab) -> None:
    seen: list[BaseException] = []

    async def body(tx: Any) -> None:
        await done(tx.execute(INSERT, ("before",)))
        await done(tx.execute("ROLLBACK"))
        try:
            await done(tx.execute(INSERT, ("after",)))
        except TransactionEndedError as error:
            seen.append(error)
            raise

    lab.run(body)
    assert seen
    lab.assert_refused(written=[], how="COMMIT or ROLLBACK")


@pytest.mark.parametrize("on", [lambda tx: tx, lambda tx: tx.connection], ids=["tx", "connection"])
def test_commit_is_refused_where_it_is_called_and_commits_nothing(lab: Lab, on: Callable[[Any], Any]) -> None:
    async def body(tx: Any) -> None:
        await done(tx.execute(INSERT, ("before",)))
        await done(on(tx).commit())

    lab.run(body)
    lab.assert_refused(written=[], how="commit()")


def test_a_refusal_that_is_swallowed_is_not_forgotten(lab: Lab) -> None:
    async def body(tx: Any) -> None:
        await done(tx.execute(INSERT, ("before",)))
        with contextlib.suppress(Exception):
            await done(tx.connection.commit())
        raise LookupError("would be tried again")

    lab.run(body)
    lab.assert_refused(written=[], how="commit()")


def test_a_rollback_may_only_be_followed_by_an_error(lab: Lab) -> None:
    async def body(tx: Any) -> None:
        await done(tx.execute(INSERT, ("before",)))
        await done(tx.connection.rollback())

    lab.run(body)
    lab.assert_refused(written=[], how="rollback()")


def test_a_rollback_before_an_error_changes_nothing(lab: Lab) -> None:
    """As an ORM's session does it when it is left with an error: the error counts, and is tried again."""
    tries: list[int] = []

    async def body(tx: Any) -> None:
        tries.append(1)
        await done(tx.execute(INSERT, (str(len(tries)),)))
        if len(tries) < 3:
            await done(tx.connection.rollback())
            raise LookupError("not yet")

    lab.run(body)
    assert (lab.status, lab.written) == ("COMPLETED", ["3"])
    assert verdicts(lab.db, "c") == [(1, "RETRY"), (2, "RETRY")]


def test_a_commit_before_an_error_is_not_tried_again(lab: Lab) -> None:
    async def body(tx: Any) -> None:
        await done(tx.execute(INSERT, ("before",)))
        await done(tx.execute("COMMIT"))
        raise LookupError("would be tried again, and write twice")

    lab.run(body)
    lab.assert_refused(written=["before"], how="COMMIT or ROLLBACK")


@pytest.mark.parametrize("text", ["COMMIT", "COMMIT AND CHAIN", "COMMIT; BEGIN"])
def test_a_commit_before_a_statement_that_fails_is_not_tried_again(lab: Lab, text: str) -> None:
    """In a transaction that has failed nothing can be seen of that any more: it is noticed before."""

    async def body(tx: Any) -> None:
        await done(tx.execute(INSERT, ("before",)))
        await done(tx.execute(text))
        await done(tx.execute("SELECT 1 / 0"))

    lab.run(body)
    lab.assert_refused(written=["before"], how="COMMIT or ROLLBACK")


@pytest.mark.parametrize("ends", [False, True], ids=["fails", "loses-its-session"])
def test_a_statement_that_fails_is_what_it_is(lab: Lab, ends: bool) -> None:
    """The server takes settings back when a transaction fails. That is no COMMIT."""
    tries: list[int] = []

    async def body(tx: Any) -> None:
        tries.append(1)
        await done(tx.execute(INSERT, (str(len(tries)),)))
        if len(tries) == 1:
            with contextlib.suppress(psycopg.errors.DivisionByZero):
                await done(tx.execute("SELECT 1 / 0"))
            if ends:
                lab.db.execute("SELECT pg_terminate_backend(%s, 5000)", (tx.connection.info.backend_pid,))
            await done(tx.execute("SELECT 1"))

    lab.run(body)
    assert (lab.status, lab.written) == ("COMPLETED", ["2"])
    assert verdicts(lab.db, "c") == [(1, "RETRY")]


@pytest.mark.parametrize("when", ["first", "after-commit"])
def test_autocommit_is_refused(lab: Lab, when: str) -> None:
    async def body(tx: Any) -> None:
        if when == "after-commit":
            await done(tx.execute("COMMIT"))
        with contextlib.suppress(TransactionEndedError):
            await done(tx.connection.set_autocommit(True))
        await done(tx.execute(INSERT, ("by itself",)))

    lab.run(body)
    assert lab.status == TSQ
    assert lab.written == []


def test_autocommit_behind_our_back_is_noticed(lab: Lab) -> None:
    async def body(tx: Any) -> None:
        await done(type(tx.connection).set_autocommit(tx.connection, True))
        await done(tx.execute("BEGIN"))
        await done(tx.execute(INSERT, ("in its own",)))

    lab.run(body)
    lab.assert_refused(written=[], how="COMMIT or ROLLBACK")


def test_savepoints_are_fine(lab: Lab) -> None:
    async def body(tx: Any) -> None:
        async with either(tx.connection.transaction()):  # the first statement: alone it would commit at its end
            await done(tx.execute(INSERT, ("first",)))
        with contextlib.suppress(LookupError):
            async with either(tx.connection.transaction()):
                await done(tx.execute(INSERT, ("rolled back",)))
                raise LookupError
        async with either(tx.connection.transaction("mine")), either(tx.connection.transaction()):
            await done(tx.execute(INSERT, ("nested",)))
        await done(tx.execute("SAVEPOINT own"))
        await done(tx.execute(INSERT, ("undone",)))
        await done(tx.execute("ROLLBACK TO own"))
        await done(tx.execute("RELEASE own"))

    lab.run(body)
    assert (lab.status, lab.written) == ("COMPLETED", ["first", "nested"])


def test_a_savepoint_as_the_first_statement_goes_with_the_rest(lab: Lab) -> None:
    """psycopg commits a block that is the outermost one. In ctx.transaction() none is."""
    tries: list[int] = []

    async def body(tx: Any) -> None:
        tries.append(1)
        async with either(tx.connection.transaction()):
            await done(tx.execute(INSERT, (str(len(tries)),)))
        if len(tries) < 3:
            raise LookupError("not yet")

    lab.run(body)
    assert (lab.status, lab.written) == ("COMPLETED", ["3"])


def test_psycopgs_own_transaction_is_noticed(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    lab = Lab(bus, db, start_worker, "sync")

    async def body(tx: Any) -> None:
        with Transaction(tx.connection):
            tx.execute(INSERT, ("committed",))

    lab.run(body)
    lab.assert_refused(written=["committed"], how="COMMIT or ROLLBACK")


@pytest.mark.parametrize("level", [None, "read committed", "repeatable read", "serializable"])
def test_what_is_allowed(lab: Lab, level: str | None) -> None:
    """Settings, cursors, pipelines, failed statements in savepoints, other row factories; at every level."""

    async def body(tx: Any) -> None:
        conn = tx.connection
        if not conn.autocommit:
            await done(conn.set_autocommit(False))  # nothing changes
        async with either(conn.pipeline()):
            await done(tx.execute(INSERT, ("piped",)))
        await done(tx.execute("SET LOCAL statement_timeout = '5s'"))
        async with either(conn.cursor("named")) as cursor:
            await done(cursor.execute("SELECT generate_series(1, 3)"))
            assert len(await done(cursor.fetchall())) == 3
        async with either(conn.cursor()) as cursor:
            await done(cursor.executemany(INSERT, [("many",), ("more",)]))
            async with either(cursor.copy("COPY ledger FROM STDIN")) as copy:
                await done(copy.write_row(("copied",)))
        with contextlib.suppress(psycopg.errors.DivisionByZero):
            async with either(conn.transaction()):
                await done(tx.execute("SELECT 1 / 0"))

    lab.run(body, options={"isolation": level})
    assert (lab.status, lab.written) == ("COMPLETED", ["copied", "many", "more", "piped"])


def test_a_slow_start_is_not_idle_in_transaction(lab: Lab) -> None:
    """The transaction begins with the first statement: a handler that waits for others before it may."""
    states: list[str] = []

    async def body(tx: Any) -> None:
        states.append(tx.connection.info.transaction_status.name)
        await done(tx.execute(INSERT, ("late",)))
        states.append(tx.connection.info.transaction_status.name)

    lab.run(body)
    assert states == ["IDLE", "INTRANS"]
    assert (lab.status, lab.written) == ("COMPLETED", ["late"])


def test_it_costs_no_round_trip(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, tmp_path: Path
) -> None:
    """libpq's own trace says how often the server has answered: for BEGIN and for the statement, as ever."""
    counts: dict[str, int] = {}

    def count(name: str, conn: Connection[Any]) -> None:
        with open(tmp_path / name, "w+b") as file:
            conn.pgconn.trace(file.fileno())
            conn.execute("SELECT 1")
            conn.pgconn.untrace()
            file.seek(0)
            counts[name] = file.read().count(b"ReadyForQuery")

    @handlers.handler("orders", "work")
    def work(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            count("plain", conn)
        with ctx.transaction() as tx:
            count("transaction", tx.connection)

    start_worker(handlers, concurrency=1)
    bus.send("orders", "work")
    until_settled(db)
    assert counts == {"plain": 2, "transaction": 2}


def test_an_orm_session_that_commits(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    from sqlalchemy.orm import Session
    from sqlalchemy.pool import StaticPool

    lab, engines = Lab(bus, db, start_worker, "sync"), []

    async def body(tx: Any) -> None:
        tx.execute(INSERT, ("before",))
        engine = sqlalchemy.create_engine(
            "postgresql+psycopg://", creator=lambda: tx.connection, poolclass=StaticPool
        )
        engines.append(engine)
        session = Session(engine)
        session.execute(sqlalchemy.text("INSERT INTO ledger VALUES ('by the session')"))
        session.commit()

    lab.run(body)
    assert (lab.status, verdicts(lab.db, "c")) == (TSQ, [(1, "PERMANENT")])
    (attempt,) = bus.get_attempts("orders", "c")
    assert attempt.error_code == "TRANSACTION_ENDED"
    assert lab.written == []
    engines[0].dispose(close=False)  # its connection was the handler's


def test_the_connection_goes_back_as_it_was(bus: CommandBus, db: Db, start_worker: StartWorker) -> None:
    """The next handler's connection commits, and its methods are psycopg's own."""
    handlers, seen = HandlerRegistry(), []

    @handlers.handler("orders", "work")
    def work(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.execute(INSERT, ("in one",))

    @handlers.handler("orders", "look")
    def look(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            seen.append([inspect.ismethod(conn.commit) and conn.commit.__self__ is conn, conn.autocommit])
            seen.append(conn.execute("SHOW default_transaction_read_only").fetchone())
            conn.execute(INSERT, ("alone",))
            conn.commit()

    start_worker(handlers, concurrency=1)
    for kind in ("work", "look"):
        bus.send("orders", kind)
        until_settled(db)
    assert seen == [[True, False], ("off",)]
    assert [what for (what,) in db.execute("SELECT what FROM ledger ORDER BY 1")] == ["alone", "in one"]


def test_a_handler_with_one_statement_costs_four_round_trips(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, tmp_path: Path, lane: str
) -> None:
    """BEGIN with the limits, the statement, the settlement, COMMIT with what resets the session."""
    with open(tmp_path / "trace", "w+b") as file:

        async def work(command: Any, ctx: Any) -> None:
            async with either(ctx.transaction()) as tx:
                tx.connection.pgconn.untrace()
                tx.connection.pgconn.trace(file.fileno())
                await done(tx.execute(INSERT, (command.command_id,)))

        add(handlers, lane, "work", work)
        start_worker(handlers, concurrency=1)
        for number in range(8):
            if number == 7:  # the session is known, and what psycopg prepares is prepared
                file.truncate(0)
            bus.send("orders", "work", command_id=str(number))
            until_settled(db)
        file.seek(0)
        asked = re.findall(rb"\tF\t\d+\t(Sync|Query\t \"[A-Z]+)", file.read())
    assert [what for what in asked if b"DISCARD" not in what] == [
        b'Query\t "BEGIN', b"Sync", b"Sync", b'Query\t "COMMIT',
    ]  # fmt: skip


def test_limits_hold_in_a_known_session(lab: Lab) -> None:
    """Also if the first statement is in a pipeline, and until the attempt is stuck at the latest."""
    seen: list[list[str]] = []
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    ask = "SELECT current_setting(%s), current_setting(%s), current_setting(%s)"

    async def body(tx: Any) -> None:
        async with either(tx.connection.pipeline()):
            cursor = await done(tx.execute(ask, names))
        seen.append(list(await done(cursor.fetchone())))

    lab.run(body, statement_timeout=7.0)
    assert (lab.status, seen) == ("COMPLETED", [["7s", "5600ms", "7s"]])


def test_a_commit_that_fails_leaves_a_session_that_works(lab: Lab) -> None:
    """What is refused at COMMIT is not written, and the next attempt has a session as ever."""
    lab.db.execute(
        "CREATE TABLE paid (what text UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO paid VALUES ('twice')"
    )
    tries: list[tuple[Any, ...]] = []

    async def body(tx: Any) -> None:
        cursor = await done(tx.execute("SELECT coalesce(current_setting('app.tenant', true), '')"))
        tries.append(await done(cursor.fetchone()))
        await done(tx.execute("SET app.tenant = 'acme'"))
        await done(tx.execute("INSERT INTO paid VALUES (%s)", ("twice" if len(tries) == 1 else "once",)))

    lab.run(body)
    assert (lab.status, tries) == ("COMPLETED", [("",), ("",)])
    assert verdicts(lab.db, "c") == [(1, "RETRY")]
    assert lab.db.execute("SELECT what FROM paid ORDER BY 1").fetchall() == [("once",), ("twice",)]
