"""Releases: gives permits back, and tells limits how the calls went.

    GOOD, UNKNOWN ──► many permits of a limit in one statement ──► if somebody waits, the waker looks
    a bad answer, or one that keeps its permit ──► one by one, under the lock of the limit's row

A release stays in `pending` until the database has it. After a lost connection all of them are sent again: a
second release of the same permit changes nothing. If another transaction has locked a limit's row, its releases
are sent later. A permit that cannot be released is free when its lease ends.
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
    """Permits that are no longer needed. Other threads also fill `pending`."""

    def __init__(self, held_permits: HeldPermits, waker: Waker) -> None:
        self._held_permits = held_permits
        self._waker = waker
        self.pending: deque[Release] = deque()
        # What could not be told because of a locked row, and when to tell it again.
        self._later: list[tuple[float, Callable[[], None]]] = []

    @property
    def soonest(self) -> float:
        """When (monotonic) to tell again what could not be told because of a locked row."""
        return min((at for at, _ in self._later), default=math.inf)

    def hand_back(self, unused: Iterable[Permit]) -> None:
        """Release permits with which no call was begun."""
        self.pending.extend(Release(permit, ApiAnswer.UNKNOWN, has_begun=False) for permit in unused)

    def let_out(self) -> None:
        """Send everything that is pending."""
        self._tell_again()
        plain: dict[str, list[Release]] = {}
        until: dict[Release, float] = {}
        taken = list(self.pending)
        for release in taken:
            if release.answer.is_bad or release.keeps:
                try:
                    self._answer(release)
                except LockedRowError as error:
                    until[release] = error.until
            else:
                plain.setdefault(release.permit.limit, []).append(release)
        for name, releases in plain.items():
            try:
                self._give(name, releases)
            except LockedRowError as error:
                until |= dict.fromkeys(releases, error.until)
        for release in taken:
            self.pending.popleft()
            if not release.stays:
                self._held_permits.let_go(release.permit)
            if release in until:
                self._later.append((until[release], partial(self.pending.append, release)))
            elif release.then is not None:
                release.then(release)

    def _tell_again(self) -> None:
        now = monotonic()
        due, self._later = (
            [item for item in self._later if item[0] <= now],
            [item for item in self._later if item[0] > now],
        )
        for _, tell in due:
            tell()

    def tell(self, name: str, holder: str, reason: str, retry_after: float | None, caller: str) -> None:
        """Tell a limit that its API has refused a call that held no permit."""
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

    def _give(self, name: str, releases: Sequence[Release]) -> None:
        tokens = [release.permit.token for release in releases]
        good = any(release.answer is ApiAnswer.GOOD for release in releases)
        try:
            row = self._held_permits.known(name)
            if row.store != "postgres":
                self._held_permits.stores.of(row).release(row, tokens)
            is_awaited, probe = self._held_permits.connection.run(
                permits.release(name, tokens, good=good), limit=name
            )
            for release in releases:
                if release.permit.token == probe:
                    answer = permits.answer(name, probe, release.answer, gives=True, has_begun=release.has_begun)
                    self._held_permits.connection.run(answer, limit=name)
                    is_awaited = True
        except LockedRowError:
            raise
        except CommandBusError as error:
            logger.warning("permits of limit %s cannot be released, and end with their leases: %s", name, error)
            return
        if is_awaited:
            self._waker.look_at(name)

    def _answer(self, release: Release) -> None:
        """Report a bad answer, or a call on which the API may still be working."""
        permit = release.permit
        try:
            others = self._others(release) if release.answer.is_bad else ()
            answered = self._held_permits.connection.run(
                permits.answer(
                    permit.limit,
                    permit.token,
                    release.answer,
                    gives=not release.keeps,
                    reason=release.reason,
                    retry_after=release.retry_after,
                    spread=random.random(),  # noqa: S311 - jitter
                    others=others,
                ),
                limit=permit.limit,
            )
        except LockedRowError:
            raise
        except CommandBusError as error:
            logger.warning("limit %s cannot be told of %s: %s", permit.limit, release.reason, error)
            return
        row, limit_state = answered.row, answered.limit_state
        self._held_permits.remember(row)
        if row.store != "postgres" and not release.keeps:
            self._give_external(row, permit.token)
        if release.answer.is_bad:
            _log(permit.limit, permit.holder, release.reason or str(release.answer), row, limit_state)
        if release.keeps and not release.stays:
            self._waker.look_at(permit.limit, permit.renewed_at + permit.lease - boottime())
        closed = limit_state.blocked_until(row.now)
        self._waker.look_at(
            permit.limit, 0.0 if closed is None or limit_state.breaker_forced else closed - row.now
        )
        release.is_waived = answered.is_waived

    def _others(self, release: Release) -> Iterable[str]:
        """The other holders, if the limit's row does not contain them."""
        row = self._held_permits.known(release.permit.limit)
        return () if row.store == "postgres" else self._held_permits.stores.of(row).usage(row).holders

    def _give_external(self, row: LimitRow, token: str) -> None:
        try:
            self._held_permits.stores.of(row).release(row, [token])
        except CommandBusError as error:
            logger.warning("a permit of limit %s cannot be released, and ends with its lease: %s", row.name, error)


def _log(name: str, holder: str, reason: str, row: LimitRow, limit_state: LimitState) -> None:
    closed = limit_state.blocked_until(row.now)
    left = None if closed is None or limit_state.breaker_forced else format_seconds(round(closed - row.now, 1))
    extra = {
        "limit": name,
        "holder": holder,
        "backoff_step": limit_state.step,
        "breaker": "open" if limit_state.breaker_open else "closed",
    }
    text = "limit %s: %s, holder %s (%s, breaker %s)%s"
    step = f"step {limit_state.step} of the back-off" if limit_state.step else "no back-off"
    wait = "" if left is None else f"; blocked for {left}"
    logger.warning(text, name, reason, holder, step, extra["breaker"], wait, extra=extra)
