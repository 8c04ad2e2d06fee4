"""isolation: attempts in processes of their own, for handlers with isolation="process" and for suspects.

Child processes are kept warm: one is taken for an attempt and returned after it; at most as many as there are
slots, one of them ahead if a handler asks for isolation. A slot's thread waits for its attempt's child, does what
the handler's context asks for, and judges how it ended. The child's word is only about its own attempt: the worker
writes the outcome, and nothing the child says can name another command.

If the child dies, its database backend is terminated before the outcome is settled. If it died in the middle of
the COMMIT of a `ctx.transaction()`, the fence decides: a settlement after it is refused.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, Protocol

from commandbus.errors import ConfigurationError, UnknownCommandTypeError
from commandbus.flow.settle import Settlement
from commandbus.logger import safe_logger
from commandbus.model import payload
from commandbus.model.outcome import Failure
from commandbus.model.postmortem import parse_dump, signal_name
from commandbus.runtime import autopsy
from commandbus.runtime.address import Address, find_address, refuse_in_child
from commandbus.runtime.attempt import Attempt, Stop, Why
from commandbus.runtime.channel import Message
from commandbus.runtime.child import Cause, Child, Dead, Keeper
from commandbus.runtime.connections import Borrowed
from commandbus.runtime.execute import Ended
from commandbus.runtime.handlers import HandlerRegistry
from commandbus.runtime.process import ChildProcess, Spawner
from commandbus.runtime.remote import remake_error
from commandbus.settings import SETTINGS, Settings

__all__ = ["Child", "Ends", "Isolation"]

logger = safe_logger("commandbus.worker")

IDLE_SECONDS: Final = 60.0
POLITE_SECONDS: Final = 2.0
SPAWN_SECONDS: Final = 30.0
ROOM_SHARE: Final = 0.8
_TRIES: Final = 3
_LAST_LINES: Final = 20


class Ends(Protocol):
    """Who knows what an attempt's end means: the worker's executor."""

    def completed(self, attempt: Attempt, result: Any) -> Ended:
        """It returned this."""

    def failed(self, attempt: Attempt, error: BaseException, trace: str | None = None) -> Ended:
        """It raised this."""

    def end_stopped(self, attempt: Attempt, stop: Stop, failure: Failure) -> Settlement:
        """It was asked to stop, and did not complete."""

    def lost(self, attempt: Attempt, failure: Failure) -> Ended:
        """It failed in a way that may pass."""


class _ClosedError(Exception):
    """The worker is stopping."""


class Isolation:
    """A worker's child processes."""

    def __init__(
        self,
        settings: Settings,
        worker: str,
        registry: HandlerRegistry,
        executor: Ends,
        *,
        extend: Callable[[Attempt, float], Future[bool]],
        progress: Callable[[Attempt, str], None],
        terminate: Callable[[list[Borrowed]], None],
        cancel_query: Callable[[Attempt], None] = lambda _: None,
        default_max_attempts: int,
    ) -> None:
        refuse_in_child()
        self._settings = settings
        self._worker = worker
        self._keeper = Keeper(extend, progress, cancel_query, settings.max_extension)
        self._default_max_attempts = default_max_attempts
        self._executor = executor
        self._terminate = terminate
        asking = [handler for handler in registry if handler.options.isolation == "process"]
        self._keeps_warm = bool(asking)
        self._address = find_address(registry, settings.handlers)
        if self._address is None and asking:
            raise ConfigurationError(
                f'isolation="process" of {", ".join(handler.name for handler in asking)}: a process of its own '
                f"could not find it, because the registry is not a module-level variable of an importable module "
                f"or of the script that was started; make it one"
            )
        self._lock = threading.Condition()
        self._idle: list[ChildProcess] = []
        self._busy: dict[ChildProcess, Child | None] = {}
        self._leaving: list[tuple[ChildProcess, float]] = []
        self._ahead: Future[ChildProcess] | None = None
        self._is_closed = False
        self._spawner = Spawner(self._make, self._sweep, name=worker)

    @property
    def is_available(self) -> bool:
        """Can another process find the handlers?"""
        return self._address is not None

    def wants(self, attempt: Attempt) -> bool:
        """Is it to run in a process of its own?"""
        handler = attempt.handler
        if handler is None or self._address is None:
            return False
        return handler.options.isolation == "process" or attempt.is_suspect

    def start(self) -> None:
        """Be ready; a first child is started if a handler asks for isolation."""
        self._spawner.start()
        self._spawn_ahead()

    def pids(self) -> list[int]:
        """The live child processes."""
        with self._lock:
            leaving = [process for process, _ in self._leaving]
            return [process.pid for process in (*self._idle, *self._busy, *leaving)]

    # --- an attempt -----------------------------------------------------------------------------------------

    def run(self, attempt: Attempt) -> Ended:
        """Run an attempt in a child, to its end, whatever that is."""
        if attempt.handler is None:
            return self._executor.failed(attempt, UnknownCommandTypeError(attempt.domain, attempt.command_type))
        for _ in range(_TRIES):
            try:
                process = self._take()
            except _ClosedError:
                return self._executor.end_stopped(attempt, *self._stopping(attempt))
            except Exception as error:  # noqa: BLE001 - no memory, no processes, no files …
                return self._fail(attempt, f"its process could not be started: {type(error).__name__}: {error}")
            try:
                ended = self._run_in(process, attempt)
            except Exception as error:
                logger.exception("attending to a handler's process failed")
                return self._fail(
                    attempt, f"its process could not be attended to: {type(error).__name__}: {error}"
                )
            if not isinstance(ended, _NotBegun):
                return ended
        return self._fail(attempt, f"{_TRIES} processes in a row died before it could begin")

    def _run_in(self, process: ChildProcess, attempt: Attempt) -> Ended | _NotBegun:
        child = Child(process, attempt, self._keeper, self._settings.max_memory_mb)
        try:
            self._know(process, child)
            if attempt.is_fenced:  # given up while it waited for a process
                child.finish()
                self._return(process, is_usable=True)
                return None
            child.begin()
            if attempt.is_fenced:
                child.end_now("it was given up before it could begin")
            end = child.attend()
        except BaseException:
            child.finish()
            process.kill()
            self._give_up(process)
            raise
        child.finish()
        if isinstance(end, Dead):
            self._forget(process, is_dead=end.exit_code is not None)
            self._end_backends(attempt)
            return self._judge_death(attempt, child, end)
        self._end_backends(attempt)  # a connection that it did not return, in a thread that it left behind
        try:
            told = _Told(end)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as broken:
            self._return(process, is_usable=False)
            return self._fail(attempt, f"its process told its end in a way that makes no sense: {broken}")
        self._return(process, is_usable=not child.is_doomed)
        return self._judge_end(attempt, told)

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
        if dead.cause is Cause.DIED and not child.has_begun:
            return self._judge_start(attempt, child, dead)
        stop = attempt.stop
        failure = _failure_of(attempt, dead)
        if dead.cause is Cause.KILLED:
            if stop is None:
                stop, _ = self._stopping(attempt)
            return self._executor.end_stopped(attempt, stop, failure)
        if stop is not None and stop.why is Why.CANCEL:
            return self._executor.end_stopped(attempt, stop, failure)
        return self._executor.lost(attempt, failure)

    def _judge_start(self, attempt: Attempt, child: Child, dead: Dead) -> Ended | _NotBegun:
        """It died before the handler was called: of the modules that it loads, or of somebody else's doing."""
        told = child.could_not_start
        if told is not None:
            return self._fail(attempt, f"its process could not start: {told.get('text')}", told.get("trace"))
        if child.was_ready:
            return _NotBegun()
        last = "\n".join(dead.dump.strip().splitlines()[-_LAST_LINES:])
        return self._fail(attempt, f"its process could not start: it {_how(dead)}" + (f": {last}" if last else ""))

    def _fail(self, attempt: Attempt, text: str, trace: object = None) -> Ended:
        failure = Failure(
            "IsolationFailed",
            "ISOLATION_FAILED",
            payload.clean_text(text, longest=8192),
            payload.clean_text(trace) if isinstance(trace, str) else None,
        )
        return self._executor.lost(attempt, failure)

    def _stopping(self, attempt: Attempt) -> tuple[Stop, Failure]:
        now = time.monotonic()
        text = "the worker stopped"
        stop = attempt.stop or Stop(Why.SHUTDOWN, text, now, now)
        return stop, Failure(
            "AttemptCancelledError", "SHUTDOWN", text, rung="shutdown", duration_ms=attempt.elapsed_ms()
        )

    def _end_backends(self, attempt: Attempt) -> None:
        borrowed = attempt.borrowed
        if borrowed is None:
            return
        try:
            self._terminate([borrowed])
        except Exception as error:  # noqa: BLE001 - the server's limits and the fence remain
            logger.warning("the backend of a handler's process could not be terminated: %s", error)
        with borrowed.lock:
            borrowed.is_returned = True
        attempt.extras.borrowed = None

    # --- the processes --------------------------------------------------------------------------------------

    def _make(self) -> ChildProcess:
        """On the spawner's thread."""
        assert self._address is not None  # noqa: S101 - `wants` says no without one
        largest = 2 * self._settings.max_payload_bytes + 2**20
        return ChildProcess(self._start_message(self._address), max_message_bytes=largest)

    def _start_message(self, address: Address) -> Message:
        settings = self._settings
        named = logging.root.manager.loggerDict.items()
        levels = {name: found.level for name, found in named if isinstance(found, logging.Logger) and found.level}
        return {
            "k": "start",
            "worker": self._worker,
            "settings": {name: getattr(settings, name) for name in SETTINGS},
            "address": asdict(address),
            "sys_path": [path for path in sys.path if isinstance(path, str)],
            "argv": list(sys.argv),
            "levels": levels | {"": logging.root.level},
            "default_max_attempts": self._default_max_attempts,
        }

    def _take(self) -> ChildProcess:
        process = self._take_idle()
        while process is not None and process.is_dead():
            process.reap()
            process = self._take_idle()
        if process is None:
            process = self._take_new()
        with self._lock:
            self._busy[process] = None
            is_closed = self._is_closed
        if is_closed:
            process.kill()
            if process.is_dead(POLITE_SECONDS):
                process.reap()
            with self._lock:
                self._busy.pop(process, None)
                self._lock.notify_all()
            raise _ClosedError
        self._spawn_ahead()
        return process

    def _know(self, process: ChildProcess, child: Child) -> None:
        with self._lock:
            self._busy[process] = child
            if self._is_closed:
                child.end_now("the worker stopped")

    def _take_idle(self) -> ChildProcess | None:
        with self._lock:
            if self._is_closed:
                raise _ClosedError
            return self._idle.pop() if self._idle else None

    def _take_new(self) -> ChildProcess:
        with self._lock:
            asked, self._ahead = self._ahead, None
        return (asked or self._spawner.spawn()).result(SPAWN_SECONDS)

    def _spawn_ahead(self) -> None:
        with self._lock:
            count = len(self._idle) + len(self._busy)
            if self._idle or self._ahead is not None or self._is_closed:
                return
            if not self._keeps_warm or count >= self._settings.concurrency:
                return
            self._ahead = asked = self._spawner.spawn()
        asked.add_done_callback(self._keep)

    def _keep(self, asked: Future[ChildProcess]) -> None:
        with self._lock:
            if self._ahead is not asked:
                return  # an attempt waits for it
            self._ahead = None
            if asked.exception() is None:
                self._idle.insert(0, asked.result())

    def _return(self, process: ChildProcess, *, is_usable: bool) -> None:
        limit = self._settings.max_memory_mb
        if not is_usable:
            process.kill()
        elif limit is not None and process.memory_mb() > ROOM_SHARE * limit:
            is_usable = False  # the next attempt would be blamed for what this one left
            process.channel.send({"k": "end"})
        with self._lock:
            self._busy.pop(process, None)
            if is_usable and not self._is_closed:
                process.idle_since = time.monotonic()
                self._idle.append(process)
            else:
                self._leaving.append((process, time.monotonic() + POLITE_SECONDS))
            self._lock.notify_all()
        if not is_usable:
            self._spawn_ahead()

    def _forget(self, process: ChildProcess, *, is_dead: bool) -> None:
        with self._lock:
            self._busy.pop(process, None)
            if not is_dead:
                self._leaving.append((process, time.monotonic()))
            self._lock.notify_all()
        self._spawn_ahead()

    def _give_up(self, process: ChildProcess) -> None:
        with self._lock:
            self._busy.pop(process, None)
            self._leaving.append((process, time.monotonic()))
            self._lock.notify_all()

    def _sweep(self) -> None:
        """Reap what died idle, and send away what has been idle for long; one stays warm."""
        with self._lock:
            idle, now = self._idle, time.monotonic()
            spare = [
                process
                for process in idle[: len(idle) - self._keeps_warm]
                if now - process.idle_since > IDLE_SECONDS
            ]
            gone = [process for process in idle if process.is_dead() or process in spare]
            self._idle = [process for process in idle if process not in gone]
            self._leaving += [(process, now + POLITE_SECONDS) for process in gone]
        for process in gone:
            process.channel.send({"k": "end"})
        self._see_off()

    def _see_off(self) -> None:
        """Reap those that leave, and kill those that take their time."""
        with self._lock:
            leaving, self._leaving = self._leaving, []
        left = []
        for process, until in leaving:
            if process.is_dead():
                process.reap()
                continue
            if time.monotonic() >= until:
                process.kill()
            left.append((process, until))
        with self._lock:
            self._leaving += left

    def close(self, timeout: float) -> None:
        """End all children: idle ones politely, those that still run an attempt at once."""
        deadline = time.monotonic() + timeout
        with self._lock:
            self._is_closed = True
            asked, self._ahead = self._ahead, None
            idle, self._idle = self._idle, []
            busy = list(self._busy.items())
        if asked is not None:
            with suppress(Exception):
                idle.append(asked.result(SPAWN_SECONDS))
        for process, child in busy:
            if child is None:
                process.kill()
            else:
                child.end_now("the worker stopped")
        for process in idle:
            process.channel.send({"k": "end"})
        with self._lock:
            self._leaving += [(process, deadline) for process in idle]
            self._lock.wait_for(lambda: not self._busy, max(1.0, timeout))  # their slots' threads reap them
        while self._leaving and time.monotonic() < deadline + POLITE_SECONDS:
            self._leaving[0][0].is_dead(min(0.1, max(0.01, deadline - time.monotonic())))
            self._see_off()
        self._spawner.stop()


class _Told:
    """What a child said of its attempt's end, looked at."""

    def __init__(self, message: Message) -> None:
        self.has_committed = message.get("committed") is True
        self.is_lost = message.get("lost") is True
        self.missing = (str(message["missing"]), message.get("trace")) if "missing" in message else None
        self.result = None if message.get("result") is None else payload.loads(message["result"])
        self.error = None if message.get("error") is None else remake_error(message["error"])


class _NotBegun:
    """The process died before it had begun with this attempt."""


def _failure_of(attempt: Attempt, dead: Dead) -> Failure:
    stop = attempt.stop
    if dead.cause is Cause.KILLED and stop is None:
        kind, code, rung = "AttemptCancelledError", "SHUTDOWN", "kill"
        text = f"its process was killed: {dead.reason or 'the worker stopped'}"
    elif dead.cause is Cause.KILLED and stop is not None:
        kind, code, rung = "ExecutionStuck", "EXECUTION_STUCK", "kill"
        grace = f"{max(0.0, stop.until - stop.asked_at):.3g} seconds"
        text = f"did not respond to cancellation within {grace}: {stop.text}; its process was killed"
    elif dead.cause is Cause.MEMORY:
        kind, code, rung = "MemoryLimitExceeded", "MEMORY_LIMIT", "kill"
        text = f"{dead.reason}, and was killed"
    elif dead.cause is Cause.CONFUSED:
        kind, code, rung = "WorkerLost", "WORKER_LOST", "kill"
        text = f"its process was killed: {dead.reason}"
    else:
        kind, code, rung = "WorkerLost", "WORKER_LOST", "crash"
        text = f"its process {_how(dead)}"
    return Failure(
        kind,
        code,
        payload.clean_text(text, longest=8192),
        rung=rung,
        autopsy=_autopsy(dead),
        duration_ms=attempt.elapsed_ms(),
    )


def _how(dead: Dead) -> str:
    code = dead.exit_code
    if code is None:
        return "does not die"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"died of {signal_name(-code)}" + (" (out of memory, or somebody killed it)" if code == -9 else "")


def _autopsy(dead: Dead) -> str:
    found = parse_dump(dead.dump)
    stacks = [
        {
            "title": f"thread {ident:#x}" + (" (current)" if ident == found.current else ""),
            "frames": list(reversed(frames)),  # innermost last, as in a traceback
        }
        for ident, frames in found.stacks.items()
    ]
    code = dead.exit_code
    process = {
        "signal": signal_name(-code) if code is not None and code < 0 else None,
        "exit_code": code if code is not None and code >= 0 else None,
        "dump": dead.dump or None,
    }
    return autopsy.to_json({"taken_at": round(time.time(), 3), "stacks": stacks, "process": process})
