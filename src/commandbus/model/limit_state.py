"""The state of a limit: what a bad answer of its API does to it, and what a good one does.

    available ──429──► backing off (step 1, 2, …: until) ──► one probe ──good──► available
      └──3 bad answers in a row──► breaker open (open_until) ──► one probe ──bad──► breaker open

Bad answers are 429s, 5xx and timeouts. Calls that were under way when a back-off began change nothing: they
neither lengthen it nor count twice. Everything here is pure; all times are seconds of the database's clock.

A **caller** is a command, however often it is retried, or one block of a program. If several callers call, the
breaker opens only when different ones fail, so one bad command does not block the others. A probe that does not
succeed was in vain (`vain`). The next probe is the caller with the fewest probes in vain.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from enum import StrEnum
from typing import Final

from commandbus.model.limit import Limit, backoff
from commandbus.quick_dataclass import dataclass

MOST_BLAMED: Final = 100
"""How many callers of a row of bad answers are remembered."""
MOST_VAIN: Final = 1000
"""How many callers with vain probes are remembered; with more, the rotation begins anew."""

_COMMAND = re.compile(r"#(\d+)\Z")


def token_of(text: str, command: int | None) -> str:
    """The token of a permit: who holds it, in words, and, for a command, the id of its row."""
    mark = "" if command is None else f"#{command}"
    return text[-(200 - len(mark)) :] + mark


def caller_of(token: str) -> str:
    """Who holds a permit: the id of a command's row as text, or the token itself, which no other block has."""
    found = _COMMAND.search(token)
    return found[1] if found else token


class ApiAnswer(StrEnum):
    """What a call to a limited API came to."""

    GOOD = "good"
    RATE_LIMITED = "rate_limited"
    BROKEN = "broken"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"  # nobody knows: it was stopped, or its worker ended

    @property
    def is_bad(self) -> bool:
        """Does it speak against the API?"""
        return self in (ApiAnswer.RATE_LIMITED, ApiAnswer.BROKEN, ApiAnswer.TIMEOUT)


@dataclass(frozen=True, slots=True)
class LimitState:
    """The part of a limit's row that answers move."""

    step: int = 0
    until: float | None = None
    reason: str | None = None
    failures: int = 0
    breaker_open: bool = False
    breaker_forced: bool = False
    opened_at: float | None = None
    open_until: float | None = None
    open_reason: str | None = None
    probe: str | None = None
    probe_until: float | None = None
    blamed: tuple[str, ...] = ()  # callers of the bad answers in a row
    vain: Mapping[str, int] = field(default_factory=dict)  # caller → probes in vain since the trouble began

    def blocked_until(self, now: float) -> float | None:
        """Until when the limit is blocked; None if it is not. A breaker that a person opened blocks without
        end."""
        if self.breaker_forced:
            return float("inf")
        latest = max(self.until or 0.0, self.open_until or 0.0 if self.breaker_open else 0.0)
        return latest if latest > now else None

    @property
    def is_probing(self) -> bool:
        """May only one call at a time begin, the probe?"""
        return self.step > 0 or self.breaker_open

    def is_probed(self, now: float) -> bool:
        """Is the probe under way?"""
        return self.probe is not None and (self.probe_until or 0.0) > now

    def without_probe(self) -> LimitState:
        """After a probe that did not end well: another caller comes first the next time."""
        if self.probe is None:
            return self
        caller = caller_of(self.probe)
        kept = self.vain if caller in self.vain or len(self.vain) < MOST_VAIN else {}
        return replace(self, probe=None, probe_until=None, vain={**kept, caller: kept.get(caller, 0) + 1})

    def explain(self, name: str, *, is_probing: bool = False) -> str:
        """Why the limit is blocked, for people; or why it was, if probes find out whether that is over."""
        if self.breaker_open:
            return f"the breaker of {name} {'was opened' if is_probing else 'is open'}: {self.open_reason}"
        return f"{self.reason or f'429 from {name}'}, step {self.step} of the back-off"


def after_bad(
    limit_state: LimitState,
    limit: Limit,
    answer: ApiAnswer,
    *,
    token: str | None,
    reason: str,
    retry_after: float | None,
    now: float,
    spread: float,
    caller: str | None = None,
    callers: Collection[str] = (),
) -> LimitState:
    """The state after a bad answer to the call that held `token`. `caller`: who called, if it held no permit;
    `callers`: who else calls, or waits to."""
    is_probe = token is not None and limit_state.probe == token
    if limit_state.blocked_until(now) is not None and not is_probe:
        # This call was under way when the back-off began. Its answer may still ask for a longer one.
        if answer is ApiAnswer.RATE_LIMITED and retry_after is not None:
            return replace(limit_state, until=max(limit_state.until or 0.0, now + retry_after))
        return limit_state
    after = _blame(limit_state, caller or (None if token is None else caller_of(token)))
    if is_probe:
        after = after.without_probe()
    if answer is ApiAnswer.RATE_LIMITED or (is_probe and limit_state.step > 0):
        step = limit_state.step + 1
        wait = backoff(limit.backoff_seconds, step, spread=spread)
        # An API that says "at once" again and again is not called in a hot loop.
        least = 0.0 if step == 1 else min(1.0, wait)
        until = now + (wait if retry_after is None else max(retry_after, least))
        after = replace(after, step=step, until=until, reason=reason)
    if limit.breaker_failures and (limit_state.breaker_open or _is_enough(after, limit.breaker_failures, callers)):
        count = f"{after.failures} bad answers in a row" if after.failures > 1 else "a bad answer"
        after = replace(
            after,
            breaker_open=True,
            opened_at=limit_state.opened_at if limit_state.breaker_open else now,
            open_until=now + limit.breaker_reset_seconds,
            open_reason=f"{count}, the last: {reason}",
        )
    return after


def _blame(limit_state: LimitState, caller: str | None) -> LimitState:
    blamed = limit_state.blamed
    if caller is not None and caller not in blamed and len(blamed) < MOST_BLAMED:
        blamed = (*blamed, caller)
    return replace(limit_state, failures=limit_state.failures + 1, blamed=blamed)


def _is_enough(limit_state: LimitState, needed: int, callers: Collection[str]) -> bool:
    """Do so many bad answers in a row speak against the API, and not against one command?"""
    calling = len({*limit_state.blamed, *callers})
    return limit_state.failures >= needed and len(limit_state.blamed) >= min(needed, calling, MOST_BLAMED)


def after_good(limit_state: LimitState, *, token: str | None) -> LimitState:
    """The state after a good answer: the probe's ends back-off and breaker; any other ends the series of bad
    ones."""
    if token is not None and limit_state.probe == token:
        if limit_state.breaker_forced:
            return replace(limit_state, probe=None, probe_until=None)
        return LimitState()
    if limit_state.is_probing or not limit_state.failures:
        return limit_state
    return replace(limit_state, failures=0, blamed=())


def after_unknown(limit_state: LimitState, *, token: str | None, has_begun: bool = True) -> LimitState:
    """The state after a call with an unknown end, or one that never began: if it was the probe, another one may
    follow."""
    if token is None or limit_state.probe != token:
        return limit_state
    return limit_state.without_probe() if has_begun else replace(limit_state, probe=None, probe_until=None)
