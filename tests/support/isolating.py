"""Isolated attempts without the rest of a worker: claimed and settled in a real database, one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import psycopg

from commandbus import CommandBus, HandlerRegistry, RetryPolicy
from commandbus.clock import boottime
from commandbus.db.drivers import run
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.settle import Done, Settlement, settle
from commandbus.settings import Settings
from commandbus.worker.execution.attempt import Attempt, Stop, Why
from commandbus.worker.execution.connections import Borrowed, HandlerConnections
from commandbus.worker.execution.context import Services
from commandbus.worker.execution.execute import Ended, Executor, Note
from commandbus.worker.execution.lifespan_declarations import WorkerState
from commandbus.worker.fenced_writer import FencedWriter
from commandbus.worker.health import HealthStatus
from commandbus.worker.isolation.child_process import ChildProcess
from commandbus.worker.isolation.isolation import Isolation
from commandbus.worker.limits import LimitedWork
from support.databases import another_session

WORKER = "test-worker"
MakeLab = Callable[..., "Lab"]


class Running:
    """An attempt on a thread of its own, as on a slot's."""

    def __init__(self, lab: Lab, attempt: Attempt) -> None:
        self.attempt = attempt
        self._lab = lab
        self._ended: Future[Ended] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._ended.set_result(self._lab.run(self.attempt))
        except BaseException as error:
            self._ended.set_exception(error)

    @property
    def is_running(self) -> bool:
        """Has it not ended?"""
        return not self._ended.done()

    def ended(self, seconds: float = 15.0) -> Ended:
        """How it ended."""
        return self._ended.result(seconds)

    def settled(self, seconds: float = 15.0) -> Any:
        """The answer of the settlement: None for done."""
        return self._lab.settle(self.attempt, self.ended(seconds))

    def ask_to_stop(
        self, why: Why = Why.DEADLINE, *, grace: float = 0.2, text: str = "the deadline has passed"
    ) -> Stop:
        """As the ladder does."""
        now = time.monotonic()
        stop = Stop(why, text, now, now + grace)
        self.attempt.ask_to_stop(stop)
        assert self.attempt.child is not None
        self.attempt.child.cancel(stop)
        return stop

    def kill(self, seconds: float = 15.0) -> Ended:
        """As the ladder does, tick after tick."""
        deadline = time.monotonic() + seconds
        while self.is_running and time.monotonic() < deadline:
            assert self.attempt.child is not None
            self.attempt.child.kill("the ladder")
            self._thread.join(0.25)
        return self.ended(0.1)


class Lab:
    """An Isolation, and what it needs of a worker."""

    def __init__(
        self, bus: CommandBus, db: psycopg.Connection[Any], settings: Settings, registry: HandlerRegistry
    ) -> None:
        self.bus = bus
        self.db = db
        self.settings = settings
        self.progress: list[str] = []
        self.terminated: list[int] = []
        self.is_held = True
        self.lost: list[str] = []
        self.errors: list[BaseException] = []
        policy = RetryPolicy(max_attempts=3, backoff_schedule=[0], jitter=0)
        self.limited = LimitedWork(
            settings,
            WORKER,
            policy,
            push=self._never,
            settle=self._never,
            on_lost=self._lose,
            on_error=self.errors.append,
        )
        self.writer = FencedWriter(settings, WORKER, on_error=self.errors.append, name=WORKER)
        self.services = Services(
            worker=WORKER,
            connections=HandlerConnections(settings, name=f"{WORKER} handlers", size=1),
            max_payload_bytes=settings.max_payload_bytes,
            default_max_attempts=3,
            state=WorkerState(is_child=False),
            policy=RetryPolicy(),
            await_on_loop=lambda attempt, awaitable: (None, None),
            extend=self._extend,
            hold=self._hold,
            release=Attempt.release_row,
            extend_timeout=5.0,
            max_extension=settings.max_extension,
            progress=self._progress,
            limits=self.limited,
            write=lambda attempt, write: self.writer.ask(attempt.fence, write),
        )
        self.running: set[Attempt] = set()
        self.executor = Executor(
            self.services,
            policy,
            settings.timeouts,
            registry,
            HealthStatus(),
            running=self.running,
            on_failed=lambda *_: None,
            await_on_loop=lambda *_: (None, None),  # in a process of its own nothing is awaited here
        )
        self.registry = registry
        self.isolation = Isolation(
            settings,
            WORKER,
            registry,
            self.executor,
            services=self.services,
            terminate=self._terminate,
        )

    def claim(self, command_type: str, data: Any = None, *, task_timeout: float | None = None) -> Attempt:
        """Send a command and claim it."""
        return self.claim_again(self.bus.send("orders", command_type, data).command_id, task_timeout=task_timeout)

    def claim_again(self, command_id: str, *, task_timeout: float | None = None) -> Attempt:
        """Claim a command that waits; what else waits is claimed as well, and left alone."""
        found = run(self.db, claim(domain="orders", worker=WORKER, n=20, lease_seconds=60, cursor=None))
        (row,) = [tuple(row) for row in (*found.ready, *found.odd) if row[3] == command_id]
        attempt = Attempt("orders", row, self.registry.get("orders", row[4]), boottime())
        self.executor.begin(attempt)
        self.running.add(attempt)
        if task_timeout is not None:
            attempt.deadline_at = attempt.started_at + task_timeout
        return attempt

    def run(self, attempt: Attempt) -> Ended:
        """Run it to its end, as soon as a process is ready."""
        taken = self.isolation.take(attempt)
        return self.isolation.run(attempt, taken) if isinstance(taken, ChildProcess) else taken

    def start(self, command_type: str, data: Any = None, **changes: Any) -> Running:
        """Run a new command on a thread."""
        return Running(self, self.claim(command_type, data, **changes))

    def result(self, command_type: str, data: Any = None, **changes: Any) -> Any:
        """Run a new command to its end and say what it returned."""
        attempt = self.claim(command_type, data, **changes)
        assert self.settle(attempt, self.run(attempt)) is None
        command = self.bus.get_command("orders", attempt.command_id)
        assert command is not None
        assert command.status == "COMPLETED", self.last(attempt)
        return command.result

    def settle(self, attempt: Attempt, ended: Ended) -> Any:
        """Write an end; None for done."""
        if ended is None or isinstance(ended, Note):
            return None
        if isinstance(ended, Done):
            ended = attempt.complete(None)
        assert isinstance(ended, Settlement)
        return run(self.db, settle("orders", WORKER, [ended])).get((attempt.msg_id, attempt.read_ct))

    def last(self, attempt: Attempt) -> Any:
        """The last record of an attempt."""
        return self.bus.get_attempts("orders", attempt.command_id)[-1]

    def status(self, attempt: Attempt) -> str:
        """The command's status."""
        command = self.bus.get_command("orders", attempt.command_id)
        assert command is not None
        return str(command.status)

    def close(self) -> None:
        """End its processes, and then its limit client, which hears what they leave."""
        self.isolation.close(3)
        self.limited.stop(3)
        self.writer.stop(3)
        assert self.errors == []

    def _lose(self, attempt: Attempt, text: str) -> None:
        self.lost.append(text)

    def _never(self, *_: Any) -> None:
        raise AssertionError("nothing asks for a permit in a lab")

    def _extend(self, attempt: Attempt, seconds: float) -> Future[bool]:
        answer: Future[bool] = Future()
        threading.Thread(target=lambda: answer.set_result(self.is_held)).start()
        return answer

    def _hold(self, attempt: Attempt) -> Future[bool]:
        return self._extend(attempt, 0.0)

    def _progress(self, attempt: Attempt, text: str) -> None:
        self.progress.append(text)

    def _terminate(self, borrowed: list[Borrowed]) -> None:
        with another_session(self.db) as conn:
            for one in borrowed:
                conn.execute("SELECT pg_terminate_backend(%s, 5000)", (one.pid,))
                self.terminated.append(one.pid)
