"""What operators do to batches and processes."""

from __future__ import annotations

from commandbus.bus import AsyncCommandBus
from commandbus.errors import InvalidCommandError
from commandbus.web.actions.fields import Action, Fields, as_json


async def _close_batch(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    changed = await bus.close_batch(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    return f"batch {given['id']} {'is' if changed else 'was already'} closed: nothing can be added to it"


async def _cancel_batch(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    report = await bus.cancel_batch(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    left = f"; {report.left} locked by another session, which a worker cancels later" if report.left else ""
    done = f"{report.canceled} canceled, {report.requested} asked to stop{left}"
    return f"batch {given['id']} is being canceled: {done}"


async def _retry_batch(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    report = await bus.retry_failed(
        given["domain"],
        given["id"],
        name=given.get("name"),
        on_complete=_completion(given),
        operator=operator,
        reason=given.get("reason"),
    )
    new = "" if report.new_batch_id is None else f" in batch {report.new_batch_id}"
    return f"batch {given['id']}: {report.retried} retried, {report.sent_again} sent again{new}"


def _completion(given: Fields) -> dict[str, str] | None:
    """What happens when the new batch is complete: a command (DOMAIN/TYPE), a reply to a queue, or nothing."""
    if "on_complete" in given and "reply_to" in given:
        raise InvalidCommandError("on_complete and reply_to exclude each other: give one of them")
    if "reply_to" in given:
        return {"reply_to": given["reply_to"]}
    if "on_complete" not in given:
        return None
    domain, slash, command_type = given["on_complete"].partition("/")
    if not slash:
        raise InvalidCommandError(f"on_complete {given['on_complete']!r:.80} is not DOMAIN/TYPE")
    return {"domain": domain, "command_type": command_type}


async def _cancel_process(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.cancel_process(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    return f"process {given['id']} is being canceled: completed steps that have an undo are undone"


async def _retry_process(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    await bus.retry_process(given["domain"], given["id"], operator=operator, reason=given.get("reason"))
    return f"process {given['id']} tries again"


async def _signal(bus: AsyncCommandBus, operator: str, given: Fields) -> str:
    sent = await bus.signal(
        given["domain"],
        given["id"],
        given["name"],
        as_json(given.get("data"), "data"),
        signal_id=given.get("signal_id"),
        operator=operator,
        reason=given.get("reason"),
    )
    done = "was sent" if sent.created else "had been sent already"
    return f"signal {given['name']} {done} to process {given['id']}"


ACTIONS: dict[str, Action] = {
    "close-batch": Action(("domain", "id"), _close_batch),
    "cancel-batch": Action(("domain", "id"), _cancel_batch),
    "retry-batch": Action(("domain", "id", "name?", "on_complete?", "reply_to?"), _retry_batch),
    "cancel-process": Action(("domain", "id"), _cancel_process),
    "retry-process": Action(("domain", "id"), _retry_process),
    "signal": Action(("domain", "id", "name", "data?", "signal_id?"), _signal),
}
