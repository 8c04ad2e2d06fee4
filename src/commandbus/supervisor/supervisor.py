"""Supervisor: the parent process. It runs its workers until a signal stops it.

    STARTING → RUNNING ⇄ RELOADING
        └─────────┴──────────┴────→ STOPPING → ended

STARTING waits until it can connect to the database. While the database is unreachable, no worker is started, the
health checks say "live" and "not ready" with the reason, and a signal ends the supervisor at once.

One loop runs on the main thread. Pidfds, control sockets and signals wake it, and it wakes by itself a few times a
second. It runs no user code and never talks to the database: the coroner's thread does that, and before it a
`ServerWait`.

SIGTERM, SIGINT   stop: everything ends within shutdown_timeout; workers are killed and examined if necessary
a second one      kill now
SIGHUP            new workers take over, with the current code and settings; if they cannot start, the old ones
                  stay
"""

from __future__ import annotations

import math
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from commandbus.db.database_address import Database, embedded_folder
from commandbus.db.service_connection import LastingConnection
from commandbus.db.wait_for_server import ServerWait
from commandbus.errors import CommandBusError
from commandbus.flow.setup.privileges import check_may_work
from commandbus.logger import safe_logger
from commandbus.model.counting import counted
from commandbus.model.crash_attribution import Death
from commandbus.settings import Settings
from commandbus.supervisor import view
from commandbus.supervisor.coroner import Case, Coroner, Trace
from commandbus.supervisor.health_server import HealthServer
from commandbus.supervisor.report import SupervisorReport
from commandbus.supervisor.signals import Signals
from commandbus.supervisor.systemd import Notifier
from commandbus.supervisor.view import View
from commandbus.supervisor.worker_process import WorkerProcess
from commandbus.supervisor.worker_processes import WorkerProcesses

logger = safe_logger("commandbus.supervisor")

TICK_SECONDS: Final = 0.2
QUIET_TICK_SECONDS: Final = 0.75
"""How often it looks while all workers are idle and show that they live."""
FRESH_SECONDS: Final = 0.8
"""An idle worker's heartbeat comes every half a second. One that is older than this is missed."""
SHORT_HEARTBEAT: Final = 2.0
"""With a heartbeat_timeout below this it always looks often."""
LOOK_SECONDS: Final = 0.02
BLIND_SECONDS: Final = 0.8
"""A turn that comes so much too late means that this process was suspended."""
CORONER_SECONDS: Final = 2.0
STOP_RESERVE: Final = 2.0
EMBEDDED_RESERVE: Final = 2.0
KILL_RESERVE: Final = 1.0
AT_ONCE_SECONDS: Final = 1.0
FIRST_CONNECT_SECONDS: Final = 0.5
DESCENDANTS_SECONDS: Final = 1.0
"""How long the first turn of the loop waits for the first connection, which usually takes milliseconds."""
EXTEND_EVERY_SECONDS: Final = 10.0
EXTEND_BY_SECONDS: Final = 60.0
STARTING, RUNNING, RELOADING, STOPPING = "STARTING", "RUNNING", "RELOADING", "STOPPING"


def supervise(settings: Settings, *, reload: Callable[[], Settings] | None = None) -> SupervisorReport:
    """Run workers until a signal stops them. `reload` reads the settings again, for SIGHUP.

    The supervisor keeps an embedded server running for all that time. If the first worker cannot start, raises its
    error.
    """
    signals, database = Signals(), Database(settings)
    reserve = STOP_RESERVE + (EMBEDDED_RESERVE if embedded_folder(settings) is not None else 0.0)
    with signals.caught():
        if signal.SIGHUP in signals.ignored:
            logger.info("SIGHUP is ignored (nohup): it will not reload the settings")
        try:
            supervisor = Supervisor(database.resolve(), signals, reload=reload, reserve_seconds=reserve)
            return supervisor.run()
        finally:
            database.close()
            signals.close()


class Supervisor:
    """The loop. Its settings contain the address of a server that accepts connections."""

    def __init__(
        self,
        settings: Settings,
        signals: Signals,
        *,
        reload: Callable[[], Settings] | None = None,
        reserve_seconds: float = STOP_RESERVE,
    ) -> None:
        self.id = f"{socket.gethostname()[:20]}-{os.getpid()}-{secrets.token_hex(3)}"
        self._settings = settings
        self._signals = signals
        self._reload = reload or (lambda: settings)
        self._reserve = reserve_seconds
        self._selector = selectors.DefaultSelector()
        self._notifier = Notifier()
        self._coroner = Coroner(self._settings, self.id)
        self._worker_processes = WorkerProcesses(
            self._settings,
            self.id,
            reserve_seconds=self._reserve,
            selector=self._selector,
            on_death=self._examine,
        )
        self._phase = STARTING
        self._server: ServerWait | None = ServerWait(
            self._connect, is_patient=settings.wait_for_database, log=logger
        )
        self._extended_at = -math.inf
        self._coroner_broken_at = math.inf
        self._unusable: Exception | None = None
        self._wants_reload = False
        self._stop_reason = ""
        self._stop_by = 0.0
        self._blind_until = 0.0
        self._watchdog_at = 0.0
        self._claimed = 0
        self._claimed_at = time.monotonic()
        self._tick = TICK_SECONDS
        self._view = View(time.monotonic(), STARTING)

    def run(self) -> SupervisorReport:
        """Run until a signal stops it. If the first workers cannot start, raises their error."""
        probes = self._probes()
        try:
            if probes is not None:
                probes.start()
            self._selector.register(self._signals.socket, selectors.EVENT_READ)
            self._coroner.start()
            if self._server is not None:
                self._server.start()
                self._server.tried.wait(FIRST_CONNECT_SECONDS)
            while not self._is_over():
                self._turn()
            return self._end()
        finally:
            if self._server is not None:
                self._server.give_up()
            self._leave_nobody()
            self._coroner.stop(0.2)
            if probes is not None:
                probes.stop()
            self._selector.close()

    # -- one turn of the loop

    def _turn(self) -> None:
        turned_at = self._view.at
        self._wait()
        now = time.monotonic()
        if now - turned_at > self._tick + BLIND_SECONDS:
            self._blind_until = now  # this process was suspended, which is not the workers' fault
        for number in self._signals.take():
            self._obey(number, now)
        self._worker_processes.look(now, blind_until=self._blind_until)
        if self._phase == STOPPING:
            if now >= self._stop_by - min(KILL_RESERVE, self._settings.shutdown_timeout / 4):
                self._worker_processes.kill_all(f"{self._stop_reason}, and its time was up", now)
        else:
            self._move_on(now)
        self._tend_coroner(now)
        self._trace_condemned()
        self._publish(now)
        self._pat_watchdog(now)

    def _wait(self) -> None:
        now = time.monotonic()
        due = [
            max(worker.condemned.kill_at, now + LOOK_SECONDS)  # until the worker is dead
            for worker in self._worker_processes.workers
            if worker.condemned is not None
        ]
        self._tick = QUIET_TICK_SECONDS if self._is_quiet(now) else TICK_SECONDS
        for key, _ in self._selector.select(max(0.0, min([now + self._tick, *due]) - now)):
            worker = key.data
            if isinstance(worker, WorkerProcess) and key.fileobj is worker.control and not worker.hear(now):
                self._selector.unregister(worker.control)  # closed; the pidfd says when the worker is dead

    def _is_quiet(self, now: float) -> bool:
        """Does every worker serve, run nothing, and show a heartbeat from a moment ago?"""
        if self._phase != RUNNING or self._wants_reload or self._coroner.open_cases or self._coroner.is_broken:
            return False
        fleet = self._worker_processes
        if len(fleet.workers) != fleet.settings.processes or fleet.settings.heartbeat_timeout < SHORT_HEARTBEAT:
            return False
        oldest = now - FRESH_SECONDS
        shown = [(worker, worker.snapshot) for worker in fleet.workers]
        return all(worker.is_serving and not board.slots and board.beat_at > oldest for worker, board in shown)

    def _move_on(self, now: float) -> None:
        if self._worker_processes.fatal is not None:
            self._stop(self._worker_processes.fatal.message, now)
            return
        if not self._has_server(now):
            return
        if self._phase == STARTING and self._worker_processes.was_ready:
            self._phase = RUNNING
            workers = counted(self._worker_processes.settings.processes, "worker")
            logger.info("supervisor %s runs %s", self.id, workers)
            self._notifier.ready(workers)
        if self._phase == RELOADING:
            is_done = self._worker_processes.advance_reload(now)
            if is_done or not self._worker_processes.is_reloading:
                self._phase = RUNNING
                self._notifier.ready("new workers have taken over" if is_done else "the reload failed")
        elif self._phase == RUNNING and self._wants_reload:
            self._begin_reload(now)
        is_away = self._coroner.look.lost_since is not None or self._coroner.is_silent
        self._worker_processes.fill(now, is_database_away=is_away)
        self._coroner.domains = next(
            (
                tuple(worker.hello.domains)
                for worker in reversed(self._worker_processes.workers)
                if worker.hello is not None
            ),
            self._coroner.domains,
        )

    def _tend_coroner(self, now: float) -> None:
        """If the coroner's thread has ended or is stuck, another one takes over. /health/ready reports the
        trouble before that."""
        if not self._coroner.is_broken:
            self._coroner_broken_at = math.inf
        elif self._coroner_broken_at == math.inf:
            self._coroner_broken_at = now
            logger.error("%s: another one will take over", self._coroner.trouble)
        elif now - self._coroner_broken_at >= CORONER_SECONDS:
            self._coroner_broken_at = math.inf
            self._coroner = self._coroner.successor()
            self._coroner.start()

    def _trace_condemned(self) -> None:
        """Before workers are killed: find out which database sessions they have opened."""
        for worker in self._worker_processes.workers:
            if worker.condemned is not None and worker.hello is not None and worker.traced is None:
                end = worker.condemned
                trace = Trace(worker.hello.id, end.sockets, worker.spawned_at, end.at)
                worker.traced = trace.is_done
                self._coroner.trace(trace)

    def _connect(self) -> None:
        """Connect to the server, and check the role's privileges. Runs on the thread of the `ServerWait`."""
        connection = LastingConnection(self._settings, name=f"{self.id} start")
        try:
            connection.run(check_may_work(self._settings.domains))
        finally:
            connection.close()

    def _has_server(self, now: float) -> bool:
        """Can the database be reached? If a person must repair something, the supervisor ends."""
        if self._server is None:
            return True
        if not self._server.over.is_set():
            if now - self._extended_at >= EXTEND_EVERY_SECONDS:
                self._extended_at = now
                self._notifier.still_starting(EXTEND_BY_SECONDS, self._waits_for())
            return False
        try:
            self._server.check()
        except Exception as error:  # noqa: BLE001 - `_end` raises it
            self._unusable = error
            self._stop(str(error), now)
        self._server = None
        return self._unusable is None

    def _waits_for(self) -> str:
        if self._server is None or not self._server.reason:
            return ""
        return self._server.described()

    def _examine(self, worker: WorkerProcess, death: Death) -> None:
        if worker.hello is not None:
            slots, settings, is_spoiled = (
                worker.snapshot.slots,
                self._worker_processes.settings,
                worker.is_board_spoiled,
            )
            self._coroner.add(
                Case(worker.hello, death, slots, time.monotonic(), settings, is_board_spoiled=is_spoiled)
            )

    # -- signals

    def _obey(self, number: signal.Signals, now: float) -> None:
        if self._signals.asks_for_reload(number):
            self._wants_reload = True
        elif self._phase != STOPPING:
            self._stop(number.name, now)
        else:
            logger.warning("%s again: the workers are killed", number.name)
            self._stop_by = min(self._stop_by, now + AT_ONCE_SECONDS)
            self._worker_processes.kill_all(f"{self._stop_reason}, twice", now, at_once=True)

    def _begin_reload(self, now: float) -> None:
        self._wants_reload = False
        try:
            fresh = self._reload()
        except CommandBusError as error:
            self._worker_processes.note_failed_reload(f"the settings cannot be read: {error}")
            return
        logger.info("SIGHUP: new workers are started")
        self._phase = RELOADING
        self._notifier.reloading("new workers are started")
        # The database stays the same: the coroner, and an embedded server, belong to this supervisor.
        self._worker_processes.begin_reload(replace(fresh, database_url=self._settings.database_url), now)

    def _stop(self, reason: str, now: float) -> None:
        self._phase = STOPPING
        self._stop_reason = reason
        self._stop_by = now + self._settings.shutdown_timeout - (self._reserve - STOP_RESERVE)
        self._notifier.stopping(reason)
        if self._worker_processes.fatal is None and self._unusable is None:
            logger.info("supervisor %s stops (%s): up to %g s", self.id, reason, self._settings.shutdown_timeout)
        self._worker_processes.stop(reason, now)

    # -- the end

    def _is_over(self) -> bool:
        if self._phase != STOPPING or self._worker_processes.workers:
            return False
        return not self._coroner.open_cases or time.monotonic() >= self._stop_by - 0.1

    def _end(self) -> SupervisorReport:
        if self._unusable is not None:
            raise self._unusable
        if self._worker_processes.fatal is not None:
            raise self._worker_processes.fatal.rebuilt()
        totals = self._worker_processes.totals
        unwritten = totals["unwritten"] + sum(max(1, len(case.slots)) for case in self._coroner.open_cases)
        report = SupervisorReport(
            self._stop_reason,
            totals["settled"],
            totals["given_back"],
            totals["abandoned"],
            unwritten,
            totals["restarts"],
            self._coroner.done,
        )
        report.say(self.id)
        return report

    def _leave_nobody(self) -> None:
        """Normally no worker is left. After an error of ours, kill those that are left."""
        for worker in self._worker_processes.workers:
            worker.kill()
            worker.reap(time.monotonic())
            worker.close()
        self._worker_processes.end_descendants(f"{self.id}/").join(DESCENDANTS_SECONDS)

    # -- what others see

    def _publish(self, now: float) -> None:
        workers, totals, look = self._worker_processes.workers, self._worker_processes.totals, self._coroner.look
        timeout = self._worker_processes.settings.heartbeat_timeout
        claimed = totals["claimed"] + sum(worker.snapshot.claimed for worker in workers)
        if claimed != self._claimed:
            self._claimed, self._claimed_at = claimed, now
        self._view = View(
            now,
            self._phase,
            tuple(view.of_worker(worker, now, heartbeat_timeout=timeout) for worker in workers),
            settled=totals["settled"] + sum(worker.snapshot.settled for worker in workers),
            stuck=totals["stuck"] + sum(worker.snapshot.stuck for worker in workers),
            restarts=totals["restarts"],
            reloads=dict(self._worker_processes.reloads),
            reload_error=self._worker_processes.reload_error,
            ends_by_cause=dict(self._worker_processes.ends_by_cause),
            postmortems=self._coroner.done,
            open_postmortems=len(self._coroner.open_cases),
            claimed_at=self._claimed_at,
            look=look,
            waits_for=self._waits_for(),
            trouble=self._coroner.trouble or "",
        )

    def _pat_watchdog(self, now: float) -> None:
        limit = self._notifier.watchdog_seconds()
        if limit is not None and now - self._watchdog_at >= min(limit / 3, 5.0):
            self._watchdog_at = now
            if view.live(self._view, now).ok:
                self._notifier.watchdog()

    def _probes(self) -> HealthServer | None:
        if self._settings.health_port is None:
            return None
        return HealthServer(
            self._settings.health_host,
            self._settings.health_port,
            live=lambda: view.live(self._view, time.monotonic()),
            ready=lambda: view.ready(self._view, time.monotonic()),
            metrics=lambda: view.metrics(self._view, self._worker_processes.counts().plus(self._coroner.counts)),
        )
