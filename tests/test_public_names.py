"""`from commandbus import …`: the names, and what it costs to ask for one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import commandbus

STUB = Path(commandbus.__file__).with_suffix(".pyi")


def test_type_checkers_see_the_same_names() -> None:
    found = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(found, key=str) == commandbus.__all__
    for name, where in found.items():
        module, _, own = where.rpartition(".")
        assert name == own
        assert getattr(commandbus, str(name)) is getattr(sys.modules[module], own)


def test_every_name_is_listed() -> None:
    assert set(commandbus.__all__) <= set(dir(commandbus))


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="module 'commandbus' has no attribute 'nothing'"):
        _ = commandbus.nothing  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Nothing' from 'commandbus'"):
        from commandbus import Nothing  # type: ignore[attr-defined]  # noqa: F401


def loaded_by(program: str) -> set[str]:
    """The modules that a program of its own has loaded when it ends."""
    program += "\nimport sys; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return set(said.split())


def below(loaded: set[str], *packages: str) -> set[str]:
    return {name for name in loaded if any(f"{name}.".startswith(f"{package}.") for package in packages)}


def test_a_module_of_handlers_does_not_load_what_sends_or_works() -> None:
    loaded = loaded_by("from commandbus import HandlerRegistry, PermanentCommandError")
    assert "commandbus.worker.execution.handlers" in loaded
    assert not below(loaded, "psycopg", "commandbus.bus", "commandbus.worker.worker")


@pytest.mark.parametrize("bus", ["CommandBus", "AsyncCommandBus"])
def test_an_application_that_sends_loads_nothing_else(bus: str) -> None:
    loaded = loaded_by(f"from commandbus import {bus}, NewCommand")
    names = {name.removeprefix("commandbus.flow") for name in below(loaded, "commandbus.flow")}
    assert names == {"", ".commands", ".commands.send", ".operation"}
    assert not below(
        loaded, "commandbus.worker", "commandbus.supervisor", "commandbus.cli", "commandbus.db.embedded"
    )
    assert not below(loaded, "commandbus.limits", "commandbus.processes", "commandbus.db.embedded")
    assert not below(loaded, "redis", "hiredis", "click", "difflib", "tomllib")


def test_sending_loads_no_more(database: str) -> None:
    program = f"""
from commandbus import CommandBus
import commandbus
with CommandBus({database!r}) as bus:
    bus.send("orders", "ship", {{"order": 1}})
    bus.send_many("orders", [{{"command_type": "ship", "data": {{}}}}])
"""
    with commandbus.CommandBus(database) as bus:
        bus.migrate(domains=["orders"])
    loaded = loaded_by(program)
    assert not below(
        loaded, "commandbus.worker", "commandbus.limits", "commandbus.flow.commands.settle", "commandbus.processes"
    )
