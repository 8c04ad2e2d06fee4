"""Decides what a message does to a process. Sends and stores nothing.

`advance` is a generator: it yields `StepCall`s of the manager's methods, which may be sync or async, and finally
returns an `Advance`, which `flow/processes/move.py` writes. The rules:

- A reply must belong to an outstanding step. Any other reply is set aside with the reason.
- If a step fails or is canceled, or a deadline passes, the process is undone. First the outstanding steps are
  canceled and must end. Then the completed steps are undone one at a time, the last one first.
- A compensation that completed is never sent again. If one cannot complete, the process ends FAILED, and a retry
  goes on with that compensation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, TypeAlias

from commandbus.errors import InvalidCommandError, PermanentCommandError
from commandbus.model import names
from commandbus.model.process import ProcessStatus, StepStatus
from commandbus.processes.manager import BaseProcessManager, ProcessView, StepCommand, StepReply, StepView
from commandbus.quick_dataclass import dataclass

OUTCOMES = {
    "SUCCESS": StepStatus.COMPLETED,
    "FAILED": StepStatus.FAILED,
    "CANCELED": StepStatus.CANCELED,
}


class StepCall(NamedTuple):
    """A call of one of the manager's methods."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


Talk: TypeAlias = "Generator[StepCall, Any, None]"


@dataclass(frozen=True, slots=True)
class Message:
    """A message to a process: start, reply of a step, deadline (of a step, or of the process), or retry."""

    event: str
    step: int | None = None
    reply: StepReply | None = None


class MalformedMessageError(ValueError):
    """A message that a process cannot understand."""


@dataclass(frozen=True, slots=True)
class Sending:
    """A step to be sent."""

    step: StepView
    command: StepCommand


@dataclass(slots=True)
class Advance:
    """What is to be written about a process."""

    view: ProcessView[Any]
    sends: list[Sending] = field(default_factory=list)
    closed: list[StepView] = field(default_factory=list)
    cancels: list[tuple[StepView, str]] = field(default_factory=list)  # steps to cancel, and why
    aside: str | None = None  # if the message moved nothing: why

    @property
    def changes(self) -> bool:
        """Is there anything to write?"""
        return self.aside is None


def read_message(data: Any) -> Message:
    """Reads a message from a command's data. MalformedMessageError names what is wrong with it."""
    if not isinstance(data, Mapping):
        raise MalformedMessageError(f"a message to a process is an object, not {names.shown(data)}")
    event, step, reply = data.get("event"), data.get("step"), data.get("reply")
    if event not in ("start", "reply", "deadline", "retry"):
        raise MalformedMessageError(f"event {names.shown(event)} is none of start, reply, deadline, retry")
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise MalformedMessageError(f"step {names.shown(step)} is no number")
    if event != "reply":
        return Message(event, step)
    if step is None:
        raise MalformedMessageError("a reply names no step")
    outcome = reply.get("outcome") if isinstance(reply, Mapping) else reply
    if not isinstance(reply, Mapping) or not isinstance(outcome, str) or outcome not in OUTCOMES:
        raise MalformedMessageError(f"outcome {names.shown(outcome)} is none of {', '.join(OUTCOMES)}")
    error = reply.get("error")
    told = StepReply(outcome, reply.get("result"), error if isinstance(error, Mapping) else None)
    return Message(event, step, told)


def advance(
    manager: BaseProcessManager[Any], view: ProcessView[Any], message: Message, tx: Any
) -> Generator[StepCall, Any, Advance]:
    """Decide what a message does. `view` is changed. Its state is already the manager's own object, not JSON."""
    made = Advance(view)
    step = _Step(manager, made, tx)
    if view.status.is_final:
        made.aside = f"the process is {view.status}, and that is final"
    elif message.event == "start":
        yield from step.start()
    elif message.event == "retry":
        yield from step.retry()
    elif message.event == "deadline":
        yield from step.deadline(message.step)
    else:
        yield from step.reply(message)
    return made


@dataclass(slots=True)
class _Step:
    """Handles one message."""

    manager: BaseProcessManager[Any]
    made: Advance
    tx: Any

    @property
    def view(self) -> ProcessView[Any]:
        return self.made.view

    # --- messages -----------------------------------------------------------------------------------------------

    def start(self) -> Talk:
        view = self.view
        if view.steps or view.is_compensating:
            self.made.aside = "the process has been started already"
            return
        if view.cancel is not None:
            yield from self._finish(ProcessStatus.CANCELED)
            return
        yield StepCall(self.manager.on_started, (view, self.tx))
        first = yield StepCall(self.manager.first_step, (view.state,))
        yield from self._go_on(first)

    def reply(self, message: Message) -> Talk:
        view, reply = self.view, message.reply
        assert reply is not None  # noqa: S101 - read_message
        step = next((step for step in view.steps if step.number == message.step), None)
        if step is None:
            self.made.aside = f"the process has sent no step {message.step}"
            return
        if step.status is not StepStatus.SENT:
            self.made.aside = (
                f"the reply to step {step.number} ({step.name}) was handled before: it is {step.status}"
            )
            return
        self._close(step, reply)
        if step.undoes is not None:
            if reply.is_success:
                yield from self._undo()
            else:
                what = f"the compensation of step {step.undoes} ({step.name}) {_ended(reply)}"
                yield from self._fail(what, step, reply)
            return
        returned = yield StepCall(self.manager.update_state, (step.name, reply, view.state))
        if returned is not None:
            view.state = returned
        if not reply.is_success:
            if view.failure is None and view.cancel is None:
                view.failure = _failure(f"step {step.number} ({step.name}) {_ended(reply)}", step, reply)
            yield from self._turn_round()
        elif view.is_compensating or view.cancel is not None:
            yield from self._turn_round()
        else:
            view.failure = None  # the deadline had passed, but the step ended within its grace
            following = yield StepCall(self.manager.next_steps, (view, step.name, reply))
            yield from self._go_on(following)

    def deadline(self, number: int | None) -> Talk:
        view = self.view
        if number is None:
            if view.is_compensating:
                self.made.aside = "the deadline passed while the process was being undone"
                return
            view.failure = {
                "type": "DeadlineExceeded",
                "code": "DEADLINE_EXCEEDED",
                "message": "the process's deadline has passed",
            }
            yield from self._turn_round()
            return
        step = next((step for step in view.steps if step.number == number), None)
        if step is None or step.status is not StepStatus.SENT:
            self.made.aside = f"step {number} had ended before its deadline"
            return
        if view.failure is None and step.undoes is None:
            view.failure = {
                "type": "DeadlineExceeded",
                "code": "DEADLINE_EXCEEDED",
                "message": f"the deadline of step {number} ({step.name}) has passed",
                "step": step.name,
            }
        self.made.cancels.append((step, f"the deadline of step {number} ({step.name}) has passed"))
        self._wait()  # the process may have been WAITING_FOR_TSQ

    def retry(self) -> Talk:
        """An operator retries a FAILED process: continue where it stopped. A second retry changes nothing."""
        view = self.view
        if view.is_compensating:
            yield from self._undo()
            return
        view.failure = None
        if not view.steps:
            yield from self.start()
            return
        if view.cancel is not None:
            yield from self._turn_round()
            return
        again = self._failed_steps()
        if again:
            yield from self._go_on([step.name for step in again])
        elif view.outstanding:
            self._wait()
        else:
            last = view.done()[-1]
            reply = StepReply("SUCCESS", last.result)
            following = yield StepCall(self.manager.next_steps, (view, last.name, reply))
            yield from self._go_on(following)

    def _failed_steps(self) -> list[StepView]:
        """Steps that did not complete, and were not sent again later."""
        view = self.view
        failed = [
            step
            for step in view.steps
            if step.undoes is None and step.status in (StepStatus.FAILED, StepStatus.CANCELED)
        ]
        return [
            step
            for step in failed
            if not any(other.name == step.name and other.number > step.number for other in view.steps)
        ]

    # --- moves --------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Only the status changes: the process waits for its outstanding steps."""
        view = self.view
        view.status = ProcessStatus.COMPENSATING if view.is_compensating else ProcessStatus.WAITING_FOR_REPLY

    def _go_on(self, following: object) -> Talk:
        """Send the next steps. If there are none, and no step is outstanding, the process is complete."""
        for name in _step_names(following, self.manager):
            command = yield StepCall(self.manager.build_command, (name, self.view.state))
            self._send(name, command)
        if self.view.outstanding:
            self.view.status = ProcessStatus.WAITING_FOR_REPLY
        else:
            yield from self._finish(ProcessStatus.COMPLETED)

    def _turn_round(self) -> Talk:
        """Begin to undo the process. First its outstanding steps are canceled and must end."""
        view = self.view
        if not view.is_compensating:
            view.is_compensating = True
            yield StepCall(self.manager.on_compensating, (view, self.tx))
            why = view.failure["message"] if view.failure else _canceled(view.cancel)
            self.made.cancels += [(step, f"the process is undone: {why}") for step in view.outstanding]
        yield from self._undo()

    def _undo(self) -> Talk:
        """If no step is outstanding, undo the last step that has not been undone yet."""
        view = self.view
        view.status = ProcessStatus.COMPENSATING
        if view.outstanding:
            return
        undone = {step.undoes for step in view.steps if step.status is StepStatus.COMPLETED}
        for step in reversed(view.done()):
            if step.number in undone:
                continue
            command = yield StepCall(self.manager.compensation, (step.name, view.state))
            if command is not None:
                self._send(step.name, command, undoes=step.number)
                return
        if view.cancel is not None:
            yield from self._finish(ProcessStatus.CANCELED)
        elif undone - {None}:
            yield from self._finish(ProcessStatus.COMPENSATED)
        else:
            view.is_compensating = False  # there was nothing to undo: a retry can continue from the failed step
            yield from self._finish(ProcessStatus.FAILED)

    def _fail(self, text: str, step: StepView, reply: StepReply) -> Talk:
        self.view.failure = _failure(text, step, reply)
        yield from self._finish(ProcessStatus.FAILED)

    def _finish(self, status: ProcessStatus) -> Talk:
        self.view.status = status
        hook = {
            ProcessStatus.COMPLETED: self.manager.on_completed,
            ProcessStatus.COMPENSATED: self.manager.on_compensated,
            ProcessStatus.FAILED: self.manager.on_failed,
            ProcessStatus.CANCELED: self.manager.on_canceled,
        }[status]
        yield StepCall(hook, (self.view, self.tx))

    def _send(self, name: str, command: object, *, undoes: int | None = None) -> None:
        if not isinstance(command, StepCommand):
            what = "build_command" if undoes is None else "compensation"
            raise PermanentCommandError(
                f"{type(self.manager).__name__}.{what}({name!r}) must return a StepCommand, "
                f"not {names.shown(command)}",
                code="INVALID_STEP",
            )
        step = StepView(len(self.view.steps) + 1, name, undoes)
        self.view.steps.append(step)
        self.made.sends.append(Sending(step, command))

    def _close(self, step: StepView, reply: StepReply) -> None:
        step.status = OUTCOMES[reply.outcome]
        step.closed = 1 + sum(other.closed is not None for other in self.view.steps)
        step.result = reply.result
        step.error = reply.error
        self.made.closed.append(step)


def _step_names(following: object, manager: BaseProcessManager[Any]) -> list[str]:
    """The names of steps: one, several, or none."""
    if following is None:
        return []
    found = [following] if isinstance(following, str) else following
    try:
        if isinstance(found, Sequence):
            return [names.check_type(name) for name in found]
    except InvalidCommandError:
        pass
    raise PermanentCommandError(
        f"{type(manager).__name__} returned {names.shown(following)} as the next step: a step's name is text of 1 "
        f"to 200 characters without control characters; for several steps return a list",
        code="INVALID_STEP",
    )


def _failure(text: str, step: StepView, reply: StepReply) -> dict[str, Any]:
    error = reply.error or {}
    return {
        "type": error.get("type", reply.outcome),
        "code": error.get("code", reply.outcome),
        "message": text,
        "step": step.name,
    }


def _ended(reply: StepReply) -> str:
    how = "failed" if reply.outcome == "FAILED" else "was canceled"
    message = (reply.error or {}).get("message")
    return f"{how}: {message}" if message else how


def _canceled(cancel: Mapping[str, Any] | None) -> str:
    return f"canceled by {cancel.get('by')}" if cancel else "canceled"
