"""breaker: when attempts of a command type keep hanging or failing, its commands wait instead of running.

    CLOSED ── enough bad attempts within the window ──► OPEN ── reset has passed ──► HALF_OPEN: one probe
      ▲                                                  ▲                              │
      └───────────────── the probe went well ────────────┼──────────────────────────────┤
                                                         └──── it went badly ───────────┘

Workers report what counts (`report`), and look after breakers that are not closed (`due`, `advance`). Who moves
a breaker holds its row, so of any number of reporters one opens it, and of any number of workers one chooses the
probe. The probe is a command, not an attempt: it may be given back or lose its worker, and stays the probe while
its message is there. If the message is gone and nobody has told how it ended, the command says so (COMPLETED is
well), or another one is chosen after a while.

While a breaker is not closed, claims park its commands, all but the probe (`claim.sql`, `park.sql`). Every move is
written down in control_action. What people do is in `flow/breaker_operate.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.limits import note_action
from commandbus.flow.operate import Deed
from commandbus.flow.send import explain_missing
from commandbus.flow.statement import Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.breaker import Breaker
from commandbus.model.durations import format_seconds
from commandbus.model.words import counted

State = Literal["CLOSED", "OPEN", "HALF_OPEN"]
SILENCE_SECONDS: Final = 10.0  # how long to wait for word of a probe whose message is gone
OURSELVES: Final = "commandbus"
WELL: Final = "its probe went well"
_ACTIONS: Final = {"OPEN": "OPEN", "HALF_OPEN": "HALF_OPEN", "CLOSED": "CLOSE"}
_TEXT_KEPT: Final = 300


class Bad(NamedTuple):
    """An attempt that counts: of which command, whether it was stuck, and its error."""

    command: int
    is_stuck: bool
    text: str


class OpenBreaker(NamedTuple):
    """A breaker that is not closed, for who parks its commands; `sentence` says why."""

    probe: int | None
    until: datetime | None
    sentence: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A breaker has moved: to which state, why, and how many parked commands went back to the queue."""

    domain: str
    command_type: str
    state: State
    reason: str
    released: int = 0


@dataclass(frozen=True, slots=True)
class Due:
    """One that is not closed, and in how many seconds it is to move; `is_probing`: its probe is under way."""

    domain: str
    command_type: str
    seconds: float
    is_probing: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table that this transaction has locked, and the time (by the server's clock)."""

    domain: str
    command_type: str
    state: State
    stuck_at: list[datetime]
    failed_at: list[datetime]
    is_forced: bool
    opened_at: datetime | None
    until: datetime | None
    reason: str | None
    probe: int | None
    probe_until: datetime | None
    reset: float
    now: datetime

    def count(self, rule: Breaker, bad: Sequence[Bad]) -> Row:
        """With these attempts counted, and what has left the window forgotten."""
        since = self.now - timedelta(seconds=rule.window_seconds)
        stuck = [at for at in self.stuck_at if at > since] + [self.now for item in bad if item.is_stuck]
        failed = [at for at in self.failed_at if at > since] + [self.now for _ in bad]
        return replace(self, stuck_at=_last(stuck, rule.stuck), failed_at=_last(failed, rule.failures))

    def trouble(self, rule: Breaker) -> str | None:
        """Why it must open, if it must."""
        window = format_seconds(rule.window_seconds)
        if rule.stuck and len(self.stuck_at) >= rule.stuck:
            return f"{counted(len(self.stuck_at), 'stuck attempt')} within {window}"
        if rule.failures and len(self.failed_at) >= rule.failures:
            return f"{counted(len(self.failed_at), 'failed attempt')} within {window}"
        return None

    def opened(self, reason: str) -> Row:
        """Open from now on, for as long as it says."""
        until = self.now + timedelta(seconds=self.reset)
        return replace(
            self, state="OPEN", is_forced=False, opened_at=self.now, until=until, reason=reason, probe=None,
            probe_until=None,
        )  # fmt: skip

    def closed(self) -> Row:
        """Closed; nothing counts that was before."""
        return replace(
            self, state="CLOSED", stuck_at=[], failed_at=[], is_forced=False, opened_at=None, until=None,
            reason=None, probe=None, probe_until=None,
        )  # fmt: skip


# --- what workers do --------------------------------------------------------------------------------------------


@operation(atomic=True)
def report(
    domain: str, command_type: str, rule: Breaker, *, bad: Sequence[Bad] = (), good: Sequence[int] = ()
) -> Steps[Moved | None]:
    """Count attempts that ended badly, and tell of probes (by their commands) that ended well.

    While it is open or half open, only the probe moves it: what else ends had begun before.
    """
    row = yield from (make(domain, command_type, rule) if bad else lock(domain, command_type))
    if row is None:
        return None
    now = row.count(rule, bad)
    if row.state == "CLOSED" and bad and (trouble := now.trouble(rule)):
        return (yield from move(now.opened(f"{trouble}, the last: {_short(bad[-1].text)}")))
    if row.state == "HALF_OPEN" and (ended := next((item for item in bad if item.command == row.probe), None)):
        how = "got stuck" if ended.is_stuck else "failed"
        return (yield from move(now.opened(f"its probe {how}: {_short(ended.text)}"), of_probe=row.probe))
    if row.state == "HALF_OPEN" and row.probe in good:
        return (yield from move(row.closed(), WELL, of_probe=row.probe))
    if bad:
        yield _save(now)
    return None


@operation(atomic=False)
def due(domains: Sequence[str]) -> Steps[list[Due]]:
    """The breakers of these domains that will move by themselves."""
    rows = yield Statement(sql.text("breaker_due"), {"domains": list(domains)})
    return [
        Due(domain, command_type, 0.0 if seconds is None or state == "HALF_OPEN" else seconds, status == "PENDING")
        for domain, command_type, state, seconds, status in rows
    ]


@operation(atomic=True)
def advance(domain: str, command_type: str) -> Steps[Moved | None]:
    """Choose a probe if it is time for one, or another one if the last has vanished."""
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
    return (yield from _probe(row)) if row.probe_until <= row.now else None


def _probe(row: Row) -> Steps[Moved | None]:
    chosen = yield Statement(
        sql.text("breaker_probe", domain=row.domain), {"domain": row.domain, "type": row.command_type}
    )
    if chosen:
        half_open = replace(row, state="HALF_OPEN", probe=chosen[0][0], probe_until=None)
        return (yield from move(half_open, "one command is tried", of_probe=half_open.probe))
    if row.state == "OPEN":
        return None  # the next one that arrives is parked, and then chosen
    unheard = replace(row, state="OPEN", until=row.now, probe=None, probe_until=None)
    return (yield from move(unheard, "nothing was heard of its probe", of_probe=row.probe))


def hold(domain: str, types: Iterable[str]) -> Steps[dict[str, OpenBreaker]]:
    """For a claim that is about to park: those of these types that are not closed, and stay so until then."""
    rows = yield Statement(sql.text("breaker_hold"), {"domain": domain, "types": sorted(set(types))})
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
        how = "breaker half open, one command is tried"
    elif now is None or until is None:
        how = "breaker open"
    elif until <= now:
        how = "breaker open, the next command is tried"
    else:
        how = f"breaker open until {until.astimezone(UTC):%H:%M:%S} UTC"
    return f"{how}: {reason}" if reason else how


# --- the parts --------------------------------------------------------------------------------------------------


def lock(domain: str, command_type: str, locking: str = "") -> Steps[Row | None]:
    """Lock a breaker, if there is one."""
    rows = yield Statement(sql.text("breaker_lock", locking=locking), {"domain": domain, "type": command_type})
    return Row(domain, command_type, *rows[0]) if rows else None


def make(domain: str, command_type: str, rule: Breaker) -> Steps[Row]:
    """Lock a breaker, and make it if need be."""
    rows = yield Statement(
        sql.text("breaker_make"),
        {
            "domain": domain,
            "type": command_type,
            "window": rule.window_seconds,
            "reset": rule.reset_seconds,
            "refuses": rule.refuses,
        },
    )
    return Row(domain, command_type, *rows[0])


def move(
    row: Row,
    reason: str | None = None,
    *,
    what: Deed | None = None,
    action: str | None = None,
    of_probe: int | None = None,
) -> Steps[Moved]:
    """Write the new state, and that it has moved. One that closes lets everything go that it had parked."""
    why = reason or row.reason or ""
    yield _save(row)
    released = (yield from _release(row)) if row.state == "CLOSED" else 0
    until = row.until.isoformat() if row.until is not None and row.state == "OPEN" else None
    details = {"stuck": len(row.stuck_at), "failures": len(row.failed_at), "released": released, "probe": of_probe}
    yield note_action(
        f"breaker {row.domain}/{row.command_type}",
        action or _ACTIONS[row.state],
        what or Deed("CANCEL", OURSELVES, why),
        details={name: value for name, value in {**details, "until": until}.items() if value},
    )
    return Moved(row.domain, row.command_type, row.state, why, released)


def _release(row: Row) -> Steps[int]:
    # A statement of its own: its snapshot sees what was parked by those that our lock waited for.
    params = {"domain": row.domain, "type": row.command_type, "reason": "breaker"}
    try:
        rows = yield Statement(sql.text("unpark", domain=row.domain), params)
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(row.domain, error) from None
    released: int = rows[0][0]
    return released


def _save(row: Row) -> Statement:
    return Statement(
        sql.text("breaker_save"),
        {
            "domain": row.domain,
            "type": row.command_type,
            "state": row.state,
            "stuck_at": row.stuck_at,
            "failed_at": row.failed_at,
            "is_forced": row.is_forced,
            "opened_at": row.opened_at,
            "until": row.until,
            "reason": row.reason,
            "probe": row.probe,
            "probe_until": row.probe_until,
        },
    )


def _last(moments: list[datetime], most: int) -> list[datetime]:
    return moments[-most:] if most else []


def _short(text: str) -> str:
    """The first line of an error, bounded."""
    line = next(iter(text.strip().splitlines()), "")
    return payload.clean_text(line if len(line) <= _TEXT_KEPT else line[: _TEXT_KEPT - 1] + "…")
