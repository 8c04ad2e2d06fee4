"""Attempts in child processes: of isolation="process" handlers, of suspects, and in quarantine.

A slot's thread takes a process that is ready, and only then its attempt begins: what importing the handlers takes
does not count for the attempt. It waits for the attempt's end, does what the handler's context asks for, and
judges how it ended. A child can only speak about its own attempt: the worker writes the outcome, and nothing the
child says can name another command.

If the child dies, its database session is terminated before the outcome is settled. If it died in the middle of
the COMMIT of a `ctx.transaction()`, the fence decides: a settlement after it is refused.
"""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from commandbus.clock import monotonic
from commandbus.errors import ConfigurationError
from commandbus.flow.commands.claimed_row import QUARANTINE, SUSPECT
from commandbus.flow.commands.settle import Settlement
from commandbus.logger import safe_logger
from commandbus.model import payload
from commandbus.settings import Settings
from commandbus.worker.execution.attempt import NEVER, Attempt, Stop, Why
from commandbus.worker.execution.connections import Borrowed
from commandbus.worker.execution.context import Services
from commandbus.worker.execution.execute import Ended, Executor
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.exhaustion import is_exhaustion
from commandbus.worker.isolation.attempt_in_child import Child, ChildFate, Dead
from commandbus.worker.isolation.channel import Message
from commandbus.worker.isolation.child_outcomes import failure_of, never_began, no_process
from commandbus.worker.isolation.child_pool import Children
from commandbus.worker.isolation.child_process import ChildProcess
from commandbus.worker.isolation.child_start import StartError
from commandbus.worker.isolation.descendants import kill_marked
from commandbus.worker.isolation.remote_errors import remake_error
from commandbus.worker.registry_address import Address, find_address, main_address, refuse_in_child

__all__ = ["Child", "Isolation"]

logger = safe_logger("commandbus.worker")

_TRIES: Final = 3


class Isolation:
    """A worker's child processes."""

    def __init__(
        self,
        settings: Settings,
        worker: str,
        registry: HandlerRegistry,
        executor: Executor,
        *,
        services: Services,
        terminate: Callable[[list[Borrowed]], None],
        cancel_query: Callable[[Attempt], None] = lambda _: None,
        on_exhausted: Callable[[str], None] = lambda _: None,
        quarantines: bool = False,
        fleet: str | None = None,
    ) -> None:
        refuse_in_child()
        self._is_fleet = fleet is None  # no supervisor has other workers beside this one
        self._mark = f"{fleet or worker}/{worker}/{secrets.token_hex(8)}/"
        self._numbers = itertools.count(1)
        self._quarantines = quarantines
        self._settings = settings
        self._late_seconds = settings.timeouts.late_seconds
        self._worker = worker
        self._services = services
        self._cancel_query = cancel_query
        self._executor = executor
        self._terminate = terminate
        self._on_exhausted = on_exhausted
        asking = [handler for handler in registry if handler.options.isolation == "process"]
        self._registry = registry
        self._main = main_address()
        if asking and not self.is_available:
            raise ConfigurationError(
                f'isolation="process" of {", ".join(handler.name for handler in asking)}: a process of its own '
                f"could not find it, because the registry is not a module-level variable of an importable module "
                f"or of the script that was started; make it one"
            )
        self._asking = [
            (handler.domain, handler.command_type, getattr(handler.function, "__module__", None))
            for handler in asking
        ]
        self._children = Children(
            self._make,
            most=settings.concurrency,
            keeps_warm=bool(asking),
            max_memory_mb=settings.max_memory_mb,
            what=lambda: "" if self._address is None else _name_of(self._address),
            name=worker,
        )

    @functools.cached_property
    def _address(self) -> Address | None:
        """Looked for when it is first needed: a large application has thousands of modules to look through, and
        most workers never start a child process. The ladder may need it, so this reads memory only."""
        return find_address(self._registry, self._settings.handlers, self._main)

    @property
    def is_available(self) -> bool:
        """Can another process find the handlers?"""
        return self._address is not None

    @property
    def has_ended(self) -> bool:
        """Has the thread that starts child processes ended by itself?"""
        return self._children.has_ended

    def wants(self, attempt: Attempt) -> bool:
        """Is it to run in a process of its own? Asked of every attempt before it begins."""
        row, handler = attempt.row, attempt.handler
        if not self._asking and row[SUSPECT] is None and not row[QUARANTINE]:
            return False
        if handler is None or self._address is None:
            return False
        if handler.options.isolation == "process" or attempt.is_suspect:
            return True
        return self._quarantines and attempt.is_quarantined

    def start(self) -> None:
        """Be ready; a first child is started if a handler asks for isolation."""
        self._children.start()

    def let_go(self) -> None:
        """From now on, no thread waits for a process in `take`, not even one that waits already. Never blocks."""
        self._children.let_go()

    def close(self, timeout: float) -> None:
        """End all children: idle ones politely, those that still run an attempt at once."""
        self._children.close(timeout)
        if self._is_fleet and next(self._numbers) > 1:
            kill_marked(self._mark)  # what was left behind by attempts that ended normally

    def pids(self) -> list[int]:
        """The live child processes."""
        return self._children.pids()

    # --- an attempt -----------------------------------------------------------------------------------------

    def take(self, attempt: Attempt) -> ChildProcess | Settlement | None:
        """Before it begins: a process that is ready for it, as soon as there is one. Its settlement if there will
        be none; None if it is not to begin: it was asked to stop, its lease is not sure, its worker lets go, or
        the system has nothing left for a process."""
        late = self._late_seconds
        try:
            taken = self._children.take(
                lambda: attempt.stop is None and not attempt.has_expired and attempt.is_surely_held(late)
            )
        except StartError as error:
            if error.is_exhaustion:
                self._on_exhausted(str(error))
                return None
            return self._fail(attempt, str(error), error.trace)
        except Exception as error:  # noqa: BLE001 - no memory, no processes, no files …
            if is_exhaustion(error):
                self._on_exhausted(f"a child process could not be started ({error})")
                return None
            return self._fail(attempt, f"its child process could not be started: {type(error).__name__}: {error}")
        if taken is not None and (attempt.has_expired or not attempt.is_surely_held(late)):
            self._children.give_back(taken, is_usable=True)  # the wait was longer than its lease
            return None
        return taken

    def run(self, attempt: Attempt, process: ChildProcess) -> Ended:
        """Run an attempt that has begun in the process that was taken for it, to its end, whatever that is."""
        for _ in range(_TRIES):
            try:
                ended = self._run_in(process, attempt)
            except Exception as error:
                logger.exception("a child process could not be served")
                text = f"its child process could not be served: {type(error).__name__}: {error}"
                return self._fail(attempt, text, has_begun=True)
            if not isinstance(ended, _NotBegun):
                return ended
            attempt.deadline_at = NEVER  # it waits for another, and begins again
            taken = self.take(attempt)
            if taken is None:
                self._return_permits(attempt)
                stop = self._stop_of(attempt)
                return self._executor.end_stopped(attempt, stop, never_began(attempt, stop))
            if not isinstance(taken, ChildProcess):
                return taken
            process = taken
            self._executor.begin(attempt)
        self._children.give_back(process, is_usable=True)
        return self._fail(attempt, f"{_TRIES} child processes in a row died before it could start")

    def _run_in(self, process: ChildProcess, attempt: Attempt) -> Ended | _NotBegun:
        child = Child(
            process,
            attempt,
            self._services,
            cancel_query=self._cancel_query,
            max_memory_mb=self._settings.max_memory_mb,
        )
        try:
            self._children.know(process, child)
            if attempt.is_fenced:  # given up while it waited for a process
                child.finish()
                self._children.give_back(process, is_usable=True)
                return None
            child.begin()
            if attempt.is_fenced:
                child.end_now("it was given up before it started")
            end = child.attend()
        except BaseException:
            child.finish()
            process.kill()
            self._children.forget(process, is_dead=process.is_reaped)
            raise
        child.finish()
        if isinstance(end, Dead):
            self._children.forget(process, is_dead=end.exit_code is not None)
            self._end_sessions(attempt)
            return self._judge_death(attempt, child, end)
        self._end_sessions(attempt)  # a connection that it did not return, in a thread that it left behind
        try:
            told = _Told(end)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as broken:
            self._children.give_back(process, is_usable=False)
            text = f"its child process reported its end in a way that makes no sense: {broken}"
            return self._fail(attempt, text, has_begun=True)
        self._children.give_back(process, is_usable=not child.is_doomed)
        return _NotBegun() if told.is_late and not child.has_begun else self._judge_end(attempt, told)

    def _judge_end(self, attempt: Attempt, told: _Told) -> Ended:
        attempt.has_committed = told.has_committed
        attempt.is_lost = attempt.is_lost or told.is_lost
        if told.missing is not None:
            return self._fail(attempt, *told.missing)
        if told.error is not None:
            return self._executor.failed(attempt, *told.error)
        try:
            return self._executor.completed(attempt, told.result)
        except Exception as refused:  # noqa: BLE001 - a result that cannot be stored is an error as any other
            return self._executor.failed(attempt, refused)

    def _judge_death(self, attempt: Attempt, child: Child, dead: Dead) -> Ended | _NotBegun:
        if dead.cause is ChildFate.DIED and not child.has_begun:
            return _NotBegun()
        self._doubt(attempt)
        stop = attempt.stop
        failure = failure_of(attempt, dead)
        if dead.cause is ChildFate.KILLED:
            if stop is None:
                stop = self._stop_of(attempt)
            return self._executor.end_stopped(attempt, stop, failure)
        if stop is not None and stop.why is Why.CANCEL:
            return self._executor.end_stopped(attempt, stop, failure)
        return self._executor.lost(attempt, failure)

    def _fail(self, attempt: Attempt, text: str, trace: object = None, *, has_begun: bool = False) -> Settlement:
        if has_begun:
            self._doubt(attempt)
        else:
            self._return_permits(attempt)
        return self._executor.lost(attempt, no_process(text, trace))

    @staticmethod
    def _doubt(attempt: Attempt) -> None:
        """Its calls may still be under way, so the handler's own permits stay taken."""
        if attempt.limit_use is not None:
            is_late = attempt.stop is not None and attempt.stop.why is Why.DEADLINE
            attempt.limit_use.note_stop(is_late=is_late)

    @staticmethod
    def _return_permits(attempt: Attempt) -> None:
        if attempt.limit_use is not None:
            attempt.limit_use.returned()

    def _stop_of(self, attempt: Attempt) -> Stop:
        now = monotonic()
        if attempt.is_lost:
            return attempt.stop or Stop(Why.LEASE, "its lease was lost", now, now)
        if not attempt.is_surely_held(self._late_seconds):
            text = "its lease was not renewed in time (layer 3: visibility_timeout)"
            return attempt.stop or Stop(Why.LEASE, text, now, now)
        return attempt.stop or Stop(Why.SHUTDOWN, "the worker stopped", now, now)

    def _end_sessions(self, attempt: Attempt) -> None:
        borrowed = attempt.borrowed
        if borrowed is None:
            return
        try:
            self._terminate([borrowed])
        except Exception as error:  # noqa: BLE001 - the server's limits and the fence remain
            logger.warning("the database session of a child process could not be terminated: %s", error)
        with borrowed.lock:
            borrowed.is_returned = True
        attempt.extras.borrowed = None

    # --- the processes --------------------------------------------------------------------------------------

    def _make(self) -> ChildProcess:
        """On the spawner's thread."""
        assert self._address is not None  # noqa: S101 - `wants` says no without one
        largest = 2 * self._settings.max_payload_bytes + 2**20
        mark = f"{self._mark}{next(self._numbers)}/"
        return ChildProcess(self._start_message(self._address), max_message_bytes=largest, mark=mark)

    def _start_message(self, address: Address) -> Message:
        settings = self._settings
        named = logging.root.manager.loggerDict.items()
        levels = {name: found.level for name, found in named if isinstance(found, logging.Logger) and found.level}
        return {
            "k": "start",
            "worker": self._worker,
            "settings": settings.plain(),
            "address": asdict(address),
            "sys_path": [path for path in sys.path if isinstance(path, str)],
            "argv": list(sys.argv),
            "levels": levels | {"": logging.root.level},
            "default_max_attempts": self._services.default_max_attempts,
            "handlers": self._asking,
        }


class _Told:
    """What a child said about its attempt's end, checked."""

    def __init__(self, message: Message) -> None:
        self.has_committed = message.get("committed") is True
        self.is_lost = message.get("lost") is True
        self.is_late = message.get("late") is True
        self.missing = (str(message["missing"]), message.get("trace")) if "missing" in message else None
        self.result = None if message.get("result") is None else payload.loads(message["result"])
        self.error = None if message.get("error") is None else remake_error(message["error"])


class _NotBegun:
    """The process died before it began this attempt, or got it too late to begin."""


def _name_of(address: Address) -> str:
    """What a process of its own imports."""
    main = address.main_module or address.main_file
    return address.module if address.module != "__main__" or main is None else main
