"""What is known about batches. Reads only, locks nothing.

Counts are those of the row plus those that are not folded yet, in one snapshot. Only the queue knows which members
run, so a look at unfinished batches first reads what workers hold in their domains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.domains import no_queue
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.batch import MOST_LOOKED_AT, BatchPace, BatchRecord, BatchStatus, Waits, eta, rate_now
from commandbus.model.command import CancelRequest
from commandbus.model.count import MOST_COUNTED
from commandbus.model.page import MAX_ID, Page, id_of
from commandbus.model.payload import loads_or_none

BUDGET = 20_000  # batches that one call looks at


class BatchRow(NamedTuple):
    """A row of batches/named.sql and batches/query_batches.sql."""

    id: int
    domain: str
    batch_id: str
    name: str | None
    holds: str
    status: str
    is_open: bool
    total: int
    completed: int
    failed: int
    canceled: int
    in_tsq: int
    rate: float
    rate_age: float | None
    rate_count: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    custom_data: str | None
    on_complete: str | None
    cancel: str | None
    retry_of: str | None

    @property
    def final(self) -> int:
        """How many members have reached their end."""
        return self.completed + self.failed + self.canceled


@operation(atomic=False)
def get(domain: str, batch_id: str) -> Steps[BatchRecord | None]:
    """One batch; None if there is none."""
    params = {"domain": names.check_domain(domain), "batch_id": names.to_id(batch_id, "batch_id")}
    row = yield from _named(params, running=0)
    if row is None or row.finished_at is not None:
        return None if row is None else (yield from _with_eta(row, {}))
    # A member that ran at the first look may have ended since, and would be counted twice. So read the counts
    # again.
    try:
        found = yield Statement(
            b"SELECT commandbus.running_in_batch(%(domain)s, %(id)s)", {"domain": domain, "id": row.id}
        )
    except pg.UndefinedTable:
        raise (yield from no_queue(domain)) from None
    running = found[0][0]
    row = yield from _named(params, running=running)
    return None if row is None else (yield from _with_eta(row, {row.id: running}))


def _named(params: Mapping[str, Any], *, running: int) -> Steps[BatchRow | None]:
    rows = yield Statement(sql.text("batches/named"), {**params, "running": running})
    return BatchRow(*rows[0]) if rows else None


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
    end: int | None = None
    if batch_id is None and (domain is not None or wanted is not None):
        found = yield Statement(
            b"SELECT id FROM commandbus.batch WHERE id < %(before)s::bigint ORDER BY id DESC "
            b"OFFSET %(budget)s LIMIT 1",
            {"before": params["before_id"] or MAX_ID, "budget": BUDGET - 1},
        )
        end = found[0][0] if found else None
    rows = yield from _rows({**params, "after_id": end or 0}, limit=limit + 1, running=running)
    items: list[BatchRecord] = []
    for row in rows[:limit]:
        record = yield from _with_eta(row, running)
        items.append(record)
    if end is not None and len(rows) <= limit:
        return Page(items, str(end), is_partial=True)
    return Page(items, str(items[-1].id) if len(rows) > limit else None)


def _rows(params: Mapping[str, Any], *, limit: int, running: Mapping[int, int]) -> Steps[list[BatchRow]]:
    rows = yield Statement(sql.text("batches/query_batches"), {**params, "limit": limit, "running": list(running)})
    return [BatchRow(*row) for row in rows]


def _running(domains: Sequence[str]) -> Steps[dict[int, int]]:
    """How many members of each batch are held by workers."""
    found: dict[int, int] = {}
    for domain in domains:
        try:
            rows = yield Statement(
                sql.text("batches/running", domain=domain), {"domain": domain, "most": MOST_COUNTED}
            )
        except pg.UndefinedTable:
            raise (yield from no_queue(domain)) from None
        found |= dict(rows)
    return found


def _domains() -> Steps[list[str]]:
    """The domains that have a batch which is not finished."""
    rows = yield Statement(
        b"SELECT d.name FROM commandbus.domain d WHERE EXISTS (SELECT FROM commandbus.batch b "
        b"WHERE b.domain = d.name AND b.finished_at IS NULL) ORDER BY d.name"
    )
    return [domain for (domain,) in rows]


def _with_eta(row: BatchRow, running: Mapping[int, int]) -> Steps[BatchRecord]:
    """The batch with its ETA, if there is one."""
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
    pace = BatchPace(row.rate, row.rate_age, record.rate_per_second)
    return replace(record, eta_seconds=eta(left, record.running, pace, waits))


def _waits(rows: Sequence[Row]) -> Waits:
    others = {kind: (members, seconds) for kind, members, seconds, *_ in rows if kind != "limit"}
    turns = [_turn(seconds, ahead, rate) for kind, _, seconds, ahead, rate in rows if kind == "limit"]
    delayed, delay = others.get("delayed", (0, 0.0))
    return Waits(
        running=others.get("running", (0, None))[0],
        could=others.get("unknown", (0, None))[0],
        delayed=delayed,
        delay_seconds=delay,
        limited=sum(members for kind, members, *_ in rows if kind == "limit"),
        limit_seconds=None if None in turns else max((turn for turn in turns if turn is not None), default=0.0),
    )


def _turn(backoff: float | None, ahead: int, rate: float | None) -> float | None:
    """How long the last command in line waits; None if a person must act, or if no rate was measured."""
    return None if backoff is None or rate is None else backoff + (ahead + 1) / rate


def _record(row: BatchRow, running: Mapping[int, int]) -> BatchRecord:
    is_finished = row.finished_at is not None
    return BatchRecord(
        id=row.id, domain=row.domain, batch_id=row.batch_id, name=row.name, holds=row.holds,
        status=BatchStatus(row.status), is_open=row.is_open, total=row.total, completed=row.completed,
        failed=row.failed, canceled=row.canceled, in_tsq=row.in_tsq,
        running=0 if is_finished else running.get(row.id, 0),
        rate_per_second=0.0 if is_finished else rate_now(row.rate, row.rate_age, row.rate_count, row.final),
        created_at=row.created_at, started_at=row.started_at, finished_at=row.finished_at,
        custom_data=loads_or_none(row.custom_data), on_complete=loads_or_none(row.on_complete),
        retry_of=row.retry_of, cancel=CancelRequest.from_json(row.cancel),
    )  # fmt: skip


def _status(value: object) -> BatchStatus | None:
    if value is None or isinstance(value, BatchStatus):
        return value
    try:
        return BatchStatus(value)  # type: ignore[arg-type]
    except ValueError:
        raise InvalidCommandError(f"status {names.shown(value)} is none of {', '.join(BatchStatus)}") from None
