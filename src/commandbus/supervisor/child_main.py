"""The main program of a worker process. The supervisor spawns it as
`python -m commandbus.supervisor.child_main FD`.

It dies with its supervisor (PDEATHSIG). It writes its stacks into the crash file when it crashes or is asked for
them. It follows the orders from the control socket. It always ends with `os._exit` after flushing, because threads
of stuck handlers must not keep it alive.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `main`: hardly anything of what is imported here becomes garbage

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import asdict
from typing import Any, Final, NoReturn

from commandbus.light_imports import light_imports

with light_imports():
    import psycopg
    import psycopg_pool  # noqa: F401 - it asks for its version, too

    gc.collect()  # what they have left makes room for our modules

from commandbus.db.descriptors import file_behind
from commandbus.errors import (
    ConfigurationError,
    EmbeddedPostgresError,
    MissingPrivilegeError,
    SchemaError,
    WorkerStartError,
)
from commandbus.logger import safe_logger
from commandbus.supervisor import start_message
from commandbus.supervisor.start_message import LONGEST_TEXT, StartMessage
from commandbus.worker.board import Board
from commandbus.worker.counts_page import CountsPage
from commandbus.worker.gil import SWITCH_SECONDS
from commandbus.worker.isolation.child_setup import collect_garbage, die_with, spare_memory, write_stacks_to
from commandbus.worker.load_handlers import load_registry
from commandbus.worker.logs import set_up_logging
from commandbus.worker.stop_report import StopReport
from commandbus.worker.worker import Worker
from commandbus.worker.worker_options import Supervision

logger = safe_logger("commandbus.worker")

FLUSH_SECONDS: Final = 1.0
CLEAN, CONFIGURATION, REFUSED, DATABASE, LEFT_BEHIND, BUG = 0, 3, 5, 6, 7, 70


class Control:
    """The worker's end of the control socket. Orders that come during the start wait for its end. Only the order
    to stop is followed at once, because the start may be waiting for the database."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = file_behind(connection.fileno())
        self._saying = threading.Lock()
        self._obeying = threading.Lock()
        self._worker: Worker | None = None
        self._is_started = False
        self._waiting: list[dict[str, Any]] = []

    def start(self) -> None:
        """Start to listen, on a separate thread. Call it before the user's code is imported."""
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def say(self, what: str, **more: Any) -> None:
        """Tell the supervisor, in a text of bounded length. Does nothing if the supervisor is gone."""
        cut = {name: value[:LONGEST_TEXT] if isinstance(value, str) else value for name, value in more.items()}
        line = json.dumps({"say": what, **cut}, default=str).encode() + b"\n"
        with self._saying, contextlib.suppress(OSError):
            if file_behind(self._connection.fileno()) == self._file:  # a handler may have closed the socket
                self._connection.sendall(line)

    def say_state(self, state: str, reason: str) -> None:
        """Tell the supervisor that the worker's state has changed."""
        self.say("state", state=state, reason=reason)

    def say_waiting(self, reason: str) -> None:
        """Tell the supervisor that the start waits for the database."""
        self.say("doing", doing=f"waiting for the database: {reason}")

    def starting(self, worker: Worker) -> None:
        """Note that the worker may have claimed something, so the process must not simply exit."""
        with self._obeying:
            self._worker = worker

    def started(self, worker: Worker) -> None:
        """Let this worker follow orders from now on."""
        with self._obeying:
            self._is_started = True
            for order in self._waiting:
                _obey(worker, order)

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                try:
                    self._take(json.loads(line))
                except Exception:
                    logger.exception("the supervisor's order %r could not be carried out", line.strip())
                if file_behind(self._connection.fileno()) != self._file:
                    return  # the descriptor's number belongs to another file now

    def _take(self, order: dict[str, Any]) -> None:
        with self._obeying:
            if self._worker is None:
                leave(CLEAN)  # the import of the user's code may take long, but nothing was claimed yet
            if self._is_started or order["do"] == "stop":
                _obey(self._worker, order)
            else:
                self._waiting.append(order)


def _obey(worker: Worker, order: dict[str, Any]) -> None:
    match order["do"]:
        case "stop":
            worker.request_stop(str(order["reason"]))
        case "drain":
            worker.drain(str(order["reason"]))
        case "hurry":
            worker.hurry()


def main() -> NoReturn:
    """Read the start message, work, and exit."""
    collect_garbage()
    spare_memory()
    told = start_message.read(int(sys.argv[1]))
    die_with(told.parent)
    write_stacks_to(told.crash)
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # only the supervisor reloads
    set_up_logging(told.settings)
    sys.setswitchinterval(SWITCH_SECONDS)
    control = Control(socket.socket(fileno=told.control))
    control.start()
    leave(_work(told, control))


def _work(told: StartMessage, control: Control) -> int:
    try:
        control.say("doing", doing=f"importing {told.settings.handlers}")
        registry = load_registry(told.settings.handlers)
        control.say("doing", doing="connecting to the database")
        worker = Worker(
            registry,
            settings=told.settings,
            supervision=Supervision(
                board=Board.attach(told.board),
                supervisor=told.supervisor,
                on_state=control.say_state,
                on_waiting=control.say_waiting,
                on_doing=lambda doing: control.say("doing", doing=doing),
                turn=told.turn,
                counts=CountsPage.attach(told.counts),
            ),
        )
        control.say("hello", id=worker.id, domains=list(worker.domains), policies=worker.policies())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: worker.request_stop(signal.Signals(number).name))  # noqa: ARG005
        control.starting(worker)
        report = _run(worker, control)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the supervisor says it
        control.say("failed", module=type(error).__module__, kind=type(error).__name__, message=str(error))
        return _code(error)
    control.say("report", is_clean=report.is_clean, **asdict(report))
    return CLEAN if report.is_clean else LEFT_BEHIND


def _run(worker: Worker, control: Control) -> StopReport:
    if not worker.start():
        return StopReport("it was told to stop before it had started", 0, 0, 0, 0)
    control.started(worker)
    worker.wait()
    return worker.stop()


def _code(error: BaseException) -> int:
    if isinstance(error, ConfigurationError | WorkerStartError):
        return CONFIGURATION
    if isinstance(error, MissingPrivilegeError):
        return REFUSED
    return DATABASE if isinstance(error, SchemaError | EmbeddedPostgresError | psycopg.Error) else BUG


def leave(code: int) -> NoReturn:
    """Flush what can be flushed, and exit. A stuck thread may hold a stream's lock, so this does not wait long."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_SECONDS)
    os._exit(code)


def _flush() -> None:
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


if __name__ == "__main__":
    main()
