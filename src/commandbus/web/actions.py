"""What an operator can do in the console, each defined once for pages and API.

Every action names its fields, and returns a sentence that says what was done; a `Step` has a page, too. The
operator is always the visitor. The bus records each action with the operator's name and reason.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from commandbus.bus import AsyncCommandBus
from commandbus.errors import InvalidCommandError
from commandbus.model.json_values import Json
from commandbus.model.plan import check_action
from commandbus.model.priority import PRIORITIES
from commandbus.web.rendering import query

Fields = Mapping[str, str]
T = TypeVar("T")
LONGEST_FIELD = 1_000_000


class Step(str):
    """The sentence of an action that has a page of its own, which shows what was done."""

    page: str

    def __new__(cls, sentence: str, page: str) -> Step:
        """The sentence, and the page."""
        made = super().__new__(cls, sentence)
        made.page = page
        return made


@dataclass(frozen=True, slots=True)
class Action:
    """An action: its fields (those that end with `?` may be left out), and what it does."""

    fields: tuple[str, ...]
    run: Callable[[AsyncCommandBus, str, Fields], Awaitable[str]]

    def check(self, given: Mapping[str, str]) -> dict[str, str]:
        """The fields of this action among those given. An error names the one that is missing."""
        known = {field.rstrip("?") for field in self.fields} | {"reason"}
        found = {name: value for name, value in given.items() if name in known and value != ""}
        for field in self.fields:
            if not field.endswith("?") and field not in found:
                raise InvalidCommandError(f"{field} is missing")
        for name, value in found.items():
            if len(value) > LONGEST_FIELD:
                raise InvalidCommandError(
                    f"{name} has {len(value)} characters; at most {LONGEST_FIELD} are allowed"
                )
        return found


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
    result = _json(given.get("result"), "result")
    await bus.commands.operator_complete(
        given["domain"], given["id"], result, operator=operator, reason=given.get("reason")
    )
    return f"{given['domain']} {given['id']} is completed"


async def _replay(bus: AsyncCommandBus, operator: str, given: Fields) -> Step:
    data = _json(given["data"], "data")
    sent = await bus.commands.replay(
        given["domain"],
        given["id"],
        data,
        cancel=given.get("cancel") == "yes",
        operator=operator,
        reason=given.get("reason"),
    )
    page = f"/command{query({'domain': sent.domain, 'id': sent.command_id})}"
    return Step(f"{sent.domain} {sent.command_id} is a replay of {given['id']}", page)


async def _preview_plan(bus: AsyncCommandBus, operator: str, given: Fields) -> Step:
    plan = await bus.plans.preview(
        given["domain"],
        check_action(given["action"]),
        command_type=given.get("command_type"),
        error_code=given.get("error_code"),
        fingerprint=given.get("fingerprint"),
        command_ids=given["ids"].split("\n") if "ids" in given else None,
        result=_json(given.get("result"), "result"),
        over=given.get("over", "0"),
        operator=operator,
        reason=given.get("reason"),
    )
    return Step(f"plan {plan.id} would {plan.text}", f"/plan?id={plan.id}")


async def _start_plan(bus: AsyncCommandBus, operator: str, given: Fields) -> Step:
    plan = await bus.plans.start(_whole(given["plan"], "plan"), operator=operator, reason=given.get("reason"))
    return Step(f"plan {plan.id} runs: {plan.progress_text}", f"/plan?id={plan.id}")


async def _stop_plan(bus: AsyncCommandBus, operator: str, given: Fields) -> Step:
    plan = await bus.plans.stop(_whole(given["plan"], "plan"), operator=operator, reason=given.get("reason"))
    return Step(f"plan {plan.id} is stopped: {plan.progress_text}", f"/plan?id={plan.id}")


async def _set_priority(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    wanted = _one_of(PRIORITIES, given["priority"], "priority")
    before = await bus.commands.set_priority(
        given["domain"], given["id"], wanted, operator=operator, reason=given.get("reason")
    )
    return f"{given['domain']} {given['id']} has {wanted} priority now (it had {before})"


async def _resolve_effect(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    is_done = _one_of(("yes", "no"), given["done"], "done") == "yes"
    receipt = _json(given.get("receipt"), "receipt")
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


async def _pause(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    changed = await bus.pause(
        given["domain"], given.get("command_type"), operator=operator, reason=given.get("reason")
    )
    return f"{_subject(given)} {'is' if changed else 'was already'} paused"


async def _resume(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.resume(given["domain"], given.get("command_type"), operator=operator, reason=given.get("reason"))
    return f"{_subject(given)} goes on"


async def _open_breaker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.open_breaker(
        *_breaker(given), limit=given.get("limit"), operator=operator, reason=given.get("reason")
    )
    return f"the breaker of {_subject(given)} is open, until somebody closes it"


async def _close_breaker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.close_breaker(
        *_breaker(given), limit=given.get("limit"), operator=operator, reason=given.get("reason")
    )
    return f"the breaker of {_subject(given)} is closed"


async def _reset_breaker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.reset_breaker(
        *_breaker(given), limit=given.get("limit"), operator=operator, reason=given.get("reason")
    )
    return f"the breaker of {_subject(given)} is closed, and its counts are cleared"


async def _set_limit(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    concurrency = _whole(given["concurrency"], "concurrency")
    info = await bus.set_limit(
        given["limit"], concurrency=concurrency, operator=operator, reason=given.get("reason")
    )
    return f"limit {info.name} allows {info.concurrency} at once"


async def _unset_limit(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.unset_limit(given["limit"], operator=operator, reason=given.get("reason"))
    return f"limit {given['limit']} is as its program declares it"


async def _pause_schedule(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.schedules.pause(given["domain"], given["name"], operator=operator, reason=given.get("reason"))
    return f"schedule {given['name']} is paused"


async def _resume_schedule(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.schedules.resume(given["domain"], given["name"], operator=operator, reason=given.get("reason"))
    return f"schedule {given['name']} goes on"


async def _run_schedule(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    sent = await bus.schedules.run_now(
        given["domain"], given["name"], operator=operator, reason=given.get("reason")
    )
    return f"schedule {given['name']} has sent {sent.domain} {sent.command_id}"


async def _recycle_worker(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.recycle_worker(given["worker"], operator=operator, reason=given.get("reason"))
    return f"worker {given['worker']} drains and is replaced"


async def _cancel_batch(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.cancel_batch(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    return f"batch {given['id']} is being canceled"


async def _retry_batch(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    report = await bus.retry_failed(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    new = "" if report.new_batch_id is None else f" in batch {report.new_batch_id}"
    return f"batch {given['id']}: {report.retried} retried, {report.sent_again} sent again{new}"


async def _cancel_process(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.cancel_process(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    return f"process {given['id']} is being canceled: what it has done is undone"


async def _retry_process(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.retry_process(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    return f"process {given['id']} tries again"


async def _signal(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    sent = await bus.signal(
        given["domain"],
        given["id"],
        given["name"],
        _json(given.get("data"), "data"),
        signal_id=given.get("signal_id"),
        operator=operator,
        reason=given.get("reason"),
    )
    done = "was sent" if sent.created else "had been sent already"
    return f"signal {given['name']} {done} to process {given['id']}"


ACTIONS: dict[str, Action] = {
    "cancel": Action(("domain", "id"), _cancel),
    "retry": Action(("domain", "id"), _retry),
    "cancel-troubled": Action(("domain", "id"), _cancel_troubled),
    "complete": Action(("domain", "id", "result?"), _complete),
    "replay": Action(("domain", "id", "data", "cancel?"), _replay),
    "set-priority": Action(("domain", "id", "priority"), _set_priority),
    "resolve-effect": Action(("domain", "id", "effect", "done", "receipt?"), _resolve_effect),
    "preview-plan": Action(
        ("domain", "action", "command_type?", "error_code?", "fingerprint?", "ids?", "over?", "result?"),
        _preview_plan,
    ),
    "start-plan": Action(("plan",), _start_plan),
    "stop-plan": Action(("plan",), _stop_plan),
    "pause": Action(("domain", "command_type?"), _pause),
    "resume": Action(("domain", "command_type?"), _resume),
    "open-breaker": Action(("domain?", "command_type?", "limit?"), _open_breaker),
    "close-breaker": Action(("domain?", "command_type?", "limit?"), _close_breaker),
    "reset-breaker": Action(("domain?", "command_type?", "limit?"), _reset_breaker),
    "set-limit": Action(("limit", "concurrency"), _set_limit),
    "unset-limit": Action(("limit",), _unset_limit),
    "pause-schedule": Action(("domain", "name"), _pause_schedule),
    "resume-schedule": Action(("domain", "name"), _resume_schedule),
    "run-schedule": Action(("domain", "name"), _run_schedule),
    "recycle-worker": Action(("worker",), _recycle_worker),
    "cancel-batch": Action(("domain", "id"), _cancel_batch),
    "retry-batch": Action(("domain", "id"), _retry_batch),
    "cancel-process": Action(("domain", "id"), _cancel_process),
    "retry-process": Action(("domain", "id"), _retry_process),
    "signal": Action(("domain", "id", "name", "data?", "signal_id?"), _signal),
}


def _subject(given: Fields) -> str:
    if "limit" in given:
        return f"limit {given['limit']}"
    return "/".join(given[name] for name in ("domain", "command_type") if name in given)


def _breaker(given: Fields) -> tuple[str | None, str | None]:
    return given.get("domain"), given.get("command_type")


def _json(text: str | None, name: str) -> Json:
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise InvalidCommandError(f"{name} is not JSON: {error}") from None


def _whole(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidCommandError(f"{name} must be a whole number, not {text!r:.80}")
    return int(text)


def _one_of(known: Sequence[T], text: str, name: str) -> T:
    """The one of these values that the text names."""
    for value in known:
        if value == text:
            return value
    raise InvalidCommandError(f"{name} must be {' or '.join(map(str, known))}, not {text!r:.80}")
