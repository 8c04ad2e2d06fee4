"""docs/requirements.md: one row for each requirement, and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "requirements.md").read_text("utf-8")
ROWS = [re.split(r"(?<!\\\\) \| ", line.strip("| ")) for line in PAGE.splitlines() if re.match(r"\| \d", line)]
REQUIREMENTS = 177


@cache
def named_tests(path: str) -> set[str]:
    """`name` and `Class::name` of the tests in a file."""
    found = set()
    for node in ast.parse((ROOT / path).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_every_requirement_has_its_row() -> None:
    assert [row[0] for row in ROWS] == [str(number) for number in range(1, REQUIREMENTS + 1)]
    assert {len(row) for row in ROWS} == {4}


def test_every_row_works_or_differs_with_a_reason() -> None:
    for number, _, here, _ in ROWS:
        assert re.match(r"\*\*(works|differs)\*\*", here), number
        if here.startswith("**differs**"):
            assert len(here) > 80, f"{number}: a difference needs a reason"


def test_every_row_names_tests_that_exist() -> None:
    for number, _, _, shown in ROWS:
        named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", shown)
        assert named, number
        for path, name in named:
            assert name in named_tests(path), f"{number}: {path} has no {name}"


def test_named_tests_of_the_specification_are_under_their_names() -> None:
    stuck = {"cancel_sets_flag", "grace_period_respected", "marked_stuck_after_grace", "completion_during_grace"}
    assert {f"test_{name}" for name in {*stuck, "drain_triggered"}} <= named_tests(
        "tests/worker/test_stuck_detection.py"
    )
    assert {
        "TestRedisSemaphore::test_limits_concurrent_calls",
        "TestRedisSemaphore::test_acquires_when_slots_available",
        "TestChunkTimeout::test_timeout_raises_error",
    } <= named_tests("tests/seeds/test_rate_limiter.py")
