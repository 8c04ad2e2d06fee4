"""WorkerRuntime: makes the parts of a running worker, starts them, and stops them in order.

    claimer → dispatcher → slots → settler      a command's way, from its claim to its outcome
    attempt registry                            what is held, what runs
    ladder, fencer, lease keeper                what happens to an attempt that does not end in time
    maintenance, adopter, limit client, scheduler, fenced writer  work beside that way

A supervised worker shows its slots on a board and drains at the first stuck attempt: it claims nothing more, lets
what is healthy finish, and ends; its supervisor starts a replacement meanwhile. A worker inside an application
never drains.

Threads: the owner of the worker calls `start`, `drain`, `hurry` and `stop`; the ladder may call `drain`, too. The
private methods say whose callbacks they are.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import WeakSet

from commandbus.clock import monotonic
from commandbus.db.service import DatabaseService
from commandbus.flow.commands.renew import PendingCancel
from commandbus.flow.commands.settle import cancellation
from commandbus.flow.effects.write import Checkpoint, Write, Written
from commandbus.logger import safe_logger
from commandbus.model.outcome import Failure
from commandbus.settings import Settings
from commandbus.worker import masking
from commandbus.worker.attempt_registry import AttemptRegistry, Running
from commandbus.worker.board import State
from commandbus.worker.board_writer import BoardWriter
from commandbus.worker.breakers import WorkerBreakers
from commandbus.worker.claim_pause import ClaimPause
from commandbus.worker.claimer import Claimer
from commandbus.worker.deadlines.fencer import Fencer
from commandbus.worker.deadlines.ladder import Ladder
from commandbus.worker.dispatcher import Dispatcher, router_slots
from commandbus.worker.execution.async_slots import AsyncSlot
from commandbus.worker.execution.attempt import NEVER, Attempt, Why
from commandbus.worker.execution.chunk_execute import ChunkExecutor, Everything
from commandbus.worker.execution.connections import Borrowed, HandlerConnections
from commandbus.worker.execution.context import Services
from commandbus.worker.execution.effects import note_open_effect
from commandbus.worker.execution.execute import Executor
from commandbus.worker.execution.execute import Written as WrittenOutcome
from commandbus.worker.execution.slots import Slot
from commandbus.worker.execution.wrapped_handlers import WrappedHandlers
from commandbus.worker.fenced_writer import FencedWriter
from commandbus.worker.fleet_reports import FleetReports
from commandbus.worker.isolation.isolation import Isolation
from commandbus.worker.isolation.quarantine import Quarantine
from commandbus.worker.key_releaser_on_demand import KeyReleaserOnDemand
from commandbus.worker.lease_keeper import LeaseKeeper
from commandbus.worker.lifespans import RunningLifespans
from commandbus.worker.limits import LimitedWork
from commandbus.worker.maintenance import Maintenance, MaintenanceFigures
from commandbus.worker.memory import resident_megabytes
from commandbus.worker.raw_messages import Adopter
from commandbus.worker.running_file import RunningFile
from commandbus.worker.scheduler_on_demand import SchedulerOnDemand
from commandbus.worker.service_watch import UNREACHABLE, ServiceWatch
from commandbus.worker.settler import Settler
from commandbus.worker.slot_views import SlotViews
from commandbus.worker.stop_report import StopReport
from commandbus.worker.unhandled_types import UnhandledTypes
from commandbus.worker.wait_times import WaitTimes
from commandbus.worker.worker_options import WorkerSpec, identity

logger = safe_logger("commandbus.worker")

SETTLE_RESERVE_SECONDS = 2.0
LIFESPANS_SECONDS = 1.0  # what on_stop functions get at least, if attempts have used up the time of the stop
NOT_STARTED_SECONDS = 1.0
PAUSED = "paused"  # the name of this reason in health
"""A worker that holds nothing looks after itself at every second tick of the ladder."""
BRIEF_IDLE_SECONDS = 5.0  # isolated attempts open connections of their own: idle ones here must make room


class WorkerRuntime:
    """The running parts of a worker."""

    def __init__(self, spec: WorkerSpec, settings: Settings) -> None:
        self._spec = spec
        self._settings = settings
        masking.use(settings.mask)
        self.stuck = 0
        self._changing = threading.Lock()
        self._is_recycled = False  # was it logged that this worker will be replaced?
        self._is_hurried = False
        # How many had been claimed when a look last found nothing held and nothing waiting.
        self._claimed_when_idle = -1
        self._pause = ClaimPause()
        running: Running = {}
        self._board_writer = self._make_board_writer(running)
        self._keeper = LeaseKeeper(
            settings,
            spec.id,
            held=lambda: self.attempts.held.copy(),  # noqa: PLW0108 - they are made below
            on_cancel=self._cancel,
            on_error=spec.fail,
            name=spec.id,
        )
        self._writer = FencedWriter(settings, spec.id, on_error=spec.fail, name=spec.id)
        self._connections = self._make_connections()
        self._lifespans = RunningLifespans(spec.handlers._lifespans, self._on_loop)
        self._handlers = WrappedHandlers(spec.handlers)
        self._limited = self._make_limited()
        self._breakers = WorkerBreakers(settings, spec.domains)
        self._unhandled = UnhandledTypes(settings, spec.id, spec.domains, spec.handlers)
        self._unhandled.on_due = self._look_again
        services = self._services()
        self._executor = Executor(
            services,
            spec.policy,
            settings.timeouts,
            self._handlers,
            spec.health,
            running=running,
            on_failed=self._breakers.failed,
            await_on_loop=self._await_on_loop,
        )
        self._chunk_executor = self._make_chunk_executor(services, running)
        self._isolation = self._make_isolation(services)
        self._quarantine = self._make_quarantine()
        self._running_file = self._make_running_file()
        self.attempts = AttemptRegistry(
            running, self._quarantine, self._board_writer, spec.counts, self._running_file
        )
        self.settler = self._make_settler()
        self._fencer = Fencer(
            self.attempts,
            self._keeper,
            self._connections,
            self._executor,
            self._chunk_executor,
            self._limited,
            self.settler,
        )
        self.dispatcher = self._make_dispatcher()
        self._adopter = Adopter(settings, spec.id, on_error=spec.fail, name=spec.id)
        self._waits = WaitTimes(spec.domains)
        self._claimer = self._make_claimer()
        self._views = SlotViews(settings, self.attempts, self.dispatcher.is_for_messages)
        self._threads: list[DatabaseService] = []
        self._scheduling = SchedulerOnDemand(spec, settings, self._threads)
        self._key_releasing = KeyReleaserOnDemand(spec, settings, self._threads)
        self._maintenance = Maintenance(
            settings,
            identity(spec, settings),
            figures=MaintenanceFigures(lambda: len(running), lambda: dict(self.settler.settled)),
            health=spec.health,
            breakers=self._breakers,
            unhandled=self._unhandled,
            scheduling=self._scheduling,
            key_releasing=self._key_releasing,
            reports=self._make_reports(),
            on_error=spec.fail,
            name=spec.id,
        )
        self._threads += (
            self._claimer,
            self._adopter,
            self.settler,
            self._keeper,
            self._maintenance,
            self._writer,
        )
        self._service_watch = self._make_service_watch()
        self.ladder = self._make_ladder()

    # --- make ---------------------------------------------------------------------------------------------------

    def _make_board_writer(self, running: Running) -> BoardWriter | None:
        supervision = self._spec.supervision
        if supervision is None:
            return None
        return BoardWriter(supervision.board, self._spec.domains, running, grace=self._settings.cancel_grace)

    def _make_running_file(self) -> RunningFile | None:
        slots = 2 * self._settings.concurrency + router_slots(self._spec)
        largest = max((item.options.chunk.size for item in self._spec.handlers if item.options.chunk), default=0)
        return RunningFile.create(self._spec.id, self._spec.domains, slots, largest)

    def _make_chunk_executor(self, services: Services, running: Running) -> ChunkExecutor:
        spec = self._spec
        members = Executor(
            services,
            spec.policy,
            self._settings.timeouts,
            self._handlers,
            spec.health,
            running=Everything(),  # whether their chunk still runs is asked before they are judged
            on_failed=self._breakers.failed,
            await_on_loop=self._await_on_loop,
        )
        return ChunkExecutor(services, members, spec.health, running=running, await_on_loop=self._await_on_loop)

    def _make_connections(self) -> HandlerConnections:
        spec, settings = self._spec, self._settings
        most = settings.concurrency + router_slots(spec)
        some_isolated = any(item.options.isolation == "process" for item in spec.handlers)
        return HandlerConnections(
            settings,
            name=f"{spec.id} handlers",
            size=min(most, settings.pool_max_size or most),
            lent=spec.pool,
            on_exhausted=self._exhausted,
            on_waited=spec.counts.connection_waited,
            on_no_thread=self._pause.begin,
            on_unreachable=lambda: spec.health.set_critical(UNREACHABLE),
            on_session=None if self._board_writer is None else self._board_writer.session,
            max_idle=BRIEF_IDLE_SECONDS if some_isolated else None,
        )

    def _services(self) -> Services:
        return Services(
            worker=self._spec.id,
            connections=self._connections,
            max_payload_bytes=self._settings.max_payload_bytes,
            default_max_attempts=self._spec.policy.max_attempts,
            # Only the deadline moves. The lease stays short, so that a dead worker's command is free again soon.
            extend=lambda attempt, _seconds: self._keeper.renew_now(attempt),
            hold=self._keeper.hold,
            release=Attempt.release_row,
            extend_timeout=self._settings.visibility_timeout,
            max_extension=self._settings.max_extension,
            progress=self._note_progress,
            limits=self._limited,
            state=self._lifespans.state,
            policy=self._spec.policy,
            await_on_loop=self._await_on_loop,
            write=self._write,
        )

    def _make_limited(self) -> LimitedWork:
        return LimitedWork(
            self._settings,
            self._spec.id,
            self._spec.policy,
            push=self._push,
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
            services=services,
            terminate=self._end_sessions,
            cancel_query=self._keeper.cancel_query,
            on_exhausted=self._pause.begin,
            quarantines=self._quarantines,
            fleet=None if self._spec.supervision is None else self._spec.supervision.supervisor,
        )

    @property
    def _quarantines(self) -> bool:
        """Do commands that got stuck run in child processes? Only under a supervisor."""
        return self._settings.quarantine and self._spec.supervision is not None

    def _make_quarantine(self) -> Quarantine:
        # If there are several slots: hanging attempts must not have them all.
        one_is_free = max(1, self._settings.concurrency - 1)
        return Quarantine(
            self._spec.handlers,
            turn=None if self._spec.supervision is None else self._spec.supervision.turn,
            processes=lambda: (
                min(self._settings.quarantine_processes, one_is_free) if self._isolation.is_available else None
            ),
            only_suspects=not self._quarantines,
            on_turn=lambda attempt: self._keeper.run_alone(attempt, self.dispatcher.push_alone),
        )

    def _make_settler(self) -> Settler:
        spec = self._spec
        return Settler(
            self._settings,
            spec.id,
            on_settled=self._settled,
            on_done=self._done,
            on_written=spec.health.record_success,
            on_progress=lambda: self.dispatcher.offer_room(),  # noqa: PLW0108 - it is made later
            # An idle claimer looked for due commands before this retry was written. It must look again.
            on_again=self._look_again,
            is_more_coming=lambda: self.dispatcher.waiting > 0,
            on_error=spec.fail,
            held=lambda: self.attempts.held.copy(),  # noqa: PLW0108 - a fork replaces it
            counts=spec.counts,
            name=spec.id,
        )

    def _make_dispatcher(self) -> Dispatcher:
        return Dispatcher(
            self._spec,
            self._settings,
            self.attempts,
            handlers=self._handlers,
            lifespans=self._lifespans,
            executor=self._executor,
            chunk_executor=self._chunk_executor,
            fencer=self._fencer,
            isolation=self._isolation,
            quarantine=self._quarantine,
            limited=self._limited,
            settler=self.settler,
            breakers=self._breakers,
            unhandled=self._unhandled,
            pause=self._pause,
            board_writer=self._board_writer,
        )

    def _make_claimer(self) -> Claimer:
        spec = self._spec
        return Claimer(
            self._settings,
            spec.id,
            spec.domains,
            dispatcher=self.dispatcher,
            quarantine=self._quarantine,
            adopter=self._adopter,
            unhandled=self._unhandled,
            waits=self._waits,
            on_cancel=self._keeper.look_for_cancel,
            on_joined=lambda: self._key_releasing.joined(),  # noqa: PLW0108 - made later
            on_idle=self._check_idle,
            on_answered=spec.counts.note_clock,
            on_lost=lambda domain, types: spec.counts.lost(domain, types, spec.handlers),
            on_error=spec.fail,
            name=spec.id,
        )

    def _make_reports(self) -> FleetReports:
        return FleetReports(
            self._spec.id,
            self._spec.domains,
            settled=lambda: self.settler.settled,
            waits=self._waits,
            views=self._views,
            obey=self._obey_operator,
        )

    def _make_service_watch(self) -> ServiceWatch:
        return ServiceWatch(
            self._spec,
            self._settings,
            self._threads,
            claimer=self._claimer,
            settler=self.settler,
            dispatcher=self.dispatcher,
            limited=self._limited,
            quarantine=self._quarantine,
            pause=self._pause,
            drain=self.drain,
        )

    def _make_ladder(self) -> Ladder:
        return Ladder(
            self._settings.timeouts,
            self.attempts,
            loop=lambda: self.dispatcher.loop,
            health=self._spec.health,
            cancel_query=self._keeper.cancel_query,
            fence=self._fencer.fence,
            bystander=self._set_aside,
            on_stuck=self._note_stuck,
            on_tick=self._tick,
            is_idle=lambda: self._is_idle,
            on_end=self._spec.fail,
            can_isolate=lambda: self._isolation.is_available,
            name=self._spec.id,
        )

    # --- start, drain and stop ----------------------------------------------------------------------------------

    def start(self) -> bool:
        """Run what the registry declares for the start, and start all threads. False if it was asked to stop
        meanwhile."""
        _started.add(self)
        self.dispatcher.start()
        if not self._start_lifespans():
            return False
        try:
            self._start_threads()
        except BaseException:  # the system has no thread left, for example
            self._lifespans.stop(LIFESPANS_SECONDS)
            raise
        return True

    def _start_threads(self) -> None:
        if self._board_writer is not None:
            self._board_writer.start()
        self._isolation.start()
        self.settler.start()
        self._keeper.start()
        self._maintenance.start()
        self._scheduling.start()
        if self._spec.has_limits:
            self._limited.start()
        self._beat(monotonic())  # a handler may freeze this process before the ladder's first tick
        self.ladder.start()
        self._spec.health.watch_threads(self._look_at_threads)
        self._claimer.start()

    def _start_lifespans(self) -> bool:
        if not self._lifespans.is_empty and self._spec.supervision is not None:
            self._spec.supervision.on_doing("running on_start functions")
        is_started = False
        try:
            is_started = self._lifespans.start(is_stopping=self._spec.is_stopping)
        finally:
            if not is_started:
                self.dispatcher.stop(monotonic() + NOT_STARTED_SECONDS)
                self._connections.close()
                if self._running_file is not None:
                    self._running_file.remove()
        return is_started

    def _on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        assert self.dispatcher.loop is not None  # noqa: S101 - made for these
        return self.dispatcher.loop.submit(coroutine)

    @property
    def state(self) -> State:
        """ACTIVE, DRAINING or EXITING."""
        return self.dispatcher.state

    @property
    def shown_state(self) -> State:
        """What people are told: ACTIVE, PAUSED, DRAINING or EXITING."""
        return State.PAUSED if self.is_paused else self.state

    @property
    def is_paused(self) -> bool:
        """Has an operator paused it? A worker that drains or stops is not paused any more."""
        return self._pause.is_by_operator and self.state is State.ACTIVE

    @property
    def is_database_lost(self) -> bool:
        """Is the database out of reach at this moment?"""
        return self._service_watch.is_database_lost

    def leave_to_parent(self) -> None:
        """A handler forked without exec, and this is the copy: everything here belongs to its parent."""
        self.attempts.leave_to_parent()
        self.dispatcher.leave_to_parent()

    def drain(self, reason: str) -> None:
        """Claim nothing more and give back what has not started; when nothing runs any more, the worker ends."""
        with self._changing:
            if self.state is not State.ACTIVE:
                return
            self.dispatcher.state = State.DRAINING
        self._spec.health.clear(PAUSED)
        self._maintenance.state = self.state.name
        level = logging.WARNING if self.stuck else logging.INFO
        logger.log(level, "worker %s drains: %s", self._spec.id, reason)
        if self._spec.supervision is not None:
            self._spec.supervision.on_state(self.state.name, reason)
        self._claimer.end()
        self.dispatcher.give_back()
        self.ladder.wake()

    def end_claiming(self) -> None:
        """A part has ended, so nothing may be claimed any more: the rest of the fleet does the work."""
        self._claimer.end()

    def hurry(self) -> None:
        """Cancel attempts that have no deadline, without charging them. Others keep their deadline. In a block
        with a time limit of its own an attempt has a deadline, too: the ladder looks again when it has left the
        block."""
        self._is_hurried = True
        for attempt in list(self.attempts.running):
            if attempt.deadline_at == NEVER and attempt.stop is None:
                self.ladder.ask(attempt, Why.SHUTDOWN, "its worker has to end")

    def stop(self, limit: float, reason: str, *, hurry: Callable[[], bool]) -> StopReport:
        """Take everything apart in order, within the limit; `hurry` says not to wait for what runs.

        Claim nothing more, give back what has not started, let what runs finish, then ask it to stop, and after
        its grace fence it: it is reported as abandoned, and tried again elsewhere at once.
        """
        running = self.attempts.running
        started = monotonic()
        deadline = started + limit
        hurried = self.ladder.abandoned  # ended while it drained: this stop did not interrupt them
        with self._changing:
            self.dispatcher.state = State.EXITING
        self._maintenance.state = "STOPPING"
        self._claimer.stop(max(0.1, limit - SETTLE_RESERVE_SECONDS))
        self._adopter.stop(max(0.1, deadline - monotonic() - SETTLE_RESERVE_SECONDS))
        self._scheduling.stop(max(0.1, min(1.0, deadline - monotonic() - SETTLE_RESERVE_SECONDS)))
        self._key_releasing.stop(max(0.1, min(1.0, deadline - monotonic() - SETTLE_RESERVE_SECONDS)))
        self.dispatcher.give_back()
        self._await_starting(monotonic() + min(1.0, limit / 4))
        reserve = min(SETTLE_RESERVE_SECONDS, limit / 2)
        grace = min(self._settings.cancel_grace, max(0.0, limit - reserve))
        self._await_running(deadline - reserve - grace, hurry)
        if running:
            self._cancel_all(0.0 if hurry() else max(0.0, min(grace, deadline - reserve - monotonic())))
            self._await_running(deadline - reserve + 0.3, hurry)
        if running:
            self._cancel_all(0.0)
            self._await_running(monotonic() + 0.5, lambda: False)
        if self._end_children():
            self._await_running(max(monotonic() + 0.2, deadline - reserve / 4), lambda: False)
        left = sum(len(attempt.each) for attempt in list(running))
        abandoned = self.ladder.abandoned - hurried + left
        # In this order: the ladder abandons an attempt, the lease keeper fences it, the settler gets its outcome.
        self.ladder.stop(max(0.1, deadline - monotonic() - reserve / 2))
        self._keeper.flush(max(0.1, deadline - monotonic() - reserve / 2))
        self._limited.flush(max(0.1, min(reserve / 2, deadline - monotonic() - reserve / 4)))
        self.settler.close(max(0.1, deadline - monotonic() - reserve / 4))
        unwritten = max(0, len(self.attempts.held) - left)
        for_stop = 0.0 if hurry() else deadline - monotonic() - reserve / 4
        self._lifespans.stop(max(LIFESPANS_SECONDS, for_stop))
        self.dispatcher.stop(deadline - 0.2)
        self._isolation.close(max(0.1, deadline - monotonic()))
        self._limited.stop(max(0.1, deadline - monotonic()))
        self._keeper.stop(max(0.1, deadline - monotonic()))
        self._writer.stop(max(0.1, deadline - monotonic()))
        self._maintenance.stop(max(0.1, deadline - monotonic()))
        self._connections.close()
        if self._running_file is not None and not self.attempts.held:
            self._running_file.remove()
        settled = self._settled_count - self.settler.unfinished
        return StopReport(reason, settled, self.dispatcher.given_back, abandoned, unwritten)

    def _await_running(self, until: float, hurry: Callable[[], bool]) -> None:
        """Wait until no attempt runs. The last slot to finish says so; the poll is for a hurried stop."""
        running, budget = self.attempts.running, self.dispatcher.budget
        while running and monotonic() < until and not hurry():
            budget.wait_until_free(min(0.1, max(0.001, until - monotonic())))
            if running and not budget.taken:
                time.sleep(0.01)  # the last slots are on their way out

    def _await_starting(self, until: float) -> None:
        """Wait until those that waited for a process of their own are given back, or run."""
        while self.attempts.starting and monotonic() < until:
            time.sleep(0.01)

    def _cancel_all(self, grace: float) -> None:
        for attempt in list(self.attempts.running):
            self.ladder.ask(attempt, Why.SHUTDOWN, "its worker was told to stop", grace=grace)

    def _end_children(self) -> bool:
        """Kill the processes whose stacks are still waited for: that an attempt was given up matters more than
        where it was. Its slot then settles it. Returns whether there are any."""
        children = [child for attempt in list(self.attempts.running) if (child := attempt.child) is not None]
        for child in children:
            child.end_now("its worker was told to stop")
        return bool(children)

    @property
    def _settled_count(self) -> int:
        return sum(self.settler.settled.values())

    def _await_on_loop(self, attempt: Attempt, awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
        return self.dispatcher.await_on_loop(attempt, awaitable)

    # --- called by any thread that asks for health ---------------------------------------------------------------

    def _look_at_threads(self) -> dict[str, str]:
        """Which of this worker's own threads do not work, whether or not the ladder is there to tell."""
        found = self._service_watch.troubles()
        if (trouble := self.ladder.trouble) is not None:
            found["ladder"] = trouble
        loop = self.dispatcher.loop
        helpers = {
            "event loop": loop is not None and loop.has_ended,
            "spawner": self._isolation.has_ended,
            "permit clock": self._limited.has_ended,
            "chunk gathering": self.dispatcher.chunks.has_ended,
        }
        return found | {
            name.replace(" ", "_"): f"the {name} has ended" for name, ended in helpers.items() if ended
        }

    # --- called by the ladder -----------------------------------------------------------------------------------

    def _set_aside(self, attempt: Attempt, slot: Slot | AsyncSlot, failure: Failure, suspect: bool) -> None:  # noqa: FBT001
        if self._board_writer is not None:
            self._board_writer.leave(slot.index)
        self._fencer.set_aside(attempt, failure, suspect=suspect)

    def _note_stuck(self, attempt: Attempt, slot: Slot | AsyncSlot) -> None:
        self.stuck += 1
        self._views.note_stuck(attempt, slot)
        if self._board_writer is not None:
            # It is settled: if this worker dies now, that is not because of it.
            self._board_writer.leave(slot.index)
        if self._spec.supervision is not None and self.state is State.ACTIVE:
            self.drain(f"command {attempt.command_id} ({attempt.command_type}) is stuck")
        elif self.dispatcher.is_claimer_waiting:
            self._claimer.wake()

    def _tick(self, now: float) -> None:
        self._service_watch.look(now)
        self.dispatcher.tend()
        for attempt in self._quarantine.take_back_late():
            self.dispatcher.return_one(attempt, "it has waited too long to run alone")
        if self._running_file is not None:
            self._running_file.keep()
        self._beat(now)
        if self.state is State.DRAINING and not self._is_running_any:
            self._spec.request_stop(f"drained, stuck attempts: {self.stuck}" if self.stuck else "drained")
        if self.state is State.ACTIVE:
            self._check_recycling()
        elif self._is_hurried:
            self.hurry()

    @property
    def _is_idle(self) -> bool:
        return self.state is State.ACTIVE and not self.attempts.held and not self.attempts.running

    @property
    def _is_running_any(self) -> bool:
        waiting = self.dispatcher.waiting or self.dispatcher.chunks.is_gathering
        return bool(self.attempts.running or self.attempts.starting or waiting)

    def _beat(self, now: float) -> None:
        if self._board_writer is not None:
            self._board_writer.beat(
                now,
                self._spec.health,
                state=self.shown_state,
                settled=self._settled_count,
                claimed=self._claimer.claimed,
                free=self.dispatcher.free_slots,
                stuck=self.stuck,
                claimless=self._service_watch.claimless_seconds,
            )

    def _check_recycling(self) -> None:
        """Recycle after so many messages or so much memory: the worker ends cleanly, to be started again."""
        settings = self._settings
        if settings.max_messages is not None and (settled := self._settled_count) >= settings.max_messages:
            self._recycle(f"{settled} messages were settled (max_messages {settings.max_messages})")
        elif settings.max_memory_mb is not None and (used := resident_megabytes()) > settings.max_memory_mb:
            self._recycle(f"{used:.0f} MB of memory are in use (max_memory_mb {settings.max_memory_mb})")

    def _recycle(self, reason: str) -> None:
        if self._is_recycled:
            return
        self._is_recycled = True
        logger.info("this worker ends and will be replaced: %s", reason)
        if self._spec.supervision is not None:
            self.drain(reason)
        else:
            self._spec.request_stop(reason)

    # --- called by the maintenance ------------------------------------------------------------------------------

    def _obey_operator(self, wish: str, reason: str) -> dict[str, Any]:
        """An operator wants this worker replaced, paused, or to go on. Returns the answer."""
        if wish in ("PAUSE", "RESUME"):
            return self._pause_for_operator(reason, pauses=wish == "PAUSE")
        problem = self._recycle_for_operator(reason)
        return {} if problem is None else {"problem": problem}

    def _pause_for_operator(self, reason: str, *, pauses: bool) -> dict[str, Any]:
        """Claim nothing more, or claim again. What runs goes on, and so do leases and maintenance. The lock
        decides between this and a drain."""
        with self._changing:
            if self.state is not State.ACTIVE:
                return {"problem": f"it is {self.state.name.lower()}, and claims nothing more"}
            has_changed = self._pause.is_by_operator != pauses
            self._pause.is_by_operator = pauses
        if pauses:
            self._spec.health.set_degraded(PAUSED, f"paused by {reason}")
            self.dispatcher.give_back_for_pause()
        else:
            self._spec.health.clear(PAUSED)
            self._claimer.wake()
        if has_changed:
            logger.info(
                "worker %s %s %s", self._spec.id, "is paused by" if pauses else "goes on, resumed by", reason
            )
        self._maintenance.tell_state("PAUSED" if pauses else self.state.name)
        return {"changed": has_changed}

    def _recycle_for_operator(self, reason: str) -> str | None:
        """An operator wants this worker replaced. Returns why it is not."""
        if self._spec.supervision is None:
            return "it has no supervisor, so nobody would start a replacement; end its process yourself"
        if self.state is not State.ACTIVE:
            return None  # it does that already
        self._is_recycled = True
        self.drain(f"recycled by {reason}")
        return None

    # --- called by contexts and the lease keeper ----------------------------------------------------------------

    def _note_progress(self, attempt: Attempt, text: str) -> None:
        attempt.extras.progress = text

    def _write(self, attempt: Attempt, write: Write) -> Future[Written]:
        answer = self._writer.ask(attempt.fence, write)
        if not isinstance(write, Checkpoint):
            answer.add_done_callback(partial(note_open_effect, attempt, write))
        return answer

    def _end_sessions(self, sessions: Sequence[Borrowed]) -> None:
        if sessions:
            self._keeper.end_sessions(sessions).result(self._settings.visibility_timeout)

    def _cancel(self, attempt: Attempt, cancel: PendingCancel) -> None:
        if attempt.stop is None:
            self.ladder.ask(attempt, Why.CANCEL, cancellation(cancel.by, cancel.reason).error)

    def _exhausted(self) -> None:
        self._spec.health.record_pool_exhaustion()
        self._spec.counts.connection_timed_out()
        self._pause.begin("the connection pool is exhausted")

    # --- called by the claimer, the settler and the limit client ------------------------------------------------

    def _look_again(self) -> None:
        self._claimer.wake()

    def _check_idle(self) -> bool:
        """Nothing was there to claim. Returns whether to look once more. What ran during that look may have sent
        something: only a look that finds nothing while nothing is held is the last."""
        if not self._spec.ends_idle or self._is_at_work:
            self._claimed_when_idle = -1
            if self._spec.ends_idle:
                self.dispatcher.chunks.flush()
            return False
        if monotonic() < self._quarantine.late_until:
            return False
        if self._claimed_when_idle == self._claimer.claimed:
            self._spec.request_stop("no command is left that could run now")
            return False
        self._claimed_when_idle = self._claimer.claimed
        return True

    @property
    def _is_at_work(self) -> bool:
        """Is there anything from which a command may come?"""
        others = (self._adopter, self._limited, self._unhandled, self._key_releasing)
        return bool(self.attempts.held) or self.settler.is_folding or any(other.is_busy for other in others)

    def _push(self, attempt: Attempt) -> None:
        self.dispatcher.push(attempt)

    def _settle(self, attempt: Attempt, ended: WrittenOutcome) -> None:
        self.settler.add(attempt, ended)

    def _settled(self, attempt: Attempt) -> None:
        self.attempts.release(attempt)
        if attempt.limit_use is not None:
            attempt.limit_use.settled()
        self._key_releasing.settled([attempt])
        self._note_end_of_work()

    def _done(self, attempts: Sequence[Attempt]) -> None:
        """These attempts completed in the usual way: none ran isolated or has to do with limits."""
        self.attempts.held.difference_update(attempts)
        self._key_releasing.settled(attempts)
        self._note_end_of_work()

    def _note_end_of_work(self) -> None:
        if self._spec.ends_idle and not self.attempts.held:
            self._claimer.wake()


_started: WeakSet[WorkerRuntime] = WeakSet()


def _leave_all_to_parent() -> None:
    for runtime in list(_started):
        runtime.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
