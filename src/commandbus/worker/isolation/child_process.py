"""One child process as its worker sees it, and the thread that starts child processes.

A child has its own process group, a socket for messages, and a memory file. This file is its stderr until it has
started, and then takes the stacks of a crash or of a dump signal. A child dies with the thread that started it
(PDEATHSIG), so one thread starts all of them, and lives until the last one is reaped.

A pidfd tells when the child has ended, because a program that a handler forked may hold the socket open for ever.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from commandbus.clock import monotonic
from commandbus.logger import safe_logger
from commandbus.model.crash_attribution import is_whole_dump
from commandbus.worker.isolation.channel import Message, WorkerEnd
from commandbus.worker.isolation.descendants import MARK, kill_below, kill_marked
from commandbus.worker.memory import resident_megabytes

logger = safe_logger("commandbus.worker")

LOOK_SECONDS: Final = 0.005
MAX_DUMP_BYTES: Final = 64 * 1024


class ChildProcess:
    """A running `commandbus.worker.isolation.child_main`. One thread at a time waits for it; any may signal it."""

    def __init__(self, start: Message, *, max_message_bytes: int, mark: str = "") -> None:
        ours, theirs = socket.socketpair()
        dumps = os.memfd_create("commandbus-dumps")
        stderr = _own_stderr()
        try:
            self._popen = subprocess.Popen(  # noqa: S603 - our own program
                _command_line(theirs.fileno(), dumps, stderr, start["worker"]),
                stdin=subprocess.DEVNULL,
                stderr=dumps,
                pass_fds=(theirs.fileno(), dumps, stderr),
                process_group=0,
                env=os.environ | {MARK: mark} if mark else None,
            )
        except BaseException:
            ours.close()
            os.close(dumps)
            raise
        finally:
            theirs.close()
            os.close(stderr)
        self.pid = self._popen.pid
        self._mark = mark
        self._is_killed = False
        self._dumps = dumps
        self._pidfd = os.pidfd_open(self.pid)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.channel = WorkerEnd(ours, max_bytes=max_message_bytes, wake=self.wake)
        self._poll = select.poll()
        self._lock = threading.Lock()  # guards signals against reaping: a reaped pid may belong to another process
        self.is_reaped = False
        self.is_ready = False
        # The thread that imports the handlers, once it can be asked for its stack.
        self.importer: int | None = None
        self.looked_to = 0  # what was asked for in the memory file ends here
        self.born_at = self.idle_since = monotonic()
        self.runs = 0
        for fd in (self._pidfd, self._bell):
            self._poll.register(fd, select.POLLIN)
        self.channel.send(start)

    # --- any thread -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make `wait` return."""
        with self._lock:
            if not self.is_reaped:
                with suppress(BlockingIOError):
                    os.eventfd_write(self._bell, 1)

    def signal(self, number: int) -> None:
        """Send a signal to the process itself."""
        with self._lock:
            if not self.is_reaped:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL for it and for what it started and left in its process group."""
        with self._lock:
            if not self.is_reaped:
                self._kill_group()

    def kill_with_descendants(self) -> None:
        """The same, and first what it started and what has left the group. Takes some milliseconds."""
        self.signal(signal.SIGSTOP)  # it starts nothing more, but still adopts orphans
        with self._lock:
            pid = None if self.is_reaped else self.pid
        if pid is not None:
            kill_below(pid)
        self.kill()

    def _kill_group(self) -> None:
        self._is_killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # it may have left its group

    def dump_now(self, number: int, seconds: float) -> str:
        """Let it write its stacks, and return them; empty if it does not within so many seconds. It runs on."""
        mark = self._size()
        if mark is None:
            return ""
        self.signal(number)
        until, before = monotonic() + seconds, mark
        while (size := self._size()) is not None and monotonic() < until:
            if mark < before == size and (text := self._text(mark)).endswith("\n"):
                return text
            before = size
            time.sleep(LOOK_SECONDS)
        return ""

    def _size(self) -> int | None:
        with self._lock:
            return None if self.is_reaped else self.mark()

    def _text(self, mark: int) -> str:
        with self._lock:
            return "" if self.is_reaped else self.dump_since(mark)

    def memory_mb(self) -> float:
        """Its resident memory; 0 if it is gone."""
        return resident_megabytes(self.pid)

    # --- the thread that waits for it -------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> bool:
        """Wait for a message, the bell, or its end; True if it is dead. What had no room is sent meanwhile."""
        if not self.channel.is_at_end:
            events = select.POLLIN | (select.POLLOUT if self.channel.has_unsent else 0)
            self._poll.register(self.channel.fileno(), events)
        ready = {fd for fd, _ in self._poll.poll(None if timeout is None else max(0, timeout) * 1000)}
        if self._bell in ready:
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        if self.channel.has_unsent:
            self.channel.flush()
        return self._pidfd in ready

    def leave_channel(self) -> None:
        """It has closed its end. Without this, poll would report that without end."""
        with suppress(KeyError):
            self._poll.unregister(self.channel.fileno())

    def is_dead(self, timeout: float = 0) -> bool:
        """Is it dead now, or within this time?"""
        if self.is_reaped:
            return True
        looking = select.poll()
        looking.register(self._pidfd, select.POLLIN)
        return bool(looking.poll(timeout * 1000))

    def mark(self) -> int:
        """How much has been written into the memory file."""
        return os.fstat(self._dumps).st_size

    def wait_for_dump(self, mark: int, until: float) -> None:
        """Wait until the stacks that follow the mark are all there, at most until then. They come within a
        millisecond, if the machine has time for it."""
        before = size = mark
        while monotonic() < until and not self.is_dead():
            before, size = size, self.mark()
            if mark < before == size and is_whole_dump(os.pread(self._dumps, MAX_DUMP_BYTES, mark)):
                return
            time.sleep(LOOK_SECONDS)

    def dump_since(self, mark: int) -> str:
        """What was written into it since."""
        size = self.mark()
        text = os.pread(self._dumps, MAX_DUMP_BYTES, max(mark, size - MAX_DUMP_BYTES))
        return text.decode("utf-8", "backslashreplace")

    def reap(self, *, in_attempt: bool = False) -> int:
        """Kill what is left of its group, and take its exit code (negative: the signal). It must be dead.

        Processes that left the group are killed, too, unless it ended normally: then a completed attempt may have
        started them on purpose.
        """
        with self._lock:
            was_reaped, was_killed = self.is_reaped, self._is_killed
            if not self.is_reaped:
                self._kill_group()
                self.is_reaped = True
                self._popen.wait()
                self.channel.close()
                for fd in (self._pidfd, self._bell, self._dumps):
                    os.close(fd)
        code = int(self._popen.returncode)
        if self._mark and not was_reaped and (in_attempt or was_killed or code):
            kill_marked(self._mark)
        return code


def _own_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _command_line(channel: int, dumps: int, stderr: int, worker: str) -> list[str]:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    files = [str(fd) for fd in (channel, dumps, stderr)]
    return [
        sys.executable,
        *flags,
        "-P",
        "-m",
        "commandbus.worker.isolation.child_main",
        *files,
        str(os.getpid()),
        worker,
    ]


class Spawner:
    """The thread that starts children: `spawn` from any thread, and `sweep` every second."""

    def __init__(self, make: Callable[[], ChildProcess], sweep: Callable[[], None], *, name: str) -> None:
        self._make = make
        self._sweep = sweep
        self._asked: queue.SimpleQueue[Future[ChildProcess] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._serve, name=f"{name}-spawner", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Has the thread ended, though nobody stopped it?"""
        return self._thread.ident is not None and not self._is_stopped and not self._thread.is_alive()

    def spawn(self) -> Future[ChildProcess]:
        """A new child, soon."""
        asked: Future[ChildProcess] = Future()
        with self._lock:
            if self._is_stopped:
                asked.set_exception(RuntimeError("the worker has stopped"))
            else:
                self._asked.put(asked)
        return asked

    def stop(self) -> None:
        """End the thread, after what it was asked for; children that still live die with it."""
        with self._lock:
            self._is_stopped = True
            self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                asked = self._asked.get(timeout=1.0)
            except queue.Empty:
                self._guarded_sweep()
                continue
            if asked is None:
                return
            try:
                made = self._make()
            except BaseException as error:  # noqa: BLE001 - told to who asked
                asked.set_exception(error)
            else:
                asked.set_result(made)

    def _guarded_sweep(self) -> None:
        try:
            self._sweep()
        except Exception:
            logger.exception("idle child processes could not be checked")
