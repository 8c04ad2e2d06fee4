"""BaseProcessManager: the class that users write to define a process.

    class OrderProcess(BaseProcessManager[OrderState]):
        process_type = "order"
        state_class = OrderState

        def first_step(self, state): return "reserve"
        def build_command(self, step, state): return StepCommand("stock", step, {"order": state.order_id})
        def update_state(self, step, reply, state): state.done.append(step)
        def next_step(self, step, reply, state): return {"reserve": "charge", "charge": "ship"}.get(step)
        def compensation(self, step, state): ...

A worker calls its methods inside the transaction that moves the process, so they should do nothing slow. They may
be `def` or `async def`. They may run more than once per message, so anything they do outside the transaction must
be idempotent. `saga.py` is the short form for the common case.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import datetime
from typing import Any, ClassVar, Generic, Literal, Protocol, TypedDict, TypeVar, Unpack

from commandbus.errors import ConfigurationError, InvalidCommandError, PermanentCommandError
from commandbus.model import names, payload
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.json_values import Json, JsonValue
from commandbus.model.process import DEFAULT_DOMAIN, NewProcess, ProcessStatus, StepStatus
from commandbus.model.retry import OnExhausted, RetryPolicy
from commandbus.processes.waiting_steps import StepKind, StepUndo, WaitingStep
from commandbus.quick_dataclass import dataclass

S = TypeVar("S")
R = TypeVar("R", covariant=True)


@dataclass(slots=True)
class StepCommand:
    """The command of a step. `deadline`: how long the step may take in all, including its retries and its time in
    the troubleshooting queue. After that the step is canceled, and the process compensates. `on_exhausted="fail"`:
    if its attempts are used up, the step has failed, and the process compensates, instead of waiting for a person.
    """

    domain: str
    command_type: str
    data: JsonValue = None
    command_id: str | None = None
    max_attempts: int | None = None
    delay: Duration | None = None
    headers: Mapping[str, JsonValue] | None = None
    timeout: Duration | None = None
    deadline: Duration | None = None
    on_exhausted: OnExhausted | None = None


@dataclass(frozen=True, slots=True)
class StepReply:
    """How a step ended: SUCCESS with a result; FAILED or CANCELED with an error (`type`, `code`, `message`)."""

    outcome: str
    result: Json = None
    error: Mapping[str, Json] | None = None

    @property
    def is_success(self) -> bool:
        """Did its command complete?"""
        return self.outcome == "SUCCESS"


@dataclass(slots=True)
class StepView:
    """A step that was sent, as the process's code sees it. `closed` numbers the replies in the order in which they
    were handled. `undoes` is the number of the step that it compensates. `kind` is None for a command. `signal` is
    the name of the signal that it waits for. `has_undo` is set when the step is sent."""

    number: int
    name: str
    undoes: int | None = None
    status: StepStatus = StepStatus.SENT
    closed: int | None = None
    result: Json = None
    error: Mapping[str, Json] | None = None
    domain: str = ""
    command_id: str = ""
    timer: int | None = None
    kind: StepKind | None = None
    signal: str | None = None
    has_undo: bool | None = None


@dataclass(slots=True)
class ProcessView(Generic[S]):
    """A process, as its code sees it. `parent_step` is None unless it is a nested process. It is the number of the
    step of the parent that waits for it; negative if that step is the compensation that undoes it."""

    process_id: str
    process_type: str
    status: ProcessStatus
    data: Json
    state: S
    is_compensating: bool = False
    cancel: Mapping[str, Json] | None = None
    failure: Mapping[str, Json] | None = None
    created_at: datetime | None = None
    deadline_at: datetime | None = None
    steps: list[StepView] = field(default_factory=list)
    parent_step: int | None = None

    @property
    def outstanding(self) -> list[StepView]:
        """Steps that have no reply yet."""
        return [step for step in self.steps if step.status is StepStatus.SENT]

    def done(self) -> list[StepView]:
        """Steps that completed, in the order of their replies, without compensations."""
        found = [step for step in self.steps if step.undoes is None and step.status is StepStatus.COMPLETED]
        return sorted(found, key=lambda step: step.closed or 0)

    def result_of(self, name: str) -> Json:
        """The result of the last completed step with this name; None if there is none."""
        return next((step.result for step in reversed(self.done()) if step.name == name), None)


class StartOptions(TypedDict, total=False):
    """The options of `bus.start_process`, each by its name."""

    process_id: str | None
    deadline: Duration | None
    reply_to: str | None
    correlation_id: str | None
    domain: str | None
    conn: object


class StartsProcesses(Protocol[R]):
    """A bus: CommandBus returns a StartedProcess, AsyncCommandBus an awaitable of one."""

    def start_process(
        self, manager: BaseProcessManager[Any] | str, data: object = None, **options: Unpack[StartOptions]
    ) -> R:
        """Start a process."""


class BaseProcessManager(Generic[S]):
    """Defines the processes of one type. The module's docstring shows the methods; all but three have a default.

    Messages to its processes wait in the queue of `domain`: a worker of that domain runs this code. `deadline` is
    how long a process may take in all, unless its start sets another. `timeout`, `retry_policy` and `isolation`
    hold for the handling of one message, as for any handler.
    """

    process_type: ClassVar[str] = ""
    domain: ClassVar[str] = DEFAULT_DOMAIN
    state_class: ClassVar[Any] = dict
    deadline: ClassVar[Duration | None] = None
    timeout: ClassVar[Duration | None] = None
    retry_policy: ClassVar[RetryPolicy | None] = None
    isolation: ClassVar[Literal["thread", "process"]] = "thread"

    # --- what a process does ------------------------------------------------------------------------------------

    def first_step(self, state: S) -> str | Sequence[str] | None:
        """Returns the name of the first step, or several names: these steps are sent together. None completes the
        process."""
        raise NotImplementedError(f"{type(self).__name__}.first_step")

    def build_command(self, step: str, state: S) -> StepCommand | WaitingStep:
        """The command of a step. A step without a command is a StepSignal (it waits for a signal), a StepSleep, or
        a StepProcess (it starts a nested process)."""
        raise NotImplementedError(f"{type(self).__name__}.build_command")

    def update_state(self, step: str, reply: StepReply, state: S) -> S | None:
        """Put a step's reply into the state: change the state, or return a new one. Called for every reply."""
        return None

    def next_step(self, step: str, reply: StepReply, state: S) -> str | Sequence[str] | None:
        """Returns what follows a completed step; None: nothing. For steps that were sent together, it is called
        only once, after the last of them."""
        raise NotImplementedError(f"{type(self).__name__}.next_step")

    def next_steps(self, process: ProcessView[S], step: str, reply: StepReply) -> str | Sequence[str] | None:
        """Returns what to send now; called after each completed step. By default it waits for all steps that were
        sent together, and then returns `next_step`. The process is complete when no step is outstanding and this
        returns None."""
        return None if process.outstanding else self.next_step(step, reply, process.state)

    def compensation(self, step: str, state: S) -> StepCommand | StepUndo | None:
        """The command that undoes a step; None if there is nothing to undo. StepUndo() undoes a nested process."""
        return None

    def has_undo(self, step: str) -> bool | None:
        """Returns whether `compensation` returns a command for this step; None if that depends on the state. It is
        written down when the step is sent, so that people see what a cancel would undo."""
        return False if _is_ours(self, "compensation") else None

    # --- hooks: in the transaction that moves the process (`tx.connection`) ----------------------------

    def on_started(self, process: ProcessView[S], tx: Any) -> None:
        """Called when its first step is about to be sent."""

    def on_completed(self, process: ProcessView[S], tx: Any) -> None:
        """Called when all its steps have completed."""

    def on_compensating(self, process: ProcessView[S], tx: Any) -> None:
        """Called when the process begins to be undone: a step failed, a deadline passed, or somebody canceled
        it."""

    def on_compensated(self, process: ProcessView[S], tx: Any) -> None:
        """Called when all completed steps are undone."""

    def on_failed(self, process: ProcessView[S], tx: Any) -> None:
        """Called when the process cannot go on by itself: see `process.failure`."""

    def on_canceled(self, process: ProcessView[S], tx: Any) -> None:
        """Called when the process was canceled, and all completed steps are undone."""

    # --- state --------------------------------------------------------------------------------------------------

    def create_state(self, data: Json) -> S:
        """Returns the state of a new process, from its data."""
        return self.load_state({} if data is None else data)

    def load_state(self, data: Json) -> S:
        """Makes a state from its JSON: a dict, a dataclass, or a class with `model_validate` or `from_dict`."""
        kind: Any = self.state_class
        for maker in ("model_validate", "from_dict"):
            if hasattr(kind, maker):
                found: S = getattr(kind, maker)(data)
                return found
        if not isinstance(data, Mapping):
            raise PermanentCommandError(
                f"the state of process type {self.process_type!r} must be an object, not {names.shown(data)}"
            )
        if dataclasses.is_dataclass(self.state_class):
            known = {item.name for item in dataclasses.fields(kind) if item.init}
            if unknown := sorted(str(key) for key in data if key not in known):
                raise PermanentCommandError(
                    f"{unknown[0]!r} is no field of {kind.__name__}, the state of process type "
                    f"{self.process_type!r}; known are {', '.join(sorted(known))}"
                )
        try:
            made: S = kind(**data)
        except TypeError as error:
            raise PermanentCommandError(f"no {kind.__name__} can be made of this: {error}") from error
        return made

    def dump_state(self, state: S) -> Json:
        """The JSON of a state."""
        for dumper in ("model_dump", "to_dict"):
            if hasattr(state, dumper):
                return getattr(state, dumper)(**({"mode": "json"} if dumper == "model_dump" else {}))
        if dataclasses.is_dataclass(state) and not isinstance(state, type):
            return dataclasses.asdict(state)
        return state

    # --- starting -----------------------------------------------------------------------------------------------

    def start(self, bus: StartsProcesses[R], data: object = None, **options: Unpack[StartOptions]) -> R:
        """Start a process; `await` it with an AsyncCommandBus. Options: see `bus.start_process`."""
        return bus.start_process(self, data, **options)


def check_manager(manager: object) -> BaseProcessManager[Any]:
    """Returns the manager if it can be registered and started. Otherwise ConfigurationError says what is wrong."""
    if isinstance(manager, type) and issubclass(manager, BaseProcessManager):
        raise ConfigurationError(f"give an instance: {manager.__name__}() instead of {manager.__name__}")
    if not isinstance(manager, BaseProcessManager):
        raise ConfigurationError(f"a process manager is needed, not {names.shown(manager)}")
    kind = type(manager).__name__
    if not manager.process_type:
        raise ConfigurationError(f"{kind} has no process_type: name it in the class")
    names.check_type(manager.process_type)
    names.check_domain(manager.domain)
    if missing := [name for name in _needed(manager) if _is_ours(manager, name)]:
        raise ConfigurationError(f"{kind} has no {missing[0]}: define it in the class")
    if manager.deadline is not None:
        parse_seconds(manager.deadline, name=f"{kind}.deadline", error=ConfigurationError)
    if manager.timeout is not None:
        parse_seconds(manager.timeout, name=f"{kind}.timeout", error=ConfigurationError)
    return manager


def _needed(manager: BaseProcessManager[Any]) -> list[str]:
    """The methods that have no default. A manager that overrides `next_steps` needs no `next_step`."""
    return ["first_step", "build_command", *(["next_step"] if _is_ours(manager, "next_steps") else [])]


def _is_ours(manager: BaseProcessManager[Any], name: str) -> bool:
    return getattr(type(manager), name) is getattr(BaseProcessManager, name)


def is_async(manager: BaseProcessManager[Any]) -> bool:
    """Is any of its methods `async def`? Then all of it runs on the event loop."""
    return any(inspect.iscoroutinefunction(getattr(type(manager), name, None)) for name in dir(BaseProcessManager))


def check_new(manager: BaseProcessManager[Any], new: NewProcess) -> NewProcess:
    """Refuse data with which the process could not begin, before anything is stored. The data may be a state,
    too."""
    if isinstance(manager.state_class, type) and isinstance(new.data, manager.state_class):
        new = dataclasses.replace(new, data=manager.dump_state(new.data))
    if inspect.iscoroutinefunction(manager.create_state):
        return new
    try:
        manager.create_state(payload.loads(payload.dump(new.data, what="data")))
    except PermanentCommandError as error:
        raise InvalidCommandError(str(error)) from None
    return new
