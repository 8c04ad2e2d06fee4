"""copied_command and folded_frames: what the page of a command shows as text."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commandbus.model.command import CommandRecord, CommandStatus
from commandbus.model.copied_command import as_cli, as_python, copies_of
from commandbus.model.folded_frames import folded
from commandbus.shell_words import arguments, quoted

HOSTILE = "it's \u202e <b> $(rm) `x` \x1b[31m \\ \U0001f600\n"
TRACE = """Traceback (most recent call last):
  File "/app/shop/ship.py", line 12, in ship
    helper(1)
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/x/y.py", line 3, in z
    boom()
ValueError: no
"""


def record(data: Any, **more: Any) -> CommandRecord:
    now = datetime.now(UTC)
    given: dict[str, Any] = {
        "correlation_id": None,
        "reply_to": None,
        "headers": None,
        "max_attempts": None,
    } | more
    return CommandRecord(
        id=1, domain="orders", command_id="c", command_type="ship", status=CommandStatus.PENDING, data=data,
        result=None, attempts=0, created_at=now, started_at=None, finished_at=None, worker=None, **given,
    )  # fmt: skip


def test_a_copy_for_the_shell_is_the_same_command_and_only_visible_characters() -> None:
    text = as_cli(
        record(
            {"text": HOSTILE}, correlation_id=HOSTILE, timeout=90.0, priority="high", max_attempts=3,
            headers={HOSTILE: f"a={HOSTILE}"},
        )
    )  # fmt: skip
    assert text is not None
    assert text.isascii()
    assert text.isprintable()
    words = words_of(text)
    assert words[:2] == ["commandbus", "send"]
    assert words[-3:-1] == ["orders", "ship"]
    assert json.loads(words[-1]) == {"text": HOSTILE}
    assert dict(zip(words[2:-3:2], words[3:-3:2], strict=True)) == {
        "--correlation-id": HOSTILE, "--timeout": "1m30s", "--priority": "high", "--max-attempts": "3",
        "--header": f"{HOSTILE}=a={HOSTILE}",
    }  # fmt: skip


def words_of(line: str) -> list[str]:
    """What bash makes of it."""
    ran = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    return ran.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize(
    "name",
    ["x", "x; touch pwn #", "$(touch pwn)", "`x`", "it's", HOSTILE, "", "~", "*", "a b", "größe", "!!", "-x"],
)
def test_a_name_in_a_command_line_is_one_word(name: str) -> None:
    assert words_of(quoted(name)) == [name]
    assert quoted(name).isascii()
    assert quoted(name).isprintable()


def test_a_name_that_begins_with_a_hyphen_is_no_option() -> None:
    assert arguments("orders", "x") == "orders x"
    assert arguments("orders", "--all", 5) == "-- orders --all 5"
    line = as_cli(record(-5))
    assert line == "commandbus send -- orders ship -5"


def test_headers_that_the_command_line_cannot_give_leave_the_copy_as_python() -> None:
    for headers in ({"a": 5}, {"a=b": "c"}, {"": "c"}):
        assert list(copies_of(record({}, headers=headers))) == ["As Python"]


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda item: st.lists(item), max_leaves=5)
)
def test_a_copy_as_python_is_the_same_call(data: Any) -> None:
    class Bus:
        def send(self, *args: Any, **options: Any) -> Any:
            return args, options

    text = as_python(record(data, correlation_id=HOSTILE, headers={"a": "\u202e"}))
    assert text.isascii()
    assert eval(text, {"bus": Bus()}) == (
        ("orders", "ship", data),
        {"correlation_id": HOSTILE, "headers": {"a": "\u202e"}},
    )


def test_a_megabyte_is_not_offered_as_a_copy() -> None:
    assert len(copies_of(record({"n": 1}))) == 2
    assert copies_of(record("x" * 1_000_000)) == {}


def test_frames_of_libraries_are_folded() -> None:
    parts = folded(TRACE)
    assert [(part.is_folded, part.frames) for part in parts] == [(False, 1), (True, 2), (False, 0)]
    assert "\n".join(part.text for part in parts) == TRACE.rstrip("\n")
    assert "helper(1)" in parts[0].text
    assert parts[-1].text == "ValueError: no"
    own = folded(TRACE, own_file="x/y.py")
    assert [(part.is_folded, part.frames) for part in own] == [(False, 1), (True, 1), (False, 1)]


@given(st.text())
@example("a\x1e\rb")
@example("\x1e")
def test_nothing_of_a_text_is_lost(text: str) -> None:
    assert "\n".join(part.text for part in folded(text)) == text.rstrip("\n")
