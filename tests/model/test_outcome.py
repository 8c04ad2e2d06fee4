"""Outcome: each exception has one fate, and no exception, however hostile, costs us the outcome."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg_pool import PoolTimeout

from commandbus.errors import (
    AttemptFencedError,
    BusinessRuleException,
    CommandFailure,
    PermanentCommandError,
    TransientCommandError,
    UnknownCommandTypeError,
)
from commandbus.model.command import MOVES, CommandStatus
from commandbus.model.outcome import STATUS_AFTER, Verdict, describe, judge_failure
from commandbus.model.retry import RetryPolicy

POLICY = RetryPolicy(max_attempts=3, backoff_schedule=[10, 60], jitter=0)


@pytest.mark.parametrize(
    ("error", "first", "last", "code"),
    [
        (TransientCommandError("busy"), "RETRY", "EXHAUSTED", "TRANSIENT"),
        (TransientCommandError("busy", code="HTTP_503"), "RETRY", "EXHAUSTED", "HTTP_503"),
        (PermanentCommandError("no such order"), "PERMANENT", "PERMANENT", "PERMANENT"),
        (PermanentCommandError("", code=""), "PERMANENT", "PERMANENT", ""),
        (BusinessRuleException("no credit"), "BUSINESS_RULE", "BUSINESS_RULE", "BUSINESS_RULE"),
        (CommandFailure("neither nor"), "RETRY", "EXHAUSTED", "FAILED"),
        (UnknownCommandTypeError("orders", "Ship"), "UNKNOWN_TYPE", "UNKNOWN_TYPE", "UNKNOWN_COMMAND_TYPE"),
        (ValueError("x"), "RETRY", "EXHAUSTED", "ERROR"),
        (TimeoutError("x"), "RETRY", "EXHAUSTED", "TIMEOUT"),
        (psycopg.errors.QueryCanceled("x"), "RETRY", "EXHAUSTED", "TIMEOUT"),
        (PoolTimeout("x"), "RETRY", "EXHAUSTED", "POOL_TIMEOUT"),
        (AttemptFencedError("x"), "RETRY", "EXHAUSTED", "ERROR"),
        (asyncio.CancelledError(), "RETRY", "EXHAUSTED", "ERROR"),
        (SystemExit(3), "RETRY", "EXHAUSTED", "ERROR"),
        (KeyboardInterrupt(), "RETRY", "EXHAUSTED", "ERROR"),
        (RecursionError(), "RETRY", "EXHAUSTED", "ERROR"),
        (MemoryError(), "RETRY", "EXHAUSTED", "ERROR"),
        (ExceptionGroup("several", [ValueError("a"), TypeError("b")]), "RETRY", "EXHAUSTED", "ERROR"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_exception_has_its_fate(error: BaseException, first: str, last: str, code: str) -> None:
    for charge, verdict in ((1, first), (2, first), (3, last), (4, last)):
        judged = judge_failure(error, charge=charge, policy=POLICY, max_attempts=None)
        assert judged.verdict == Verdict(verdict)
        assert judged.failure.error_type == type(error).__name__
        assert judged.failure.error_code == code
        assert judged.delay_seconds == ({1: 10, 2: 60}[charge] if verdict == "RETRY" else 0)


def test_a_subclass_shares_its_parents_fate() -> None:
    class NoCreditError(BusinessRuleException):
        default_code = "NO_CREDIT"

    judged = judge_failure(NoCreditError("40 € short"), charge=1, policy=POLICY, max_attempts=None)
    assert (judged.verdict, judged.failure.error_type) == (Verdict.BUSINESS_RULE, "NoCreditError")
    assert (judged.failure.error_code, judged.failure.error) == ("NO_CREDIT", "40 € short")


@given(st.integers(1, 20), st.none() | st.integers(1, 20), st.integers(1, 20))
def test_the_commands_own_limit_wins(charge: int, own: int | None, of_the_policy: int) -> None:
    policy = RetryPolicy(max_attempts=of_the_policy)
    judged = judge_failure(ValueError(), charge=charge, policy=policy, max_attempts=own)
    assert (judged.verdict is Verdict.RETRY) == (charge < (own or of_the_policy))


def test_every_verdict_that_ends_an_attempt_is_a_move_that_exists() -> None:
    for status in STATUS_AFTER.values():
        assert status in MOVES[CommandStatus.IN_PROGRESS]
    assert set(MOVES) == set(CommandStatus)
    for status, moves in MOVES.items():
        assert status.is_final == (not moves)


class _RaisesInStrError(Exception):
    def __init__(self, what: BaseException) -> None:
        self.what = what

    def __str__(self) -> str:
        raise self.what

    __repr__ = __str__


class _NoTextError(Exception):
    def __str__(self) -> Any:
        return 5  # noqa: PLE0307


class _HostileCode:
    def __str__(self) -> str:
        raise RuntimeError("no code")


class _HostileDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")

    __iter__ = items


@pytest.mark.parametrize(
    "error",
    [
        _RaisesInStrError(RuntimeError("ha")),
        _RaisesInStrError(SystemExit(1)),
        _RaisesInStrError(KeyboardInterrupt()),
        _RaisesInStrError(RecursionError()),
        _NoTextError(),
        ValueError("\x00 and \ud800"),
        ValueError("x" * 1_000_000),
        TransientCommandError("x", code=_HostileCode()),  # type: ignore[arg-type]
        TransientCommandError("x", code="c\x00" * 1000),
        TransientCommandError("x", details=_HostileDict(a=1)),
        TransientCommandError("x", details={"a": object()}),
        TransientCommandError("x", details=float("nan")),
        TransientCommandError("x", details="\x00"),
        TransientCommandError("x", details=["x" * 100_000]),
        type("N" * 1000, (Exception,), {})(),
    ],
    ids=range(15),
)
def test_a_hostile_exception_is_described_in_storable_text(error: BaseException) -> None:
    failure = describe(error, traceback="line\x00\ud800")
    for text in (failure.error_type, failure.error_code, failure.error, failure.traceback or ""):
        assert "\x00" not in text
        text.encode()
    assert len(failure.error) < 9000
    assert len(failure.error_code) < 1000  # NUL is shown as four characters
    assert len(failure.error_type) < 300
    if failure.details is not None:
        assert len(failure.details.encode()) <= 65536
        assert "\\u0000" not in failure.details
        json.loads(failure.details)


def test_details_are_kept_as_json() -> None:
    failure = describe(PermanentCommandError("x", details={"order": 7, "lines": [1, None]}))
    assert json.loads(failure.details or "") == {"order": 7, "lines": [1, None]}
    assert describe(PermanentCommandError("x")).details is None
    assert describe(ValueError("x")).details is None
    left_out = json.loads(describe(PermanentCommandError("x", details={"a": {1}})).details or "")
    assert "left out" in left_out
    assert "$.a: set" in left_out


@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_any_message_and_code_are_storable(message: str, code: str) -> None:
    failure = describe(TransientCommandError(message, code=code))
    (failure.error + failure.error_code).encode()
    assert "\x00" not in failure.error + failure.error_code
