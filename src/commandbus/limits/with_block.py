"""The `with` block that holds a permit of a limit: `with ctx.limit("docai"): …` and `with bus.limit("docai"): …`.

There is one block for `with` and one for `async with`. The user of the permit (a handler's attempt, or a program)
is a `PermitUser`. The exception that leaves the block shows the state of the API (model/api_errors.py). After a
timeout, or when somebody stopped the code in the block, the API may still be working on the call: the permit stays
taken until its lease ends.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Protocol

from commandbus.clock import monotonic
from commandbus.errors import ApiTimeoutError, AttemptCanceledError, DeadlineExceededError, LimitLostError
from commandbus.limits.requests import Permit, PermitCall, Release, waited_in_vain
from commandbus.model.api_errors import ApiFailure, api_failure
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.limit import check_limit_name
from commandbus.model.limit_state import ApiAnswer

if TYPE_CHECKING:
    from commandbus.limits.client import LimitClient

TIMED_OUT = ApiFailure("timeout", None, None, "timeout")
CLOSE_SECONDS = 0.05
"""A client with a timeout of the remaining time may end so many seconds before that time is over."""
LEAST_SECONDS = 1.0
"""How much longer than its own wait a caller waits for the limit client to say that there is no permit."""
BEYOND_DEADLINE_SECONDS = 1.0


class Hold:
    """The object that a block gets: the limit's name, whether its permit is still held, and how much time is left
    for the call."""

    __slots__ = ("_permit", "_until")

    def __init__(self, permit: Permit, until: float) -> None:
        self._permit = permit
        self._until = until

    @property
    def limit(self) -> str:
        """The name of the limit."""
        return self._permit.limit

    @property
    def is_lost(self) -> bool:
        """Is the permit lost? Its lease could not be renewed in time, and somebody else may have it."""
        return self._permit.is_lost

    def remaining(self) -> float | None:
        """Seconds left for the call, at least a millisecond, to pass to clients as their timeout; None: no
        limit. Raises LimitLostError if the permit is lost: then no further call may begin."""
        if self._permit.is_lost:
            raise lost(self._permit.limit)
        left = self._until - monotonic()
        return None if left == math.inf else max(0.001, left)


class PermitUser(Protocol):
    """The user of a permit in a block: a handler's attempt, or a program."""

    @property
    def deadline_at(self) -> float:
        """When (monotonic) the code in the block must have ended anyway."""

    def check(self) -> None:
        """Raises if the code in the block must not continue."""

    def waking(self) -> AbstractContextManager[threading.Event]:
        """The event to wait for. It is also set when the code is asked to stop."""

    def acquire(self, name: str, wait: float) -> PermitCall:
        """Ask for a permit."""

    def forget(self, call: PermitCall) -> None:
        """Cancel a request that nobody waits for any more."""

    def why_in_vain(self) -> str | None:
        """Why there may have been no reply."""

    def begin_call(self, until: float, late_text: str) -> bool:
        """Begin a `with` block, whose call may last until then. Returns whether that is the nearest deadline."""

    def end_call(self) -> None:
        """End the `with` block."""

    def watch(self, permit: Permit, timer: asyncio.Timeout) -> None:
        """Begin an `async with` block, which this timer ends."""

    def release(self, permit: Permit, answer: ApiAnswer, api: ApiFailure | None, *, keeps: bool = False) -> None:
        """End the block and release its permit; `keeps`: the API may still be working on the call."""


class ProgramPermits:
    """The permit of one block in a program that is not a handler."""

    deadline_at = math.inf

    def __init__(self, limit_client: LimitClient, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._limit_client = limit_client
        self._loop = loop  # the event loop of an `async with`
        self._timer: asyncio.Timeout | None = None

    def check(self) -> None:
        """Nobody asks a program to stop."""

    def waking(self) -> AbstractContextManager[threading.Event]:
        """An event for this wait."""
        return nullcontext(threading.Event())

    def acquire(self, name: str, wait: float) -> PermitCall:
        """Ask for a permit."""
        on_lost = None if self._loop is None else self._lose
        return self._limit_client.acquire(name, wait=wait, holder=f"pid-{os.getpid()}", on_lost=on_lost)

    def forget(self, call: PermitCall) -> None:
        """Cancel a request that nobody waits for any more."""
        self._limit_client.forget(call)

    def why_in_vain(self) -> str | None:
        """Why there may have been no reply."""
        return "the database is unreachable" if self._limit_client.is_down else None

    def begin_call(self, until: float, late_text: str) -> bool:  # noqa: ARG002 - there is no other deadline
        """Nothing interrupts the call. If it takes too long, the caller gets the error when the block ends."""
        return True

    def end_call(self) -> None:
        """There is nothing to undo."""

    def release(self, permit: Permit, answer: ApiAnswer, api: ApiFailure | None, *, keeps: bool = False) -> None:
        """End the block and release its permit."""
        reason = str(answer) if api is None else api.at(permit.limit)
        retry_after = None if api is None else api.retry_after
        self._limit_client.release([Release(permit, answer, reason, retry_after, keeps)])

    def watch(self, permit: Permit, timer: asyncio.Timeout) -> None:
        """Let the loss of the permit end the block, too."""
        self._timer = timer
        if permit.is_lost:
            self._end_block()

    def _lose(self, permit: Permit) -> None:  # noqa: ARG002 - there is one
        """The permit is lost. Called on the limit client's thread or the clock's thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end_block)

    def _end_block(self) -> None:
        if self._timer is not None and self._loop is not None:
            with suppress(RuntimeError):  # the block is over
                self._timer.reschedule(self._loop.time())


class CallTimeout:
    """How long a call to an API may take, from now on; None or 0: any time. `whose`: which setting says so."""

    __slots__ = ("_api", "_whose", "seconds", "until")

    def __init__(self, api: str, seconds: float | None, whose: str) -> None:
        self._api = api
        self._whose = whose
        self.seconds = seconds or math.inf
        self.until = monotonic() + self.seconds

    @classmethod
    def of(cls, permit: Permit, own: float | None) -> CallTimeout:
        """The block's timeout, or else the limit's."""
        if own is None:
            return cls(permit.limit, permit.call_timeout, "limit call timeout")
        return cls(permit.limit, own, "timeout of the block")

    @property
    def text(self) -> str:
        """The error text for a call that took longer."""
        return f"no answer from {self._api} within {self.seconds:g} s ({self._whose})"

    @property
    def is_over(self) -> bool:
        """Has the time passed?"""
        return monotonic() > self.until

    def explains(self, error: BaseException, answer: ApiAnswer) -> bool:
        """Does the error only say that the time is up? A 429, or an error of the handler itself, says more."""
        is_silence = answer in (ApiAnswer.TIMEOUT, ApiAnswer.BROKEN) or isinstance(error, DeadlineExceededError)
        return is_silence and monotonic() >= self.until - CLOSE_SECONDS


@contextmanager
def sync_block(user: PermitUser, name: str, most: float, seconds: float | None) -> Iterator[Hold]:
    """Wait for a permit for up to `most` seconds; the call in the block may take `seconds` (None: as long as the
    limit says). If the call returns too late, the end of the block raises ApiTimeoutError."""
    permit = _wait(user, name, most)
    timeout = CallTimeout.of(permit, seconds)
    is_nearest = user.begin_call(timeout.until, timeout.text)
    try:
        yield Hold(permit, min(timeout.until, user.deadline_at))
    except BaseException as error:
        answer, api, keeps = verdict(error)
        if is_nearest and timeout.explains(error, answer):
            user.release(permit, ApiAnswer.TIMEOUT, TIMED_OUT, keeps=True)
            raise ApiTimeoutError(timeout.text) from error
        user.release(permit, answer, api, keeps=keeps)
        raise
    else:
        if timeout.is_over:  # the call has returned, so the API does not work on it any more
            user.release(permit, ApiAnswer.TIMEOUT, TIMED_OUT)
            raise ApiTimeoutError(timeout.text)
        user.release(permit, ApiAnswer.GOOD, None)
    finally:
        user.end_call()


def _wait(user: PermitUser, name: str, most: float) -> Permit:
    user.check()
    left = _left(user, most)
    with user.waking() as waking:
        call = user.acquire(name, _longest(left, most))
        call.answer.add_done_callback(lambda _: waking.set())
        try:
            waking.wait(left + LEAST_SECONDS)
        except BaseException:  # Ctrl-C
            user.forget(call)
            raise
    if call.answer.done():
        return call.answer.result()
    user.forget(call)
    user.check()
    raise waited_in_vain(name, most, user.why_in_vain())


@asynccontextmanager
async def async_block(user: PermitUser, name: str, most: float, seconds: float | None) -> AsyncIterator[Hold]:
    """Wait for a permit for up to `most` seconds. After `seconds` (None: the limit's timeout), the code that is
    awaited in the block is canceled."""
    permit = await _wait_async(user, name, most)
    timeout = CallTimeout.of(permit, seconds)
    try:
        try:
            async with asyncio.timeout(None if timeout.until == math.inf else timeout.seconds) as timer:
                user.watch(permit, timer)
                yield Hold(permit, min(timeout.until, user.deadline_at))
        except TimeoutError as error:
            if timer.expired():
                raise lost(name) if permit.is_lost else ApiTimeoutError(timeout.text) from error
            raise
    except BaseException as error:
        answer, api, keeps = verdict(error)
        user.release(permit, answer, api, keeps=keeps)
        raise
    else:
        user.release(permit, ApiAnswer.GOOD, None)


async def _wait_async(user: PermitUser, name: str, most: float) -> Permit:
    user.check()
    left = _left(user, most)
    call = user.acquire(name, _longest(left, most))
    answer = asyncio.wrap_future(call.answer)
    try:
        return await asyncio.wait_for(asyncio.shield(answer), left + LEAST_SECONDS)
    except TimeoutError:
        is_told = answer.done()
        user.forget(call)
        user.check()
        if is_told:
            raise
        raise waited_in_vain(name, most, user.why_in_vain()) from None
    except BaseException:
        user.forget(call)
        raise


def _left(user: PermitUser, most: float) -> float:
    return max(0.0, min(most, user.deadline_at - monotonic()))


def _longest(left: float, most: float) -> float:
    """How long the limit client may let the call wait. If the deadline comes before the end of the wait, the limit
    client waits a moment longer, so that the handler gets the deadline's error, not the error of a wait."""
    return most if left >= most else left + BEYOND_DEADLINE_SECONDS


def lost(name: str) -> LimitLostError:
    """The error for the user of a permit that is lost."""
    return LimitLostError(
        f"the permit of limit {name!r} is lost: its lease could not be renewed in time, and somebody else may "
        f"have it; call no more in this block",
        limit=name,
    )


def check_block_times(name: str, wait: Duration, timeout: Duration | None) -> tuple[float, float | None]:
    """Seconds to wait for a permit, and for the call (None: as the limit says; 0: any time); both checked."""
    check_limit_name(name)
    seconds = None if timeout is None else parse_seconds(timeout, name="timeout")
    return parse_seconds(wait, name="wait"), seconds


def verdict(error: BaseException) -> tuple[ApiAnswer, ApiFailure | None, bool]:
    """What an exception that leaves a block says of the API, and whether the call may still be under way."""
    if isinstance(error, ApiTimeoutError):
        return ApiAnswer.TIMEOUT, TIMED_OUT, True
    if isinstance(error, AttemptCanceledError | asyncio.CancelledError | GeneratorExit | KeyboardInterrupt):
        return ApiAnswer.UNKNOWN, None, True
    api = api_failure(error)
    if api is None:
        return ApiAnswer.GOOD, None, False
    return ApiAnswer(api.kind), api, api.kind == "timeout"
