"""Coroner: settles what dead workers held, and looks for work that nobody claims.

A case is done when the queue shows that the dead worker holds nothing more. Until then the coroner tries again: a
row that another transaction has locked is returned as busy, and the database may be unreachable for a while. If a
lease ran out and another worker has claimed the command meanwhile, the command belongs to that worker. The
supervisor's loop only hands over cases and reads results; it never waits. A case that cannot be examined does not
delay others: it is tried again, and in the end the leases run out.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Final

import psycopg

from commandbus.db.service import DatabaseService
from commandbus.db.transient_errors import PassingError, is_locked, is_passing
from commandbus.flow.breakers.breaker import PATIENCE_SECONDS, watch
from commandbus.flow.commands.claim import put_right
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.flow.commands.database_session import DatabaseSession
from commandbus.flow.commands.rescue import (
    ClaimableWork,
    Held,
    Rule,
    claimable_work,
    client_sessions,
    held_by,
    mark_worker_dead,
    note_death,
    outcome,
    terminate_backends,
)
from commandbus.flow.commands.settle import Settlement, settle
from commandbus.flow.limits.metrics import FleetFigures, figures
from commandbus.logger import safe_logger
from commandbus.model import payload
from commandbus.model.attempt_counts import AttemptCounts
from commandbus.model.client_sockets import Socket, Times, opened_by_handlers
from commandbus.model.counting import counted
from commandbus.model.crash_attribution import Cause, Death, Finding, Role, Running, examine
from commandbus.model.outcome import Judgement, Verdict
from commandbus.model.reconnect_backoff import Backoff
from commandbus.quick_dataclass import dataclass
from commandbus.settings import Settings
from commandbus.supervisor.death_log import say_culprit, say_done
from commandbus.supervisor.worker_messages import Hello
from commandbus.worker import running_file
from commandbus.worker.board import SlotView
from commandbus.worker.breakers import BreakerReports, Judge, report_of

logger = safe_logger("commandbus.supervisor")

Key = tuple[str, int, int]

SCOUT_SECONDS: Final = 3.0
LOOK_SECONDS: Final = 0.02
FIRST_POSTPONED_SECONDS: Final = 0.04
LONGEST_PAUSE_SECONDS: Final = 1.0
BACKEND_SECONDS: Final = 0.5
PAST_SECONDS: Final = 10.0
SPARE_LEASE_SECONDS: Final = 10.0
JUDGING_SECONDS: Final = 2 * PATIENCE_SECONDS
HURRIED_MS: Final = 100  # how long to wait for a row that is known to be locked


@dataclass(slots=True)
class Case:
    """A dead worker: its id, how it died, and what its board showed.

    If its board was overwritten, nobody knows what ran. Every command that it held may have run, and may have
    overwritten the board.
    """

    hello: Hello
    death: Death
    slots: Sequence[SlotView]
    died_at: float
    settings: Settings
    is_board_spoiled: bool = False
    settled: dict[str, int] = field(default_factory=dict)
    named: dict[str, list[str]] = field(default_factory=dict)
    next_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_POSTPONED_SECONDS, LONGEST_PAUSE_SECONDS))
    findings: dict[Key, Finding] | None = None
    chunks: dict[int, running_file.Running] = field(default_factory=dict)  # by slot: what ran there together
    chunk_types: dict[int, str] = field(default_factory=dict)  # by slot, if nobody knows what ran there together

    @property
    def worker(self) -> str:
        """The dead worker's id."""
        return self.hello.id

    def slot_of(self, domain: str, held: Held) -> SlotView | None:
        """The slot in which a held row ran; None if it did not run."""
        for slot in self.slots:
            if (slot.msg_id, slot.read_ct) == held.row[:2] and self._domain(slot) == domain:
                return slot
        for slot in self.slots:
            if slot.is_chunk and self._domain(slot) == domain and self._ran_in_chunk(slot, domain, held):
                return slot
        return None

    def _ran_in_chunk(self, slot: SlotView, domain: str, held: Held) -> bool:
        """If nobody knows what a chunk consisted of, every held command of its type may have been in it."""
        if slot.index in self.chunks:
            return (domain, held.row.msg_id) in self.chunks[slot.index]
        return self.chunk_types.get(slot.index) == held.row.command_type

    def read_chunks(self) -> None:
        """Find out which commands ran in chunks. The board shows only the first of each."""
        if any(slot.is_chunk for slot in self.slots) and not self.chunks:
            found = running_file.read_slots(self.worker) or {}
            shown = {slot.index: (self._domain(slot), slot.msg_id) for slot in self.slots if slot.is_chunk}
            self.chunks = {index: ran for index, ran in found.items() if shown.get(index) in ran}

    def note_chunk_types(self, held: dict[str, list[Held]]) -> None:
        """Note the types of chunks of which nobody knows what they consisted of."""
        unknown = [slot for slot in self.slots if slot.is_chunk and slot.index not in self.chunks]
        for slot in unknown:
            for item in held.get(self._domain(slot) or "", ()):
                if item.row.msg_id == slot.msg_id:
                    self.chunk_types[slot.index] = item.row.command_type

    def msg_ids(self, domain: str) -> list[int]:
        """The msg_ids that ran, of one domain."""
        shown = {slot.msg_id for slot in self.slots if self._domain(slot) == domain}
        return sorted(shown | {msg_id for ran in self.chunks.values() for name, msg_id in ran if name == domain})

    def _domain(self, slot: SlotView) -> str | None:
        domains = self.hello.domains
        return domains[slot.domain_index] if slot.domain_index < len(domains) else None


@dataclass(frozen=True, slots=True)
class Trace:
    """The sockets that a worker had open when it was condemned; its handlers' own connections are among them.

    The worker is killed when `is_done` is set, or soon after.
    """

    worker: str
    sockets: Sequence[Socket]
    spawned_at: float
    read_at: float
    is_done: threading.Event = field(default_factory=threading.Event, compare=False)


@dataclass(frozen=True, slots=True)
class CoronerLook:
    """The work that could be claimed, and when it was counted. `lost_since` is set while the database is
    unreachable. `figures` are those of limits and breakers, which the whole fleet shares; they are read only if
    somebody can ask for metrics."""

    at: float = 0.0
    domains: dict[str, ClaimableWork] = field(default_factory=dict)
    lost_since: float | None = None
    figures: FleetFigures = field(default_factory=FleetFigures)


class Coroner(DatabaseService):
    """One thread. The supervisor's loop reads `look` and `done`."""

    def __init__(self, settings: Settings, name: str) -> None:
        super().__init__(settings, name=name, part="coroner", prepares=False)
        self._name = name
        self._cases: list[Case] = []
        self._traces: list[Trace] = []
        self._opened: dict[str, list[DatabaseSession]] = {}  # by worker: sessions that its handlers opened
        self._lock = threading.Lock()
        self._scouted_at = 0.0
        self._reports = BreakerReports(settings)
        self._judge = Judge(settings)
        self._judging: dict[str, float] = {}  # domains with new culprits, and until when to judge their breakers
        self.domains: tuple[str, ...] = ()
        self.look = CoronerLook()
        self.done = 0
        self.counts = AttemptCounts()  # what dead workers held, as it was settled here

    def successor(self) -> Coroner:
        """Returns a coroner that takes over the cases, because this thread has ended or is stuck. If this thread
        wakes up again, it ends. Until then both write under the same fences."""
        self._stopping.set()
        self.wake()
        other = Coroner(self._settings, self._name)
        with self._lock:
            other._cases, other._opened = list(self._cases), dict(self._opened)
        other.domains, other.done, other.look = self.domains, self.done, self.look
        other.counts = self.counts
        other._reports, other._judge, other._judging = self._reports, self._judge, dict(self._judging)
        return other

    def add(self, case: Case) -> None:
        """Add the case of a worker that died."""
        with self._lock:
            self._cases.append(case)
        self.wake()

    def trace(self, trace: Trace) -> None:
        """A worker will be killed: find out now which database sessions its handlers have opened themselves.

        After the kill that is impossible: the worker's own sessions end with it, and they are the proof that the
        list of its sockets is right.
        """
        with self._lock:
            self._traces.append(trace)
        self.wake()

    @property
    def open_cases(self) -> list[Case]:
        """The cases that are not done."""
        with self._lock:
            return list(self._cases)

    def round(self) -> None:
        if self.look.lost_since is not None:  # the database is reachable again
            self.look = replace(self.look, lost_since=None)
            self._scouted_at = 0.0
        self._work()
        self.sleep(self._pause())

    def lost(self, error: psycopg.Error) -> None:  # noqa: ARG002 - the base says why
        if self.look.lost_since is None:
            self.look = replace(self.look, lost_since=time.monotonic())

    def _pause(self) -> float:
        now = time.monotonic()
        due = [case.next_at for case in self.open_cases]
        if self.domains:
            due.append(self._scouted_at + SCOUT_SECONDS)
        return max(0.0, min(min(due, default=now + 1.0) - now, 1.0))

    def _work(self) -> None:
        self._spare_others(self._look_at_traces)
        # Write what could not be written before, because the connection was lost.
        self._spare_others(lambda: self._reports.write(self._connection))
        self._spare_others(self._judge_breakers)
        for case in self.open_cases:
            if self.is_done:
                return
            if case.next_at <= time.monotonic() and not self._spare_others(partial(self._examine, case)):
                self._postpone(case)
        now = time.monotonic()
        if self.domains and now - self._scouted_at >= SCOUT_SECONDS and not self.is_done:
            self._scouted_at = now
            self._spare_others(self._look_for_work)

    def _look_for_work(self) -> None:
        seen = {domain: self._connection.run(claimable_work(domain)) for domain in self.domains}
        has_metrics = self._settings.health_port is not None
        shared = self._connection.run(figures(self.domains)) if has_metrics else FleetFigures()
        self.look = CoronerLook(time.monotonic(), seen, figures=shared)

    def _spare_others(self, work: Callable[[], None]) -> bool:
        """Do one task. If it fails, the other tasks are still done."""
        try:
            work()
        except PassingError as error:
            if not is_locked(error):
                raise  # the database is unreachable: the round is repeated later
            logger.warning("the coroner found a locked row, and tries again: %s", str(error).strip())
            return False
        except Exception:
            logger.exception("the coroner failed in one task, and goes on with the others")
            return False
        return True

    def _look_at_traces(self) -> None:
        with self._lock:
            traces, self._traces = self._traces, []
        try:
            for (
                trace
            ) in traces:  # after a lost connection there is nothing left to see, so these orders are dropped
                self._look_at_trace(trace)
                trace.is_done.set()
        finally:
            for trace in traces:
                trace.is_done.set()

    def _look_at_trace(self, trace: Trace) -> None:
        asked_at = time.monotonic()
        ports = sorted({socket.port for socket in trace.sockets})
        server, sessions = self._connection.run(client_sessions(trace.worker, ports))
        times = Times(trace.spawned_at, trace.read_at, asked_at, time.monotonic())
        if found := opened_by_handlers(trace.sockets, sessions, server, times):
            self._opened[trace.worker] = [DatabaseSession(session.pid, session.started) for session in found]

    # -- one case

    def _examine(self, case: Case) -> None:
        """Make one attempt at a case. If the worker still holds something after that, another one follows."""
        self._end_sessions(case)
        case.read_chunks()
        is_planned = case.death.cause is Cause.STOPPED and not case.slots
        death = None if is_planned else payload.clean_text(case.death.sentence, longest=2000)
        self._connection.run(note_death(case.worker, death))
        held = {domain: self._held(case, domain) for domain in case.hello.domains}
        if case.findings is None:
            case.note_chunk_types(held)
            case.findings = self._findings(case, held)
        left = sum(self._settle(case, domain, rows) for domain, rows in held.items() if rows)
        if left:
            self._postpone(case)
            return
        self._connection.run(mark_worker_dead(case.worker))
        running_file.remove(case.worker)
        self._say_opened(case)
        with self._lock:
            self._cases.remove(case)
        self.done += 1
        say_done(
            case.worker, case.named, after_seconds=time.monotonic() - case.died_at,
            was_planned=case.death.cause is Cause.STOPPED,
        )  # fmt: skip

    def _postpone(self, case: Case) -> None:
        case.next_at = time.monotonic() + case.backoff.next()

    def _say_opened(self, case: Case) -> None:
        if opened := self._opened.pop(case.worker, []):
            logger.info(
                "%s that handlers of worker %s had opened themselves %s ended",
                counted(len(opened), "database session"),
                case.worker,
                "was" if len(opened) == 1 else "were",
            )

    def _end_sessions(self, case: Case) -> None:
        """End the worker's database sessions, and wait a moment until they are gone."""
        known = [
            DatabaseSession(slot.session_pid, slot.session_started)
            for slot in case.slots
            if slot.session_pid
            and slot.session_started  # otherwise the process id may belong to another session by now
        ]
        known += self._opened.get(case.worker, [])
        until = time.monotonic() + BACKEND_SECONDS
        while True:
            ended, refused = self._connection.run(terminate_backends(case.worker, known))
            if refused and not case.backoff.seconds:
                logger.warning("%d connections of worker %s belong to another role", refused, case.worker)
            if not ended or time.monotonic() > until or self._stopping.wait(LOOK_SECONDS):
                return

    def _held(self, case: Case, domain: str) -> list[Held]:
        running = case.msg_ids(domain)
        past = PAST_SECONDS + time.monotonic() - case.died_at
        lease = case.settings.visibility_timeout + SPARE_LEASE_SECONDS
        found = self._connection.run(
            held_by(domain, case.worker, running=running, past_seconds=past, lease_seconds=lease)
        )
        if odd := [held.row for held in found if held.row.id is None or held.row.before is not None]:
            limit = case.settings.max_payload_bytes
            lost: list[str] = []
            right, _ = self._connection.run(
                put_right(
                    domain=domain,
                    worker=case.worker,
                    odd=odd,
                    max_bytes=limit,
                    running_in=running_file.read,
                    lost_types=lost,
                )
            )
            for command_type in lost:
                self.counts = self.counts.with_one(domain, command_type, Verdict.LOST)
            marked = {row.msg_id: row for row in right}
            found = [held._replace(row=marked.get(held.row.msg_id, held.row)) for held in found]
        return [held for held in found if held.row.id is not None]

    def _findings(self, case: Case, held: dict[str, list[Held]]) -> dict[Key, Finding]:
        running = []
        for domain, rows in held.items():
            for item in rows:
                slot = case.slot_of(domain, item)
                if slot is not None or case.is_board_spoiled:
                    rule = case.hello.rule(domain, item.row.command_type)
                    running.append(_running(case, domain, item, slot, rule))
        return examine(case.death, running)

    def _settle(self, case: Case, domain: str, rows: Sequence[Held]) -> int:
        """Write the outcomes. Returns how many must be tried again."""
        findings = case.findings or {}
        by_key = {}
        for held in rows:
            slot = case.slot_of(domain, held)
            finding = findings.get((domain, held.row.msg_id, held.row.read_ct))
            started = None if slot is None else time.time() - (time.monotonic() - slot.started)
            settlement = self._outcome(
                case, domain, held, finding, started, in_chunk=slot is not None and slot.is_chunk
            )
            by_key[held.row[:2]] = (held, finding, settlement)
        answers = self._write(domain, case.worker, [settlement for _, _, settlement in by_key.values()])
        for key, (held, finding, settlement) in by_key.items():
            if key not in answers:
                what = "given back" if finding is None else str(finding.role)
                case.settled[what] = case.settled.get(what, 0) + 1
                case.named.setdefault(what, []).append(str(held.row.command_id))
                self._count_attempt(domain, held, settlement)
                if finding is not None and finding.role is Role.CULPRIT:
                    say_culprit(case.worker, domain, held, finding, settlement)
                    self._count(case, domain, held, finding)
        self._reports.write(self._connection)
        return sum(answer in ("busy", "canceled") for answer in answers.values())

    def _count_attempt(self, domain: str, held: Held, settlement: Settlement) -> None:
        if settlement.verdict is not None:
            self.counts = self.counts.with_one(domain, held.row.command_type, settlement.verdict)

    def _count(self, case: Case, domain: str, held: Held, finding: Finding) -> None:
        """Report a culprit to the breaker of its type. A command that somebody asked to cancel is not reported."""
        row = held.row
        if held.cancel is None and row.id is not None:
            judgement = Judgement(Verdict.RETRY, finding.failure)
            slot = case.slot_of(domain, held)
            ran_for = 0.0 if slot is None else time.monotonic() - slot.started
            where = (domain, row.command_type, row.id)
            one = report_of(case.settings, *where, judgement, is_probe=False, ran_for=ran_for)
            if one is not None:
                self._reports.add(one)
                self._judging[domain] = time.monotonic() + JUDGING_SECONDS

    def _judge_breakers(self) -> None:
        """Open breakers of types that kill their workers: the replacements may not live long enough to do it."""
        now = time.monotonic()
        self._judging = {domain: until for domain, until in self._judging.items() if until > now}
        if self._judging:
            self._judge.judge(self._connection, self._connection.run(watch(sorted(self._judging))))

    def _outcome(
        self,
        case: Case,
        domain: str,
        held: Held,
        finding: Finding | None,
        started: float | None,
        *,
        in_chunk: bool,
    ) -> Settlement:
        rule = case.hello.rule(domain, held.row.command_type)
        spread = random.random()  # noqa: S311 - jitter
        return outcome(domain, held, finding, rule, started=started, spread=spread, in_chunk=in_chunk)

    def _write(
        self, domain: str, worker: str, settlements: Sequence[Settlement], lock_timeout_ms: int | None = None
    ) -> dict[tuple[int, int], str]:
        """Settle all at once or, after an error, one by one: a bad or locked row must not fail the others."""
        try:
            return dict(self._connection.run(settle(domain, worker, settlements, lock_timeout_ms=lock_timeout_ms)))
        except psycopg.Error as error:
            if is_passing(error) and not is_locked(error):
                raise
            if len(settlements) == 1:
                key = (settlements[0].msg_id, settlements[0].read_ct)
                if is_locked(error):
                    return {key: "busy"}
                logger.exception("an outcome of dead worker %s cannot be stored", worker)
                return {key: "refused"}
        answers: dict[tuple[int, int], str] = {}
        for settlement in settlements:
            answers |= self._write(domain, worker, [settlement], HURRIED_MS)
        return answers


def _running(case: Case, domain: str, held: Held, slot: SlotView | None, rule: Rule) -> Running[Key]:
    row = held.row
    return Running(
        (domain, row.msg_id, row.read_ct),
        0 if slot is None else slot.ident,
        0 if slot is None else slot.native_id,
        ran_for=0.0 if slot is None else case.died_at - slot.started,
        is_suspect=row.suspect is not None,
        is_isolated=_is_isolated(case.settings, row, rule),
    )


def _is_isolated(settings: Settings, row: ClaimedRow, rule: Rule) -> bool:
    """Did it run in a child process?"""
    return row.suspect is not None or rule.isolation == "process" or (settings.quarantine and bool(row.quarantine))
