"""Board: a page of shared memory on which a worker shows its supervisor what it does.

    head  | beat_at, state, health, figures              by the ladder's thread, every tick
    note  | a short text: why health is what it is       by the ladder's thread
    gone  | the last replaced threads                    when a slot gets a new thread
    slot  | msg_id, started, stuck_at, read_ct, domain, running   by the slot's thread, one record per slot
          | ident, native_id, session and when that began         when they change

The memory is an inherited memfd. It survives the worker's death, so the supervisor can read it then, and nothing
has to be unlinked. There are no locks: `running` is the last byte of a record that is written when an attempt
starts, and the only one when it ends. So a worker that dies in between leaves either a whole record or none. A
reader of a living worker may see a half-written record; its fence (msg_id and read_ct) then matches no row that
the worker holds. `Struct.pack_into` fills the place with zeros before it writes. That suits the record of an
attempt, which is off for this moment. Everything else is packed first and then copied over what was there, because
a heartbeat of zero would have a healthy worker killed. Times are of `clock.monotonic`, which is the same for the
whole machine. `enter` and `leave` cost 0.2 and 0.1 µs.

The worker runs user code, which may write anything here. So the size of the memory is sealed, because reading a
truncated page would end the reader with SIGBUS. And `read` trusts nothing: it never raises, leaves out a record
that cannot be true, and says in `Snapshot.nonsense` what was wrong.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
from enum import IntEnum
from typing import Final, Self

from commandbus.quick_dataclass import dataclass

_MAGIC = 0x636D6462
_FIXED = struct.Struct("@II")
_BEAT = struct.Struct("@dIIIIIIdQQ")
_NOTE = struct.Struct("@H")
_COUNT = struct.Struct("@Q")
_GONE = struct.Struct("@QQ")
_ATTEMPT = struct.Struct("@qddIIB")
_THREAD = struct.Struct("@QII")
_SESSION = struct.Struct("@Iq")
_PID = struct.Struct("@I")
_MOMENT = struct.Struct("@d")

_BEAT_AT = _FIXED.size
_NOTE_AT = 96
_NOTE_BYTES = 510
_GONE_COUNT_AT = 608
_GONE_AT = 616
_GONE_KEPT = 64
_SLOTS_AT = 1664
_RECORD = 72
_RUNNING_AT = _ATTEMPT.size - 1
_STUCK_AT = 16
_THREAD_AT = 40
_SESSION_AT = 56

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LONGEST_UPTIME: Final = 2.0**40
_MOST_COUNTED: Final = 2**53
_MOST_MEGABYTES: Final = 2.0**40
_LARGEST_INTEGER: Final = 2**31 - 1  # PostgreSQL's `integer`: read_ct, and a process id
_CRITICAL: Final = 2
ATTEMPT: Final = 1
CHUNK: Final = 2
"""What runs in a slot."""


class State(IntEnum):
    """Where a worker process is in its life."""

    STARTING = 0
    ACTIVE = 1
    PAUSED = 2  # by an operator: it claims nothing, and goes on when it is resumed
    DRAINING = 3
    EXITING = 4


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot in which an attempt runs. `domain_index` counts in the worker's list of domains. `is_chunk`: the
    attempt is the first of several that run there."""

    index: int
    domain_index: int
    msg_id: int
    read_ct: int
    started: float
    stuck_at: float
    ident: int
    native_id: int
    session_pid: int
    session_started: int = 0
    is_chunk: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the board says now. `beat_at` is 0 until the first beat; `gone`: idents of replaced threads.

    `nonsense` says what on the board cannot be true; empty if all of it can. A half-written record looks like that
    for a moment.
    """

    beat_at: float
    state: State
    health: int
    running: int
    settled: int
    claimed: int
    free: int
    stuck: int
    rss_mb: float
    note: str
    slots: list[SlotView]
    gone: frozenset[tuple[int, int]]
    nonsense: str = ""
    claimless: int = 0

    @property
    def first_stuck_at(self) -> float | None:
        """When the first of the running attempts counts as stuck; None if none ever does."""
        first = min((slot.stuck_at for slot in self.slots), default=math.inf)
        return first if math.isfinite(first) else None


class Board:
    """The page of one worker. The supervisor creates it, the worker attaches to the inherited descriptor."""

    def __init__(self, fd: int, memory: mmap.mmap, slots: int) -> None:
        self.fd = fd
        self.slots = slots
        self._memory = memory
        self._pack = _ATTEMPT.pack_into

    @classmethod
    def create(cls, slots: int) -> Self:
        """A new board with so many slot records, whose size nobody can change any more."""
        size = _SLOTS_AT + slots * _RECORD
        fd = sealed_memory("commandbus-board", size)
        memory = mmap.mmap(fd, size)
        _FIXED.pack_into(memory, 0, _MAGIC, slots)
        return cls(fd, memory, slots)

    @classmethod
    def attach(cls, fd: int) -> Self:
        """The board behind an inherited descriptor."""
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        magic, slots = _FIXED.unpack_from(memory, 0)
        if magic != _MAGIC or len(memory) != _SLOTS_AT + slots * _RECORD:
            memory.close()
            raise ValueError(f"file descriptor {fd} is not a board")
        return cls(fd, memory, slots)

    def close(self) -> None:
        """Unmap it and close the descriptor."""
        self._memory.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # -- the worker's side: slots

    def enter(
        self,
        slot: int,
        domain_index: int,
        msg_id: int,
        read_ct: int,
        started: float,
        stuck_at: float,
        running: int = ATTEMPT,
    ) -> None:
        """An attempt starts in this slot. `stuck_at` is inf for none. `running=CHUNK`: a chunk starts, and this is
        its first command; the running file names the others."""
        at = _SLOTS_AT + slot * _RECORD
        self._pack(self._memory, at, msg_id, started, stuck_at, read_ct, domain_index, running)

    def leave(self, slot: int) -> None:
        """The slot's attempt has ended."""
        self._memory[_SLOTS_AT + slot * _RECORD + _RUNNING_AT] = 0

    def thread(self, slot: int, ident: int, native_id: int) -> None:
        """The slot is served by this thread from now on.

        The thread that it replaces is remembered as gone. The attempt of that thread is stuck, and is not shown
        any more."""
        at = _SLOTS_AT + slot * _RECORD + _THREAD_AT
        before, before_native, _ = _THREAD.unpack_from(self._memory, at)
        if before and before != ident:
            self._remember_gone(before, before_native)
            self.leave(slot)
        self._copy(at, _THREAD.pack(ident, native_id, 0))

    def session(self, slot: int, pid: int, started: int = 0) -> None:
        """The slot's attempt uses this database session, which began then; 0: none, or it is not known."""
        at = _SLOTS_AT + slot * _RECORD + _SESSION_AT
        self._copy(at, _PID.pack(0))  # if the worker dies in between, no half-written slot is left
        self._copy(at, _SESSION.pack(0, started))
        self._copy(at, _PID.pack(pid))

    def stuck_at(self, slot: int, value: float) -> None:
        """The attempt's limit has moved."""
        self._copy(_SLOTS_AT + slot * _RECORD + _STUCK_AT, _MOMENT.pack(value))

    # -- the worker's side: the ladder

    def beat(
        self,
        now: float,
        *,
        state: State,
        health: int,
        running: int,
        settled: int,
        claimed: int,
        free: int,
        stuck: int,
        rss_mb: float,
        claimless: int = 0,
    ) -> None:
        """The worker is alive. `settled` and `claimed` count from the worker's start; `health` is 0, 1 or 2.
        `claimless`: seconds for which it has had room, and could not ask for work."""
        self._copy(
            _BEAT_AT, _BEAT.pack(now, state, health, running, free, stuck, claimless, rss_mb, settled, claimed)
        )

    def note(self, text: str) -> None:
        """Why the health is what it is; cut to what fits."""
        data = text.encode("utf-8", "replace")[:_NOTE_BYTES]
        data = data.decode("utf-8", "ignore").encode()
        self._copy(_NOTE_AT + _NOTE.size, data)
        self._copy(_NOTE_AT, _NOTE.pack(len(data)))

    # -- the supervisor's side

    def read(self) -> Snapshot:
        """What the board says now. Whatever the worker has written there, this returns a snapshot."""
        memory = self._memory
        head, doubt = _head(memory, self.slots)
        slots = []
        for index in range(self.slots):
            at = _SLOTS_AT + index * _RECORD
            if memory[at + _RUNNING_AT]:
                slot = _slot(memory, index, at)
                if slot is None:
                    doubt = doubt or f"what it shows in slot {index} is not an attempt"
                else:
                    slots.append(slot)
        beat_at, state, health, running, free, stuck, claimless, rss_mb, settled, claimed = head
        return Snapshot(
            beat_at, State(state), health, running, settled, claimed, free, stuck, rss_mb, _note(memory), slots,
            _gone(memory), doubt, claimless,
        )  # fmt: skip

    def _remember_gone(self, ident: int, native_id: int) -> None:
        (count,) = _COUNT.unpack_from(self._memory, _GONE_COUNT_AT)
        self._copy(_GONE_AT + count % _GONE_KEPT * _GONE.size, _GONE.pack(ident, native_id))
        self._copy(_GONE_COUNT_AT, _COUNT.pack(count + 1))

    def _copy(self, at: int, data: bytes) -> None:
        """Write over what is there, without a moment at which it is zero."""
        self._memory[at : at + len(data)] = data


Head = tuple[float, int, int, int, int, int, int, float, int, int]
_NO_HEAD: Final[Head] = (0.0, State.STARTING, 0, 0, 0, 0, 0, 0.0, 0, 0)


def sealed_memory(name: str, size: int) -> int:
    """A new memfd of this size, for a child process to inherit; the size can never change."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _head(memory: mmap.mmap, slots: int) -> tuple[Head, str]:
    """The head of the page, or an empty one and what is wrong with it."""
    if _FIXED.unpack_from(memory, 0) != (_MAGIC, slots):
        return _NO_HEAD, "its first bytes were overwritten"
    head: Head = _BEAT.unpack_from(memory, _BEAT_AT)
    beat_at, state, health, running, free, stuck, claimless, rss_mb, settled, claimed = head
    is_possible = (
        0.0 <= beat_at <= _LONGEST_UPTIME
        and state <= State.EXITING
        and health <= _CRITICAL
        and max(running, free, stuck, claimless) <= _LARGEST_INTEGER
        and 0.0 <= rss_mb <= _MOST_MEGABYTES
        and max(settled, claimed) <= _MOST_COUNTED
    )
    return (head, "") if is_possible else (_NO_HEAD, "its heartbeat holds impossible numbers")


def _slot(memory: mmap.mmap, index: int, at: int) -> SlotView | None:
    """A slot's record; None if it cannot be true. An impossible deadline or session counts as unknown."""
    msg_id, started, stuck_at, read_ct, domain_index, running = _ATTEMPT.unpack_from(memory, at)
    ident, native_id, _ = _THREAD.unpack_from(memory, at + _THREAD_AT)
    session_pid, session_started = _SESSION.unpack_from(memory, at + _SESSION_AT)
    if running not in (ATTEMPT, CHUNK) or read_ct > _LARGEST_INTEGER or not 0.0 <= started <= _LONGEST_UPTIME:
        return None
    limit = stuck_at if 0.0 <= stuck_at <= _LONGEST_UPTIME else math.inf
    session_pid = session_pid if session_pid <= _LARGEST_INTEGER else 0
    return SlotView(
        index, domain_index, msg_id, read_ct, started, limit, ident, native_id, session_pid, session_started,
        running == CHUNK,
    )  # fmt: skip


def _note(memory: mmap.mmap) -> str:
    (length,) = _NOTE.unpack_from(memory, _NOTE_AT)
    start = _NOTE_AT + _NOTE.size
    return memory[start : start + min(length, _NOTE_BYTES)].decode("utf-8", "replace")


def _gone(memory: mmap.mmap) -> frozenset[tuple[int, int]]:
    kept: frozenset[tuple[int, int]] = frozenset(
        _GONE.iter_unpack(memory[_GONE_AT : _GONE_AT + _GONE_KEPT * _GONE.size])
    )
    return kept - {(0, 0)}
