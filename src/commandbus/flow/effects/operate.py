"""What people do to effects: they say how an open one ended."""

from __future__ import annotations

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import CommandNotFoundError, InvalidOperationError
from commandbus.flow.commands.operate import OperatorAction
from commandbus.flow.commands.send import explain_missing
from commandbus.flow.effects.inspect import effects_of
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.model.effect import EffectState, check_effect_name


@operation(atomic=True)
def resolve_effect(
    domain: str, command_id: str, name: str, state: EffectState, receipt: str | None, what: OperatorAction
) -> Steps[None]:
    """Record that the call of an open effect was made (DONE, with its receipt as JSON text), or was not
    (NOT_DONE). Raises InvalidOperationError if the effect is not open, or a worker holds the command."""
    how = "was done" if state is EffectState.DONE else "was not done"
    said = f"{what.operator} says that it {how}" + (f": {what.reason}" if what.reason else "")
    wanted = {
        "domain": names.check_domain(domain),
        "command_id": names.to_id(command_id),
        "name": check_effect_name(name),
        "state": state,
        "receipt": receipt,
        "note": said,
        "operator": what.operator,
        "action_reason": f"effect {name!r} {how}" + (f": {what.reason}" if what.reason else ""),
    }
    try:
        rows = yield Statement(sql.text("effects/resolve", domain=domain), wanted)
    except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
        raise explain_missing(domain, error) from None
    if not rows:
        yield from _refuse(domain, command_id, name)


def _refuse(domain: str, command_id: str, name: str) -> Steps[None]:
    """Say why nothing was written."""
    found = yield from effects_of(domain, command_id).steps
    effect = next((item for item in found if item.name == name), None)
    if effect is None:
        known = ", ".join(repr(item.name) for item in found) or "none"
        raise CommandNotFoundError(
            f"command {command_id!r} of domain {domain!r} has no effect {name!r} (it has: {known})"
        )
    if not effect.is_open:
        why = effect.note or "its attempt has told so"
        raise InvalidOperationError(f"effect {name!r} of command {command_id!r} is {effect.state} already: {why}")
    raise InvalidOperationError(
        f"a worker holds command {command_id!r}, and its attempt may be making the call of effect {name!r}: wait "
        f"until it has ended, or cancel it"
    )
