"""Run one attempt and return how it ended. Whatever a handler raises becomes a settlement; nothing escapes.

The sync and the async version differ in one `await`. `completed` and `failed` decide, for both, what an end means.
If a sync handler returns an awaitable, that is awaited on the event loop, and its context is the async one then.
An attempt that was asked to stop may still complete: a result that comes within its grace counts. If it raises
what a canceled attempt raises, that is attributed to the reason for the stop: its deadline, a person, the
shutdown, or the loss of its lease.
"""

from __future__ import annotations

import inspect
import logging
import random
import traceback
from collections.abc import Awaitable, Callable, Container, Iterable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from psycopg import errors as pg
from psycopg_pool import PoolTimeout

from commandbus.clock import epoch, monotonic
from commandbus.errors import (
    AttemptFencedError,
    BusinessRuleException,
    DeadlineExceededError,
    InvalidPayloadError,
    LimitLostError,
    PermanentCommandError,
    TransactionUsedError,
    UnknownCommandTypeError,
)
from commandbus.flow.commands.claimed_row import TIMEOUT
from commandbus.flow.commands.settle import Done, Settlement
from commandbus.logger import safe_logger
from commandbus.model.api_errors import ApiFailure, api_failure
from commandbus.model.command import CommandStatus
from commandbus.model.durations import format_seconds
from commandbus.model.fingerprint import own_frame_of
from commandbus.model.outcome import (
    STATUS_AFTER,
    Failure,
    Judgement,
    Verdict,
    describe,
    exhausted,
    fate_of,
    insist,
    judge,
    judge_failure,
)
from commandbus.model.retry import NO_RULING, RetryPolicy, Ruling, may_snooze, rule_on
from commandbus.model.snooze import EffectWait, Snooze
from commandbus.model.timeouts import Timeouts
from commandbus.quick_dataclass import dataclass
from commandbus.worker import masking
from commandbus.worker.execution.adapters import OURS
from commandbus.worker.execution.attempt import NEVER, Attempt, Stop, Why
from commandbus.worker.execution.context import (
    AsyncHandlerContext,
    HandlerContext,
    Services,
    become_async,
    dump_result,
)
from commandbus.worker.execution.handlers import Handler
from commandbus.worker.execution.outcome_forecast import CANCELLATIONS
from commandbus.worker.exhaustion import ExhaustedError
from commandbus.worker.health import HealthStatus
from commandbus.worker.isolation.remote_errors import API, RULING
from commandbus.worker.own_code import OwnCode

logger = safe_logger("commandbus.worker")


_LEVELS = {Verdict.BUSINESS_RULE: logging.INFO, Verdict.FAILED: logging.ERROR} | {
    verdict: logging.ERROR
    for verdict, status in STATUS_AFTER.items()
    if status is CommandStatus.IN_TROUBLESHOOTING_QUEUE
}


@dataclass(frozen=True, slots=True)
class Note:
    """An exception after the completing transaction had committed: it is recorded, and never leads to a retry."""

    attempt: Attempt
    failure: Failure


class LimitDecides:
    """How an attempt ended whose limit decides what becomes of it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class RateLimited(LimitDecides):
    """How an attempt ended whose API has refused it."""

    limit: str
    failure: Failure
    api: ApiFailure


@dataclass(frozen=True, slots=True)
class CallFailed(LimitDecides):
    """How an attempt ended whose call to a limited API failed: a 5xx, or no answer in time. `charge` makes the
    settlement if it is charged for that."""

    failure: Failure
    charge: Callable[[], Settlement]


Written = Settlement | Done | Note | None
"""What is left to write about an attempt; None if its own transaction wrote everything."""

Ended = Written | RateLimited | CallFailed
"""How an attempt ended: what becomes of one that an API has refused or failed is decided by its limit."""


class Executor:
    """Runs attempts for one worker."""

    def __init__(
        self,
        services: Services,
        policy: RetryPolicy,
        timeouts: Timeouts,
        handlers: Iterable[Handler],
        health: HealthStatus,
        *,
        running: Container[Attempt],
        on_failed: Callable[[Attempt, Judgement], None],
        await_on_loop: Callable[[Attempt, Awaitable[Any]], tuple[Any, BaseException | None]],
    ) -> None:
        self._running = running
        self._await_on_loop = await_on_loop
        self._on_failed = on_failed
        self._services = services
        self._policy = policy
        self._timeouts = timeouts
        self._health = health
        handlers = list(handlers)
        self._own_code = OwnCode(handlers)
        self._usual = timeouts.deadline_seconds() or NEVER
        self._limits = {id(item): timeouts.deadline_seconds(item.options.timeout) or NEVER for item in handlers}

    def begin(self, attempt: Attempt) -> None:
        """Stamp the start and the deadline: the command's own, else the handler's or the worker's."""
        attempt.started = epoch()
        attempt.started_at = now = monotonic()
        own = attempt.row[TIMEOUT]
        limit = self._limits.get(id(attempt.handler), self._usual) if own is None else own or NEVER
        attempt.deadline_at = now + limit

    def is_exhausted(self, attempt: Attempt) -> bool:
        """Were all charged attempts used up before this one (by workers that died of it)?"""
        policy = self._policy_of(attempt)
        return attempt.charge > 1 and not policy.may_retry(attempt.charge - 1, max_attempts=attempt.max_attempts)

    def exhaust(self, attempt: Attempt) -> Settlement:
        """The settlement of a command that is not run again."""
        failure = Failure(
            "WorkerLost",
            "WORKER_LOST",
            f"{attempt.charge - 1} attempts ended with the loss of their worker or lease; it is not retried",
        )
        judgement = exhausted(failure, attempt.on_exhausted(self._policy))
        _log(logging.ERROR, attempt, f"{failure.error}; {fate_of(judgement)}")
        return attempt.fail(judgement)

    def run(self, attempt: Attempt) -> Ended:
        """Run a sync handler to its end."""
        handler = attempt.handler
        try:
            if handler is None:
                raise UnknownCommandTypeError(attempt.domain, attempt.command_type)
            ctx = HandlerContext(attempt, self._services)
            result = handler.function(ctx.command, ctx) if handler.takes_command else handler.function(ctx)
            if result is None and not attempt.has_committed:
                return attempt.done()
            if inspect.isawaitable(result):
                become_async(ctx)
                result, error = self._await_on_loop(attempt, result)
                return self.completed(attempt, result) if error is None else self.failed(attempt, error)
            return self.completed(attempt, result)
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like end the attempt, not the slot
            return self.failed(attempt, error)

    async def run_async(self, attempt: Attempt) -> Ended:
        """Run an async handler to its end."""
        handler = attempt.handler
        try:
            if handler is None:
                raise UnknownCommandTypeError(attempt.domain, attempt.command_type)
            ctx = AsyncHandlerContext(attempt, self._services)
            result = await (handler.function(ctx.command, ctx) if handler.takes_command else handler.function(ctx))
            if result is None and not attempt.has_committed:
                return attempt.done()
            return self.completed(attempt, result)
        except BaseException as error:  # noqa: BLE001
            return self.failed(attempt, error)

    def completed(self, attempt: Attempt, result: Any) -> Ended:
        """The handler returned."""
        if result is None:
            return None if attempt.has_committed else attempt.done()
        if attempt.has_committed:
            text = (
                "the handler returned a value after its transaction had completed the command: the value was not "
                "stored. Give the result with tx.complete(result) and return nothing, or register the handler "
                "with transaction=True and return it"
            )
            _log(logging.ERROR, attempt, text)
            return Note(attempt, Failure("ReturnedTooLate", "RETURNED_TOO_LATE", text))
        return attempt.complete(dump_result(result, self._services.max_payload_bytes, attempt.handler))

    def failed(self, attempt: Attempt, error: BaseException, trace: str | None = None) -> Ended:
        """The handler raised; `trace` is its traceback as text, if it was raised elsewhere."""
        if attempt not in self._running:
            # It was abandoned as stuck and judged then: the end of what it left behind changes nothing.
            return None
        raised = None
        if trace is None and not isinstance(error, UnknownCommandTypeError | InvalidPayloadError):
            trace, raised = traceback_of(error), error
        if attempt.has_committed:
            return self._note(attempt, error, trace, raised)
        if isinstance(error, AttemptFencedError):
            attempt.is_lost = True
        stop = attempt.stop
        use = attempt.limit_use
        if stop is not None and (stop.why is Why.CANCEL or isinstance(error, CANCELLATIONS)):
            if use is not None:
                use.note_stop(is_late=stop.why is Why.DEADLINE)
            return self._stopped(attempt, stop, trace)
        if isinstance(error, Snooze):
            return self._snooze(attempt, error, describe(error, trace))
        if isinstance(error, LimitLostError | ExhaustedError):
            if use is not None and isinstance(error, LimitLostError):
                use.note_stop(is_late=False)
            return self.waive(attempt, replace(describe(error, trace), duration_ms=attempt.elapsed_ms()))
        api = self._api_of(error)
        if api is not None and (refused := self._refused(attempt, api, error, trace)) is not None:
            return refused
        if isinstance(error, BusinessRuleException | PermanentCommandError | UnknownCommandTypeError):
            judgement = judge_failure(
                error, charge=attempt.charge, policy=self._policy, max_attempts=None, traceback=trace
            )
            return self._fail(attempt, judgement, raised)
        self._health.record_failure(error)
        failure = self._explain(error, trace)
        is_timeout = failure.rung is not None
        if is_timeout:
            failure = replace(failure, duration_ms=attempt.elapsed_ms())
        ruling = self._rule(attempt, error)
        return self._conclude(
            attempt, failure, raised, is_timeout=is_timeout, is_calls=api is not None, ruling=ruling
        )

    def _note(
        self, attempt: Attempt, error: BaseException, trace: str | None, raised: BaseException | None
    ) -> Note:
        """It raised after its transaction had completed the command. A second transaction is the author's
        mistake."""
        if isinstance(error, TransactionUsedError):
            _log(logging.ERROR, attempt, f"was completed, and then its handler failed: {error}", raised=raised)
        else:
            text = f"raised {type(error).__name__} after its transaction had completed the command: only noted"
            _log(logging.WARNING, attempt, text)
        return Note(attempt, attempt.masked(describe(error, trace)))

    def _snooze(self, attempt: Attempt, snooze: Snooze, failure: Failure) -> Settlement:
        """Its handler wants to be called again later, if the policy still allows that."""
        failure = attempt.masked(replace(failure, traceback=None, duration_ms=attempt.elapsed_ms()))
        delay, options, policy = snooze.delay_seconds, attempt.options, self._policy_of(attempt)
        snoozes, since = options.snoozes or 0, options.snoozed_ago or 0.0
        is_allowed = isinstance(snooze, EffectWait) or may_snooze(
            policy, snoozes=snoozes, since_seconds=since, delay_seconds=delay
        )
        if is_allowed:
            self._on_failed(attempt, Judgement(Verdict.SNOOZED, failure))
            _log(logging.INFO, attempt, f"is snoozed for {format_seconds(delay)}: {failure.error or 'no reason'}")
            return attempt.snooze(failure, delay)
        text = (
            f"snoozed {snoozes} times in {format_seconds(round(since))}, and its retry policy allows "
            f"max_snoozes {policy.max_snoozes} and max_snooze_time {policy.max_snooze_time:g} s; the handler's "
            f"reason: {failure.error or 'none'}"
        )
        failure = replace(failure, error_code="SNOOZED_TOO_OFTEN", error=text)
        return self._fail(attempt, exhausted(failure, attempt.on_exhausted(self._policy)))

    def _rule(self, attempt: Attempt, error: BaseException) -> Ruling:
        """What the policy says about the exception. Where a child process ran the handler, it was asked there."""
        ruling = getattr(error, RULING, None)
        if not isinstance(ruling, Ruling):
            ruling = rule_on(self._policy_of(attempt), error)
        if ruling.problem is not None:
            _log(logging.ERROR, attempt, f"{ruling.problem}: its backoff_schedule decides")
        return ruling

    @staticmethod
    def _api_of(error: BaseException) -> ApiFailure | None:
        """What the error says of the API that was called."""
        api = getattr(error, API, None)
        return api if isinstance(api, ApiFailure) else api_failure(error)

    def _refused(
        self, attempt: Attempt, api: ApiFailure, error: BaseException, trace: str | None
    ) -> RateLimited | None:
        """What the API has said, if that was a 429 and there is a limit that protects it."""
        use, limits = attempt.limit_use, attempt.handler.options.limits if attempt.handler is not None else ()
        name = api.limit or (None if use is None else use.blamed) or (limits[0] if limits else None)
        if use is not None:
            use.note_api(api, name)
        if api.kind != "rate_limited" or name is None:
            return None
        text = f"{api.at(name)}: waits for that limit"
        _log(logging.INFO, attempt, text)
        failure = replace(describe(error, trace), duration_ms=attempt.elapsed_ms())
        return RateLimited(name, failure, api)

    def _stopped(self, attempt: Attempt, stop: Stop, trace: str | None) -> Settlement | CallFailed:
        """It stopped within its grace."""
        kind = "OperatorCancel" if stop.why is Why.CANCEL else type(stop.error()).__name__
        code = {Why.DEADLINE: "TIMEOUT", Why.CANCEL: "CANCELED"}.get(stop.why, stop.why.upper())
        failure = Failure(kind, code, stop.text, trace, rung=stop.why, duration_ms=attempt.elapsed_ms())
        return self.end_stopped(attempt, stop, failure)

    def give_up(self, attempt: Attempt, stop: Stop, autopsy: str | None) -> Settlement | CallFailed:
        """It did not stop within its grace: the settlement of a stuck attempt."""
        grace = f"{max(0.0, stop.until - stop.asked_at):.3g} seconds"
        elapsed = attempt.elapsed_ms()
        how = f"did not respond to cancellation within {grace}: {stop.text}" if stop.is_told else stop.text
        text = f"{how}; stuck after {elapsed / 1000:.1f} s"
        failure = Failure("ExecutionStuck", "EXECUTION_STUCK", text, None, None, "stuck", autopsy, elapsed)
        return self.end_stopped(attempt, stop, failure)

    def end_stopped(self, attempt: Attempt, stop: Stop, failure: Failure) -> Settlement | CallFailed:
        """What becomes of an attempt that was asked to stop and did not complete."""
        if stop.why is Why.CANCEL:
            return self._fail(attempt, Judgement(Verdict.CANCELED, failure))
        if stop.why is Why.DEADLINE:
            self._health.record_failure(TimeoutError(failure.error))
            return self._conclude(attempt, failure, None, is_timeout=True, is_calls=True)
        return self.waive(attempt, failure)

    def _conclude(
        self,
        attempt: Attempt,
        failure: Failure,
        raised: BaseException | None,
        *,
        is_timeout: bool,
        is_calls: bool,
        ruling: Ruling = NO_RULING,
    ) -> Settlement | CallFailed:
        """The settlement of a failure that may pass. If a call to a limited API failed (`is_calls`), that may have
        been the limit's probe, and its limit says whether the command is charged."""

        def charge() -> Settlement:
            return self._fail(attempt, self._judge(attempt, failure, is_timeout=is_timeout, ruling=ruling), raised)

        use = attempt.limit_use
        if is_calls and use is not None and use.was_calling and not self._is_final(attempt, is_timeout=is_timeout):
            return CallFailed(failure, charge)
        return charge()

    @staticmethod
    def _is_final(attempt: Attempt, *, is_timeout: bool) -> bool:
        """Does its handler say that a timeout is final (`on_timeout="fail"`)?"""
        return is_timeout and attempt.handler is not None and attempt.handler.options.on_timeout == "fail"

    def lost(self, attempt: Attempt, failure: Failure) -> Settlement:
        """The process that ran it died of it."""
        return self._fail(attempt, self._judge(attempt, failure, is_timeout=False))

    def waive(self, attempt: Attempt, failure: Failure, *, suspect: bool = False) -> Settlement:
        """Stopped through no fault of its own."""
        _log(logging.WARNING, attempt, f"was stopped: {failure.error}; retried, not charged")
        return attempt.waive(failure, suspect=suspect)

    def _judge(
        self, attempt: Attempt, failure: Failure, *, is_timeout: bool, ruling: Ruling = NO_RULING
    ) -> Judgement:
        return judge(
            failure,
            charge=attempt.claimed.charge_after(failure),
            policy=self._policy_of(attempt),
            max_attempts=attempt.max_attempts,
            is_final=self._is_final(attempt, is_timeout=is_timeout),
            spread=random.random(),  # noqa: S311 - jitter
            ruling=ruling,
            on_exhausted=attempt.on_exhausted(self._policy),
        )

    def _fail(self, attempt: Attempt, judgement: Judgement, raised: BaseException | None = None) -> Settlement:
        judgement = replace(judgement, failure=attempt.masked(judgement.failure))
        self._on_failed(attempt, judgement)
        judgement = self._with_own_frame(judgement)
        judgement = insist(judgement, attempt.step, has_open_effect=attempt.has_open_effect)
        self._say(attempt, judgement, raised)
        return attempt.fail(judgement)

    def _with_own_frame(self, judgement: Judgement) -> Judgement:
        """Say where in the application's own code it failed. Nothing in its text may cost the outcome."""
        try:
            found = own_frame_of(judgement.failure, self._own_code.name_of)
        except Exception:  # noqa: BLE001 - the traceback may be anything
            return judgement
        if found is None:
            return judgement
        return replace(judgement, failure=replace(judgement.failure, own_frame=found))

    def _explain(self, error: BaseException, trace: str | None) -> Failure:
        """The failure's description. If a timeout of ours ended it, the text says which one."""
        failure, limits = describe(error, trace), self._timeouts
        for kind, code, rung, layer in (
            (pg.QueryCanceled, "TIMEOUT", "statement", ("1: statement_timeout", limits.statement_timeout)),
            (pg.LockNotAvailable, "LOCK_TIMEOUT", "lock", ("1: lock_timeout", limits.lock_timeout)),
            (
                pg.IdleInTransactionSessionTimeout,
                "IDLE_IN_TRANSACTION",
                None,
                ("1: idle_in_transaction_session_timeout", limits.statement_timeout),
            ),
            (PoolTimeout, "POOL_TIMEOUT", None, ("2: pool_timeout", limits.pool_timeout)),
        ):
            # That is the error of NOWAIT.
            if isinstance(error, kind) and "could not obtain lock" not in failure.error:
                text = f"{failure.error} (layer {layer[0]}, {format_seconds(layer[1])} or what remained)"
                return replace(failure, error_code=code, error=text, rung=rung)
        if isinstance(error, pg.AdminShutdown):
            return replace(failure, error_code="ADMIN_SHUTDOWN")
        if isinstance(error, DeadlineExceededError):
            return replace(failure, error_code="TIMEOUT", rung="deadline")
        return failure

    def _say(self, attempt: Attempt, judgement: Judgement, raised: BaseException | None) -> None:
        """Log one line per failure.

        If a person is needed, it is an ERROR with its traceback, and with the exception if it was raised in this
        process, for error trackers. For all other failures the traceback is in the history, and in the log at
        DEBUG.
        """
        most = attempt.max_attempts or self._policy_of(attempt).max_attempts
        failure = judgement.failure
        fate = fate_of(judgement)
        level = _LEVELS.get(judgement.verdict, logging.WARNING)
        # Earlier crashes may be charged together with this one, so the charge may exceed the tries.
        tries = f"{min(attempt.claimed.charge_after(failure), most)} of {most} tries used"
        text = f"failed ({tries}): {failure.error_type}: {failure.error[:500]}; {fate}"
        if level == logging.ERROR:
            _log(level, attempt, text, trace=failure.traceback, raised=raised)
            return
        _log(level, attempt, text)
        if failure.traceback is not None:
            _log(logging.DEBUG, attempt, "failed at", trace=failure.traceback)

    def _policy_of(self, attempt: Attempt) -> RetryPolicy:
        handler = attempt.handler
        if handler is not None and handler.retry_policy is not None:
            return handler.retry_policy
        return self._policy


def close_awaitable(awaitable: Awaitable[Any]) -> None:
    """Nobody will await it: end it, without a warning."""
    close = getattr(awaitable, "close", None)
    if close is not None:
        close()


def _log(
    level: int, attempt: Attempt, text: str, *, trace: str | None = None, raised: BaseException | None = None
) -> None:
    """Log a line about an attempt, in safe text. Whatever a log handler does (raise, or format a hostile
    exception that raises SystemExit), the outcome and the slot must not be lost."""
    with suppress(BaseException):
        what = (attempt.command_type, attempt.command_id, attempt.domain)
        if masking.is_on():  # the exception itself would be printed as it is
            trace = traceback_of(raised) if trace is None and raised is not None else trace
            raised, text = None, masking.hidden_text(attempt.row, text)
            trace = None if trace is None else masking.hidden_text(attempt.row, trace)
        exc_info = None if raised is None else (type(raised), raised, _own_frames(raised))
        logger.log(
            level, "%s %s of domain %s %s", *what, text, extra=attempt.log_fields, trace=trace, exc_info=exc_info
        )


def _own_frames(error: BaseException) -> TracebackType | None:
    """The frames from the handler's own on; ours do not help."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in OURS:
        frames = frames.tb_next
    return frames


def traceback_of(error: BaseException) -> str:
    """The traceback from the handler's own frame on."""
    try:
        return "".join(traceback.format_exception(type(error), error, _own_frames(error)))
    except Exception:  # noqa: BLE001 - a hostile exception must not cost us the outcome
        return f"<no traceback: formatting {type(error).__name__} failed>"
