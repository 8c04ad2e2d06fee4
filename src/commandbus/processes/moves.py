"""The moves of a process: steps begin, end, are canceled, are undone. `advance_and_compensate.py` decides which.

Nothing is sent or stored here. The moves collect what is to be written in an `Advance`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, TypeAlias

from commandbus.errors import InvalidCommandError, PermanentCommandError
from commandbus.model import names
from commandbus.model.process import ProcessStatus, StepStatus
from commandbus.processes.manager import BaseProcessManager, ProcessView, StepCommand, StepReply, StepView
from commandbus.processes.messages import OUTCOMES
from commandbus.processes.waiting_steps import (
    Signal,
    SignalQuery,
    StepSignal,
    StepUndo,
    WaitingStep,
    check,
    kind_of,
)
from commandbus.quick_dataclass import dataclass


class StepCall(NamedTuple):
    """A call of one of the manager's methods."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


Talk: TypeAlias = "Generator[StepCall | SignalQuery, Any, None]"


@dataclass(frozen=True, slots=True)
class Sending:
    """A step to be sent, or to begin."""

    step: StepView
    command: StepCommand | WaitingStep | StepUndo


@dataclass(slots=True)
class Advance:
    """What is to be written about a process."""

    view: ProcessView[Any]
    sends: list[Sending] = field(default_factory=list)
    closed: list[StepView] = field(default_factory=list)
    cancels: list[tuple[StepView, str]] = field(default_factory=list)  # steps to cancel, and why
    taken: dict[int, int] = field(default_factory=dict)  # numbers of steps, and the rows of the signals they took
    touches: bool = False  # nothing changes but the version
    aside: str | None = None  # if the message moved nothing: why

    @property
    def changes(self) -> bool:
        """Is there anything to write, other than the version?"""
        return self.aside is None and not self.touches


@dataclass(slots=True)
class Moves:
    """The moves of one message."""

    manager: BaseProcessManager[Any]
    made: Advance
    tx: Any
    signals: deque[tuple[StepView, Signal]] = field(default_factory=deque)  # found for steps, and not taken yet

    @property
    def view(self) -> ProcessView[Any]:
        return self.made.view

    def _step(self, number: int | None) -> StepView | None:
        return next((step for step in self.view.steps if step.number == number), None)

    def _wait(self) -> None:
        """Only the status changes: the process waits for its outstanding steps."""
        view = self.view
        view.status = ProcessStatus.COMPENSATING if view.is_compensating else ProcessStatus.WAITING_FOR_REPLY

    def _end(self, step: StepView, reply: StepReply) -> Talk:
        """An outstanding step has ended: go on, or undo the process."""
        view = self.view
        self._close(step, reply)
        if step.undoes is not None:
            if reply.is_success:
                yield from self._undo()
            else:
                what = f"the compensation of step {step.undoes} ({step.name}) {_ended(reply)}"
                yield from self._fail(what, step, reply)
            return
        yield from self._update_state(step, reply)
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

    def _update_state(self, step: StepView, reply: StepReply) -> Talk:
        returned = yield StepCall(self.manager.update_state, (step.name, reply, self.view.state))
        if returned is not None:
            self.view.state = returned

    def _go_on(self, following: object) -> Talk:
        """Send the next steps, and take the signals that are there already. If there are no steps, and none is
        outstanding, the process is complete."""
        yield from self._send_all(following)
        while self.signals:
            step, signal = self.signals.popleft()
            reply = self._take(step, signal)
            yield from self._update_state(step, reply)
            following = yield StepCall(self.manager.next_steps, (self.view, step.name, reply))
            yield from self._send_all(following)
        if self.view.outstanding:
            self.view.status = ProcessStatus.WAITING_FOR_REPLY
        else:
            yield from self._finish(ProcessStatus.COMPLETED)

    def _send_all(self, following: object) -> Talk:
        for name in _step_names(following, self.manager):
            command = yield StepCall(self.manager.build_command, (name, self.view.state))
            has_undo = yield StepCall(self.manager.has_undo, (name,))
            step = self._send(name, command)
            step.has_undo = has_undo
            if step.kind == "signal":
                yield from self._find_signal(step)

    def _find_signals(self) -> Talk:
        """Find signals for the steps that wait for one."""
        for step in self.view.outstanding:
            if step.kind == "signal":
                yield from self._find_signal(step)

    def _find_signal(self, step: StepView) -> Talk:
        taken = [one.command_id for one in self.view.steps if one.number in self.made.taken]
        taken += [signal.command_id for _, signal in self.signals]
        signal = yield SignalQuery(step.signal or "", tuple(taken))
        if signal is not None:
            self.signals.append((step, signal))

    def _take(self, step: StepView, signal: Signal) -> StepReply:
        reply = StepReply("SUCCESS", signal.data)
        self._close(step, reply)
        step.command_id = signal.command_id
        self.made.taken[step.number] = signal.row
        return reply

    def _turn_round(self) -> Talk:
        """Begin to undo the process. First its outstanding steps are canceled and must end."""
        view = self.view
        if not view.is_compensating:
            view.is_compensating = True
            yield StepCall(self.manager.on_compensating, (view, self.tx))
            why = view.failure["message"] if view.failure else _canceled(view.cancel)
            for step in view.outstanding:
                yield from self._cancel(step, f"the process is undone: {why}")
        yield from self._undo()

    def _cancel(self, step: StepView, why: str) -> Talk:
        """Cancel an outstanding step. A wait for a signal, and a sleep, end at once."""
        if step.kind in (None, "process"):
            self.made.cancels.append((step, why))
            return
        reply = StepReply("CANCELED", error={"type": "ProcessUndone", "code": "CANCELED", "message": why})
        self._close(step, reply)
        yield from self._update_state(step, reply)

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
        elif undone - {None} or (view.parent_step or 0) < 0:
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

    def _send(self, name: str, command: object, *, undoes: int | None = None) -> StepView:
        step = StepView(len(self.view.steps) + 1, name, undoes)
        if isinstance(command, StepCommand):
            self.made.sends.append(Sending(step, command))
        else:
            waiting = self._checked(step, command)
            self.made.sends.append(Sending(step, waiting))
            step.kind = kind_of(waiting)
            step.signal = waiting.name if isinstance(waiting, StepSignal) else None
        self.view.steps.append(step)
        return step

    def _checked(self, step: StepView, command: object) -> WaitingStep | StepUndo:
        what = "build_command" if step.undoes is None else "compensation"
        where = f"{type(self.manager).__name__}.{what}({step.name!r})"
        if isinstance(command, StepUndo) and step.undoes is not None:
            undone = self._step(step.undoes)
            if undone is None or undone.kind != "process":
                text = f"{where} returned StepUndo(), but step {step.undoes} was no nested process"
                raise PermanentCommandError(text, code="INVALID_STEP")
            return command
        if isinstance(command, WaitingStep) and step.undoes is None:
            try:
                check(command)
            except ValueError as error:
                raise PermanentCommandError(f"{where}: {error}", code="INVALID_STEP") from None
            return command
        also = ", StepSignal, StepSleep or StepProcess" if step.undoes is None else " or StepUndo"
        text = f"{where} must return a StepCommand{also}, not {names.shown(command)}"
        raise PermanentCommandError(text, code="INVALID_STEP")

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


def too_late(text: str) -> dict[str, Any]:
    return {"type": "DeadlineExceeded", "code": "DEADLINE_EXCEEDED", "message": text}
