"""Worker: one process with slots. `WorkerRuntime` creates, starts and stops its parts.

    worker = Worker(handlers, domains=["orders"], concurrency=8)
    worker.run()              # until SIGTERM, SIGINT or stop(); or start() … stop() inside an application

If the database is unreachable at the start, the worker waits for it (`wait_for_database`), until it is asked to
stop.

Stopping, in order: claim nothing more → give back what has not started → let running attempts finish → ask them to
stop (`shutdown_timeout` less the grace and two seconds) → grace → fence those that still run → write the last
outcomes → sign off in the registry. Unfinished attempts are reported, and their commands are retried elsewhere at
once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from psycopg_pool import ConnectionPool

from commandbus.clock import monotonic
from commandbus.db.database_address import Database
from commandbus.db.service_connection import LastingConnection
from commandbus.db.wait_for_server import ServerWait
from commandbus.errors import ConfigurationError, SchemaError, UnknownDomainError
from commandbus.flow.setup.domains import create_domain, list_domains
from commandbus.flow.setup.privileges import check_may_work, explained
from commandbus.flow.setup.schema_state import look
from commandbus.logger import safe_logger
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.json_values import Json
from commandbus.model.names import check_domain
from commandbus.model.retry import RetryPolicy
from commandbus.settings import Settings, load_settings
from commandbus.worker.counts_page import CountsPage
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.gil import quick_switches
from commandbus.worker.health import HealthStatus
from commandbus.worker.limits import check_limits
from commandbus.worker.runtime import WorkerRuntime
from commandbus.worker.service_watch import UNREACHABLE
from commandbus.worker.stop_report import ROUTER_SLOTS, StopReport
from commandbus.worker.worker_options import Supervision, WorkerSpec

logger = safe_logger("commandbus.worker")

LONGEST_NAME = 24  # the id is part of application_name, which has room for 63 characters


class Worker:
    """Runs the handlers of a registry for some domains (all that the registry has, by default)."""

    def __init__(
        self,
        handlers: HandlerRegistry,
        *,
        domains: Sequence[str] | None = None,
        concurrency: int | None = None,
        database_url: str | None = None,
        settings: Settings | None = None,
        retry_policy: RetryPolicy | None = None,
        pool: ConnectionPool[Any] | None = None,
        name: str | None = None,
        supervision: Supervision | None = None,
    ) -> None:
        if not isinstance(handlers, HandlerRegistry):
            raise TypeError(
                f"Worker takes a HandlerRegistry, not {type(handlers).__name__}: give it your registry"
            )
        overrides = {"database_url": database_url, "concurrency": concurrency}
        if settings is None:
            settings = load_settings(overrides)
        elif database_url is not None or concurrency is not None:
            raise TypeError("give settings, or database_url and concurrency, not both")
        self.settings = settings
        self.domains = _check_domains(domains or settings.domains or handlers.domains)
        self.id = f"{(name or socket.gethostname())[:LONGEST_NAME]}-{os.getpid()}-{secrets.token_hex(4)}"
        self.health_status = HealthStatus()
        shared = None if supervision is None else supervision.counts
        self._counts = CountsPage() if shared is None else shared
        self._supervision = supervision
        self._handlers = handlers
        self._policy = retry_policy or settings.retry_policy
        self._pool = pool
        self._database = Database(settings)
        self._stop_asked = threading.Event()
        self._stop_reason = "stop() was called"
        self._error: BaseException | None = None
        self._runtime: WorkerRuntime | None = None
        self._is_starting = False
        self._was_stopped = False
        self._signals = 0
        self._ends_idle = False
        self._runs_in: int | None = None  # the thread that is in `run`, and stops it in the end
        self._has_ended = threading.Event()
        self._stop_within: float | None = None
        self._report: StopReport | None = None
        self._has_limits = False
        self._callers_loop: asyncio.AbstractEventLoop | None = None  # AsyncWorker says so
        self._role = "of this worker"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runtime is not None:  # otherwise it was asked to stop before it started
            self.stop()

    @property
    def is_running(self) -> bool:
        """Has it been started, and not stopped?"""
        return self._runtime is not None

    @property
    def beat_age(self) -> float | None:
        """Seconds since its ladder last looked at what runs; None if it is not running."""
        runtime = self._runtime
        return None if runtime is None else monotonic() - runtime.ladder.beat_at

    @property
    def state(self) -> str:
        """STARTING, ACTIVE, PAUSED (by an operator), DRAINING, EXITING, or STOPPED."""
        if self._runtime is None:
            return "STARTING" if self._is_starting else "STOPPED"
        return self._runtime.shown_state.name

    @property
    def running(self) -> int:
        """How many attempts run in it now."""
        return 0 if self._runtime is None else sum(len(item.each) for item in list(self._runtime.attempts.running))

    @property
    def settled(self) -> int:
        """How many attempts this worker has settled."""
        return 0 if self._runtime is None else sum(self._runtime.settler.settled.values())

    def start(self) -> bool:
        """Start the threads and return; while the database is unreachable, wait for it.

        False if something asked it to stop first: then nothing was started.
        """
        self._begin_anew()
        return self._start()

    def _begin_anew(self) -> None:
        """Clear the stop request of the last run. From now on a new request counts, also during the start."""
        if self._runtime is not None or self._is_starting:
            raise RuntimeError("this worker has been started already")
        if self._was_stopped:
            self._was_stopped = False
            self._signals = 0
            self._stop_asked.clear()
        self._error = None
        self.health_status = HealthStatus()  # an error of the last run does not concern this one

    def _start(self) -> bool:
        self._is_starting = True
        try:
            self._refuse_idle_domains()
            self._handlers.check_middleware(item for item in self._handlers if item.domain in self.domains)
            settings = self._database.resolve()
            if not self._await_database(settings):
                return self._did_not_start()
            if not self._start_runtime(settings):
                return self._did_not_start()
        except BaseException as error:
            self._database.close()
            clear = explained(error, self._role)
            if clear is error:
                raise
            raise clear from error
        finally:
            self._is_starting = False
        return True

    def _did_not_start(self) -> bool:
        logger.info("worker %s stops (%s) before it has started", self.id, self._stop_reason)
        self._was_stopped = True
        self._database.close()
        return False

    def _refuse_idle_domains(self) -> None:
        """Refuse a domain without any handler: the worker could only park its commands. Refuse a handler whose
        payload cannot be read."""
        self._handlers.resolve()
        known = self._handlers.domains
        if silent := [domain for domain in self.domains if domain not in known]:
            what = f"domain {silent[0]} has" if len(silent) == 1 else f"domains {', '.join(silent)} have"
            others = ", ".join(known) or "no domain"
            raise ConfigurationError(
                f"{what} no handler in this worker's registry (it has handlers for {others}); register one before "
                f"the worker starts, or do not name the domain"
            )

    def _await_database(self, settings: Settings) -> bool:
        """Whether the database can be used; False if this worker was asked to stop before that."""
        waiting = ServerWait(
            lambda: self._check_database(settings),
            is_patient=settings.wait_for_database,
            log=logger,
            on_reason=self._note_waiting,
        )
        waiting.start()
        is_there = waiting.wait(self._stop_asked)
        self.health_status.clear(UNREACHABLE)
        return is_there

    def _note_waiting(self, reason: str) -> None:
        self.health_status.set_critical(UNREACHABLE, f"waiting for the database: {reason}")
        if self._supervision is not None:
            self._supervision.on_waiting(reason)

    def _start_runtime(self, settings: Settings) -> bool:
        spec = WorkerSpec(
            id=self.id,
            domains=self.domains,
            handlers=self._handlers,
            policy=self._policy,
            pool=self._pool,
            ends_idle=self._ends_idle,
            has_limits=self._has_limits,
            supervision=self._supervision,
            health=self.health_status,
            counts=self._counts,
            fail=self.fail,
            request_stop=self.request_stop,
            is_stopping=self._stop_asked.is_set,
            callers_loop=self._callers_loop,
        )
        runtime = WorkerRuntime(spec, settings)
        if not runtime.start():
            return False
        self._runtime = runtime
        self._say_if_pool_is_capped(settings)
        logger.info(
            "worker %s runs %d handlers for %s with %d slots",
            self.id,
            sum(handler.domain in self.domains for handler in self._handlers),
            ", ".join(self.domains),
            settings.concurrency,
        )
        return True

    def _say_if_pool_is_capped(self, settings: Settings) -> None:
        moves_processes = any(item.is_router and item.domain in self.domains for item in self._handlers)
        most = settings.concurrency + (ROUTER_SLOTS if moves_processes else 0)
        if self._pool is not None and 0 < self._pool.max_size < settings.concurrency:
            logger.warning(
                "the pool that was lent to this worker has %d connections at most for %d slots: handlers that use "
                "the database wait for each other; give it max_size=%d or more",
                self._pool.max_size,
                settings.concurrency,
                settings.concurrency,
            )
        if self._pool is None and (settings.pool_max_size or 0) > most:
            logger.info(
                "pool_max_size is %d, but this worker's pool has %d connections at most: one for each slot",
                settings.pool_max_size,
                most,
            )

    def drain(self, reason: str) -> None:
        """Claim nothing more; when what runs has finished, `run` ends."""
        if self._runtime is not None:
            self._runtime.drain(reason)

    def hurry(self) -> None:
        """Cancel attempts without a deadline, and do not charge them: the worker has drained for too long."""
        if self._runtime is not None:
            self._runtime.hurry()

    def wait(self) -> None:
        """Wait until something asks it to stop."""
        self._stop_asked.wait()

    def policies(self) -> dict[str, Json]:
        """Retry policies by domain and command type, for a post-mortem by the supervisor; "" is the default's."""
        found: dict[str, Any] = {"": _policy(self._policy, "retry", None)}
        for item in self._handlers:
            options = item.options
            policy = _policy(item.retry_policy or self._policy, options.on_timeout, options.on_exhausted)
            policy["isolation"] = item.options.isolation
            found.setdefault(item.domain, {})[item.command_type] = policy
        return found

    def request_stop(self, reason: str) -> None:
        """Ask `run` to end; safe from any thread and from a signal handler."""
        self._stop_reason = reason
        self._stop_asked.set()

    def stop(self, wait: Duration | None = None) -> StopReport:
        """Stop in order, within `wait` (default: shutdown_timeout); raises the error that ended it, if any.

        If another thread is in `run`, that thread stops the worker, and this one waits for its end.
        """
        limit = self.settings.shutdown_timeout if wait is None else parse_seconds(wait, name="wait")
        if self._runs_in not in (None, threading.get_ident()):
            return self._end_run(limit)
        if self._runtime is None:
            hint = " yet: request_stop() ends its start" if self._is_starting else ""
            raise RuntimeError(f"this worker is not running{hint}")
        self._stop_asked.set()
        self._was_stopped = True
        runtime, self._runtime = self._runtime, None
        logger.info("worker %s stops (%s): running attempts have up to %g s", self.id, self._stop_reason, limit)
        report = runtime.stop(limit, self._stop_reason, hurry=lambda: self._signals > 1)
        self._database.close()
        level = logging.INFO if report.is_clean else logging.WARNING
        logger.log(
            level,
            "worker %s stopped (%s): %d settled, %d given back, %d abandoned, %d outcomes unwritten",
            self.id,
            report.reason,
            report.settled,
            report.given_back,
            report.abandoned,
            report.unwritten,
        )
        if self._error is not None:
            raise self._error
        return report

    def _end_run(self, within: float) -> StopReport:
        self._stop_within = within
        self.request_stop("stop() was called")
        self._has_ended.wait()
        if self._report is None:
            raise RuntimeError("run() did not end in order: it has raised the reason") from self._error
        return self._report

    def run(self, *, until_idle: bool = False) -> StopReport:
        """Start, wait for SIGTERM, SIGINT, `request_stop` or a limit, and stop.

        `until_idle` also ends it when no command is left that could run now: for scripts and tests. In the main
        thread, other threads get the GIL after 1 ms meanwhile (`sys.setswitchinterval`).
        """
        self._begin_anew()  # set before signals are handled, so that none is lost
        restore = self._catch_signals()
        self._runs_in, self._report, self._stop_within = threading.get_ident(), None, None
        self._has_ended.clear()
        try:
            self._ends_idle = until_idle
            with quick_switches():
                self._report = self._run()
            return self._report
        finally:
            self._runs_in = None
            self._has_ended.set()
            restore()

    def _run(self) -> StopReport:
        if not self._start():
            return StopReport(self._stop_reason, 0, 0, 0, 0)
        self._stop_asked.wait()
        return self.stop(self._stop_within)

    def fail(self, error: BaseException) -> None:
        """A part of the worker failed: the worker ends, and `stop` raises the error."""
        error = explained(error, self._role)
        self._error = error
        logger.error("worker %s ends: %s", self.id, error, exc_info=error)
        if (runtime := self._runtime) is not None:
            runtime.end_claiming()  # inside an application it may take a while until somebody stops it
        self.request_stop(f"error: {error}")

    def _catch_signals(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return lambda: None

        def caught(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
            self._signals += 1
            self.request_stop(signal.Signals(number).name)

        before = {number: signal.signal(number, caught) for number in (signal.SIGTERM, signal.SIGINT)}

        def restore() -> None:
            for number, previous in before.items():
                signal.signal(number, previous)

        return restore

    def _check_database(self, settings: Settings) -> None:
        """This role may work, the schema is current, every domain has its queue (created, if this role may)."""
        connection = LastingConnection(settings, name="worker start")
        try:
            permitted = connection.run(check_may_work(self.domains))
            self._role = permitted.role
            state = connection.run(look())
            if state.missing:
                raise SchemaError(
                    f"the schema lacks migration {state.missing[0]}; run `commandbus migrate` before the worker"
                )
            if state.newer:
                logger.info(
                    "the schema is at migration %d, newer than this release knows, and compatible with it",
                    max(state.applied),
                )
            known = {domain.name for domain in connection.run(list_domains())} - permitted.without_queue
            for domain in self.domains:
                if domain not in known:
                    try:
                        connection.run(create_domain(domain))
                    except SchemaError as error:
                        raise UnknownDomainError(domain) from error
            self._has_limits = check_limits(connection, settings, self._handlers, self.domains)
        finally:
            connection.close()


def _policy(policy: RetryPolicy, on_timeout: str, on_exhausted: str | None) -> dict[str, Any]:
    return {
        "on_exhausted": on_exhausted or policy.on_exhausted,
        "max_attempts": policy.max_attempts,
        "backoff_schedule": list(policy.backoff_schedule),
        "jitter": policy.jitter,
        "on_timeout": on_timeout,
    }


def _check_domains(domains: Iterable[str]) -> list[str]:
    if isinstance(domains, str):
        raise ConfigurationError(f"domains must be a list of names, not the text {domains!r}")
    found = sorted({check_domain(domain) for domain in domains})
    if not found:
        raise ConfigurationError(
            "this worker has no domain: its registry has no handlers; register some, or name domains"
        )
    return found
