"""FencedWriter: writes checkpoints, and the intents and ends of effects, under the fence of the attempt that asks.

One thread with a connection of its own, never one of the handlers' pool; both are made when a handler first asks.
What several handlers ask for at the same time is written together, in one statement and one commit. Nothing waits
for a locked queue row: such a write is tried again a moment later, for as long as a lease lasts.

Threads: handlers' threads, the event loop and the slots of isolated attempts call `ask`, which never waits. The
rest is the writer's own thread.

    ask → future:  Written      the database has committed it (or the effect's row that was found)
                   TimeoutError another transaction has held its queue row for a whole lease

What an attempt says about its own call (`End`) is written even if nobody waits for the answer any more. If nobody
waits any more for an intent, no call is made under it: it is taken back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import psycopg

from commandbus.clock import boottime
from commandbus.db.service import DatabaseService
from commandbus.db.transient_errors import PassingError
from commandbus.flow.commands.claimed_row import Fence
from commandbus.flow.effects.write import Begin, Checkpoint, End, Fenced, FencedWrite, Write, Written, write_all
from commandbus.logger import safe_logger
from commandbus.model.effect import EffectState
from commandbus.settings import Settings
from commandbus.worker.exhaustion import ExhaustedError

logger = safe_logger("commandbus.worker")

IDLE_SECONDS: Final = 1.0
BUSY_SECONDS: Final = 0.05
MOST_AT_ONCE: Final = 200
MOST_BYTES: Final = 4 << 20
TAKEN_BACK: Final = "no call was made: its attempt stopped waiting for the intent"


@dataclass(slots=True, eq=False)
class _Request:
    """What somebody asked for."""

    fence: Fence
    write: Write
    until: float
    answer: Future[Written] = field(default_factory=Future)
    was_sent: bool = False

    @property
    def subject(self) -> tuple[object, ...]:
        """What it writes about. One statement writes about it once."""
        return (self.fence.id, getattr(self.write, "name", None))

    @property
    def size(self) -> int:
        """About how many bytes it sends."""
        text = getattr(self.write, "value", None) or getattr(self.write, "receipt", None) or ""
        return 500 + len(text)


class FencedWriter(DatabaseService):
    """One thread that writes for running attempts."""

    def __init__(
        self, settings: Settings, worker: str, *, on_error: Callable[[BaseException], None], name: str
    ) -> None:
        super().__init__(settings, name=name, part="fenced writer", on_end=on_error)
        self._worker = worker
        self._lease = settings.visibility_timeout
        self._asked: deque[_Request] = deque()
        self._starting = threading.Lock()
        self._is_started = False

    def ask(self, fence: Fence, write: Write) -> Future[Written]:
        """Write this for an attempt. Never waits."""
        request = _Request(fence, write, boottime() + self._lease)
        self._ensure_started()
        self._asked.append(request)
        self.wake()
        return request.answer

    def _ensure_started(self) -> None:
        if self._is_started:
            return
        with self._starting:
            if not self._is_started:
                try:
                    self.start()
                except RuntimeError as error:
                    raise ExhaustedError(f"the worker could not start its fenced writer: {error}") from error
                self._is_started = True

    # --- the thread --------------------------------------------------------------------------------------------

    def round(self) -> None:
        is_busy = self._write_asked()
        if not self._asked or is_busy:
            self.sleep(BUSY_SECONDS if is_busy else IDLE_SECONDS)

    def finish(self) -> None:
        try:
            self._write_asked()
        except psycopg.Error as error:
            logger.warning("the last checkpoints and receipts of this worker could not be written: %s", error)

    def _write_asked(self) -> bool:
        """Write what was asked for until now. Returns whether some of it must be tried again. After a lost
        connection, what has no answer is still first in line."""
        is_busy = False
        left = len(self._asked)
        while left > 0:
            chosen = self._choose()
            answers = self._write(chosen)
            for request in chosen:
                self._asked.remove(request)
            left -= len(chosen)
            for request, answer in zip(chosen, answers, strict=True):
                is_busy |= self._conclude(request, answer)
            left = min(left, len(self._asked))
        return is_busy

    def _choose(self) -> list[_Request]:
        """The first request, and those that can be written in the same statement. Of several checkpoints of one
        command only the last is written: it was asked for last, and it answers for all."""
        first = self._asked[0]
        kind, chosen, size = (first.fence.domain, type(first.write)), [], 0
        subjects: set[tuple[object, ...]] = set()
        for request in list(self._asked):
            if (request.fence.domain, type(request.write)) != kind:
                continue
            if request.subject in subjects and kind[1] is not Checkpoint:
                continue
            chosen.append(request)
            subjects.add(request.subject)
            size += request.size
            if len(chosen) >= MOST_AT_ONCE or size >= MOST_BYTES:
                break
        return chosen

    def _write(self, chosen: Sequence[_Request]) -> list[Written | Exception | None]:
        """The answers; None for a request for which nobody waits any more."""
        wanted = [request for request in chosen if not _is_abandoned(request)]
        last = {request.subject: request for request in wanted}
        answers = self._run(list(last.values())) if last else {}
        return [None if request not in wanted else answers[last[request.subject]] for request in chosen]

    def _run(self, requests: Sequence[_Request]) -> dict[_Request, Written | Exception]:
        """Write them together or, after an error that a value may have caused, one by one."""
        for request in requests:
            request.was_sent = True
        writes = [FencedWrite(request.fence, request.write) for request in requests]
        try:
            found = self._connection.run(write_all(requests[0].fence.domain, self._worker, writes))
        except PassingError:
            raise
        except Exception as error:
            if len(requests) == 1:
                logger.exception("a write for an attempt of command #%d failed", requests[0].fence.id)
                return {requests[0]: error}
            answers: dict[_Request, Written | Exception] = {}
            for request in requests:
                answers |= self._run([request])
            return answers
        return dict(zip(requests, found, strict=True))

    def _conclude(self, request: _Request, answer: Written | Exception | None) -> bool:
        """Pass the answer on. Returns whether the request must be tried again."""
        if isinstance(answer, Written) and answer.fenced is Fenced.BUSY:
            if boottime() < request.until:
                self._asked.append(request)
                return True
            answer = TimeoutError(f"another transaction has held its queue row for {self._lease:g} s")
        if answer is None or not request.answer.set_running_or_notify_cancel():
            self._take_back(request)
        elif isinstance(answer, Exception):
            request.answer.set_exception(answer)
        else:
            request.answer.set_result(answer)
        return False

    def _take_back(self, request: _Request) -> None:
        """Nobody waits for this intent any more, but it may be in the database: no call is made under it."""
        if isinstance(request.write, Begin) and request.was_sent:
            end = End(request.write.name, request.fence.number, EffectState.NOT_DONE, note=TAKEN_BACK)
            self._asked.append(_Request(request.fence, end, boottime() + self._lease))


def _is_abandoned(request: _Request) -> bool:
    return request.answer.cancelled() and not isinstance(request.write, End)
