"""RunningFile: a file in shared memory that says which attempts run in a worker, and outlives the worker.

If a worker vanishes with its supervisor, nobody is left who saw what ran. A worker that later finds its commands
on the same machine reads this file. Commands that did not run then are not suspects (model/suspects.py).

    head | magic, slots, length of the text, size of the largest chunk, text: worker, domains, boot
    slot | msg_id, domain, running                        by the slot's thread, one record per slot
    list | count, msg_ids of a chunk                      by the slot's thread, one per slot, if there are chunks
    tail | magic

`running` is 2 for a chunk: then its commands are in the list of the slot, which is written before the record.

`enter` and `leave` write memory only and cost 0.2 and 0.1 µs. `running` is the last byte of a record that `enter`
writes. An attempt starts after that. So a worker that dies in between leaves a whole record, or an attempt that
never started. A slot whose attempt was abandoned shows it until the next one starts: its outcome may be unwritten.

The files are in a folder of /dev/shm that belongs to this user alone. A clean stop removes the file. Files that no
worker has touched for a day are removed by the next worker that starts. If there is no such folder, or a file is
missing or makes no sense, nobody knows what ran, and every command of that worker is a suspect. `read` never
raises.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from commandbus.clock import epoch, monotonic
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.worker")

Running = frozenset[tuple[str, int]]
"""What runs: domain and msg_id."""

SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the folder in it is ours alone, or not used
TOUCH_SECONDS: Final = 600.0
KEPT_SECONDS: Final = 86400.0
_MAGIC: Final = b"cmdb-run"
_HEAD: Final = struct.Struct("@8sIII")
_ID: Final = struct.Struct("@q")
_RECORD: Final = struct.Struct("@qIB3x")
_RUNNING_AT: Final = 12
_CHUNK: Final = 2
_MOST_BYTES: Final = 64 << 20


class RunningFile:
    """The file of one worker. Each slot's thread writes its own record; `close` and `keep` are of one thread."""

    def __init__(self, path: Path, memory: mmap.mmap, domains: Sequence[str], layout: _Layout) -> None:
        self._path = path
        self._memory = memory
        self._layout = layout
        self._start = layout.start
        self._domains = {name: index for index, name in enumerate(domains)}
        self._touched_at = monotonic()
        self._pack = _RECORD.pack_into

    @classmethod
    def create(cls, worker: str, domains: Sequence[str], slots: int, largest_chunk: int = 0) -> Self | None:
        """A new file, or None if this machine has no place for it."""
        try:
            folder = own_folder()
            _remove_old(folder)
            text = json.dumps({"worker": worker, "domains": list(domains), "boot": _boot()}).encode()
            layout = _Layout(slots, len(text), largest_chunk)
            size = layout.end + len(_MAGIC)
            path = folder / _name(worker)
            memory = _map_new(path, size)
        except OSError as error:
            logger.debug("what runs in this worker is not noted in shared memory: %s", error)
            return None
        memory[_HEAD.size : _HEAD.size + len(text)] = text
        memory[size - len(_MAGIC) :] = _MAGIC
        _HEAD.pack_into(memory, 0, _MAGIC, slots, len(text), largest_chunk)
        return cls(path, memory, domains, layout)

    def enter(self, slot: int, domain: str, msg_id: int) -> None:
        """An attempt is about to start in this slot."""
        self._pack(self._memory, self._start + slot * 16, msg_id, self._domains[domain], 1)

    def enter_chunk(self, slot: int, domain: str, msg_ids: Sequence[int]) -> None:
        """A chunk of these is about to start in this slot."""
        struct.pack_into(f"@{1 + len(msg_ids)}q", self._memory, self._layout.list_at(slot), len(msg_ids), *msg_ids)
        self._pack(self._memory, self._start + slot * 16, msg_ids[0], self._domains[domain], _CHUNK)

    def leave(self, slot: int) -> None:
        """The slot's attempt has ended."""
        self._memory[self._start + slot * 16 + _RUNNING_AT] = 0

    def keep(self) -> None:
        """The worker lives: others leave its file alone."""
        now = monotonic()
        if now - self._touched_at > TOUCH_SECONDS:
            self._touched_at = now
            with suppress(OSError):
                os.utime(self._path)

    def remove(self) -> None:
        """The worker holds nothing any more. Late threads may still write: to memory that nobody reads."""
        with suppress(OSError):
            self._path.unlink()


def read(worker: str) -> Running | None:
    """What ran in a worker when it was last seen to do anything; None if nobody knows."""
    by_slot = read_slots(worker)
    return None if by_slot is None else frozenset(each for found in by_slot.values() for each in found)


def read_slots(worker: str) -> dict[int, Running] | None:
    """The same by slot: one message, or those of a chunk."""
    try:
        with (own_folder() / _name(worker)).open("rb") as file:
            return _parse(file.read(_MOST_BYTES), worker)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, struct.error):
        return None


def remove(worker: str) -> None:
    """The commands of this dead worker are settled."""
    with suppress(OSError):
        (own_folder() / _name(worker)).unlink()


def own_folder() -> Path:
    """The folder of this user; an OSError if there is none that is safe from others."""
    folder = SHARED_MEMORY / f"commandbus-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of this user alone")
    return folder


class _Layout:
    """Where the parts of a file begin."""

    def __init__(self, slots: int, text_bytes: int, largest_chunk: int) -> None:
        self.start = -(-(_HEAD.size + text_bytes) // 8) * 8
        self._lists = self.start + slots * _RECORD.size
        self._list_bytes = (1 + largest_chunk) * _ID.size if largest_chunk else 0
        self.end = self._lists + slots * self._list_bytes
        self.largest_chunk = largest_chunk

    def list_at(self, slot: int) -> int:
        """Where the list of a slot's chunk begins."""
        return self._lists + slot * self._list_bytes


def _parse(data: bytes, worker: str) -> dict[int, Running]:
    magic, slots, length, largest = _HEAD.unpack_from(data, 0)
    layout = _Layout(slots, length, largest)
    if magic != _MAGIC or data[layout.end :] != _MAGIC:
        raise ValueError("it was overwritten")
    header = json.loads(data[_HEAD.size : _HEAD.size + length])
    if header["worker"] != worker or header["boot"] != _boot():
        raise ValueError("it is of another worker, or of an earlier start of this machine")
    found: dict[int, Running] = {}
    for slot in range(slots):
        msg_id, domain, is_running = _RECORD.unpack_from(data, layout.start + slot * _RECORD.size)
        if is_running not in (0, 1, _CHUNK):
            raise ValueError("a record was overwritten")
        if is_running:
            msg_ids = _chunk(data, layout, slot) if is_running == _CHUNK else (msg_id,)
            found[slot] = frozenset((header["domains"][domain], each) for each in msg_ids)
    return found


def _chunk(data: bytes, layout: _Layout, slot: int) -> Sequence[int]:
    """The commands of the chunk that runs in a slot."""
    at = layout.list_at(slot)
    (count,) = _ID.unpack_from(data, at)
    if not 0 < count <= layout.largest_chunk:
        raise ValueError("a chunk was overwritten")
    return struct.unpack_from(f"@{count}q", data, at + _ID.size)


def _map_new(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)  # a write to memory that cannot be had would end this process (SIGBUS)
        return mmap.mmap(fd, size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _name(worker: str) -> str:
    """Any text may stand in the headers of a message: it must not name another file."""
    return hashlib.sha256(worker.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _remove_old(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):
            if epoch() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()
