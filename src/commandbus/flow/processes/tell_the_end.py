"""Tells those who wait for a process that it has ended: its starter, or the process that it is nested in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from commandbus import sql
from commandbus.flow.batches.fold_and_complete import fold_now
from commandbus.flow.commands.reply import Reply, deliver
from commandbus.flow.operation import Statement, Steps
from commandbus.flow.processes.messages import dump
from commandbus.model.process import ProcessStatus

if TYPE_CHECKING:
    from commandbus.processes.manager import ProcessView

_OUTCOMES = {ProcessStatus.COMPLETED: "SUCCESS", ProcessStatus.CANCELED: "CANCELED"}
_UNDONE = {ProcessStatus.COMPENSATED: "SUCCESS", ProcessStatus.CANCELED: "SUCCESS"}


class Parent(NamedTuple):
    """The process that waits for a nested process, and its step; -n: the n-th step is the compensation that undoes
    the nested process."""

    id: int
    step: int


def tell_the_end(
    view: ProcessView[Any],
    domain: str,
    state: str,
    *,
    reply_to: str | None,
    correlation_id: str | None,
    batch: int | None,
    parent: Parent | None = None,
) -> Steps[None]:
    """Tell a process's starter, or its parent, how it ended, and fold its batch; `state` is JSON text."""
    if reply_to is not None:
        outcomes = _OUTCOMES if parent is None or parent.step > 0 else _UNDONE
        reply = {
            "outcome": outcomes.get(view.status, "FAILED"),
            "domain": domain,
            "process_id": view.process_id,
            "process_type": view.process_type,
            "status": view.status,
            "correlation_id": correlation_id,
            "error": view.failure if parent is None else error_of(view),
        }
        message = dump(reply)[:-1] + f',"result":{state}}}'
        if parent is None:
            yield from deliver([Reply(reply_to, message)])
        else:
            yield from reply_to_parent(reply_to, parent, message)
    if batch is not None:
        yield from fold_now([batch])


def reply_to_parent(queue: str, parent: Parent, message: str) -> Steps[None]:
    """Tell the parent how its nested process has ended. `queue` is that of the parent's domain."""
    rows = yield Statement(
        sql.text("processes/reply_to_parent", queue=queue),
        {"parent": parent.id, "step": parent.step, "message": message},
    )
    if not rows:  # this role does not see the parent
        yield Statement(sql.text("commands/reply_undelivered"), {"queue": queue, "messages": f"[{message}]"})


def parent_of(id_: int | None, step: int | None) -> Parent | None:
    """The parent from the columns of a process."""
    return None if id_ is None or step is None else Parent(id_, step)


def error_of(view: ProcessView[Any]) -> Any:
    """Why it did not complete: the failure, or who canceled it."""
    if view.failure is not None or view.cancel is None:
        return view.failure
    text = f"canceled by {view.cancel.get('by')}"
    if view.cancel.get("reason"):
        text += f": {view.cancel['reason']}"
    return {"type": "ProcessCanceled", "code": "CANCELED", "message": text}
