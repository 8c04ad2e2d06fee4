"""The envelope: whatever a foreign client puts into a queue is a command or refused with a reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.errors import InvalidCommandError
from commandbus.model import envelope, names
from commandbus.model.command import NewCommand

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ENVELOPES = st.fixed_dictionaries(
    {"command_type": st.text(max_size=5) | ANYTHING},
    optional={
        "data": ANYTHING,
        "command_id": st.none() | st.text(max_size=5) | ANYTHING,
        "correlation_id": st.none() | st.text(max_size=5) | ANYTHING,
        "reply_to": st.none() | st.from_regex(r"[a-z_]{1,5}", fullmatch=True) | ANYTHING,
        "max_attempts": st.none() | st.integers(-1, 10) | ANYTHING,
        "timeout": st.none() | st.floats() | st.sampled_from(["2m", "0"]) | ANYTHING,
        "headers": st.none() | st.dictionaries(st.text(max_size=5), ANYTHING, max_size=2) | ANYTHING,
        "command": ANYTHING,
        "surprise": ANYTHING,
    },
)


@given(ANYTHING | ENVELOPES)
def test_anything_is_a_valid_command_or_refused_with_a_reason(message: Any) -> None:
    try:
        new = envelope.read(message, queue="orders__commands", msg_id=5, max_bytes=2000)
    except InvalidCommandError as error:
        new = str(error)
    if isinstance(new, str):
        assert new
        return
    assert isinstance(new, NewCommand)
    names.check_type(new.command_type)
    names.check_id(new.command_id)
    assert new.correlation_id is None or names.check_id(new.correlation_id)
    assert new.reply_to is None or names.check_queue(new.reply_to)
    assert new.max_attempts is None or (type(new.max_attempts) is int and new.max_attempts >= 1)
    seconds = envelope.timeout_seconds(new.timeout)
    assert seconds is None or (seconds >= 0 and math.isfinite(seconds))
    assert new.headers is None or isinstance(new.headers, dict)
    # What is adopted is dumped again: it must be JSON that PostgreSQL takes.
    text = json.dumps([new.data, new.headers], allow_nan=False, ensure_ascii=False)
    text.encode()
    assert "\\u0000" not in text.replace("\\\\", "")


def test_only_the_type_is_needed() -> None:
    new = envelope.read({"command_type": "Ship"}, queue="orders__commands", msg_id=5)
    assert new == NewCommand("Ship", command_id="pgmq-orders__commands-5")


def test_every_field_is_taken_over() -> None:
    new = envelope.read(
        {
            "command_type": "Ship",
            "data": {"order": 7},
            "command_id": "mine",
            "correlation_id": "c",
            "reply_to": "answers",
            "max_attempts": 5,
            "timeout": "2m",
            "headers": {"trace": "t"},
        },
        queue="q",
        msg_id=1,
    )
    assert new == NewCommand("Ship", {"order": 7}, "mine", "c", "answers", 5, headers={"trace": "t"}, timeout="2m")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (None, "the message is null"),
        ([], "the message is an array"),
        ("x", "the message is a string"),
        (True, "the message is a boolean"),
        (5, "the message is a number"),
        (1.5, "the message is a number"),
        ({}, "has no command_type"),
        ({"data": 1}, "has no command_type"),
        ({"command": 7}, "no command 7 belongs to this message"),
        ({"command_type": "x", "dtaa": 1}, "unknown field 'dtaa'"),
        ({"command_type": "x", "command": 7}, "unknown field 'command'"),
        ({"command_type": None}, "command_type None"),
        ({"command_type": ""}, "command_type ''"),
        ({"command_type": "x", "command_id": 7}, "command_id 7"),
        ({"command_type": "x", "command_id": ""}, "command_id ''"),
        ({"command_type": "x", "correlation_id": []}, "correlation_id"),
        ({"command_type": "x", "reply_to": "x; drop table y"}, "reply_to"),
        ({"command_type": "x", "max_attempts": 0}, "max_attempts"),
        ({"command_type": "x", "max_attempts": True}, "max_attempts"),
        ({"command_type": "x", "max_attempts": 10**4000}, "max_attempts"),
        ({"command_type": "x", "timeout": -1}, "timeout: -1 is negative"),
        ({"command_type": "x", "timeout": True}, "timeout: True is not a duration"),
        ({"command_type": "x", "timeout": "1y"}, "timeout: '1y' is not a duration"),
        ({"command_type": "x", "timeout": {}}, "timeout: {} is not a duration"),
        ({"command_type": "x", "timeout": 10**4000}, "timeout: a number of more than 18 digits is longer"),
        ({"command_type": "x", "headers": []}, "headers must be a dict"),
        ({"command_type": "x", "data": "x" * 2000}, "data is 2002 bytes"),
        ({"command_type": "x", "data": math.inf}, "data is not JSON"),
        ({"command_type": "x", "headers": {"a": "x" * 2000}}, "headers is"),
        ({"command_type": "x", "headers": {"a": math.inf}}, "headers is not JSON"),
    ],
)
def test_what_is_no_command_gets_its_reason(message: Any, reason: str) -> None:
    with pytest.raises(InvalidCommandError, match=reason):
        envelope.read(message, queue="q", msg_id=1, max_bytes=1000)


def test_nesting_has_a_limit_that_no_python_decides() -> None:
    def nested(depth: int) -> object:
        value: object = 1
        for _ in range(depth):
            value = [value]
        return value

    def read(depth: int) -> object:
        message = {"command_type": "x", "data": nested(depth)}
        return envelope.read(message, queue="orders__commands", msg_id=1).data

    deepest = envelope.MAX_NESTING - 1  # the message itself is a level too
    assert read(deepest) == nested(deepest)
    with pytest.raises(InvalidCommandError, match="the message is nested more than 201 levels"):
        read(deepest + 1)
