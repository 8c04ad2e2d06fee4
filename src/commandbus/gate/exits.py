"""Exits: places are given back, and limits are told how the calls went.

    GOOD, UNKNOWN ──► many places of a limit in one statement ──► if somebody waits, the waker looks
    a bad answer, or one that keeps its place ──► one by one, under the lock of the limit's row

What was told stays in `leaves` until the database has it: after a lost connection all of it is told again, and
giving back twice is giving back once. A place that cannot be given back is free when its lease ends.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

from commandbus.clock import boottime
from commandbus.errors import CommandBusError
from commandbus.flow import places
from commandbus.flow.limits import LimitRow
from commandbus.gate.desk import Desk
from commandbus.gate.requests import Leave, Place
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

    def hand_back(self, unused: Iterable[Place]) -> None:
        """Places with which nothing was begun."""
        self.leaves.extend(Leave(place, Answer.UNKNOWN, has_begun=False) for place in unused)

    def let_out(self) -> None:
        """Give back everything that was left."""
        plain: dict[str, list[Leave]] = {}
        taken = 0
        for leave in list(self.leaves):
            taken += 1
            if leave.answer.is_bad or leave.keeps:
                self._answer(leave)
            else:
                plain.setdefault(leave.place.limit, []).append(leave)
        for name, leaves in plain.items():
            self._give(name, leaves)
        for _ in range(taken):
            leave = self.leaves.popleft()
            if not leave.stays:
                self._desk.let_go(leave.place)
            if leave.then is not None:
                leave.then(leave)

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
                )
            )
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
            is_awaited, probe = self._desk.link.run(places.give(name, tokens, good=good))
            for leave in leaves:
                if leave.place.token == probe:
                    self._desk.link.run(
                        places.answer(name, probe, leave.answer, gives=True, has_begun=leave.has_begun)
                    )
                    is_awaited = True
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
                )
            )
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
    text = "limit %s: %s, told to %s (attempt %d of the back-off, breaker %s)%s"
    wait = "" if left is None else f"; nobody begins for {left}"
    logger.warning(text, name, reason, holder, standing.step, extra["breaker"], wait, extra=extra)
