"""What is known about batches. Reads only, locks nothing.

Counts are those of the row plus those that are not folded yet, in one snapshot. Only the queue knows what runs, so
a look at unfinished batches begins with one look at what is held in their domains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.inspect import no_queue
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names, payload
from commandbus.model.batch import MOST_LOOKED_AT, BatchPace, BatchRecord, BatchStatus, Waits, eta, rate_now
from commandbus.model.command import CancelRequest
from commandbus.model.page import Page, id_of


@operation(atomic=False)
def get(domain: str, batch_id: str) -> Steps[BatchRecord | None]:
    """One batch; None if there is none."""
    params = {"domain": names.check_domain(domain), "batch_id": names.to_id(batch_id, "batch_id")}
    rows = yield Statement(sql.text("batches/named"), params | {"running": 0})
    if not rows:
        return None
    is_finished = rows[0][17] is not None
    if is_finished:
        return (yield from _with_eta(rows[0], {}))
    # Looked at first, what runs could be in the counts as well; so the counts are read once more, after it.
    id_ = rows[0][0]
    try:
        found = yield Statement(
            b"SELECT commandbus.running_in_batch(%(domain)s, %(id)s)", {"domain": domain, "id": id_}
        )
    except pg.UndefinedTable:
        raise (yield from no_queue(domain)) from None
    running = found[0][0]
    rows = yield Statement(sql.text("batches/named"), params | {"running": running})
    return (yield from _with_eta(rows[0], {id_: running})) if rows else None


@operation(atomic=False)
def query(
    *, domain: str | None, status: object, limit: int, cursor: str | None = None, batch_id: str | None = None
) -> Steps[Page[BatchRecord]]:
    """A page of batches that match, newest first."""
    wanted = _status(status)
    params = {
        "domain": None if domain is None else names.check_domain(domain),
        "batch_id": None if batch_id is None else names.to_id(batch_id, "batch_id"),
        "status": wanted,
        "before_id": id_of(cursor),
    }
    names.check_count(limit, "limit")
    running: Mapping[int, int] = {}
    if wanted is None or not wanted.is_final:
        running = yield from _running((yield from _domains()) if domain is None else [domain])
    rows = yield from _rows(params, limit=limit + 1, running=running)
    items: list[BatchRecord] = []
    for row in rows[:limit]:
        record = yield from _with_eta(row, running)
        items.append(record)
    return Page(items, str(items[-1].id) if len(rows) > limit else None)


def _rows(
    params: Mapping[str, Any], *, limit: int, running: Mapping[int, int] | None = None
) -> Steps[Sequence[Row]]:
    defaults = {"domain": None, "batch_id": None, "status": None, "before_id": None}
    return (
        yield Statement(
            sql.text("batches/query_batches"),
            defaults | dict(params) | {"limit": limit, "running": list(running or ())},
        )
    )


def _running(domains: Sequence[str]) -> Steps[dict[int, int]]:
    """How many members of each batch are held by workers."""
    found: dict[int, int] = {}
    for domain in domains:
        try:
            rows = yield Statement(sql.text("batches/running", domain=domain), {"domain": domain})
        except pg.UndefinedTable:
            raise (yield from no_queue(domain)) from None
        found |= dict(rows)
    return found


def _domains() -> Steps[list[str]]:
    """The domains that have a batch which is not finished."""
    rows = yield Statement(
        b"SELECT DISTINCT domain FROM commandbus.batch WHERE finished_at IS NULL ORDER BY domain"
    )
    return [row[0] for row in rows]


def _with_eta(row: Row, running: Mapping[int, int]) -> Steps[BatchRecord]:
    """The batch with its ETA, as far as that is known."""
    record = _record(row, running)
    if record.is_finished:
        return replace(record, eta_seconds=0.0)
    left = record.remaining - record.in_tsq
    if record.is_open or left <= 0:
        return record
    found = yield Statement(
        b"SELECT kind, members, seconds, ahead, rate FROM commandbus.batch_waits(%(domain)s, %(id)s, %(most)s)",
        {"domain": record.domain, "id": record.id, "most": MOST_LOOKED_AT},
    )
    waits = _waits(found)
    pace = BatchPace(row[12], row[13], record.rate_per_second)
    return replace(record, eta_seconds=eta(left, record.running, pace, waits))


def _waits(rows: Sequence[Row]) -> Waits:
    limits = [row[1:] for row in rows if row[0] == "limit"]
    others = {kind: (members, seconds) for kind, members, seconds, *_ in rows if kind != "limit"}
    turns = [_turn(seconds, ahead, rate) for _, seconds, ahead, rate in limits]
    delayed, delay = others.get("delayed", (0, 0.0))
    return Waits(
        running=others.get("running", (0, None))[0],
        could=others.get("unknown", (0, None))[0],
        delayed=delayed,
        delay_seconds=delay,
        limited=sum(members for members, *_ in limits),
        limit_seconds=None if None in turns else max((turn for turn in turns if turn is not None), default=0.0),
    )


def _turn(backoff: float | None, ahead: int, rate: float | None) -> float | None:
    """How long the last in line waits; None: a person must act, or no rate was measured."""
    return None if backoff is None or rate is None else backoff + (ahead + 1) / rate


def _record(row: Row, running: Mapping[int, int]) -> BatchRecord:
    (id_, domain, batch_id, name, holds, status, is_open, total, completed, failed, canceled, in_tsq, rate,
    seconds,
     rate_count, created_at, started_at, finished_at, custom_data, on_complete, cancel,
     retry_of) = row  # fmt: skip
    is_finished = finished_at is not None
    return BatchRecord(
        id=id_, domain=domain, batch_id=batch_id, name=name, holds=holds, status=BatchStatus(status),
        is_open=is_open, total=total, completed=completed, failed=failed, canceled=canceled, in_tsq=in_tsq,
        running=0 if is_finished else running.get(id_, 0),
        rate_per_second=0.0 if is_finished else rate_now(
            rate, seconds, rate_count, completed + failed + canceled
        ),
        created_at=created_at, started_at=started_at, finished_at=finished_at, custom_data=_loads(custom_data),
        on_complete=_loads(on_complete), retry_of=retry_of, cancel=_cancel_request(cancel),
    )  # fmt: skip


def _cancel_request(text: str | None) -> CancelRequest | None:
    if text is None:
        return None
    found = payload.loads(text)
    return CancelRequest(found["by"], found["reason"], datetime.fromisoformat(found["at"]))


def _loads(text: str | None) -> Any:
    return None if text is None else payload.loads(text)


def _status(value: object) -> BatchStatus | None:
    if value is None or isinstance(value, BatchStatus):
        return value
    try:
        return BatchStatus(value)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidCommandError(f"status {names.shown(value)} is none of {', '.join(BatchStatus)}") from None
