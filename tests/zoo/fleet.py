"""A supervised fleet for the zoo: `commandbus worker` as a process, what it holds, and where commands meet."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from commandbus import CommandBus, NewCommand
from support.waiting import until

Db = psycopg.Connection[Any]
DOMAIN = "zoo"
SLOTS = 4
TASK_TIMEOUT = 1.0
GRACE = 0.5
SETTINGS = {
    "WORKER_VISIBILITY_TIMEOUT": "2",
    "WORKER_STATEMENT_TIMEOUT": "1.5",
    "WORKER_TASK_TIMEOUT": str(TASK_TIMEOUT),
    "CANCEL_GRACE_SECONDS": str(GRACE),
    "WORKER_PROCESSES": "1",
    "WORKER_MAX_ATTEMPTS": "2",
    "WORKER_BACKOFF_SCHEDULE": "0",
    "WORKER_BACKOFF_JITTER": "0",
    "WORKER_POLL_INTERVAL": "0.1",
    "WORKER_SHUTDOWN_TIMEOUT": "6",
    "WORKER_MAX_MEMORY_MB": "200",
    "WORKER_BREAKERS": "false",
}


class Meeting:
    """Where healthy commands block until they are let go, and animals say that they begin."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._server.getsockname()[1]
        self.present: dict[socket.socket, int] = {}
        self.seen: list[tuple[str, int, int]] = []
        self._is_closed = False
        self._change = threading.Condition()
        threading.Thread(target=self._serve, name="meeting", daemon=True).start()

    def until_present(self, count: int, seconds: float) -> float:
        """Until so many commands block at the same time; answers when (epoch). They are not let go yet."""
        with self._change:
            assert self._change.wait_for(lambda: len(self.present) >= count, seconds), (
                f"only {len(self.present)} of {count} ran at once within {seconds:.1f} s"
            )
            return time.time()

    def let_go(self) -> None:
        """Let all that are here finish. They are not here any more, even if their ends are noticed later."""
        with self._change:
            for peer in self.present:
                _let_go(peer)
            self.present.clear()

    def until_seen(self, command_id: str, seconds: float = 15.0) -> None:
        """Until an animal has begun."""
        with self._change:
            assert self._change.wait_for(lambda: any(seen[0] == command_id for seen in self.seen), seconds)

    def close(self) -> None:
        """Everybody out, and whoever is only arriving, too."""
        with self._change:
            self._is_closed = True
        self.let_go()
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._attend, args=(peer,), daemon=True).start()

    def _attend(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            words = peer.makefile("rb").readline().decode().split()
            if not words:
                return
            with self._change:
                if words[0] == "animal":
                    self.seen.append((words[1], int(words[2]), int(words[3])))
                elif self._is_closed:
                    _let_go(peer)
                else:
                    self.present[peer] = int(words[1])
                self._change.notify_all()
            if words[0] == "meet":
                with contextlib.suppress(OSError):
                    peer.recv(1)  # until its end: it was let go, or died
                with self._change:
                    self.present.pop(peer, None)
                    self._change.notify_all()


def _let_go(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(b"!")


@dataclass(frozen=True)
class Attempt:
    """A row of the execution history."""

    number: int
    verdict: str
    error_type: str
    code: str
    error: str
    rung: str | None
    started_at: float
    finished_at: float
    autopsy: Any


def attempts_of(db: Db, command_id: str) -> list[Attempt]:
    """The recorded attempts of a command, in order."""
    rows = db.execute(
        "SELECT a.number, a.verdict, a.error_type, a.error_code, a.error, a.rung, "
        "extract(epoch FROM a.started_at), extract(epoch FROM a.finished_at), a.autopsy FROM commandbus.attempt a "
        "JOIN commandbus.command c ON c.id = a.command WHERE c.command_id = %s ORDER BY a.number, a.finished_at",
        (command_id,),
    ).fetchall()
    return [Attempt(*row[:6], float(row[6] or 0), float(row[7]), row[8]) for row in rows]


def late_marks(db: Db, command_id: str) -> list[Any]:
    """What an attempt wrote after its end, and what a transaction wrote that completed nothing: must be empty."""
    return db.execute(
        "SELECT m.* FROM marker m JOIN commandbus.command c USING (command_id) "
        "LEFT JOIN commandbus.attempt a ON a.command = c.id AND a.number = m.attempt "
        "WHERE command_id = %s AND (m.at > a.finished_at OR m.place = 'inside' AND "
        "(c.status <> 'COMPLETED' OR m.attempt <> c.attempt))",
        (command_id,),
    ).fetchall()


class Fleet:
    """A running supervisor and its database."""

    def __init__(self, database: str, *, slots: int = SLOTS, **settings: str) -> None:
        self.url = database
        self.slots = slots
        self.bus = CommandBus(database)
        self.db: Db = psycopg.connect(database, autocommit=True)
        self.meeting = Meeting()
        self._count = 0
        here = Path(__file__).parent
        environment = os.environ | SETTINGS | settings | {
            "WORKER_CONCURRENCY": str(slots),
            "PYTHONPATH": f"{here.parents[1] / 'src'}:{here}",
            "COMMANDBUS_DATABASE_URL": database,
            "WORKER_HANDLERS": "zoo_handlers:handlers",
        }  # fmt: skip
        began = time.monotonic()
        self.log = open(Path(os.environ.get("COMMANDBUS_TEST_ZOO_LOG", os.devnull)), "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "commandbus", "worker"],
            env=environment, cwd=here, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
        )  # fmt: skip
        try:
            self.meet_at_once(30)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - began

    # --- commands ----------------------------------------------------------------------------------------------

    def new_ids(self, what: str, count: int) -> list[str]:
        """Ids that no other test uses."""
        self._count += 1
        return [f"{what}-{self.process.pid}-{self._count}-{index}" for index in range(count)]

    def send_healthy(self, count: int = 20, kind: str = "work") -> list[str]:
        """Healthy commands that have one attempt only: whoever is charged wrongly is found in the TSQ."""
        ids = self.new_ids(kind, count)
        self.bus.send_many(DOMAIN, [NewCommand(kind, command_id=item, max_attempts=1) for item in ids])
        return ids

    def send(self, kind: str, data: dict[str, Any] | None = None, **more: Any) -> str:
        """An animal."""
        (command_id,) = self.new_ids(kind, 1)
        told = {"announce": self.meeting.port} | (data or {})
        self.bus.send(DOMAIN, kind, told, command_id=command_id, **more)
        return command_id

    def meet_at_once(self, seconds: float, kind: str = "meet") -> float:
        """Show that as many healthy commands run at once as there are slots; answers when (epoch)."""
        ids = self.new_ids(kind, self.slots)
        data = {"port": self.meeting.port}
        self.bus.send_many(DOMAIN, [NewCommand(kind, data, command_id=item, max_attempts=1) for item in ids])
        try:
            return self.meeting.until_present(self.slots, seconds)
        finally:
            self.meeting.let_go()
            self.until_status(ids, {"COMPLETED"}, 15)

    def statuses(self, ids: list[str]) -> dict[str, str]:
        """Where commands stand."""
        rows = self.db.execute(
            "SELECT command_id, status FROM commandbus.command WHERE command_id = ANY(%s)", (ids,)
        )
        return dict(rows.fetchall())

    def until_status(self, ids: list[str], wanted: set[str], seconds: float = 20.0) -> None:
        """Until all are in one of these states."""
        until(
            lambda: set(self.statuses(ids).values()) <= wanted,
            seconds,
            what=lambda: (
                wanted,
                {k: v for k, v in self.statuses(ids).items() if v not in wanted},
                self.history(ids),
            ),
        )

    def attempts(self, command_id: str) -> list[Attempt]:
        """The recorded attempts of a command, in order."""
        return attempts_of(self.db, command_id)

    def history(self, ids: list[str]) -> list[Any]:
        """What happened to commands, in short."""
        return self.db.execute(
            "SELECT c.command_id, a.number, a.verdict, a.error_type, a.rung, a.error FROM commandbus.attempt a "
            "JOIN commandbus.command c ON c.id = a.command WHERE c.command_id = ANY(%s) ORDER BY 1, 2 LIMIT 40",
            (ids,),
        ).fetchall()

    # --- what it holds -----------------------------------------------------------------------------------------

    def workers(self) -> list[int]:
        """The worker processes."""
        return children(self.process.pid)

    def holdings(self) -> dict[str, int]:
        """Processes, threads, files and connections of the supervisor and everything below it."""
        everybody = [self.process.pid, *descendants(self.process.pid)]
        return {
            "workers": len(self.workers()),
            "processes": len(everybody),
            "threads": sum(_count(pid, "task") for pid in everybody),
            "files": _count(self.process.pid, "fd"),
            "connections": len(self.sessions()),
        }

    def sessions(self) -> list[tuple[str, str]]:
        """(application_name, query) of its sessions, and of those that animals opened."""
        return self.db.execute(
            "SELECT application_name, query FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND application_name NOT LIKE 'commandbus bus%' "
            "AND (application_name LIKE 'commandbus %' OR application_name LIKE 'hang.%')"
        ).fetchall()

    def resident_mb(self) -> float:
        """The supervisor's memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096 / 2**20

    def close(self) -> int:
        """SIGTERM; answers the exit code."""
        try:
            self.process.send_signal(signal.SIGTERM)
            return self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            self.meeting.close()
            self.db.close()
            self.bus.close()
            self.log.close()


def _count(pid: int, what: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/{what}"))
    except OSError:
        return 0


def children(pid: int) -> list[int]:
    """The live children of a process."""
    return _families().get(pid, [])


def descendants(pid: int) -> list[int]:
    """Its children, and theirs."""
    families = _families()

    def below(parent: int) -> Iterator[int]:
        for child in families.get(parent, []):
            yield child
            yield from below(child)

    return list(below(pid))


def _families() -> dict[int, list[int]]:
    """Parent to its live children, of all processes."""
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    found.setdefault(int(fields[1]), []).append(int(entry))
    return found


@contextlib.contextmanager
def running_fleet(database: str, *, slots: int = SLOTS, **settings: str) -> Iterator[Fleet]:
    """A fleet that does not outlive its block."""
    fleet = Fleet(database, slots=slots, **settings)
    try:
        yield fleet
    finally:
        fleet.close()
