"""The troubleshooting queue: which commands need a person, and how many. Reads only, locks nothing.

Lists look at BUDGET entries in a call, and counts at 10,000 of each type, however many there are.
"""

from __future__ import annotations

from typing import Any, Final

from commandbus import sql
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.model import names
from commandbus.model.command import TsqEntry
from commandbus.model.count import MOST_COUNTED, Count
from commandbus.model.fingerprint import check_fingerprint
from commandbus.model.page import MAX_ID, Page, id_of
from commandbus.model.payload import loads_or_none

BUDGET: Final = 10_000
BITE: Final = 2_000
MOST_TYPES: Final = 1_000


@operation(atomic=False)
def list_tsq(
    *,
    domain: str | None,
    command_type: str | None,
    error_code: str | None,
    fingerprint: str | None = None,
    limit: int,
    cursor: str | None = None,
) -> Steps[Page[TsqEntry]]:
    """Commands that need a person. Those that were sent first come first."""
    filters = _filters(domain, command_type, error_code, fingerprint)
    names.check_count(limit, "limit")
    types = yield from types_of(domain, command_type)
    rest = [name for name in ("command_type", "error_code", "fingerprint") if filters[name] is not None]
    rest = [name for name in rest if types is None or name != "command_type"]
    matches = " AND ".join(f"t.{name} IS NOT DISTINCT FROM %({name})s" for name in rest) or "true"
    parts = entries(types, edge="%(after_id)s::bigint", is_newest_first=False)
    text = sql.text("commands/list_tsq", matches=matches, **parts)
    found: list[Row] = []
    after, looked_at, bite = id_of(cursor) or 0, 0, max(limit + 1, BITE) if rest else limit + 1
    while looked_at < BUDGET:
        rows = yield Statement(text, filters | {"types": types, "after_id": after, "bite": bite})
        found += [row for row in rows if row[1]]
        looked_at += bite
        if len(found) > limit or len(rows) < bite:
            break
        after = rows[-1][0]
    items = [TsqEntry(*(id_, *head, loads_or_none(data))) for id_, _, *head, data in found[:limit]]
    if len(found) > limit:
        return Page(items, str(items[-1].id))
    return Page(items) if len(rows) < bite else Page(items, str(after), is_partial=True)


@operation(atomic=False)
def count_tsq(
    *,
    domain: str | None,
    command_type: str | None,
    error_code: str | None,
    fingerprint: str | None = None,
    most: int | None = MOST_COUNTED,
) -> Steps[dict[tuple[str, str], Count]]:
    """How many need a person, by (domain, command_type); of each type it looks at `most` entries (None: all)."""
    filters = _filters(domain, command_type, error_code, fingerprint)
    first = command_type if domain is not None else None
    rows = yield Statement(
        sql.text("commands/count_tsq"),
        filters | {"first": first, "most": None if most is None else most + 1, "types": MOST_TYPES},
    )
    return {
        (of_domain, of_type): _count(matching, looked_at, most) for of_domain, of_type, matching, looked_at in rows
    }


def _count(matching: int, looked_at: int, most: int | None) -> Count:
    if most is None:
        return Count(matching)
    return Count(min(matching, most), is_capped=looked_at > most)


def types_of(domain: str | None, command_type: str | None) -> Steps[list[str] | None]:
    """The types by which entries are found: None if no domain is given, because the index begins with it."""
    if domain is None:
        return None
    if command_type is not None:
        return [command_type]
    rows = yield Statement(sql.text("commands/types_in_tsq"), {"domain": domain, "most": MOST_TYPES})
    return [name for (name,) in rows]


def entries(types: list[str] | None, *, edge: str, is_newest_first: bool) -> dict[str, str]:
    """The parts of a statement about entries on one side of `edge`. Columns are compared as a row, which only one
    index offers: so no estimate can mislead the planner."""
    order, sign = (" DESC", "<") if is_newest_first else ("", ">")
    if types is None:
        return {
            "kinds": "pg_catalog.generate_series(1, 1) AS once",
            "range": f"t.command {sign} {edge}",
            "order": f"t.command{order}",
        }
    columns = ("t.domain", "t.command_type", "t.command")
    row, kind = ", ".join(columns), "%(domain)s, kind.name"
    low, high = ("0", edge) if is_newest_first else (edge, f"{MAX_ID}::bigint")
    return {
        "kinds": "pg_catalog.unnest(%(types)s::text[]) AS kind (name)",
        "range": f"({row}) > ({kind}, {low}) AND ({row}) <= ({kind}, {high}) AND t.command {sign} {edge}",
        "order": ", ".join(f"{name}{order}" for name in columns),
    }


def _filters(
    domain: str | None, command_type: str | None, error_code: object, fingerprint: object
) -> dict[str, Any]:
    return {
        "domain": None if domain is None else names.check_domain(domain),
        "command_type": None if command_type is None else names.check_type(command_type),
        "error_code": None if error_code is None else names.check_id(error_code, "error_code"),
        "fingerprint": check_fingerprint(fingerprint),
    }
