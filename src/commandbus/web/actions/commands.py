"""What operators do to single commands and their effects."""

from __future__ import annotations

from commandbus.bus import AsyncCommandBus
from commandbus.errors import InvalidCommandError
from commandbus.model.priority import PRIORITIES
from commandbus.web.actions.fields import Action, Fields, Step, as_json, one_of
from commandbus.web.rendering import query


async def _cancel(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    result = await bus.cancel(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    return f"cancel of {given['domain']} {given['id']}: {str(result).lower().replace('_', ' ')}"


async def _retry(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.commands.operator_retry(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    return f"{given['domain']} {given['id']} is in its queue again"


async def _cancel_troubled(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.commands.operator_cancel(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    return f"{given['domain']} {given['id']} is canceled"


async def _complete(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    result = as_json(given.get("result"), "result")
    await bus.commands.operator_complete(
        given["domain"], given["id"], result, operator=operator, reason=given.get("reason")
    )
    return f"{given['domain']} {given['id']} is completed"


async def _replay(bus: AsyncCommandBus, operator: str, given: Fields) -> Step:
    data = as_json(given["data"], "data")
    sent = await bus.commands.replay(
        given["domain"],
        given["id"],
        data,
        new_id=given.get("new_id"),
        cancel=given.get("cancel") == "yes",
        operator=operator,
        reason=given.get("reason"),
    )
    page = f"/command{query({'domain': sent.domain, 'id': sent.command_id})}"
    return Step(f"{sent.domain} {sent.command_id} is a replay of {given['id']}", page)


async def _set_priority(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    wanted = one_of(PRIORITIES, given["priority"], "priority")
    before = await bus.commands.set_priority(
        given["domain"], given["id"], wanted, operator=operator, reason=given.get("reason")
    )
    return f"{given['domain']} {given['id']} has {wanted} priority now (it had {before})"


async def _resolve_effect(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    is_done = one_of(("yes", "no"), given["done"], "done") == "yes"
    receipt = as_json(given.get("receipt"), "receipt")
    if receipt is not None and not is_done:
        raise InvalidCommandError("a call that was not made has no receipt: leave it out")
    await bus.commands.resolve_effect(
        given["domain"],
        given["id"],
        given["effect"],
        done=is_done,
        receipt=receipt,
        operator=operator,
        reason=given.get("reason"),
    )
    how = "made" if is_done else "not made"
    return f"the call of effect {given['effect']} of {given['domain']} {given['id']} was {how}: that is recorded"


ACTIONS: dict[str, Action] = {
    "cancel": Action(("domain", "id"), _cancel),
    "retry": Action(("domain", "id"), _retry),
    "cancel-troubled": Action(("domain", "id"), _cancel_troubled),
    "complete": Action(("domain", "id", "result?"), _complete),
    "replay": Action(("domain", "id", "data", "new_id?", "cancel?"), _replay),
    "set-priority": Action(("domain", "id", "priority"), _set_priority),
    "resolve-effect": Action(("domain", "id", "effect", "done", "receipt?"), _resolve_effect),
}
