"""Releases: permits are given back, and limits are told how the calls went.

    GOOD, UNKNOWN ──► many permits of a limit in one statement ──► if somebody waits, the waker looks
    a bad answer, or one that keeps its permit ──► one by one, under the lock of the limit's row

What was told stays in `leaves` until the database has it: after a lost connection all of it is told again, and
giving back twice is giving back once. What concerns a limit whose row somebody has locked is told later. A permit
that cannot be given back is free when its lease ends.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from commandbus.clock import boottime, monotonic
from commandbus.errors import CommandBusError
from commandbus.flow.limits import permits
from commandbus.flow.limits.declare import LimitRow
from commandbus.limits.held_permits import HeldPermits
from commandbus.limits.limit_connection import LockedRowError
from commandbus.limits.requests import Permit, Release
from commandbus.limits.waker import Waker
from commandbus.logger import safe_logger
from commandbus.model.durations import format_seconds
from commandbus.model.limit_state import ApiAnswer, LimitState

logger = safe_logger("commandbus.limits")


class Releases:
    """Permits that are needed no more. `leaves` is filled from other threads, too."""

    def __init__(self, held_permits: HeldPermits, waker: Waker) -> None:
        self._held_permits = held_permits
        self._waker = waker
        self.leaves: deque[Release] = deque()
        # What met a locked row, and when to tell it again.
        self._later: list[tuple[float, Callable[[], None]]] = []

    @property
    def soonest(self) -> float:
        """When (monotonic) to tell again what met a locked row."""
        return min((at for at, _ in self._later), default=math.inf)

    def hand_back(self, unused: Iterable[Permit]) -> None:
        """Permits with which nothing was begun."""
        self.leaves.extend(Release(permit, ApiAnswer.UNKNOWN, has_begun=False) for permit in unused)

    def let_out(self) -> None:
        """Give back everything that was left."""
        self._tell_again()
        plain: dict[str, list[Release]] = {}
        until: dict[Release, float] = {}
        taken = list(self.leaves)
        for leave in taken:
            if leave.answer.is_bad or leave.keeps:
                try:
                    self._answer(leave)
                except LockedRowError as error:
                    until[leave] = error.until
            else:
                plain.setdefault(leave.permit.limit, []).append(leave)
        for name, leaves in plain.items():
            try:
                self._give(name, leaves)
            except LockedRowError as error:
                until |= dict.fromkeys(leaves, error.until)
        for leave in taken:
            self.leaves.popleft()
            if not leave.stays:
                self._held_permits.let_go(leave.permit)
            if leave in until:
                self._later.append((until[leave], partial(self.leaves.append, leave)))
            elif leave.then is not None:
                leave.then(leave)

    def _tell_again(self) -> None:
        now = monotonic()
        due, self._later = (
            [item for item in self._later if item[0] <= now],
            [item for item in self._later if item[0] > now],
        )
        for _, tell in due:
            tell()

    def tell(self, name: str, holder: str, reason: str, retry_after: float | None, caller: str) -> None:
        """An API has refused a call that held no permit of its limit."""
        try:
            answered = self._held_permits.connection.run(
                permits.answer(
                    name,
                    None,
                    ApiAnswer.RATE_LIMITED,
                    gives=False,
                    reason=reason,
                    retry_after=retry_after,
                    spread=random.random(),  # noqa: S311 - jitter
                    caller=caller,
                ),
                limit=name,
            )
        except LockedRowError as error:
            self._later.append((error.until, partial(self.tell, name, holder, reason, retry_after, caller)))
            return
        except CommandBusError as error:
            logger.warning("limit %s cannot be told of %s: %s", name, reason, error)
            return
        _log(name, holder, reason, answered.row, answered.limit_state)

    def _give(self, name: str, leaves: Sequence[Release]) -> None:
        tokens = [leave.permit.token for leave in leaves]
        good = any(leave.answer is ApiAnswer.GOOD for leave in leaves)
        try:
            row = self._held_permits.known(name)
            if row.backend != "postgres":
                self._held_permits.stores.of(row).give(row, tokens)
            is_awaited, probe = self._held_permits.connection.run(
                permits.give(name, tokens, good=good), limit=name
            )
            for leave in leaves:
                if leave.permit.token == probe:
                    answer = permits.answer(name, probe, leave.answer, gives=True, has_begun=leave.has_begun)
                    self._held_permits.connection.run(answer, limit=name)
                    is_awaited = True
        except LockedRowError:
            raise
        except CommandBusError as error:
            logger.warning("permits of limit %s cannot be given back, and their leases end: %s", name, error)
            return
        if is_awaited:
            self._waker.look_at(name)

    def _answer(self, leave: Release) -> None:
        """A bad answer, or a call that may go on on the other side."""
        permit = leave.permit
        try:
            others = self._others(leave) if leave.answer.is_bad else ()
            answered = self._held_permits.connection.run(
                permits.answer(
                    permit.limit,
                    permit.token,
                    leave.answer,
                    gives=not leave.keeps,
                    reason=leave.reason,
                    retry_after=leave.retry_after,
                    spread=random.random(),  # noqa: S311 - jitter
                    others=others,
                ),
                limit=permit.limit,
            )
        except LockedRowError:
            raise
        except CommandBusError as error:
            logger.warning("limit %s cannot be told of %s: %s", permit.limit, leave.reason, error)
            return
        row, limit_state = answered.row, answered.limit_state
        self._held_permits.remember(row)
        if row.backend != "postgres" and not leave.keeps:
            self._give_elsewhere(row, permit.token)
        if leave.answer.is_bad:
            _log(permit.limit, permit.holder, leave.reason or str(leave.answer), row, limit_state)
        if leave.keeps and not leave.stays:
            self._waker.look_at(permit.limit, permit.renewed_at + permit.lease - boottime())
        closed = limit_state.closed_until(row.now)
        self._waker.look_at(permit.limit, 0.0 if closed is None or limit_state.is_forced else closed - row.now)
        leave.is_waived = answered.is_waived

    def _others(self, leave: Release) -> Iterable[str]:
        """Who else calls, where the limit's row does not say that."""
        row = self._held_permits.known(leave.permit.limit)
        return () if row.backend == "postgres" else self._held_permits.stores.of(row).look(row).holders

    def _give_elsewhere(self, row: LimitRow, token: str) -> None:
        try:
            self._held_permits.stores.of(row).give(row, [token])
        except CommandBusError as error:
            logger.warning("a permit of limit %s cannot be given back, and its lease ends: %s", row.name, error)


def _log(name: str, holder: str, reason: str, row: LimitRow, limit_state: LimitState) -> None:
    closed = limit_state.closed_until(row.now)
    left = None if closed is None or limit_state.is_forced else format_seconds(round(closed - row.now, 1))
    extra = {
        "limit": name,
        "holder": holder,
        "backoff_step": limit_state.step,
        "breaker": "open" if limit_state.is_open else "closed",
    }
    text = "limit %s: %s, told to %s (%s, breaker %s)%s"
    step = f"attempt {limit_state.step} of the back-off" if limit_state.step else "no back-off"
    wait = "" if left is None else f"; nobody begins for {left}"
    logger.warning(text, name, reason, holder, step, extra["breaker"], wait, extra=extra)
