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


def test_a_module_of_handlers_does_not_load_what_sends_or_works() -> None:
    program = (
        "from commandbus import HandlerRegistry, PermanentCommandError\n"
        "import sys\n"
        "print(*sorted(name for name in sys.modules if name.startswith('commandbus.') or name == 'psycopg'))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = set(said.split())
    assert "commandbus.runtime.handlers" in loaded
    assert not loaded & {"psycopg", "commandbus.bus", "commandbus.runtime.worker"}
