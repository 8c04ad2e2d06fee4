"""`cli` runs a command line in this process on the test's database; `orders` has a domain `orders` besides."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from cli_harness import Answer

from commandbus import CommandBus, CommandStatus, HandlerRegistry, PermanentCommandError, Worker, load_settings
from commandbus.cli import entry
from support.waiting import until

Cli = Callable[..., Answer]


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """`commandbus worker` sets up the log of its process, which is ours here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def bare_cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line without a database; `stdin=` is what it reads."""

    def call(*arguments: str, stdin: str = "") -> Answer:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capfd.readouterr()
        code = entry.run(arguments)
        out, err = capfd.readouterr()
        return Answer(code, out, err)

    return call


@pytest.fixture
def cli(bare_cli: Cli, database: str) -> Cli:
    def call(*arguments: str, stdin: str = "") -> Answer:
        return bare_cli("--database", database, *arguments, stdin=stdin)

    return call


@pytest.fixture
def has_orders() -> str:
    """`orders` has it."""
    return "orders"


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        yield bus


@pytest.fixture
def orders(cli: Cli) -> Cli:
    """The command line on a database with a domain `orders`."""
    return cli


@pytest.fixture
def troubled(orders: Cli, bus: CommandBus, database: str) -> Cli:
    """`orders` with four commands in the troubleshooting queue: ship s1 s2 s3 and bill b1."""
    registry = HandlerRegistry()

    def refuse(command: object, ctx: object) -> None:
        raise PermanentCommandError("no such\n\x1b[31mstreet", code="BAD_ADDRESS")

    registry.register("orders", "ship", refuse)
    for command_id in ("s1", "s2", "s3"):
        bus.send("orders", "ship", {"to": command_id}, command_id=command_id)
    bus.send("orders", "bill", command_id="b1")
    with _working(registry, database):
        until(lambda: bus.status("orders")[0].in_tsq == 4)
    return orders


@contextmanager
def _working(registry: HandlerRegistry, database: str) -> Iterator[None]:
    settings = load_settings({"database_url": database, "unknown_type_timeout": 0})
    with Worker(registry, settings=settings):
        yield


@pytest.fixture
def status_of(bus: CommandBus) -> Callable[[str], CommandStatus]:
    def status_of(command_id: str) -> CommandStatus:
        record = bus.get_command("orders", command_id)
        assert record is not None
        return record.status

    return status_of
