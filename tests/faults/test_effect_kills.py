"""kill -9 of a worker between the intent and the receipt of an effect, and a network that is cut there."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from commandbus import NOT_DONE, CommandBus, HandlerRegistry, OpenEffect, RetryPolicy, Worker
from support.network import Proxy
from support.waiting import statuses, until, until_settled, verdicts
from support.workers import short_lease

Db = psycopg.Connection[Any]
POINTS = ("before", "during", "after", "stored")


class Provider(ThreadingHTTPServer):
    """Charges at every call, as if it had never heard of idempotency keys; `find` says what it has charged."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.charges: list[str] = []
        self.finds: list[str] = []
        self.answers = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        key = query["key"][0]
        if path == "/find":
            self.finds.append(key)
            return {"charge": key if key in self.charges else None}
        self.charges.append(key)
        if "slowly" in query:
            self.answers.wait(60)
        return {"charged": key}


class _Answer(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        body = json.dumps(self.server.answer(parts.path, parse_qs(parts.query, keep_blank_values=True))).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as provider:
        threading.Thread(target=provider.serve_forever, daemon=True).start()
        yield provider
        provider.answers.set()
        provider.shutdown()


@pytest.mark.slow
@pytest.mark.waits
def test_kill_9_at_every_point_of_an_effect_charges_once(
    bus: CommandBus,
    db: Db,
    start_process: Callable[..., subprocess.Popen[bytes]],
    provider: Provider,
    tmp_path: Path,
) -> None:
    for point in POINTS:
        data = {"point": point, "folder": str(tmp_path), "url": provider.url}
        bus.send("orders", "pay", data, command_id=point)
    victim = start_process(script="effect_worker.py")
    reached = {"before", "after", "stored"}
    until(lambda: {file.name for file in tmp_path.iterdir()} >= reached and "during" in provider.charges, 30)
    victim.kill()
    assert sorted(provider.charges) == ["after", "during", "stored"]
    start_process(script="effect_worker.py")
    until_settled(db, 40)
    assert statuses(db) == {"COMPLETED": 4}
    assert sorted(provider.charges) == sorted(POINTS)
    # The process is known to be dead, so verify was asked at once; and not where a receipt was there.
    assert sorted(provider.finds) == ["after", "before", "during"]
    for point in POINTS:
        (effect,) = bus.commands.get_effects("orders", point)
        assert (effect.state, effect.calls) == ("DONE", 2 if point == "before" else 1)
        record = bus.get_command("orders", point)
        assert record is not None
        assert record.result["checkpoint"] == "paid"  # type: ignore[index,call-overload]
        assert [verdict for _, verdict in verdicts(db, point) if verdict != "GIVEN_BACK"] == ["LOST"]


@pytest.mark.waits
def test_a_network_that_is_cut_in_the_block_leads_to_no_second_call(
    bus: CommandBus, db: Db, database: str, start_worker: Callable[..., Worker], proxy: Proxy, through: str
) -> None:
    charges: list[str] = []
    first: list[str] = []
    asked = []

    def verify(effect: OpenEffect) -> Any:
        asked.append(effect.attempt_number)
        return {"found": effect.key} if effect.key in charges else NOT_DONE

    def pay(command: Any, ctx: Any) -> Any:
        with ctx.effect("charge", verify=verify, settle_after="1s") as effect:
            key = effect.key
            first.append(ctx.worker)
            proxy.is_refusing = True
            proxy.cut()
            charges.append(key)
            effect.receipt = {"charged": key}
        return effect.receipt

    handlers = HandlerRegistry()
    policy = RetryPolicy(max_attempts=5, backoff_schedule=[0.05], jitter=0)
    handlers.register("orders", "pay", pay, retry_policy=policy)
    start_worker(handlers, through, **short_lease())
    bus.send("orders", "pay", command_id="c")
    until(lambda: charges)
    start_worker(handlers, database, **short_lease())
    until_settled(db, 30)
    assert statuses(db) == {"COMPLETED": 1}
    assert (len(charges), asked) == (1, [1])
    # The first worker comes back with the receipt, and changes nothing.
    proxy.is_refusing = False
    record = bus.get_command("orders", "c")
    assert record is not None
    assert record.result == {"found": charges[0]}
