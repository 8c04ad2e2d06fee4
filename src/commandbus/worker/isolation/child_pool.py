"""A worker's child processes, kept warm for attempts that run in one.

A child process is taken for an attempt and returned after it. There are at most as many as slots; one is started
ahead if a handler asks for isolation. A slot's thread that needs one listens to a child that is still importing,
or takes another one that is returned meanwhile. If it stops waiting, the child goes on importing, for the next
attempt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Final

from commandbus.clock import monotonic
from commandbus.worker.isolation.attempt_in_child import Child
from commandbus.worker.isolation.child_process import ChildProcess, Spawner
from commandbus.worker.isolation.child_start import StartError, attend_start, place_of

START_SECONDS: Final = 60.0  # how long an attempt waits for a process that is importing
# As long as a supervisor waits for a worker: an import that hangs now may succeed next time.
LONGEST_IMPORT: Final = 300.0
IDLE_SECONDS: Final = 60.0
POLITE_SECONDS: Final = 2.0
SPAWN_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.1
ROOM_SHARE: Final = 0.8


class Children:
    """The processes of one worker. `what` they import is named when that takes too long."""

    def __init__(
        self,
        make: Callable[[], ChildProcess],
        *,
        most: int,
        keeps_warm: bool,
        max_memory_mb: int | None,
        what: Callable[[], str],
        name: str,
    ) -> None:
        self._most = most
        self._keeps_warm = keeps_warm
        self._max_memory_mb = max_memory_mb
        self._what = what
        self._lock = threading.Condition()
        self._idle: list[ChildProcess] = []  # those that may still be importing come first
        self._busy: dict[ChildProcess, Child | None] = {}
        self._coming = 0  # asked for by attempts that wait for it
        self._leaving: list[tuple[ChildProcess, float]] = []
        self._ahead: Future[ChildProcess] | None = None
        self._lets_go = False
        self._is_closed = False
        self._spawner = Spawner(make, self._sweep, name=name)

    def start(self) -> None:
        """Be ready; a first process is started if one is to be warm."""
        self._spawner.start()
        self._spawn_ahead()

    @property
    def has_ended(self) -> bool:
        """Has the thread that starts processes ended by itself?"""
        return self._spawner.has_ended

    def pids(self) -> list[int]:
        """Those that live."""
        with self._lock:
            leaving = [process for process, _ in self._leaving]
            return [process.pid for process in (*self._idle, *self._busy, *leaving)]

    # --- for one attempt --------------------------------------------------------------------------------------

    def take(self, is_wanted: Callable[[], bool]) -> ChildProcess | None:
        """A ready process, as soon as there is one; None if the attempt must not begin, or the worker stops.

        StartError if the process that it waited for will never be ready, or not in time.
        """
        until = monotonic() + START_SECONDS
        process: ChildProcess | None = None
        while is_wanted() and not self._lets_go:
            process = self._better_than(process)
            if process is None:
                asked = self._ask()
                if asked is None:
                    continue
                process = self._await(asked, is_wanted)
            if process is None:
                return None
            try:
                if self._is_ready(process):
                    return process
            except StartError:
                if self._lets_go or not is_wanted():
                    return None
                raise
            if monotonic() >= until:
                raise self._too_slow(process)
        if process is not None:
            self._keep(process)
        return None

    def let_go(self) -> None:
        """From now on nobody waits for a process. Never blocks: the ladder calls it."""
        self._lets_go = True
        self._wake_waiting()

    def know(self, process: ChildProcess, child: Child) -> None:
        """An attempt begins in it."""
        with self._lock:
            self._busy[process] = child
            if self._is_closed:
                child.end_now("the worker stopped")

    def give_back(self, process: ChildProcess, *, is_usable: bool) -> None:
        """Its attempt is over."""
        limit = self._max_memory_mb
        if not is_usable:
            process.kill()
        elif limit is not None and process.memory_mb() > ROOM_SHARE * limit:
            is_usable = False  # the next attempt would be blamed for what this one left
            process.channel.send({"k": "end"})
        with self._lock:
            self._busy.pop(process, None)
            if is_usable and not self._is_closed:
                process.idle_since = monotonic()
                self._idle.append(process)
            else:
                self._leaving.append((process, monotonic() + POLITE_SECONDS))
            self._lock.notify_all()
        if is_usable:
            self._wake_waiting()
        else:
            self._spawn_ahead()

    def forget(self, process: ChildProcess, *, is_dead: bool) -> None:
        """It died, or is to die, in the middle of its attempt."""
        with self._lock:
            self._busy.pop(process, None)
            if not is_dead:
                self._leaving.append((process, monotonic()))
            self._lock.notify_all()
        self._spawn_ahead()

    def _better_than(self, own: ChildProcess | None) -> ChildProcess | None:
        """A ready process if there is one; otherwise the one it has, or one that is importing."""
        while True:
            with self._lock:
                best = self._idle[-1] if self._idle else None
                if best is None or (own is not None and not best.is_ready):
                    return own
                self._idle.pop()
                self._busy[best] = None
            if not best.is_dead():
                if own is not None:
                    self._keep(own)
                self._spawn_ahead()
                return best
            best.reap()
            self.forget(best, is_dead=True)

    def _ask(self) -> Future[ChildProcess] | None:
        """The one that is started ahead, else a new one; None if one is idle after all."""
        with self._lock:
            asked, self._ahead = self._ahead, None
            if asked is None and self._idle:
                return None
            self._coming += 1
        return asked or self._spawner.spawn()

    def _await(self, asked: Future[ChildProcess], is_wanted: Callable[[], bool]) -> ChildProcess | None:
        process: ChildProcess | None = None
        until = monotonic() + SPAWN_SECONDS
        try:
            while not wait([asked], LOOK_SECONDS).done:
                is_late = monotonic() >= until
                if is_late or self._lets_go or not is_wanted():
                    asked.add_done_callback(self._adopt)
                    if is_late:
                        raise StartError(f"its child process did not start within {SPAWN_SECONDS:g} s")
                    return None
            process = asked.result()
        finally:
            with self._lock:
                self._coming -= 1
                if process is not None:
                    self._busy[process] = None
        self._spawn_ahead()
        return process

    def _adopt(self, asked: Future[ChildProcess]) -> None:
        """Nobody waits for it any more."""
        if asked.exception() is None:
            self._keep(asked.result())

    def _is_ready(self, process: ChildProcess) -> bool:
        try:
            return attend_start(process, LOOK_SECONDS, max_memory_mb=self._max_memory_mb)
        except BaseException:
            process.kill()
            self.forget(process, is_dead=process.is_reaped)
            raise

    def _too_slow(self, process: ChildProcess) -> StartError:
        text = f"its child process was still importing {self._what()} after {START_SECONDS:g} s"
        where = place_of(process)
        if monotonic() - process.born_at > LONGEST_IMPORT:
            process.kill()
            self.forget(process, is_dead=False)
        else:
            self._keep(process)
        return StartError(text + where)

    def _keep(self, process: ChildProcess) -> None:
        """Nobody waits for it: let it get warm."""
        with self._lock:
            self._busy.pop(process, None)
            if self._is_closed:
                self._leaving.append((process, monotonic()))
            else:
                process.idle_since = monotonic()
                self._idle.insert(0, process)
            self._lock.notify_all()

    def _wake_waiting(self) -> None:
        for process, child in list(self._busy.items()):
            if child is None:
                process.wake()

    # --- all of them ------------------------------------------------------------------------------------------

    def _spawn_ahead(self) -> None:
        with self._lock:
            count = len(self._idle) + len(self._busy) + self._coming
            if self._idle or self._ahead is not None or self._is_closed:
                return
            if not self._keeps_warm or count >= self._most:
                return
            self._ahead = asked = self._spawner.spawn()
        asked.add_done_callback(self._welcome)

    def _welcome(self, asked: Future[ChildProcess]) -> None:
        with self._lock:
            if self._ahead is not asked:
                return  # an attempt waits for it
            self._ahead = None
            if asked.exception() is None:
                self._idle.insert(0, asked.result())

    def _sweep(self) -> None:
        """Reap what died idle, and send away what has been idle for long; one stays warm."""
        with self._lock:
            idle, now = self._idle, monotonic()
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
            if monotonic() >= until:
                process.kill()
            left.append((process, until))
        with self._lock:
            self._leaving += left

    def close(self, timeout: float) -> None:
        """End all: idle ones politely, those that still import or run an attempt at once."""
        deadline = monotonic() + timeout
        self.let_go()
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
        leaving = [(process, deadline if _is_warm(process) else 0.0) for process in idle]
        with self._lock:
            self._leaving += leaving
            self._lock.wait_for(lambda: not self._busy, max(1.0, timeout))  # their slots' threads reap them
        self._see_off_until(deadline + POLITE_SECONDS)
        self._spawner.stop()  # processes that were still being started exist now, and end with it
        self._see_off_until(monotonic() + POLITE_SECONDS)

    def _see_off_until(self, until: float) -> None:
        while self._leaving and monotonic() < until:
            self._see_off()
            for process, _ in self._leaving[:1]:
                process.is_dead(0.05)


def _is_warm(process: ChildProcess) -> bool:
    try:
        return attend_start(process, 0)
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it is about to end
        return False
