"""Apart: which commands run apart from the others, and how many of them at once.

Commands that were lost without a verdict run one at a time per supervisor, so that the next loss of everything
names the one that ran. The workers of a supervisor share a file for that. The kernel locks it for one process at a
time, and frees it when that process ends. A worker without a supervisor runs them one at a time, too.

Commands in quarantine run in child processes, at most `quarantine_processes` per worker, and fewer than it has
slots: a dead API must not fill every slot with processes that hang.

Only the claimer's thread asks for room and brings attempts in; any thread may say that one has left.
"""

from __future__ import annotations

import errno
import fcntl
import random
import threading
from collections.abc import Sequence
from contextlib import suppress

from commandbus.clock import monotonic
from commandbus.db.descriptors import file_behind
from commandbus.flow.claim import ClaimedRow, Room
from commandbus.flow.settle import ALONE
from commandbus.model.suspects import delay_apart
from commandbus.runtime.attempt import Attempt
from commandbus.runtime.handlers import HandlerRegistry


class Apart:
    """The attempts of one worker that run apart. `processes` bounds quarantine; None if there is none here."""

    def __init__(self, handlers: HandlerRegistry, *, turn: int | None, processes: int | None) -> None:
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
        self._lock = threading.Lock()
        self._inside: dict[Attempt, bool] = {}  # to whether it runs alone
        self._is_admitting = False
        self._has_turn = False
        self.late_until = 0.0  # by then, those that were put off here can be claimed again (monotonic)

    def room(self, domain: str, odd: Sequence[ClaimedRow]) -> Room:
        """How many of these may start. `admitted` is to be called when those that do have entered."""
        isolated = self._isolated.get(domain, frozenset())
        alone = [row for row in odd if row.id is not None and (row.alone or row.before is not None)]
        quarantined = [row for row in odd if row.quarantine and row.command_type not in isolated]
        with self._lock:
            self._is_admitting = True
            for_one = int(bool(alone) and not any(self._inside.values()) and self._take_turn())
            for_others = None
            if self._processes is not None:
                for_others = max(0, self._processes - sum(not value for value in self._inside.values()))
        late = alone[for_one:] + ([] if for_others is None else quarantined[for_others:])
        for row in late:
            self.late_until = max(self.late_until, monotonic() + delay_apart(row.waived + 1, spread=1.0))
        return Room(for_one, for_others, isolated, random.random())  # noqa: S311 - jitter

    def enter(self, attempt: Attempt) -> None:
        """It is about to start here."""
        is_alone = bool(attempt.row[ALONE])
        if is_alone or attempt.command_type not in self._isolated.get(attempt.domain, frozenset()):
            with self._lock:
                self._inside[attempt] = is_alone

    def admitted(self) -> None:
        """All who were admitted have entered: if none of them runs alone, another worker may run such a one."""
        with self._lock:
            self._is_admitting = False
            self._give_turn()

    def leave(self, attempt: Attempt) -> None:
        """Its outcome is written, or it is somebody else's by now."""
        if attempt in self._inside:
            with self._lock:
                self._inside.pop(attempt, None)
                self._give_turn()

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
        """A handler may have closed it; the lock is gone then, and the number somebody else's."""
        if self.is_turn_lost:
            raise OSError(errno.EBADF, "somebody has closed the file of suspects' turns")
        fcntl.lockf(turn, how)
