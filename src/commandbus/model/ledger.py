"""The ledger of a command: where every second from its sending to its end went.

It is computed from the rows that are written anyway. The intervals follow each other without gap or overlap, from
the sending to the end, or to now. That holds for any history, even if the clocks of workers are wrong: the start
of an attempt is by its worker's clock, everything else is by the server's, and a moment that cannot be is moved to
the nearest one that can.

A move of the command is either certain (somebody wrote it when it happened) or planned (`retry_at`, `due_at`). A
certain move that comes earlier than a planned one cancels the plan: an operator canceled the command during its
back-off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, NamedTuple

from commandbus.model.outcome import Verdict
from commandbus.quick_dataclass import dataclass


class LedgerState(StrEnum):
    """What a command did, or what it waited for."""

    DELAYED = "delayed"
    QUEUED = "queued"
    PARKED = "parked"
    CONNECTION = "connection"
    RUNNING = "running"
    GRACE = "grace"
    BACKING_OFF = "backing_off"
    SNOOZED = "snoozed"
    LOST = "lost"
    PERSON = "person"
    EARLIER = "earlier"

    @property
    def label(self) -> str:
        """What people call it."""
        return _LABELS[self]

    @property
    def mark(self) -> str:
        """One character for a bar of text."""
        return _MARKS[self]


_LABELS: Final = {
    LedgerState.DELAYED: "delayed by its sender",
    LedgerState.QUEUED: "in the queue",
    LedgerState.PARKED: "parked",
    LedgerState.CONNECTION: "waiting for a connection",
    LedgerState.RUNNING: "running",
    LedgerState.GRACE: "asked to stop, in its grace",
    LedgerState.BACKING_OFF: "backing off",
    LedgerState.SNOOZED: "snoozed by its handler",
    LedgerState.LOST: "with a worker that vanished",
    LedgerState.PERSON: "with a person (troubleshooting)",
    LedgerState.EARLIER: "before the attempts that are listed",
}
_MARKS: Final = {
    LedgerState.DELAYED: "d",
    LedgerState.QUEUED: ".",
    LedgerState.PARKED: "p",
    LedgerState.CONNECTION: "c",
    LedgerState.RUNNING: "#",
    LedgerState.GRACE: "g",
    LedgerState.BACKING_OFF: "b",
    LedgerState.SNOOZED: "z",
    LedgerState.LOST: "x",
    LedgerState.PERSON: "@",
    LedgerState.EARLIER: "?",
}
IN_ATTEMPT: Final = frozenset({LedgerState.RUNNING, LedgerState.CONNECTION, LedgerState.GRACE, LedgerState.LOST})
_PLANNED_AFTER: Final = {
    Verdict.RETRY: LedgerState.BACKING_OFF,
    Verdict.SNOOZED: LedgerState.SNOOZED,
    Verdict.PARKED: LedgerState.PARKED,
}
COMPLETED: Final = "COMPLETED"
_NEED_PERSON: Final = frozenset({Verdict.EXHAUSTED, Verdict.PERMANENT, Verdict.UNKNOWN_TYPE})
_PARKED_FOR: Final = {"PAUSED": "pause", "BREAKER_OPEN": "breaker", "NO_HANDLER": "unknown type"}


class Span(NamedTuple):
    """A part of an attempt in which its handler did not simply run: milliseconds after its start. `ended` is None
    if it lasted until the end."""

    kind: str
    begun: int
    ended: int | None


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """What a row of `attempt` says."""

    number: int
    verdict: str
    finished_at: datetime
    started_at: datetime | None = None
    retry_at: datetime | None = None
    worker: str | None = None
    error_code: str | None = None
    limit: str | None = None
    spans: Sequence[Span] = ()


@dataclass(frozen=True, slots=True)
class CurrentAttempt:
    """The attempt that completed the command (`ended_at`), or the one that runs now."""

    number: int
    started_at: datetime
    worker: str | None = None
    ended_at: datetime | None = None
    spans: Sequence[Span] = ()


@dataclass(frozen=True, slots=True)
class CommandHistory:
    """Everything that a ledger is computed from. `until` is the end of the command, or now. `retries` is when
    operators put it into the queue again. `line` names the key in whose line it waits now. `is_cut`: it has more
    attempts than these."""

    sent_at: datetime
    until: datetime
    is_open: bool
    due_at: datetime | None = None
    attempts: Sequence[PastAttempt] = ()
    retries: Sequence[datetime] = ()
    current: CurrentAttempt | None = None
    line: str | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class LedgerInterval:
    """A part of a command's life. `attempt` is the number of the attempt that it belongs to. `reason` says what a
    parked command waited for: "limit docai", "breaker", "pause", "unknown type" or "key limit tenants"."""

    state: LedgerState
    start: datetime
    end: datetime
    seconds: float
    attempt: int | None = None
    reason: str | None = None

    @property
    def label(self) -> str:
        """What people call it: "parked for limit docai"."""
        return self.state.label if self.reason is None else f"{self.state.label} for {self.reason}"


@dataclass(frozen=True, slots=True)
class LedgerAttempt:
    """An attempt on the axis of its command. `verdict` is None for one that runs."""

    number: int
    start: datetime
    end: datetime
    verdict: str | None
    worker: str | None = None


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the time of a command went. The intervals add up to the time from `sent_at` to `until`. `is_open`: it
    has not ended, and `until` is now."""

    sent_at: datetime
    until: datetime
    is_open: bool
    seconds: float
    intervals: list[LedgerInterval]
    attempts: list[LedgerAttempt]

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by label, the most first."""
        found: dict[str, float] = {}
        for item in self.intervals:
            found[item.label] = found.get(item.label, 0.0) + item.seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


class _Move(NamedTuple):
    at: datetime
    state: LedgerState
    attempt: int | None
    reason: str | None
    is_planned: bool


class _Walk:
    """The moves of a command in order, none before the one before it."""

    def __init__(self, first: datetime, last: datetime) -> None:
        self._first, self._last = first, max(first, last)
        self.moves: list[_Move] = []

    def go(
        self,
        at: datetime,
        state: LedgerState,
        *,
        attempt: int | None = None,
        reason: str | None = None,
        is_planned: bool = False,
    ) -> None:
        at = min(max(at, self._first), self._last)
        while not is_planned and self.moves and self.moves[-1].is_planned and self.moves[-1].at > at:
            self.moves.pop()
        if self.moves:
            at = max(at, self.moves[-1].at)
        self.moves.append(_Move(at, state, attempt, reason, is_planned))

    def wait(self, until: datetime | None) -> None:
        """The planned end of what was begun last."""
        if until is not None:
            self.go(until, LedgerState.QUEUED, is_planned=True)

    def is_in_line(self, reason: str) -> None:
        """What looks like waiting in the queue since the last move is waiting for its turn."""
        if self.moves[-1].state is LedgerState.QUEUED:
            self.moves[-1] = self.moves[-1]._replace(state=LedgerState.PARKED, reason=reason)

    def intervals(self) -> list[LedgerInterval]:
        ends = [move.at for move in self.moves[1:]] + [self._last]
        found: list[LedgerInterval] = []
        for move, end in zip(self.moves, ends, strict=True):
            if end <= move.at:
                continue
            start, before = move.at, found[-1] if found else None
            if before is not None and (before.state, before.attempt, before.reason) == move[1:4]:
                found.pop()
                start = before.start
            seconds = (end - start).total_seconds()
            found.append(LedgerInterval(move.state, start, end, seconds, move.attempt, move.reason))
        return found


def ledger_of(history: CommandHistory) -> Ledger:
    """Returns the ledger of a command with this history."""
    walk = _Walk(history.sent_at, history.until)
    _begin(walk, history)
    past = sorted(history.attempts, key=lambda item: (item.finished_at, item.number))
    retries = sorted(history.retries)
    for item in past:
        while retries and retries[0] < item.finished_at:
            walk.go(retries.pop(0), LedgerState.QUEUED)
        _pass(walk, item)
    for at in retries:
        walk.go(at, LedgerState.QUEUED)
    current = history.current
    if current is not None:
        end = history.until if current.ended_at is None else current.ended_at
        _run(walk, current.number, current.started_at, end, current.spans)
    elif history.line is not None:
        walk.is_in_line(_turn(history.line))
    intervals = walk.intervals()
    until = max(history.sent_at, history.until)
    whole = (until - history.sent_at).total_seconds()
    attempts = _attempts(intervals, past, current)
    return Ledger(history.sent_at, until, history.is_open, whole, intervals, attempts)


def _begin(walk: _Walk, history: CommandHistory) -> None:
    if history.is_cut:
        walk.go(history.sent_at, LedgerState.EARLIER)
    elif history.due_at is not None and history.due_at > history.sent_at:
        walk.go(history.sent_at, LedgerState.DELAYED)
        walk.wait(history.due_at)
    else:
        walk.go(history.sent_at, LedgerState.QUEUED)


def _pass(walk: _Walk, item: PastAttempt) -> None:
    """An attempt that did not complete, and what its command did after it."""
    if item.verdict == Verdict.NOTE:
        return
    if item.started_at is not None:
        state = LedgerState.LOST if item.verdict == Verdict.LOST else LedgerState.RUNNING
        _run(walk, item.number, item.started_at, item.finished_at, item.spans, state)
    try:
        verdict = Verdict(item.verdict)
    except ValueError:  # of a newer release
        verdict = Verdict.WAIVED
    if verdict in _NEED_PERSON:
        walk.go(item.finished_at, LedgerState.PERSON)
    elif (state_after := _PLANNED_AFTER.get(verdict)) is not None:
        walk.go(item.finished_at, state_after, reason=_reason(item))
        walk.wait(item.retry_at)
    else:
        walk.go(item.finished_at, LedgerState.QUEUED)


def _run(
    walk: _Walk,
    number: int,
    start: datetime,
    end: datetime,
    spans: Iterable[Span],
    state: LedgerState = LedgerState.RUNNING,
) -> None:
    start = min(start, end)
    walk.go(start, state, attempt=number)
    grace = min((span.begun for span in spans if span.kind == LedgerState.GRACE), default=None)
    stopped = end if grace is None else min(end, _after(start, grace))
    waits = [span for span in spans if span.kind == LedgerState.CONNECTION]
    for span in sorted(waits, key=lambda span: (span.begun, math.inf if span.ended is None else span.ended)):
        walk.go(min(stopped, _after(start, span.begun)), LedgerState.CONNECTION, attempt=number)
        if span.ended is not None:
            walk.go(min(stopped, _after(start, span.ended)), state, attempt=number)
    if grace is not None:
        walk.go(stopped, LedgerState.GRACE, attempt=number)


def _after(start: datetime, milliseconds: int) -> datetime:
    try:
        return start + timedelta(milliseconds=max(0, milliseconds))
    except OverflowError:
        return datetime.max.replace(tzinfo=start.tzinfo)


def _reason(item: PastAttempt) -> str | None:
    if item.verdict != Verdict.PARKED:
        return None
    if item.error_code == "KEY_LIMIT":
        return _turn(item.limit)
    return f"limit {item.limit}" if item.limit else _PARKED_FOR.get(item.error_code or "", "a limit")


def _turn(key_limit: str | None) -> str:
    return f"its turn at key limit {key_limit}"


def _attempts(
    intervals: Sequence[LedgerInterval], past: Sequence[PastAttempt], current: CurrentAttempt | None
) -> list[LedgerAttempt]:
    """The attempts that began, with the times that they have in the ledger."""
    bounds: dict[int, tuple[datetime, datetime]] = {}
    for item in intervals:
        if item.attempt is not None:
            start, _ = bounds.get(item.attempt, (item.start, item.end))
            bounds[item.attempt] = start, item.end
    told: list[tuple[int, str | None, str | None]] = [
        (item.number, item.verdict, item.worker) for item in past if item.started_at is not None
    ]
    if current is not None:
        verdict = None if current.ended_at is None else COMPLETED
        told.append((current.number, verdict, current.worker))
    return [
        LedgerAttempt(number, *bounds[number], verdict, worker)
        for number, verdict, worker in told
        if number in bounds
    ]
