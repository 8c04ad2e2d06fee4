"""What operators do with plans."""

from __future__ import annotations

from urllib.parse import unquote

from commandbus.bus import AsyncCommandBus
from commandbus.errors import InvalidCommandError
from commandbus.model.plan import check_action
from commandbus.web.actions.fields import Action, Fields, Step, as_json, as_whole, lines_of


async def _preview_plan(bus: AsyncCommandBus, operator: str, given: Fields) -> Step:
    domain, ids = _selected(given)
    plan = await bus.plans.preview(
        domain,
        check_action(given["action"]),
        command_type=given.get("command_type"),
        error_code=given.get("error_code"),
        fingerprint=given.get("fingerprint"),
        command_ids=ids,
        result=as_json(given.get("result"), "result"),
        over=given.get("over", "0"),
        operator=operator,
        reason=given.get("reason"),
    )
    return Step(f"plan {plan.id} would {plan.text}", f"/plan?id={plan.id}")


async def _start_plan(bus: AsyncCommandBus, operator: str, given: Fields) -> Step:
    plan = await bus.plans.start(as_whole(given["plan"], "plan"), operator=operator, reason=given.get("reason"))
    return Step(f"plan {plan.id} runs: {plan.progress_text}", f"/plan?id={plan.id}")


async def _stop_plan(bus: AsyncCommandBus, operator: str, given: Fields) -> Step:
    plan = await bus.plans.stop(as_whole(given["plan"], "plan"), operator=operator, reason=given.get("reason"))
    return Step(f"plan {plan.id} is stopped: {plan.progress_text}", f"/plan?id={plan.id}")


ACTIONS: dict[str, Action] = {
    "preview-plan": Action(
        (
            "domain?",
            "action",
            "command_type?",
            "error_code?",
            "fingerprint?",
            "ids?",
            "chosen?",
            "over?",
            "result?",
        ),
        _preview_plan,
    ),
    "start-plan": Action(("plan",), _start_plan),
    "stop-plan": Action(("plan",), _stop_plan),
}


def _selected(given: Fields) -> tuple[str, list[str] | None]:
    """The domain of a plan, and its commands if they are named one by one: by `ids` in `domain`, or by `chosen`
    on a page that shows several domains: "orders ship-17", the id quoted as in an address."""
    if "chosen" not in given:
        if "domain" not in given:
            raise InvalidCommandError("select at least one command, or give a domain")
        return given["domain"], lines_of(given, "ids") if "ids" in given else None
    pairs = [line.partition(" ") for line in lines_of(given, "chosen")]
    domains = sorted({domain for domain, _, _ in pairs})
    if len(domains) != 1:
        raise InvalidCommandError(
            f"a plan is about one domain, and the selection has commands of {', '.join(domains)}: select again"
        )
    return domains[0], [unquote(quoted) for _, _, quoted in pairs]
