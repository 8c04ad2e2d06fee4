"""The main program of a child process: it runs handlers, one attempt at a time.

    reader thread    messages of the worker: run, cancel, answers, end; sets the events of child contexts in time
    main thread      loads the handlers, then runs attempts: sync ones as they are, async ones on a loop of its own

The handler gets the ordinary context. What only the worker can do (extend, store progress, permits of limits, log)
is requested by message. The settlement of `ctx.transaction()` is written here, in that transaction, under the
attempt's fence. Every other outcome is sent to the worker, which writes it. A connection is closed at the end of
the attempt that used it.

The child process dies with the worker (PDEATHSIG). After a crash or the dump signal, all stacks are written into
an inherited memory file, from which the worker reads them. A process that is forked from here takes no part in
this.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `main`: nothing of what is imported here ever becomes garbage

import asyncio
import importlib
import inspect
import itertools
import locale
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from psycopg import Connection
from psycopg_pool import ConnectionPool

from commandbus.clock import monotonic
from commandbus.errors import AttemptFencedError, ConfigurationError, TransientCommandError
from commandbus.settings import Settings
from commandbus.worker.execution import adapters, fresh_thread
from commandbus.worker.execution.attempt import NEVER, Attempt, Stop, Why
from commandbus.worker.execution.connections import Borrowed, HandlerConnections
from commandbus.worker.execution.context import (
    AsyncHandlerContext,
    HandlerContext,
    Services,
    become_async,
    dump_result,
)
from commandbus.worker.execution.fresh_thread import in_fresh_thread
from commandbus.worker.exhaustion import is_exhaustion
from commandbus.worker.isolation.channel import ChildEnd, Message
from commandbus.worker.isolation.child_setup import adopt_orphans, collect_garbage, die_with, write_stacks_to
from commandbus.worker.isolation.descendants import reap_adopted
from commandbus.worker.isolation.limit_relay import ChildLimits
from commandbus.worker.isolation.remote_errors import describe_error
from commandbus.worker.isolation.write_relay import ChildWrites
from commandbus.worker.lifespans import RunningLifespans
from commandbus.worker.logs import extras
from commandbus.worker.os_state import OsState
from commandbus.worker.registry_address import Address, Handlers

TICK_SECONDS: Final = 0.25
ANSWER_SECONDS: Final = 5.0
STOP_SECONDS: Final = 1.5  # the worker kills a child process that takes two seconds to end
_LONGEST_LOG: Final = 65536
_OURS: Final = {__file__, fresh_thread.__file__, *adapters.OURS}


class Run:
    """One attempt, from the message that asks for it."""

    def __init__(self, message: Message) -> None:
        self.number: int = message["n"]
        self.module: str | None = message["module"]
        self.attempt = Attempt(message["domain"], tuple(message["row"]), None, message["renewed_at"])
        self.attempt.started = message["started"]
        self.attempt.started_at = message["started_at"]
        self.attempt.deadline_at = NEVER if message["deadline_at"] is None else message["deadline_at"]
        self._lock = threading.Lock()
        self._task: asyncio.Task[Any] | None = None

    def stop(self, message: Message) -> None:
        """The worker asks it to stop."""
        stop = Stop(Why(message["why"]), message["text"], message["asked_at"], message["until"])
        with self._lock:
            self.attempt.ask_to_stop(stop)
            if self._task is not None:
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def attach(self, task: asyncio.Task[Any]) -> None:
        """The attempt runs in this task, which a stop cancels."""
        with self._lock:
            self._task = task
            if self.attempt.stop is not None:
                task.cancel()

    def detach(self) -> None:
        """Its task is done."""
        with self._lock:
            self._task = None

    def tick(self) -> None:
        """Wake code that waits for a child context's deadline."""
        now = monotonic()
        for scope in list(self.attempt.scopes):
            if now >= scope.deadline_at:
                scope.event.set()


class Connections(HandlerConnections):
    """One connection at a time. The worker is told its session before the first statement."""

    def __init__(self, settings: Settings, *, worker: str, run: Run, channel: ChildEnd) -> None:
        super().__init__(settings, name=f"{worker} isolated", size=1)
        self._run = run
        self._channel = channel

    def _pool(self) -> ConnectionPool[Any]:
        if self._run.attempt.is_fenced:
            raise AttemptFencedError(f"this attempt of command {self._run.attempt.command_id!r} is over")
        return super()._pool()

    def _lend(self, attempt: Attempt, conn: Connection[Any]) -> Borrowed:
        borrowed = super()._lend(attempt, conn)
        self._tell(borrowed)
        return borrowed

    def _show_session(self, attempt: Attempt, borrowed: Borrowed) -> None:
        super()._show_session(attempt, borrowed)
        if borrowed.started:  # the server has said it, after the first statement
            self._tell(borrowed)

    def _tell(self, borrowed: Borrowed) -> None:
        self._channel.send(
            {
                "k": "lent",
                "n": self._run.number,
                "pid": borrowed.pid,
                "started": borrowed.started,
                "key": borrowed.key,
            }
        )

    def _take_back(self, attempt: Attempt, borrowed: Borrowed) -> None:
        super()._take_back(attempt, borrowed)
        self._channel.send({"k": "returned", "n": self._run.number})


class Isolated:
    """The process's two threads and what they share."""

    def __init__(self, channel: ChildEnd, crash_fd: int) -> None:
        self._channel = channel
        self._crash_fd = crash_fd
        self._process = os.getpid()
        self._todo: queue.SimpleQueue[Message | Run | None] = queue.SimpleQueue()
        self._current: Run | None = None
        self._asked: dict[int, Future[bool]] = {}
        self._questions = itertools.count(1)
        self._limits = ChildLimits(channel.send, self._number_of)
        self._writes = ChildWrites(channel.send, self._number_of)
        self._loop: asyncio.AbstractEventLoop | None = None
        os.register_at_fork(after_in_child=self._leave_conversation)

    def serve(self) -> int:
        """Run attempts until the worker says that this was all."""
        try:
            threading.Thread(target=self._read, name="commandbus-reader", daemon=True).start()
        except RuntimeError as error:
            return self._cannot_start(error)
        start = self._todo.get()
        if not isinstance(start, dict):
            return 0
        self._enable_dumps()
        self._channel.send({"k": "importing", "thread": threading.get_ident()})
        try:
            self._prepare(start)
            handlers = Handlers(Address(**start["address"]))
            self._lifespans = RunningLifespans(handlers.lifespans, self._run_alone, is_child=True)
            self._lifespans.start()
        except BaseException as error:  # noqa: BLE001 - whatever the user's modules raise, SystemExit too
            return self._cannot_start(error)
        for wanted in start["handlers"]:
            with suppress(BaseException):  # its own attempt will tell
                handlers.get(*wanted)
        self._channel.send({"k": "ready"})
        surroundings = _Surroundings()
        while isinstance(run := self._todo.get(), Run):
            if not run.attempt.is_surely_held(self._settings.timeouts.late_seconds):
                # Nobody knows which attempt it belongs to: this process was stopped, or its machine was suspended.
                self._current = None
                self._channel.send({"k": "ended", "n": run.number, "late": True})
                continue
            self._enable_dumps()
            self._channel.send({"k": "begun", "n": run.number})
            ended = self._end_of(run, handlers)
            self._die_if_forked()
            surroundings.restore()
            reap_adopted()
            self._current = None
            self._channel.send({"k": "ended", "n": run.number, **ended})
        self._lifespans.stop(STOP_SECONDS)
        return 0

    def _cannot_start(self, error: BaseException) -> int:
        text = str(error) if isinstance(error, ConfigurationError) else f"{type(error).__name__}: {error}"
        told = {"text": text, "trace": _format(error), "exhausted": is_exhaustion(error)}
        self._channel.send({"k": "cannot_start"} | told)
        return 1

    # --- before the first attempt ---------------------------------------------------------------------------

    def _prepare(self, start: Message) -> None:
        sys.path[:] = start["sys_path"]
        sys.argv[:] = start["argv"]
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in start["settings"].items()
        }
        self._settings = Settings(**values)
        self._start = start
        forward = _Forward(self._channel)
        logging.basicConfig(handlers=[forward], force=True)
        for name, level in start["levels"].items():
            logging.getLogger(name or None).setLevel(level)

    def _enable_dumps(self) -> None:
        """Again before each attempt: a module or a handler may have turned them elsewhere."""
        write_stacks_to(self._crash_fd)

    # --- the main thread ------------------------------------------------------------------------------------

    def _end_of(self, run: Run, handlers: Handlers) -> Message:
        attempt = run.attempt
        connections = Connections(self._settings, worker=self._start["worker"], run=run, channel=self._channel)
        services = Services(
            worker=self._start["worker"],
            connections=connections,
            max_payload_bytes=self._settings.max_payload_bytes,
            default_max_attempts=self._start["default_max_attempts"],
            extend=self._extend,
            hold=self._hold,
            release=self._release,
            # The worker's answer comes first, so that both of them know of one deadline.
            extend_timeout=self._settings.visibility_timeout + ANSWER_SECONDS,
            max_extension=self._settings.max_extension,
            progress=self._progress,
            limits=self._limits,
            state=self._lifespans.state,
            policy=replace(self._settings.retry_policy, max_attempts=self._start["default_max_attempts"]),
            await_on_loop=lambda _, awaitable: (self._run_on_loop(run, lambda: awaitable), None),
            write=self._writes.ask,
        )
        try:
            attempt.handler = handlers.get(attempt.domain, attempt.command_type, run.module)
        except BaseException as error:  # noqa: BLE001 - importing runs anything
            return {"missing": str(error) or type(error).__name__, "trace": _format(error)}
        told: Message = {"result": None, "error": None}
        try:
            result = self._run_async(run, services) if attempt.handler.is_async else self._run_sync(run, services)
            told["result"] = self._text_of(attempt, result)
        except BaseException as error:  # noqa: BLE001 - SystemExit and the like end the attempt, not the process
            told["error"] = describe_error(error, _format(error), attempt.handler.retry_policy)
        attempt.bar()  # a thread that it left behind gets no connection any more
        connections.close()
        return told | {"committed": attempt.has_committed, "lost": attempt.is_lost}

    def _run_sync(self, run: Run, services: Services) -> Any:
        handler = run.attempt.handler
        assert handler is not None  # noqa: S101 - looked up before
        ctx, function = HandlerContext(run.attempt, services), handler.function

        def body() -> Any:
            return function(ctx.command, ctx) if handler.takes_command else function(ctx)

        result = in_fresh_thread(body) if handler.options.fresh_thread else body()
        if inspect.isawaitable(result):
            become_async(ctx)
            return self._run_on_loop(run, lambda: result)
        return result

    def _run_async(self, run: Run, services: Services) -> Any:
        handler = run.attempt.handler
        assert handler is not None  # noqa: S101 - looked up before
        ctx = AsyncHandlerContext(run.attempt, services)
        function = handler.function
        return self._run_on_loop(
            run, lambda: function(ctx.command, ctx) if handler.takes_command else function(ctx)
        )

    def _run_on_loop(self, run: Run, call: Callable[[], Awaitable[Any]]) -> Any:
        """On a loop that lives as long as the process: clients that are bound to their loop can be kept."""
        loop = self._the_loop()
        task = loop.create_task(self._awaited(call))
        run.attach(task)
        try:
            result, error = loop.run_until_complete(task)
        finally:
            run.detach()
        if error is not None:
            raise error
        return result

    def _the_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            with suppress(AttributeError):  # a loop that is no Python object has a clock of its own
                self._loop.time = monotonic  # type: ignore[method-assign]
        return self._loop

    def _run_alone(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run an on_start or on_stop function to its end: no attempt runs meanwhile."""
        done: Future[Any] = Future()
        try:
            done.set_result(self._the_loop().run_until_complete(coroutine))
        except BaseException as error:  # noqa: BLE001 - its caller asks for it
            done.set_exception(error)
        return done

    @staticmethod
    async def _awaited(call: Callable[[], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
        try:
            return await call(), None
        except BaseException as error:  # noqa: BLE001 - a loop does not survive a SystemExit
            return None, error

    def _text_of(self, attempt: Attempt, result: Any) -> str | None:
        if result is None:
            return None
        if attempt.has_committed:
            return "true"  # the result came too late to be stored; it is only noted that there was one
        return dump_result(result, self._settings.max_payload_bytes, attempt.handler)

    # --- what the context asks of the worker ----------------------------------------------------------------

    def _extend(self, attempt: Attempt, seconds: float) -> Future[bool]:
        return self._ask_lease(attempt, {"k": "extend", "seconds": seconds})

    def _hold(self, attempt: Attempt) -> Future[bool]:
        return self._ask_lease(attempt, {"k": "hold"})

    def _release(self, attempt: Attempt) -> None:
        self._channel.send({"k": "release", "n": self._number_of(attempt)})

    def _ask_lease(self, attempt: Attempt, message: Message) -> Future[bool]:
        answer: Future[bool] = Future()
        question = next(self._questions)
        self._asked[question] = answer
        self._channel.send(message | {"n": self._number_of(attempt), "q": question})
        return answer

    def _progress(self, attempt: Attempt, text: str) -> None:
        self._channel.send({"k": "progress", "n": self._number_of(attempt), "text": text})

    def _number_of(self, attempt: Attempt) -> int:
        """The number of its run; -1 if that is over, but its thread goes on."""
        run = self._current
        return run.number if run is not None and run.attempt is attempt else -1

    # --- the reader's thread --------------------------------------------------------------------------------

    def _read(self) -> None:
        looking = select.poll()
        looking.register(self._channel.fileno(), select.POLLIN)
        while True:
            run = self._current
            if not looking.poll(None if run is None else TICK_SECONDS * 1000):
                if run is not None:
                    run.tick()
                continue
            messages = self._channel.receive()
            if messages is None:
                os._exit(1)  # the worker is gone
            for message in messages:
                self._hear(message)

    def _hear(self, message: Message) -> None:
        match message["k"]:
            case "start":
                self._todo.put(message)
            case "run":
                self._current = Run(message)
                self._todo.put(self._current)
            case "cancel":
                if self._current is not None and self._current.number == message["n"]:
                    self._current.stop(message)
            case "answer":
                asked = self._asked.pop(message["q"], None)
                if asked is not None and asked.set_running_or_notify_cancel():  # nobody waits otherwise
                    _answer(asked, message)
            case "permit" | "lost":
                self._limits.hear(message)
            case "written":
                self._writes.hear(message)
            case "end":
                self._todo.put(None)

    # --- after a fork ---------------------------------------------------------------------------------------

    def _leave_conversation(self) -> None:
        self._channel.close()

    def _die_if_forked(self) -> None:
        """End this process if it is a copy that the handler forked, and that returned, too."""
        if os.getpid() != self._process:
            os._exit(0)


def _answer(asked: Future[bool], message: Message) -> None:
    """Pass the worker's answer on to the thread that asked for a lease."""
    if message["error"] is None:
        asked.set_result(message["is_held"])
    elif message["is_timeout"]:
        asked.set_exception(TimeoutError(message["error"]))
    else:
        asked.set_exception(TransientCommandError(message["error"], code="EXTEND_FAILED"))


class _Surroundings:
    """What is restored after each handler: the working directory, umask and locale,
    signal handlers and timers."""

    def __init__(self) -> None:
        self._state = OsState()
        self._signals: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}

    def restore(self) -> None:
        with suppress(OSError, locale.Error):  # the folder may be gone
            self._state.restore()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                with suppress(OSError, ValueError):
                    signal.signal(number, handler)


class _Forward(logging.Handler):
    """Every log record goes to the worker, which treats it as its own."""

    def __init__(self, channel: ChildEnd) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            trace = (
                logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text or ""
            )
            more = {name: _plain(value) for name, value in extras(record).items()}
            where = {"path": record.pathname, "line": record.lineno, "function": record.funcName}
            message = {"k": "log", "name": record.name, "level": record.levelno, "text": text[-_LONGEST_LOG:]}
            message |= {"where": where, "extra": more, "trace": trace[-_LONGEST_LOG:]}
            with suppress(OSError):  # of a process that was forked off: it has no part in this
                self._channel.send(message)
        except Exception:  # noqa: BLE001 - as logging does: a log costs nobody his outcome
            self.handleError(record)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else str(value)[:1000]


def _format(error: BaseException) -> str:
    """The traceback from the handler's own frame on; our frames do not help."""
    try:
        frames = error.__traceback__
        while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _OURS:
            frames = frames.tb_next
        return "".join(traceback.format_exception(type(error), error, frames))
    except Exception:  # noqa: BLE001 - a hostile exception must not cost us the outcome
        return f"<no traceback: formatting {type(error).__name__} failed>"


def main(arguments: list[str]) -> int:
    """Serve on inherited files: the socket, the memory file for dumps (stderr until now), and the real stderr."""
    collect_garbage()
    channel_fd, crash_fd, stderr_fd, parent = map(int, arguments[:4])
    die_with(parent)
    adopt_orphans()
    os.dup2(stderr_fd, 2)
    os.close(stderr_fd)
    for fd in (channel_fd, crash_fd):
        os.set_inheritable(fd, False)
    return Isolated(ChildEnd(socket.socket(fileno=channel_fd)), crash_fd).serve()


if __name__ == "__main__":
    # As an importable module, once: `__main__` may have to stand for the user's script.
    sys.exit(importlib.import_module("commandbus.worker.isolation.child_main").main(sys.argv[1:]))
