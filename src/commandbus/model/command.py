"""What a command is, its states, and the moves between them.

    send ──► PENDING ──claim──► (IN_PROGRESS) ──► COMPLETED
               ▲  ▲                 │  │  │
               │  └──── retry ──────┘  │  └──► FAILED                     (a business rule said no)
               │                       ▼
               └─ operator ── IN_TROUBLESHOOTING_QUEUE ── operator ──► CANCELED | COMPLETED

    cancel: PENDING ──► CANCELED at once; (IN_PROGRESS) ──asked to stop──► CANCELED, or COMPLETED within its grace

IN_PROGRESS is never stored: it is a command whose queue row somebody holds. COMPLETED, FAILED and CANCELED are
final. The SQL in `sql/` guards every move; this module says which exist, for readers and for the model test.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import field
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

from commandbus.clock import epoch
from commandbus.model.durations import Duration, roughly
from commandbus.model.handle import Handle
from commandbus.model.json_values import Json, JsonValue
from commandbus.model.payload import loads_or_none
from commandbus.model.priority import Priority
from commandbus.model.retry import OnExhausted
from commandbus.model.unique_key import OnConflict, UniqueKey
from commandbus.quick_dataclass import dataclass


class CommandStatus(StrEnum):
    """The status of a command."""

    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"
    IN_TROUBLESHOOTING_QUEUE = "IN_TROUBLESHOOTING_QUEUE"

    @property
    def is_final(self) -> bool:
        """Nothing moves a command out of this state."""
        return self in FINAL


FINAL = frozenset({CommandStatus.COMPLETED, CommandStatus.FAILED, CommandStatus.CANCELED})

MOVES: Mapping[CommandStatus, frozenset[CommandStatus]] = {
    CommandStatus.PENDING: frozenset({CommandStatus.IN_PROGRESS, CommandStatus.CANCELED}),
    CommandStatus.IN_PROGRESS: frozenset(
        {
            CommandStatus.PENDING,
            CommandStatus.COMPLETED,
            CommandStatus.FAILED,
            CommandStatus.CANCELED,
            CommandStatus.IN_TROUBLESHOOTING_QUEUE,
        }
    ),
    CommandStatus.IN_TROUBLESHOOTING_QUEUE: frozenset(
        {CommandStatus.PENDING, CommandStatus.CANCELED, CommandStatus.COMPLETED}
    ),
    CommandStatus.COMPLETED: frozenset(),
    CommandStatus.FAILED: frozenset(),
    CommandStatus.CANCELED: frozenset(),
}


class CancelResult(StrEnum):
    """What `cancel` did: nobody had started the command, or it runs and was asked to stop.

    One that was asked ends CANCELED, unless it completes within its grace.
    """

    CANCELED = "CANCELED"
    REQUESTED = "REQUESTED"


class AuditEvent(StrEnum):
    """What can be read in a command's audit trail."""

    SENT = "SENT"
    RECEIVED = "RECEIVED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    RETRY_SCHEDULED = "RETRY_SCHEDULED"
    RETRY_EXHAUSTED = "RETRY_EXHAUSTED"
    REPLACED = "REPLACED"
    REPLAYED = "REPLAYED"
    REPLAY = "REPLAY"
    SNOOZED = "SNOOZED"
    EXPIRED = "EXPIRED"
    MOVED_TO_TSQ = "MOVED_TO_TSQ"
    BUSINESS_RULE_FAILED = "BUSINESS_RULE_FAILED"
    CANCELED = "CANCELED"
    GIVEN_BACK = "GIVEN_BACK"
    WAIVED = "WAIVED"
    PARKED = "PARKED"
    NOTE = "NOTE"
    OPERATOR_RETRY = "OPERATOR_RETRY"
    OPERATOR_CANCEL = "OPERATOR_CANCEL"
    OPERATOR_PRIORITY = "OPERATOR_PRIORITY"
    OPERATOR_COMPLETE = "OPERATOR_COMPLETE"
    OPERATOR_RESOLVE_EFFECT = "OPERATOR_RESOLVE_EFFECT"


@dataclass(slots=True)
class Command:
    """What a handler is given: the request itself. Its life is `CommandRecord`."""

    domain: str
    command_type: str
    command_id: str
    data: Json
    correlation_id: str | None = None
    reply_to: str | None = None
    headers: Mapping[str, Json] | None = None
    created_at: datetime | None = None
    id: int = 0


@dataclass(slots=True)
class NewCommand:
    """One command for `send_many`; the fields mean what they mean in `send`.

    `timeout` is how long one attempt of this command may take; 0 means no deadline, None leaves it to its handler
    and its worker. `delay` is how long it waits before it may run. `expires`: if it has not started by then (a
    duration from its sending, or a datetime with a time zone), it is CANCELED with code EXPIRED. `on_exhausted`:
    what happens when its attempts are used up ("troubleshoot" or "fail"); None leaves it to its handler.
    `priority`: "high", "normal" or "low". Durations are seconds, text such as "2m", or a timedelta.

    `unique` and what belongs to it (`unique_while`, `on_conflict`, `debounce`, `max_delay`) are for `send` and
    `bus.commands.save`; `send_many` and batches refuse them.

    `key` puts the command into the line of this key. `key_limit` names the limit of the key, if the command type
    has none (`Limit(…, key="data.tenant_id")`).
    """

    command_type: str
    data: JsonValue = None
    command_id: str | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    max_attempts: int | None = None
    delay: Duration | None = None
    at: datetime | None = None
    headers: Mapping[str, JsonValue] | None = None
    timeout: Duration | None = None
    expires: Duration | datetime | None = None
    on_exhausted: OnExhausted | None = None
    unique: str | None = None
    unique_while: Duration | None = None
    on_conflict: OnConflict | None = None
    debounce: Duration | None = None
    max_delay: Duration | None = None
    key_limit: str | None = None
    key: str | None = None
    priority: Priority | None = None


class _Receipt(NamedTuple):
    domain: str
    command_id: str
    id: int
    created: bool = True
    replaced: bool = False


class SentCommand(Handle, _Receipt):
    """The receipt of a send. `created` is False if the same command had been sent before, or if another one has
    the key (`unique`): then the receipt is of that one, and `replaced` says whether it has the new content."""

    def wait(self, wait: Duration = 30.0) -> Json:
        """Wait for the outcome of this command, and return its result, as `bus.wait(sent)` does. Await it if an
        AsyncCommandBus has sent the command."""
        return self._waiting_bus().wait(self, wait=wait)


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Somebody asked to cancel a command that runs."""

    by: str
    reason: str | None
    at: datetime

    @classmethod
    def from_json(cls, text: str | None) -> CancelRequest | None:
        """A request as it is stored; None if there is none."""
        found = loads_or_none(text)
        return None if found is None else cls(found["by"], found["reason"], datetime.fromisoformat(found["at"]))


APART = {
    "quarantine": "in a child process, because an attempt of it got stuck or crashed its worker",
    "suspect": "in a child process, because it ran when its worker died, and the cause is not known",
    "alone": "in a child process, one such command at a time, because its worker was lost without a verdict",
}


@dataclass(frozen=True, slots=True)
class CommandRecord:
    """Everything that is known of a command at the moment of asking.

    `attempts` is the number of its last attempt: all of them count, also over operators' retries.
    `charged_attempts` says how many of its `max_attempts` are used, the running one included; an operator's retry
    begins anew. It is None where nobody knows any more: a person ended the command after attempts of it.

    `timeout` is its own deadline in seconds (0: none; None: its handler's or its worker's). While it runs,
    `progress` is what its handler told last, and `cancel_requested` says who asked to stop it. While it is parked,
    `waiting_for` is "pause", "breaker", "limit", "handler" (a worker that has one for its type) or "key" (its turn
    in the line of its key), `waiting_note` says why, and `waiting_until` until when, if that is known. Of one that
    waits for a limit or for its turn: which limit (`waiting_limit`), how many are before it (`waiting_ahead`), and
    how long that will take (`waiting_estimated_seconds`; None: nobody can say).

    `apart` says why its next attempt runs in a child process, where that is possible: "quarantine", "suspect" or
    "alone". None for a command that runs as its handler says, and for one that has ended.

    `expires_at`: it does not start after that. `on_exhausted` is its own, if its sender or its batch gave one.
    `snoozes`: how often it was snoozed since it was sent, or since an operator's retry. `key` is its key of the
    key limit `key_limit`, if it has one. `unique` is the key with which it was sent, if it has one.
    """

    id: int
    domain: str
    command_id: str
    command_type: str
    status: CommandStatus
    data: Json
    result: Json
    correlation_id: str | None
    reply_to: str | None
    headers: Mapping[str, Json] | None
    max_attempts: int | None
    attempts: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    visible_at: datetime | None = None
    waiting_for: str | None = None
    error_type: str | None = None
    error_code: str | None = None
    error: str | None = None
    timeout: float | None = None
    progress: Json = None
    cancel_requested: CancelRequest | None = None
    batch_id: str | None = None
    waiting_until: datetime | None = None
    waiting_note: str | None = None
    waiting_limit: str | None = None
    waiting_ahead: int | None = None
    waiting_estimated_seconds: float | None = None
    charged_attempts: int | None = None
    apart: str | None = None
    expires_at: datetime | None = None
    on_exhausted: OnExhausted | None = None
    snoozes: int = 0
    priority: Priority = "normal"
    key_limit: str | None = None
    key: str | None = None
    unique: UniqueKey | None = None

    @property
    def apart_text(self) -> str | None:
        """Why its next attempt runs in a child process, as a sentence; None if it does not."""
        return None if self.apart is None else APART.get(self.apart, self.apart)

    @property
    def waiting_text(self) -> str | None:
        """Why it is parked, and for how long, as a sentence; None if it is not. Times are in the local zone."""
        if self.waiting_note is None:
            return self.waiting_for
        left = 0.0 if self.waiting_until is None else (self.waiting_until - datetime.now(UTC)).total_seconds()
        if self.waiting_until is not None and left > 0:
            when = f"{self.waiting_until.astimezone():%H:%M:%S} (in about {roughly(left)})"
            return f"parked until {when}: {self.waiting_note}"
        if self.waiting_ahead is None or self.waiting_for == "key":
            return self.waiting_note
        line = f"{self.waiting_ahead} ahead" if self.waiting_ahead else "next in line"
        if self.waiting_estimated_seconds is not None:
            line += f", about {roughly(self.waiting_estimated_seconds)}"
        return f"parked ({line}): {self.waiting_note}"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit trail. `attempt` is the attempt's number.

    `event` is an AuditEvent, or the name that an application gave its own event (`bus.audit.log`).
    """

    event: AuditEvent | str
    at: datetime
    attempt: int | None = None
    worker: str | None = None
    details: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TsqEntry:
    """One command in the troubleshooting queue, and why it is there. `attempt` is its last attempt's number."""

    id: int
    domain: str
    command_id: str
    command_type: str
    entered_at: datetime
    attempt: int
    error_type: str | None
    error_code: str | None
    error: str | None
    data: Json


# Our own, seeded from the system and anew in every forked child: an application that calls random.seed(0) would
# otherwise send the same ids as a second such program.
_random = random.Random()  # noqa: S311 - ids need to be unique, not secret
os.register_at_fork(after_in_child=_random.seed)


def new_command_id() -> str:
    """A UUID of version 7: ordered by time, so that the unique index grows at its end, and no two alike."""
    stamp = int(epoch() * 1000) & 0xFFFFFFFFFFFF
    rest = _random.getrandbits(74)
    value = stamp << 80 | 0x7 << 76 | (rest >> 62) << 64 | 0b10 << 62 | (rest & 0x3FFFFFFFFFFFFFFF)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
