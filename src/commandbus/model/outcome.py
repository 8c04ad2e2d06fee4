"""How an attempt ended, and what that means for its command.

`judge_failure` is the one place where an exception becomes a fate:

    BusinessRuleException   → FAILED, final
    PermanentCommandError   → troubleshooting queue
    UnknownCommandTypeError → troubleshooting queue, code UNKNOWN_COMMAND_TYPE
    anything else           → retried while the charge and the policy allow it; then `on_exhausted` decides:
                              troubleshooting queue, or FAILED, final

A `Snooze` is not a failure: the executor makes its settlement (`worker/execution/execute.py`).
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from commandbus.errors import (
    BusinessRuleException,
    CommandFailure,
    InvalidCommandError,
    PermanentCommandError,
    UnknownCommandTypeError,
)
from commandbus.model import payload
from commandbus.model.command import CommandStatus
from commandbus.model.retry import NO_RULING, OnExhausted, RetryPolicy, Ruling
from commandbus.quick_dataclass import dataclass


class Verdict(StrEnum):
    """What an attempt row says about an attempt that did not simply complete."""

    RETRY = "RETRY"
    EXHAUSTED = "EXHAUSTED"
    FAILED = "FAILED"
    EXPIRED = "EXPIRED"
    SNOOZED = "SNOOZED"
    PERMANENT = "PERMANENT"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    BUSINESS_RULE = "BUSINESS_RULE"
    TIMED_OUT = "TIMED_OUT"
    CANCELED = "CANCELED"
    LOST = "LOST"
    WAIVED = "WAIVED"
    GIVEN_BACK = "GIVEN_BACK"
    PARKED = "PARKED"
    NOTE = "NOTE"


STATUS_AFTER = {
    Verdict.EXHAUSTED: CommandStatus.IN_TROUBLESHOOTING_QUEUE,
    Verdict.PERMANENT: CommandStatus.IN_TROUBLESHOOTING_QUEUE,
    Verdict.UNKNOWN_TYPE: CommandStatus.IN_TROUBLESHOOTING_QUEUE,
    Verdict.BUSINESS_RULE: CommandStatus.FAILED,
    Verdict.FAILED: CommandStatus.FAILED,
    Verdict.EXPIRED: CommandStatus.CANCELED,
    Verdict.TIMED_OUT: CommandStatus.FAILED,
    Verdict.CANCELED: CommandStatus.CANCELED,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed, in storable text; `rung` is the limit that stopped it, `autopsy` what was seen,
    `own_frame` where in the application's own code it was."""

    error_type: str
    error_code: str
    error: str
    traceback: str | None = None
    details: str | None = None  # JSON text
    rung: str | None = None
    autopsy: str | None = None  # JSON text
    duration_ms: int | None = None
    own_frame: str | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What becomes of the command: a verdict, and the delay if it is tried again."""

    verdict: Verdict
    failure: Failure
    delay_seconds: float = 0.0
    is_given_up: bool = False  # the policy does not retry such an exception


def describe(error: BaseException, traceback: str | None = None) -> Failure:
    """The storable description of an exception; never raises, whatever its __str__ does."""
    code = error.code if isinstance(error, CommandFailure) else _CODES.get(type(error).__name__, "ERROR")
    if isinstance(error, UnknownCommandTypeError):
        code = "UNKNOWN_COMMAND_TYPE"
    return Failure(
        error_type=payload.clean_text(type(error).__name__, longest=200),
        error_code=payload.clean_text(_text_of(code), longest=200),
        error=payload.clean_text(_text_of(error), longest=8192),
        traceback=None if traceback is None else payload.clean_text(traceback),
        details=_details_of(error),
    )


_CODES = {"QueryCanceled": "TIMEOUT", "TimeoutError": "TIMEOUT", "PoolTimeout": "POOL_TIMEOUT"}


def judge_failure(
    error: BaseException,
    *,
    charge: int,
    policy: RetryPolicy,
    max_attempts: int | None,
    spread: float = 0.5,
    traceback: str | None = None,
) -> Judgement:
    """The fate of a command whose attempt, the `charge`-th to be charged, raised `error`."""
    failure = describe(error, traceback)
    if isinstance(error, BusinessRuleException):
        return Judgement(Verdict.BUSINESS_RULE, failure)
    if isinstance(error, PermanentCommandError):
        return Judgement(Verdict.PERMANENT, failure)
    if isinstance(error, UnknownCommandTypeError):
        return Judgement(Verdict.UNKNOWN_TYPE, failure)
    return judge(failure, charge=charge, policy=policy, max_attempts=max_attempts, spread=spread)


def judge(
    failure: Failure,
    *,
    charge: int,
    policy: RetryPolicy,
    max_attempts: int | None,
    is_final: bool = False,
    spread: float = 0.5,
    ruling: Ruling = NO_RULING,
    on_exhausted: OnExhausted | None = None,
) -> Judgement:
    """The fate of a command after a failure that may pass; `is_final`: its handler wants no timeout retried.

    `ruling` is what the policy says about the exception. `on_exhausted` is the command's or the handler's own.
    """
    if is_final:
        return Judgement(Verdict.TIMED_OUT, failure)
    if not ruling.gives_up and policy.may_retry(charge, max_attempts=max_attempts):
        own = ruling.delay_seconds
        delay = policy.delay_seconds(charge, spread=spread) if own is None else own
        return Judgement(Verdict.RETRY, failure, delay)
    return replace(exhausted(failure, on_exhausted or policy.on_exhausted), is_given_up=ruling.gives_up)


def exhausted(failure: Failure, on_exhausted: OnExhausted) -> Judgement:
    """The fate of a command whose attempts are used up."""
    return Judgement(Verdict.FAILED if on_exhausted == "fail" else Verdict.EXHAUSTED, failure)


_FATES = {
    Verdict.RETRY: "tried again in {delay:.3g} s",
    Verdict.EXHAUSTED: "attempts used up: to the troubleshooting queue",
    Verdict.FAILED: "attempts used up: FAILED for good (on_exhausted)",
    Verdict.PERMANENT: "to the troubleshooting queue",
    Verdict.UNKNOWN_TYPE: "to the troubleshooting queue",
    Verdict.BUSINESS_RULE: "FAILED for good",
    Verdict.TIMED_OUT: "FAILED for good (on_timeout)",
    Verdict.CANCELED: "CANCELED",
}


def fate_of(judgement: Judgement) -> str:
    """What becomes of the command, for a line in the log."""
    text = _FATES[judgement.verdict].format(delay=judgement.delay_seconds)
    return text.replace("attempts used up", "not retried by its policy") if judgement.is_given_up else text


EXPIRED = Failure("Expired", "EXPIRED", "it was not started before it expired")
"""Why a command that was not started in time is CANCELED."""


_FAILS = frozenset(verdict for verdict, status in STATUS_AFTER.items() if status is CommandStatus.FAILED)


def insist(judgement: Judgement, step: int | None, *, has_open_effect: bool = False) -> Judgement:
    """A process cannot go on without its messages (step 0) and compensations (below 0): where another command
    would be FAILED for good, these need a person. So does a command with an open effect: nobody knows whether its
    call was made."""
    is_needed = has_open_effect or (step is not None and step <= 0)
    if is_needed and judgement.verdict in _FAILS:
        return replace(judgement, verdict=Verdict.PERMANENT)
    return judgement


def _text_of(value: object) -> str:
    try:
        return str(value)
    except BaseException as broken:  # noqa: BLE001 - a hostile __str__ must not cost us the outcome
        return f"<{type(value).__name__}.__str__ raised {type(broken).__name__}>"


def _details_of(error: BaseException) -> str | None:
    if not isinstance(error, CommandFailure) or error.details is None:
        return None
    try:
        return payload.dump(error.details, what="details", max_bytes=65536)
    except InvalidCommandError as broken:
        return payload.dump(f"details left out: {broken}", what="details")
    except Exception as broken:  # noqa: BLE001 - raised by the details themselves
        return payload.dump(f"details left out: {type(broken).__name__}", what="details")
