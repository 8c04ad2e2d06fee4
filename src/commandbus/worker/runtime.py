"""Parts: a running worker's insides, put together and taken apart. What flows between them goes through here.

The claimer asks for room and delivers rows; lanes run them and hand the outcome to the settler. What is held is
known in one set, which the keeper reads; what runs, and where, in one dictionary, which the ladder reads. Whoever
takes an attempt out of that dictionary owns its settlement.

A supervised worker shows its slots on a board and drains at the first stuck attempt: it claims nothing more, lets
what is healthy finish, and ends; its supervisor starts a replacement meanwhile. A worker inside an application
never drains.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakSet

from commandbus.clock import boottime, monotonic
from commandbus.db.service import DatabaseService
from commandbus.flow.commands.renew import PendingCancel
from commandbus.flow.commands.settle import ALONE, QUARANTINE, SUSPECT, Settlement, cancellation
from commandbus.logger import safe_logger
from commandbus.model.limit_state import ApiAnswer
from commandbus.model.outcome import Failure
from commandbus.settings import Settings
from commandbus.worker.board import State
from commandbus.worker.board_writer import BoardWriter
from commandbus.worker.breakers import WorkerBreakers
from commandbus.worker.claim_pause import ClaimPause
from commandbus.worker.claimer import Claimer
from commandbus.worker.deadlines import autopsy
from commandbus.worker.deadlines.ladder import Document, Ladder, Running
from commandbus.worker.execution.async_slots import AsyncSlot, AsyncSlots
from commandbus.worker.execution.attempt import NEVER, Attempt, Stop, Why
from commandbus.worker.execution.concurrency import ConcurrencyBudget
from commandbus.worker.execution.connections import Borrowed, HandlerConnections
from commandbus.worker.execution.context import Services
from commandbus.worker.execution.execute import Ended, Executor
from commandbus.worker.execution.fresh_thread import in_fresh_thread
from commandbus.worker.execution.slots import Slot, Slots
from commandbus.worker.exhaustion import ExhaustedError
from commandbus.worker.isolation.child_process import ChildProcess
from commandbus.worker.isolation.isolation import Isolation
from commandbus.worker.isolation.quarantine import Quarantine
from commandbus.worker.lease_keeper import LeaseKeeper
from commandbus.worker.limits import LIMITS_DEGRADED, CallFailed, LimitedWork, RateLimited
from commandbus.worker.maintenance import Maintenance, MaintenanceFigures
from commandbus.worker.memory import resident_megabytes
from commandbus.worker.raw_messages import Adopter
from commandbus.worker.settler import Settler
from commandbus.worker.unhandled_types import UnhandledTypes
from commandbus.worker.worker_options import ROUTER_SLOTS, StopReport, WorkerSpec, identity

logger = safe_logger("commandbus.worker")

SETTLE_RESERVE_SECONDS = 2.0
STALE_SECONDS = 0.5
STALE_LOOKS = 3
LOOK_SECONDS = 0.2
CAUTIOUS_SECONDS = 2.0
UNREACHABLE = "database_unreachable"
UNWRITTEN = "outcomes_unwritten"
CLAIMLESS = "claims"
CLAIMLESS_SECONDS = 10.0
MOST_UNWRITTEN = 2000  # a few batches of the settler's
BRIEF_IDLE_SECONDS = 5.0  # isolated attempts open connections of their own: idle ones here must make room


class WorkerRuntime:
    """The running insides of a worker."""

    def __init__(self, spec: WorkerSpec, settings: Settings) -> None:
        self._spec = spec
        self._settings = settings
        self._handlers = spec.handlers
        self.held: set[Attempt] = set()
        self.running: Running = {}
        self._starting: set[Attempt] = set()  # wait for a process of their own, or are about to run in it
        self.state = State.ACTIVE
        self.stuck = 0
        self._given_back = 0
        self._changing = threading.Lock()
        self._low = 0
        self._late_seconds = settings.timeouts.late_seconds  # under an older lease nothing is started
        self._cautious_until = 0.0  # until then nothing is prefetched
        self._stale_looks = 0  # so many looks in a row found something that should have started long ago
        self._stale_looked_at = 0.0
        self._pause = ClaimPause()
        self._limit_said = False
        self._is_hurried = False
        self._was_degraded = False
        self._was_unreachable = False
        self._most_unwritten = MOST_UNWRITTEN + 2 * settings.concurrency
        self._from_before: dict[tuple[str, int], Attempt] = {}  # held when the claimer last connected
        self._was_idle = False  # at the last look nothing was held, and nothing there
        self._board_writer: BoardWriter | None = None
        if spec.supervision is not None:
            board, grace = spec.supervision.board, settings.cancel_grace
            self._board_writer = BoardWriter(board, spec.domains, self.running, grace=grace)
        self._budget = ConcurrencyBudget(settings.concurrency, self._place_is_free)
        self._some_isolated = any(item.options.isolation == "process" for item in spec.handlers)
        self._routed = _routed_domains(spec)
        self._router_budget = ConcurrencyBudget(ROUTER_SLOTS if self._routed else 0)
        self._connections = self._make_connections()
        self._limited = self._make_limited()
        services = self._services()
        self._breakers = WorkerBreakers(settings, spec.domains)
        self._unhandled = UnhandledTypes(settings, spec.id, spec.domains, spec.handlers)
        self._unhandled.on_due = self._look_again
        self._executor = Executor(
            services,
            spec.policy,
            settings.timeouts,
            spec.handlers,
            spec.health,
            running=self.running,
            on_failed=self._breakers.failed,
        )
        self._isolation = self._make_isolation(services)
        self._apart = self._make_apart()
        self.settler = self._make_settler()
        self._slots = Slots(
            self._budget,
            self._run,
            name=spec.id,
            on_thread=self._show_thread,
        )
        self._router = Slots(
            self._router_budget,
            self._run,
            name=f"{spec.id}-router",
            on_thread=self._show_thread,
            first=2 * settings.concurrency,
        )
        self._loop = self._make_loop() if any(handler.is_async for handler in spec.handlers) else None
        self._adopter = Adopter(settings, spec.id, on_error=spec.fail, name=spec.id)
        self._claimer = self._make_claimer()
        self._keeper = LeaseKeeper(
            settings, spec.id, held=self.held.copy, on_cancel=self._cancel, on_error=spec.fail, name=spec.id
        )
        self._maintenance = Maintenance(
            settings,
            identity(spec, settings),
            figures=MaintenanceFigures(lambda: len(self.running), lambda: dict(self.settler.settled)),
            health=spec.health,
            breakers=self._breakers,
            unhandled=self._unhandled,
            on_error=spec.fail,
            name=spec.id,
        )
        self._threads: list[DatabaseService] = [
            *(self._claimer, self._adopter, self.settler, self._keeper, self._maintenance)
        ]
        self.ladder = self._make_ladder()

    def _make_connections(self) -> HandlerConnections:
        spec, settings = self._spec, self._settings
        most = settings.concurrency + self._router_budget.total
        return HandlerConnections(
            settings,
            name=f"{spec.id} handlers",
            size=min(most, settings.pool_max_size or most),
            lent=spec.pool,
            on_exhausted=self._exhausted,
            on_no_thread=self._pause.begin,
            on_unreachable=lambda: spec.health.set_critical(UNREACHABLE),
            on_backend=None if self._board_writer is None else self._board_writer.backend,
            max_idle=BRIEF_IDLE_SECONDS if self._some_isolated else None,
        )

    def _services(self) -> Services:
        return Services(
            worker=self._spec.id,
            connections=self._connections,
            max_payload_bytes=self._settings.max_payload_bytes,
            default_max_attempts=self._spec.policy.max_attempts,
            extend=self._extend,
            hold=self._hold,
            release=Attempt.release_row,
            extend_timeout=self._settings.visibility_timeout,
            max_extension=self._settings.max_extension,
            progress=self._note_progress,
            limits=self._limited,
        )

    def _make_limited(self) -> LimitedWork:
        return LimitedWork(
            self._settings,
            self._spec.id,
            push=self._push_one,
            settle=self._settle,
            on_lost=lambda attempt, text: self.ladder.ask(attempt, Why.LEASE, text),
            on_error=self._spec.fail,
        )

    def _make_isolation(self, services: Services) -> Isolation:
        return Isolation(
            self._settings,
            self._spec.id,
            self._spec.handlers,
            self._executor,
            extend=services.extend,
            hold=services.hold,
            progress=services.progress,
            terminate=self._end_sessions,
            cancel_query=self._cancel_query,
            on_exhausted=self._pause.begin,
            limits=self._limited,
            default_max_attempts=services.default_max_attempts,
            quarantines=self._quarantines,
            fleet=None if self._spec.supervision is None else self._spec.supervision.supervisor,
        )

    @property
    def _quarantines(self) -> bool:
        """Do commands that got stuck run in child processes? Without a supervisor nothing drains, nor freezes."""
        return self._settings.quarantine and self._spec.supervision is not None

    def _make_apart(self) -> Quarantine:
        there_is = self._quarantines and self._isolation.is_available
        one_is_free = max(1, self._settings.concurrency - 1)  # of several slots: what hangs must not have them all
        return Quarantine(
            self._handlers,
            turn=None if self._spec.supervision is None else self._spec.supervision.turn,
            processes=min(self._settings.quarantine_processes, one_is_free) if there_is else None,
            on_turn=lambda attempt: self._keeper.run_alone(attempt, self._push_alone),
        )

    def _make_settler(self) -> Settler:
        spec = self._spec
        return Settler(
            self._settings,
            spec.id,
            on_settled=self._settled_towards_idle if spec.ends_idle else self._settled,
            on_done=self._done,
            on_written=spec.health.record_success,
            # An idle claimer looked at what is due before this retry was: it must look again.
            on_again=self._look_again,
            on_error=spec.fail,
            name=spec.id,
        )

    def _make_loop(self) -> AsyncSlots:
        loop = AsyncSlots(
            self._budget,
            self._run_async,
            name=self._spec.id,
            first=self._settings.concurrency,
            on_thread=self._show_thread,
        )
        self._slots.share_with_others()
        loop.share_with_others()
        return loop

    def _make_claimer(self) -> Claimer:
        spec = self._spec
        return Claimer(
            self._settings,
            spec.id,
            spec.domains,
            routed=self._routed,
            room=self._room,
            spare=self._spare,
            finished=self._finished,
            deliver=self._deliver,
            on_unsure=self._return_unsure,
            apart=self._apart,
            adopter=self._adopter,
            unhandled=self._unhandled,
            on_cancel=self._look_for_cancel,
            on_idle=self._check_idle,
            on_connect=self._note_connected,
            on_error=spec.fail,
            name=spec.id,
        )

    def _make_ladder(self) -> Ladder:
        return Ladder(
            self._settings.timeouts,
            self.running,
            loop=self._loop,
            health=self._spec.health,
            cancel_query=self._keeper.cancel_query,
            fence=self._fence,
            bystander=self._set_aside,
            on_stuck=self._note_stuck,
            on_tick=self._tick,
            can_isolate=self._isolation.is_available,
            name=self._spec.id,
        )

    def start(self) -> None:
        """Start all threads."""
        _started.add(self)
        if self._board_writer is not None:
            self._board_writer.start()
        self._isolation.start()
        self._slots.start()
        if self._routed:
            self._router.start()
        if self._loop is not None:
            self._loop.start()
        self.settler.start()
        self._keeper.start()
        self._maintenance.start()
        if self._spec.has_limits:
            self._limited.start()
        self._beat(monotonic())  # a handler may freeze this process before the ladder's first tick
        self.ladder.start()
        self._claimer.start()

    @property
    def is_database_lost(self) -> bool:
        """Is the database out of reach at this moment?"""
        return any(service.is_down for service in self._threads)

    def leave_to_parent(self) -> None:
        """A handler forked without exec, and this is the copy: whatever runs or waits here is its parent's."""
        for attempt in list(self.running):
            attempt.bar()
            if attempt.borrowed is not None:
                attempt.borrowed.cut()
        self.running.clear()
        self.held.clear()
        self._apart.take_back()
        self._slots.waiting.clear()
        self._router.waiting.clear()
        if self._loop is not None:
            self._loop.leave_to_parent()

    # --- drain and stop -------------------------------------------------------------------------------------

    def drain(self, reason: str) -> None:
        """Claim nothing more and give back what has not started; when nothing runs any more, the worker ends."""
        with self._changing:
            if self.state is not State.ACTIVE:
                return
            self.state = State.DRAINING
        self._maintenance.state = self.state.name
        level = logging.WARNING if self.stuck else logging.INFO
        logger.log(level, "worker %s drains: %s", self._spec.id, reason)
        if self._spec.supervision is not None:
            self._spec.supervision.on_state(self.state.name, reason)
        self._claimer.end()
        self._give_back()

    def hurry(self) -> None:
        """Cancel what runs and has no deadline, without charging it. What has one keeps it. In a block with a time
        limit of its own an attempt has a deadline, too: the ladder looks again when it has left that."""
        self._is_hurried = True
        for attempt in list(self.running):
            if attempt.deadline_at == NEVER and attempt.stop is None:
                self.ladder.ask(attempt, Why.SHUTDOWN, "its worker has to end")

    def stop(self, limit: float, reason: str, *, hurry: Callable[[], bool]) -> StopReport:
        """Take everything apart in order, within the limit; `hurry` says not to wait for what runs.

        Claim nothing more, give back what has not started, let what runs finish, then ask it to stop, and after
        its grace fence it: it is reported as abandoned, and tried again elsewhere at once.
        """
        started = monotonic()
        deadline = started + limit
        hurried = self.ladder.abandoned  # while it drained: this end did not cut them off
        with self._changing:
            self.state = State.EXITING
        self._maintenance.state = "STOPPING"
        self._claimer.stop(max(0.1, limit - SETTLE_RESERVE_SECONDS))
        self._adopter.stop(max(0.1, deadline - monotonic() - SETTLE_RESERVE_SECONDS))
        self._give_back()
        self._await_starting(monotonic() + min(1.0, limit / 4))
        reserve = min(SETTLE_RESERVE_SECONDS, limit / 2)
        grace = min(self._settings.cancel_grace, max(0.0, limit - reserve))
        self._drain(deadline - reserve - grace, hurry)
        if self.running:
            self._cancel_all(0.0 if hurry() else max(0.0, min(grace, deadline - reserve - monotonic())))
            self._drain(deadline - reserve + 0.3, hurry)
        if self.running:
            self._cancel_all(0.0)
            self._drain(monotonic() + 0.5, lambda: False)
        abandoned = self.ladder.abandoned - hurried + len(self.running)
        # In this order: what the ladder abandons, the keeper fences, and only then the settler gets its outcome.
        self.ladder.stop(max(0.1, deadline - monotonic() - reserve / 2))
        self._keeper.flush(max(0.1, deadline - monotonic() - reserve / 2))
        self._limited.flush(max(0.1, min(reserve / 2, deadline - monotonic() - reserve / 4)))
        self.settler.close(max(0.1, deadline - monotonic() - reserve / 4))
        unwritten = max(0, len(self.held) - len(self.running))
        self._slots.stop()
        self._router.stop()
        if self._loop is not None:
            self._loop.stop(max(0.1, deadline - monotonic() - 0.2))
        self._isolation.close(max(0.1, deadline - monotonic()))
        self._limited.stop(max(0.1, deadline - monotonic()))
        self._keeper.stop(max(0.1, deadline - monotonic()))
        self._maintenance.stop(max(0.1, deadline - monotonic()))
        self._connections.close()
        settled = sum(self.settler.settled.values()) - self._given_back - self.ladder.abandoned
        return StopReport(reason, settled, self._given_back, abandoned, unwritten)

    def _drain(self, until: float, hurry: Callable[[], bool]) -> None:
        """Wait until no attempt runs. The last slot to finish says so; the poll is for a hurried stop."""
        while self.running and monotonic() < until and not hurry():
            self._budget.wait_until_free(min(0.1, max(0.001, until - monotonic())))
            if self.running and not self._budget.taken:
                time.sleep(0.01)  # the last slots are on their way out

    def _await_starting(self, until: float) -> None:
        """Wait until those that waited for a process of their own are given back, or run."""
        while self._starting and monotonic() < until:
            time.sleep(0.01)

    def _cancel_all(self, grace: float) -> None:
        for attempt in list(self.running):
            self.ladder.ask(attempt, Why.SHUTDOWN, "its worker was told to stop", grace=grace)

    def _give_back(self) -> None:
        self._isolation.let_go()
        for lane in (self._apart, self._slots, self._router, self._loop, self._limited):
            if lane is not None:
                for attempt in lane.take_back():
                    self._return(attempt, f"its worker is {self.state.name.lower()}")

    def _return(self, attempt: Attempt, why: str) -> None:
        if attempt.permits:
            self._limited.never_began(attempt)
        if attempt.is_lost:
            self._drop(attempt)  # its row is somebody else's: there is nothing to give back
            return
        self._given_back += 1
        self.settler.add(attempt, attempt.give_back(why))

    def _drop(self, attempt: Attempt) -> None:
        """It is somebody else's by now: nothing is to be written about it here."""
        self.held.discard(attempt)
        self._apart.leave(attempt)

    # --- called by the ladder -----------------------------------------------------------------------------------

    def _fence(self, attempt: Attempt, stop: Stop, taken: Document) -> None:
        borrowed = attempt.borrowed

        if attempt.was_calling:
            late = stop.why is Why.DEADLINE
            answer = ApiAnswer.TIMEOUT if late else ApiAnswer.UNKNOWN
            self._limited.abandoned(attempt, answer, "timeout: the attempt is stuck")

        def settle(document: Document) -> None:
            self._write_off(attempt, borrowed)
            if attempt.is_lost:
                self._drop(attempt)
            else:
                self._settle_end(attempt, self._executor.give_up(attempt, stop, autopsy.to_json(document)))

        self._keeper.fence(attempt, taken, settle)

    def _set_aside(self, attempt: Attempt, place: Slot | AsyncSlot, failure: Failure, suspect: bool) -> None:  # noqa: FBT001
        """A bystander of a blocked loop, or one of several that may have blocked it."""
        borrowed = attempt.borrowed
        if self._board_writer is not None:
            self._board_writer.leave(place.index)
        if attempt.was_calling:
            self._limited.abandoned(attempt, ApiAnswer.UNKNOWN, "a neighbour blocked the event loop")

        def settle(_: Document) -> None:
            self._write_off(attempt, borrowed)
            self.settler.add(attempt, self._executor.waive(attempt, failure, suspect=suspect))

        self._keeper.fence(attempt, {}, settle)

    def _write_off(self, attempt: Attempt, borrowed: Borrowed | None) -> None:
        """It was given up: the pool gets back what it held, and what it waits for."""
        self._connections.wait_no_more(attempt)
        if borrowed is not None:
            self._connections.write_off(borrowed)

    def _note_stuck(self, attempt: Attempt, place: Slot | AsyncSlot) -> None:
        self.stuck += 1
        if self._board_writer is not None:
            self._board_writer.leave(
                place.index
            )  # it is settled: a death of this worker says nothing of it any more
        if self._spec.supervision is not None and self.state is State.ACTIVE:
            self.drain(f"command {attempt.command_id} ({attempt.command_type}) is stuck")
        elif self._claimer.is_waiting_for_room:
            self._claimer.wake()

    def _tick(self, now: float) -> None:
        self._watch_services(now)
        for lane in (self._slots, self._router, self._loop):
            if lane is not None:
                lane.tend()
        for attempt in self._apart.take_back_late():
            self._return(attempt, "it has waited long for its turn to run alone")
        self._say_degraded()
        self._beat(now)
        if self.state is State.DRAINING and not self.running and not self._starting and not self._waiting():
            self._spec.request_stop(f"drained, stuck attempts: {self.stuck}" if self.stuck else "drained")
        if self.state is State.ACTIVE:
            self._check_limits()
        elif self._is_hurried:
            self.hurry()

    def _watch_services(self, now: float) -> None:
        """Health names what does not work. A supervised worker with a part that will not work again drains."""
        health = self._spec.health
        for service in [*self._threads, *self._limited.services]:
            trouble, reason = service.trouble, service.part.replace(" ", "_")
            if trouble is not None:
                health.set_critical(reason, trouble)
                if service.is_broken and self._spec.supervision is not None and self.state is State.ACTIVE:
                    self.drain(trouble)
            elif service.is_away:
                health.set_degraded(reason, f"the {service.part} cannot reach the database")
            else:
                health.clear(reason)
        self._watch_claims()
        self._watch_descriptors()
        down = [service.down_since for service in self._threads if service.down_since is not None]
        if down and now - min(down) >= self._settings.pool_reconnect_timeout:
            health.set_critical(UNREACHABLE)
            self._was_unreachable = True
        elif self._was_unreachable and not down:
            health.clear(UNREACHABLE)
            self._was_unreachable = False
        if self.settler.backlog >= self._most_unwritten:
            unwritten = f"{self.settler.backlog} outcomes are not written yet: nothing is claimed"
            health.set_critical(UNWRITTEN, unwritten)
        else:
            health.clear(UNWRITTEN)

    @property
    def _claimless_seconds(self) -> float:
        return self._claimer.claimless_seconds if self.state is State.ACTIVE and not self._pause.is_on else 0.0

    def _watch_claims(self) -> None:
        """Whatever the reason is: a worker that has room and asks for nothing does not work."""
        if (seconds := self._claimless_seconds) >= CLAIMLESS_SECONDS and not self._claimer.is_down:
            self._spec.health.set_critical(
                CLAIMLESS, f"there is room, and nothing could be claimed for {seconds:.0f} s"
            )
        else:
            self._spec.health.clear(CLAIMLESS)

    def _watch_descriptors(self) -> None:
        """Each part gets over it, but the files of handlers' libraries and of this process do not: a supervised
        worker is replaced."""
        if self._spec.supervision is not None and self.state is State.ACTIVE:
            services = [*self._threads, *self._limited.services]
            if self._apart.is_turn_lost or any(service.descriptors_lost for service in services):
                self.drain("somebody in this process has closed descriptors that are not their own")

    def _say_degraded(self) -> None:
        is_degraded = self._limited.is_degraded
        if is_degraded != self._was_degraded:
            self._was_degraded = is_degraded
            if is_degraded:
                self._spec.health.set_degraded(LIMITS_DEGRADED, self._limited.trouble)
            else:
                self._spec.health.clear(LIMITS_DEGRADED)

    def _beat(self, now: float) -> None:
        if self._board_writer is not None:
            self._board_writer.beat(
                now,
                self._spec.health,
                state=self.state,
                settled=sum(self.settler.settled.values()),
                claimed=self._claimer.claimed,
                slots=self._budget.total + self._router_budget.total - len(self._starting),
                stuck=self.stuck,
                claimless=self._claimless_seconds,
            )

    def _check_limits(self) -> None:
        """Recycle after so many messages or so much memory: the worker ends cleanly, to be started again."""
        settings = self._settings
        settled = sum(self.settler.settled.values())
        if settings.max_messages is not None and settled >= settings.max_messages:
            self._say_limit(f"{settled} messages were settled (max_messages {settings.max_messages})")
        elif settings.max_memory_mb is not None and (used := resident_megabytes()) > settings.max_memory_mb:
            self._say_limit(f"{used:.0f} MB of memory are in use (max_memory_mb {settings.max_memory_mb})")

    def _say_limit(self, reason: str) -> None:
        if self._limit_said:
            return
        self._limit_said = True
        logger.info("this worker ends to be started again: %s", reason)
        if self._spec.supervision is not None:
            self.drain(reason)
        else:
            self._spec.request_stop(reason)

    # --- called by contexts and the keeper ----------------------------------------------------------------------

    def _extend(self, attempt: Attempt, _seconds: float) -> Future[bool]:
        """The lease stays one renewal long, so that a dead worker's command returns soon; the deadline moves."""
        return self._keeper.renew_now(attempt)

    def _hold(self, attempt: Attempt) -> Future[bool]:
        return self._keeper.hold(attempt)

    def _cancel_query(self, attempt: Attempt) -> None:
        self._keeper.cancel_query(attempt)

    def _note_progress(self, attempt: Attempt, text: str) -> None:
        attempt.extras.progress = text

    def _end_sessions(self, sessions: Sequence[Borrowed]) -> None:
        if sessions:
            self._keeper.end_sessions(sessions).result(self._settings.visibility_timeout)

    def _cancel(self, attempt: Attempt, cancel: PendingCancel) -> None:
        if attempt.stop is None:
            self.ladder.ask(attempt, Why.CANCEL, cancellation(cancel.by, cancel.reason).error)

    def _exhausted(self) -> None:
        self._spec.health.record_pool_exhaustion()
        self._pause.begin("the connection pool is exhausted")

    # --- called by the claimer ----------------------------------------------------------------------------------

    def _look_again(self) -> None:
        self._claimer.wake()

    def _look_for_cancel(self, domain: str, msg_id: int) -> None:
        self._keeper.look_for_cancel(domain, msg_id)

    def _check_idle(self) -> bool:
        """Nothing was there to claim; answers whether to look once more. What ran during that look may have sent
        something: only a look that finds nothing while nothing is held is the last."""
        if not self._spec.ends_idle or self._is_at_work:
            self._was_idle = False
            return False
        if monotonic() < self._apart.late_until:
            return False
        if self._was_idle:
            self._spec.request_stop("nothing is left that could run now")
            return False
        self._was_idle = True
        return True

    @property
    def _is_at_work(self) -> bool:
        """Is there anything from which a command may come?"""
        others = (self._adopter.is_busy, self.settler.is_folding, self._limited.is_busy, self._unhandled.is_busy)
        return bool(self.held) or any(others)

    def _settle(self, attempt: Attempt, settlement: Settlement) -> None:
        self.settler.add(attempt, settlement)

    def _settled(self, attempt: Attempt) -> None:
        self.held.discard(attempt)
        self._apart.leave(attempt)
        if attempt.parks_at is not None:
            self._limited.settled(attempt)

    def _done(self, attempts: Sequence[Attempt]) -> None:
        """They have completed in the usual way: none of them ran apart, or waits for a limit."""
        self.held.difference_update(attempts)
        if self._spec.ends_idle and not self.held:
            self._claimer.wake()

    def _settled_towards_idle(self, attempt: Attempt) -> None:
        self._settled(attempt)
        if not self.held:
            self._claimer.wake()

    def _waiting(self) -> int:
        waiting = len(self._slots.waiting) + (len(self._loop.waiting) if self._loop is not None else 0)
        return waiting + self._limited.waiting

    def _room(self, prefetch: int) -> int:
        """How many attempts to claim now; nothing while more than half of what is prefetched still waits."""
        waiting = self._waiting()
        if monotonic() < self._cautious_until:
            prefetch = 0
        self._low = prefetch // 2
        if waiting > self._low:
            self._return_stale()
            return 0
        self._stale_looks = 0
        if self.state is not State.ACTIVE or self._pause.is_on or self.settler.backlog >= self._most_unwritten:
            return 0
        return self._budget.total - self._budget.taken + prefetch - waiting

    def _spare(self) -> int:
        """How many messages of processes to claim beside that."""
        if self.state is not State.ACTIVE or self._pause.is_on or self.settler.backlog >= self._most_unwritten:
            return 0
        return self._router_budget.total - self._router_budget.taken - len(self._router.waiting)

    def _return_stale(self) -> None:
        """What was prefetched should have started long ago: handlers have become slow, and another worker may
        be idle. One look is not enough: after a moment without the processor the claimer may run first."""
        stale = [lane for lane in (self._slots, self._router, self._loop) if lane is not None and _is_stale(lane)]
        now = monotonic()
        if not stale:
            self._stale_looks = 0
        elif now - self._stale_looked_at >= LOOK_SECONDS:
            self._stale_looks, self._stale_looked_at = self._stale_looks + 1, now
        if self._stale_looks >= STALE_LOOKS:
            self._stale_looks = 0
            self._cautious_until = now + CAUTIOUS_SECONDS
            for attempt in [attempt for lane in stale for attempt in lane.take_back()]:
                self._return(attempt, "the slots of its worker are busy")

    def _finished(self) -> int:
        return (
            self._slots.finished + self._router.finished + (self._loop.finished if self._loop is not None else 0)
        )

    def _deliver(self, domain: str, rows: Sequence[tuple[Any, ...]], claimed_at: float) -> list[tuple[Any, ...]]:
        """Hand rows to the lanes; returns those of unknown types, which the claimer parks."""
        self._was_idle = False
        if self._from_before:
            self._lose_reused(domain, rows)
        unhandled: list[tuple[Any, ...]] = []
        sync: list[Attempt] = []
        asynchronous: list[Attempt] = []
        get = self._handlers.get
        spare = self._spare() if domain in self._routed else 0
        routed: list[Attempt] = []
        limited: list[Attempt] = []
        hold, command_type, handler, is_plain, is_unknown = self.held.add, None, None, False, False
        for row in rows:
            if row[4] != command_type:
                command_type = row[4]
                handler = get(domain, command_type)
                is_plain = not spare and (handler is None or not (handler.is_async or handler.options.limits))
                is_unknown = handler is None and self._unhandled.parks
            if is_unknown:  # before its charge is looked at: the policy is its handler's
                unhandled.append(row)
                continue
            attempt = Attempt(domain, row, handler, claimed_at)
            hold(attempt)
            if (
                is_plain and row[1] == 1 and not row[QUARANTINE] and not row[ALONE]
            ):  # nearly all are: nothing is known of it yet
                sync.append(attempt)
                continue
            if attempt.charge > 1 and self._executor.is_exhausted(attempt):
                self.settler.add(attempt, self._executor.exhaust(attempt))
            elif (row[QUARANTINE] or row[ALONE]) and not self._apart.enter(attempt):
                continue  # `_push_alone`, when it is its turn
            elif handler is not None and handler.options.limits:
                limited.append(attempt)
            elif handler is not None and handler.is_async and not self._is_isolated(attempt):
                asynchronous.append(attempt)
            elif len(routed) < spare:
                routed.append(attempt)
            else:
                sync.append(attempt)
        if routed:
            self._router.push(routed)
        if sync:
            self._slots.push(sync)
        if asynchronous and self._loop is not None:
            self._loop.push(asynchronous)
        if limited:
            self._limited.permit_request(limited)
        if self.state is not State.ACTIVE:
            self._give_back()
        return unhandled

    def _return_unsure(self, domain: str, rows: Sequence[tuple[Any, ...]], claimed_at: float) -> None:
        """They were claimed, but a failover may lose that: they must not start."""
        for row in rows:
            attempt = Attempt(domain, row, self._handlers.get(domain, row[4]), claimed_at)
            self.held.add(attempt)
            self._return(attempt, "a failover may lose its claim")

    def _note_connected(self) -> None:
        """Whatever is held now was claimed on an earlier connection, perhaps from a server that is no more."""
        self._from_before = {(attempt.domain, attempt.msg_id): attempt for attempt in self.held.copy()}

    def _lose_reused(self, domain: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """After a failover that lost commits the server counts again from where it was: another command may get
        the msg_id of a lost one, its number, and its first read_ct. The fence of an attempt from before would
        fit it."""
        self._from_before = {key: attempt for key, attempt in self._from_before.items() if attempt in self.held}
        for row in rows:
            before = self._from_before.get((domain, row[0]))
            if before is not None and before.read_ct >= row[1]:
                before.is_lost = True
                self.settler.void(before)
                text = "command %s was lost by the database (a failover?): its message is another command's now"
                logger.error(text, before.command_id, extra=before.log_fields)

    def _push_alone(self, attempt: Attempt, is_held: bool) -> None:  # noqa: FBT001
        """It is its turn. Called by the keeper."""
        if not is_held or attempt.stop is not None or attempt.is_lost:
            self._return(attempt, self._why_not(attempt))
        elif attempt.handler is not None and attempt.handler.options.limits:
            self._limited.permit_request([attempt])
            if self.state is not State.ACTIVE:
                self._give_back()
        else:
            self._push_one(attempt)

    def _push_one(self, attempt: Attempt) -> None:
        """Nothing keeps it from its start any more: it has all its permits. Called by the limit client."""
        handler = attempt.handler
        if handler is not None and handler.is_async and not self._is_isolated(attempt) and self._loop is not None:
            self._loop.push([attempt])
        else:
            self._slots.push([attempt])
        if self.state is not State.ACTIVE:
            self._give_back()

    # --- called by the lanes ------------------------------------------------------------------------------------

    def _run(self, attempt: Attempt, slot: Slot) -> bool:
        if attempt.stop is not None or not attempt.is_surely_held(self._late_seconds):
            return self._never_start(attempt)
        if attempt.permits and self._limited.is_stale(attempt):
            return self._turn_back(attempt)
        process = None
        if self._is_isolated(attempt):
            process = self._take_process(attempt)
            if process is None:
                return True
        self._begin(attempt, slot)
        if process is None:
            if attempt.handler is not None and attempt.handler.options.fresh_thread:
                return self._run_in_fresh_thread(attempt, slot)
            return self._end(attempt, slot, self._executor.run(attempt))
        self._starting.discard(attempt)
        return self._end(attempt, slot, self._isolation.run(attempt, process))

    def _run_in_fresh_thread(self, attempt: Attempt, slot: Slot) -> bool:
        """As `_run`, in a thread that stands in for the slot's own as long as the attempt runs."""

        def stand_in() -> None:
            slot.ident = threading.get_ident()
            self._show_thread(slot.index)

        try:
            ended = in_fresh_thread(lambda: self._executor.run(attempt), on_start=stand_in)
        except ExhaustedError as error:
            self._pause.begin(str(error))
            ended = self._executor.failed(attempt, error)
        if not self._end(attempt, slot, ended):
            return False  # the slot's number is another thread's by now
        stand_in()
        return True

    async def _run_async(self, attempt: Attempt, slot: AsyncSlot) -> bool:
        if attempt.stop is not None or not attempt.is_surely_held(self._late_seconds):
            return self._never_start(attempt)
        if attempt.permits and self._limited.is_stale(attempt):
            return self._turn_back(attempt)
        self._begin(attempt, slot)
        return self._end(attempt, slot, await self._executor.run_async(attempt))

    def _begin(self, attempt: Attempt, place: Slot | AsyncSlot) -> None:
        self._executor.begin(attempt)
        self.running[attempt] = place
        if self._board_writer is not None:
            self._board_writer.enter(attempt, place.index)

    def _end(self, attempt: Attempt, place: Slot | AsyncSlot, ended: Ended) -> bool:
        """Hand the outcome to the settler; False if the ladder has given the attempt up, and its place away."""
        if self.running.pop(attempt, None) is None:
            return False
        attempt.started_at = 0.0  # over: the ladder looks past it, and what it left behind gets no connection
        if attempt.borrowed is not None:
            self._take_from_leftover(attempt, attempt.borrowed)
        if self._board_writer is not None:
            self._board_writer.end(place.index)
        if not isinstance(ended, Settlement) or ended.is_completion:
            self._breakers.completed(attempt)
        if attempt.permits:
            self._limited.ended(attempt)
        self._settle_end(attempt, ended)
        if self._claimer.is_waiting_for_room:
            self._offer_room()
        return True

    def _settle_end(self, attempt: Attempt, ended: Ended) -> None:
        if isinstance(ended, RateLimited | CallFailed):
            self._limited.judge(ended)
        else:
            self.settler.add(attempt, ended)

    def _is_isolated(self, attempt: Attempt) -> bool:
        row = attempt.row
        is_apart = self._some_isolated or row[SUSPECT] is not None or row[QUARANTINE]
        return bool(is_apart) and self._isolation.wants(attempt)

    def _take_process(self, attempt: Attempt) -> ChildProcess | None:
        """Wait for a process that is ready for it: until then it has not begun. None if it will not."""
        self._starting.add(attempt)
        taken = self._isolation.take(attempt)
        if isinstance(taken, ChildProcess):
            return taken
        if taken is None:
            self._never_start(attempt)
        else:
            self.settler.add(attempt, taken)
        self._starting.discard(attempt)
        if self._claimer.is_waiting_for_room:
            self._offer_room()
        return None

    def _take_from_leftover(self, attempt: Attempt, borrowed: Borrowed) -> None:
        """Its handler has ended, and a thread or task that it left behind still holds its connection."""
        logger.warning(
            "%s %s has ended, but something that it left behind holds its connection: that is ended, too",
            attempt.command_type,
            attempt.command_id,
            extra={"domain": attempt.domain, "command_id": attempt.command_id},
        )
        self._keeper.fence(attempt, {}, lambda _: self._connections.write_off(borrowed))

    def _turn_back(self, attempt: Attempt) -> bool:
        self._limited.turn_back(attempt)
        if self._claimer.is_waiting_for_room:
            self._offer_room()
        return True

    def _never_start(self, attempt: Attempt) -> bool:
        """It was asked to stop before it had begun, or its lease is not sure. If somebody canceled it, the settler
        hears that; if it is somebody else's by now, the fence refuses."""
        self._return(attempt, self._why_not(attempt))
        return True

    def _why_not(self, attempt: Attempt) -> str:
        if attempt.stop is not None:
            return attempt.stop.text
        if not attempt.is_surely_held(self._late_seconds):
            return "its lease may have ended"
        return "its worker had no process for it" if self.state is State.ACTIVE else "its worker stops"

    def _show_thread(self, slot: int) -> None:
        if self._board_writer is not None:
            self._board_writer.thread(slot)

    def _place_is_free(self) -> None:
        """A claimer that found no free slot when an attempt ended may find one now that its slot sleeps."""
        if self._claimer.is_waiting_for_room:
            self._offer_room()

    def _offer_room(self) -> None:
        if self._waiting() <= self._low:
            self._claimer.is_waiting_for_room = False
            self._claimer.wake()


def _is_stale(lane: Slots | AsyncSlots) -> bool:
    """Has the oldest waited before its slots for long? Its wait for permits, before that, does not count."""
    oldest = next(iter(lane.waiting.copy()), None)  # a copy: slots take from it, too
    if oldest is None:
        return False
    waited = [boottime() - oldest.renewed_at, *(monotonic() - permit.taken_at for permit in oldest.permits)]
    return min(waited) > STALE_SECONDS


def _routed_domains(spec: WorkerSpec) -> list[str]:
    """Domains with slots of their own: those in which processes are moved and nothing else happens, in a worker
    that has other work, too."""
    others = {item.domain for item in spec.handlers if not item.is_router or item.is_async}
    routed = {item.domain for item in spec.handlers if item.is_router}
    found = [domain for domain in spec.domains if domain in routed - others]
    return found if len(found) < len(spec.domains) else []


_started: WeakSet[WorkerRuntime] = WeakSet()


def _leave_all_to_parent() -> None:
    for parts in list(_started):
        parts.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
