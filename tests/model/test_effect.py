"""What an attempt may do with an effect that it finds, and which processes are certainly dead."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.errors import InvalidCommandError
from commandbus.model.effect import (
    EffectState,
    FoundEffect,
    Step,
    check_effect_key,
    check_effect_name,
    decide,
    default_key,
)
from commandbus.worker import process_identity

NOW = datetime.now(UTC)


def found(ended_ago: float = 0.0) -> FoundEffect:
    return FoundEffect(EffectState.INTENT, "k", None, 1, "w", None, NOW, False, ended_ago)


@given(
    can_verify=st.booleans(),
    is_dead=st.booleans(),
    settle_after=st.none() | st.floats(0, 1e6),
    ended_ago=st.floats(-1e3, 1e6),
)
def test_verify_is_asked_only_when_the_call_cannot_arrive_any_more(
    can_verify: bool, is_dead: bool, settle_after: float | None, ended_ago: float
) -> None:
    decision = decide(found(ended_ago), can_verify=can_verify, settle_after=settle_after, is_dead=is_dead)
    has_settled = settle_after is not None and ended_ago >= settle_after
    assert (decision.step is Step.VERIFY) == (can_verify and (is_dead or has_settled))
    if decision.step is Step.WAIT:
        assert decision.seconds == settle_after - ended_ago > 0  # type: ignore[operator]
    else:
        assert decision.step is Step.VERIFY or not can_verify or settle_after is None


def test_a_default_key_is_of_one_command_and_one_effect() -> None:
    keys = [
        default_key(domain, command_id, id_, name)
        for domain in ("a", "b")
        for command_id in ("1", "2")
        for id_ in (1, 2)
        for name in ("x", "y")
    ]
    assert len(set(keys)) == 16
    # The same in every process and release: an effect that was begun keeps its key.
    assert keys[0] == "1b8b5c48-7d83-5536-b2f6-0d54046ca509"


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", 7, None])
def test_a_bad_name_is_refused_by_its_value(name: Any) -> None:
    with pytest.raises(InvalidCommandError, match="the name of an effect"):
        check_effect_name(name)


def test_a_bad_key_is_refused_by_its_value() -> None:
    assert check_effect_key(None) is None
    with pytest.raises(InvalidCommandError, match="the key of an effect"):
        check_effect_key("")


def test_only_a_process_that_is_certainly_dead_is_dead() -> None:
    code = "from commandbus.worker.process_identity import identity; print(identity(), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    told = process.stdout.readline().strip()
    boot, namespace, pid, start = told.split()
    assert process_identity.is_dead(told) is False
    assert process_identity.is_dead(process_identity.identity()) is False
    # Its number belongs to another process by now.
    assert process_identity.is_dead(f"{boot} {namespace} {pid} {int(start) + 1}") is True
    # Another boot, another container, a system that says nothing: nobody knows.
    assert process_identity.is_dead(f"other {namespace} {pid} {start}") is None
    assert process_identity.is_dead(f"{boot} pid:[1] {pid} {start}") is None
    assert process_identity.is_dead(None) is None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not taken note of
    assert process_identity.is_dead(told) is True
    process.communicate()
    assert process_identity.is_dead(told) is True
