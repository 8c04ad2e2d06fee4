"""A stranger who may create in a schema of the search path gains nothing: we never call what it puts there.

On PostgreSQL 14, and on servers that were upgraded from there, every login may create in `public`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from pglast import ast, parse_sql
from pglast.visitors import Visitor
from psycopg import sql as pgsql

from commandbus import (
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    Limit,
    NewCommand,
    OnComplete,
    PermanentCommandError,
    ProcessStatus,
    Saga,
    TroubleshootingQueue,
    Worker,
    step,
)
from commandbus.db.service_connection import LastingConnection
from commandbus.model.roles import KINDS
from commandbus.sql import migrations
from support import shadows, statements
from support.waiting import until
from support.workers import quick_settings

ORDER = Saga("order", step("reserve", "orders", undo="release"), step("charge", "orders"))
PGMQS = {"format", "lower", "length", "to_regclass", "pg_advisory_xact_lock", "quote_ident", "quote_literal"}


class Calls(Visitor):
    """The names of the functions and operators of all statements."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[str] = set(PGMQS)
        self.operators: set[str] = {"=", "<>", "<", "<=", ">", ">="}
        for found in statements.statements():
            self(parse_sql(found.text))

    def visit_FuncCall(self, _: Any, node: ast.FuncCall) -> None:  # noqa: N802
        self.functions.add(node.funcname[-1].sval)

    def visit_A_Expr(self, _: Any, node: ast.A_Expr) -> None:  # noqa: N802
        self.operators.add(node.name[-1].sval)


@pytest.fixture
def admin(database: str) -> Iterator[psycopg.Connection[Any]]:
    """The superuser's connection; what it asks must not meet the shadows either."""
    with psycopg.connect(database, autocommit=True, options="-c search_path=pg_catalog") as conn:
        yield conn


@pytest.fixture
def roles(database: str, admin: psycopg.Connection[Any]) -> Iterator[str]:
    """The prefix of the four roles, in a database with two domains and a queue; they are gone after the test."""
    prefix = f"r_{database.rsplit('/', 1)[1]}"
    with CommandBus(database) as bus:
        for domain in ("orders", "processes"):
            bus.create_domain(domain)
        bus.create_queue("answers")
        bus.create_roles(prefix)
    yield prefix
    found = admin.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE %s", [prefix + "%"])
    for (role,) in found.fetchall():
        admin.execute(pgsql.SQL("DROP OWNED BY {}").format(pgsql.Identifier(role)))
        admin.execute(pgsql.SQL("DROP ROLE {}").format(pgsql.Identifier(role)))


@pytest.fixture
def app(database: str, admin: psycopg.Connection[Any], roles: str) -> str:
    """The address for a login that may do whatever the four roles may, and has `public` in its search path."""
    user = f"{roles}_app"
    kinds = ", ".join(f"{roles}_{kind}" for kind in KINDS)
    admin.execute(f"CREATE ROLE {user} LOGIN IN ROLE {kinds}".encode())
    return database.replace("//postgres@", f"//{user}@", 1)


@pytest.fixture
def shadowed(app: str, admin: psycopg.Connection[Any]) -> str:
    """The same beside a shadow of everything that our statements call."""
    calls = Calls()
    assert len(calls.functions) > 60
    shadows.make_shadows(admin, functions=calls.functions, operators=calls.operators)
    return app


def _public_may_create(admin: psycopg.Connection[Any], role: str) -> None:
    """As on PostgreSQL 14."""
    admin.execute(pgsql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(pgsql.Identifier(role)))


def test_a_reader_does_not_become_superuser(database: str, admin: psycopg.Connection[Any], roles: str) -> None:
    """It waits until the database's owner sends something."""
    reader = f"{roles}_evil"
    admin.execute(f"CREATE ROLE {reader} LOGIN IN ROLE {roles}_reader".encode())
    _public_may_create(admin, reader)
    with psycopg.connect(database.replace("//postgres@", f"//{reader}@", 1), autocommit=True) as conn:
        conn.execute(
            f"CREATE FUNCTION public.jsonb_build_object(text, bigint) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN "
            f"ALTER ROLE {reader} SUPERUSER; RETURN pg_catalog.jsonb_build_object($1, $2); END $$".encode()
        )
    with CommandBus(database) as bus, psycopg.connect(database) as lent:
        bus.send("orders", "Ship")
        bus.send_many("orders", [NewCommand("Ship")])
        bus.send("orders", "Ship", conn=lent)
    assert admin.execute("SELECT rolsuper FROM pg_roles WHERE rolname = %s", [reader]).fetchone() == (False,)


def _check_that_they_bite(shadowed: str, admin: psycopg.Connection[Any]) -> None:
    """Otherwise that none was called would show nothing."""
    for unqualified in (
        "SELECT jsonb_build_object('command', 1::bigint)",
        "SELECT '[5]'::jsonb -> '0'",
        "SELECT 'PENDING'::commandbus.command_status = 'PENDING'",
        "SELECT 1.5::float8 * 60",
    ):
        with psycopg.connect(shadowed) as conn, contextlib.suppress(psycopg.DatabaseError):
            conn.execute(unqualified.encode())
        assert shadows.was_called(admin), unqualified
        admin.execute("SELECT setval('public.called', 1, false)")


@pytest.mark.slow
def test_a_life_beside_shadows(shadowed: str, admin: psycopg.Connection[Any]) -> None:
    """As behind PgBouncer, so that the worker's own threads, too, have `public` in their search path."""
    settings = quick_settings(shadowed, prepared_statements=False, breakers_enabled=True)
    with CommandBus(settings=settings) as bus:
        with Worker(_handlers(bus), settings=settings):
            _commands(bus, shadowed)
            _batches(bus)
            _processes(bus)
            _limits(bus)
        _operations(bus)
        _inspection(bus)
        assert bus.prune(age=0).commands > 0
    assert not shadows.was_called(admin)


def test_setting_up_beside_shadows(database: str, shadowed: str, admin: psycopg.Connection[Any]) -> None:
    """PGMQ's functions call others by their bare names; a path of their own keeps these harmless."""
    _check_that_they_bite(shadowed, admin)
    with CommandBus(database) as bus:
        bus.create_domain("late")
        bus.create_queue("late_answers")
        admin.execute("DROP SCHEMA commandbus CASCADE")
        assert bus.migrate(domains=["later"]).missing == tuple(migrations())
    assert not shadows.was_called(admin)


def test_sessions_of_own_threads_have_no_other_schema(app: str) -> None:
    for options in ("", "?options=-csearch_path%3Dapp"):
        connection = LastingConnection(quick_settings(app + options), name="test")
        try:
            assert connection.conn.execute("SHOW search_path").fetchone() == ("pg_catalog,pg_temp",)
        finally:
            connection.close()


def test_the_sessions_of_handlers_keep_theirs(app: str) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "look")
    def look(command: Any, ctx: Any) -> Any:
        with ctx.transaction() as tx:
            tx.complete(tx.execute("SHOW search_path").fetchone()[0])

    with CommandBus(app) as bus, Worker(handlers, settings=quick_settings(app)):
        assert bus.call("orders", "look", wait=20) == '"$user", public'


def _handlers(bus: CommandBus) -> HandlerRegistry:
    handlers = HandlerRegistry()
    handlers.register_process(ORDER)

    @handlers.handler("orders", "plain")
    def plain(command: Any, ctx: Any) -> Any:
        return command.data

    @handlers.handler("orders", "together")
    def together(command: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            bus.send("orders", "plain", command_id=f"{command.command_id}-next", conn=tx)

    @handlers.handler("orders", "twice")
    def twice(command: Any, ctx: Any) -> None:
        if ctx.attempt == 1:
            raise ValueError("once more")

    @handlers.handler("orders", "never")
    def never(command: Any, ctx: Any) -> None:
        raise PermanentCommandError("no")

    @handlers.handler("orders", "long")
    def long(command: Any, ctx: Any) -> None:
        ctx.heartbeat({"page": 1})
        while not ctx.canceled.wait(0.02):
            pass
        ctx.raise_if_canceled()

    @handlers.handler("orders", "limited", limits=[Limit("docai", concurrency=1, rate="50/s")])
    def limited(command: Any, ctx: Any) -> None:
        with ctx.limit("vision"):
            pass

    for name in ("reserve", "release", "charge"):
        handlers.register("orders", name, plain)
    return handlers


def _until(bus: CommandBus, command_id: str, status: CommandStatus) -> None:
    def is_there() -> bool:
        record = bus.get_command("orders", command_id)
        return record is not None and record.status is status

    until(is_there, what=lambda: bus.get_command("orders", command_id))


def _commands(bus: CommandBus, url: str) -> None:
    assert bus.call("orders", "plain", {"n": 1}) == {"n": 1}
    assert bus.send("orders", "plain", {"n": 2}, command_id="own", delay=0.1, reply_to="answers").created
    assert not bus.send("orders", "plain", {"n": 2}, command_id="own", delay=0.1, reply_to="answers").created
    bus.send_many("orders", [NewCommand("plain", command_id=f"many{n}") for n in range(3)])
    with psycopg.connect(url) as lent:
        bus.send("orders", "together", command_id="together", conn=lent)
        bus.send_many("orders", [NewCommand("twice", command_id="twice"), NewCommand("never")], conn=lent)
    bus.send("orders", "long", command_id="long")
    for name in ("own", "many2", "together", "together-next", "twice"):
        _until(bus, name, CommandStatus.COMPLETED)
    until(lambda: (record := bus.get_command("orders", "long")) is not None and record.progress)
    bus.cancel("orders", "long", operator="me")
    _until(bus, "long", CommandStatus.CANCELED)
    with psycopg.connect(url, autocommit=True) as raw:
        raw.execute("INSERT INTO pgmq.q_orders__commands (vt, message) VALUES (clock_timestamp(), '[]'), "
                    "(clock_timestamp(), '{\"command_type\": \"plain\", \"command_id\": \"raw\"}')")  # fmt: skip
    _until(bus, "raw", CommandStatus.COMPLETED)
    until(bus.rejected)


def _batches(bus: CommandBus) -> None:
    done = OnComplete("orders", "plain")
    bus.create_batch("orders", [NewCommand("plain")] * 3, batch_id="b", is_open=True, on_complete=done)
    bus.add_to_batch("orders", "b", [NewCommand("plain"), NewCommand("never")])
    bus.close_batch("orders", "b")
    tsq = TroubleshootingQueue(bus)
    until(lambda: tsq.count("orders") == 2)
    bus.retry_failed("orders", "b")
    until(lambda: tsq.count("orders") == 2)
    bus.cancel_batch("orders", "b")
    assert bus.wait_for_batch("orders", "b", wait=60).is_finished
    bus.create_batch("orders", [NewCommand("plain", delay=60)], batch_id="later")
    bus.cancel_batch("orders", "later")
    assert bus.wait_for_batch("orders", "later", wait=60).is_finished


def _processes(bus: CommandBus) -> None:
    bus.start_process(ORDER, {"n": 1}, process_id="p1", deadline=600, reply_to="answers")
    bus.start_processes(ORDER, [{"data": {"n": 2}}])
    bus.create_process_batch(ORDER, [{"data": {"n": 3}}], batch_id="pb")

    def has_ended() -> bool:
        record = bus.get_process("processes", "p1")
        return record is not None and record.status is ProcessStatus.COMPLETED

    until(has_ended, what=lambda: bus.get_process("processes", "p1"))
    assert bus.wait_for_batch("processes", "pb", wait=60).is_finished
    bus.pause("orders", "charge")
    bus.start_process(ORDER, {"n": 4}, process_id="p4")
    until(lambda: bus.query_commands(domain="orders", command_type="charge", status="PENDING").items)
    bus.cancel_process("processes", "p4")
    bus.resume("orders", "charge")
    until(lambda: (record := bus.get_process("processes", "p4")) is not None and record.status.is_final)


def _limits(bus: CommandBus) -> None:
    bus.declare_limit(Limit("vision", concurrency=1, rate="100/s"))
    bus.send_many("orders", [NewCommand("limited", command_id=f"limited{n}") for n in range(4)])
    with bus.limit("vision"):
        bus.estimate("docai")
    for n in range(4):
        _until(bus, f"limited{n}", CommandStatus.COMPLETED)
    bus.set_limit("docai", concurrency=3)
    bus.unset_limit("docai")
    bus.open_breaker(limit="docai")
    bus.close_breaker(limit="docai")
    bus.open_breaker("orders", "twice")
    bus.send("orders", "twice", command_id="broken")
    until(lambda: (record := bus.get_command("orders", "broken")) is not None and record.waiting_for == "breaker")
    assert bus.close_breaker("orders", "twice") == 1
    _until(bus, "broken", CommandStatus.COMPLETED)
    bus.reset_breaker("orders", "twice")


def _operations(bus: CommandBus) -> None:
    tsq = TroubleshootingQueue(bus)
    bus.send_many("orders", [NewCommand("never", command_id=f"n{n}") for n in range(3)])
    settings = bus.settings
    with Worker(_handlers(bus), settings=settings):
        until(lambda: tsq.count("orders") >= 3)
    tsq.operator_retry("orders", "n0", operator="me")
    tsq.operator_cancel("orders", "n1")
    tsq.operator_complete("orders", "n2", {"by": "hand"})
    tsq.retry_all("orders")
    bus.cancel("orders", "n0")


def _inspection(bus: CommandBus) -> None:
    assert bus.get_audit_trail("orders", "twice")
    assert bus.get_attempts("orders", "twice")
    assert bus.query_commands(status="COMPLETED").items
    assert bus.query_batches().items
    assert bus.query_processes().items
    assert bus.status()
    assert bus.workers()
    assert bus.limits()
    assert bus.breakers()
    tsq = TroubleshootingQueue(bus)
    for look in (bus.list_stuck, bus.undelivered_replies, bus.pauses, bus.list_domains, bus.stray_replies,
                 bus.schema_state, tsq.list, tsq.count_by_type):  # fmt: skip
        look()
