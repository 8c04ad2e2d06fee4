"""The effects and the checkpoint of a command, and all effects that are open. Reads only, locks nothing."""

from __future__ import annotations

from dataclasses import replace

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.effect import CheckpointRecord, EffectRecord, EffectState
from commandbus.model.page import Page
from commandbus.model.payload import loads_or_none


@operation(atomic=False)
def effects_of(domain: str, command_id: str) -> Steps[list[EffectRecord]]:
    """The effects of one command, in the order in which they began."""
    wanted = {"domain": names.check_domain(domain), "command_id": names.to_id(command_id)}
    rows = yield Statement(sql.text("effects/of_command"), wanted)
    return [_record(row) for row in rows]


@operation(atomic=False)
def checkpoint_of(domain: str, command_id: str) -> Steps[CheckpointRecord | None]:
    """The last checkpoint of one command; None if it has none."""
    wanted = {"domain": names.check_domain(domain), "command_id": names.to_id(command_id)}
    rows = yield Statement(sql.text("effects/checkpoint_of"), wanted)
    return CheckpointRecord(loads_or_none(rows[0][0]), *rows[0][1:]) if rows else None


@operation(atomic=False)
def list_open_effects(
    domain: str | None = None, *, limit: int = 50, cursor: str | None = None
) -> Steps[Page[EffectRecord]]:
    """A page of the effects of which nobody knows whether their calls were made, the oldest command first."""
    limit = names.check_count(limit, "limit")
    after, after_name = (0, "") if cursor is None else _read_cursor(cursor)
    rows = yield Statement(
        sql.text("effects/list_open"),
        {
            "domain": None if domain is None else names.check_domain(domain),
            "after": after,
            "after_name": after_name,
            "limit": limit + 1,
        },
    )
    found = [_record(row) for row in rows[:limit]]
    return Page(found, f"{found[-1].id} {found[-1].name}" if len(rows) > limit else None)


def _read_cursor(cursor: str) -> tuple[int, str]:
    after, _, name = cursor.partition(" ")
    if not after.isascii() or not after.isdigit() or not name:
        raise InvalidCommandError(f"cursor {cursor!r} is not valid: give the next_cursor of the last page")
    return int(after), name


def _record(row: Row) -> EffectRecord:
    record = EffectRecord(*row)
    return replace(record, state=EffectState(record.state), receipt=loads_or_none(row[-2]))
