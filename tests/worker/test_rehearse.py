"""Rehearsals: today's handler on a real command, without a network, and nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, CommandNotFoundError, Rehearsal, RehearsalRefusedError, Settings, rehearse
from commandbus.worker.rehearsal import rehearse as parent

REGISTRY = "support.rehearsed_handlers:handlers"
Db = psycopg.Connection[Any]


@pytest.fixture
def api() -> Iterator[tuple[str, list[str]]]:
    """An API on loopback that notes who calls it."""
    calls: list[str] = []

    class Stub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"done")

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Stub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/charge", calls
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture
def tried(database: str, bus: CommandBus, db: Db, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sends a command and rehearses it."""
    db.execute("CREATE TABLE shipped (id text)")
    monkeypatch.setenv("REHEARSED_DATABASE", database)

    def tried(kind: str, data: Any = None, **options: Any) -> Rehearsal:
        bus.send("orders", kind, data, command_id=kind)
        settings = options.pop("settings", Settings(database_url=database))
        return rehearse(REGISTRY, "orders", kind, settings=settings, **options)

    return tried


def left_behind(db: Db) -> tuple[Any, ...] | None:
    return db.execute(
        "SELECT (SELECT count(*) FROM shipped), (SELECT count(*) FROM commandbus.command)"
    ).fetchone()


def test_everything_is_recorded_and_nothing_is_done(tried: Any, bus: CommandBus, db: Db, api: Any) -> None:
    url, calls = api
    found = tried("ship", {"api": url})
    assert (found.outcome, found.result) == ("COMPLETED", {"receipt": None, "seen": {"page": 2}}), found.error
    assert (found.is_isolated, found.handler, calls) == (True, "support.rehearsed_handlers.ship", [])
    assert [(call.kind, call.name) for call in found.calls] == [
        ("limit", "carrier"), ("effect", "charge"), ("effect", "mail"), ("checkpoint", "checkpoint"),
        ("heartbeat", "progress"),
    ]  # fmt: skip
    assert [(send.command_type, send.command_id) for send in found.sends] == [
        ("bill", "by-conn"),
        ("bill", "by-bus"),
    ]
    tables = {each.table: (each.inserted, each.updated, each.deleted) for each in found.tables}
    assert tables["public.shipped"] == (1, 1, 0)
    assert tables["commandbus.command"][0] == 2
    assert "INSERT INTO shipped (id) VALUES ($1)" in found.statements
    assert found.statement_count >= 4
    assert "shipping" in found.output
    assert any("docai" in note for note in found.notes)
    assert left_behind(db) == (0, 1)
    record = bus.get_command("orders", "ship")
    assert record is not None
    assert (record.status, record.attempts) == ("PENDING", 0)


def test_transactions_sync_and_async(tried: Any, db: Db) -> None:
    for kind, result in (("tx", {"by": "tx"}), ("async", {"by": "async"})):
        found = tried(kind)
        assert (found.outcome, found.result) == ("COMPLETED", result), found.traceback
        assert [each.table for each in found.tables] == ["public.shipped"]
        assert (found.statement_count, len(found.statements)) == (1, 1), found.statements
    assert left_behind(db) == (0, 2)


def test_a_call_outside_an_effect_fails_and_the_api_hears_nothing(tried: Any, api: Any) -> None:
    url, calls = api
    found = tried("call", {"api": url})
    assert (found.outcome, found.error_type, calls) == ("FAILED", "URLError", [])
    assert "unreachable" in str(found.error)
    assert str(found.verdict).startswith("RETRY")


def test_even_sql_cannot_commit(tried: Any, db: Db) -> None:
    found = tried("commits")
    assert found.outcome == "FAILED"
    assert "refused" in str(found.error)
    assert left_behind(db) == (0, 1)


@pytest.mark.long
def test_what_hangs_is_killed_and_locks_are_not_waited_for(
    tried: Any, db: Db, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE shipped")
        found = tried("waits")
    assert (found.outcome, found.error_type) == ("FAILED", "LockNotAvailable")
    monkeypatch.setattr(parent, "START_SECONDS", 8.0)
    hung = tried("hangs", timeout=1)
    assert (hung.outcome, hung.error) == ("STOPPED", "it was killed")
    assert left_behind(db) == (0, 2)


def test_without_isolation_only_declared_handlers_run(tried: Any, api: Any, database: str) -> None:
    url, calls = api
    with pytest.raises(RehearsalRefusedError, match="only a handler that is declared with rehearsable=True"):
        tried("call", {"api": url}, isolate=False)
    assert calls == []
    found = tried("declared", isolate=False)
    assert (found.outcome, found.result, found.is_isolated) == ("COMPLETED", "fine", False)
    with pytest.raises(RehearsalRefusedError, match="has no handler for orders/none"):
        tried("none")
    with pytest.raises(CommandNotFoundError):
        rehearse(REGISTRY, "orders", "nobody", settings=Settings(database_url=database))
    with pytest.raises(RehearsalRefusedError, match="there is no module 'nowhere'"):
        rehearse("nowhere:handlers", "orders", "declared", settings=Settings(database_url=database))


def test_masked_fields_are_not_shown(tried: Any, database: str) -> None:
    settings = Settings(database_url=database, mask=("*.api",))
    found = tried("call", {"api": "http://secret-host.invalid/"}, settings=settings)
    assert "secret-host" not in str(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_somebody_without_rights_leaves_the_network_too() -> None:
    """A user namespace, where the system allows one; otherwise the reason is told."""
    program = (
        "import encodings.idna, os, socket\n"
        "from commandbus.worker.rehearsal.namespace import leave_network\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "why = leave_network()\n"
        "try: socket.create_connection(('127.0.0.1', 9), 1)\n"
        "except OSError as error: print(why, type(error).__name__, error.errno)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert ran.stdout.startswith(("None OSError 101", "this system does not allow a network namespace")), ran
