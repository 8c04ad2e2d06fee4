"""SlotViews: what each slot of this worker runs, as people are shown it; and where a running attempt is.

Nothing is kept or counted while nobody asks, but for attempts that were given up: each is remembered while its
thread hangs. The ladder adds those; the maintenance asks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from commandbus.clock import monotonic
from commandbus.model.safe_text import escaped
from commandbus.settings import Settings
from commandbus.worker.attempt_registry import AttemptRegistry
from commandbus.worker.deadlines import live_stack
from commandbus.worker.execution.async_slots import AsyncSlot
from commandbus.worker.execution.attempt import NEVER, Attempt
from commandbus.worker.execution.slots import Slot
from commandbus.worker.memory import resident_megabytes

MOST_SLOTS: Final = 200
MOST_HANGING: Final = 50
_LONGEST_TEXT: Final = 300


class SlotViews:
    """The slots of one worker."""

    def __init__(
        self, settings: Settings, attempts: AttemptRegistry, is_for_messages: Callable[[int], bool]
    ) -> None:
        self._settings = settings
        self._attempts = attempts
        self._is_for_messages = is_for_messages
        self._hanging: deque[tuple[threading.Thread, Attempt, float, str]] = deque(maxlen=MOST_HANGING)

    def note_stuck(self, attempt: Attempt, slot: Slot | AsyncSlot) -> None:
        """This attempt was given up. Its slot has another thread or loop now."""
        ident = slot.loop.thread.ident if isinstance(slot, AsyncSlot) else slot.ident
        thread = next((item for item in threading.enumerate() if item.ident == ident), None)
        if thread is not None:
            reason = "" if attempt.stop is None else attempt.stop.text
            self._hanging.append((thread, attempt, attempt.started_at or monotonic(), reason))

    def state(self) -> dict[str, Any]:
        """All of it, as JSON: those that have used most of their time first, if there are too many."""
        now = monotonic()
        found = [self._hung(*item, now) for item in list(self._hanging) if item[0].is_alive()]
        for attempt, slot in list(self._attempts.running.items()):
            if attempt.started_at:
                found.append(self._running(attempt, slot, now))
        found += [self._starting(attempt) for attempt in list(self._attempts.starting)]
        found.sort(key=_urgency)
        shown = sorted(found[:MOST_SLOTS], key=lambda slot: (slot["phase"] != "STUCK", slot["index"]))
        return {
            "size": self._settings.concurrency,
            "slots": shown,
            "left_out": len(found) - len(shown),
            "memory_mb": round(resident_megabytes(), 1),
            "max_memory_mb": self._settings.max_memory_mb,
            "max_messages": self._settings.max_messages,
        }

    def stack_of(self, domain: str, msg_id: int, read_ct: int) -> dict[str, Any]:
        """Where this attempt is now; what is wrong if that cannot be told."""
        for attempt, slot in list(self._attempts.running.items()):
            if any((item.domain, item.msg_id, item.read_ct) == (domain, msg_id, read_ct) for item in attempt.each):
                started_at = attempt.started_at
                taken = live_stack.take(attempt, slot)
                return {"seconds": round(monotonic() - started_at, 3) if started_at else None, **taken}
        return {"problem": "it is not running: the worker holds it, and has not started it or has just ended it"}

    def _running(self, attempt: Attempt, slot: Slot | AsyncSlot, now: float) -> dict[str, Any]:
        stop = attempt.stop
        found = self._named(attempt, slot.index, "RUNNING" if stop is None else "STOPPING")
        found["seconds"] = round(max(0.0, now - attempt.started_at), 3)
        if attempt.deadline_at != NEVER:
            found["timeout_seconds"] = round(attempt.deadline_at - attempt.started_at, 3)
        if self._is_for_messages(slot.index):
            found["kind"] = "messages"
        elif attempt.child is not None:
            found["kind"] = "process"
        elif isinstance(slot, AsyncSlot):
            found["kind"] = "async"
        if stop is not None:
            found["reason"] = _short(stop.text)
            found["grace_seconds"] = round(max(0.0, stop.until - now), 3) if stop.until != NEVER else None
        return found

    def _hung(
        self, _thread: threading.Thread, attempt: Attempt, started_at: float, reason: str, now: float
    ) -> dict[str, Any]:
        found = self._named(attempt, -1, "STUCK")
        return found | {"seconds": round(now - started_at, 3), "reason": _short(reason)}

    def _starting(self, attempt: Attempt) -> dict[str, Any]:
        return self._named(attempt, -1, "STARTING") | {"kind": "process"}

    def _named(self, attempt: Attempt, index: int, phase: str) -> dict[str, Any]:
        return {
            "index": index,
            "phase": phase,
            "domain": attempt.domain,
            "command_type": attempt.command_type,
            "command_id": attempt.command_id,
            "attempt": attempt.number,
            "seconds": 0.0,
            "timeout_seconds": None,
            "kind": "thread",
            "commands": len(attempt.each),
        }


def _urgency(slot: dict[str, Any]) -> tuple[bool, bool, float]:
    timeout = slot["timeout_seconds"]
    left = NEVER if timeout is None else timeout - slot["seconds"]
    return slot["phase"] != "STUCK", slot["phase"] != "STOPPING", left


def _short(text: str) -> str:
    """Text that can be stored, and that a row has room for."""
    return escaped(text)[:_LONGEST_TEXT]
