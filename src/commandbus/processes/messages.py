"""The messages that move a process, as they are read from the data of its commands.

start     its first message
reply     how a step ended: the outcome of its command, or the end of its nested process
deadline  of a step, or of the process
wake      a sleep is over
signal    somebody sent a signal (`bus.signal`)
cancel    somebody canceled the process, or its parent is undone
undo      the parent of this nested process, which had completed, is undone
retry     an operator's
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from commandbus.model import names
from commandbus.model.process import StepStatus
from commandbus.processes.manager import StepReply
from commandbus.quick_dataclass import dataclass

EVENTS = ("start", "reply", "deadline", "wake", "signal", "cancel", "undo", "retry")
OUTCOMES = {
    "SUCCESS": StepStatus.COMPLETED,
    "FAILED": StepStatus.FAILED,
    "CANCELED": StepStatus.CANCELED,
}


@dataclass(frozen=True, slots=True)
class Message:
    """A message to a process. `step` is the number of the step that it is about. `details` is the whole message;
    `command_id` is that of its command."""

    event: str
    step: int | None = None
    reply: StepReply | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    command_id: str = ""


class MalformedMessageError(ValueError):
    """A message that a process cannot understand."""


def read_message(data: Any, command_id: str = "") -> Message:
    """Reads a message from a command's data. MalformedMessageError names what is wrong with it."""
    if not isinstance(data, Mapping):
        raise MalformedMessageError(f"a message to a process is an object, not {names.shown(data)}")
    event, step = data.get("event"), data.get("step")
    if event not in EVENTS:
        raise MalformedMessageError(f"event {names.shown(event)} is none of {', '.join(EVENTS)}")
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise MalformedMessageError(f"step {names.shown(step)} is no number")
    if step is None and event in ("reply", "wake", "undo"):
        raise MalformedMessageError(f"a {event} names no step")
    reply = _read_reply(data.get("reply")) if event == "reply" else None
    return Message(event, step, reply, data, command_id)


def _read_reply(reply: Any) -> StepReply:
    outcome = reply.get("outcome") if isinstance(reply, Mapping) else reply
    if not isinstance(reply, Mapping) or not isinstance(outcome, str) or outcome not in OUTCOMES:
        raise MalformedMessageError(f"outcome {names.shown(outcome)} is none of {', '.join(OUTCOMES)}")
    error = reply.get("error")
    return StepReply(outcome, reply.get("result"), error if isinstance(error, Mapping) else None)
