"""What operators do with plans: preview, start, stop, and look.

`preview` stores the exact set. `start` locks the plan's row, so that one operator starts it; it compares the set
with what the filter chooses at that moment, and refuses if they differ. Workers do the rest
(`flow/plans/carry_out.py`). Starting and stopping is recorded in control_action: 'plan orders/17'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from commandbus import sql
from commandbus.errors import (
    CommandNotFoundError,
    InvalidCommandError,
    InvalidOperationError,
    PlanChangedError,
    PlanNotFoundError,
    UnknownDomainError,
)
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.limits.declare import note_action
from commandbus.flow.operation import Row, Statement, Steps, operation
from commandbus.flow.setup.domains import list_domains
from commandbus.model import names
from commandbus.model.counting import counted
from commandbus.model.page import MAX_ID, Page, cut, id_of
from commandbus.model.payload import dump, loads, loads_or_none
from commandbus.model.plan import (
    MOST,
    PlanAction,
    PlanFilter,
    PlanGroup,
    PlannedCommand,
    PlanRecord,
    PlanState,
)


@operation(atomic=True, whole=True)
def preview(
    domain: str, action: PlanAction, chosen: PlanFilter, seconds: float, what: OperatorAction
) -> Steps[PlanRecord]:
    """Store a plan with the commands that it chooses now. Nothing happens to them."""
    params = yield from _choice(names.check_domain(domain), chosen)
    params |= {
        "action": action.upper(),
        "filter": dump(_plain(chosen), what="filter"),
        "result": what.result,
        "seconds": seconds,
        "most": MOST,
        "operator": what.operator,
        "reason": what.reason,
    }
    rows = yield Statement(sql.text("plans/preview", chosen=sql.part("plans/chosen")), params)
    plan, total = rows[0]
    if total == 0:
        yield from _check_domain(domain)
        raise InvalidOperationError(f"no command of domain {domain!r} in the troubleshooting queue matches")
    if total > MOST:
        raise InvalidOperationError(f"more than {MOST} commands match, and a plan has at most so many: narrow it")
    return (yield from _read(plan))


@operation(atomic=True)
def start(plan_id: object, what: OperatorAction) -> Steps[PlanRecord]:
    """Start a plan, if nobody has, and if its filter still chooses exactly what the preview showed."""
    plan = yield from _read(plan_id, locking="FOR UPDATE")
    if plan.state != PlanState.PREVIEWED:
        raise InvalidOperationError(f"{_subject(plan)} cannot be started: {_explain(plan)}")
    params = yield from _choice(plan.domain, plan.filter, is_known=True)
    rows = yield Statement(sql.text("plans/changes", chosen=sql.part("plans/chosen")), params | {"plan": plan.id})
    entered, gone = rows[0]
    if entered or gone:
        raise PlanChangedError(
            f"since the preview of {_subject(plan)}, {entered} came and {gone} went of "
            f"{counted(plan.total, 'command')}: preview it again"
        )
    yield Statement(sql.text("plans/start"), {"plan": plan.id, "operator": what.operator, "reason": what.reason})
    yield note_action(f"plan {plan.domain}/{plan.id}", "START", what, details=_details(plan))
    return (yield from _read(plan.id))


@operation(atomic=True)
def stop(plan_id: object, what: OperatorAction) -> Steps[PlanRecord]:
    """Stop a plan. What it has done stays; the rest stays in the troubleshooting queue."""
    plan = yield from _read(plan_id, locking="FOR UPDATE")
    if plan.state.is_final:
        raise InvalidOperationError(f"{_subject(plan)} cannot be stopped: {_explain(plan)}")
    yield Statement(sql.text("plans/stop"), {"plan": plan.id, "operator": what.operator, "note": what.reason})
    yield note_action(f"plan {plan.domain}/{plan.id}", "STOP", what, details=_details(plan))
    return (yield from _read(plan.id))


@operation(atomic=False)
def get(plan_id: object) -> Steps[PlanRecord]:
    """One plan."""
    return (yield from _read(plan_id))


@operation(atomic=False)
def list_plans(domain: str | None, *, limit: int, cursor: str | None = None) -> Steps[Page[PlanRecord]]:
    """Plans, newest first."""
    size = names.check_count(limit, "limit")
    rows = yield Statement(
        sql.text("plans/query", locking=""),
        {
            "id": None,
            "domain": None if domain is None else names.check_domain(domain),
            "before_id": id_of(cursor),
            "limit": size + 1,
        },
    )
    return cut([_record(row) for row in rows], size, lambda plan: plan.id)


@operation(atomic=False)
def list_commands(plan_id: object, *, limit: int, cursor: str | None = None) -> Steps[Page[PlannedCommand]]:
    """The commands of a plan, in the order in which it deals with them."""
    size = names.check_count(limit, "limit")
    rows = yield Statement(
        sql.text("plans/commands"),
        {"plan": check_plan_id(plan_id), "after_id": id_of(cursor) or 0, "limit": size + 1},
    )
    if not rows:
        yield from _read(plan_id)
    return cut([PlannedCommand(*row) for row in rows], size, lambda item: item.id)


def check_plan_id(plan_id: object) -> int:
    """The number of a plan, also as text."""
    text = str(plan_id) if isinstance(plan_id, int) and not isinstance(plan_id, bool) else plan_id
    if isinstance(text, str) and text.isascii() and text.isdigit() and 0 < int(text[:20]) <= MAX_ID:
        return int(text)
    raise InvalidCommandError(f"plan_id {names.shown(plan_id)} is not valid: a plan has a whole number")


def _choice(domain: str, chosen: PlanFilter, *, is_known: bool = False) -> Steps[dict[str, Any]]:
    """The parameters of plans/chosen.sql. Commands that are named one by one must need a person."""
    ids = None
    if chosen.command_ids is not None:
        found = yield Statement(
            b"SELECT c.command_id, c.id, t.command IS NOT NULL FROM commandbus.command c "
            b"LEFT JOIN commandbus.tsq t ON t.command = c.id "
            b"WHERE c.domain = %(domain)s AND c.command_id = ANY (%(names)s::text[])",
            {"domain": domain, "names": list(chosen.command_ids)},
        )
        if not is_known:
            _check_named(domain, chosen.command_ids, found)
        ids = [id_ for _, id_, _ in found]
    return {
        "domain": domain,
        "command_type": chosen.command_type,
        "error_code": chosen.error_code,
        "fingerprint": chosen.fingerprint,
        "ids": ids,
    }


def _check_named(domain: str, wanted: Sequence[str], found: Sequence[Row]) -> None:
    known = {name: is_in_tsq for name, _, is_in_tsq in found}
    for name in wanted:
        if name not in known:
            raise CommandNotFoundError(f"no command {name!r} in domain {domain!r}")
        if not known[name]:
            raise InvalidOperationError(f"command {name!r} is not in the troubleshooting queue")


def _check_domain(domain: str) -> Steps[None]:
    known = yield from list_domains().steps
    if all(item.name != domain for item in known):
        raise UnknownDomainError(domain)


def _read(plan_id: object, *, locking: str = "") -> Steps[PlanRecord]:
    number = check_plan_id(plan_id)
    rows = yield Statement(
        sql.text("plans/query", locking=locking), {"id": number, "domain": None, "before_id": None, "limit": 1}
    )
    if not rows:
        raise PlanNotFoundError(number)
    return _record(rows[0])


def _record(row: Row) -> PlanRecord:
    id_, domain, action, chosen, result, seconds, state, total, moved, skipped, locked, groups, *rest = row
    found = loads(chosen)
    ids = found.get("command_ids")
    return PlanRecord(
        id_,
        domain,
        action.lower(),
        PlanFilter(
            found.get("command_type"),
            found.get("error_code"),
            None if ids is None else tuple(ids),
            found.get("fingerprint"),
        ),
        loads_or_none(result),
        seconds,
        PlanState(state),
        total,
        moved,
        skipped,
        locked,
        [PlanGroup(*group) for group in loads(groups)],
        *rest,
    )


def _plain(chosen: PlanFilter) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(chosen).items() if value is not None}


def _details(plan: PlanRecord) -> dict[str, Any]:
    return {"action": plan.action, "total": plan.total, "moved": plan.moved, "skipped": plan.skipped}


def _subject(plan: PlanRecord) -> str:
    return f"plan {plan.id} ({plan.action} {counted(plan.total, 'command')} of {plan.domain})"


def _explain(plan: PlanRecord) -> str:
    """Why its state allows no more."""
    match plan.state:
        case PlanState.RUNNING:
            return f"{plan.started_by} started it at {plan.started_at:%Y-%m-%d %H:%M:%S%z}"
        case PlanState.DONE:
            return "it is done"
        case _:
            return f"{plan.stopped_by} stopped it"
