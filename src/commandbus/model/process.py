"""What a process (a saga) is, its states, and the moves between them.

    start ──► PENDING ──► WAITING_FOR_REPLY ◄──► WAITING_FOR_TSQ ◄──► COMPENSATING
                               │     ▲  │                                │
                               │     │  └── a step failed ──────────────►│
                               ▼     │                                   ▼
                           COMPLETED │            COMPENSATED | CANCELED | FAILED
                                     └── IN_PROGRESS ◄── an operator's retry ──┘

A process moves only by messages, one transaction each: its start, a reply, a signal, a timer, an operator's retry.
A nested process that had completed is undone with its parent: COMPLETED ──► COMPENSATING.
IN_PROGRESS: its next message is on the way, and no step is outstanding. WAITING_FOR_TSQ: one of its commands, or a
message that its own code could not handle, is in the troubleshooting queue; when that has left the queue, the
process returns to its former status. A failed step makes the process compensate. If there was nothing to undo, the
process is FAILED and can be retried from that step. COMPLETED, COMPENSATED and CANCELED are final. FAILED is final
unless somebody retries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from commandbus.model.durations import Duration
from commandbus.model.json_values import Json
from commandbus.quick_dataclass import dataclass

DEFAULT_DOMAIN = "processes"
MAX_DEPTH = 10  # levels of nested processes: one that starts itself again and again ends here


class ProcessStatus(StrEnum):
    """The status of a process."""

    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    WAITING_FOR_REPLY = "WAITING_FOR_REPLY"
    WAITING_FOR_TSQ = "WAITING_FOR_TSQ"
    COMPENSATING = "COMPENSATING"
    COMPLETED = "COMPLETED"
    COMPENSATED = "COMPENSATED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"

    @property
    def is_final(self) -> bool:
        """Nothing moves a process out of this state by itself."""
        return self in FINAL


FINAL = frozenset(
    {ProcessStatus.COMPLETED, ProcessStatus.COMPENSATED, ProcessStatus.FAILED, ProcessStatus.CANCELED}
)

_RUNNING = {
    ProcessStatus.WAITING_FOR_REPLY,
    ProcessStatus.WAITING_FOR_TSQ,
    ProcessStatus.COMPENSATING,
    *FINAL,
}
MOVES: Mapping[ProcessStatus, frozenset[ProcessStatus]] = {
    ProcessStatus.PENDING: frozenset(_RUNNING - {ProcessStatus.COMPENSATING, ProcessStatus.COMPENSATED}),
    ProcessStatus.IN_PROGRESS: frozenset(_RUNNING),
    ProcessStatus.WAITING_FOR_REPLY: frozenset(_RUNNING - {ProcessStatus.COMPENSATED}),
    ProcessStatus.WAITING_FOR_TSQ: frozenset(_RUNNING | {ProcessStatus.PENDING, ProcessStatus.IN_PROGRESS}),
    ProcessStatus.COMPENSATING: frozenset(
        {
            ProcessStatus.COMPENSATING,
            ProcessStatus.WAITING_FOR_TSQ,
            ProcessStatus.COMPENSATED,
            ProcessStatus.FAILED,
            ProcessStatus.CANCELED,
        }
    ),
    ProcessStatus.FAILED: frozenset({ProcessStatus.IN_PROGRESS, ProcessStatus.WAITING_FOR_TSQ}),
    ProcessStatus.COMPLETED: frozenset(),
    ProcessStatus.COMPENSATED: frozenset(),
    ProcessStatus.CANCELED: frozenset(),
}
NESTED_MOVES: Mapping[ProcessStatus, frozenset[ProcessStatus]] = {
    ProcessStatus.COMPLETED: frozenset(
        {ProcessStatus.COMPENSATING, ProcessStatus.WAITING_FOR_TSQ, ProcessStatus.COMPENSATED}
    ),
    ProcessStatus.FAILED: frozenset({ProcessStatus.COMPENSATING, ProcessStatus.COMPENSATED}),
    ProcessStatus.COMPENSATED: frozenset({ProcessStatus.COMPENSATED}),
}
"""Further moves of a nested process: its parent is undone, and undoes it."""


class StepStatus(StrEnum):
    """The outcome of a command that a process sent."""

    SENT = "SENT"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"


@dataclass(slots=True)
class NewProcess:
    """One process for `start_processes`; the fields mean what they mean in `start_process`."""

    data: object = None
    process_id: str | None = None
    deadline: Duration | None = None
    reply_to: str | None = None
    correlation_id: str | None = None


class StartedProcess(NamedTuple):
    """The receipt of a start. `created` is False if the same process had been started before."""

    domain: str
    process_id: str
    id: int
    created: bool = True


class SentSignal(NamedTuple):
    """The receipt of a signal. `created` is False if the same signal had been sent before."""

    domain: str
    process_id: str
    name: str
    signal_id: str
    created: bool = True


@dataclass(frozen=True, slots=True)
class SignalRecord:
    """A signal that a process got. `step` is the number of the step that took it; None if no step has. `by` and
    `reason` say who sent it and why, if that is known. `status` is that of its message, whose command_id it has.
    """

    signal_id: str
    name: str
    data: Json
    sent_at: datetime
    by: str | None
    reason: str | None
    step: int | None
    status: str
    command_id: str


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of a process's trail: a command that it sent, or something that it waited for, and the outcome.

    `kind` is None for a command. It is "signal" (`command_type` is the name of the signal), "sleep" (until
    `deadline_at`) or "process" (domain, command_id and command_type are those of the nested process) otherwise.
    `undoes` is the number of the step that this one compensates. `command_status` is the status of the command, as
    long as the command is kept. `data` is the data of the command. `has_undo` says whether the program undoes the
    step if the process is undone, as far as that was known when the step began; None: it was not.
    """

    number: int
    name: str
    undoes: int | None
    status: StepStatus
    domain: str
    command_id: str
    command_type: str
    sent_at: datetime
    finished_at: datetime | None
    deadline_at: datetime | None
    result: Json
    error: Mapping[str, Json] | None
    command_status: str | None = None
    data: Json = None
    kind: str | None = None
    has_undo: bool | None = None


@dataclass(frozen=True, slots=True)
class StrayReply:
    """A message to a process that moved nothing, and why. `process_id` is None if there is no such process."""

    id: int
    domain: str
    process_id: str | None
    at: datetime
    reason: str
    message: Json


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Everything that is known about a process now.

    `waits_for` says in words what it waits for, `waits_for_kinds` of which kinds that is ("command", "signal",
    "sleep", "process"), and `waits_for_moments` are the moments that the words name in UTC, in their order.
    `failure` says why it compensates or ended (`type`, `code`, `message`, `step`). `troubles` are its commands in
    the troubleshooting queue. `parent` names the process that it is nested in, and the number of the step there
    (`domain`, `process_id`, `step`). Only `get_process` fills `steps`, `signals` and `strays` (replies that moved
    nothing, with the reason). `left_out` is for `bus.processes.view`: how many bytes `data` and `state` have if
    they are too long, and how many of the first steps are not there.
    """

    id: int
    domain: str
    process_id: str
    process_type: str
    status: ProcessStatus
    is_compensating: bool
    data: Json
    state: Json
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None
    deadline_at: datetime | None
    batch_id: str | None
    reply_to: str | None
    correlation_id: str | None
    failure: Mapping[str, Json] | None
    cancel: Mapping[str, Json] | None
    in_tsq: int = 0
    waits_for: str | None = None
    waits_for_kinds: list[str] = field(default_factory=list)
    waits_for_moments: list[datetime] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    troubles: list[Mapping[str, Json]] = field(default_factory=list)
    strays: list[StrayReply] = field(default_factory=list)
    signals: list[SignalRecord] = field(default_factory=list)
    parent: Mapping[str, Json] | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessSummary:
    """A process in a list, without what it carries: no data, no state, no trail. `waits_for` names its first
    troubles and steps only. `failure` is None if it is longer than 4,000 bytes."""

    id: int
    domain: str
    process_id: str
    process_type: str
    status: ProcessStatus
    is_compensating: bool
    created_at: datetime
    started_at: datetime | None
    updated_at: datetime
    finished_at: datetime | None
    deadline_at: datetime | None
    batch_id: str | None
    correlation_id: str | None
    failure: Mapping[str, Json] | None
    cancel: Mapping[str, Json] | None
    in_tsq: int
    waits_for: str | None
    waits_for_kinds: list[str]
    waits_for_moments: list[datetime]
    parent: Mapping[str, Json] | None
