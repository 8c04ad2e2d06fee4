"""Exits: places are given back, and limits are told how the calls went.

    GOOD, UNKNOWN ──► many places of a limit in one statement ──► if somebody waits, the waker looks
    a bad answer, or one that keeps its place ──► one by one, under the lock of the limit's row

What was told stays in `leaves` until the database has it: after a lost connection all of it is told again, and
giving back twice is giving back once. What concerns a limit whose row somebody has locked is told later. A place
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
from commandbus.flow import places
from commandbus.flow.limits import LimitRow
from commandbus.gate.desk import Desk
from commandbus.gate.requests import Leave, Place
from commandbus.gate.row_link import LockedRowError
from commandbus.gate.waker import Waker
from commandbus.logger import safe_logger
from commandbus.model.durations import format_seconds
from commandbus.model.standing import Answer, Standing

logger = safe_logger("commandbus.limits")


class Exits:
    """Places that are needed no more. `leaves` is filled from other threads, too."""

    def __init__(self, desk: Desk, waker: Waker) -> None:
        self._desk = desk
        self._waker = waker
        self.leaves: deque[Leave] = deque()
        # What met a locked row, and when to tell it again.
        self._later: list[tuple[float, Callable[[], None]]] = []

    @property
    def soonest(self) -> float:
        """When (monotonic) to tell again what met a locked row."""
        return min((at for at, _ in self._later), default=math.inf)

    def hand_back(self, unused: Iterable[Place]) -> None:
        """Places with which nothing was begun."""
        self.leaves.extend(Leave(place, Answer.UNKNOWN, has_begun=False) for place in unused)

    def let_out(self) -> None:
        """Give back everything that was left."""
        self._tell_again()
        plain: dict[str, list[Leave]] = {}
        until: dict[Leave, float] = {}
        taken = list(self.leaves)
        for leave in taken:
            if leave.answer.is_bad or leave.keeps:
                try:
                    self._answer(leave)
                except LockedRowError as error:
                    until[leave] = error.until
            else:
                plain.setdefault(leave.place.limit, []).append(leave)
        for name, leaves in plain.items():
            try:
                self._give(name, leaves)
            except LockedRowError as error:
                until |= dict.fromkeys(leaves, error.until)
        for leave in taken:
            self.leaves.popleft()
            if not leave.stays:
                self._desk.let_go(leave.place)
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
        """An API has refused a call that held no place of its limit."""
        try:
            answered = self._desk.link.run(
                places.answer(
                    name,
                    None,
                    Answer.RATE_LIMITED,
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
        _log(name, holder, reason, answered.row, answered.standing)

    def _give(self, name: str, leaves: Sequence[Leave]) -> None:
        tokens = [leave.place.token for leave in leaves]
        good = any(leave.answer is Answer.GOOD for leave in leaves)
        try:
            row = self._desk.known(name)
            if row.backend != "postgres":
                self._desk.backends.of(row).give(row, tokens)
            is_awaited, probe = self._desk.link.run(places.give(name, tokens, good=good), limit=name)
            for leave in leaves:
                if leave.place.token == probe:
                    answer = places.answer(name, probe, leave.answer, gives=True, has_begun=leave.has_begun)
                    self._desk.link.run(answer, limit=name)
                    is_awaited = True
        except LockedRowError:
            raise
        except CommandBusError as error:
            logger.warning("places of limit %s cannot be given back, and their leases end: %s", name, error)
            return
        if is_awaited:
            self._waker.look_at(name)

    def _answer(self, leave: Leave) -> None:
        """A bad answer, or a call that may go on on the other side."""
        place = leave.place
        try:
            others = self._others(leave) if leave.answer.is_bad else ()
            answered = self._desk.link.run(
                places.answer(
                    place.limit,
                    place.token,
                    leave.answer,
                    gives=not leave.keeps,
                    reason=leave.reason,
                    retry_after=leave.retry_after,
                    spread=random.random(),  # noqa: S311 - jitter
                    others=others,
                ),
                limit=place.limit,
            )
        except LockedRowError:
            raise
        except CommandBusError as error:
            logger.warning("limit %s cannot be told of %s: %s", place.limit, leave.reason, error)
            return
        row, standing = answered.row, answered.standing
        self._desk.remember(row)
        if row.backend != "postgres" and not leave.keeps:
            self._give_elsewhere(row, place.token)
        if leave.answer.is_bad:
            _log(place.limit, place.holder, leave.reason or str(leave.answer), row, standing)
        if leave.keeps and not leave.stays:
            self._waker.look_at(place.limit, place.renewed_at + place.lease - boottime())
        closed = standing.closed_until(row.now)
        self._waker.look_at(place.limit, 0.0 if closed is None or standing.is_forced else closed - row.now)
        leave.is_waived = answered.is_waived

    def _others(self, leave: Leave) -> Iterable[str]:
        """Who else calls, where the limit's row does not say that."""
        row = self._desk.known(leave.place.limit)
        return () if row.backend == "postgres" else self._desk.backends.of(row).look(row).holders

    def _give_elsewhere(self, row: LimitRow, token: str) -> None:
        try:
            self._desk.backends.of(row).give(row, [token])
        except CommandBusError as error:
            logger.warning("a place of limit %s cannot be given back, and its lease ends: %s", row.name, error)


def _log(name: str, holder: str, reason: str, row: LimitRow, standing: Standing) -> None:
    closed = standing.closed_until(row.now)
    left = None if closed is None or standing.is_forced else format_seconds(round(closed - row.now, 1))
    extra = {
        "limit": name,
        "holder": holder,
        "backoff_step": standing.step,
        "breaker": "open" if standing.is_open else "closed",
    }
    text = "limit %s: %s, told to %s (%s, breaker %s)%s"
    step = f"attempt {standing.step} of the back-off" if standing.step else "no back-off"
    wait = "" if left is None else f"; nobody begins for {left}"
    logger.warning(text, name, reason, holder, step, extra["breaker"], wait, extra=extra)
