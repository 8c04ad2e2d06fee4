"""The state of limits, in words and numbers, and how long a command would wait. Times in words are in the local
zone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from commandbus import sql
from commandbus.errors import CommandNotFoundError
from commandbus.flow.limits.declare import LimitRow, get_limit, read_rows, select_limits
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.model.count import MOST_COUNTED, Count, capped
from commandbus.model.durations import roughly
from commandbus.model.json_values import Json
from commandbus.model.limit import SLOWEST_FLOW, PermitUsage, until_next
from commandbus.quick_dataclass import dataclass

UNKNOWN = "unknown"
"""The mode of a limit whose permits this program cannot reach."""
PROBING = "a probe finds out whether it is over"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Who waits for a limit: commands, callers inside programs, and since when the first of them."""

    commands: int = 0
    callers: int = 0
    oldest_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LimitInfo:
    """A limit, what it allows, who uses it, and its state.

    `state`: AVAILABLE (permits are given), BACKING_OFF, BREAKER_OPEN, PROBING (a probe finds out whether the API
    works again), or JOINING (Redis has lost its data, and no call may begin while an earlier permit may still be
    held). `until` is when that ends, and `text` says all of it in a sentence. `mode` is where its permits are kept
    now: postgres, redis, degraded (every program uses only its share), joining (Redis is reachable again, and
    holders register their permits) or unknown (they are in Redis, which this program cannot reach: then `holders`
    is empty, `in_use` is None, and `why_unknown` says why).
    """

    name: str
    environment: str
    store: str
    mode: str
    concurrency: int | None
    rate: str | None
    burst: int
    lease_seconds: float
    call_timeout_seconds: float | None
    max_wait_seconds: float | None
    tries: int
    backoff: tuple[float, ...]
    breaker_failures: int
    breaker_reset_seconds: float
    shared: bool
    state: str
    text: str
    until: datetime | None
    seconds_left: float | None
    backoff_step: int
    failures: int
    holders: Mapping[str, float]
    in_use: int | None
    why_unknown: str | None
    parked: int
    callers: int
    oldest_seconds: float | None
    starts_per_second: float | None
    granted: int
    rate_limited: int
    waits: int
    waited_seconds: float
    declared: Mapping[str, Json] | None
    override: Mapping[str, Json] | None
    changed_at: datetime

    @property
    def warning(self) -> str | None:
        """A warning if nobody declares this limit and it was never used: its name may be misspelled."""
        if self.declared is not None or self.granted or self.parked or self.callers:
            return None
        return f"no program declares limit {self.name!r}, and it was never used; is its name right?"


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long a command waits for a limit: the rest of the back-off, plus the commands ahead at the measured
    rate.

    `seconds` is None if there is no estimate: a person has opened the breaker, or no rate was measured yet. `text`
    says why.
    """

    limit: str
    seconds: float | None
    backoff_seconds: float
    ahead: int
    per_second: float | None
    text: str


@dataclass(frozen=True, slots=True)
class LineEstimate:
    """The position of a command in the line of a limit: how many are before it, what it waits for now (`note`),
    until when the limit is blocked, and how many seconds it will take (None: no estimate)."""

    ahead: int
    note: str
    until: datetime | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class ControlAction:
    """What was done to a limit or a breaker, who did it, and why. `operator` is "commandbus" if nobody did."""

    subject: str
    action: str
    operator: str
    reason: str | None
    details: Json
    performed_at: datetime


@operation(atomic=True)
def list_waiting() -> Steps[list[tuple[LimitRow, Waiting]]]:
    """All limits, and who waits for them."""
    rows = read_rows((yield select_limits(None)))
    waiting = yield from _waiting(None)
    return [(row, waiting.get(row.name, Waiting())) for row in rows]


@operation(atomic=True)
def get_waiting(name: str) -> Steps[tuple[LimitRow, Waiting]]:
    """One limit, and who waits for it."""
    row = yield from get_limit(name).steps
    waiting = yield from _waiting(name)
    return row, waiting.get(name, Waiting())


def _waiting(name: str | None) -> Steps[dict[str, Waiting]]:
    """Who waits for each limit, or for this one. Of each line the first 10,000 are counted."""
    rows = yield Statement(sql.text("limits/waiting"), {"name": name, "most": MOST_COUNTED + 1})
    found = {}
    for limit, commands, callers, seconds in rows:
        is_cut = commands + callers > MOST_COUNTED
        both = [Count(min(count, MOST_COUNTED), is_capped=is_cut and count > 0) for count in (commands, callers)]
        found[limit] = Waiting(both[0], both[1], seconds)
    return found


@operation(atomic=True)
def row_and_ahead(name: str, domain: str | None, command_id: str | None) -> Steps[tuple[LimitRow, int]]:
    """A limit, and how many are ahead of a waiting command, or of a new one."""
    row = yield from get_limit(name).steps
    found = yield Statement(sql.text("limits/ahead"), {"name": name, "domain": domain, "command_id": command_id})
    ahead, is_known = found[0]
    if command_id is not None and not is_known:
        raise CommandNotFoundError(f"command {command_id!r} of domain {domain!r} does not wait for limit {name!r}")
    return row, ahead


@operation(atomic=False)
def list_actions(name: str, *, limit: int) -> Steps[list[ControlAction]]:
    """What was done last to a limit and its breaker, or to the breaker of a type ("orders/ship"), newest first."""
    names.to_id(name, "name")
    return (yield from actions_on([f"limit {name}", f"breaker {name}"], limit))


def actions_on(subjects: Sequence[str], limit: int) -> Steps[list[ControlAction]]:
    """What was done last to these subjects of the audit, newest first. Index: control_action_subject."""
    rows = yield Statement(
        b"SELECT subject, action, operator, reason, details, performed_at FROM commandbus.control_action "
        b"WHERE subject = ANY (%(subjects)s::text[]) ORDER BY id DESC LIMIT %(limit)s",
        {"subjects": list(subjects), "limit": limit},
    )
    return [ControlAction(*row) for row in rows]


def lines_of(domain: str, limited: Mapping[int, str]) -> Steps[dict[int, LineEstimate]]:
    """The positions of commands (msg_id → limit) in line, by the present state of each limit, not by its state
    when the commands were parked. A command whose limit is gone is left out."""
    names = sorted(set(limited.values()))
    rows = read_rows((yield select_limits(names[0] if len(names) == 1 else None)))
    known = {row.name: row for row in rows}
    found = yield Statement(
        sql.text("limits/lines"),
        {
            "names": names,
            "domain": domain,
            "msg_ids": sorted(limited),
            "most": MOST_COUNTED + 1,
        },
    )
    return {
        msg_id: _call_waiters(known[limited[msg_id]], capped(ahead))
        for msg_id, ahead in found
        if limited[msg_id] in known
    }


def _call_waiters(row: LimitRow, ahead: int) -> LineEstimate:
    closed = row.limit_state.blocked_until(row.now)
    until = None if closed is None or row.limit_state.breaker_forced else datetime.fromtimestamp(closed, UTC)
    return LineEstimate(ahead, why_none(row), until, estimate(row, row.usage, ahead, is_waiting=True).seconds)


def why_none(row: LimitRow) -> str:
    """Why a limit has no permit now."""
    limit_state = row.limit_state
    if limit_state.blocked_until(row.now) is not None:
        return limit_state.explain(row.name)
    return _probing(row) if limit_state.is_probing else full(row)


def _probing(row: LimitRow) -> str:
    return f"{row.limit_state.explain(row.name, is_probing=True)}; {PROBING}"


def full(row: LimitRow) -> str:
    """The note of a command that waits because the limit has no free permit."""
    cap = "" if row.concurrency is None else f"{row.concurrency} at once"
    rate = "" if row.per_second is None else str(row.limit.rate)
    return f"waits for a permit of {row.name} ({', '.join(part for part in (cap, rate) if part)})"


def describe(row: LimitRow, usage: PermitUsage, waiting: Waiting) -> LimitInfo:
    """Everything about a limit."""
    limit_state, limit = row.limit_state, row.limit
    closed = limit_state.blocked_until(row.now)
    state, text = "AVAILABLE", _in_use(row, usage)
    if limit_state.breaker_open or limit_state.breaker_forced:
        state, text = "BREAKER_OPEN", limit_state.explain(row.name)
    elif limit_state.is_probing:
        state, text = "BACKING_OFF", limit_state.explain(row.name)
    left = None if closed is None or limit_state.breaker_forced else closed - row.now
    if state == "AVAILABLE" and usage.note is not None:
        text = f"{usage.note}; {text}"
        if usage.blocked_seconds is not None:
            state, left, closed = "JOINING", usage.blocked_seconds, row.now + usage.blocked_seconds
    if state != "AVAILABLE" and closed is None:
        state, text = "PROBING", _probing(row)
    if usage.why_unknown is not None:
        text += f"; use unknown: {usage.why_unknown}"
    until = None if left is None or closed is None else datetime.fromtimestamp(closed, UTC)
    if until is not None and left is not None:
        text = f"until {until.astimezone():%H:%M:%S} (in about {roughly(left)}): {text}"
    return LimitInfo(
        name=row.name,
        environment=row.environment,
        store=row.store,
        mode=usage.mode,
        concurrency=row.concurrency,
        rate=None if limit.rate is None else str(limit.rate),
        burst=row.burst,
        lease_seconds=row.lease,
        call_timeout_seconds=row.call_timeout,
        max_wait_seconds=limit.max_wait_seconds,
        tries=limit.tries,
        backoff=limit.backoff_seconds,
        breaker_failures=limit.breaker_failures,
        breaker_reset_seconds=limit.breaker_reset_seconds,
        shared=limit.shared,
        state=state,
        text=text,
        until=until,
        seconds_left=left,
        backoff_step=limit_state.step,
        failures=limit_state.failures,
        holders=dict(usage.holders),
        in_use=None if usage.mode == UNKNOWN else len(usage.holders),
        why_unknown=usage.why_unknown,
        parked=waiting.commands,
        callers=waiting.callers,
        oldest_seconds=waiting.oldest_seconds,
        starts_per_second=usage.flow,
        granted=row.granted,
        rate_limited=row.rate_limited,
        waits=row.waits,
        waited_seconds=row.waited_seconds,
        declared=row.declared,
        override=row.override,
        changed_at=row.changed_at,
    )


def estimate(row: LimitRow, usage: PermitUsage, ahead: int, *, is_waiting: bool) -> Estimate:
    """Estimate how long it takes."""
    limit_state = row.limit_state
    closed = limit_state.blocked_until(row.now)
    if limit_state.breaker_forced:
        return Estimate(
            row.name, None, 0.0, ahead, usage.flow, f"{limit_state.explain(row.name)}; a person must close it"
        )
    backoff = max(0.0 if closed is None else closed - row.now, usage.blocked_seconds or 0.0)
    is_full = row.concurrency is not None and (usage.mode == UNKNOWN or len(usage.holders) >= row.concurrency)
    has_permit = not backoff and not is_full
    pace = 0.0
    if row.per_second is not None and row.store == "postgres":
        pace = until_next(row.now, row.tat, row.per_second, row.burst)
    if not ahead and not is_waiting and has_permit and not limit_state.is_probing:
        return Estimate(
            row.name, pace, 0.0, 0, usage.flow, "a permit is free" if not pace else f"the rate of {row.name}"
        )
    flow = usage.flow if usage.flow is not None and usage.flow >= SLOWEST_FLOW else None
    rates = [rate for rate in (flow, row.per_second) if rate]
    rate = min(rates) if rates else None
    why = why_none(row) if limit_state.is_probing else f"{ahead} ahead at {row.name}"
    if rate is None and usage.why_unknown is not None and not backoff and not ahead:
        return Estimate(row.name, None, 0.0, 0, None, usage.why_unknown)
    if rate is None:
        seconds = backoff if backoff and not ahead else None
        return Estimate(
            row.name,
            seconds,
            backoff,
            ahead,
            None,
            f"{why}; no rate was measured lately" if seconds is None else why,
        )
    return Estimate(row.name, backoff + max(pace, (ahead + 1) / rate), backoff, ahead, rate, why)


def _in_use(row: LimitRow, usage: PermitUsage) -> str:
    used = ""
    if row.concurrency is not None:
        used = f"{'?' if usage.mode == UNKNOWN else len(usage.holders)} of {row.concurrency} permits in use"
    rate = "" if row.per_second is None else f"at most {row.limit.rate}"
    return ", ".join(part for part in (used, rate) if part)
