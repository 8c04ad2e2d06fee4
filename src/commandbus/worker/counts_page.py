"""CountsPage: where a worker counts its attempts. Its supervisor can read them even after a kill -9.

The page of a supervised worker is shared memory (a memfd that the supervisor makes), so nothing that was counted
is lost with the process. A worker inside an application has a page of its own.

    head     magic, records in use, lease losses, connection timeouts, waits for a connection
    record   "domain\\0type", outcomes, waits, runs        the first one is for the types that are too many

Threads: any may count; one lock. A completion costs some 0.5 µs in the settler's thread, and nothing in a slot's
but one look at the clock. An attempt is counted after its outcome was written, so a worker that is killed in
between may leave the last statement's attempts uncounted.

The worker runs user code, which may write anything here. So the size is sealed, and `read` trusts nothing: it
never raises, and leaves out what cannot be true.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final, Self

from commandbus.clock import epoch
from commandbus.flow.commands.claimed_row import ATTEMPT_BASE, CREATED_AT
from commandbus.model.attempt_counts import (
    BOUNDS,
    BUCKETS,
    COMPLETED,
    MOST_TYPES,
    OTHER,
    OUTCOME_INDEX,
    OUTCOMES,
    AttemptCounts,
    Histogram,
    TypeCounts,
)
from commandbus.model.outcome import Verdict
from commandbus.worker.board import sealed_memory

if TYPE_CHECKING:  # a supervisor imports this module, and no worker
    from commandbus.worker.execution.attempt import Attempt
    from commandbus.worker.execution.handlers import HandlerRegistry

_WORD: Final = 8
_MAGIC: Final = 0x636D646263
_USED, _LEASES, _TIMEOUTS, _ASKED = 1, 2, 3, 4
_HEAD: Final = _ASKED + BUCKETS + 1
_KEY_BYTES: Final = 1024
_LOST: Final = OUTCOME_INDEX[Verdict.LOST]
_WAITS: Final = len(OUTCOMES)
_RUNS: Final = _WAITS + BUCKETS + 1
_NUMBERS: Final = _RUNS + BUCKETS + 1
_NUMBERS_AT: Final = 1 + _KEY_BYTES // _WORD
_RECORD: Final = _NUMBERS_AT + _NUMBERS
_RECORDS: Final = MOST_TYPES + 1
_SIZE: Final = (_HEAD + _RECORDS * _RECORD) * _WORD
_MOST_COUNTED: Final = 2**53
_LONGEST: Final = 1e9
_CLOCK_SECONDS: Final = 60.0
_FEW: Final = 8


class CountsPage:
    """The page of one worker. The supervisor creates it, the worker attaches to the inherited descriptor."""

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd
        self._memory: bytearray | mmap.mmap = bytearray(_SIZE) if fd < 0 else mmap.mmap(fd, _SIZE)
        self._view = memoryview(self._memory)
        self._words = self._view.cast("Q")
        self._sums = self._view.cast("d")
        self._lock = threading.Lock()
        self._places: dict[tuple[str, str], int] = {}  # by domain and command type: where its numbers are
        self._ahead = 0.0  # by how many seconds our clock is ahead of the server's
        self._measured_at = -math.inf

    @classmethod
    def create(cls) -> Self:
        """A new page in shared memory, whose size nobody can change any more."""
        page = cls(sealed_memory("commandbus-counts", _SIZE))
        page._words[0] = _MAGIC
        return page

    @classmethod
    def attach(cls, fd: int) -> Self:
        """The page behind an inherited descriptor."""
        if os.fstat(fd).st_size != _SIZE:
            raise ValueError(f"file descriptor {fd} is not a page of counts")
        return cls(fd)

    def close(self) -> None:
        """Unmap it and close the descriptor. After that it reads as empty."""
        for view in (self._words, self._sums, self._view):
            view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
            os.close(self.fd)

    # -- the worker's side

    def note_clock(self, claimed_at: datetime) -> None:
        """A claim was answered just now: its statement began at this moment of the server's clock."""
        now = epoch()
        ahead = now - claimed_at.timestamp()
        if ahead < self._ahead or now - self._measured_at > _CLOCK_SECONDS:
            self._ahead, self._measured_at = ahead, now

    def completed(self, attempts: Sequence[Attempt]) -> None:
        """These first attempts of one domain completed, and that is written. Counted together, they cost less."""
        groups = _by_type(attempts)
        with self._lock:
            for same in groups:
                at, ahead = self._find_of(same[0]), self._ahead
                self._words[at + COMPLETED] += len(same)
                self._add(at + _RUNS, [attempt.ran for attempt in same])
                self._add(at + _WAITS, [attempt.started - ahead - attempt.row[CREATED_AT] for attempt in same])  # type: ignore[operator]

    def ended(self, attempt: Attempt, verdict: Verdict | None) -> None:
        """An attempt ended, and that is written; None: it completed."""
        with self._lock:
            self._count(attempt, COMPLETED if verdict is None else OUTCOME_INDEX[verdict])

    def lost(self, domain: str, command_types: Sequence[str], handlers: HandlerRegistry) -> None:
        """Attempts of these types were lost with another worker, and this one has recorded that."""
        with self._lock:
            for command_type in command_types:
                is_known = handlers.get(domain, command_type) is not None
                self._words[self._find(domain, command_type, is_known=is_known) + _LOST] += 1

    def lease_lost(self) -> None:
        """An attempt ended without its lease: what it did was not written."""
        with self._lock:
            self._words[_LEASES] += 1

    def connection_timed_out(self) -> None:
        """A handler waited for a connection in vain."""
        with self._lock:
            self._words[_TIMEOUTS] += 1

    def connection_waited(self, seconds: float) -> None:
        """A handler got a connection after so many seconds."""
        with self._lock:
            self._add(_ASKED, [seconds])

    def _count(self, attempt: Attempt, outcome: int) -> None:
        at = self._find_of(attempt)
        self._words[at + outcome] += 1
        if attempt.started is not None:
            self._add(at + _RUNS, [attempt.ran])
            if attempt.read_ct == 1 and attempt.row[ATTEMPT_BASE] == 0:
                self._add(at + _WAITS, [attempt.started - self._ahead - attempt.row[CREATED_AT]])

    def _add(self, at: int, seconds: list[float]) -> None:
        """Add values to a histogram. Many are sorted, so that one search finds the end of each bucket."""
        total = sum(seconds)
        if len(seconds) > _FEW and 0.0 <= total <= _LONGEST:
            seconds.sort()
            before = 0
            for bucket, bound in enumerate(BOUNDS):
                if (end := bisect_right(seconds, bound, before)) > before:
                    self._words[at + bucket] += end - before
                    before = end
            self._words[at + BUCKETS - 1] += len(seconds) - before
            self._sums[at + BUCKETS] += total
            return
        for value in seconds:  # a row may say anything about its time, even "nan"
            valid = min(value, _LONGEST) if value > 0.0 else 0.0
            self._words[at + bisect_left(BOUNDS, valid)] += 1
            self._sums[at + BUCKETS] += valid

    def _find_of(self, attempt: Attempt) -> int:
        return self._find(attempt.domain, attempt.command_type, is_known=attempt.handler is not None)

    def _find(self, domain: str, command_type: str, *, is_known: bool) -> int:
        at = self._places.get((domain, command_type))
        return self._place(domain, command_type, is_known=is_known) if at is None else at

    def _place(self, domain: str, command_type: str, *, is_known: bool) -> int:
        """Where the numbers of a type are. What nobody here handles has no record of its own: anybody can send
        commands of endless types."""
        used = max(1, self._words[_USED])
        if not is_known or used >= _RECORDS:
            return self._at(0)
        key = f"{domain}\0{command_type}".encode("utf-8", "replace")[:_KEY_BYTES]
        start = (_HEAD + used * _RECORD) * _WORD
        self._view[start + _WORD : start + _WORD + len(key)] = key
        self._words[start // _WORD] = len(key)
        self._words[_USED] = used + 1
        place = self._places[domain, command_type] = self._at(used)
        return place

    @staticmethod
    def _at(index: int) -> int:
        return _HEAD + index * _RECORD + _NUMBERS_AT

    # -- the supervisor's side

    def read(self) -> AttemptCounts:
        """What was counted. Whatever the worker has written there, this returns counts."""
        try:
            data = bytes(self._view)
        except ValueError:  # it is closed
            return AttemptCounts()
        words = memoryview(data).cast("Q")
        found = AttemptCounts(
            {}, _whole(words[_LEASES]), _whole(words[_TIMEOUTS]), _histogram(data, words, _ASKED)
        )
        for index in range(min(max(1, words[_USED]), _RECORDS)):
            at = self._at(index)
            outcomes = tuple(_whole(word) for word in words[at : at + len(OUTCOMES)])
            if any(outcomes):
                key = (OTHER, OTHER) if index == 0 else _key(data, words, index)
                counts = TypeCounts(
                    outcomes, _histogram(data, words, at + _WAITS), _histogram(data, words, at + _RUNS)
                )
                found = found.plus(AttemptCounts({key: counts}))
        return found


def _by_type(attempts: Sequence[Attempt]) -> Iterable[Sequence[Attempt]]:
    if len({attempt.command_type for attempt in attempts}) == 1:  # most of the time
        return (attempts,)
    found: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault(attempt.command_type, []).append(attempt)
    return found.values()


def _key(data: bytes, words: memoryview, index: int) -> tuple[str, str]:
    at = _HEAD + index * _RECORD
    start = (at + 1) * _WORD
    text = data[start : start + min(words[at], _KEY_BYTES)].decode("utf-8", "replace")
    domain, _, command_type = text.partition("\0")
    return domain, command_type


def _histogram(data: bytes, words: memoryview, at: int) -> Histogram:
    (total,) = struct.unpack_from("@d", data, (at + BUCKETS) * _WORD)
    buckets = tuple(_whole(word) for word in words[at : at + BUCKETS])
    return Histogram(buckets, total if math.isfinite(total) and total > 0.0 else 0.0)


def _whole(word: int) -> int:
    return word if word <= _MOST_COUNTED else 0
