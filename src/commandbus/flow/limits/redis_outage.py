"""Where the fleet keeps the permits of Redis limits now, and the permits that PostgreSQL keeps while no program
can reach Redis.

    redis ──(all live programs have lost it)──▶ degraded ──(one reaches it again)──▶ joining ──────▶ redis
      └────────────────(it is there, but has lost its data)──────────────────────────▲

`joining` ends as soon as Redis knows all earlier permits: every live program has registered its own, and no other
program may still hold one. It lasts one lease at most, because by then all earlier leases have ended.

Everything here is decided under the lock of the one row of `limit_mode`. Lock order: that row, then the programs'
rows in ascending order. No row of `limits` is locked after it.

A program's row says what the program holds. While the program reaches Redis, the row says only the most that it
may hold for each limit (`most`); this counts if the program dies. While it cannot reach Redis, the row has each
token and when its lease ends (`tokens`), and how far the rate is used up (`tat`). So in `degraded` the sum over
all rows is never less than what is in use, including permits from before the outage. In addition, each program
uses only its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Final, NamedTuple, Protocol

from commandbus import sql
from commandbus.flow.limits.declare import CHANNEL
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.limit import allowance, share
from commandbus.model.limit_values import LimitValues
from commandbus.quick_dataclass import dataclass

REDIS: Final = "redis"
DEGRADED: Final = "degraded"
JOINING: Final = "joining"
MODE: Final = "mode "
"""The beginning of the notification of a new mode, on the channel of limits."""

Held = dict[str, dict[str, Any]]


class Epochs(Protocol):
    """What Redis is asked while the mode is decided (`RedisScripts` does it)."""

    def probe(self) -> Any: ...

    def begin_epoch(self, known: str | None, lease: float) -> str: ...


@dataclass(frozen=True, slots=True)
class HeartbeatPace:
    """How often a program says that it is alive, and when others count it as dead. The same for a whole fleet."""

    beat: float = 2.0  # how often a program says that it is alive, and checks whether Redis is reachable
    live: float = 10.0  # a program without a heartbeat for so long counts as dead
    patience: float = 2.0  # how long no program must have reached Redis, because `joining` may take a lease

    @property
    def leave(self) -> float:
        """For how long after a heartbeat a program may ask Redis for anything. That is shorter than the time after
        which it counts as dead. So a program that was stopped, or cut off from PostgreSQL, takes no permits once
        the others count it as dead."""
        return self.live * 0.8


@dataclass(frozen=True, slots=True)
class Mode:
    """Where permits are kept. `seconds`: for how long no new call may begin; `was`: the mode before."""

    mode: str
    epoch: str | None
    seconds: float | None = None
    is_lost: bool = False
    programs: int = 0
    was: str | None = None
    note: str | None = None  # the program that `joining` waits for


class OldPermits(NamedTuple):
    """A program that may hold permits that Redis has forgotten, for how many seconds at most, and why."""

    program: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Program:
    """A program that uses Redis limits, as its row says."""

    id: str
    started_at: float
    silent: float
    lost: float | None
    held: Held = field(default_factory=dict)
    epoch: str | None = None  # the epoch in which Redis knows all permits of the program

    def is_live(self, pace: HeartbeatPace) -> bool:
        """Was its last heartbeat recent?"""
        return self.silent < pace.live

    def may_hold(self, name: str, lease: float, pace: HeartbeatPace) -> int:
        """The most permits that it may hold, as it last reported. A dead program may have renewed its permits
        until it counted as dead, and its calls may go on for one lease."""
        kept = self.held.get(name, {})
        if self.lost is not None or self.silent >= pace.live + kept.get("lease", lease):
            return 0
        most: int = kept.get("most", 0)
        return most

    def tokens(self, name: str, now: float) -> dict[str, float]:
        """The tokens that PostgreSQL counts for it, and when their leases end."""
        if self.lost is None:
            return {}
        kept = self.held.get(name, {}).get("tokens", {})
        return {token: ends for token, ends in kept.items() if ends > now}

    def old_permits(self, fleet: RedisFleetState, pace: HeartbeatPace) -> OldPermits | None:
        """The permits that it may still hold although Redis does not know them; None: there are none."""
        if self.epoch == fleet.epoch or self.started_at > fleet.since:
            return None
        ends = [end - fleet.now for name in self.held for end in self.tokens(name, fleet.now).values()]
        if ends:
            return OldPermits(self.id, max(ends), "cannot reach Redis, and holds permits")
        held = [name for name in self.held if self.may_hold(name, fleet.lease, pace)]
        if not held:
            return None
        lease = max(self.held[name].get("lease", fleet.lease) for name in held)
        left = fleet.since + lease - fleet.now  # since `fleet.since`, Redis renews no lease that it does not know
        if self.is_live(pace):
            return OldPermits(self.id, left, "has not registered its permits yet")
        dead = pace.live + lease - self.silent
        return OldPermits(self.id, min(left, dead), "fell silent, and its calls may go on")

    def is_gone(self, fleet: RedisFleetState, pace: HeartbeatPace) -> bool:
        """Is it dead, and are all its permits free?"""
        return not self.is_live(pace) and not any(
            self.may_hold(name, fleet.lease, pace) or self.tokens(name, fleet.now) for name in self.held
        )


@dataclass(frozen=True, slots=True)
class RedisFleetState:
    """All programs at one moment (`now`: PostgreSQL's clock)."""

    mode: str
    epoch: str | None
    since: float
    until: float | None
    programs: Sequence[Program]
    lease: float
    now: float

    def find(self, id_: str) -> Program | None:
        """The program with this id."""
        return next((program for program in self.programs if program.id == id_), None)

    def live(self, pace: HeartbeatPace) -> list[Program]:
        """Those that are alive, the eldest first."""
        alive = [program for program in self.programs if program.is_live(pace)]
        return sorted(alive, key=lambda program: (program.started_at, program.id))

    def has_lost_redis(self, pace: HeartbeatPace) -> bool:
        """Has no live program been able to reach Redis for some time?"""
        return all(program.lost is not None and program.lost >= pace.patience for program in self.live(pace))

    def joining(self, pace: HeartbeatPace) -> tuple[float, str | None]:
        """For how many seconds no new call may begin, and which program causes that."""
        found = [old for program in self.programs if (old := program.old_permits(self, pace)) is not None]
        if not found or self.until is None:
            return 0.0, None
        last = max(found, key=lambda old: old.seconds)
        others = f", and {len(found) - 1} more" if len(found) > 1 else ""
        return min(last.seconds, self.until - self.now), f"{last.program} {last.why}{others}"

    def in_use(self, name: str, pace: HeartbeatPace) -> int:
        """How many permits of a limit are in use, at most. While a permit is handed over, two rows contain its
        token."""
        tokens = {token for program in self.programs for token in program.tokens(name, self.now)}
        return len(tokens) + sum(program.may_hold(name, self.lease, pace) for program in self.programs)

    def tat(self, limit: LimitValues) -> float:
        """How far the rate is used up. Redis' own count cannot be read, so it counts as used up at the start."""
        if not limit.per_second:
            return 0.0
        kept: list[float] = [program.held.get(limit.name, {}).get("tat", 0.0) for program in self.programs]
        return max([self.since + limit.burst / limit.per_second, *kept])


@operation(atomic=False)
def beat(id_: str, held: Held | None) -> Steps[Mode | None]:
    """Write a program's heartbeat. Returns None if its row is gone. A second statement then reads the mode. So if
    another program changes the mode at the same time, either it sees this heartbeat, or we see its change."""
    known = yield Statement(sql.text("limits/client_beat"), {"id": id_, "held": _json(held)})
    rows = yield Statement(sql.text("limits/mode_read"))
    if not known or not rows:
        return None
    mode, epoch, seconds, note = rows[0]
    return Mode(mode, epoch, seconds, is_lost=known[0][0], note=note)


@operation(atomic=True)
def settle(
    id_: str, held: Held, *, lease: float, pace: HeartbeatPace, redis: Epochs | None, epoch: str | None = None
) -> Steps[Mode]:
    """Say that a program is alive and can reach Redis (`redis` is None: it cannot), and change the mode if
    necessary. `held`: the most that it may hold of each limit or, if it cannot reach Redis, what it holds: `left`,
    the seconds of each lease. `epoch`: the epoch in which Redis knows all of that."""
    before = yield from _lock()
    if redis is None:
        rows = yield Statement(b"SELECT extract(epoch FROM pg_catalog.clock_timestamp())::float8")
        held = _by_the_clock(held, rows[0][0])
    values = {"id": id_, "held": _json(held), "is_lost": redis is None, "epoch": epoch}
    yield Statement(sql.text("limits/client_say"), values)
    fleet = yield from _fleet(before, lease)
    after = _decide(fleet, pace, redis)
    if (after.mode, after.epoch) != (fleet.mode, fleet.epoch):
        set_to = {"mode": after.mode, "epoch": after.epoch, "seconds": after.seconds, "note": after.note}
        yield Statement(sql.text("limits/mode_set"), {**set_to, "channel": CHANNEL, "text": MODE + after.mode})
    elif after.mode == JOINING:
        yield Statement(sql.text("limits/mode_wait"), {"seconds": after.seconds, "note": after.note})
    gone = [program.id for program in fleet.programs if program.is_gone(fleet, pace)]
    if gone and after.mode != DEGRADED:  # in `degraded`, their record of the rate is still needed
        yield Statement(sql.text("limits/client_forget"), {"ids": gone})
    return after


def _decide(fleet: RedisFleetState, pace: HeartbeatPace, redis: Epochs | None) -> Mode:
    programs = len(fleet.live(pace))

    def mode(name: str, epoch: str | None, seconds: float | None = None, note: str | None = None) -> Mode:
        return Mode(name, epoch, seconds, is_lost=redis is None, programs=programs, was=fleet.mode, note=note)

    same = mode(fleet.mode, fleet.epoch, None if fleet.until is None else fleet.until - fleet.now)
    if redis is None:
        is_new = fleet.mode != DEGRADED and fleet.has_lost_redis(pace)
        return mode(DEGRADED, fleet.epoch) if is_new else same
    if fleet.mode != DEGRADED:
        if fleet.epoch is None:
            return mode(REDIS, redis.begin_epoch(None, fleet.lease))
        # Read again under the lock: another program may have repaired what the caller saw before.
        if redis.probe().epoch == fleet.epoch:
            if fleet.mode != JOINING:
                return same
            seconds, note = fleet.joining(pace)
            return mode(JOINING, fleet.epoch, seconds, note) if seconds > 0 else mode(REDIS, fleet.epoch)
    epoch = redis.begin_epoch(fleet.epoch, fleet.lease)
    return mode(JOINING, epoch, fleet.lease, "programs register what they hold")


@operation(atomic=True)
def take_share(
    id_: str, limit: LimitValues, tokens: Sequence[str], seconds: float, *, pace: HeartbeatPace
) -> Steps[tuple[str, list[str]]]:
    """Take permits that PostgreSQL keeps. Returns the mode, and the tokens that have a permit. In any mode but
    `degraded`, nothing is taken."""
    fleet = yield from _fleet((yield from _lock()), limit.lease)
    live = fleet.live(pace)
    own = fleet.find(id_)
    if fleet.mode != DEGRADED or own not in live or own is None or own.lost is None:
        return fleet.mode, []
    mine = own.tokens(limit.name, fleet.now)
    room, tat = len(tokens), fleet.tat(limit)
    if limit.concurrency is not None:
        part = share(limit.concurrency, live.index(own), len(live))
        room = min(room, part - len(mine), limit.concurrency - fleet.in_use(limit.name, pace))
    if limit.per_second:
        room, _ = allowance(fleet.now, tat, limit.per_second, limit.burst, room)
    granted, added = [], 0
    for token in tokens:
        if token not in mine:
            if added >= room:
                break
            added += 1
        granted.append(token)
    if granted:
        kept: dict[str, Any] = {"tokens": mine | dict.fromkeys(granted, fleet.now + seconds)}
        if limit.per_second:
            kept["tat"] = allowance(fleet.now, tat, limit.per_second, limit.burst, added)[1]
        yield _hold({id_: {**own.held, limit.name: {**own.held.get(limit.name, {}), **kept}}})
    return fleet.mode, granted


@operation(atomic=True)
def renew_share(id_: str, limit: LimitValues, tokens: Sequence[str]) -> Steps[tuple[str, list[str]]]:
    """Renew permits that PostgreSQL keeps. If another program took a permit for this one, it becomes this
    program's. Returns the mode, and the tokens that hold no permit. In any mode but `degraded`, nothing is
    renewed."""
    fleet = yield from _fleet((yield from _lock()), limit.lease)
    own = fleet.find(id_)
    if fleet.mode != DEGRADED or own is None or own.lost is None:
        return fleet.mode, []
    known = {token for program in fleet.programs for token in program.tokens(limit.name, fleet.now)}
    found = [token for token in tokens if token in known]
    if found:
        mine = own.tokens(limit.name, fleet.now) | dict.fromkeys(found, fleet.now + limit.lease)
        yield _hold({id_: {**own.held, limit.name: {**own.held.get(limit.name, {}), "tokens": mine}}})
    return fleet.mode, [token for token in tokens if token not in known]


@operation(atomic=True)
def release_share(name: str, tokens: Sequence[str]) -> Steps[None]:
    """Release permits that PostgreSQL counts, whichever program's row contains them."""
    fleet = yield from _fleet((yield from _lock()), 0.0)
    changed: dict[str, Held] = {}
    for program in fleet.programs:
        kept = program.tokens(name, fleet.now)
        rest = {token: ends for token, ends in kept.items() if token not in tokens}
        if len(rest) < len(kept):
            changed[program.id] = {**program.held, name: {**program.held[name], "tokens": rest}}
    if changed:
        yield _hold(changed)


@operation(atomic=False)
def share_in_use(name: str) -> Steps[dict[str, float]]:
    """The tokens that PostgreSQL counts, and how many seconds their leases last."""
    rows = yield Statement(sql.text("limits/client_list", locking=""))
    left: dict[str, float] = {}
    for *program, _, now in rows:
        for token, ends in Program(*program).tokens(name, now).items():
            left[token] = max(ends - now, left.get(token, 0.0))
    return left


@operation(atomic=True)
def leave(id_: str) -> Steps[None]:
    """Sign off a program that ends, and holds nothing more in Redis."""
    fleet = yield from _fleet((yield from _lock()), 0.0)
    own = fleet.find(id_)
    is_counted = own is not None and any(own.tokens(name, fleet.now) for name in own.held)
    statement = "limits/client_leave" if is_counted or fleet.mode == DEGRADED else "limits/client_forget"
    yield Statement(sql.text(statement), {"id": id_, "ids": [id_]})


def _lock() -> Steps[Row]:
    rows = yield Statement(sql.text("limits/mode_lock"))
    if not rows:
        yield Statement(sql.text("limits/mode_make"))
        rows = yield Statement(sql.text("limits/mode_lock"))
    return rows[0]


def _fleet(mode: Row, lease: float) -> Steps[RedisFleetState]:
    """Read the fleet. `lease`: the longest lease that the caller knows."""
    rows = yield Statement(sql.text("limits/client_list", locking="FOR UPDATE"))
    programs, latest = [], 0.0
    for *program, longest, now in rows:
        programs.append(Program(*program))
        lease, latest = max(lease, longest), max(latest, now)
    name, epoch, since, until = mode
    return RedisFleetState(name, epoch, since, until, programs, lease, latest)


def _by_the_clock(held: Held, now: float) -> Held:
    """Replace the rest of each lease by the moment at which it ends, by PostgreSQL's clock."""
    return {
        name: {"tokens": {token: now + left for token, left in kept["left"].items()}}
        for name, kept in held.items()
    }


def _hold(held: Mapping[str, Held]) -> Statement:
    return Statement(
        sql.text("limits/client_hold"), {"ids": list(held), "held": [_json(one) for one in held.values()]}
    )


def _json(held: Held | None) -> str | None:
    return None if held is None else payload.dump(held, what="held", max_bytes=1 << 30)
