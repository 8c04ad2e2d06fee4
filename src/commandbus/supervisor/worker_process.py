"""WorkerProcess: one worker process as its supervisor sees it: its pidfd, board, control socket and crash file.

The control socket carries JSON lines. The worker sends `doing` (while it starts), `hello` (who it is), `state`,
`report` and `failed`. The supervisor sends `stop`, `drain` and `hurry`. Nothing here waits. The pidfd shows the
worker's death (the socket does not: a child that a handler forked may keep it open for ever). The process is
reaped only after its whole process group was killed: until then its process id cannot belong to another process.

A worker runs user code, so its board and its messages are checked, and none of them can make this code raise.
Nonsense in the socket condemns the worker at once. Nonsense on the board condemns it only if it lasts, because a
record may be half-written for a moment, and each heartbeat repairs the head. Until then the last board that made
sense counts. So an unreadable heartbeat is no heartbeat, and `heartbeat_timeout` continues to run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from commandbus.model.client_sockets import Socket
from commandbus.model.crash_attribution import Cause, Death, Dump, is_whole_dump, parse_dump
from commandbus.quick_dataclass import dataclass
from commandbus.supervisor.open_sockets import open_sockets
from commandbus.supervisor.read_proc import cpu_since, is_stopped, thread_cpu
from commandbus.supervisor.worker_messages import (
    ControlReader,
    Doing,
    Failed,
    Hello,
    NonsenseError,
    Said,
    StateMessage,
)
from commandbus.supervisor.worker_start import Start, described, place_of
from commandbus.worker.board import Board, Snapshot, State
from commandbus.worker.counts_page import CountsPage
from commandbus.worker.isolation.child_setup import DUMP_SIGNAL
from commandbus.worker.stop_report import StopReport

DUMP_SECONDS: Final = 0.1
LATE_DUMP_SECONDS: Final = 0.9
"""How much longer it lives, at most, until it has written its stacks: a busy machine may need it."""
TRACE_SECONDS: Final = 0.4
"""How much longer a condemned worker lives, at most, until the server has told which sessions belong to it."""
LONGEST_DUMP: Final = 4_194_304
NONSENSE_SECONDS: Final = 1.0
NONSENSE_LOOKS: Final = 4
"""A worker is condemned if its board makes no sense for so many seconds, and in so many looks in a row."""
_TURN_BYTES: Final = 262_144
_LAST_TURNS: Final = 4
_AHEAD_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Freeze:
    """When a worker was first seen without a heartbeat, and the CPU time of its threads at that moment."""

    since: float
    cpu: dict[int, float]


@dataclass(frozen=True, slots=True)
class Condemned:
    """A worker will be killed, and why."""

    cause: Cause
    reason: str
    silent_seconds: float
    cpu_seconds: dict[int, float]
    was_stopped: bool
    at: float
    kill_at: float
    sockets: Sequence[Socket]  # the sockets that it had open when it was condemned


class WorkerProcess:
    """One worker, from its spawning to its end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        board: Board,
        counts: CountsPage,
        control: socket.socket,
        crash: int,
        *,
        generation: int,
        now: float,
    ) -> None:
        self.process = process
        self.pid = process.pid
        self.board = board
        self.counts = counts
        self.control = control
        self.generation = generation
        self.spawned_at = now
        self.ready_at: float | None = None
        self.told_at: float | None = None  # when it was told to drain or stop
        self.is_hurried = False
        self.memory_at = now  # when its memory is looked at next
        self.drains_since: float | None = None
        self.exits_since: float | None = None
        # What it does while it starts. Once it has told this, it handles the dump signal.
        self.doing: str | None = None
        self.start = Start(now)
        self.hello: Hello | None = None
        self.report: StopReport | None = None
        self.reported_at: float | None = None
        self.failed: Failed | None = None
        self.freeze: Freeze | None = None
        self.condemned: Condemned | None = None
        self.traced: threading.Event | None = None  # set when the coroner has looked at its sessions
        self.snapshot = board.read()
        self._crash = crash
        self._dump_read = 0
        # None: the supervisor does not read its messages any more.
        self._reader: ControlReader | None = ControlReader(process.pid, now)
        self._board_doubt = ""
        self._doubted_since = now
        self._doubted_looks = 0
        self.pidfd = _pidfd(process.pid)

    @property
    def name(self) -> str:
        """Its id, or its process id until the worker has told its id."""
        return self.hello.id if self.hello is not None else f"process {self.pid}"

    @property
    def state(self) -> State:
        """The state of its life."""
        if self.report is not None or self.failed is not None or self.condemned is not None:
            return State.EXITING
        if self.drains_since is not None:
            return max(self.snapshot.state, State.DRAINING)
        return self.snapshot.state

    @property
    def is_serving(self) -> bool:
        """Does it take work, or will it soon? One that an operator has paused counts: nobody takes its place."""
        return self.state < State.DRAINING and self.told_at is None

    @property
    def is_failing(self) -> bool:
        """Has it reported a failure? Then it is about to end, and its replacement is decided after its end."""
        return self.failed is not None and self.condemned is None and self.told_at is None

    @property
    def is_planned(self) -> bool:
        """Was it told to end, or did it announce its end?"""
        if self.told_at is not None:
            return True
        talked_nonsense = self.condemned is not None and self.condemned.cause is Cause.NONSENSE
        return not talked_nonsense and (self.drains_since is not None or self.report is not None)

    @property
    def is_board_spoiled(self) -> bool:
        """Did its board make no sense at the last look? Then nobody knows for sure what ran."""
        return bool(self._board_doubt)

    @property
    def was_running(self) -> bool:
        """Did attempts run in it, as far as can be known?"""
        return bool(self.snapshot.slots) or (self.is_board_spoiled and self.ready_at is not None)

    def look(self, now: float) -> Snapshot:
        """Read its board. If the board makes no sense, return the last one that did."""
        shown = self.board.read()
        self._board_doubt = shown.nonsense or self._untimely(shown, max(now, time.monotonic()))
        if self._board_doubt:
            self._doubted_since = now if not self._doubted_looks else self._doubted_since
            self._doubted_looks += 1
            return self.snapshot
        self._doubted_looks = 0
        self.snapshot = shown
        if self.ready_at is None and self.snapshot.state is not State.STARTING and self.snapshot.beat_at > 0:
            self.ready_at = now
        if self.drains_since is None and self.snapshot.state is State.DRAINING:
            self.drains_since = now
        if self.exits_since is None and self.snapshot.state is State.EXITING:
            self.exits_since = now
        return self.snapshot

    def judge_board(self, now: float) -> None:
        """Condemn it if its board has made no sense for a while."""
        lasted = now - self._doubted_since
        if self._doubted_looks >= NONSENSE_LOOKS and lasted >= NONSENSE_SECONDS:
            self.condemn(Cause.NONSENSE, f"its board makes no sense: {self._board_doubt}", now)

    def _untimely(self, shown: Snapshot, now: float) -> str:
        """Times on the board that cannot be true: before its start, in the future, or gone. Else empty."""
        first, last = self.spawned_at - _AHEAD_SECONDS, now + _AHEAD_SECONDS
        if shown.beat_at and not first <= shown.beat_at <= last:
            return "its heartbeat has an impossible time"
        if self.ready_at is not None and not shown.beat_at:
            return "its heartbeat was erased"
        if any(not first <= slot.started <= last for slot in shown.slots):
            return "an attempt on it has an impossible start time"
        return ""

    # -- the control socket

    def hear(self, now: float) -> bool:
        """Read a bounded piece of what it has sent. Returns False if there is nothing more to read."""
        try:
            return self._hear(now)
        except NonsenseError as nonsense:
            self._reader = None
            self.condemn(Cause.NONSENSE, f"it {nonsense}", now)
            return False

    def _hear(self, now: float) -> bool:
        if self._reader is None:
            return False
        try:
            data = self.control.recv(_TURN_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        for message in self._reader.take(data, now):
            self._heard(message, now)
        return bool(data)

    def _hear_last_words(self, now: float) -> None:
        """Read the rest after its death: at most a few pieces. Nonsense no longer matters."""
        with contextlib.suppress(NonsenseError):
            for _ in range(_LAST_TURNS):
                self._hear(now)

    def tell(self, do: str, **more: Any) -> None:
        """Send it an order. Does nothing if it is dead or does not read."""
        line = json.dumps({"do": do, **more}).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.control.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _heard(self, message: Said, now: float) -> None:
        match message:
            case Doing():
                self.doing = message.what
            case Hello():
                self.hello = message
            case StateMessage(state=State.DRAINING.name):
                self.drains_since = self.drains_since or now
            case StopReport():
                self.report, self.reported_at = message, now
            case Failed():
                self.failed = message

    # -- its end

    def watch_freeze(self, now: float, *, is_silent: bool) -> None:
        """Remember the CPU times at the moment when it was first seen silent."""
        if not is_silent:
            self.freeze = None
        elif self.freeze is None:
            self.freeze = Freeze(now, thread_cpu(self.pid))

    def condemn(self, cause: Cause, reason: str, now: float, *, silent_seconds: float = 0.0) -> None:
        """Make it write its stacks, and read its open sockets. It is killed a moment later."""
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
        """Make it write its stacks. Before it has sent `doing`, the signal would kill it, so none is sent."""
        if self.doing is not None:
            self._signal(DUMP_SIGNAL)

    def stacks(self) -> Dump:
        """The stacks that it has written since the last call."""
        text = self._new_dump()
        self._dump_read += len(text)
        return parse_dump(text.decode("utf-8", "replace"))

    def _new_dump(self) -> bytes:
        return os.pread(self._crash, LONGEST_DUMP - self._dump_read, self._dump_read).partition(b"\0")[0]

    def may_be_killed(self, now: float) -> bool:
        """Has it had the time to write its stacks? And has the coroner looked at its sessions, or taken too long?

        A shutdown does not wait for the coroner.
        """
        if (end := self.condemned) is None or now < end.kill_at:
            return False
        if now < end.kill_at + LATE_DUMP_SECONDS and self._is_writing_stacks(end):
            return False
        if self.traced is None or self.traced.is_set() or end.cause is Cause.STOPPED:
            return True
        return now >= end.kill_at + TRACE_SECONDS

    def _is_writing_stacks(self, end: Condemned) -> bool:
        """Was it asked for its stacks, and has not written them all? One that is stopped never will."""
        return self.doing is not None and not end.was_stopped and not is_whole_dump(self._new_dump())

    def kill(self) -> None:
        """Send SIGKILL to it and to the processes that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def has_ended(self) -> bool:
        """Is it dead? (It may not be reaped yet.)"""
        if self.process.returncode is not None:
            return True
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self.pid, options) is not None
        except ChildProcessError:
            return True

    def reap(self, now: float) -> Death:
        """Reap a dead worker. Returns the cause of its death. Its board can still be read."""
        self._hear_last_words(now)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self.process.wait()
        self.look(now)
        return self._death(code)

    def epitaph(self, death: Death) -> str:
        """How it died and, if it had not finished its start, what it was doing."""
        if self.ready_at is not None:
            return death.sentence
        crash_place = place_of(death.dump) if death.dump.stacks else self.start.place
        when = "" if self.condemned is not None else " while it was starting"
        return f"{death.sentence}{when}{described(self.doing, crash_place)}"

    def close(self) -> None:
        """Close the supervisor's files and sockets for it."""
        self.board.close()
        self.counts.close()
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
            return Death(Cause.STOPPED, self.report.reason, dump=dump)
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
    """A pidfd; None if the kernel has no pidfds: then the supervisor's regular look finds dead workers."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
