"""fingerprint: which failures are alike, and which frame of a traceback is the application's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.errors import InvalidCommandError
from commandbus.model.fingerprint import check_fingerprint, fingerprint_of, own_frame, own_frame_of
from commandbus.model.outcome import Failure

CHAINED = """Traceback (most recent call last):
  File "/app/shop/api.py", line 3, in fetch
    connect()
  File "/lib/socket.py", line 9, in connect
    raise OSError
OSError: no

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/app/shop/ship.py", line 12, in ship
    helper(1)
  File "/app/shop/ship.py", line 40, in helper
    raise ValueError from error
  File "/lib/json.py", line 1, in loads
    x
ValueError: no
"""
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/app/shop/group.py", line 3, in gather
  |     raise ExceptionGroup("two", errors)
  | ExceptionGroup: two (2 sub-exceptions)
"""


def name_of(file: str) -> str | None:
    return file.removeprefix("/app/") if file.startswith("/app/") else None


def test_the_innermost_own_frame_of_what_was_raised_last_counts() -> None:
    assert own_frame(CHAINED, name_of) == "shop/ship.py: helper"
    assert own_frame(GROUP, name_of) == "shop/group.py: gather"
    assert own_frame(CHAINED.replace("/app/shop/ship", "/lib/ship"), name_of) == "shop/api.py: fetch"
    assert own_frame("ValueError: no", name_of) is None


def test_an_autopsy_is_read_like_a_traceback() -> None:
    autopsy = '{"stacks": [{"title": "t", "frames": ["  File \\"/app/a.py\\", line 1, in wait\\n    x()"]}]}'
    stuck = Failure("ExecutionStuck", "EXECUTION_STUCK", "", None, None, "stuck", autopsy)
    assert own_frame_of(stuck, name_of) == "a.py: wait"
    assert own_frame_of(Failure("E", "C", "", autopsy='{"stacks": [7, {"frames": 3}]}'), name_of) is None
    assert own_frame_of(Failure("E", "C", ""), name_of) is None


def test_what_makes_another_failure() -> None:
    base = Failure("ValueError", "ERROR", "order 17", own_frame="a.py: f")
    alike = fingerprint_of("orders", "ship", base)
    assert alike == fingerprint_of(
        "orders", "ship", Failure("ValueError", "ERROR", "order 18", own_frame="a.py: f")
    )
    others = [
        fingerprint_of("orders", "bill", base),
        fingerprint_of("mails", "ship", base),
        fingerprint_of("orders", "ship", Failure("KeyError", "ERROR", "", own_frame="a.py: f")),
        fingerprint_of("orders", "ship", Failure("ValueError", "OTHER", "", own_frame="a.py: f")),
        fingerprint_of("orders", "ship", Failure("ValueError", "ERROR", "", own_frame="a.py: g")),
        fingerprint_of("orders", "ship", Failure("ValueError", "ERROR", "")),
    ]
    assert len({alike, *others}) == 7
    assert check_fingerprint(alike) == alike


@pytest.mark.parametrize("value", ["", "x", "0123456789AB", "0123456789abc", 7, "'; DROP"])
def test_bad_fingerprints_are_named(value: object) -> None:
    with pytest.raises(InvalidCommandError, match="fingerprint must be the twelve hexadecimal digits"):
        check_fingerprint(value)


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    found = own_frame(text, lambda file: file)
    assert found is None or len(found) <= 320
