"""Small writes under the fence of a running attempt: checkpoints, the intents of effects, and how effects ended.

Each operation writes for many attempts of one domain in one statement. Its answers are in the order of what was
asked. A write whose queue row another transaction has locked is BUSY: the caller tries again. A write whose
attempt does not hold its command any more is LOST.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from commandbus import sql
from commandbus.flow.commands.claimed_row import Fence
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import payload
from commandbus.model.effect import EffectState, FoundEffect


class Fenced(StrEnum):
    """Does the attempt still hold its command?"""

    HELD = "held"
    BUSY = "busy"
    LOST = "lost"


class Checkpoint(NamedTuple):
    """Store this JSON text for the next attempt."""

    value: str


class Begin(NamedTuple):
    """Write an intent. `process` is the operating-system process that will make the call. `instead_of`: the
    attempt whose intent is taken over, because its call was not made."""

    name: str
    key: str
    process: str | None
    instead_of: int | None = None


class End(NamedTuple):
    """Write how an effect ended. `attempt` is the number of the attempt whose intent it is. `receipt` is JSON
    text. `is_own`: the attempt says it about its own call, so it is written even if its command is lost."""

    name: str
    attempt: int
    state: EffectState
    receipt: str | None = None
    note: str | None = None
    is_own: bool = True


Write: TypeAlias = Checkpoint | Begin | End


class Written(NamedTuple):
    """The answer to a write. `is_done`: it is written. `found` is the effect's row as it was before a Begin."""

    fenced: Fenced
    is_done: bool
    found: FoundEffect | None = None


class FencedWrite(NamedTuple):
    """A write, and the fence of the attempt that asks for it."""

    fence: Fence
    write: Write


def write_all(domain: str, worker: str, writes: Sequence[FencedWrite]) -> Any:
    """The operation that writes these. All are of one domain and of one kind; of one command or effect there is
    one at most."""
    match writes[0].write:
        case Checkpoint():
            return _checkpoint(domain, worker, writes)
        case Begin():
            return _begin(domain, worker, writes)
        case _:
            return _end(domain, worker, writes)


@operation(atomic=False)
def _checkpoint(domain: str, worker: str, writes: Sequence[FencedWrite]) -> Steps[list[Written]]:
    rows = yield _statement("effects/checkpoint", domain, worker, writes, _of_checkpoint)
    return [Written(Fenced(answer), answer == Fenced.HELD) for _, answer in _sorted(rows)]


@operation(atomic=False)
def _begin(domain: str, worker: str, writes: Sequence[FencedWrite]) -> Steps[list[Written]]:
    rows = yield _statement("effects/begin", domain, worker, writes, _of_begin)
    return [_begun(answer, found) for _, answer, *found in _sorted(rows)]


@operation(atomic=False)
def _end(domain: str, worker: str, writes: Sequence[FencedWrite]) -> Steps[list[Written]]:
    rows = yield _statement("effects/end", domain, worker, writes, _of_end)
    return [
        # It may have been written by an earlier try, whose answer was lost with the connection.
        Written(Fenced(answer), is_written or (state, attempt) == (asked.write.state, asked.write.attempt))  # type: ignore[union-attr]
        for asked, (_, answer, is_written, state, attempt) in zip(writes, _sorted(rows), strict=True)
    ]


def _begun(answer: str, found: Sequence[Any]) -> Written:
    state, *more = found
    row = None if state is None else FoundEffect(EffectState(state), *more)
    if answer in (Fenced.BUSY, Fenced.LOST):
        return Written(Fenced(answer), False)
    return Written(Fenced.HELD, answer == "begun", row)


def _statement(name: str, domain: str, worker: str, writes: Sequence[FencedWrite], of: Any) -> Statement:
    rows = ",".join(
        _row({"i": i, "m": fence.msg_id, "r": fence.read_ct, "c": fence.id, "n": fence.number}, *of(write))
        for i, (fence, write) in enumerate(writes)
    )
    text = sql.text(name, fence=sql.part("effects/fence"), domain=domain)
    return Statement(text, {"worker": worker, "rows": f"[{rows}]"})


def _of_checkpoint(write: Checkpoint) -> tuple[dict[str, Any], dict[str, str | None]]:
    return {}, {"v": write.value}


def _of_begin(write: Begin) -> tuple[dict[str, Any], dict[str, str | None]]:
    return {"name": write.name, "key": write.key, "process": write.process, "a": write.instead_of}, {}


def _of_end(write: End) -> tuple[dict[str, Any], dict[str, str | None]]:
    told = {
        "name": write.name,
        "a": write.attempt,
        "state": write.state,
        "note": write.note,
        "l": write.is_own,
    }
    return told, {"receipt": write.receipt}


def _row(fence: Mapping[str, Any], plain: Mapping[str, Any], texts: Mapping[str, str | None]) -> str:
    """One row as JSON. `texts` are JSON already, and were checked when they came in."""
    known = payload.dump({**fence, **plain}, what="write", max_bytes=payload.COMPOSED)
    return known[:-1] + "".join(f',"{name}":{text or "null"}' for name, text in texts.items()) + "}"


def _sorted(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row[0])
