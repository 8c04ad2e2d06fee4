"""Blocks: `with ctx.limit("docai"): …`, a permit of a limit for a part of a handler's code.

Waiting for the permit keeps the slot and counts against the deadline. `timeout` is for the one call in the block.
An `async with` block cancels what it awaits and raises ApiTimeoutError; the handler may go on. In a `with` block
it is the attempt's own deadline while the block runs: the ladder asks the attempt to stop, waits for the grace,
and gives it up.

The exception that leaves the block tells how the API is (model/api_errors.py). After a timeout, or when somebody
stopped the attempt, the API may still be working on the call: the permit stays taken until its lease ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from commandbus.clock import monotonic
from commandbus.errors import ApiTimeoutError, DeadlineExceededError
from commandbus.limits.requests import Permit, PermitCall, waited_in_vain
from commandbus.limits.with_block import (
    CLOSE_SECONDS,
    LATE,
    LEAST_SECONDS,
    TIMED_OUT,
    Hold,
    check_limit_terms,
    verdict,
)
from commandbus.model.api_errors import ApiFailure
from commandbus.model.limit_state import ApiAnswer
from commandbus.worker.execution.attempt import Attempt, Scope

BEYOND_DEADLINE_SECONDS = 1.0


class Door(Protocol):
    """Permits of limits, for one worker."""

    def acquire(self, attempt: Attempt, name: str, wait: float) -> PermitCall:
        """Ask for a permit."""

    def forget(self, call: PermitCall) -> None:
        """Who asked waits no more."""

    def leave(
        self, attempt: Attempt, permit: Permit, answer: ApiAnswer, api: ApiFailure | None, *, keeps: bool = False
    ) -> None:
        """The block is over."""

    def note_deadline(self, attempt: Attempt) -> None:
        """The attempt's deadline was changed here: whoever looks after it elsewhere is told."""


@contextmanager
def sync_block(
    door: Door,
    attempt: Attempt,
    name: str,
    wait: float | str | timedelta,
    timeout: float | str | timedelta | None,
    *,
    deadline_at: float,
    check: Callable[[], None],
) -> Iterator[Hold]:
    """The block of a `def` handler."""
    most, limit = check_limit_terms(name, wait, timeout)
    permit = _wait(door, attempt, name, most, deadline_at=deadline_at, check=check)
    before, text = attempt.deadline_at, attempt.extras.late_text
    until = monotonic() + limit
    is_nearer = until < before
    if is_nearer:
        attempt.extras.late_text, attempt.deadline_at = LATE, until
        door.note_deadline(attempt)
    try:
        yield Hold(permit, min(until, before))
    except BaseException as error:
        is_late = is_nearer and monotonic() >= until - CLOSE_SECONDS
        answer, api, keeps = verdict(error)
        if is_late and (answer is ApiAnswer.TIMEOUT or isinstance(error, DeadlineExceededError)):
            door.leave(attempt, permit, ApiAnswer.TIMEOUT, TIMED_OUT, keeps=True)
            raise ApiTimeoutError(LATE) from error
        door.leave(attempt, permit, answer, api, keeps=keeps)
        raise
    else:
        door.leave(attempt, permit, ApiAnswer.GOOD, None)
    finally:
        if is_nearer and attempt.stop is None:
            attempt.extras.late_text = text
            attempt.deadline_at = max(before, attempt.deadline_at)  # it may have been extended meanwhile
            door.note_deadline(attempt)


def _wait(
    door: Door, attempt: Attempt, name: str, most: float, *, deadline_at: float, check: Callable[[], None]
) -> Permit:
    check()
    scope = Scope(deadline_at)
    left = min(most, deadline_at - monotonic())
    attempt.extras.scopes.append(scope)
    try:
        call = door.acquire(attempt, name, _longest(left, most))
        call.answer.add_done_callback(lambda _: scope.event.set())
        scope.event.wait(left + LEAST_SECONDS)
        if call.answer.done():
            return call.answer.result()
        door.forget(call)
        check()
        raise waited_in_vain(name, most)
    finally:
        attempt.extras.scopes.remove(scope)


def _longest(left: float, most: float) -> float:
    """How long the limit client may let the call wait. If the deadline comes before the end of the wait, the
    client waits a moment longer: the handler is to hear of its deadline, not of a wait that nobody asked for."""
    return most if left >= most else max(0.0, left) + BEYOND_DEADLINE_SECONDS


class AsyncBlock(AbstractAsyncContextManager[Hold]):
    """The block of an `async def` handler. Who forgets the `async` of `async with` is told."""

    def __init__(self, inner: AbstractAsyncContextManager[Hold]) -> None:
        self._inner = inner

    async def __aenter__(self) -> Hold:
        return await self._inner.__aenter__()

    async def __aexit__(self, *what: Any) -> bool | None:
        return await self._inner.__aexit__(*what)

    def __enter__(self) -> NoReturn:
        raise TypeError("in an `async def`, write `async with ctx.limit(…)`, not `with`")

    def __exit__(self, *what: object) -> None:
        """Never reached: `with` asks for it first."""


@asynccontextmanager
async def async_block(
    door: Door,
    attempt: Attempt,
    name: str,
    wait: float | str | timedelta,
    timeout: float | str | timedelta | None,
    *,
    deadline_at: float,
    check: Callable[[], None],
) -> AsyncIterator[Hold]:
    """The block of an `async def` handler."""
    most, limit = check_limit_terms(name, wait, timeout)
    check()
    left = max(0.0, min(deadline_at - monotonic(), most))
    call = door.acquire(attempt, name, _longest(left, most))
    try:
        permit = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(call.answer)), left + LEAST_SECONDS)
    except TimeoutError:
        door.forget(call)
        check()
        raise waited_in_vain(name, most) from None
    except BaseException:
        door.forget(call)
        raise
    until = monotonic() + limit
    try:
        try:
            async with asyncio.timeout(None if limit == math.inf else limit) as timer:
                yield Hold(permit, min(until, deadline_at))
        except TimeoutError as error:
            if timer.expired():
                raise ApiTimeoutError(LATE) from error
            raise
    except BaseException as error:
        answer, api, keeps = verdict(error)
        door.leave(attempt, permit, answer, api, keeps=keeps)
        raise
    else:
        door.leave(attempt, permit, ApiAnswer.GOOD, None)
