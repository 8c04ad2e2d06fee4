"""The process of an embedded server, seen from outside: is it there, is it ours, is it ready; end it.

Duty: read `postmaster.pid`, which outlives its process after `kill -9` or a power cut and may then name a
stranger's pid. A process is ours only if it is a `postgres` that works in our data folder.

Invariant: no signal is sent to a process that does not work in our data folder, and a stale pid file is
removed only when no process works there any more. PostgreSQL itself uses that file to see backends that
outlived their postmaster; removing it too early would let two generations write to the same data.

It does not start servers, and takes no locks: its caller (`server.py`) holds the folder's start lock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from commandbus.clock import monotonic
from commandbus.db.embedded.binaries import Account
from commandbus.errors import EmbeddedPostgresError

PID_FILE = "postmaster.pid"
LOG_FILE = "server.log"
_HAS_PROC = os.path.exists("/proc/self/cwd")
_TICK_SECONDS = 0.02
_FAST_LIMIT_SECONDS = 30.0
_IMMEDIATE_LIMIT_SECONDS = 15.0
_ORPHAN_LIMIT_SECONDS = 2.0

_LIST_PROCESSES_IN = """
for process in /proc/[0-9]*; do
    [ "$process/cwd" -ef "$1" ] && echo "${process#/proc/}"
done
true
"""


@dataclass(frozen=True)
class Postmaster:
    """What `postmaster.pid` says of a live server."""

    pid: int
    port: int
    socket_folder: str
    is_ready: bool


def find(data: Path, account: Account) -> Postmaster | None:
    """The live server of this data folder, if there is one."""
    noted = _read(data)
    return noted if noted is not None and _is_server_of(data, noted, account) else None


def find_settled(data: Path, account: Account, *, limit_seconds: float) -> Postmaster | None:
    """Like `find`, but waits for a server that is coming up (recovering) or going down."""
    server = find(data, account)

    def is_settled() -> bool:
        nonlocal server
        server = find(data, account)
        return server is None or server.is_ready

    if not _wait_until(is_settled, limit_seconds):
        raise EmbeddedPostgresError(
            f"the PostgreSQL in {data} has been starting or stopping for {limit_seconds:g} s: "
            f"look into {data / LOG_FILE}"
        )
    return server


def stop(data: Path, account: Account) -> bool:
    """End the server: fast, and if that takes too long immediately. False if there was none."""
    server = find(data, account)
    if server is None:
        return False
    # The signals are PostgreSQL's own: SIGINT rolls back and shuts down, SIGQUIT leaves the rest to recovery.
    for number, limit_seconds in (
        (signal.SIGINT, _FAST_LIMIT_SECONDS),
        (signal.SIGQUIT, _IMMEDIATE_LIMIT_SECONDS),
    ):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, number)
        if _wait_until(lambda: not _works_in(data, server.pid, account), limit_seconds):
            return True
    raise EmbeddedPostgresError(
        f"the PostgreSQL in {data} (pid {server.pid}) does not end: `kill -9 {server.pid}`, "
        f"its data recovers at the next start; the reason may be in {data / LOG_FILE}"
    )


def clear_remains(data: Path, account: Account) -> None:
    """After a crash: end backends that outlived their postmaster, then remove the lock files that it left.

    The server notices a pid that no longer exists, but not one that belongs to another process
    by now, or to a zombie (a container's first process may never reap).
    """
    if not (data / PID_FILE).exists() or find(data, account) is not None:
        return
    for number in (signal.SIGQUIT, signal.SIGKILL):
        orphans = _processes_in(data, account)
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if _wait_until(lambda: not _processes_in(data, account), _ORPHAN_LIMIT_SECONDS):
            _remove_lock_files(data)
            return
    raise EmbeddedPostgresError(
        f"processes {_processes_in(data, account)} of a crashed PostgreSQL still work in {data} and cannot "
        "be ended (a disk that does not answer?): end them, or restart the machine"
    )


def _remove_lock_files(data: Path) -> None:
    noted = _read(data)
    if noted is not None and noted.socket_folder:
        for path in Path(noted.socket_folder).glob(f".s.PGSQL.{noted.port}*"):
            path.unlink(missing_ok=True)
    (data / PID_FILE).unlink(missing_ok=True)


def _read(data: Path) -> Postmaster | None:
    """None also for an incomplete file: it is complete before its writer releases the start lock."""
    try:
        lines = (data / PID_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    try:
        pid, port, socket_folder = int(lines[0]), int(lines[3]), lines[4].strip()
    except (IndexError, ValueError):
        return None
    return Postmaster(pid, port, socket_folder, is_ready=len(lines) > 7 and lines[7].strip() == "ready")


def _is_server_of(data: Path, noted: Postmaster, account: Account) -> bool:
    # Without /proc (macOS) a live pid may be a stranger's: an answering port is the best evidence there is.
    return _works_in(data, noted.pid, account) and (_HAS_PROC or _listens(noted.port))


def _works_in(data: Path, pid: int, account: Account) -> bool:
    """Is this process a postgres whose working directory is the data folder, as all of a server's are?"""
    if not _HAS_PROC:
        return _is_alive(pid)
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() != "postgres":
            return False
        return os.path.samefile(f"/proc/{pid}/cwd", data)
    except PermissionError:
        # Root in a container lacks CAP_SYS_PTRACE and may not look at another user's process; that user may.
        return account.run(["/bin/sh", "-c", '[ "$1" -ef "$2" ]', "sh", f"/proc/{pid}/cwd", data]).returncode == 0
    except OSError:
        return False


def _processes_in(data: Path, account: Account) -> list[int]:
    if not _HAS_PROC:
        return []
    listed = account.run(["/bin/sh", "-c", _LIST_PROCESSES_IN, "sh", data]).stdout
    # The name is compared, too: a shell whose current folder this is must not be ended.
    return [pid for pid in map(int, listed.split()) if _works_in(data, pid, account)]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _wait_until(condition: Callable[[], bool], limit_seconds: float) -> bool:
    """Polls: what is waited for is the end of a process that is not our child, or a line in its pid file."""
    give_up_at = monotonic() + limit_seconds
    while not condition():
        if monotonic() >= give_up_at:
            return False
        time.sleep(_TICK_SECONDS)
    return True
