"""Real servers for the tests: one PostgreSQL per session, one database per test; one Redis, if a test asks for it.

`server` is started once, in a temporary folder outside the repository and without fsync. `empty_database` is
a fresh database; `database` is a copy of one that was migrated once per session, which costs some 30 ms.
Nothing of `commandbus` beyond the embedded server is imported until a test asks for it.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from commandbus.db.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from support.redis_server import RedisServer

BINARIES_VARIABLE = "COMMANDBUS_TEST_POSTGRES_BIN"
_TEMPLATE = "commandbus_template"


def pytest_configure(config: pytest.Config) -> None:
    _forget_the_developers_settings()
    _leave_in_order_on_sigterm()


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
    """The programs that `./dev test --postgres N` chose; None lets the embedded server choose."""
    chosen = os.environ.get(BINARIES_VARIABLE)
    return Path(chosen) if chosen else None


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Unlike pytest's own, one that the server's user can enter when the tests run as root."""
    folder = Path(tempfile.mkdtemp(prefix="commandbus-test-"))
    folder.chmod(0o755)
    try:
        yield folder.resolve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for an embedded server of the test's own."""
    with _temporary_folder() as path:
        yield path


@pytest.fixture(scope="session")
def session_folder() -> Iterator[Path]:
    """The same for what is made once per session."""
    with _temporary_folder() as path:
        yield path


@pytest.fixture(scope="session")
def server(session_folder: Path, postgres_binaries: Path | None) -> Iterator[EmbeddedPostgres]:
    """The session's PostgreSQL."""
    postgres = EmbeddedPostgres(
        session_folder / "server",
        binaries=postgres_binaries,
        fsync=False,
        settings={"max_connections": "300", "shared_buffers": "256MB"},
    )
    postgres.start()
    try:
        yield postgres
    finally:
        postgres.stop(force=True)


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
        yield _address(server, name)
    finally:
        admin(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _address(server: EmbeddedPostgres, database: str) -> str:
    return server.dsn.removesuffix("/postgres") + f"/{database}"


@pytest.fixture
def empty_database(server: EmbeddedPostgres, server_admin: Callable[[sql.Composable], None]) -> Iterator[str]:
    """The address of a fresh database with nothing in it."""
    with _fresh_database(server, server_admin, template="template1") as address:
        yield address


@pytest.fixture(scope="session")
def migrated_template(server: EmbeddedPostgres, server_admin: Callable[[sql.Composable], None]) -> str:
    """The name of a database that was migrated once and is only copied from then on."""
    from commandbus import CommandBus

    server_admin(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(_TEMPLATE)))
    with CommandBus(_address(server, _TEMPLATE)) as bus:
        bus.migrate()
    # A database with connections cannot be copied; now none can come.
    server_admin(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(_TEMPLATE)))
    return _TEMPLATE


@pytest.fixture
def database(
    server: EmbeddedPostgres, server_admin: Callable[[sql.Composable], None], migrated_template: str
) -> Iterator[str]:
    """The address of a fresh database with the schema of commandbus in it."""
    with _fresh_database(server, server_admin, template=migrated_template) as address:
        yield address


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The session's Redis. A test that kills or stops one makes its own: `support.redis_server.RedisServer`."""
    from support.redis_server import RedisServer

    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The address of the session's Redis, emptied."""
    redis_server.flush()
    return redis_server.url
