"""Steps that send no command: a process waits for a signal, sleeps, or starts another process and awaits its end.

`build_command` of a manager returns one of these instead of a `StepCommand`. `saga_waits.py` has the short form.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from commandbus.errors import InvalidCommandError
from commandbus.model import names
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.json_values import JsonValue
from commandbus.quick_dataclass import dataclass

if TYPE_CHECKING:
    from commandbus.processes.manager import BaseProcessManager

OnTimeout: TypeAlias = Literal["fail", "continue"]
StepKind: TypeAlias = Literal["signal", "sleep", "process"]


@dataclass(slots=True)
class StepSignal:
    """The step waits for a signal (`bus.signal`), whose data is its result. The oldest signal of this name that no
    other step has taken counts, also if it came before the step began.

    `deadline` is how long it waits. Then the step fails, and the process compensates. With `on_timeout="continue"`
    the step completes instead, and `otherwise` is its result.
    """

    name: str
    deadline: Duration | None = None
    on_timeout: OnTimeout = "fail"
    otherwise: JsonValue = None


@dataclass(slots=True)
class StepSleep:
    """The step completes after a time, or at an instant (with a time zone)."""

    duration: Duration | None = None
    until: datetime | None = None


@dataclass(slots=True)
class StepProcess:
    """The step starts a nested process and waits for its end. Its result is the state of that process.

    `process` is a manager, or the name of a process type. `process_id` is made from the id of this process and the
    name of the step, unless it is given. `deadline` is how long the nested process may take in all.
    """

    process: BaseProcessManager[Any] | str
    data: JsonValue = None
    process_id: str | None = None
    domain: str | None = None
    deadline: Duration | None = None


@dataclass(slots=True)
class StepUndo:
    """What `compensation` returns for a step that completed a nested process: the nested process undoes its own
    completed steps, the last one first."""


WaitingStep: TypeAlias = StepSignal | StepSleep | StepProcess


@dataclass(frozen=True, slots=True)
class SignalQuery:
    """The engine's question: the oldest signal of this name that no step has taken. `taken` are the command_ids of
    signals that steps take in this very move."""

    name: str
    taken: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal that a process got. It is a message to the process: `row` and `command_id` are those of the
    message."""

    row: int
    command_id: str
    data: Any


def kind_of(step: WaitingStep | StepUndo) -> StepKind:
    """The kind of a step, as its row has it."""
    if isinstance(step, StepSignal):
        return "signal"
    return "sleep" if isinstance(step, StepSleep) else "process"


def check(step: WaitingStep | StepUndo) -> None:
    """Refuse what cannot be waited for, with an InvalidCommandError or a ValueError that names the value."""
    if isinstance(step, StepSignal):
        check_signal(step.name, step.deadline, step.on_timeout)
    elif isinstance(step, StepSleep):
        check_sleep(step.duration, step.until)
    elif isinstance(step, StepProcess) and step.deadline is not None:
        parse_seconds(step.deadline, name="deadline", error=InvalidCommandError)


def check_signal(name: object, deadline: Duration | None, on_timeout: object) -> None:
    """Check the arguments of a wait for a signal."""
    names.check_id(name, "signal")
    if deadline is not None:
        parse_seconds(deadline, name="deadline", error=InvalidCommandError)
    if on_timeout not in ("fail", "continue"):
        raise InvalidCommandError(f'on_timeout {names.shown(on_timeout)} is neither "fail" nor "continue"')


def check_sleep(duration: Duration | None, until: object) -> None:
    """Check the arguments of a sleep."""
    if (duration is None) == (until is None):
        raise InvalidCommandError("a sleep needs a duration or until=, and not both")
    if duration is not None:
        parse_seconds(duration, name="duration of a sleep", error=InvalidCommandError)
    elif not isinstance(until, datetime) or until.tzinfo is None:
        raise InvalidCommandError(f"until {names.shown(until)} is not a datetime with a time zone")
