"""Take, renew and release permits of a limit, report how a call ended, and wake the next in line.

Only the limit's row is locked, usually for one statement. `wake` is a transaction under that lock: it reserves a
permit for the first in line, then makes its queue row visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby, takewhile
from typing import NamedTuple

from commandbus import sql
from commandbus.errors import UnknownLimitError
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.limits.declare import (
    CLOSED,
    ITSELF,
    WAKE,
    LimitRow,
    note_action,
    read_rows,
    select_limits,
    tell,
)
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.limit import until_next
from commandbus.model.limit_state import (
    MOST_BLAMED,
    ApiAnswer,
    LimitState,
    after_bad,
    after_good,
    after_unknown,
    caller_of,
    token_of,
)
from commandbus.quick_dataclass import dataclass

CALL_SECONDS = 3.0
"""How long a permit is reserved for a caller that waits inside a program."""
BESIDE_CALLS_SECONDS = 0.5
"""How long a permit is reserved for a command while callers wait inside programs. These callers may occupy all
slots. Then no worker can claim the command, and command and callers would wait for each other."""
UNCLAIMED_SECONDS = 0.25
"""If no worker has claimed a command for so long after its turn came, there is no slot for it now."""

Grant = Callable[[LimitRow, list[str], float], list[str]]
"""Takes permits for some seconds from a permit store other than the row. Returns the tokens that have one now."""
Release = Callable[[LimitRow, list[str]], None]
"""Releases the permits of these tokens in that store."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What is known about a command that was claimed before."""

    limit: str | None
    token: str | None
    waited_seconds: float | None
    tries: int


@dataclass(frozen=True, slots=True)
class Answered:
    """What an API's response did to a limit: its row before, its state now, and whether that call was the probe.

    `is_waived`: the command is not charged. It failed as the probe while others waited, and no call had succeeded
    since the breaker opened.
    """

    row: LimitRow
    limit_state: LimitState
    was_probe: bool
    is_waived: bool


@dataclass(frozen=True, slots=True)
class Woken:
    """How many were woken, and in how many seconds to look again (None: when somebody releases a permit)."""

    count: int
    again_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Swept:
    """The limits that somebody waits for, and the domains with commands that have waited too long."""

    limits: list[str]
    domains: list[str]


@operation(atomic=False)
def take(
    name: str, tokens: Sequence[str], *, seconds: float | None = None, newcomers: bool = True, probes: bool = True
) -> Steps[list[str]]:
    """Take free permits for a lease (or for so many seconds). Returns the tokens that have one. `probes`: the
    first of them may be the probe."""
    if len(tokens) == 1 and newcomers and seconds is None:
        rows = yield Statement(sql.text("limits/take_one"), {"name": name, "token": tokens[0]})
        if rows:
            return list(tokens)
    return (yield from _take(name, tokens, seconds=seconds, newcomers=newcomers, probes=probes))


@operation(atomic=True)
def wait_for_row(name: str) -> Steps[None]:
    """Wait at most a tenth of a second until no other transaction holds the limit's row; then raise
    LockNotAvailable."""
    yield Statement(b"SET LOCAL lock_timeout = '100ms'")
    yield Statement(b"SELECT FROM commandbus.limits WHERE name = %(name)s FOR NO KEY UPDATE", {"name": name})


@operation(atomic=False)
def take_probe(name: str, token: str, *, seconds: float | None = None) -> Steps[bool]:
    """Become the probe of a limit whose permits are kept elsewhere. Returns False if there is another probe."""
    rows = yield Statement(
        b"UPDATE commandbus.limits SET probe = %(token)s, "
        b"probe_until = pg_catalog.clock_timestamp() "
        b"+ pg_catalog.make_interval(secs => COALESCE(%(seconds)s, lease)) "
        b"WHERE name = %(name)s AND (probe IS NULL OR probe_until <= pg_catalog.clock_timestamp()) RETURNING name",
        {"name": name, "token": token, "seconds": seconds},
    )
    return bool(rows)


@operation(atomic=False)
def renew(name: str, tokens: Sequence[str], *, seconds: float | None = None) -> Steps[list[str]]:
    """Renew leases. Returns the tokens that hold no permit any more."""
    rows = yield Statement(sql.text("limits/renew"), {"name": name, "tokens": list(tokens), "seconds": seconds})
    return [token for (token,) in rows]


@operation(atomic=False)
def release(name: str, tokens: Sequence[str], *, good: bool = False) -> Steps[tuple[bool, str | None]]:
    """Release permits (`good`: the calls succeeded). Returns whether somebody waits, and which token is the
    probe."""
    rows = yield Statement(
        sql.text("limits/release", claimable=sql.part("limits/claimable")),
        {"name": name, "tokens": list(tokens), "good": good},
    )
    is_awaited, probe = rows[0]
    return is_awaited, probe


@operation(atomic=True)
def answer(
    name: str,
    token: str | None,
    how: ApiAnswer,
    *,
    gives: bool,
    reason: str = "",
    retry_after: float | None = None,
    spread: float = 0.5,
    caller: str | None = None,
    others: Iterable[str] = (),
    has_begun: bool = True,
) -> Steps[Answered]:
    """Tell a limit how a call ended. `gives`: also release its permit. `caller`: who called, if no permit was
    held. `others`: tokens of holders in another permit store."""
    rows = read_rows((yield select_limits(name, locking=True)))
    if not rows:
        raise UnknownLimitError(name)
    (row,) = rows
    before = row.limit_state
    if how.is_bad:
        callers = yield from _callers(row, others)
        after = after_bad(
            before,
            row.limit,
            how,
            token=token,
            reason=reason,
            retry_after=retry_after,
            now=row.now,
            spread=spread,
            caller=caller,
            callers=callers,
        )
    elif how is ApiAnswer.GOOD:
        after = after_good(before, token=token)
    else:
        after = after_unknown(before, token=token, has_begun=has_begun)
    yield _move(name, after, how, gone=[token] if gives and token is not None else [])
    blocked = after.blocked_until(row.now)
    if (
        how.is_bad
        and not after.breaker_forced
        and blocked is not None
        and blocked != before.blocked_until(row.now)
    ):
        yield _note_backoff(name, before, after, how, blocked - row.now)
    if after.breaker_open != before.breaker_open or (after.breaker_open and after.open_until != before.open_until):
        action = "OPEN" if after.breaker_open else "CLOSE"
        why = after.open_reason if after.breaker_open else "its probe went well"
        yield note_action(f"breaker {name}", action, OperatorAction(ITSELF, why))
    if after.is_probing and after.blocked_until(row.now) != before.blocked_until(row.now):
        yield tell(CLOSED + name)
    was_probe = token is not None and before.probe == token
    return Answered(row, after, was_probe, is_waived=was_probe and _fails_for_all(row, how))


def _note_backoff(name: str, before: LimitState, after: LimitState, how: ApiAnswer, seconds: float) -> Statement:
    opened = after.breaker_open and (not before.breaker_open or after.open_until != before.open_until)
    return Statement(
        sql.text("limits/note_backoff"),
        {
            "name": name,
            "answer": how.value,
            "step": after.step,
            "seconds": seconds,
            "breaker_open": opened,
            "reason": after.open_reason if opened else after.reason,
        },
    )


def _fails_for_all(row: LimitRow, how: ApiAnswer) -> bool:
    """Does this result of a probe say more about the API than about its command? 429s are counted separately."""
    opened = row.limit_state.opened_at
    has_worked = opened is not None and row.good_at is not None and row.good_at > opened
    return how in (ApiAnswer.BROKEN, ApiAnswer.TIMEOUT) and row.is_awaited and not has_worked


def _callers(row: LimitRow, others: Iterable[str]) -> Steps[set[str]]:
    """A command or program that calls an API, or waits to call it, as far as the breaker needs to know it."""
    most = min(row.limit.breaker_failures, MOST_BLAMED)
    callers = {caller_of(token) for token in (*row.usage.holders, *others)}
    if len(callers) < most and row.is_awaited:
        found = yield Statement(
            sql.text("limits/calling", claimable=sql.part("limits/claimable")), {"name": row.name, "most": most}
        )
        callers |= {str(command) for (command,) in found}
    return callers


class InLine(NamedTuple):
    """A command or caller that waits for a limit: a row of limits/next.sql. `domain` is empty for a caller inside
    a program.

    The last two are the same in every row: does a caller wait inside a program, and for how many seconds has a
    command whose turn came not been claimed?
    """

    seq: int
    domain: str
    msg_id: int
    token: str | None
    since: datetime
    name: str | None
    command: int | None
    has_calls: bool
    unclaimed_seconds: float | None


Chosen = tuple[InLine, str | None]  # with the token of the permit that is reserved for it


@operation(atomic=True)
def wake(
    name: str,
    *,
    most: int,
    seconds: float,
    grant: Grant | None,
    mark: str,
    release: Release | None = None,
    is_barred: bool = False,
) -> Steps[Woken]:
    """Reserve permits for the first in line, for so many seconds, and wake them.

    `is_barred`: this role may not touch queues. It wakes callers only. If a command is next, it notifies programs
    that may wake it.
    """
    rows = read_rows((yield select_limits(name, locking=True)))
    if not rows:
        return (yield from _dismiss(name, most, is_barred=is_barred))
    (row,) = rows
    limit_state = row.limit_state
    if (closed := limit_state.blocked_until(row.now)) is not None:
        return Woken(0, None if limit_state.breaker_forced else closed - row.now)
    if limit_state.is_probing:
        if limit_state.is_probed(row.now):
            return Woken(0, (limit_state.probe_until or row.now) - row.now)
        if limit_state.probe is not None:  # nobody reported the end of the probe: its worker may have died
            limit_state = limit_state.without_probe()
            yield _note_vain(name, limit_state)
        most = 1
    waiting = yield from _first_in_line(name, most, limit_state.vain if limit_state.is_probing else {})
    if is_barred and any(item.domain for item in waiting):
        yield tell(WAKE + name)
        waiting = list(takewhile(lambda item: not item.domain, waiting))
    if not waiting:
        return Woken(0)
    has_calls, unclaimed_seconds = waiting[0].has_calls, waiting[0].unclaimed_seconds
    if has_calls and unclaimed_seconds is not None and unclaimed_seconds >= UNCLAIMED_SECONDS:
        # Callers come first, because they occupy slots: when they end, commands can be claimed. A permit may have
        # been reserved for a command for longer, before the callers came.
        yield from _end_unclaimed(row, release)
        waiting = yield from _first_in_line(
            name, most, limit_state.vain if limit_state.is_probing else {}, calls=True
        )
    ready, has_orphans = yield from _lock(waiting)
    chosen = yield from _reserve(row, ready, seconds, grant, mark)
    if chosen:
        yield from _let_go(name, chosen)
    if has_orphans:
        return Woken(len(chosen), 0.0)
    if has_calls and (unclaimed_seconds is not None or any(item.domain for item, _ in chosen)):
        return Woken(len(chosen), BESIDE_CALLS_SECONDS)  # nothing notifies us if nobody uses a reservation
    is_more = len(chosen) < len(ready) or len(waiting) == most
    return Woken(len(chosen), _next_look(row, len(chosen)) if is_more else None)


def _reserve(
    row: LimitRow, ready: Sequence[InLine], seconds: float, grant: Grant | None, mark: str
) -> Steps[list[Chosen]]:
    """Take a permit for each of these, in their order, while there are permits. Returns those that have one
    now."""
    chosen: list[Chosen] = []
    for is_call, group in groupby(ready, key=lambda item: not item.domain):
        # A caller inside a program reacts at once. If it has died, its permit must not be reserved for long.
        beside = BESIDE_CALLS_SECONDS if ready[0].has_calls else seconds
        kept = CALL_SECONDS if is_call else min(seconds, beside)
        items = {
            item.token or token_of(f"{mark}{item.seq}/{item.name}"[:170], item.command): item for item in group
        }
        if grant is None:
            granted = yield from _take(row.name, list(items), seconds=kept, newcomers=False)
        else:
            granted = grant(row, list(items), kept)
            if granted and row.limit_state.is_probing:
                yield from take_probe(row.name, granted[0], seconds=kept).steps
        chosen += [(items[token], token) for token in granted]
        if len(granted) < len(items):
            break
    return chosen


def _end_unclaimed(row: LimitRow, release: Release | None) -> Steps[None]:
    """Release the permits that are reserved for commands that no worker has claimed. A worker that claims one of
    them later finds no permit for it, and the command waits again, in its former position."""
    found = yield Statement(
        b"SELECT token FROM (SELECT limit_name, domain, token FROM commandbus.parked WHERE woken_at <= "
        b"pg_catalog.now() - pg_catalog.make_interval(secs => %(seconds)s) OFFSET 0) woken "
        b"WHERE limit_name = %(name)s AND domain <> '' AND token IS NOT NULL",
        {"name": row.name, "seconds": UNCLAIMED_SECONDS},
    )
    tokens = [token for (token,) in found]
    if tokens and release is not None:
        release(row, tokens)
    elif tokens:
        yield Statement(
            b"UPDATE commandbus.limits SET holders = holders - %(tokens)s::text[] "
            b"WHERE name = %(name)s AND holders ?| %(tokens)s::text[]",
            {"name": row.name, "tokens": tokens},
        )


def _first_in_line(name: str, most: int, vain: Mapping[str, int], *, calls: bool = False) -> Steps[list[InLine]]:
    """The first in line. `vain`: a probe is wanted, and those whose probes failed come after the others. `calls`:
    only callers inside programs."""
    line = "p.since, p.command, p.seq"
    values = {
        "name": name,
        "most": most,
        "vain": payload.dump(dict(vain), what="vain"),
    }
    known = "(%(vain)s::jsonb ? p.command::text)"

    def ask(chosen: str, order: str) -> Statement:
        chosen = f"{chosen} AND p.domain = ''" if calls else chosen
        parts = {"claimable": sql.part("limits/claimable"), "chosen": chosen, "order": order}
        return Statement(sql.text("limits/next", **parts), values)

    waiting = yield ask(f"NOT {known}", line)
    if not waiting and vain:
        waiting = yield ask(known, f"(%(vain)s::jsonb ->> p.command::text)::integer, {line}")
    return [InLine(*row) for row in waiting]


def _lock(waiting: Sequence[InLine]) -> Steps[tuple[list[InLine], bool]]:
    """Lock the queue rows of waiting commands. Returns those that can be woken, and whether any message is
    gone."""
    free: set[tuple[str, int]] = set()
    has_orphans = False
    for domain in sorted({item.domain for item in waiting} - {""}):
        msg_ids = [item.msg_id for item in waiting if item.domain == domain]
        locked = yield Statement(sql.text("limits/lock_waiting", domain=domain), {"msg_ids": msg_ids})
        free |= {(domain, msg_id) for (msg_id,) in locked}
        if len(locked) < len(msg_ids):
            gone = yield Statement(
                sql.text("limits/orphans", domain=domain), {"domain": domain, "msg_ids": msg_ids}
            )
            has_orphans = has_orphans or bool(gone)
    return [item for item in waiting if not item.domain or (item.domain, item.msg_id) in free], has_orphans


def _dismiss(name: str, most: int, *, is_barred: bool) -> Steps[Woken]:
    """Wake all commands that wait for a limit that is gone. The limit refused them just before it was deleted, and
    they were parked just after. They then learn that there is no such limit."""
    waiting = yield from _first_in_line(name, most, {})
    if is_barred:
        waiting = [item for item in waiting if not item.domain]
    ready, has_orphans = yield from _lock(waiting)
    if ready:
        yield from _let_go(name, [(item, item.token) for item in ready])
    return Woken(len(ready), 0.0 if has_orphans or len(waiting) == most else None)


def _note_vain(name: str, limit_state: LimitState) -> Statement:
    return Statement(
        b"UPDATE commandbus.limits SET probe = NULL, probe_until = NULL, vain = %(vain)s::jsonb "
        b"WHERE name = %(name)s",
        {"name": name, "vain": payload.dump(dict(limit_state.vain), what="vain")},
    )


def _let_go(name: str, chosen: Sequence[Chosen]) -> Steps[None]:
    yield Statement(
        sql.text("limits/woken"),
        {"name": name, "seqs": [item.seq for item, _ in chosen], "tokens": [token for _, token in chosen]},
    )
    for domain in sorted({item.domain for item, _ in chosen} - {""}):
        own = [item for item, _ in chosen if item.domain == domain]
        msg_ids, since = [item.msg_id for item in own], [item.since for item in own]
        yield Statement(
            sql.text("limits/wake", domain=domain), {"domain": domain, "msg_ids": msg_ids, "since": since}
        )


def _next_look(row: LimitRow, granted: int) -> float | None:
    """In how many seconds the rate allows the next call; None if only permits are missing: a release wakes the
    next."""
    if row.per_second is None:
        return None
    tat = max(row.tat, row.now) + granted / row.per_second if row.store == "postgres" else row.now
    return max(until_next(row.now, tat, row.per_second, row.burst), min(1 / row.per_second, 1.0) / 2, 0.002)


@operation(atomic=False)
def turns(domain: str, visitors: Sequence[tuple[int, int, int]]) -> Steps[dict[int, Turn]]:
    """What is known about commands (msg_id, id, attempt_base) that were claimed before. They leave the line."""
    rows = [{"m": msg_id, "c": id_, "b": base} for msg_id, id_, base in visitors]
    found = yield Statement(
        sql.text("limits/turns"), {"domain": domain, "rows": payload.dump(rows, what="rows", max_bytes=1 << 30)}
    )
    return {msg_id: Turn(*turn) for msg_id, *turn in found}


@operation(atomic=False)
def line_up(
    name: str,
    token: str,
    *,
    number: int,
    seconds: float,
    who: str,
    since: datetime | None = None,
    command: int | None = None,
) -> Steps[None]:
    """Put a caller inside a program in line: its `token` is notified when its turn comes. `since`: the moment that
    decides its position; None is now. `command`: the command whose handler waits."""
    yield Statement(
        b"INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since, "
        b"give_up_at, token, note) VALUES ('', %(who)s, %(number)s, %(command)s, 'call', %(name)s, "
        b"COALESCE(%(since)s, pg_catalog.clock_timestamp()), "
        b"pg_catalog.clock_timestamp() + pg_catalog.make_interval(secs => %(seconds)s), %(token)s, "
        b"'waits inside a program')",
        {
            "name": name,
            "token": token,
            "number": -number,
            "seconds": seconds,
            "who": who[:200],
            "since": since,
            "command": command or 0,
        },
    )


@operation(atomic=False)
def step_out(number: int) -> Steps[bool]:
    """Leave the line. Returns whether the caller had been woken meanwhile."""
    rows = yield Statement(
        b"DELETE FROM commandbus.parked WHERE domain = '' AND msg_id = %(number)s RETURNING woken_at IS NOT NULL",
        {"number": -number},
    )
    return bool(rows and rows[0][0])


@operation(atomic=False)
def stand_again(number: int) -> Steps[bool]:
    """Return a caller that was woken but got no permit to its former position. Returns False if it was not
    woken."""
    rows = yield Statement(
        b"UPDATE commandbus.parked SET woken_at = NULL WHERE domain = '' AND msg_id = %(number)s "
        b"AND woken_at IS NOT NULL RETURNING seq",
        {"number": -number},
    )
    return bool(rows)


@operation(atomic=False)
def sweep() -> Steps[Swept]:
    """Find what is due, and delete what is no longer needed."""
    rows = yield Statement(sql.text("limits/sweep", claimable=sql.part("limits/claimable")))
    return Swept([name for name, _ in rows if name], [domain for _, domain in rows if domain])


@operation(atomic=False)
def wake_overdue(domain: str) -> Steps[int]:
    """Wake commands that have waited as long as they may."""
    text = sql.text("limits/overdue", domain=domain, claimable=sql.part("limits/claimable"))
    rows = yield Statement(text, {"domain": domain})
    count: int = rows[0][0]
    return count


def _take(
    name: str, tokens: Sequence[str], *, seconds: float | None, newcomers: bool, probes: bool = True
) -> Steps[list[str]]:
    rows = yield Statement(
        sql.text("limits/take", claimable=sql.part("limits/claimable")),
        {"name": name, "tokens": list(tokens), "seconds": seconds, "newcomers": newcomers, "probes": probes},
    )
    return rows[0][0] if rows else []


def _move(name: str, after: LimitState, how: ApiAnswer, *, gone: Sequence[str]) -> Statement:
    times: Mapping[str, float | None] = {
        "until": after.until,
        "opened_at": after.opened_at,
        "open_until": after.open_until,
        "probe_until": after.probe_until,
    }
    return Statement(
        sql.text("limits/move"),
        {
            "name": name,
            "gone": list(gone),
            "counts": int(how is ApiAnswer.RATE_LIMITED),
            "good": how is ApiAnswer.GOOD,
            "blamed": list(after.blamed),
            "vain": payload.dump(dict(after.vain), what="vain"),
            "step": after.step,
            "reason": after.reason,
            "failures": after.failures,
            "breaker_open": after.breaker_open,
            "open_reason": after.open_reason,
            "probe": after.probe,
            **times,
        },
    )
