"""A process and whoever moves it, without a database.

`Desk` plays the router: it answers the engine's questions, keeps what was decided (through JSON, as the database
does), and refuses moves that the table of moves does not have.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

from commandbus import BaseProcessManager, Saga, StepCommand, parallel, step
from commandbus.model.process import MOVES, NESTED_MOVES, ProcessStatus
from commandbus.processes.advance_and_compensate import advance
from commandbus.processes.manager import ProcessView
from commandbus.processes.messages import Message, read_message
from commandbus.processes.moves import Advance
from commandbus.processes.waiting_steps import Signal, SignalQuery

HOOKS = ("on_started", "on_completed", "on_compensating", "on_compensated", "on_failed", "on_canceled")
TX = object()


@dataclass
class Harness:
    """One process and whoever moves it."""

    manager: BaseProcessManager[Any]
    data: Any = None
    hooks: list[str] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)  # what happened to which step, in order
    states: list[ProcessStatus] = field(default_factory=list)
    signals: list[tuple[str, Signal]] = field(default_factory=list)  # all that were sent, with their names

    def __post_init__(self) -> None:
        state = self.manager.dump_state(self.manager.create_state({} if self.data is None else self.data))
        self.view: ProcessView[Any] = ProcessView("p1", "t", ProcessStatus.PENDING, self.data, state)
        self.states.append(self.view.status)

    # --- messages -----------------------------------------------------------------------------------------------

    def start(self) -> Advance:
        return self.tell(Message("start"))

    def retry(self) -> Advance:
        """An operator's: the process is IN_PROGRESS until the message is handled."""
        assert self.view.status is ProcessStatus.FAILED
        self._move(ProcessStatus.IN_PROGRESS)
        return self.tell(Message("retry"))

    def deadline(self, number: int | None = None) -> Advance:
        return self.tell(Message("deadline", number))

    def reply(self, number: int, outcome: str = "SUCCESS", result: Any = None, error: Any = None) -> Advance:
        told = {"outcome": outcome, "result": result, "error": error}
        return self.tell(read_message({"event": "reply", "process": "p1", "step": number, "reply": told}))

    def answer(self, name: str, outcome: str = "SUCCESS", result: Any = None) -> Advance:
        """Reply to the outstanding step of this name."""
        return self.reply(next(one.number for one in self.view.outstanding if one.name == name), outcome, result)

    def send_signal(self, name: str, data: Any = None) -> Message:
        """The message of a signal, which the process may handle later."""
        row = len(self.signals) + 1
        self.signals.append((name, Signal(row, f"s{row}", data)))
        return Message("signal", details={"name": name}, command_id=f"s{row}")

    def signal(self, name: str, data: Any = None) -> Advance:
        return self.tell(self.send_signal(name, data))

    def wake(self, name: str = "sleep") -> Advance:
        return self.tell(Message("wake", next(one.number for one in self.view.outstanding if one.name == name)))

    def next_signal(self, asked: SignalQuery) -> Signal | None:
        """As processes/untaken_signals.sql, of which the first counts."""
        gone = {one.command_id for one in self.view.steps if one.kind == "signal"} | set(asked.taken)
        left = (one for name, one in self.signals if name == asked.name and one.command_id not in gone)
        return next(left, None)

    def request_cancel(self) -> None:
        self.view.cancel = {"by": "ann", "reason": None}

    def tell(self, message: Message) -> Advance:
        """Handle a message; what the engine decided is kept only if it changes anything."""
        made = self.look(message)
        if made.changes:
            self._keep(made)
        return made

    def look(self, message: Message) -> Advance:
        """What a message would do: the process stays as it is."""
        view = copy.deepcopy(self.view)
        view.state = self.manager.load_state(view.state)
        talk, answer = advance(self.manager, view, message, TX), None
        while True:
            try:
                asked = talk.send(answer)
            except StopIteration as stop:
                made: Advance = stop.value
                return made
            if isinstance(asked, SignalQuery):
                answer = self.next_signal(asked)
                continue
            if asked.function.__name__ in HOOKS:
                self.hooks.append(asked.function.__name__)
                assert asked.args == (view, TX)
            answer = asked.function(*asked.args)

    def _keep(self, made: Advance) -> None:
        view = copy.deepcopy(made.view)
        view.state = json.loads(json.dumps(self.manager.dump_state(view.state)))
        status, view.status = view.status, self.view.status
        self.view = view
        self._move(status)
        self.log += [("closed" if one.undoes is None else "undone", one.name) for one in made.closed]
        self.log += [("sent" if one.step.undoes is None else "undo", one.step.name) for one in made.sends]

    def _move(self, status: ProcessStatus) -> None:
        more = (
            NESTED_MOVES.get(self.view.status, frozenset()) if self.view.parent_step is not None else frozenset()
        )
        assert status in MOVES[self.view.status] | more, f"{self.view.status} → {status}"
        self.view.status = status
        self.states.append(status)

    # --- what is to be seen -------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        return self.view.status.value

    def sent(self) -> list[str]:
        """Names of outstanding steps; compensations with a minus."""
        return [("-" if one.undoes is not None else "") + one.name for one in self.view.outstanding]

    def drain(self, **outcomes: str) -> Harness:
        """Reply to whatever is outstanding, oldest first, until nothing is."""
        while self.view.outstanding:
            one = self.view.outstanding[0]
            key = ("undo_" if one.undoes is not None else "") + one.name
            self.reply(one.number, outcomes.pop(key, "SUCCESS"), {"by": one.name})
        return self


def order(**options: Any) -> Saga:
    return Saga(
        "order",
        step("reserve", "stock", undo="release"),
        step("charge", "billing", undo="refund"),
        step("ship", "shipping"),
        **options,
    )


def wide() -> Saga:
    return Saga(
        "wide",
        step("reserve", "stock", undo="release"),
        parallel(step("charge", "billing", undo="refund"), step("label", "shipping", undo="unlabel")),
        step("ship", "shipping"),
    )


class Plain(BaseProcessManager[dict[str, Any]]):
    """A manager whose methods are given one by one."""

    process_type = "plain"

    def __init__(self, **methods: Any) -> None:
        for name, method in methods.items():
            setattr(self, name, method)

    def first_step(self, state: Any) -> Any:
        return "a"

    def build_command(self, step: str, state: Any) -> Any:
        return StepCommand("orders", step)

    def next_step(self, step: str, reply: Any, state: Any) -> Any:
        return {"a": "b"}.get(step)

    def compensation(self, step: str, state: Any) -> Any:
        return StepCommand("orders", f"undo_{step}")
