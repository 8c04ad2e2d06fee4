"""What the docstrings of packages and modules promise about themselves: what they never import or call."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import ROOT

SOURCE = ROOT / "src" / "commandbus"
INPUT_AND_OUTPUT = {
    "socket",
    "select",
    "selectors",
    "subprocess",
    "psycopg",
    "redis",
    "sqlite3",
    "http",
    "urllib.request",
}
THREADS = {"threading", "asyncio", "concurrent.futures", "queue", "multiprocessing"}
CLOCK = {"time", "commandbus.clock"}
LOGGING = {"logging", "commandbus.logger"}
DATABASE = {"psycopg", "commandbus.db", "commandbus.flow", "commandbus.sql"}

RULES = [
    ("model", INPUT_AND_OUTPUT | THREADS | LOGGING),  # "no I/O and no threads"
    ("flow", THREADS | CLOCK | LOGGING),  # "no clock, no logging and no retry loop"
    ("worker/deadlines/ladder.py", DATABASE),  # "nothing here touches the database"
    ("worker/execution/slot_pacing.py", THREADS | CLOCK),  # "no clock and no threads"
    ("supervisor/view.py", INPUT_AND_OUTPUT | THREADS),  # "pure"
    ("supervisor/fleet_metrics.py", INPUT_AND_OUTPUT | THREADS | CLOCK),  # "pure"
    ("supervisor/restart_budget.py", INPUT_AND_OUTPUT | THREADS | CLOCK),  # "pure"
]


def modules(path: str) -> list[Path]:
    found = SOURCE / path
    return [found] if found.is_file() else sorted(found.rglob("*.py"))


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported when the code runs: what only type checkers see is left out."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import):
                    yield from (alias.name for alias in inner.names)
                elif isinstance(inner, ast.ImportFrom) and inner.module is not None:
                    yield inner.module
                    yield from (f"{inner.module}.{alias.name}" for alias in inner.names)


def is_within(name: str, forbidden: set[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in forbidden)


@pytest.mark.parametrize(("path", "forbidden"), RULES, ids=[path for path, _ in RULES])
def test_a_module_imports_nothing_that_its_docstring_rules_out(path: str, forbidden: set[str]) -> None:
    broken = {
        f"{file.relative_to(SOURCE)} imports {name}"
        for file in modules(path)
        for name in imports(ast.parse(file.read_text("utf-8")))
        if is_within(name, forbidden)
    }
    assert not broken


def test_only_the_four_that_are_named_read_the_clock_in_model() -> None:
    readers = set()
    for file in modules("model"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("epoch", "monotonic", "datetime.now"):
                readers.add(file.name)
    assert readers == {"command.py", "api_errors.py", "schedule.py"}
