"""One attempt: a claimed row, its fence, and what this worker knows about it.

An attempt is created for every command, so it is small: an object around the row that commands/claim.sql returned.
What only some attempts need (a cancel event, a connection, child deadlines, progress) is in `Extras`, which is
created on first use.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from commandbus.clock import boottime, monotonic
from commandbus.errors import AttemptCanceledError, DeadlineExceededError
from commandbus.flow.commands.claimed_row import (
    ATTEMPT_BASE,
    BATCH,
    CHECKPOINT,
    COMMAND_ID,
    CORRELATION_ID,
    CREATED_AT,
    DATA,
    HEADERS,
    IS_PROBE,
    MAX_ATTEMPTS,
    OPTIONS,
    QUARANTINE,
    REPLY_TO,
    STEP,
    SUSPECT,
    TIMEOUT,
    WAIVED,
    ClaimedRow,
    Fence,
    RareOptions,
)
from commandbus.flow.commands.reply import compose
from commandbus.flow.commands.settle import (
    DONE,
    Done,
    Settlement,
    completed,
    given_back,
    of_row,
    parked,
    snoozed,
    waived,
)
from commandbus.model import payload
from commandbus.model.command import Command
from commandbus.model.durations import format_seconds
from commandbus.model.outcome import EXPIRED, Failure, Judgement, Verdict
from commandbus.model.retry import OnExhausted, RetryPolicy
from commandbus.quick_dataclass import dataclass
from commandbus.worker import masking
from commandbus.worker.execution.handlers import Handler

if TYPE_CHECKING:
    from commandbus.worker.execution.connections import Borrowed, ConnectionRequest
    from commandbus.worker.isolation.isolation import Child
    from commandbus.worker.limit_use import LimitUse

NEVER = math.inf
MOST_SPANS = 50
LATEST = 253402300799.0  # the end of the year 9999, which is datetime's


CHILD_LATE = "the deadline of a child context has passed"


def lost_text(limit: str) -> str:
    """Why an attempt that has lost its permit of a limit is asked to stop."""
    return f"it has lost its permit of limit {limit}"


class Why(StrEnum):
    """Who asks an attempt to stop."""

    DEADLINE = "deadline"
    CANCEL = "cancel"
    SHUTDOWN = "shutdown"
    LEASE = "lease"


@dataclass(frozen=True, slots=True)
class Stop:
    """An attempt was asked to stop. `until` (monotonic) is the end of its grace.

    `is_told=False`: it could not be asked, because it blocks the event loop for everybody there.
    """

    why: Why
    text: str
    asked_at: float
    until: float
    is_told: bool = True

    def error(self) -> AttemptCanceledError:
        """The error for a handler that asks whether it must stop."""
        kind = DeadlineExceededError if self.why is Why.DEADLINE else AttemptCanceledError
        return kind(self.text)


class Extras:
    """What only some attempts have."""

    __slots__ = (
        "asks",
        "borrowed",
        "child",
        "effects",
        "event",
        "has_connection",
        "holds_row",
        "is_completing",
        "is_delivered",
        "is_fenced",
        "is_reminded",
        "late_text",
        "open_effects",
        "progress",
        "scopes",
    )

    def __init__(self) -> None:
        self.event: threading.Event | None = None
        self.borrowed: Borrowed | None = None
        self.asks: ConnectionRequest | None = None  # a thread that waits for a connection for it, if it is async
        self.scopes: list[Scope] = []
        self.progress: str | None = None  # JSON text that is not stored yet
        self.child: Child | None = None
        self.is_delivered = False  # has the event loop passed the cancel on?
        self.is_fenced = False  # given up: it gets no connection any more
        self.is_reminded = False  # has its query been canceled for the second time?
        self.has_connection = False
        self.is_completing = False  # is it in the transaction that completes its command?
        self.holds_row = False  # must its queue row stay unchanged, because of its transaction's snapshot?
        self.effects: dict[str, float | None] = {}  # in a block now (None), or when one was left open (monotonic)
        self.open_effects: set[str] = set()  # those of which nobody knows whether their calls were made
        self.late_text: str | None = None  # what its deadline is called, while that of one call is nearer


class Scope:
    """A child context's own deadline."""

    __slots__ = ("deadline_at", "event", "stop")

    def __init__(self, deadline_at: float) -> None:
        self.deadline_at = deadline_at
        self.stop: Stop | None = None
        self.event = threading.Event()

    def end(self, now: float) -> None:
        """Set the event when the deadline has passed; the attempt itself goes on."""
        if self.stop is None and now >= self.deadline_at:
            self.stop = Stop(Why.DEADLINE, CHILD_LATE, now, now)
            self.event.set()


_making = threading.Lock()


class Attempt:
    """An execution of a command by this worker.

    `renewed_at` (of `clock.boottime`) is when its lease was last asked for; in the future while it was asked for
    longer than usual.

    `started` is the epoch second for the record; `started_at` (0 unless it runs) and `deadline_at` are monotonic,
    for the ladder.

    `charge` is what it counts against `max_attempts`, `number` is its running number in the command's history.
    """

    # Defaults are the class's: an attempt writes only what differs, because one is made for every command.
    started: float | None = None
    started_at = 0.0
    ran = 0.0  # for how many seconds it ran, once it has ended
    deadline_at = NEVER
    stop: Stop | None = None
    is_lost = False
    is_ordinary = False  # True: it runs in its slot's own thread, and has no limit, no expiry and no members
    has_committed = False
    is_unfinished = False  # given back, or cut off when its worker stopped: what is written of it is no outcome
    limit_use: LimitUse | None = None  # only if it has something to do with limits
    expires_at: float | None = None  # of `clock.boottime`; it is not to start after that
    spans: list[str] | None = None  # parts in which its handler did not simply run (attempt.spans), as JSON texts
    members: tuple[Attempt, ...] = ()  # only if it is a Chunk
    outcomes: list[Any] | None = None  # of a chunk handler: those that its transaction has committed
    _extras: Extras | None = None

    def __init__(self, domain: str, row: tuple[Any, ...], handler: Handler | None, renewed_at: float) -> None:
        self.domain = domain
        self.row = row
        self.msg_id: int = row[0]
        self.read_ct: int = row[1]
        self.id: int = row[2]
        self.command_type: str = row[4]
        self.handler = handler
        self.renewed_at = renewed_at

    @property
    def each(self) -> tuple[Attempt, ...]:
        """The attempts that have a lease: its members if it is a Chunk, else itself."""
        return (self,)

    @property
    def claimed(self) -> ClaimedRow:
        """Its row, with names."""
        return ClaimedRow(*self.row)

    @property
    def fence(self) -> Fence:
        """Under which it is settled."""
        return Fence(self.domain, self.msg_id, self.read_ct, self.id, self.number)

    @property
    def number(self) -> int:
        """Its running number in the command's history."""
        number: int = self.row[ATTEMPT_BASE] + self.read_ct
        return number

    @property
    def charge(self) -> int:
        """What it counts against `max_attempts`."""
        charge: int = self.read_ct - self.row[WAIVED]
        return charge

    @property
    def command_id(self) -> str:
        """The caller's id."""
        found: str = self.row[COMMAND_ID]
        return found

    @property
    def log_fields(self) -> dict[str, Any]:
        """What a log record about it carries."""
        return {
            "domain": self.domain,
            "command_id": self.command_id,
            "attempt": self.charge,
            "attempt_number": self.number,
        }

    @property
    def max_attempts(self) -> int | None:
        """The command's own limit, if its sender gave one."""
        found: int | None = self.row[MAX_ATTEMPTS]
        return found

    @property
    def options(self) -> RareOptions:
        """What few commands have."""
        return RareOptions.read(self.row[OPTIONS])

    def on_exhausted(self, default: RetryPolicy) -> OnExhausted:
        """What happens when its attempts are used up: as its command says, else its handler, else the policy."""
        handler = self.handler
        own = self.options.on_exhausted or (None if handler is None else handler.options.on_exhausted)
        policy = default if handler is None or handler.retry_policy is None else handler.retry_policy
        return own or policy.on_exhausted

    def note_expiry(self) -> None:
        """Read from its row when it expires. `renewed_at` must be when it was claimed."""
        expires_in = self.options.expires_in
        if expires_in is not None:
            self.expires_at = self.renewed_at + expires_in

    @property
    def has_expired(self) -> bool:
        """Is it too late to start it?"""
        return self.expires_at is not None and boottime() >= self.expires_at

    @property
    def timeout(self) -> float | None:
        """The command's own deadline in seconds, if its sender gave one; 0 is none."""
        found: float | None = self.row[TIMEOUT]
        return found

    def lateness(self) -> str:
        """A sentence for people: its deadline has passed, and which setting it came from."""
        if self._extras is not None and self._extras.late_text is not None:
            return self._extras.late_text
        whose = "task_timeout"
        if self.timeout is not None:
            whose = "timeout of the command"
        elif self.handler is not None and self.handler.options.timeout is not None:
            whose = f"timeout of handler {self.handler.name}"
        allowed = format_seconds(round(self.deadline_at - self.started_at, 3))
        return f"the deadline of {allowed} has passed (layer 4: {whose})"

    @property
    def step(self) -> int | None:
        """Which step of a process it is: 0 a message to the process, below 0 a compensation; None: none."""
        found: int | None = self.row[STEP]
        return found

    @property
    def batch(self) -> int | None:
        """The batch that it is counted in."""
        found: int | None = self.row[BATCH]
        return found

    @property
    def is_suspect(self) -> bool:
        """May it have killed its worker? Then it runs isolated."""
        return self.row[SUSPECT] is not None

    @property
    def is_quarantined(self) -> bool:
        """Did an earlier attempt get stuck, or crash its worker?"""
        return bool(self.row[QUARANTINE])

    @property
    def is_probe(self) -> bool:
        """Is it the probe of its type's breaker?"""
        return bool(self.row[IS_PROBE])

    @property
    def is_plain(self) -> bool:
        """Does its end concern nobody else: no reply, no batch, no process?"""
        row = self.row
        return row[REPLY_TO] is None and row[STEP] is None and row[BATCH] is None

    @property
    def extras(self) -> Extras:
        """What only some attempts have; made on first use."""
        if self._extras is None:
            with _making:  # the handler's thread and the ladder may come at once
                if self._extras is None:
                    self._extras = Extras()
        return self._extras

    @property
    def is_fenced(self) -> bool:
        """Was it given up, or is it over? Then it gets no connection."""
        return not self.started_at or (self._extras is not None and self._extras.is_fenced)

    def bar(self) -> None:
        """Give it up: it gets no connection any more."""
        self.extras.is_fenced = True

    @property
    def borrowed(self) -> Borrowed | None:
        """The connection that it holds now."""
        return None if self._extras is None else self._extras.borrowed

    @property
    def asks(self) -> ConnectionRequest | None:
        """Who waits for a connection for it now, on a thread."""
        return None if self._extras is None else self._extras.asks

    @property
    def child(self) -> Child | None:
        """The process that it runs in, if that is one of its own."""
        return None if self._extras is None else self._extras.child

    @property
    def has_open_effect(self) -> bool:
        """Has it found or begun an effect of which nobody knows whether its call was made?"""
        return self._extras is not None and bool(self._extras.open_effects)

    @property
    def checkpoint(self) -> str | None:
        """What an earlier attempt has stored for this one, as JSON text."""
        found: str | None = self.row[CHECKPOINT] if len(self.row) > CHECKPOINT else None
        return found

    @property
    def scopes(self) -> list[Scope]:
        """The deadlines of its child contexts."""
        return [] if self._extras is None else self._extras.scopes

    @property
    def has_progress(self) -> bool:
        """Is there progress that is not stored yet?"""
        return self._extras is not None and self._extras.progress is not None

    def progress(self) -> str | None:
        """The progress that is not stored yet, as JSON text."""
        return None if self._extras is None else self._extras.progress

    def note_stored(self, text: str) -> None:
        """This progress is stored; a later one may have come meanwhile."""
        if self.extras.progress is text:
            self.extras.progress = None

    def release_row(self) -> None:
        """Ends `LeaseKeeper.hold`: from now on its queue row may be renewed as always."""
        for each in self.each:
            each.renewed_at = min(each.renewed_at, boottime())

    def is_surely_held(self, late_seconds: float) -> bool:
        """Is its lease younger than this, and not known to be lost? After the claim or the last renewal was sent,
        this process may have been stopped, or its machine suspended. Then another worker may have the command."""
        return not self.is_lost and boottime() - self.renewed_at < late_seconds

    def elapsed_ms(self) -> int:
        """How long it has been running."""
        return int((monotonic() - self.started_at) * 1000) if self.started_at else 0

    def event(self) -> threading.Event:
        """Set when it is asked to stop."""
        extras = self.extras
        with _making:
            if extras.event is None:
                extras.event = threading.Event()
        if self.stop is not None:  # read after the event exists: a thread that asks to stop sets `stop` first
            extras.event.set()
        return extras.event

    def ask_to_stop(self, stop: Stop) -> None:
        """The first reason counts. Only the ladder's thread calls this."""
        if self.stop is None:
            self.stop = stop
            self.note_span("grace", stop.asked_at, None)
        if self._extras is not None:
            if self._extras.event is not None:
                self._extras.event.set()
            for scope in list(self._extras.scopes):
                scope.stop = scope.stop or self.stop
                scope.event.set()

    def note_span(self, kind: str, begun_at: float, ended_at: float | None) -> None:
        """Note that its handler did not simply run from one moment (monotonic) to another; None: until its end."""
        if not self.started_at:
            return
        begun, ended = (
            "null" if at is None else str(max(0, round((at - self.started_at) * 1000)))
            for at in (begun_at, ended_at)
        )
        for each in self.each:
            if each.spans is None:
                each.spans = []
            if len(each.spans) < MOST_SPANS:
                each.spans.append(f'["{kind}",{begun},{ended}]')

    @property
    def created_at(self) -> datetime | None:
        """When it was sent. A row may say anything, infinity too."""
        sent: float | None = self.row[CREATED_AT]
        if sent is None:
            return None
        return datetime.fromtimestamp(sent if 0.0 <= sent <= LATEST else max(0.0, min(sent, LATEST)), UTC)

    @property
    def sent(self) -> float:
        """When it was sent, as its row says it."""
        sent: float = self.row[CREATED_AT]
        return sent

    def command(self) -> Command:
        """What the handler is given."""
        row = self.row
        return Command(
            self.domain,
            self.command_type,
            row[COMMAND_ID],
            None if row[DATA] is None else payload.loads(row[DATA]),
            row[CORRELATION_ID],
            row[REPLY_TO],
            None if row[HEADERS] is None else payload.loads(row[HEADERS]),
            self.created_at,
            self.id,
        )

    def done(self) -> Settlement | Done:
        """The settlement of a completion without a result."""
        row = self.row
        if (
            self.read_ct == 1
            and row[ATTEMPT_BASE] == 0
            and row[REPLY_TO] is None
            and row[STEP] is None
            and self.spans is None
        ):
            return DONE
        return self.complete(None)

    def complete(self, result: str | None) -> Settlement:
        """The settlement of a completion; `result` is JSON text."""
        settlement = completed(self.fence, started=self.started or 0.0, result=result)
        settlement.is_grouped = self.row[STEP] is not None or self.row[BATCH] is not None
        if self.row[REPLY_TO] is not None:
            settlement.reply = compose(
                self.row[REPLY_TO],
                "SUCCESS",
                id_=self.id,
                domain=self.domain,
                command_id=self.command_id,
                command_type=self.command_type,
                correlation_id=self.row[CORRELATION_ID],
                result=result,
            )
        return settlement.with_spans(self.spans)

    def masked(self, failure: Failure) -> Failure:
        """The failure without the hidden fields of its command."""
        return masking.hidden(self.row, failure) if masking.is_on() else failure

    def fail(self, judgement: Judgement, *, is_waived: bool = False) -> Settlement:
        """The settlement of a failure; `is_waived`: its retry is not charged."""
        judgement = replace(judgement, failure=self.masked(judgement.failure))
        settlement = of_row(self.domain, self.claimed, judgement, started=self.started, is_waived=is_waived)
        return settlement.with_spans(self.spans)

    def waive(self, failure: Failure, *, suspect: bool = False, single: bool = False) -> Settlement:
        """The settlement of an attempt that was stopped through no fault of its own. `single`: it runs in no chunk
        any more."""
        failure = self.masked(failure)
        return waived(
            self.domain, self.claimed, started=self.started, failure=failure, suspect=suspect, single=single
        ).with_spans(self.spans)

    def expire(self) -> Settlement:
        """The settlement of a command that was not started in time."""
        return self.fail(Judgement(Verdict.EXPIRED, EXPIRED))

    def snooze(self, failure: Failure, delay_seconds: float) -> Settlement:
        """The settlement of an attempt whose handler wants to be called again later."""
        failure = self.masked(failure)
        return snoozed(
            self.domain, self.claimed, started=self.started, failure=failure, delay_seconds=delay_seconds
        ).with_spans(self.spans)

    def park(self, limit: str, failure: Failure, note: str, *, until: float | None) -> Settlement:
        """The settlement of an attempt that waits for a limit."""
        return parked(
            self.domain,
            self.claimed,
            started=self.started,
            limit=limit,
            failure=self.masked(failure),
            note=masking.hidden_text(self.row, note),
            until=until,
        ).with_spans(self.spans)

    def give_back(self, why: str = "its worker stops") -> Settlement:
        """The settlement of an attempt that never started."""
        return given_back(self.fence, why=why)
