"""End commands whose expiry has passed before they started: CANCELED, with the code EXPIRED.

A worker that claims such a command does not start it (`Attempt.expire`). This module is for commands that no
worker claims, because they are parked, wait for a retry, or all slots are busy. Workers look for them every few
seconds (`worker/expiry.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from psycopg import errors as pg

from commandbus import sql
from commandbus.flow.commands.operate import tell_ended
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.outcome import EXPIRED

BITE = 1000
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


class Due(NamedTuple):
    """A command whose expiry has passed."""

    id: int
    domain: str
    expires_at: datetime
    is_pending: bool


@operation(atomic=False)
def due_to_expire(after: datetime, after_id: int, *, limit: int = BITE) -> Steps[list[Due]]:
    """Commands whose expiry has passed, in the order of their expiry, after a given one."""
    rows = yield Statement(
        sql.text("commands/due_to_expire"), {"after": after, "after_id": after_id, "limit": limit}
    )
    return [Due(*row) for row in rows]


@operation(atomic=True)
def expire(domain: str, ids: Sequence[int]) -> Steps[list[int]]:
    """End expired commands that no worker runs. Returns those that are held or locked, which must be looked at
    again."""
    try:
        rows = yield Statement(
            sql.text("commands/expire", domain=domain),
            {
                "ids": list(ids),
                "error_type": EXPIRED.error_type,
                "error_code": EXPIRED.error_code,
                "error": EXPIRED.error,
            },
        )
    except (pg.UndefinedTable, pg.InvalidSchemaName):
        return []  # the domain was dropped
    ended = {msg_id: told for *told, msg_id in rows if msg_id is not None}
    if ended:
        yield Statement(
            b"DELETE FROM commandbus.parked WHERE domain = %(domain)s AND msg_id = ANY (%(msg_ids)s)",
            {"domain": domain, "msg_ids": list(ended)},
        )
        why = "a message that this process had not handled has expired"
        told_ends = [tuple(told) for told in ended.values()]
        yield from tell_ended(domain, told_ends, EXPIRED, was_in_tsq=False, why=why)
    return [id_ for id_, *_, msg_id in rows if msg_id is None]
