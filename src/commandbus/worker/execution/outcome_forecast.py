"""Says what will become of a command if its attempt ends now: `ctx.outcome_of(error)`.

It asks the same functions as the executor (`execute.py`), in the same order, and changes nothing. What is decided
only after the attempt is not known here: a limit may waive a failed call, and a person may cancel.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from psycopg import errors as pg
from psycopg_pool import PoolTimeout

from commandbus.errors import (
    AttemptCanceledError,
    AttemptFencedError,
    BusinessRuleException,
    DeadlineExceededError,
    LimitLostError,
    PermanentCommandError,
    UnknownCommandTypeError,
)
from commandbus.model import attempt_outcome
from commandbus.model.api_errors import api_failure
from commandbus.model.attempt_outcome import COMPLETED, AttemptOutcome
from commandbus.model.outcome import (
    Failure,
    Judgement,
    Verdict,
    describe,
    exhausted,
    insist,
    judge,
    judge_failure,
)
from commandbus.model.retry import NO_RULING, RetryPolicy, Ruling, may_snooze, rule_on
from commandbus.model.snooze import EffectWait, Snooze
from commandbus.worker.execution.attempt import Attempt, Stop, Why
from commandbus.worker.exhaustion import ExhaustedError

CANCELLATIONS = (
    asyncio.CancelledError,
    AttemptCanceledError,
    TimeoutError,
    PoolTimeout,
    pg.QueryCanceled,
    pg.AdminShutdown,
)
"""What a handler raises when it gives in: to us, or because we canceled its query."""
_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (pg.LockNotAvailable, "LOCK_TIMEOUT"),
    (pg.IdleInTransactionSessionTimeout, "IDLE_IN_TRANSACTION"),
    (pg.AdminShutdown, "ADMIN_SHUTDOWN"),
    (DeadlineExceededError, "TIMEOUT"),
)
"""What the executor writes for these (`Executor._explain`)."""
_STOP_CODES = {Why.DEADLINE: "TIMEOUT", Why.CANCEL: "CANCELED"}


def forecast(attempt: Attempt, error: BaseException | None, default: RetryPolicy) -> AttemptOutcome:
    """The outcome of an attempt that raises `error`, or returns. `default`: the policy of handlers without one."""
    if error is None or attempt.has_committed:
        return COMPLETED
    handler, stop = attempt.handler, attempt.stop
    policy = default if handler is None or handler.retry_policy is None else handler.retry_policy
    failure = describe(error)
    if stop is not None and (stop.why is Why.CANCEL or isinstance(error, CANCELLATIONS)):
        return _stopped(attempt, stop, failure, policy)
    if isinstance(error, Snooze):
        return _snoozed(attempt, error, failure, policy)
    if isinstance(error, AttemptFencedError):
        return attempt_outcome.tried_again(Verdict.LOST, failure.error_code)  # another worker has the command
    if isinstance(error, LimitLostError | ExhaustedError):
        return attempt_outcome.tried_again(Verdict.WAIVED, failure.error_code)
    if _is_refused(attempt, error):
        return attempt_outcome.tried_again(Verdict.PARKED, failure.error_code)
    if isinstance(error, BusinessRuleException | PermanentCommandError | UnknownCommandTypeError):
        return _after(attempt, judge_failure(error, charge=attempt.charge, policy=policy, max_attempts=None))
    timeouts = (pg.QueryCanceled, pg.LockNotAvailable, DeadlineExceededError)
    is_nowait = "could not obtain lock" in failure.error
    is_timeout = isinstance(error, timeouts) and not is_nowait
    code = next((code for kind, code in _CODES if isinstance(error, kind) and not is_nowait), failure.error_code)
    failure = replace(failure, error_code=code)
    return _judged(attempt, failure, policy, is_timeout=is_timeout, ruling=rule_on(policy, error))


def _stopped(attempt: Attempt, stop: Stop, failure: Failure, policy: RetryPolicy) -> AttemptOutcome:
    code = _STOP_CODES.get(stop.why, stop.why.upper())
    told = Failure(failure.error_type, code, stop.text)
    if stop.why is Why.CANCEL:
        return _after(attempt, Judgement(Verdict.CANCELED, told))
    if stop.why is Why.DEADLINE:
        return _judged(attempt, told, policy, is_timeout=True)
    return attempt_outcome.tried_again(Verdict.WAIVED, code)


def _snoozed(attempt: Attempt, snooze: Snooze, failure: Failure, policy: RetryPolicy) -> AttemptOutcome:
    delay, options = snooze.delay_seconds, attempt.options
    snoozes, since = options.snoozes or 0, options.snoozed_ago or 0.0
    is_wait = isinstance(snooze, EffectWait)
    if is_wait or may_snooze(policy, snoozes=snoozes, since_seconds=since, delay_seconds=delay):
        return attempt_outcome.tried_again(Verdict.SNOOZED, failure.error_code, delay)
    told = Failure(failure.error_type, "SNOOZED_TOO_OFTEN", failure.error)
    return _after(attempt, exhausted(told, attempt.on_exhausted(policy)))


def _judged(
    attempt: Attempt, failure: Failure, policy: RetryPolicy, *, is_timeout: bool, ruling: Ruling = NO_RULING
) -> AttemptOutcome:
    handler = attempt.handler
    judgement = judge(
        failure,
        charge=attempt.claimed.charge_after(failure),
        policy=policy,
        max_attempts=attempt.max_attempts,
        is_final=is_timeout and handler is not None and handler.options.on_timeout == "fail",
        ruling=ruling,
        on_exhausted=attempt.on_exhausted(policy),
    )
    return _after(attempt, judgement)


def _after(attempt: Attempt, judgement: Judgement) -> AttemptOutcome:
    return attempt_outcome.after(insist(judgement, attempt.step, has_open_effect=attempt.has_open_effect))


def _is_refused(attempt: Attempt, error: BaseException) -> bool:
    """Has an API said "not now" (429), and a limit protects it?"""
    api = api_failure(error)
    if api is None or api.kind != "rate_limited":
        return False
    use, handler = attempt.limit_use, attempt.handler
    return bool(api.limit or (use is not None and use.blamed) or (handler is not None and handler.options.limits))
