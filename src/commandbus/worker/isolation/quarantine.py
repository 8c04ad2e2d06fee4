"""Quarantine: which commands run apart from the others, and how many of them at once.

Commands that were lost without a verdict run one at a time per supervisor, so that the next loss of everything
names the one that ran. The workers of a supervisor share a file for that. The kernel locks it for one process at a
time, and frees it when that process ends. A worker without a supervisor runs them one at a time, too.

The worker that has the lock keeps the next suspects in a line, leased: the end of one starts the next. A dead
worker may leave many that it had only prefetched, and quick ones must be through soon. The line is as long as will
start within LINE_SECONDS, by how long the last ones took; the rest is given back, to come again at about the time
when the line is empty. The file says when that is, for the other workers. If one suspect takes longer than
LINE_SECONDS, those behind it are given back, too: another supervisor may run them.

Commands in quarantine run in child processes, at most `quarantine_processes` per worker, and fewer than it has
slots: a dead API must not fill every slot with processes that hang. Suspects that a coroner could not tell apart
count, too. They may run beside others, because the death of its process names each of them.

Only the claimer's thread asks for room and brings attempts in; any thread may say that one has left.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import random
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from commandbus.clock import monotonic
from commandbus.db.descriptors import file_behind
from commandbus.flow.commands.claim import Room
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.model.suspects import FIRST_DELAY, LONGEST_DELAY, delay_apart
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.handlers import HandlerRegistry

LINE_SECONDS: Final = LONGEST_DELAY  # those that were given back come again before the line is empty
LONGEST_LINE: Final = 2000
FIRST_PACE: Final = 0.1
PACE_WEIGHT: Final = 0.2
MOST_SLOWER: Final = 10.0  # an attempt that takes longer than so many others does not count for the estimate
_MOMENT: Final = struct.Struct("d")


class Quarantine:
    """The attempts of one worker that run apart. `processes` returns the bound of quarantine, or None if nothing
    can run in child processes here; it is asked when a command needs one. `only_suspects`: other commands in
    quarantine run in slots as usual.

    `on_turn` is told of each suspect whose turn has come. It must not wait.
    """

    def __init__(
        self,
        handlers: HandlerRegistry,
        *,
        turn: int | None,
        processes: Callable[[], int | None],
        only_suspects: bool = False,
        on_turn: Callable[[Attempt], None],
    ) -> None:
        self._isolated = {
            domain: frozenset(
                item.command_type
                for item in handlers
                if item.domain == domain and item.options.isolation == "process"
            )
            for domain in {item.domain for item in handlers}
        }
        self._turn = turn
        self._turn_file = None if turn is None else file_behind(turn)
        self._processes = processes
        self._only_suspects = only_suspects
        self._on_turn = on_turn
        self._line: deque[Attempt] = deque()
        self._first: Attempt | None = None  # the suspect whose turn it is
        self._first_since = 0.0
        self._pace = FIRST_PACE  # seconds that a suspect takes, of late
        self._line_end = 0.0
        self._lock = threading.Lock()
        self._inside: dict[Attempt, bool] = {}  # to whether it runs alone
        self._is_admitting = False
        self._has_turn = False
        self.late_until = 0.0  # when commands that were put off here can be claimed again (monotonic)

    def room(self, domain: str, odd: Sequence[ClaimedRow]) -> Room:
        """How many of these may start, or wait in line. `admitted` is to be called when those have entered."""
        room = self._room_of(domain)
        alone = [row for row in odd if row.id is not None and (row.alone or row.before is not None)]
        quarantined = [row for row in odd if room.is_quarantined(row)]
        processes = self._processes() if quarantined else None
        with self._lock:
            self._is_admitting = True
            for_alone = self._room_in_line() if alone and self._take_turn() else 0
            soonest = max(FIRST_DELAY, self._read_line_end() - monotonic(), self._first_seconds / 2)
            for_others = None
            if processes is not None:
                for_others = max(0, processes - sum(not value for value in self._inside.values()))
        late = alone[for_alone:] + ([] if for_others is None else quarantined[for_others:])
        for row in late:
            self.late_until = max(self.late_until, monotonic() + delay_apart(row.waived + 1, spread=1.0))
        spread = random.random()  # noqa: S311 - jitter
        return replace(room, alone=for_alone, quarantined=for_others, spread=spread, soonest=soonest)

    def _room_of(self, domain: str) -> Room:
        return Room(isolated=self._isolated.get(domain, frozenset()), only_suspects=self._only_suspects)

    def enter(self, attempt: Attempt) -> bool:
        """It is about to start here. False if it runs alone: then `on_turn` tells when it may start."""
        row = ClaimedRow(*attempt.row)
        is_alone = bool(row.alone)
        if is_alone or self._room_of(attempt.domain).is_quarantined(row):
            with self._lock:
                self._inside[attempt] = is_alone
                if is_alone:
                    self._line.append(attempt)
                    self._write_line_end()
            self._call_next()
        return not is_alone

    def admitted(self) -> None:
        """All admitted commands have entered. If none of them runs alone, another worker may run one alone."""
        with self._lock:
            self._is_admitting = False
            self._give_turn()

    def leave(self, attempt: Attempt) -> None:
        """Its outcome is written, or another worker has it by now."""
        if attempt in self._inside:
            with self._lock:
                self._inside.pop(attempt, None)
                if attempt is self._first:
                    self._first = None
                    took = min(monotonic() - self._first_since, self._pace * MOST_SLOWER)
                    self._pace += (took - self._pace) * PACE_WEIGHT
                    self._write_line_end()
                self._give_turn()
            self._call_next()

    def take_back(self) -> list[Attempt]:
        """Those that wait for their turn."""
        with self._lock:
            back = list(self._line)
            self._line.clear()
        return back

    def take_back_late(self) -> list[Attempt]:
        """Those that wait for their turn, if the one that has it takes long."""
        if not self._line or self._first_seconds < LINE_SECONDS:
            return []
        return self.take_back()

    def _call_next(self) -> None:
        with self._lock:
            if self._first is not None or not self._line:
                return
            self._first, self._first_since = self._line.popleft(), monotonic()
            called = self._first
        self._on_turn(called)

    @property
    def _first_seconds(self) -> float:
        """For how long the first suspect in the line has had its turn."""
        return 0.0 if self._first is None else monotonic() - self._first_since

    def _write_line_end(self) -> None:
        """When will all that wait here have had their turn? On the clock that all processes share."""
        self._line_end = monotonic() + len(self._line) * self._pace
        if self._turn is not None and not self.is_turn_lost:
            with suppress(OSError):
                os.pwrite(self._turn, _MOMENT.pack(self._line_end), 0)

    def _read_line_end(self) -> float:
        """When the line of the worker that has the turn ends. A handler may have written anything there, so it is
        checked."""
        if self._has_turn or self._turn is None or self.is_turn_lost:
            return self._line_end
        try:
            (found,) = _MOMENT.unpack(os.pread(self._turn, _MOMENT.size, 0))
        except (OSError, struct.error):
            return 0.0
        return float(found) if math.isfinite(found) else 0.0

    def _room_in_line(self) -> int:
        pace = max(self._pace, self._first_seconds, 0.0001)
        longest = min(LONGEST_LINE, int(LINE_SECONDS / pace))
        return max(0, max(longest, int(self._first is None)) - len(self._line))

    @property
    def is_turn_lost(self) -> bool:
        """Has somebody closed the file of turns? Then no suspect runs here any more."""
        return self._turn is not None and file_behind(self._turn) != self._turn_file

    def _take_turn(self) -> bool:
        if not self._has_turn and self._turn is not None:
            try:
                self._lock_file(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False  # another worker runs one
        self._has_turn = True
        return True

    def _give_turn(self) -> None:
        if self._has_turn and not self._is_admitting and not any(self._inside.values()):
            self._has_turn = False
            if self._turn is not None:
                with suppress(OSError):
                    self._lock_file(self._turn, fcntl.LOCK_UN)

    def _lock_file(self, turn: int, how: int) -> None:
        """A handler may have closed it. Then the lock is gone, and the number may belong to another file."""
        if self.is_turn_lost:
            raise OSError(errno.EBADF, "a handler has closed the lock file for suspects")
        fcntl.lockf(turn, how)
