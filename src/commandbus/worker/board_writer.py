"""BoardWriter: what a supervised worker writes on its board, and what it restores after each attempt.

A worker inside an application has no board: its runtime then has no `BoardWriter`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from commandbus.worker.attempt_registry import Running
from commandbus.worker.board import ATTEMPT, CHUNK, Board, State
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.health import HealthState, HealthStatus
from commandbus.worker.memory import resident_megabytes
from commandbus.worker.os_state import OsState

MEMORY_SECONDS = 1.0
_HEALTH_NUMBERS = {HealthState.HEALTHY: 0, HealthState.DEGRADED: 1, HealthState.CRITICAL: 2}


class BoardWriter:
    """The worker's side of the board."""

    def __init__(self, board: Board, domains: Sequence[str], running: Running, *, grace: float) -> None:
        self._board = board
        self._domains = {name: index for index, name in enumerate(domains)}
        self._running = running
        self._grace = grace
        self._process = OsState()
        self._memory_at, self._memory = 0.0, 0.0
        self.leave = board.leave

    def start(self) -> None:
        """Notice from now on what handlers change in this process. What its start has changed stays."""
        self._process = OsState()
        self._process.watch()

    def enter(self, attempt: Attempt, slot: int) -> None:
        """An attempt starts in this slot."""
        stuck_at = attempt.deadline_at + self._grace
        domain = self._domains[attempt.domain]
        running = CHUNK if attempt.members else ATTEMPT
        self._board.enter(slot, domain, attempt.msg_id, attempt.read_ct, attempt.started_at, stuck_at, running)

    def end(self, slot: int) -> None:
        """The slot's attempt has ended: the next one finds the process as it was."""
        self._board.leave(slot)
        if self._process.is_touched:
            self._process.restore()

    def thread(self, slot: int) -> None:
        """The calling thread serves this slot."""
        self._board.thread(slot, threading.get_ident(), threading.get_native_id())

    def session(self, attempt: Attempt, pid: int, started: int) -> None:
        """Written at once: a handler may change its session's name, and a crash leaves no time to look."""
        slot = self._running.get(attempt)
        if slot is not None:
            self._board.session(slot.index, pid, started)

    def beat(
        self,
        now: float,
        health: HealthStatus,
        *,
        state: State,
        settled: int,
        claimed: int,
        free: int,
        stuck: int,
        claimless: float,
    ) -> None:
        """The ladder's thread lives, and this is what it sees."""
        if now - self._memory_at >= MEMORY_SECONDS:
            self._memory_at, self._memory = now, resident_megabytes()
        self._board.beat(
            now,
            state=state,
            health=_HEALTH_NUMBERS[health.state],
            running=len(self._running),
            settled=settled,
            claimed=claimed,
            free=free if state is State.ACTIVE else 0,
            stuck=stuck,
            rss_mb=self._memory,
            claimless=int(claimless),
        )
        self._board.note("; ".join(health.reasons))
        for attempt, slot in list(self._running.items()):
            borrowed = attempt.borrowed
            # It may have ended meanwhile, and its slot may run the next one.
            if self._running.get(attempt) is slot:
                pid, started = (0, 0) if borrowed is None else (borrowed.pid, borrowed.started)
                self._board.session(slot.index, pid, started)
                self._board.stuck_at(slot.index, self._stuck_at(attempt))

    def _stuck_at(self, attempt: Attempt) -> float:
        stop = attempt.stop
        return attempt.deadline_at + self._grace if stop is None else stop.until
