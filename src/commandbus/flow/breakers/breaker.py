"""Breakers of command types: when attempts of a type hang or fail, its commands wait instead of running.

    CLOSED ── the type is in trouble ──► OPEN ── reset has passed ──► HALF_OPEN: one probe
      ▲                                   ▲                              │
      └───────── the probe went well ─────┼──────────────────────────────┤
                                          └──── it went badly ───────────┘

`model/breaker_rule.py` says when a type is in trouble. Workers report attempts that ended badly (`report`), and
the breaker's row keeps them. Each worker counts in memory how many attempts ended in another way. While a type has
a bad attempt in the window, the worker sends these counts with its heartbeat: nothing is written per attempt.
`judge` puts both together. A bad attempt can be judged when every live worker of the domain has sent its counts
after it, or when PATIENCE_SECONDS have passed.

Workers maintain breakers (`watch`): they `judge` those that have news, and `advance` those that are not closed. A
worker that moves a breaker locks its row, so exactly one worker opens it, and one chooses the probe. The probe is
a command, not an attempt: it may be given back or lose its worker, and stays the probe while its message exists.
If the message is gone and no worker has reported how the probe ended, the status of the command decides (COMPLETED
is good), or another probe is chosen after a while. Probes rotate: the next one is the parked command with the
fewest failed probes.

While a breaker is not closed, claims park its commands, except the probe (`commands/claim.sql`,
`commands/park.sql`). Every move is recorded in control_action. `flow/breakers/operate.py` has what operators do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from commandbus import sql
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.commands.unpark import Parked, UnparkBite, wake
from commandbus.flow.limits.declare import note_action
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.breaker import Breaker
from commandbus.model.breaker_rule import AttemptCounts, BadAttempt, Trouble, find_trouble, kept
from commandbus.quick_dataclass import dataclass

State = Literal["CLOSED", "OPEN", "HALF_OPEN"]
SILENCE_SECONDS: Final = 10.0  # how long to wait for the report on a probe whose message is gone
PATIENCE_SECONDS: Final = 10.0  # how long to wait for the counts of a live worker
ALIVE_SECONDS: Final = 15.0  # a worker whose last heartbeat is older counts as dead
OURSELVES: Final = "commandbus"
WELL: Final = "its probe went well"
_ACTIONS: Final = {"OPEN": "OPEN", "HALF_OPEN": "HALF_OPEN", "CLOSED": "CLOSE"}
_TEXT_KEPT: Final = 300
_VAIN_KEPT: Final = 1000


class Bad(NamedTuple):
    """An attempt that counts: of which command, whether it was stuck, its error, and how many seconds ago it
    began."""

    command: int
    is_stuck: bool
    text: str
    began_ago: float = 0.0


class OpenBreaker(NamedTuple):
    """A breaker that is not closed, for the claim that parks its commands; `sentence` says why."""

    probe: int | None
    until: datetime | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A breaker has moved: to which state, why, and how many parked commands went back to the queue at once.

    `rest_after`: parked commands after this row may still have to go back.
    """

    domain: str
    command_type: str
    state: State
    reason: str
    released: int = 0
    rest_after: int | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """A breaker that is not closed, and in how many seconds it moves; `is_probing`: its probe is running."""

    domain: str
    command_type: str
    seconds: float
    is_probing: bool


@dataclass(frozen=True, slots=True)
class Watch:
    """What there is to do: breakers that are `due`, and the bad attempts of closed ones, by (domain,
    command_type). `now` is the server's clock, in epoch seconds; None if there is nothing to do."""

    due: Sequence[Due] = ()
    recent: Mapping[tuple[str, str], Sequence[BadAttempt]] = field(default_factory=dict)
    now: float | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict: the breaker moved, or not. `is_final`: the counts of all workers were known, so the verdict
    stays the same until the next bad attempt."""

    moved: Moved | None = None
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table that this transaction has locked, and the time (by the server's clock)."""

    domain: str
    command_type: str
    state: State
    recent: Sequence[BadAttempt]
    is_forced: bool
    opened_at: datetime | None
    until: datetime | None
    reason: str | None
    probe: int | None
    probe_until: datetime | None
    vain: Sequence[int]
    reset: float
    now: datetime

    def count(self, rule: Breaker, bad: Sequence[Bad]) -> Row:
        """The row with these attempts counted, and without those that have left the window.

        These attempts ended just now. So the time of the last end changes, and every worker sees that there is
        news.
        """
        now = self.now.timestamp()
        ended = max([now, *(item.ended + 1e-6 for item in self.recent)])
        more = [BadAttempt(item.command, item.is_stuck, now - item.began_ago, ended) for item in bad]
        return replace(self, recent=kept(rule, [*self.recent, *more], now))

    def tired(self) -> Row:
        """The row after its probe has failed."""
        return self if self.probe is None else replace(self, vain=[*self.vain, self.probe][-_VAIN_KEPT:])

    def opened(self, reason: str) -> Row:
        """The row with the breaker open from now on, for `reset` seconds."""
        until = self.now + timedelta(seconds=self.reset)
        return replace(
            self, state="OPEN", is_forced=False, opened_at=self.now, until=until, reason=reason, probe=None,
            probe_until=None,
        )  # fmt: skip

    def closed(self) -> Row:
        """The row with the breaker closed, and all counts cleared."""
        return replace(
            self, state="CLOSED", recent=[], is_forced=False, opened_at=None, until=None, reason=None, probe=None,
            probe_until=None, vain=[],
        )  # fmt: skip


# --- what workers do --------------------------------------------------------------------------------------------


@operation(atomic=True)
def report(
    domain: str, command_type: str, rule: Breaker, *, bad: Sequence[Bad] = (), good: Sequence[int] = ()
) -> Steps[Moved | None]:
    """Count attempts that ended badly, and report probes (by their commands) that ended well.

    While a breaker is open or half open, only its probe moves it: other attempts that end now began before it
    opened.
    """
    row = yield from (make(domain, command_type, rule) if bad else lock(domain, command_type))
    if row is None:
        return None
    now = row.count(rule, bad)
    if row.state == "HALF_OPEN" and (ended := next((item for item in bad if item.command == row.probe), None)):
        how = "got stuck" if ended.is_stuck else "failed"
        reason = f"its probe {how}: {_short(ended.text)}"
        return (yield from move(now.tired().opened(reason), of_probe=row.probe))
    if row.state == "HALF_OPEN" and row.probe in good:
        return (yield from move(row.closed(), WELL, of_probe=row.probe))
    if not bad:
        return None
    reason = f"the last: {_short(bad[-1].text)}"
    if row.state != "CLOSED":
        yield _save(now)
        return None
    judged = yield from _judge(replace(now, reason=reason), rule)
    if judged.moved is None:
        yield _save(replace(now, reason=reason))
    return judged.moved


@operation(atomic=True)
def judge(domain: str, command_type: str, rule: Breaker) -> Steps[Judged]:
    """Open the breaker if the counts that are known show that its type is in trouble."""
    row = yield from lock(domain, command_type, "SKIP LOCKED")
    if row is None or row.state != "CLOSED":
        return Judged(is_final=row is not None)  # None: another transaction holds the row, and may move it
    return (yield from _judge(row.count(rule, ()), rule))


def _judge(row: Row, rule: Breaker) -> Steps[Judged]:
    """Judge a closed breaker. Old attempts have left `row`; its `reason` describes the last bad attempt."""
    if find_trouble(rule, row.recent) is None:
        return Judged()
    rows = yield Statement(
        sql.text("breakers/counts"),
        {
            "domain": row.domain,
            "name": f"{row.domain}/{row.command_type}",
            "since": min(item.began for item in row.recent),
            "alive": ALIVE_SECONDS,
        },
    )
    counts = Counts([_Count(*found) for found in rows], row.recent, row.now.timestamp())
    known = [item for item in row.recent if item.ended <= counts.known_until]
    trouble = find_trouble(rule, known, counts.others)
    if trouble is None:
        return Judged(is_final=len(known) == len(row.recent))
    reason = ", ".join(part for part in (_words(trouble), row.reason) if part)
    return Judged((yield from move(row.opened(reason))))


class _Count(NamedTuple):
    """What one worker has sent: is the worker live, when did it send this, and its counts (None: no counts for
    this type)."""

    is_live: bool
    at: float
    tally: Mapping[str, Any] | None


class Counts:
    """What the workers of a domain have sent about one command type.

    `known_until`: the counts are complete for bad attempts that ended up to this moment, because all live workers
    have sent counts since. While attempts keep ending badly, the newest ones are always later than that. After
    PATIENCE_SECONDS, missing counts are no longer waited for.
    """

    def __init__(self, counts: Sequence[_Count], recent: Sequence[BadAttempt], now: float) -> None:
        tallies = [
            (count, None if count.tally is None else AttemptCounts.from_json(count.tally)) for count in counts
        ]
        self._tallies = [(count, tally) for count, tally in tallies if tally is not None]
        patient = max((item.ended for item in recent if item.ended < now - PATIENCE_SECONDS), default=-math.inf)
        told = [-math.inf if tally is None else tally.told_at for count, tally in tallies if count.is_live]
        self.known_until = max(patient, min(told, default=math.inf))

    def others(self, since: float) -> float:
        """How many attempts of all workers have ended since a moment and were not stuck."""
        return sum(tally.after(since) or 0.0 for count, tally in self._tallies if count.at >= since)


def _words(trouble: Trouble) -> str:
    return trouble.text(f"{datetime.fromtimestamp(trouble.since, UTC):%H:%M:%S} UTC")


@operation(atomic=False)
def watch(domains: Sequence[str]) -> Steps[Watch]:
    """The breakers of these domains that may have to be moved."""
    rows = yield Statement(sql.text("breakers/due"), {"domains": list(domains)})
    due = [
        Due(domain, command_type, 0.0 if seconds is None or state == "HALF_OPEN" else seconds, status == "PENDING")
        for domain, command_type, state, seconds, status, _, _ in rows
        if state != "CLOSED"
    ]
    recent = {
        (domain, command_type): _recent(bad)
        for domain, command_type, state, _, _, bad, _ in rows
        if state == "CLOSED"
    }
    return Watch(due, recent, rows[0][6] if rows else None)


@operation(atomic=True)
def advance(domain: str, command_type: str) -> Steps[Moved | None]:
    """Choose a probe if it is time for one. If the last probe has vanished, choose another."""
    row = yield from lock(domain, command_type, "SKIP LOCKED")
    if row is None or row.state == "CLOSED" or row.is_forced:
        return None
    if row.state == "OPEN":
        is_time = row.until is None or row.until <= row.now
        return (yield from _probe(row)) if is_time else None
    found = yield Statement(b"SELECT status::text FROM commandbus.command WHERE id = %(id)s", {"id": row.probe})
    match found[0][0] if found else None:
        case "PENDING":
            return None
        case "COMPLETED":
            return (yield from move(row.closed(), WELL, of_probe=row.probe))
        case "CANCELED" | None:
            return (yield from _probe(row))
    if row.probe_until is None:
        yield _save(replace(row, probe_until=row.now + timedelta(seconds=SILENCE_SECONDS)))
        return None
    return (yield from _probe(row.tired())) if row.probe_until <= row.now else None


def _probe(row: Row) -> Steps[Moved | None]:
    chosen = yield Statement(
        sql.text("breakers/probe", domain=row.domain),
        {"domain": row.domain, "type": row.command_type, "vain": list(row.vain)},
    )
    if chosen:
        half_open = replace(row, state="HALF_OPEN", probe=chosen[0][0], probe_until=None)
        return (yield from move(half_open, "one command is the probe", of_probe=half_open.probe))
    if row.state == "OPEN":
        return None  # the next command that arrives is parked, and can then be chosen
    unheard = replace(row, state="OPEN", until=row.now, probe=None, probe_until=None)
    return (yield from move(unheard, "nothing was heard of its probe", of_probe=row.probe))


def hold(domain: str, types: Iterable[str]) -> Steps[dict[str, OpenBreaker]]:
    """For a claim that is about to park: breakers of these types that are not closed, locked until it commits."""
    rows = yield Statement(sql.text("breakers/hold"), {"domain": domain, "types": sorted(set(types))})
    return {
        command_type: OpenBreaker(
            probe, until, explain(state, is_forced=is_forced, until=until, reason=reason, now=now)
        )
        for command_type, state, is_forced, until, reason, probe, now in rows
    }


def explain(
    state: str, *, is_forced: bool, until: datetime | None = None, reason: str | None, now: datetime | None = None
) -> str:
    """Why commands of a type wait, as a sentence for people; without `now` it does not say until when."""
    if is_forced:
        return f"breaker opened {reason or 'by a person'}"
    if state == "HALF_OPEN":
        how = "breaker half open, one command is the probe"
    elif now is None or until is None:
        how = "breaker open"
    elif until <= now:
        how = "breaker open, the next command is the probe"
    else:
        how = f"breaker open until {until.astimezone(UTC):%H:%M:%S} UTC"
    return f"{how}: {reason}" if reason else how


# --- the parts --------------------------------------------------------------------------------------------------


def lock(domain: str, command_type: str, locking: str = "") -> Steps[Row | None]:
    """Lock a breaker, if there is one."""
    rows = yield Statement(sql.text("breakers/lock", locking=locking), {"domain": domain, "type": command_type})
    return _row(domain, command_type, rows[0]) if rows else None


def make(domain: str, command_type: str, rule: Breaker) -> Steps[Row]:
    """Lock a breaker. If there is none, make it first."""
    rows = yield Statement(
        sql.text("breakers/make"),
        {
            "domain": domain,
            "type": command_type,
            "window": rule.window_seconds,
            "reset": rule.reset_seconds,
            "refuses": rule.refuses,
        },
    )
    return _row(domain, command_type, rows[0])


def move(
    row: Row,
    reason: str | None = None,
    *,
    what: OperatorAction | None = None,
    action: str | None = None,
    of_probe: int | None = None,
) -> Steps[Moved]:
    """Write the new state, and record the move. When a breaker closes, its parked commands return to the queue:
    the first portion now, the others later (`flow/commands/unpark.py`)."""
    why = reason or row.reason or ""
    yield _save(row)
    parked = Parked("breaker", row.domain, row.command_type)
    released = (yield from wake(parked)) if row.state == "CLOSED" else UnparkBite(0)
    until = row.until.isoformat() if row.until is not None and row.state == "OPEN" else None
    stuck = sum(item.is_stuck for item in row.recent)
    failures = len(row.recent) - stuck
    details = {"stuck": stuck, "failures": failures, "released": released.count, "probe": of_probe}
    yield note_action(
        f"breaker {row.domain}/{row.command_type}",
        action or _ACTIONS[row.state],
        what or OperatorAction(OURSELVES, why),
        details={name: value for name, value in {**details, "until": until}.items() if value},
    )
    return Moved(row.domain, row.command_type, row.state, why, released.count, released.after)


def _row(domain: str, command_type: str, found: Sequence[Any]) -> Row:
    state, recent, *rest = found
    return Row(domain, command_type, state, _recent(recent), *rest)


def _recent(found: Sequence[Sequence[Any]]) -> list[BadAttempt]:
    return [BadAttempt(*item) for item in found]


def _save(row: Row) -> Statement:
    return Statement(
        sql.text("breakers/save"),
        {
            "domain": row.domain,
            "type": row.command_type,
            "state": row.state,
            "recent": payload.dump([list(item) for item in row.recent], what="bad attempts"),
            "last": row.recent[-1].ended if row.recent else None,
            "is_forced": row.is_forced,
            "opened_at": row.opened_at,
            "until": row.until,
            "reason": row.reason,
            "probe": row.probe,
            "probe_until": row.probe_until,
            "vain": list(row.vain),
        },
    )


def _short(text: str) -> str:
    """The first line of an error, bounded."""
    line = next(iter(text.strip().splitlines()), "")
    return payload.clean_text(line if len(line) <= _TEXT_KEPT else line[: _TEXT_KEPT - 1] + "…")
