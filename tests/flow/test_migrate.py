"""migrate: from nothing, again, ten at once, by a plain owner, by a script, with PGMQ as an extension."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, at_once, one
from psycopg import sql as pgsql

from commandbus import CommandBus, CommandStatus, SchemaError
from commandbus.db.embedded import EmbeddedPostgres
from commandbus.db.embedded.binaries import choose_binaries
from commandbus.db.pgmq import packaged_sql, packaged_version
from commandbus.flow.setup.migrate import LOCK, script
from commandbus.sql import is_compatible, migrations
from support.access import let_roles_in, passfile_of, plain_address


@pytest.fixture
def database(
    server: EmbeddedPostgres, server_admin: Callable[[pgsql.Composable], None], migrated_template: str
) -> Iterator[str]:
    """A migrated database of the test's own: its schema is what is tampered with here."""
    name = f"migrated_{uuid.uuid4().hex[:8]}"
    template = pgsql.Identifier(migrated_template)
    server_admin(pgsql.SQL("CREATE DATABASE {} TEMPLATE {}").format(pgsql.Identifier(name), template))
    yield plain_address(server, name)
    server_admin(pgsql.SQL("DROP DATABASE {} WITH (FORCE)").format(pgsql.Identifier(name)))


@pytest.fixture
def orders(bus: Bus) -> Bus:
    """The same with a domain `orders`."""
    bus.create_domain("orders")
    return bus


def test_the_key_of_a_queue_has_room_for_what_claims_add(orders: Bus, db: psycopg.Connection[Any]) -> None:
    found = db.execute("SELECT reloptions FROM pg_class WHERE relname = 'q_orders__commands_pkey'").fetchone()
    assert found == (["fillfactor=50"],)


def _catalog(database: str) -> dict[str, list[Any]]:
    """All that was made, as PostgreSQL describes it."""
    queries = {
        "tables": "SELECT n.nspname, c.relname, c.relkind, c.relpersistence, c.reloptions FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname IN ('commandbus', 'pgmq')",
        "columns": "SELECT c.oid::regclass::text, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), "
        "a.attnotnull, a.attidentity, pg_get_expr(d.adbin, d.adrelid) FROM pg_attribute a "
        "JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace "
        "LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum "
        "WHERE n.nspname IN ('commandbus', 'pgmq') AND a.attnum > 0 AND NOT a.attisdropped",
        "indexes": "SELECT schemaname, tablename, indexname, indexdef FROM pg_indexes "
        "WHERE schemaname IN ('commandbus', 'pgmq')",
        "constraints": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE connamespace IN (SELECT oid FROM pg_namespace WHERE nspname IN ('commandbus', 'pgmq'))",
        "views": "SELECT schemaname, viewname, definition FROM pg_views "
        "WHERE schemaname IN ('commandbus', 'pgmq')",
        "functions": "SELECT p.oid::regprocedure::text, md5(p.prosrc) FROM pg_proc p "
        "JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname IN ('commandbus', 'pgmq')",
        "types": "SELECT t.typname, e.enumlabel FROM pg_type t JOIN pg_enum e ON e.enumtypid = t.oid "
        "ORDER BY 1, e.enumsortorder",
        "migrations": "SELECT number, name, is_compatible FROM commandbus.migration",
        "settings": "SELECT name, value FROM commandbus.setting",
    }
    with psycopg.connect(database) as conn:
        return {name: sorted(map(repr, conn.execute(query.encode()))) for name, query in queries.items()}


def test_from_nothing_and_again(connect: Callable[..., Bus], empty_database: str) -> None:
    bus = connect(empty_database)
    numbers = tuple(migrations())
    empty = bus.schema_state()
    assert (empty.applied, empty.missing, empty.is_current) == ((), numbers, False)
    assert (empty.pgmq_version, empty.pgmq_way) == (None, None)
    assert bus.migrate(domains=["orders", "billing"]).missing == numbers
    state = bus.schema_state()
    assert (state.applied, state.missing, state.is_current) == (numbers, (), True)
    assert (state.pgmq_version, state.pgmq_way) == (packaged_version(), "sql")
    before = _catalog(empty_database)
    again = bus.migrate(domains=["orders", "billing"])
    assert again.missing == ()
    assert _catalog(empty_database) == before
    assert [domain.name for domain in bus.list_domains()] == ["billing", "orders"]
    bus.send("orders", "Ship")
    assert len(bus.claim()) == 1


def test_a_failure_leaves_nothing(connect: Callable[..., Bus], empty_database: str) -> None:
    from commandbus import InvalidCommandError

    bus = connect(empty_database)
    with pytest.raises(InvalidCommandError, match="Bad"):
        bus.migrate(domains=["orders", "Bad"])
    with psycopg.connect(empty_database) as conn:
        assert one(conn, "SELECT count(*) FROM pg_namespace WHERE nspname IN ('commandbus', 'pgmq')") == 0


def _migrate(url: str, barrier: Any, answers: Any) -> None:
    try:
        with CommandBus(url) as bus:
            barrier.wait()
            answers.put(bus.migrate(domains=["orders"]).missing)
    except BaseException as error:
        answers.put(repr(error))


def test_ten_threads_at_once(empty_database: str) -> None:
    def migrate() -> Any:
        with CommandBus(empty_database) as bus:
            return bus.migrate(domains=["orders"]).missing

    answers = at_once([migrate] * 10)
    numbers = tuple(migrations())
    assert sorted(answers, key=str) == [()] * 9 + [numbers], answers
    with CommandBus(empty_database) as bus:
        assert bus.schema_state().is_current
        bus.send("orders", "Ship")


def test_processes_at_once(empty_database: str) -> None:
    """Spawned, so that each has its own everything."""
    context = multiprocessing.get_context("spawn")
    count = 4
    barrier, answers = context.Barrier(count), context.Queue()
    workers = [context.Process(target=_migrate, args=(empty_database, barrier, answers)) for _ in range(count)]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert sorted(found, key=str) == [()] * (count - 1) + [tuple(migrations())], found


def test_domains_created_at_once(database: str) -> None:
    def create() -> Any:
        with CommandBus(database) as bus:
            return bus.create_domain("orders")

    answers = at_once([create] * 8)
    assert sorted(answers, key=str) == [False] * 7 + [True], answers


def test_a_newer_schema_is_refused(bus: Bus, db: psycopg.Connection[Any]) -> None:
    newest = max(migrations())
    db.execute("INSERT INTO commandbus.migration (number, name) VALUES (%s, 'later')", (newest + 5,))
    before = _catalog(bus.url)
    for act in (bus.migrate, bus.schema_state):
        with pytest.raises(SchemaError, match=f"migration {newest + 5}, newer than this release knows"):
            act()
    assert _catalog(bus.url) == before


def test_a_newer_schema_that_is_compatible_is_used(
    bus: Bus, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = max(migrations())
    with monkeypatch.context() as later:
        compatible = "-- Adds.\n--\n-- Compatible: yes\nALTER TABLE commandbus.command ADD COLUMN added text"
        found = migrations() | {
            newest + 1: ("adds", compatible),
            newest + 2: ("adds_more", "-- Compatible: yes\n"),
        }
        later.setattr("commandbus.sql.migrations", lambda: found)
        assert bus.schema_state().incompatible == ()
        assert bus.migrate(domains=["orders"]).missing == (newest + 1, newest + 2)
    state = bus.schema_state()
    assert (state.newer, state.missing, state.is_current) == ((newest + 1, newest + 2), (), True)
    before = _catalog(bus.url)
    assert bus.migrate().missing == ()
    assert _catalog(bus.url) == before
    assert bus.create_domain("billing")
    bus.send("billing", "Pay")
    assert len(bus.claim(domain="billing")) == 1
    with pytest.raises(SchemaError, match="make roles with the newer release"):
        bus.create_roles()
    db.execute("INSERT INTO commandbus.migration (number, name) VALUES (%s, 'breaks')", (newest + 3,))
    db.execute("INSERT INTO commandbus.migration VALUES (%s, 'mends', now(), true)", (newest + 4,))
    told = (
        rf"migration {newest + 4}, newer than this release knows \({newest}\), and migration {newest + 3} is not"
    )
    for act in (bus.migrate, bus.schema_state):
        with pytest.raises(SchemaError, match=told):
            act()


def test_a_schema_with_a_gap_is_left_to_the_newer_release(bus: Bus, db: psycopg.Connection[Any]) -> None:
    newest = max(migrations())
    db.execute(
        "UPDATE commandbus.migration SET number = number + 1, is_compatible = true WHERE number = %s", (newest,)
    )
    with pytest.raises(SchemaError, match=rf"lacks migration {newest} but has {newest + 1}"):
        bus.migrate()


def test_every_migration_says_whether_it_is_compatible() -> None:
    """But the first, before which there is nothing."""
    said = {
        number: re.findall(r"^-- Compatible: (yes|no)$", text, re.M) for number, (_, text) in migrations().items()
    }
    assert all(len(flags) == 1 for number, flags in said.items() if number > 1), said
    assert [number for number, (_, text) in migrations().items() if is_compatible(text)] == [
        number for number, flags in said.items() if flags == ["yes"]
    ]


# --- somebody's transaction in the way ----------------------------------------------------------------------


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """This release has one more migration than the database: it needs every transaction out of its way."""
    text = "ALTER TABLE commandbus.command ADD COLUMN added text"
    found = migrations() | {max(migrations()) + 1: ("later", text)}
    monkeypatch.setattr("commandbus.sql.migrations", lambda: found)


@pytest.mark.usefixtures("newer")
def test_sends_do_not_queue_up_behind_a_migration_that_waits(
    orders: Bus, db: psycopg.Connection[Any], database: str, caplog: pytest.LogCaptureFixture
) -> None:
    impatient = f"{database}?options=-c%20statement_timeout%3D4s"
    with (
        psycopg.connect(database, application_name="report") as long,
        CommandBus(impatient) as sender,
        ThreadPoolExecutor(1) as thread,
    ):
        long.execute("SELECT count(*) FROM commandbus.command")
        migrating = thread.submit(orders.migrate)
        while caplog.text.count(f"waits for the transaction of session {long.info.backend_pid} (report)") < 2:
            sender.send("orders", "Ship")  # behind an ALTER TABLE without a limit it would end in QueryCanceled
            assert not migrating.done()
        long.rollback()
        assert migrating.result(20).missing == (max(migrations()) + 1,)
    assert one(db, "SELECT count(added) FROM commandbus.command") == 0


@pytest.mark.usefixtures("newer")
def test_a_migration_gives_up_when_its_time_is_over(
    connect: Callable[..., Bus], bus: Bus, db: psycopg.Connection[Any], database: str
) -> None:
    with psycopg.connect(database) as long:
        long.execute("SELECT count(*) FROM commandbus.command")
        with pytest.raises(SchemaError, match="could not be changed within 0s: a transaction on its tables"):
            bus.migrate(wait=0)
        assert one(db, "SELECT max(number) FROM commandbus.migration") == max(migrations())
        assert one(db, "SHOW lock_timeout") == "0"


def test_a_migration_that_hangs_holds_up_the_others_for_a_while_only(
    bus: Bus, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("commandbus.flow.setup.migrate._TURN_LIMIT", b"SET LOCAL lock_timeout = '200ms'")
    with psycopg.connect(database, application_name="hung") as hung, ThreadPoolExecutor(1) as thread:
        hung.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))
        with pytest.raises(SchemaError, match="could not be changed within 1s"):
            bus.migrate(wait=1)
        migrating = thread.submit(bus.migrate)
        while f"waits for the transaction of session {hung.info.backend_pid} (hung)" not in caplog.text:
            assert not migrating.done()
        hung.rollback()
        assert migrating.result(20).missing == ()


# --- roles without rights -----------------------------------------------------------------------------------


@pytest.fixture
def plain(server: EmbeddedPostgres) -> Iterator[Callable[..., str]]:
    """Makes login roles without any right; answers an address in their name."""
    made: list[tuple[str, str]] = []

    def make(database: str, *, owns: bool = False) -> str:
        role = f"plain_{len(made)}_{database.rsplit('/', 1)[1]}"
        made.append((role, database))
        with psycopg.connect(server.dsn, autocommit=True) as admin:
            admin.execute(pgsql.SQL("CREATE ROLE {} LOGIN").format(pgsql.Identifier(role)))
            if owns:
                admin.execute(
                    pgsql.SQL("ALTER DATABASE {} OWNER TO {}").format(
                        pgsql.Identifier(database.rsplit("/", 1)[1]), pgsql.Identifier(role)
                    )
                )
        return database.replace("//postgres@", f"//{role}@", 1)

    yield make
    for role, database in made:
        with psycopg.connect(database, autocommit=True) as conn:
            conn.execute(pgsql.SQL("REASSIGN OWNED BY {} TO postgres").format(pgsql.Identifier(role)))
            conn.execute(pgsql.SQL("DROP OWNED BY {}").format(pgsql.Identifier(role)))
            conn.execute(pgsql.SQL("DROP ROLE {}").format(pgsql.Identifier(role)))


def test_a_plain_owner_may(connect: Callable[..., Bus], empty_database: str, plain: Callable[..., str]) -> None:
    bus = connect(plain(empty_database, owns=True))
    assert bus.migrate(domains=["orders"]).missing == tuple(migrations())
    bus.create_queue("answers")
    bus.send("orders", "Ship", command_id="k", reply_to="answers")
    assert bus.settle(bus.claim_one().complete(None)) == {}
    assert bus.get_command("orders", "k").status is CommandStatus.COMPLETED


def test_a_stranger_may_not(connect: Callable[..., Bus], empty_database: str, plain: Callable[..., str]) -> None:
    bus = connect(plain(empty_database))
    with pytest.raises(SchemaError, match=r"may not create the schema.*migrate --print"):
        bus.migrate()
    assert bus.schema_state().missing == tuple(migrations())


def test_a_stranger_in_a_migrated_database_is_told(
    connect: Callable[..., Bus], database: str, plain: Callable[..., str]
) -> None:
    bus = connect(plain(database))
    for act in (bus.migrate, bus.schema_state):
        with pytest.raises(SchemaError, match="permission denied"):
            act()


def test_an_older_database_and_no_rights(
    connect: Callable[..., Bus], database: str, db: psycopg.Connection[Any], plain: Callable[..., str]
) -> None:
    url = plain(database)
    role = url.split("//")[1].split("@")[0]
    db.execute("DELETE FROM commandbus.migration WHERE number = (SELECT max(number) FROM commandbus.migration)")
    for grant in ("USAGE ON SCHEMA commandbus", "SELECT ON ALL TABLES IN SCHEMA commandbus"):
        db.execute(f"GRANT {grant} TO {role}".encode())
    bus = connect(url)
    assert bus.schema_state().missing == (max(migrations()),)
    with pytest.raises(SchemaError, match="may not create the schema"):
        bus.migrate()


# --- the script for a DBA -----------------------------------------------------------------------------------


def test_the_script_makes_the_same(connect: Callable[..., Bus], database: str, empty_database: str) -> None:
    text = script()
    for _ in range(2):
        with psycopg.connect(empty_database, autocommit=True) as conn:
            conn.execute(text.encode())  # many statements at once, as psql -c sends them
        assert _catalog(empty_database) == _catalog(database)
    bus = connect(empty_database)
    assert bus.migrate(domains=["orders"]).missing == ()
    assert bus.schema_state().pgmq_way == "sql"
    bus.send("orders", "Ship")
    assert len(bus.claim()) == 1


def test_the_script_is_one_transaction(empty_database: str) -> None:
    broken = script().replace("COMMIT;", "SELECT 1/0; COMMIT;")
    with psycopg.connect(empty_database, autocommit=True) as conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            conn.execute(broken.encode())
        conn.execute("ROLLBACK")
        assert one(conn, "SELECT count(*) FROM pg_namespace WHERE nspname IN ('commandbus', 'pgmq')") == 0


def test_the_script_as_a_plain_owner(empty_database: str, plain: Callable[..., str]) -> None:
    with psycopg.connect(plain(empty_database, owns=True), autocommit=True) as conn:
        conn.execute(script().encode())
    with CommandBus(empty_database) as bus:
        assert bus.schema_state().is_current


# --- PGMQ that was there before -----------------------------------------------------------------------------


def test_pgmq_that_is_there_is_used(connect: Callable[..., Bus], empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute(packaged_sql().encode())
        conn.execute("SELECT pgmq.create('theirs')")
    bus = connect(empty_database)
    bus.migrate(domains=["orders"])
    assert bus.schema_state().pgmq_way == "sql"
    with psycopg.connect(empty_database) as conn:
        assert one(conn, "SELECT count(*) FROM pgmq.meta") == 2


def test_pgmq_that_is_too_old_is_refused(connect: Callable[..., Bus], empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute("CREATE SCHEMA pgmq")
        conn.execute("CREATE TYPE pgmq.message_record AS (msg_id bigint, read_ct integer, message jsonb)")
    with pytest.raises(SchemaError, match=r"older than 1\.5"):
        connect(empty_database).migrate()
    with psycopg.connect(empty_database) as conn:
        assert one(conn, "SELECT count(*) FROM pg_namespace WHERE nspname = 'commandbus'") == 0


# --- PGMQ as an extension -----------------------------------------------------------------------------------

with_extension = pytest.mark.shared_setup("extended_server")


@pytest.fixture(scope="module")
def extended_server(
    tmp_path_factory: pytest.TempPathFactory, postgres_binaries: Path | None, session_folder: Path
) -> Iterator[EmbeddedPostgres]:
    """A server of its own on a private copy of PostgreSQL's files, to which PGMQ's were added."""
    chosen = choose_binaries(postgres_binaries, ())
    home = session_folder / "extended"
    private = _private_copy(chosen.folder, home / "pg")
    folder = next((home / "pg").rglob("plpgsql.control")).parent
    version = packaged_version()
    (folder / "pgmq.control").write_text(
        f"comment = 'PGMQ'\ndefault_version = '{version}'\nschema = 'pgmq'\n"
        "relocatable = false\nsuperuser = true\n"
    )
    (folder / f"pgmq--{version}.sql").write_text(packaged_sql())
    for path in home.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    server = EmbeddedPostgres(home / "state", binaries=private, fsync=False)
    server.start()
    let_roles_in(server)
    try:
        yield server
    finally:
        server.stop(force=True)


def _private_copy(programs: Path, target: Path) -> Path:
    """Programs, libraries and shared files, laid out as they were: PostgreSQL finds them relative to itself."""
    install = programs.parent
    if programs.parts[:4] == ("/", "usr", "lib", "postgresql"):  # Debian keeps the shared files elsewhere
        share = Path("/usr/share/postgresql") / install.name
        pairs = [(install, target / "usr/lib/postgresql" / install.name),
                 (share, target / "usr/share/postgresql" / install.name)]  # fmt: skip
        found = target / "usr/lib/postgresql" / install.name / "bin"
    else:
        package = install.parent
        pairs = [(install, target / package.name / install.name)]
        pairs.append((package.parent / f"{package.name}.libs", target / f"{package.name}.libs"))
        found = target / package.name / install.name / programs.name
    for source, copy in pairs:
        if source.is_dir():
            shutil.copytree(
                source, copy, symlinks=True, ignore=shutil.ignore_patterns("*.a", "pgxs", "doc", "man")
            )
    return found


@pytest.fixture
def extended(extended_server: EmbeddedPostgres) -> Iterator[str]:
    """A fresh database on it."""
    with psycopg.connect(extended_server.dsn, autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS extended WITH (FORCE)")
        admin.execute("CREATE DATABASE extended")
    yield f"{plain_address(extended_server, 'extended')}?passfile={passfile_of(extended_server)}"
    with psycopg.connect(extended_server.dsn, autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS extended WITH (FORCE)")
        admin.execute("DROP ROLE IF EXISTS owner")


def _way(url: str) -> tuple[Any, Any, int]:
    with CommandBus(url) as bus:
        state = bus.schema_state()
    with psycopg.connect(url) as conn:
        return (
            state.pgmq_version,
            state.pgmq_way,
            one(conn, "SELECT count(*) FROM pg_extension WHERE extname = 'pgmq'"),
        )


@with_extension
def test_the_extension_is_used_where_the_server_has_it(connect: Callable[..., Bus], extended: str) -> None:
    bus = connect(extended)
    bus.migrate(domains=["orders"])
    assert _way(extended) == (packaged_version(), "extension", 1)
    bus.create_queue("answers")
    bus.send("orders", "Ship", {"n": 1}, command_id="k", reply_to="answers")
    bus.send_many("orders", [{"command_type": "Ship"}])
    attempts = bus.claim()
    assert len(attempts) == 2
    assert bus.settle([attempt.complete(None) for attempt in attempts]) == {}
    assert bus.migrate().missing == ()
    with psycopg.connect(extended) as conn:
        assert one(conn, "SELECT count(*) FROM pgmq.q_answers") == 1


@with_extension
def test_the_client_of_queues_works_with_the_extension(extended: str) -> None:
    with CommandBus(extended) as bus:
        bus.migrate()
        queues = bus.queues
        queues.create_queue("my_queue")
        assert queues.send_batch("my_queue", [{"foo": n} for n in range(4)]) == [1, 2, 3, 4]
        (read,) = queues.read("my_queue", vt=30)
        assert (read.msg_id, read.read_ct, read.message) == (1, 1, {"foo": 0})
        assert queues.archive("my_queue", 1)
        assert [message.msg_id for message in queues.pop("my_queue")] == [2]
        assert queues.set_vt("my_queue", 3, "1h") is not None
        assert queues.delete("my_queue", 4)
        assert (queues.metrics("my_queue").queue_length, queues.metrics("my_queue").total_messages) == (1, 4)
        assert queues.purge("my_queue") == 1
        assert queues.drop_queue("my_queue")
        assert queues.list_queues() == []


@with_extension
def test_the_sql_is_used_where_the_role_may_not(extended: str) -> None:
    with psycopg.connect(extended, autocommit=True) as admin:
        admin.execute("CREATE ROLE owner LOGIN")
        admin.execute("ALTER DATABASE extended OWNER TO owner")
    url = extended.replace("//postgres@", "//owner@", 1)
    with CommandBus(url) as bus:
        bus.migrate(domains=["orders"])
        bus.send("orders", "Ship")
    assert _way(url) == (packaged_version(), "sql", 0)


@with_extension
def test_an_extension_that_is_there_is_used_by_a_plain_owner(extended: str) -> None:
    with psycopg.connect(extended, autocommit=True) as admin:
        admin.execute("CREATE EXTENSION pgmq")
        admin.execute("CREATE ROLE owner LOGIN")
        admin.execute("ALTER DATABASE extended OWNER TO owner")
        admin.execute("GRANT USAGE, CREATE ON SCHEMA pgmq TO owner")
        admin.execute("GRANT ALL ON ALL TABLES IN SCHEMA pgmq TO owner")
    url = extended.replace("//postgres@", "//owner@", 1)
    with CommandBus(url) as bus:
        bus.migrate(domains=["orders"])
        bus.send("orders", "Ship")
    assert _way(url) == (packaged_version(), "extension", 1)


@with_extension
@pytest.mark.parametrize("who", ["postgres", "owner"])
def test_the_script_on_such_a_server(extended: str, who: str) -> None:
    with psycopg.connect(extended, autocommit=True) as admin:
        admin.execute("CREATE ROLE owner LOGIN")
        admin.execute("ALTER DATABASE extended OWNER TO owner")
    url = extended.replace("//postgres@", f"//{who}@", 1)
    for _ in range(2):
        with psycopg.connect(url, autocommit=True) as conn:
            conn.execute(script().encode())
    expected = ("extension", 1) if who == "postgres" else ("sql", 0)
    assert _way(url) == (packaged_version(), *expected)


@with_extension
def test_ten_threads_and_the_extension(extended: str) -> None:
    def migrate() -> Any:
        with CommandBus(extended) as bus:
            return bus.migrate(domains=["orders"]).missing

    answers = at_once([migrate] * 10)
    assert sorted(answers, key=str) == [()] * 9 + [tuple(migrations())], answers
    assert _way(extended)[1:] == ("extension", 1)
