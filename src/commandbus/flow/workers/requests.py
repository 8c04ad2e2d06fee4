"""Questions to workers, and their answers: where an attempt is now, and that a worker is to be replaced, to pause
or to go on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import CommandNotFoundError, InvalidOperationError
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.operation import Statement, Steps, no_schema, operation
from commandbus.model import names, payload
from commandbus.model.payload import loads_or_none
from commandbus.quick_dataclass import dataclass

ALIVE_SECONDS: Final = 15.0
FIRST_LOOK_SECONDS: Final = 0.03
LONGEST_LOOK_SECONDS: Final = 0.25

Wish = Literal["RECYCLE", "PAUSE", "RESUME"]
"""What operators ask of a worker."""


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One call: the file, the line that it is at, and the function."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls of a thread or task, innermost last."""

    title: str
    frames: list[StackFrame]


@dataclass(frozen=True, slots=True)
class LiveStack:
    """Where a running attempt was at `taken_at`, `seconds` after it had started. Without stacks, `problem` says
    why: it does not run, or its worker did not answer."""

    domain: str
    command_id: str
    worker: str | None = None
    attempt: int | None = None
    taken_at: datetime | None = None
    seconds: float | None = None
    stacks: list[Stack] = field(default_factory=list)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What a worker was asked."""

    id: int
    kind: str
    domain: str | None
    msg_id: int | None
    read_ct: int | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that was put to a worker. `id` is None if there was nobody to ask."""

    id: int | None
    worker: str | None
    attempt: int | None = None


# --- people ------------------------------------------------------------------------------------------------------


@operation(atomic=False)
def ask_for_stack(domain: str, command_id: str) -> Steps[Asked]:
    """Ask the worker that runs a command where it is."""
    names.check_domain(domain)
    command_id = names.to_id(command_id)
    try:
        rows = yield Statement(
            b"SELECT request, worker, attempt FROM commandbus.request_stack(%(domain)s, %(command_id)s)",
            {"domain": domain, "command_id": command_id},
        )
    except (pg.UndefinedFunction, pg.InvalidSchemaName):
        raise no_schema() from None
    if not rows:
        raise CommandNotFoundError(f"no command {command_id!r} in domain {domain!r}")
    return Asked(*rows[0])


@operation(atomic=False)
def ask_worker(worker: str, kind: Wish, action: OperatorAction) -> Steps[Asked]:
    """Ask a worker for what an operator wants. RECYCLE: end when what runs has ended, so that the supervisor
    starts a replacement. PAUSE: claim nothing more. RESUME: claim again."""
    worker = names.to_id(worker, "worker")
    rows = yield Statement(
        b"SELECT commandbus.request_of_operator("
        b"%(worker)s, %(kind)s, %(alive)s::float8, %(operator)s, %(reason)s)",
        {
            "worker": worker,
            "kind": kind,
            "alive": ALIVE_SECONDS,
            "operator": action.operator,
            "reason": action.reason,
        },
    )
    if rows[0][0] is None:
        raise InvalidOperationError(f"no worker {worker!r} is alive: `commandbus workers` lists those that are")
    return Asked(rows[0][0], worker)


@operation(atomic=False)
def find_answer(asked: Asked) -> Steps[Mapping[str, Any] | None]:
    """The worker's answer; None if there is none yet."""
    rows = yield Statement(
        b"SELECT answer::text FROM commandbus.worker_request WHERE id = %(id)s AND answered_at IS NOT NULL",
        {"id": asked.id},
    )
    return None if not rows else loads_or_none(rows[0][0]) or {}


def pauses(wait: float) -> list[float]:
    """How long to wait before each look for an answer: `wait` seconds in all."""
    found: list[float] = []
    next_pause = FIRST_LOOK_SECONDS
    while (left := wait - math.fsum(found)) > 1e-6:
        found.append(min(next_pause, left))
        next_pause = min(next_pause * 1.5, LONGEST_LOOK_SECONDS)
    return found


def live_stack(
    domain: str, command_id: str, asked: Asked, found: Mapping[str, Any] | None, wait: float
) -> LiveStack:
    """What is said of a running attempt."""
    about = (domain, str(command_id), asked.worker, asked.attempt)
    if asked.id is None:
        return LiveStack(*about, problem="it is not running: no worker holds it now")
    if found is None:
        text = f"worker {asked.worker} did not answer within {wait:g} s: it may be gone, or too busy"
        return LiveStack(*about, problem=text)
    stacks = [
        Stack(stack["title"], [StackFrame(**frame) for frame in stack["frames"]])
        for stack in found.get("stacks", ())
    ]
    taken = found.get("taken_at")
    taken_at = None if taken is None else datetime.fromtimestamp(taken, UTC)
    return LiveStack(*about, taken_at, found.get("seconds"), stacks, found.get("problem"))


def complied(kind: Wish, asked: Asked, found: Mapping[str, Any] | None, wait: float) -> bool:
    """Returns whether the worker's state has changed. Raises what is wrong, if the worker does not do it."""
    verb = kind.lower()
    if found is None:
        raise InvalidOperationError(
            f"worker {asked.worker} did not answer within {wait:g} s; if it hears of it within a minute, it "
            f"{verb}s all the same"
        )
    if found.get("problem") is not None:
        raise InvalidOperationError(f"worker {asked.worker} does not {verb}: {found['problem']}")
    return bool(found.get("changed", True))


# --- workers -----------------------------------------------------------------------------------------------------


@operation(atomic=False)
def open_requests(worker: str) -> Steps[list[Request]]:
    """What this worker was asked, and has not answered."""
    rows = yield Statement(sql.text("workers/open_requests"), {"worker": worker})
    return [Request(*row) for row in rows]


@operation(atomic=False)
def answer(request: int, document: Mapping[str, Any]) -> Steps[None]:
    """Answer one question."""
    text = payload.dump(dict(document), what="answer")
    yield Statement(sql.text("workers/answer_request"), {"id": request, "answer": text})
