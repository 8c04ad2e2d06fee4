"""`rehearse`: run today's handler on a command, and show what it would have done."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import make_conninfo

from commandbus import sql
from commandbus.clock import monotonic
from commandbus.db.database_address import Database
from commandbus.db.pool import check_conninfo
from commandbus.errors import (
    CommandNotFoundError,
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidCommandError,
    RehearsalRefusedError,
)
from commandbus.model import names
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.mask import Mask
from commandbus.model.payload import loads_or_none
from commandbus.model.rehearsal import Rehearsal, RehearsedCall, RehearsedSend, TableChanges
from commandbus.settings import Settings, load_settings
from commandbus.worker.rehearsal.relay import MARK, Relay

LOCK_SECONDS: Final = 2
START_SECONDS: Final = 30.0
LONGEST_ANSWER: Final = 16_000_000
LONGEST_OUTPUT: Final = 20_000
_PROGRAM: Final = "commandbus.worker.rehearsal.child_main"


def rehearse(
    registry: str | None,
    domain: str,
    command_id: str,
    *,
    timeout: Duration = 30,
    isolate: bool = True,
    settings: Settings | None = None,
) -> Rehearsal:
    """Run the handler of a command in a child process without a network, in a transaction that is rolled back.

    `registry` is MODULE:REGISTRY, as a worker names it (None: the setting `handlers`). Limits, effects and
    checkpoints are recorded, not done; sends are rolled back. If the system allows no network namespace, or with
    `isolate=False`, only a handler that is declared with `rehearsable=True` is run; otherwise this raises
    RehearsalRefusedError. After `timeout` the child process is killed. The command itself does not change.
    """
    given = settings or load_settings({})
    reference = registry or given.handlers
    if not reference:
        raise ConfigurationError("no registry of handlers is named: give MODULE:REGISTRY, or set WORKER_HANDLERS")
    seconds = parse_seconds(timeout, name="timeout", error=InvalidCommandError)
    if seconds == 0:
        raise InvalidCommandError("timeout: a rehearsal must end: give more than 0")
    database = Database(given)
    try:
        return _Parent(database.resolve(), reference, seconds, isolate=isolate).run(
            names.check_domain(domain), names.to_id(command_id)
        )
    finally:
        database.close()


class _Parent:
    """One rehearsal, seen from outside."""

    def __init__(self, settings: Settings, registry: str, seconds: float, *, isolate: bool) -> None:
        self._settings = settings
        self._registry = registry
        self._seconds = seconds
        self._isolate = isolate

    def run(self, domain: str, command_id: str) -> Rehearsal:
        """Rehearse one command."""
        with self._connected() as conn:
            row = self._read(conn, domain, command_id)
            parameters = _parameters(conn)
        with tempfile.TemporaryDirectory(prefix="commandbus-") as folder:
            relay = Relay(Path(folder), parameters)
            try:
                job = self._job(domain, row, make_conninfo("", **_through(Path(folder), parameters)))
                told, output = self._ask(job, Path(folder))
            finally:
                relay.close()
        if "cannot" in told:
            trouble = "" if relay.trouble is None else f" ({relay.trouble})"
            raise RehearsalRefusedError(f"{domain} {command_id} cannot be rehearsed: {told['cannot']}{trouble}")
        return self._record(domain, command_id, row, told, relay, output)

    def _connected(self) -> psycopg.Connection[Any]:
        try:
            return psycopg.connect(
                check_conninfo(self._settings.database_url), autocommit=True, connect_timeout=10
            )
        except psycopg.OperationalError as error:
            raise DatabaseUnavailableError(f"the database cannot be reached: {error}") from None

    def _read(self, conn: psycopg.Connection[Any], domain: str, command_id: str) -> dict[str, Any]:
        found = conn.execute(
            sql.text("commands/rehearsed"), {"domain": domain, "command_id": command_id}
        ).fetchone()
        if found is None:
            raise CommandNotFoundError(f"no command {command_id!r} in domain {domain!r}")
        id_, kind, data, headers, correlation_id, reply_to, most, timeout, created_at, number, *rest = found
        return {
            "msg_id": 0, "read_ct": 1, "id": id_, "command_id": command_id, "command_type": kind, "data": data,
            "attempt_base": number or 0, "waived": 0, "max_attempts": most, "correlation_id": correlation_id,
            "reply_to": reply_to, "headers": headers, "created_at": created_at, "last_vt": 0, "claimed_at": 0,
            "timeout": timeout, "checkpoint": rest[0], "receipts": loads_or_none(rest[1]) or {},
        }  # fmt: skip

    def _job(self, domain: str, row: dict[str, Any], conninfo: str) -> dict[str, Any]:
        milliseconds = int(self._seconds * 1000) + 1000
        return {
            "parent": os.getpid(), "isolate": self._isolate, "registry": self._registry, "domain": domain,
            "row": {name: value for name, value in row.items() if name != "receipts"},
            "receipts": row["receipts"], "conninfo": conninfo, "timeout": self._seconds,
            "settings": self._settings.plain() | {"database_url": conninfo},
            "sys_path": [str(Path.cwd()), *(path for path in sys.path if path)],
            "limits": [
                f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s' /* {MARK} */",
                f"SET LOCAL statement_timeout = '{milliseconds}ms' /* {MARK} */",
                f"SET LOCAL application_name = 'commandbus rehearsal' /* {MARK} */",
            ],
        }  # fmt: skip

    def _ask(self, job: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
        reading, writing = os.pipe()
        output = folder / "output"
        try:
            with output.open("wb") as file:
                child = subprocess.Popen(  # noqa: S603 - our own program
                    [sys.executable, "-m", _PROGRAM, str(writing)], stdin=subprocess.PIPE, stdout=file,
                    stderr=file,
                    pass_fds=[writing], start_new_session=True,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )  # fmt: skip
            os.close(writing)
            try:
                return self._talk(child, job, reading), _tail(output)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        finally:
            os.close(reading)

    def _talk(self, child: subprocess.Popen[bytes], job: dict[str, Any], reading: int) -> dict[str, Any]:
        assert child.stdin is not None  # noqa: S101 - a pipe was asked for
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(job).encode() + b"\n")
            child.stdin.close()
        text, until = bytearray(), monotonic() + self._seconds + START_SECONDS
        while (left := until - monotonic()) > 0 and len(text) < LONGEST_ANSWER:
            ready, _, _ = select.select([reading], [], [], left)
            if ready and not (piece := os.read(reading, 65536)):
                break
            text += piece if ready else b""
        else:
            return {
                "outcome": "STOPPED", "handler": self._registry, "error": "it was killed",
                "isolated": self._isolate,
                "notes": ["it had not ended after its time, and was killed"], "seconds": self._seconds,
            }  # fmt: skip
        if not text:
            child.wait()
            return {
                "outcome": "STOPPED", "handler": self._registry, "isolated": self._isolate,
                "error": f"its process ended with exit code {child.returncode}", "notes": [], "seconds": 0.0,
            }  # fmt: skip
        found: dict[str, Any] = json.loads(text)
        return found

    def _record(
        self, domain: str, command_id: str, row: dict[str, Any], told: dict[str, Any], relay: Relay, output: str
    ) -> Rehearsal:
        mask = Mask(self._settings.mask)
        secrets = mask.secrets({name: loads_or_none(row[name]) for name in ("data", "headers")})
        found = mask.texts(told, secrets) if mask else told
        return Rehearsal(
            domain,
            command_id,
            row["command_type"],
            found["handler"],
            found["outcome"],
            found.get("verdict"),
            mask.hide("result", found.get("result")),
            found.get("error_type"),
            found.get("error"),
            found.get("traceback"),
            round(found["seconds"], 3),
            found["isolated"],
            relay.statement_count,
            mask.texts(relay.statements, secrets),
            [TableChanges(*each) for each in found.get("tables", ())],
            [RehearsedSend(*each) for each in found.get("sends", ())],
            [RehearsedCall(*each) for each in found.get("calls", ()) if each[0] != "complete"],
            found["notes"],
            mask.text(output, secrets),
        )


def _parameters(conn: psycopg.Connection[Any]) -> dict[str, str]:
    """How this connection was made: the host among many, and what libpq found in files."""
    info = conn.info
    found = info.get_parameters() | {"host": info.host, "port": str(info.port), "password": info.password or ""}
    if not info.host.startswith(("/", "@")) and info.hostaddr:
        found["hostaddr"] = info.hostaddr
    return found


def _through(folder: Path, parameters: dict[str, str]) -> dict[str, Any]:
    """The same connection through the relay."""
    kept = {name: value for name, value in parameters.items() if name in ("user", "password", "dbname", "options")}
    return {name: value for name, value in kept.items() if value} | {
        "host": str(folder), "port": 5432, "sslmode": "disable", "gssencmode": "disable", "connect_timeout": 10,
    }  # fmt: skip


def _tail(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(0, os.SEEK_END)
        opened.seek(max(0, opened.tell() - LONGEST_OUTPUT))
        return opened.read().decode("utf-8", "replace")
