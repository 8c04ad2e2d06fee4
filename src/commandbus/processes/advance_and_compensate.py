"""Decides what a message does to a process. Sends and stores nothing.

`advance` is a generator: it yields `StepCall`s of the manager's methods, which may be sync or async, and
`SignalQuery`s. Finally it returns an `Advance`, which `flow/processes/move.py` writes. The rules:

- A reply must belong to an outstanding step. Any other reply is set aside with the reason.
- If a step fails or is canceled, or a deadline passes, the process is undone. First the outstanding steps are
  canceled and must end. Then the completed steps are undone one at a time, the last one first.
- A step that waits for a signal takes the oldest one that no other step has taken, also if it came early. A signal
  that no step waits for still moves the process (`touches`): a move that did not see the signal, and is about to
  wait for it, is then refused and done again.
- A compensation that completed is never sent again. If one cannot complete, the process ends FAILED, and a retry
  goes on with that compensation.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from commandbus.model.process import ProcessStatus, StepStatus
from commandbus.processes.manager import BaseProcessManager, ProcessView, StepReply, StepView
from commandbus.processes.messages import Message
from commandbus.processes.moves import Advance, Moves, StepCall, Talk, too_late
from commandbus.processes.waiting_steps import SignalQuery


def advance(
    manager: BaseProcessManager[Any], view: ProcessView[Any], message: Message, tx: Any
) -> Generator[StepCall | SignalQuery, Any, Advance]:
    """Decide what a message does. `view` is changed. Its state is already the manager's own object, not JSON."""
    made = Advance(view)
    handling = _Handling(manager, made, tx)
    if view.status.is_final and message.event != "undo":
        made.aside = f"the process is {view.status}, and that is final"
        return made
    yield from getattr(handling, message.event)(message)  # one of `messages.EVENTS`
    return made


class _Handling(Moves):
    """Handles one message."""

    __slots__ = ()

    def start(self, _: Message) -> Talk:
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
        reply = message.reply
        assert reply is not None  # noqa: S101 - read_message
        step = self._step(message.step)
        if step is None:
            self.made.aside = f"the process has sent no step {message.step}"
        elif step.status is not StepStatus.SENT:
            self.made.aside = (
                f"the reply to step {step.number} ({step.name}) was handled before: it is {step.status}"
            )
        else:
            yield from self._end(step, reply)

    def deadline(self, message: Message) -> Talk:
        view, number = self.view, message.step
        if number is None:
            if view.is_compensating:
                self.made.aside = "the deadline passed while the process was being undone"
                return
            view.failure = too_late("the process's deadline has passed")
            yield from self._turn_round()
            return
        step = self._step(number)
        if step is None or step.status is not StepStatus.SENT:
            self.made.aside = f"step {number} had ended before its deadline"
            return
        if step.kind == "signal":
            yield from self._wait_is_over(step, message)
            return
        if view.failure is None and step.undoes is None:
            text = f"the deadline of step {number} ({step.name}) has passed"
            view.failure = too_late(text) | {"step": step.name}
        self.made.cancels.append((step, f"the deadline of step {number} ({step.name}) has passed"))
        self._wait()  # the process may have been WAITING_FOR_TSQ

    def _wait_is_over(self, step: StepView, message: Message) -> Talk:
        """The deadline of a wait for a signal. A signal that is there counts, even if not handled."""
        yield from self._find_signal(step)
        if self.signals:
            yield from self._go_on(None)
        elif message.details.get("on_timeout") == "continue":
            yield from self._end(step, StepReply("SUCCESS", message.details.get("otherwise")))
        else:
            error = too_late(f"no signal {step.signal!r} came in time")
            yield from self._end(step, StepReply("FAILED", error=error))

    def wake(self, message: Message) -> Talk:
        step = self._step(message.step)
        if step is None or step.kind != "sleep" or step.status is not StepStatus.SENT:
            self.made.aside = f"step {message.step} does not sleep any more"
            return
        yield from self._end(step, StepReply("SUCCESS"))

    def signal(self, message: Message) -> Talk:
        view = self.view
        if any(step.kind == "signal" and step.command_id == message.command_id for step in view.steps):
            self.made.aside = "a step has taken the signal already"
            return
        if view.is_compensating or view.cancel is not None:
            self.made.aside = "the process is undone: no step will take the signal"
            return
        yield from self._find_signals()
        if self.signals:
            yield from self._go_on(None)
        else:
            self.made.touches = True

    def cancel(self, message: Message) -> Talk:
        """Somebody canceled the process, which waits for no command; or the parent that waits for it is undone."""
        view = self.view
        if view.is_compensating:
            self.made.aside = "the process is being undone already"
            return
        if view.cancel is None:
            view.cancel = {key: message.details.get(key) for key in ("by", "reason", "at")}
        if view.steps:
            yield from self._turn_round()
        else:
            yield from self._finish(ProcessStatus.CANCELED)

    def undo(self, message: Message) -> Talk:
        """The parent is undone: undo this process, which had completed. A compensation that was given up is sent
        again."""
        view, number = self.view, message.step
        assert number is not None  # noqa: S101 - read_message
        if view.parent_step is None:
            self.made.aside = "only a nested process can be undone"
            return
        if not view.status.is_final:
            if -number < view.parent_step < 0:
                view.parent_step = -number  # the parent asks again
                self._wait()
            else:
                self.made.aside = f"the process is {view.status}: only one that has ended can be undone"
            return
        view.parent_step = -number
        if view.status is ProcessStatus.COMPENSATED:
            return  # the parent is told again
        if not view.is_compensating:
            view.is_compensating = True
            text = f"{message.details.get('by')} is undone, and this nested process with it"
            view.failure = {"type": "ParentUndone", "code": "PARENT_UNDONE", "message": text}
            yield StepCall(self.manager.on_compensating, (view, self.tx))
        yield from self._undo()

    def retry(self, message: Message) -> Talk:
        """An operator retries a FAILED process: continue where it stopped. A second retry changes nothing."""
        view = self.view
        if view.is_compensating:
            yield from self._undo()
            return
        view.failure = None
        if not view.steps:
            yield from self.start(message)
            return
        if view.cancel is not None:
            yield from self._turn_round()
            return
        yield from self._find_signals()  # they may have come while the process was FAILED
        again = self._failed_steps()
        if again:
            yield from self._go_on([step.name for step in again])
        elif view.outstanding:
            yield from self._go_on(None)
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
