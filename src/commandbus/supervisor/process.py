"""WorkerProcess: the supervisor's hold on one worker process: its pidfd, board, control socket and crash file.

The control socket carries JSON lines. The worker says `doing` (while it starts), `hello` (who it is), `state`,
`report` and `failed`; it is told `stop`, `drain` and `hurry`. Nothing here waits. Death is seen by the pidfd (a
child that a handler forked may keep the socket open for ever), and the process is reaped only after its whole
process group was killed: until then its number cannot belong to anybody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from commandbus.model.client_sockets import Socket
from commandbus.model.postmortem import Cause, Death, Dump, parse_dump
from commandbus.runtime.board import Board, Snapshot, State
from commandbus.runtime.offspring import DUMP_SIGNAL
from commandbus.supervisor.said import Failed, Hello, hello, parsed
from commandbus.supervisor.sockets import open_sockets
from commandbus.supervisor.start import Start, described, place_of
from commandbus.supervisor.vitals import cpu_since, is_stopped, thread_cpu

DUMP_SECONDS: Final = 0.1
_LONGEST_LINE: Final = 4_194_304
_LONGEST_DUMP: Final = 4_194_304


@dataclass(frozen=True, slots=True)
class Freeze:
    """When a worker was first seen not to beat, and the CPU time of its threads then."""

    since: float
    cpu: dict[int, float]


@dataclass(frozen=True, slots=True)
class Condemned:
    """It will be killed, and why."""

    cause: Cause
    reason: str
    silent_seconds: float
    cpu_seconds: dict[int, float]
    was_stopped: bool
    at: float
    kill_at: float
    sockets: Sequence[Socket]  # what it had open then


class WorkerProcess:
    """One worker, from its spawning to its end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        board: Board,
        control: socket.socket,
        crash: int,
        *,
        generation: int,
        now: float,
    ) -> None:
        self.process = process
        self.pid = process.pid
        self.board = board
        self.control = control
        self.generation = generation
        self.spawned_at = now
        self.ready_at: float | None = None
        self.told_at: float | None = None  # when it was told to drain or stop
        self.is_hurried = False
        self.memory_at = now  # when its memory is looked at next
        self.drains_since: float | None = None
        self.exits_since: float | None = None
        self.doing: str | None = None  # what its start is at; from then on it listens to the dump signal
        self.start = Start(now)
        self.hello: Hello | None = None
        self.report: dict[str, Any] | None = None
        self.reported_at: float | None = None
        self.failed: Failed | None = None
        self.freeze: Freeze | None = None
        self.condemned: Condemned | None = None
        self.is_traced = False  # its sockets were handed to the coroner
        self.snapshot = board.read()
        self._crash = crash
        self._dump_read = 0
        self._buffer = b""
        self.pidfd = _pidfd(process.pid)

    @property
    def name(self) -> str:
        """Its id, or before it has said it, its process id."""
        return self.hello.id if self.hello is not None else f"process {self.pid}"

    @property
    def state(self) -> State:
        """Where it is in its life."""
        if self.report is not None or self.failed is not None or self.condemned is not None:
            return State.EXITING
        if self.drains_since is not None:
            return max(self.snapshot.state, State.DRAINING)
        return self.snapshot.state

    @property
    def is_serving(self) -> bool:
        """Does it, or will it soon, take work?"""
        return self.state in (State.STARTING, State.ACTIVE) and self.told_at is None

    @property
    def is_failing(self) -> bool:
        """Has it said that it failed? It ends now; what that means for its replacement is seen when it has."""
        return self.failed is not None and self.condemned is None and self.told_at is None

    @property
    def is_planned(self) -> bool:
        """Was it meant to end, or did it say so before?"""
        return self.told_at is not None or self.drains_since is not None or self.report is not None

    def look(self, now: float) -> Snapshot:
        """Read its board."""
        self.snapshot = self.board.read()
        if self.ready_at is None and self.snapshot.state is not State.STARTING and self.snapshot.beat_at > 0:
            self.ready_at = now
        if self.drains_since is None and self.snapshot.state is State.DRAINING:
            self.drains_since = now
        if self.exits_since is None and self.snapshot.state is State.EXITING:
            self.exits_since = now
        return self.snapshot

    # -- the control socket

    def hear(self, now: float) -> bool:
        """Take in what it has said since; False if it can say nothing more."""
        is_open = True
        while is_open:
            try:
                data = self.control.recv(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            is_open = bool(data)
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        self._buffer = self._buffer[-_LONGEST_LINE:]
        for line in lines:
            if (message := parsed(line)) is not None:
                self._heard(message, now)
        return is_open

    def tell(self, do: str, **more: Any) -> None:
        """Tell it what to do; one that is dead or deaf hears nothing."""
        line = json.dumps({"do": do, **more}).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.control.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _heard(self, message: dict[str, Any], now: float) -> None:
        match message.get("say"):
            case "doing":
                self.doing = str(message.get("doing"))
            case "hello":
                self.hello = hello(message)
            case "state" if message.get("state") == State.DRAINING.name:
                self.drains_since = self.drains_since or now
            case "report":
                self.report, self.reported_at = message, now
            case "failed":
                self.failed = Failed(message["module"], message["kind"], message["message"])

    # -- its end

    def watch_freeze(self, now: float, *, is_silent: bool) -> None:
        """Remember the CPU times of when it was first seen silent."""
        if not is_silent:
            self.freeze = None
        elif self.freeze is None:
            self.freeze = Freeze(now, thread_cpu(self.pid))

    def condemn(self, cause: Cause, reason: str, now: float, *, silent_seconds: float = 0.0) -> None:
        """Have it write down its stacks, and see whom it talks to; it is killed a moment later."""
        if self.condemned is not None:
            return
        used = cpu_since(self.freeze.cpu, thread_cpu(self.pid)) if self.freeze is not None else {}
        self.condemned = Condemned(
            cause,
            reason,
            silent_seconds,
            used,
            is_stopped(self.pid),
            at=now,
            kill_at=now + DUMP_SECONDS,
            sockets=open_sockets(self.pid),
        )
        self.ask_for_stacks()

    def ask_for_stacks(self) -> None:
        """Have it write down its stacks. Before it says what it does the signal itself would kill it."""
        if self.doing is not None:
            self._signal(DUMP_SIGNAL)

    def stacks(self) -> Dump:
        """What it has written down since the last time."""
        size = min(os.fstat(self._crash).st_size - self._dump_read, _LONGEST_DUMP)
        text = os.pread(self._crash, size, self._dump_read)
        self._dump_read += len(text)
        return parse_dump(text.decode("utf-8", "replace"))

    def kill(self) -> None:
        """SIGKILL, to it and to what it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def has_ended(self) -> bool:
        """Is it dead? It is not reaped yet."""
        if self.process.returncode is not None:
            return True
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.pid, options) is not None
        except ChildProcessError:
            return True

    def reap(self, now: float) -> Death:
        """Bury a dead one; answers what it died of. Its board can still be read."""
        self.hear(now)  # its last words
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self.process.wait()
        self.look(now)
        return self._death(code)

    def epitaph(self, death: Death) -> str:
        """How it died, and if it had not even started, what it was doing."""
        if self.ready_at is not None:
            return death.sentence
        crash_place = place_of(death.dump) if death.dump.stacks else self.start.place
        when = "" if self.condemned is not None else " while it was starting"
        return f"{death.sentence}{when}{described(self.doing, crash_place)}"

    def close(self) -> None:
        """Close what was ours of it."""
        self.board.close()
        self.control.close()
        os.close(self._crash)
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def _death(self, code: int) -> Death:
        gone, dump = self.snapshot.gone, self.stacks()
        if (end := self.condemned) is not None:
            return Death(
                end.cause,
                end.reason,
                was_stopped=end.was_stopped,
                silent_seconds=end.silent_seconds,
                cpu_seconds=end.cpu_seconds,
                dump=dump,
                gone=gone,
            )
        if self.failed is not None:
            return Death(Cause.STOPPED, f"{self.failed.kind}: {self.failed.message}")
        if self.report is not None:
            return Death(Cause.STOPPED, str(self.report.get("reason")), dump=dump)
        if code < 0:
            return Death(Cause.SIGNALED, signal=-code, dump=dump, gone=gone)
        if self.told_at is not None and self.hello is None:
            return Death(Cause.STOPPED, "it was told to stop before it had started")
        return Death(Cause.EXITED, exit_code=code, gone=gone)

    def _signal(self, number: int) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)


def _pidfd(pid: int) -> int | None:
    """None where the kernel has none: then the supervisor's tick finds the dead."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
