"""copied_command and folded_frames: what the page of a command shows as text."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from commandbus.model.command import CommandRecord, CommandStatus
from commandbus.model.copied_command import as_cli, as_python, copies_of
from commandbus.model.folded_frames import folded

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
    text = as_cli(record({"text": HOSTILE}, correlation_id=HOSTILE, timeout=90.0, priority="high", max_attempts=3))
    assert text.isascii()
    assert text.isprintable()
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    ).stdout.decode().split("\0")[:-1]  # fmt: skip
    assert words[:4] == ["commandbus", "send", "orders", "ship"]
    assert json.loads(words[4]) == {"text": HOSTILE}
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert options == {
        "--correlation-id": HOSTILE, "--timeout": "1m30s", "--priority": "high", "--max-attempts": "3",
    }  # fmt: skip


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
