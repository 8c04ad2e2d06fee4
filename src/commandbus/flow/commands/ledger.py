"""get_ledger: where the time of a command went. Reads only, locks nothing."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.commands.domains import no_queue
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.model.ledger import CommandHistory, CurrentAttempt, Ledger, PastAttempt, Span, ledger_of
from commandbus.model.payload import loads_or_none

MOST_ATTEMPTS: Final = 1000


class LedgerRow(NamedTuple):
    """A row of commands/ledger.sql."""

    id: int
    status: str
    now: datetime
    created_at: datetime
    due_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    attempt: int | None
    attempt_base: int
    worker: str | None
    spans: str | None
    read_ct: int | None
    held_by: str | None
    since: str | None
    line: str | None

    def current(self) -> CurrentAttempt | None:
        """The attempt that completed it, or the one that runs."""
        if self.held_by is not None and self.since is not None and self.read_ct is not None:
            started_at = datetime.fromisoformat(self.since)
            return CurrentAttempt(self.attempt_base + self.read_ct, started_at, self.held_by)
        if self.status != "COMPLETED" or self.attempt is None or self.started_at is None:
            return None
        spans = spans_of(self.spans)
        return CurrentAttempt(self.attempt, self.started_at, self.worker, self.finished_at, spans)


@operation(atomic=False)
def get_ledger(domain: str, command_id: str) -> Steps[Ledger | None]:
    """Where the time of a command went; None if there is no such command."""
    params = {"domain": names.check_domain(domain), "command_id": names.to_id(command_id)}
    try:
        rows = yield Statement(sql.text("commands/ledger", domain=domain), params)
    except pg.UndefinedTable:
        raise (yield from no_queue(domain)) from None
    if not rows:
        return None
    row = LedgerRow(*rows[0])
    bound = {"command": row.id, "limit": MOST_ATTEMPTS + 1}
    attempts = yield Statement(sql.text("commands/ledger_attempts"), bound)
    retries = yield Statement(sql.text("commands/ledger_retries"), bound)
    history = CommandHistory(
        sent_at=row.created_at,
        until=row.finished_at or row.now,
        is_open=row.finished_at is None,
        due_at=row.due_at,
        attempts=[PastAttempt(*(*head, spans_of(spans))) for *head, spans in attempts[:MOST_ATTEMPTS]],
        retries=[at for (at,) in retries],
        current=row.current(),
        line=row.line,
        is_cut=len(attempts) > MOST_ATTEMPTS,
    )
    return ledger_of(history)


def spans_of(text: str | None) -> list[Span]:
    """The spans that a row holds; what does not look like one is left out."""
    found: Any = loads_or_none(text)
    if not isinstance(found, list):
        return []
    return [Span(*item) for item in found if _is_span(item)]


def _is_span(item: Any) -> bool:
    if not isinstance(item, list) or len(item) != 3 or not isinstance(item[0], str):
        return False
    return _is_whole(item[1]) and (item[2] is None or _is_whole(item[2]))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
