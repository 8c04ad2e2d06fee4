"""Parts of a saga that wait: `wait_for` a signal, `sleep`, and `nested` processes.

order = Saga(
    "order",
    step("reserve", "stock", undo="release"),
    wait_for("approval", deadline="2d"),       # bus.signal("processes", "order-17", "approval", {"by": "ann"})
    nested("delivery", delivery),              # another saga, which is undone with this one
    sleep("30d"),
    step("ask_for_a_review", "mail"),
)
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeAlias

from commandbus.errors import ConfigurationError, InvalidCommandError
from commandbus.model import names, payload
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.json_values import Json, JsonValue
from commandbus.processes.manager import BaseProcessManager, check_manager
from commandbus.processes.waiting_steps import (
    OnTimeout,
    StepProcess,
    StepSignal,
    StepSleep,
    StepUndo,
    WaitingStep,
    check_signal,
    check_sleep,
)
from commandbus.quick_dataclass import dataclass

State: TypeAlias = dict[str, Json]


@dataclass(frozen=True, slots=True)
class Wait:
    """A part that waits. `build` makes its step from the state. Sleeps have no result."""

    name: str
    build: Callable[[dict[str, Json]], WaitingStep]
    has_result: bool = True
    undo: StepUndo | None = None


def wait_for(
    signal: str,
    *,
    deadline: Duration | None = None,
    on_timeout: OnTimeout = "fail",
    otherwise: JsonValue = None,
    name: str | None = None,
) -> Wait:
    """Wait for a signal: `bus.signal(domain, process_id, signal, data)`. The state keeps its data under `name`
    (default: the name of the signal).

    `deadline` is how long to wait. Then the step fails, and the process is undone. With `on_timeout="continue"`
    the process goes on instead, and the state has `otherwise` under `name`.
    """
    try:
        check_signal(signal, deadline, on_timeout)
        payload.dump(otherwise, what="otherwise")
    except ValueError as error:
        raise ConfigurationError(f"wait_for({signal!r}): {error}") from None
    if otherwise is not None and on_timeout != "continue":
        raise ConfigurationError(f'wait_for({signal!r}): otherwise= needs on_timeout="continue"')
    waiting = StepSignal(signal, deadline, on_timeout, otherwise)
    return Wait(_name(signal if name is None else name), lambda _: waiting)


def sleep(
    duration: Duration | Callable[[State], Duration] | None = None,
    *,
    until: datetime | Callable[[State], datetime] | None = None,
    name: str = "sleep",
) -> Wait:
    """Wait for a time, or until an instant. Both may be functions of the state. Without a worker it takes longer.

    A saga with several sleeps must name them, because a process may outlive a release that adds one.
    """
    if (duration is None) == (until is None):
        raise ConfigurationError("sleep needs a duration or until=, and not both")
    if not callable(duration) and not callable(until):
        try:
            check_sleep(duration, until)
        except InvalidCommandError as error:
            raise ConfigurationError(str(error)) from None

    def build(state: State) -> StepSleep:
        return StepSleep(
            duration(state) if callable(duration) else duration, until(state) if callable(until) else until
        )

    return Wait(_name(name), build, has_result=False)


def nested(
    name: str,
    process: BaseProcessManager[Any] | str,
    *,
    data: Callable[[State], JsonValue] | None = None,
    domain: str | None = None,
    deadline: Duration | None = None,
    undo: bool = True,
) -> Wait:
    """Start another process and wait for its end. The state keeps the state of that process under `name`.

    `process` is a manager, or the name of a process type. `data` builds its data from the state; by default it is
    the whole state. `deadline` is how long it may take in all. If it does not complete, the step fails. If this
    process is undone later, the nested one undoes its completed steps, unless `undo=False`.
    """
    if not isinstance(process, str):
        check_manager(process)
    else:
        names.check_type(process)
    if domain is not None:
        names.check_domain(domain)
    if data is not None and not callable(data):
        raise ConfigurationError(f"data of nested({name!r}) must be a function of the state, not {data!r}")
    if deadline is not None:
        parse_seconds(deadline, name=f"nested({name!r}): deadline", error=ConfigurationError)

    def build(state: State) -> StepProcess:
        return StepProcess(process, dict(state) if data is None else data(state), domain=domain, deadline=deadline)

    return Wait(_name(name), build, undo=StepUndo() if undo else None)


def _name(name: object) -> str:
    return names.check_type(name)
