"""Run one attempt and say how it ended. Whatever a handler raises becomes a settlement; nothing escapes.

The sync and the async way differ in one `await`; what an end means is decided once, in `_completed` and `_failed`.
"""

from __future__ import annotations

import inspect
import logging
import random
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from commandbus.errors import (
    AttemptFencedError,
    PermanentCommandError,
    UnknownCommandTypeError,
)
from commandbus.flow.settle import Settlement
from commandbus.model.outcome import Failure, Judgement, Verdict, describe, judge_failure
from commandbus.model.retry import RetryPolicy
from commandbus.runtime.attempt import Attempt
from commandbus.runtime.context import AsyncHandlerContext, HandlerContext, Services, dump_result

logger = logging.getLogger("commandbus.worker")


_FATES = {
    Verdict.RETRY: "tried again in {delay:.3g} s",
    Verdict.EXHAUSTED: "attempts used up: to the troubleshooting queue",
    Verdict.PERMANENT: "to the troubleshooting queue",
    Verdict.UNKNOWN_TYPE: "to the troubleshooting queue",
    Verdict.BUSINESS_RULE: "FAILED for good",
}


@dataclass(frozen=True, slots=True)
class Note:
    """An exception after the completing transaction had committed: written down, never a retry."""

    attempt: Attempt
    failure: Failure


Ended = Settlement | Note | None
"""What is left to write about an attempt; None if its own transaction wrote everything."""


class Executor:
    """Runs attempts for one worker."""

    def __init__(self, services: Services, policy: RetryPolicy) -> None:
        self._services = services
        self._policy = policy

    def is_exhausted(self, attempt: Attempt) -> bool:
        """Were all charged attempts used up before this one (by workers that died of it)?"""
        policy = self._policy_of(attempt)
        return attempt.charge > 1 and not policy.may_retry(attempt.charge - 1, max_attempts=attempt.max_attempts)

    def exhaust(self, attempt: Attempt) -> Settlement:
        """The settlement of a command that is not run again."""
        failure = Failure(
            "WorkerLost",
            "WORKER_LOST",
            f"{attempt.charge - 1} attempts ended with the loss of their worker or lease; it is not tried again",
        )
        _log(logging.WARNING, attempt, failure.error)
        return attempt.fail(Judgement(Verdict.EXHAUSTED, failure))

    def run(self, attempt: Attempt) -> Ended:
        """Run a sync handler to its end."""
        attempt.started = time.time()
        handler = attempt.handler
        try:
            if handler is None:
                raise UnknownCommandTypeError(attempt.domain, attempt.command_type)
            ctx = HandlerContext(attempt, self._services)
            result = handler.function(ctx.command, ctx) if handler.takes_command else handler.function(ctx)
            if result is None:
                return None if attempt.has_committed else attempt.complete(None)
            return self._completed(attempt, result)
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like end the attempt, not the slot
            return self._failed(attempt, error)

    async def run_async(self, attempt: Attempt) -> Ended:
        """Run an async handler to its end."""
        attempt.started = time.time()
        handler = attempt.handler
        try:
            if handler is None:
                raise UnknownCommandTypeError(attempt.domain, attempt.command_type)
            ctx = AsyncHandlerContext(attempt, self._services)
            result = await (handler.function(ctx.command, ctx) if handler.takes_command else handler.function(ctx))
            if result is None:
                return None if attempt.has_committed else attempt.complete(None)
            return self._completed(attempt, result)
        except BaseException as error:  # noqa: BLE001
            return self._failed(attempt, error)

    def _completed(self, attempt: Attempt, result: Any) -> Ended:
        if attempt.has_committed:
            text = (
                "the handler returned a value after its transaction had completed the command: the value was not "
                "stored; give the result with tx.complete(result)"
            )
            _log(logging.WARNING, attempt, text)
            return Note(attempt, Failure("ReturnedTooLate", "RETURNED_TOO_LATE", text))
        if inspect.isawaitable(result):
            close = getattr(result, "close", None)
            if close is not None:
                close()
            raise PermanentCommandError(
                f"handler {attempt.handler.name if attempt.handler else '?'} is not `async def` but returned an "
                f"awaitable, which was not run",
                code="INVALID_RESULT",
            )
        return attempt.complete(dump_result(result, self._services.max_payload_bytes))

    def _failed(self, attempt: Attempt, error: BaseException) -> Ended:
        trace = None if isinstance(error, UnknownCommandTypeError) else _traceback_of(error)
        if attempt.has_committed:
            text = f"raised {type(error).__name__} after its transaction had completed the command: only noted"
            _log(logging.WARNING, attempt, text)
            return Note(attempt, describe(error, trace))
        if isinstance(error, AttemptFencedError):
            attempt.is_lost = True
        judgement = judge_failure(
            error,
            charge=attempt.charge,
            policy=self._policy_of(attempt),
            max_attempts=attempt.max_attempts,
            spread=random.random(),  # noqa: S311 - jitter
            traceback=trace,
        )
        self._say(attempt, judgement)
        return attempt.fail(judgement)

    def _say(self, attempt: Attempt, judgement: Judgement) -> None:
        """One line a failure, for whoever reads the log; the traceback is in the history, and here at DEBUG."""
        most = attempt.max_attempts or self._policy_of(attempt).max_attempts
        failure = judgement.failure
        fate = _FATES[judgement.verdict].format(delay=judgement.delay_seconds)
        level = logging.INFO if judgement.verdict is Verdict.BUSINESS_RULE else logging.WARNING
        tries = f"attempt {attempt.charge} of {most}"
        _log(level, attempt, f"failed ({tries}): {failure.error_type}: {failure.error[:500]}; {fate}")
        if failure.traceback is not None:
            _log(logging.DEBUG, attempt, failure.traceback)

    def _policy_of(self, attempt: Attempt) -> RetryPolicy:
        handler = attempt.handler
        if handler is not None and handler.retry_policy is not None:
            return handler.retry_policy
        return self._policy


def _log(level: int, attempt: Attempt, text: str) -> None:
    """Say something of an attempt, in safe text and without exc_info. Whatever a log's handler does (raise, or
    format the hostile exception that is being handled here) must not cost us the outcome or the slot."""
    extra = {"domain": attempt.domain, "command_id": attempt.command_id, "attempt": attempt.number}
    with suppress(Exception):
        what = (attempt.command_type, attempt.command_id, attempt.domain)
        logger.log(level, "%s %s of domain %s %s", *what, text, extra=extra)


def _traceback_of(error: BaseException) -> str:
    try:
        # From the handler's own frame on: ours say nothing.
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 - a hostile exception must not cost us the outcome
        return f"<no traceback: formatting {type(error).__name__} failed>"
