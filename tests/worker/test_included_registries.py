"""Registries made of registries: `include` and `discover`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commandbus import (
    CommandBus,
    CommandStatus,
    ConfigurationError,
    DuplicateHandlerError,
    HandlerRegistry,
    Limit,
    Saga,
    Schedule,
    Worker,
    step,
)
from support.workers import quick_settings


def ship(command: Any, ctx: Any) -> Any:
    return "shipped"


def ship_again(command: Any, ctx: Any) -> Any:
    return "shipped again"


@pytest.fixture
def other() -> HandlerRegistry:
    other = HandlerRegistry()
    other.register("orders", "ship", ship, timeout="7s", limits=[Limit("docai", concurrency=1)])
    other.declare_schedule(Schedule("orders", "nightly", every="1h", command_type="ship"))
    return other


def test_all_parts_are_taken_over_with_their_options(other: HandlerRegistry) -> None:
    handlers = HandlerRegistry()
    handlers.register("billing", "bill", ship)
    handlers.include(other)
    found = handlers.get("orders", "ship")
    assert found is not None
    assert (found.function, found.options.timeout, found.options.limits) == (ship, 7.0, ("docai",))
    assert handlers.limits == other.limits
    assert handlers.schedules == other.schedules
    assert (handlers.domains, len(handlers), len(other)) == (["billing", "orders"], 2, 1)
    other.register("orders", "late", ship)
    assert handlers.get("orders", "late") is None


def test_two_handlers_for_one_command_are_refused_by_name_and_nothing_changes(other: HandlerRegistry) -> None:
    handlers = HandlerRegistry()
    handlers.register("orders", "pack", ship)
    handlers.register("orders", "ship", ship_again)
    other.register("orders", "pick", ship)
    with pytest.raises(DuplicateHandlerError, match=r"'ship' of domain 'orders' .*\.ship_again, and .*\.ship of"):
        handlers.include(other)
    assert (len(handlers), handlers.limits, handlers.schedules) == (2, [], [])
    for twice in (handlers, HandlerRegistry()):
        twice.register("orders", "x", ship)
        with pytest.raises(DuplicateHandlerError, match="'orders'"):
            twice.include(twice)
    with pytest.raises(TypeError, match="HandlerRegistry"):
        handlers.include("orders")  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["limit", "schedule"])
def test_parts_that_are_declared_differently_are_refused(other: HandlerRegistry, part: str) -> None:
    handlers = HandlerRegistry()
    if part == "limit":
        handlers.declare_limit(Limit("docai", concurrency=2))
    else:
        handlers.declare_schedule(Schedule("orders", "nightly", every="2h", command_type="ship"))
    with pytest.raises(ConfigurationError, match="declared twice, differently"):
        handlers.include(other)
    assert len(handlers) == 0
    same = HandlerRegistry()
    same.declare_limit(Limit("docai", concurrency=1))
    same.include(other)
    assert len(same.limits) == 1


def test_a_worker_runs_what_was_included(database: str) -> None:
    part, handlers = HandlerRegistry(), HandlerRegistry()
    part.register("orders", "ship", ship)
    deliver = Saga("deliver", step("ship", "orders"))
    part.register_process(deliver)
    handlers.include(part)
    with CommandBus(database) as bus:
        for domain in part.domains:
            bus.create_domain(domain)
        started = bus.start_process(deliver)
        sent = bus.send("orders", "ship")
        Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
        outcome = bus.get_outcome("orders", sent.command_id)
        assert outcome is not None
        assert outcome.status is CommandStatus.COMPLETED
        process = bus.get_process(started.domain, started.process_id)
        assert process is not None
        assert process.status == "COMPLETED"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with a registry of its own in each module; one of them names its neighbor's, too."""
    folder = tmp_path / "shop_of_parts"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name in ("billing", "orders"):
        (folder / f"{name}.py").write_text(
            "from commandbus import HandlerRegistry\nhandlers = HandlerRegistry()\n"
            f"@handlers.handler({name!r}, 'run')\ndef run(command, ctx): ...\n"
        )
    (folder / "users.py").write_text("from shop_of_parts.orders import handlers\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "shop_of_parts"
    for name in [name for name in sys.modules if name.startswith("shop_of_parts")]:
        del sys.modules[name]


def test_modules_are_found(package: str) -> None:
    handlers = HandlerRegistry()
    handlers.discover(f"{package}.*")
    assert handlers.domains == ["billing", "orders"]
    one = HandlerRegistry()
    one.discover(f"{package}.orders")
    assert one.domains == ["orders"]


def test_modules_that_cannot_be_found_or_imported_are_named(package: str, tmp_path: Path) -> None:
    handlers = HandlerRegistry()
    with pytest.raises(ConfigurationError, match=r"no module 'shop_of_parts\.nowhere'"):
        handlers.discover(f"{package}.orders", f"{package}.nowhere")
    with pytest.raises(ConfigurationError, match="not a package"):
        handlers.discover(f"{package}.orders.*")
    (tmp_path / package / "zoo.py").write_text("1 / 0\n")
    with pytest.raises(ConfigurationError, match=r"zoo.*ZeroDivisionError"):
        handlers.discover(f"{package}.*")
    assert len(handlers) == 0
