"""Saga: a process in a few lines, for the common case.

    order = Saga(
        "order",
        step("reserve", "stock", undo="release"),
        step("charge", "billing", undo="refund"),
        step("ship", "shipping"),
    )
    handlers.register_process(order)

A step sends the command `command_type` (its name, unless given) to a domain; `undo` is the type of the command
that compensates it. The state is a dict: the data that the process was started with, and under each step's name
its result. Commands get the whole state as data, unless `data=` (a function of the state) builds something else.

`parallel(a, b, …)` runs its parts at once and goes on when all are done. `sequence(a, b, …)` is one part of
several steps. `branch(condition, then, otherwise)` takes one part or the other, by the state at that moment.
Parts that wait are in `saga_waits.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Literal, TypeAlias

from commandbus.errors import ConfigurationError, PermanentCommandError
from commandbus.model import names
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.json_values import Json, JsonValue
from commandbus.model.process import DEFAULT_DOMAIN, StepStatus
from commandbus.model.retry import OnExhausted, RetryPolicy, check_on_exhausted
from commandbus.processes.manager import BaseProcessManager, ProcessView, StepCommand, StepReply
from commandbus.processes.saga_waits import State, Wait
from commandbus.processes.waiting_steps import StepUndo, WaitingStep
from commandbus.quick_dataclass import dataclass

Data: TypeAlias = Callable[[State], JsonValue]


@dataclass(frozen=True, slots=True)
class Step:
    """One step; see `step`."""

    name: str
    domain: str
    command_type: str
    undo: str | None
    data: Data | None
    undo_data: Data | None
    options: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Chain:
    """Parts that follow each other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parts that run at once."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """One of two parts. The state keeps the decision under `name`."""

    name: str
    condition: Callable[[State], object] = field(compare=False)
    then: Part
    otherwise: Part


Part: TypeAlias = "Step | Wait | Chain | Parallel | Branch"


def step(
    name: str,
    domain: str,
    command_type: str | None = None,
    *,
    undo: str | None = None,
    data: Data | None = None,
    undo_data: Data | None = None,
    timeout: Duration | None = None,
    deadline: Duration | None = None,
    delay: Duration | None = None,
    max_attempts: int | None = None,
    headers: Mapping[str, JsonValue] | None = None,
    on_exhausted: OnExhausted | None = None,
) -> Step:
    """A step: the command that does it, and the one that undoes it, in the same domain.

    `data` and `undo_data` build the commands' data from the state. `timeout`, `max_attempts` and `on_exhausted`
    are those of the command. `deadline` is how long the step may take in all. `delay` is how long it waits first.
    """
    if on_exhausted is not None:
        check_on_exhausted(on_exhausted, ConfigurationError)
    for what, function in (("data", data), ("undo_data", undo_data)):
        if function is not None and not callable(function):
            raise ConfigurationError(f"{what} of step {name!r} must be a function of the state, not {function!r}")
    if undo is not None:
        names.check_type(undo)
    _check_durations(f"step {name!r}", timeout=timeout, deadline=deadline, delay=delay)
    options = {
        "timeout": timeout,
        "deadline": deadline,
        "delay": delay,
        "max_attempts": max_attempts,
        "headers": headers,
        "on_exhausted": on_exhausted,
    }
    return Step(
        names.check_type(name),
        names.check_domain(domain),
        names.check_type(name if command_type is None else command_type),
        undo,
        data,
        undo_data,
        options,
    )


def sequence(*parts: Part) -> Part:
    """Parts that follow each other."""
    return Chain(_checked(parts, "sequence"))


def parallel(*parts: Part) -> Part:
    """Parts that run at once; what follows waits for all of them."""
    return Parallel(_checked(parts, "parallel"))


def branch(
    condition: Callable[[State], object], then: Part, otherwise: Part | None = None, *, name: str | None = None
) -> Part:
    """One part if the condition holds for the state at that moment, otherwise the other (or nothing).

    The state keeps the decision under `name` (default: "branch" and the names of the steps of `then`).
    """
    if not callable(condition):
        raise ConfigurationError(f"the condition of a branch must be a function of the state, not {condition!r}")
    _checked((then,), "branch")
    other = Chain(()) if otherwise is None else _checked((otherwise,), "branch")[0]
    return Branch(name or "branch:" + _label(then), condition, then, other)


class Saga(BaseProcessManager[State]):
    """A process made of parts; see the module. Its options are those of `BaseProcessManager`."""

    def __init__(
        self,
        process_type: str,
        *parts: Part,
        domain: str = DEFAULT_DOMAIN,
        deadline: Duration | None = None,
        timeout: Duration | None = None,
        retry_policy: RetryPolicy | None = None,
        isolation: Literal["thread", "process"] = "thread",
    ) -> None:
        if not parts:
            raise ConfigurationError(f"saga {process_type!r} has no steps")
        _check_durations(f"saga {process_type!r}", deadline=deadline, timeout=timeout)
        self.process_type = process_type  # type: ignore[misc]
        self.domain = domain  # type: ignore[misc]
        self.deadline = deadline  # type: ignore[misc]
        self.timeout = timeout  # type: ignore[misc]
        self.retry_policy = retry_policy  # type: ignore[misc]
        self.isolation = isolation  # type: ignore[misc]
        self._whole = Chain(_checked(parts, f"saga {process_type!r}"))
        self._steps: dict[str, Step | Wait] = {}
        for one in _steps(self._whole):
            if one.name in self._steps:
                raise ConfigurationError(
                    f"saga {process_type!r} has two steps named {one.name!r}: name them (name=…)"
                )
            self._steps[one.name] = one
        ways: set[str] = set()
        for way in _branches(self._whole):
            if way.name in ways:
                raise ConfigurationError(
                    f"saga {process_type!r} has two branches named {way.name!r}: give them names of their own"
                )
            if way.name in self._steps:
                raise ConfigurationError(f"saga {process_type!r} has a branch and a step named {way.name!r}")
            ways.add(way.name)

    @property
    def steps(self) -> list[str]:
        """The names of all steps."""
        return list(self._steps)

    def create_state(self, data: Json) -> dict[str, Json]:
        """Returns the data of the start. Each step's result is added to it, under the step's name."""
        state = super().create_state(data)
        if taken := sorted(name for name in state.keys() & self._steps.keys() if self._keeps(name)):
            raise PermanentCommandError(
                f"saga {self.process_type!r} keeps the result of step {taken[0]!r} under that name: "
                f"rename that key of the data"
            )
        return state

    def first_step(self, state: State) -> Sequence[str]:
        """The steps that can begin."""
        return self._ready(self._whole, set(), set(), state)[0]

    def next_steps(
        self,
        process: ProcessView[State],
        step: str,  # noqa: ARG002
        reply: StepReply,  # noqa: ARG002
    ) -> Sequence[str]:
        """The steps that can begin now that one more step is done."""
        done = {one.name for one in process.steps if one.undoes is None and one.status is StepStatus.COMPLETED}
        sent = done | {one.name for one in process.outstanding}
        return self._ready(self._whole, done, sent, process.state)[0]

    def build_command(self, step: str, state: State) -> StepCommand | WaitingStep:
        """The step's command. Its data is the state, or the result of `data`."""
        one = self._steps[step]
        if isinstance(one, Wait):
            return one.build(state)
        data = dict(state) if one.data is None else one.data(state)
        return StepCommand(one.domain, one.command_type, data, **one.options)

    def update_state(self, step: str, reply: StepReply, state: State) -> None:
        """Keep a step's result under its name."""
        if reply.is_success and self._keeps(step):
            state[step] = reply.result

    def _keeps(self, step: str) -> bool:
        """Does the state keep the result of this step?"""
        one = self._steps.get(step)
        return not isinstance(one, Wait) or one.has_result

    def compensation(self, step: str, state: State) -> StepCommand | StepUndo | None:
        """The command that undoes a step, if it has one."""
        one = self._steps.get(step)
        if isinstance(one, Wait):
            return one.undo
        if one is None or one.undo is None:
            return None
        data = dict(state) if one.undo_data is None else one.undo_data(state)
        return StepCommand(one.domain, one.undo, data)

    def has_undo(self, step: str) -> bool | None:
        """Returns whether the step has an undo; None if a subclass decides that."""
        if type(self).compensation is not Saga.compensation:
            return None
        one = self._steps.get(step)
        return one is not None and one.undo is not None

    def _ready(self, part: Part, done: set[str], sent: set[str], state: State) -> tuple[list[str], bool]:
        """The steps of a part that can be sent now, and whether the part is done."""
        if isinstance(part, Step | Wait):
            return ([] if part.name in sent else [part.name]), part.name in done
        if isinstance(part, Branch):
            if part.name not in state:
                state[part.name] = bool(part.condition(state))
            return self._ready(part.then if state[part.name] else part.otherwise, done, sent, state)
        if isinstance(part, Parallel):
            found = [self._ready(one, done, sent, state) for one in part.parts]
            return [name for ready, _ in found for name in ready], all(is_done for _, is_done in found)
        for one in part.parts:
            ready, is_done = self._ready(one, done, sent, state)
            if not is_done:
                return ready, False
        return [], True


def _steps(part: Part) -> Iterator[Step | Wait]:
    if isinstance(part, Step | Wait):
        yield part
    elif isinstance(part, Branch):
        yield from _steps(part.then)
        yield from _steps(part.otherwise)
    else:
        for one in part.parts:
            yield from _steps(one)


def _label(part: Part) -> str:
    return part.name if isinstance(part, Step | Wait | Branch) else ",".join(_label(one) for one in part.parts)


def _branches(part: Part) -> Iterator[Branch]:
    if isinstance(part, Branch):
        yield part
        yield from _branches(part.then)
        yield from _branches(part.otherwise)
    elif not isinstance(part, Step | Wait):
        for one in part.parts:
            yield from _branches(one)


def _checked(parts: tuple[Part, ...], where: str) -> tuple[Part, ...]:
    for part in parts:
        if not isinstance(part, Step | Wait | Chain | Parallel | Branch):
            raise ConfigurationError(
                f"{where} is made of step(…), wait_for(…), sleep(…), nested(…), sequence(…), parallel(…) and "
                f"branch(…), not {names.shown(part)}"
            )
    return parts


def _check_durations(what: str, **durations: Duration | None) -> None:
    for name, value in durations.items():
        if value is not None:
            parse_seconds(value, name=f"{what}: {name}", error=ConfigurationError)
