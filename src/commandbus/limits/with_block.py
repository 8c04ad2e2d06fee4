"""What a block of code that holds a permit of a limit has in common, in handlers and in plain programs."""

from __future__ import annotations

import asyncio
import math

from commandbus.clock import monotonic
from commandbus.errors import ApiTimeoutError, AttemptCancelledError, LimitLostError
from commandbus.limits.requests import Permit
from commandbus.model.api_errors import ApiFailure, api_failure
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.limit import check_limit_name
from commandbus.model.limit_state import ApiAnswer

LATE = "timeout"
TIMED_OUT = ApiFailure("timeout", None, None, LATE)
CLOSE_SECONDS = 0.05
"""A client that was given the rest of the time may end a moment before it is over."""
LEAST_SECONDS = 1.0
"""How much longer than asked for one waits for the limit client to say that there is no permit."""


class Hold:
    """What a block has: the limit's name, whether its permit is still held, and how much time is left for the
    call."""

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
        """Seconds left for the call, at least a millisecond, to hand to clients as their timeout; None: no
        limit. Raises LimitLostError if the permit is lost: there must be no further call."""
        if self._permit.is_lost:
            raise lost(self._permit.limit)
        left = self._until - monotonic()
        return None if left == math.inf else max(0.001, left)


def lost(name: str) -> LimitLostError:
    """The error of who uses a permit that is lost."""
    return LimitLostError(
        f"the permit of limit {name!r} is lost: its lease could not be renewed in time, and somebody else may "
        f"have it; call no more in this block",
        limit=name,
    )


def check_limit_terms(name: str, wait: Duration, timeout: Duration | None) -> tuple[float, float]:
    """Seconds to wait for a permit, and for the call; both checked."""
    check_limit_name(name)
    seconds = math.inf if timeout is None else parse_seconds(timeout, name="timeout")
    if seconds == 0:
        raise ValueError("timeout of a limit's block must be more than 0; leave it out for none")
    return parse_seconds(wait, name="wait"), seconds


def verdict(error: BaseException) -> tuple[ApiAnswer, ApiFailure | None, bool]:
    """What an exception that leaves a block says of the API, and whether the call may still be under way."""
    if isinstance(error, ApiTimeoutError):
        return ApiAnswer.TIMEOUT, TIMED_OUT, True
    if isinstance(error, AttemptCancelledError | asyncio.CancelledError | GeneratorExit | KeyboardInterrupt):
        return ApiAnswer.UNKNOWN, None, True
    api = api_failure(error)
    if api is None:
        return ApiAnswer.GOOD, None, False
    return ApiAnswer(api.kind), api, api.kind == "timeout"
