"""Claim visible messages, and put right what is unusual about some of them before anything runs.

The claim itself is one statement and one row write per message. Unusual rows are rare. Each kind has an operation:

- A worker still held the row when its lease ran out: that worker vanished. Its attempt is recorded as LOST, and
  model/suspects.py decides what that costs the command. If somebody had asked to cancel the command, it does not
  run again: it is CANCELED.
- The command was lost before, or is in quarantine: it runs if there is room to run it apart from the others. If
  not, it is given back for later, and holds no slot meanwhile.
- No command belongs to the message: a raw message of another client is adopted, or rejected with a reason.
- The command type is paused, or its breaker is not closed: the command is parked. The breaker's probe runs.
- This worker has no handler for the type: the command is parked for a worker that has one
  (flow/commands/unhandled_types.py).
- It has a key, and has not been released from the line of its key: it joins that line (flow/keys/join.py).

Until such an operation has run, the row is only leased to this worker: a crash in between changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.breakers.breaker import OpenBreaker, hold
from commandbus.flow.commands.claimed_row import BEFORE, ID, IS_PAUSED, MSG_ID, QUARANTINE, SUSPECT, ClaimedRow
from commandbus.flow.commands.renew import Held, pending_cancels
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.commands.settle import Settlement, cancellation, given_back, of_row, settle
from commandbus.flow.keys.join import join
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import envelope, names, payload, priority
from commandbus.model.command import NewCommand
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.model.priority import HIGH, LOW, NORMAL
from commandbus.model.suspects import LONGEST_DELAY, Marks, delay_apart
from commandbus.quick_dataclass import dataclass

FAR_SECONDS = 1e9
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BITE_BYTES = 8 << 20
"""How much text of raw messages is read at once."""
SPACED = 2
"""PostgreSQL's text of a JSON document has a blank after each comma and colon."""
OTHER_FIELDS_BYTES = 1 << 16
PREVIEW_CHARACTERS = 2000
UNHANDLED = "handler "
"""The beginning of a notification that commands of a type wait for a handler."""
EVERY = "true"
"""A condition on the messages that are claimed: all of them …"""
OURS = "(pg_catalog.pg_column_size(message) <= 80 AND message OPERATOR(pg_catalog.?) 'command')"
"""… those that look like commands of ours (the size is known without reading a large message) …"""
RAW = f"{OURS} IS NOT TRUE"
"""… or the others."""
MILLENNIUM = timedelta(hours=8_766_000)
"""How far apart the bands of vt are (ADR 27)."""
_SHIFTS = {HIGH: " - {millennium}", NORMAL: "", LOW: " + {millennium}"}
EARLY, LATE = datetime(1500, 1, 1, tzinfo=UTC), datetime(2500, 1, 1, tzinfo=UTC)
"""Where the normal band begins and ends."""
_BY_MSG_ID = itemgetter(MSG_ID)
_FIRST: dict[int, datetime | str] = {HIGH: "-infinity", NORMAL: EARLY, LOW: LATE}


class Text(NamedTuple):
    """A raw message as text. `text` is None if it is too long (`size` bytes), or if the message has a flaw."""

    flaw: str | None
    size: int | None
    text: str | None


UNREAD = Text(None, None, None)


@dataclass(frozen=True, slots=True)
class Room:
    """How many commands that run alone may wait here, and how many in quarantine may start now; None is any
    number.

    Suspects that run beside others count as in quarantine, because they run in child processes, too. With
    `only_suspects`, nothing but suspects counts. Commands of the types in `isolated` always run in child
    processes, and do not count. `spread`, from 0 to 1, spreads the delays of commands for which there is no room.
    Commands that must run alone return after about `soonest` seconds, when there may be room.
    """

    alone: int | None = None
    quarantined: int | None = None
    isolated: frozenset[str] = frozenset()
    only_suspects: bool = False
    spread: float = 0.5
    soonest: float = LONGEST_DELAY

    def is_quarantined(self, row: ClaimedRow) -> bool:
        """Does the command need one of the child processes for commands in quarantine?"""
        is_apart = row.suspect is not None or (bool(row.quarantine) and not self.only_suspects)
        return is_apart and not row.alone and row.command_type not in self.isolated

    def without(self, admitted: Sequence[ClaimedRow]) -> Room:
        """The room that is left after these commands were let in."""
        alone = sum(bool(row.alone) for row in admitted)
        quarantined = sum(self.is_quarantined(row) for row in admitted)
        return replace(
            self,
            alone=None if self.alone is None else max(0, self.alone - alone),
            quarantined=None if self.quarantined is None else max(0, self.quarantined - quarantined),
        )


ANY_ROOM = Room()
RunningIn = Callable[[str], Collection[tuple[str, int]] | None]


def nobody_knows(worker: str) -> None:
    """A `RunningIn` that knows nothing: there is no evidence of what ran in a vanished worker."""


class NextDue(NamedTuple):
    """In how many seconds a claim may find something; None if not within the time asked for. `others`: is
    something due by then in the bands of other priorities (1 is high, 2 is low)?"""

    seconds: float | None
    others: int


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of one claim: rows to run, as plain tuples (the hot path), and the unusual ones. `others`: is
    something due in the bands of other priorities (1 is high, 2 is low)?"""

    ready: list[tuple[Any, ...]]
    odd: list[ClaimedRow]
    full: bool
    last_vt: datetime | None
    claimed_at: datetime | None
    others: int = 0


@operation(atomic=False)
def claim(
    *,
    domain: str,
    worker: str,
    n: int,
    lease_seconds: float,
    cursor: datetime | None,
    kind: str = EVERY,
    band: int = NORMAL,
    high_cursor: datetime | None = None,
    low_cursor: datetime | None = None,
) -> Steps[Claim]:
    """Claim up to n messages of one priority that became due at or after the cursor (None: from the beginning).

    A claim of the normal band also looks, from their cursors, whether anything is due in the other two.
    """
    params = {
        "domain": domain,
        "worker": worker,
        "n": n,
        "lease": lease_seconds,
        "cursor": _place(band, cursor),
    }
    if band == NORMAL:
        params |= {"high": _place(HIGH, high_cursor), "low": _place(LOW, low_cursor)}
    try:
        rows = yield Statement(
            sql.text(
                "commands/claim",
                others=sql.part("commands/others_due") if band == NORMAL else "NULL",
                shift=_SHIFTS[band],
                shift_back=_SHIFTS[-band],
                domain=domain,
                kind=kind,
            ),
            params,
            by_keys=True,
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    return as_claim(rows, n)


def as_claim(rows: list[tuple[Any, ...]], n: int) -> Claim:
    """The result of a statement that leased up to n messages, by msg_id, with the unusual rows separated."""
    if not rows:
        return Claim([], [], False, None, None)
    rows.sort(key=_BY_MSG_ID)
    ready = [
        row
        for row in rows
        if row[BEFORE] is None
        and row[ID] is not None
        and not row[IS_PAUSED]
        and not row[QUARANTINE]
        and row[SUSPECT] is None
    ]
    odd = []
    if len(ready) < len(rows):
        odd = [claimed for claimed in (ClaimedRow(*row) for row in rows) if claimed.is_odd]
    first = ClaimedRow(*rows[0])
    return Claim(ready, odd, len(rows) == n, _moment(first.last_vt), _moment(first.claimed_at), first.others or 0)


def _place(band: int, cursor: datetime | None) -> datetime | str:
    """Where a cursor is in its band."""
    return _FIRST[band] if cursor is None else cursor - band * MILLENNIUM


def _moment(microseconds: int) -> datetime:
    return EPOCH + timedelta(microseconds=microseconds)


@operation(atomic=True)
def put_right(
    *,
    domain: str,
    worker: str,
    odd: Sequence[ClaimedRow],
    max_bytes: int,
    room: Room = ANY_ROOM,
    running_in: RunningIn = nobody_knows,
    lost_types: list[str] | None = None,
) -> Steps[tuple[list[ClaimedRow], int]]:
    """Record lost attempts, adopt or reject raw messages, park what must wait, end what should be canceled, and
    give back commands for which there is no room now.

    `running_in` says what ran in a vanished worker (domain and msg_id); None if nobody knows. It is called after
    the claim: a command that did not run by then never will, because its lease is over. `lost_types` gets the
    command type of each attempt that is recorded as LOST here; it holds when this has committed.

    Returns what can run now, and how many messages were adopted. The next claim finds the adopted messages in the
    queue, as ordinary commands.
    """
    # While this waits for a lock, the worker claims nothing else. The setting ends with the transaction.
    yield Statement(b"SET LOCAL lock_timeout = '200ms'")
    ours = [row for row in odd if row.id is not None]
    adopted = yield from _take_in(domain, worker, [row for row in odd if row.id is None], max_bytes)
    canceled: dict[int, Failure] = {}
    if lost := [row for row in ours if row.before is not None]:
        holders = yield from _read_holders(domain, worker, lost)
        canceled |= _canceled_before(holders)
        idle = _not_running(domain, worker, holders, running_in)
        marks = {
            row.msg_id: _after_loss(row, holders[row.msg_id], worker, is_idle=row.msg_id in idle) for row in lost
        }
        told = yield Statement(
            sql.text("commands/record_lost", domain=domain),
            {
                "worker": worker,
                "rows": _lost_rows(lost, holders, marks, worker, idle),
                "marks": _mark_rows(lost, marks),
            },
        )
        ours = [_marked(row, marks.get(row.msg_id)) for row in ours]
        canceled |= {msg_id: cancellation(by, reason) for msg_id, by, reason, command in told if command is None}
        if lost_types is not None:
            types = {row.id: row.command_type for row in lost}
            lost_types += [types[command] for *_, command in told if command is not None]
    if paused := [row for row in ours if row.msg_id not in canceled and (row.is_paused or row.unhandled)]:
        broken = yield from hold(domain, [row.command_type for row in paused])
        asked = yield Statement(
            sql.text("commands/park", domain=domain),
            {"domain": domain, "worker": worker, "rows": _dump([_parking(row, broken) for row in paused])},
        )
        canceled |= {msg_id: cancellation(by, reason) for msg_id, by, reason in asked}
        yield from _tell(domain, {row.command_type for row in paused if row.unhandled})
    free = [row for row in ours if not row.is_paused and not row.unhandled and row.msg_id not in canceled]
    if joining := [row for row in free if row.line is not None]:
        canceled |= yield from join(domain, worker, joining)
        free = [row for row in free if row.line is None]
    yield from _cancel(domain, worker, [row for row in ours if row.msg_id in canceled], canceled)
    return (yield from _admit(domain, worker, free, room)), adopted


@operation(atomic=False)
def run_alone(domain: str, worker: str, held: Held) -> Steps[bool]:
    """Note that a suspect is about to start, and that no other suspect runs. Returns False if it must not start,
    because this worker may no longer hold it."""
    rows = yield Statement(
        sql.text("commands/run_alone", domain=domain),
        {"worker": worker, "msg_id": held.msg_id, "read_ct": held.read_ct, "command": held.id},
    )
    return bool(rows)


@operation(atomic=False)
def next_due(
    domain: str,
    *,
    within_seconds: float = FAR_SECONDS,
    high_cursor: datetime | None = None,
    low_cursor: datetime | None = None,
) -> Steps[NextDue]:
    """Seconds until the next delayed message becomes visible, and what the bands of other priorities have."""
    rows = yield Statement(
        sql.text("commands/next_due", domain=domain),
        {
            "domain": domain,
            "within": within_seconds,
            "high": _place(HIGH, high_cursor),
            "low": _place(LOW, low_cursor),
        },
        by_keys=True,
    )
    return NextDue(rows[0][0], rows[0][1] or 0)


@operation(atomic=False)
def announce(*, worker: str, domains: Sequence[str], seconds: float) -> Steps[None]:
    """Ask senders for notifications.

    The statement keeps the session's plans, because dropping them would make the next claim slower. That is safe,
    because the table of waiting workers stays small.
    """
    yield Statement(
        sql.text("commands/announce"),
        {"worker": worker, "domains": list(domains), "seconds": seconds},
        only_inserts=True,
    )


@operation(atomic=False)
def withdraw(worker: str) -> Steps[None]:
    """Tell senders to stop the notifications."""
    yield Statement(sql.text("commands/withdraw"), {"worker": worker}, by_keys=True)


@operation(atomic=True)
def set_aside(*, domain: str, worker: str, row: ClaimedRow, reason: str) -> Steps[None]:
    """Set aside a row with an unforeseen problem: a raw message is rejected unread, a command goes to the
    troubleshooting queue.
    """
    if row.id is None:
        yield from _reject(domain, worker, [row], {row.msg_id: (reason, None)})
        return
    failure = Failure("UnreadableRow", "UNREADABLE", reason)
    settlement = of_row(domain, row, Judgement(Verdict.PERMANENT, failure), started=None)
    yield from settle(domain, worker, [settlement], waiting=True).steps


def _take_in(domain: str, worker: str, raw: Sequence[ClaimedRow], max_bytes: int) -> Steps[int]:
    """Adopt what is readable, reject the rest. Returns how many were adopted."""
    adopted, left = 0, list(raw)
    while left:
        texts = yield from _read_some(domain, worker, left, max_bytes)
        done = [row for row in left if row.msg_id in texts] or left  # a row that is gone meanwhile needs nothing
        left = [row for row in left if row.msg_id not in texts] if texts else []
        adopted += yield from _take_in_some(domain, worker, done, texts, max_bytes)
    return adopted


def _read_some(domain: str, worker: str, raw: Sequence[ClaimedRow], max_bytes: int) -> Steps[dict[int, Text]]:
    """Read the text of the first of these messages."""
    asked = {
        "worker": worker,
        "msg_ids": [row.msg_id for row in raw],
        "most": SPACED * max_bytes + OTHER_FIELDS_BYTES,
        "bite": BITE_BYTES,
    }
    rows = yield Statement(sql.text("commands/read_raw", domain=domain), asked)
    return {msg_id: Text(*found) for msg_id, *found in rows}


def _take_in_some(
    domain: str,
    worker: str,
    raw: Sequence[ClaimedRow],
    texts: Mapping[int, Text],
    max_bytes: int,
) -> Steps[int]:
    readable: dict[int, NewCommand] = {}
    rows: list[str] = []
    reasons: dict[int, tuple[str, str | None]] = {}
    for row in raw:
        found = texts.get(row.msg_id, UNREAD)
        text = found.text
        try:
            if text is None:
                raise InvalidCommandError(_why_unread(found, max_bytes))
            # Dumped one by one: if one dump fails (too deep, too many digits), only that message is rejected.
            new = envelope.read(
                payload.loads(text), queue=names.queue_of(domain), msg_id=row.msg_id, max_bytes=max_bytes
            )
            rows.append(_dump(_adoption(row, new)))
            readable[row.msg_id] = new
        except (ValueError, RecursionError) as error:
            reasons[row.msg_id] = str(error), text
    adopted: set[int] = set()
    if readable:
        answer = yield Statement(
            sql.text("commands/adopt", domain=domain),
            {"domain": domain, "worker": worker, "rows": "[" + ",".join(rows) + "]"},
        )
        adopted = {msg_id for (msg_id,) in answer}
        for msg_id, new in readable.items():
            if msg_id not in adopted:
                reasons[msg_id] = f"command_id {new.command_id!r} was sent before", texts[msg_id].text
    yield from _reject(domain, worker, raw, reasons)
    return len(adopted)


def _why_unread(found: Text, max_bytes: int) -> str:
    if found.flaw == "deep":
        return f"the message is nested more than {envelope.MAX_NESTING} levels deep"
    if found.size is None:
        return "the message has a number of more than 400 digits"
    limit = f"max_payload_bytes ({max_bytes})"
    return f"the message has {found.size} bytes of text, more than one with {limit} can have"


def _reject(
    domain: str, worker: str, raw: Sequence[ClaimedRow], reasons: Mapping[int, tuple[str, str | None]]
) -> Steps[None]:
    rejected = []
    for row in raw:
        if row.msg_id in reasons:
            reason, text = reasons[row.msg_id]
            preview = None if text is None else payload.clean_text(text[:PREVIEW_CHARACTERS])
            rejected.append(
                {"m": row.msg_id, "r": row.read_ct, "e": payload.clean_text(reason, longest=2000), "p": preview}
            )
    if rejected:
        yield Statement(
            sql.text("commands/reject", domain=domain),
            {"domain": domain, "worker": worker, "rows": _dump(rejected)},
        )


def _adoption(row: ClaimedRow, new: NewCommand) -> dict[str, Any]:
    return {"m": row.msg_id, "k": row.read_ct, "i": new.command_id, "t": new.command_type, "x": new.max_attempts,
            "c": new.correlation_id, "r": new.reply_to, "h": new.headers, "d": new.data,
            "o": envelope.timeout_seconds(new.timeout), "e": envelope.expiry(new.expires),
            "f": new.on_exhausted, "p": priority.to_number(new.priority)}  # fmt: skip


def _read_holders(domain: str, worker: str, lost: Sequence[ClaimedRow]) -> Steps[dict[int, list[dict[str, Any]]]]:
    """The vanished holders of each row, last first; none for a row whose headers are not ours."""
    asked = {"worker": worker, "msg_ids": [row.msg_id for row in lost]}
    rows = yield Statement(sql.text("commands/read_holders", domain=domain), asked)
    found: dict[int, list[dict[str, Any]]] = {row.msg_id: [] for row in lost}
    return found | {msg_id: payload.loads(text) for msg_id, text in rows}


def _canceled_before(holders: Mapping[int, Sequence[dict[str, Any]]]) -> dict[int, Failure]:
    """The failure of each row that somebody asked to cancel while a vanished worker held it."""
    found: dict[int, Failure] = {}
    for msg_id, chain in holders.items():
        for holder in chain:
            if (request := holder["cancel"]) is not None:
                found.setdefault(msg_id, cancellation(str(request["by"]), request["reason"]))
    return found


def _cancel(domain: str, worker: str, rows: Sequence[ClaimedRow], why: Mapping[int, Failure]) -> Steps[None]:
    """Settle rows of ours as CANCELED, without having run them."""
    settlements = [of_row(domain, row, Judgement(Verdict.CANCELED, why[row.msg_id]), started=None) for row in rows]
    if settlements:
        yield from settle(domain, worker, settlements, waiting=True).steps


def _not_running(
    domain: str, worker: str, holders: Mapping[int, Sequence[dict[str, Any]]], running_in: RunningIn
) -> set[int]:
    """Messages that did not run in their first vanished holder, as far as that is known."""
    first = {msg_id: found[-1] for msg_id, chain in holders.items() if (found := _vanished(chain, worker))}
    known = {name: running_in(name) for name in {str(holder["held_by"]) for holder in first.values()}}
    return {
        msg_id
        for msg_id, holder in first.items()
        if (running := known[str(holder["held_by"])]) is not None and (domain, msg_id) not in running
    }


def _vanished(holders: Sequence[dict[str, Any]], worker: str) -> list[dict[str, Any]]:
    return [holder for holder in holders if holder["held_by"] != worker]


def _after_loss(row: ClaimedRow, holders: Sequence[dict[str, Any]], worker: str, *, is_idle: bool) -> Marks:
    """The marks of a command after its loss. Workers that claimed it after the first vanished holder vanished
    before they started it. If the first holder did not run it either (`is_idle`), the command does not become a
    suspect.

    A row of this worker itself was not lost by a crash: the database was unreachable for longer than a lease, or
    the machine was suspended.
    """
    marks = row.marks
    if is_idle:
        return marks.after_outage(len(holders))
    vanished = _vanished(holders, worker)
    marks = marks.after_outage(len(holders) - len(vanished))
    if not vanished:  # none, or another client wrote the headers
        return marks
    return marks.after_loss(ran_alone=vanished[-1]["alone"] is True, unstarted=len(vanished) - 1)


def _marked(row: ClaimedRow, marks: Marks | None) -> ClaimedRow:
    if marks is None:
        return row
    return row._replace(waived=marks.waived, suspect=marks.suspect, alone=marks.alone or None)


def _mark_rows(lost: Sequence[ClaimedRow], marks: Mapping[int, Marks]) -> str:
    rows: list[dict[str, Any]] = []
    for row in lost:
        found = marks[row.msg_id]
        rows.append({"m": row.msg_id, "r": row.read_ct, "c": row.id, "v": found.waived, "x": found.suspect,
                     "a": found.alone or None})  # fmt: skip
    return _dump(rows)


_NOT_RUNNING = "the worker vanished and its lease ran out. It did not run at that moment: not charged"
_OWN_LOSS = "its worker was alive, but could not renew the lease in time: not charged"


def _lost_text(row: ClaimedRow, holders: int, marks: Marks) -> str:
    text = "the worker vanished and its lease ran out"
    if marks.waived - row.waived < holders:
        return f"{text}, while it ran alone: charged"
    return f"{text}: not charged, and its next attempt runs in a child process" + (
        " (it had not started)" if row.alone else ""
    )


def _lost_rows(
    lost: Sequence[ClaimedRow],
    holders: Mapping[int, Sequence[dict[str, Any]]],
    marks: Mapping[int, Marks],
    worker: str,
    idle: Collection[int],
) -> str:
    """Record one lost attempt for each holder."""
    rows = []
    for row in lost:
        last = row.attempt_base + row.read_ct - 1
        text = _lost_text(row, len(holders[row.msg_id]), marks[row.msg_id])
        if row.msg_id in idle:
            text = _NOT_RUNNING
        for number, holder in zip(range(last, 0, -1), holders[row.msg_id], strict=False):
            rows.append(
                {
                    "m": row.msg_id,
                    "r": row.read_ct,
                    "c": row.id,
                    "n": number,
                    "w": holder["held_by"],
                    "s": holder["since"],
                    "e": _OWN_LOSS if holder["held_by"] == worker else text,
                }
            )
    return _dump(rows)


def _admit(domain: str, worker: str, rows: Sequence[ClaimedRow], room: Room) -> Steps[list[ClaimedRow]]:
    """Commands that may stay. The others run alone or in quarantine, and there is no room for them."""
    admitted, late = _choose(rows, room)
    if late:
        yield from _put_off(domain, worker, late, room)
    return admitted


def _choose(rows: Sequence[ClaimedRow], room: Room) -> tuple[list[ClaimedRow], list[ClaimedRow]]:
    """Commands that may start, and commands for which there is no room."""
    admitted: list[ClaimedRow] = []
    late: list[ClaimedRow] = []
    alone = quarantined = 0
    for row in rows:
        if row.alone:
            alone += 1
            is_late = room.alone is not None and alone > room.alone
        elif room.is_quarantined(row):
            quarantined += 1
            is_late = room.quarantined is not None and quarantined > room.quarantined
        else:
            is_late = False
        (late if is_late else admitted).append(row)
    return admitted, late


def _put_off(domain: str, worker: str, rows: Sequence[ClaimedRow], room: Room) -> Steps[None]:
    """Give back these commands for later, without a charge. Those that somebody asked to cancel are CANCELED."""
    answers = yield from settle(domain, worker, [_later(domain, row, room) for row in rows], waiting=True).steps
    asked = [row for row in rows if answers.get((row.msg_id, row.read_ct)) == "canceled"]
    if asked:
        found = yield from pending_cancels(domain, worker, asked).steps
        why = {cancel.msg_id: cancellation(cancel.by, cancel.reason) for cancel in found}
        yield from _cancel(domain, worker, [row for row in asked if row.msg_id in why], why)


def _later(domain: str, row: ClaimedRow, room: Room) -> Settlement:
    why, longest = "all child processes of this worker for commands in quarantine are in use", LONGEST_DELAY
    if row.alone:
        longest = room.soonest
        why = "its worker was lost with it before: such commands run one at a time"
    return given_back(
        row.fence(domain),
        delay=delay_apart(row.waived, spread=room.spread, longest=longest),
        why=why,
    )


def _tell(domain: str, types: set[str]) -> Steps[None]:
    """Notify workers that commands of these types wait for a handler. Workers that have one take them at once."""
    if types:
        yield Statement(
            b"SELECT pg_catalog.pg_notify('commandbus_' || %(domain)s, %(prefix)s || command_type) "
            b"FROM pg_catalog.unnest(%(types)s::text[]) AS command_type",
            {"domain": domain, "prefix": UNHANDLED, "types": sorted(types)},
        )


def _parking(row: ClaimedRow, broken: Mapping[str, OpenBreaker]) -> dict[str, Any]:
    parking = {
        "m": row.msg_id,
        "r": row.read_ct,
        "c": row.id,
        "n": row.attempt_base + row.read_ct,
        "t": row.command_type,
        "k": row.unhandled,
    }
    breaker = broken.get(row.command_type)
    if breaker is None or breaker.probe == row.id:
        return parking
    until = None if breaker.until is None else breaker.until.isoformat()
    return parking | {"b": breaker.sentence, "u": until}


def _dump(rows: list[dict[str, Any]] | dict[str, Any]) -> str:
    return payload.dump(rows, what="rows", max_bytes=1 << 30)
