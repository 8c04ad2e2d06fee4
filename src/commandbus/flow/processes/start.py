"""Start processes, one or very many, a thousand per statement.

A process is a row and its first message. `process_id` is an idempotency key, like command_id: of several
concurrent starters one inserts the row, and the others find it and compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import DuplicateProcessError, InvalidCommandError
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names, payload
from commandbus.model.command import new_command_id
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.process import NewProcess, StartedProcess

CHUNK = 1000
_FIELDS = frozenset(field.name for field in fields(NewProcess))


class Starting(NamedTuple):
    """A checked process, its JSON dumped."""

    process_id: str
    data: str
    deadline_seconds: float | None
    reply_to: str | None
    correlation_id: str | None
    has_own_id: bool = True  # the caller chose the process_id, so it may exist already


def to_new_process(item: object) -> NewProcess:
    """A NewProcess from what a caller of start_processes wrote."""
    if isinstance(item, NewProcess):
        return item
    if not isinstance(item, Mapping):
        raise InvalidCommandError(f"{names.shown(item)} is not a process; give NewProcess or dicts")
    if unknown := sorted(str(key) for key in item if key not in _FIELDS):
        raise InvalidCommandError(
            f"unknown field {unknown[0]!r} of a process; known are {', '.join(sorted(_FIELDS))}"
        )
    return NewProcess(**item)


def prepare_start(new: NewProcess, *, deadline: Duration | None, max_bytes: int) -> Starting:
    """Check a process and dump its JSON. `deadline` is that of its type, and counts if the process has none."""
    wanted = deadline if new.deadline is None else new.deadline
    seconds = None if wanted is None else parse_seconds(wanted, name="deadline", error=InvalidCommandError)
    return Starting(
        new_command_id() if new.process_id is None else names.to_new_id(new.process_id, "process_id"),
        payload.dump(new.data, what="data", max_bytes=max_bytes),
        seconds or None,
        None if new.reply_to is None else names.check_queue(new.reply_to),
        None if new.correlation_id is None else names.to_new_id(new.correlation_id, "correlation_id"),
        new.process_id is not None,
    )


@operation(atomic=True, whole=True)
def start(
    domain: str, process_type: str, starting: Iterator[Starting], *, batch: int | None = None
) -> Steps[list[StartedProcess]]:
    """Start processes, all or none. Those that were started before with the same content stay as they are."""
    return (yield from start_now(domain, process_type, starting, batch=batch, counts=False))


def start_now(
    domain: str, process_type: str, starting: Iterator[Starting], *, batch: int | None, counts: bool
) -> Steps[list[StartedProcess]]:
    """Start processes in the current transaction. `counts`: add them to the total of the batch now."""
    started: list[StartedProcess] = []
    while chunk := list(islice(starting, CHUNK)):
        started += yield from _start_chunk(domain, process_type, chunk, batch, counts=counts)
    return started


def _start_chunk(
    domain: str, process_type: str, chunk: list[Starting], batch: int | None, *, counts: bool
) -> Steps[list[StartedProcess]]:
    unique: dict[str, Starting] = {}
    for item in chunk:
        if unique.setdefault(item.process_id, item) != item:
            raise DuplicateProcessError(domain, item.process_id, "in the same call")
    found = yield from insert_new(domain, process_type, list(unique.values()), batch, counts=counts)
    if missing := [item for item in unique.values() if item.process_id not in found]:
        found |= yield from _find_started(domain, process_type, missing, batch)
    return [found[item.process_id] for item in chunk]


def insert_new(
    domain: str, process_type: str, starting: Sequence[Starting], batch: int | None, *, counts: bool = False
) -> Steps[dict[str, StartedProcess]]:
    """Start those whose process_id is not taken. Returns them."""
    try:
        answer = yield Statement(
            sql.text("processes/start"),
            {
                "domain": domain,
                "process_type": process_type,
                "batch": batch,
                "rows": _json_rows(starting),
                "counts": counts,
            },
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    return {process_id: StartedProcess(domain, process_id, id_) for process_id, id_ in answer}


def _json_rows(starting: Sequence[Starting]) -> str:
    """One JSON array, with the data as it was dumped."""
    rows = [
        {"i": item.process_id, "m": new_command_id(), "s": item.deadline_seconds, "r": item.reply_to,
         "c": item.correlation_id}
        for item in starting
    ]  # fmt: skip
    texts = [
        payload.dump(row, what="rows")[:-1] + f',"d":{item.data}}}'
        for row, item in zip(rows, starting, strict=True)
    ]
    return "[" + ",".join(texts) + "]"


def _find_started(
    domain: str, process_type: str, wanted: Sequence[Starting], batch: int | None
) -> Steps[dict[str, StartedProcess]]:
    rows = yield Statement(
        sql.text("processes/existing"),
        {"domain": domain, "process_type": process_type, "batch": batch, "rows": _json_rows(wanted)},
    )
    existing = {process_id: (id_, difference) for process_id, id_, difference in rows}
    found = {}
    for item in wanted:
        if item.process_id not in existing:
            text = "content that this transaction cannot see yet (retry the transaction)"
            raise DuplicateProcessError(domain, item.process_id, text)
        id_, difference = existing[item.process_id]
        if difference is not None:
            raise DuplicateProcessError(domain, item.process_id, difference)
        found[item.process_id] = StartedProcess(domain, item.process_id, id_, created=False)
    return found
