"""docs/guide is true: its code runs, every block of it, as a stranger would run it."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
import uvicorn
from psycopg_pool import ConnectionPool, NullConnectionPool
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from commandbus import (
    AsyncCommandBus,
    BusinessRuleException,
    CommandBus,
    CommandStatus,
    HandlerRegistry,
    HandlerTransaction,
    Limit,
    NewCommand,
    OnComplete,
    PermanentCommandError,
    RateLimitError,
    RetryPolicy,
    TroubleshootingQueue,
    Worker,
)
from commandbus.cli.entry import COMMANDS
from commandbus.model.payload_schema import schema_of
from commandbus.settings import Settings, load_settings
from support.consoles import served
from support.pages import ROOT, Pages
from support.waiting import until

GUIDE = Pages(*sorted((ROOT / "docs" / "guide").glob("*.md")))
block = GUIDE.block
API = ("delay=timedelta(minutes=5)", "5 parsecs", "page.has_more", "never-sent", "the mail server moves")


@pytest.fixture
def bus(database: str) -> Any:
    with CommandBus(database) as bus:
        bus.create_domain("orders")
        yield bus


def test_every_block_of_the_guide_is_run_by_a_test_here() -> None:
    known = (
        "./dev demo",  # by tests/docs/test_readme.py
        'command_id="ship-18"',
        *API,
        "bus.call(",
        "bus.wait_all(",
        "SendFailedError",
        "handlers.discover(",
        "ctx.outcome_of(error)",
        "@handlers.send_middleware",
        "@handlers.lifespan",
        "bus.create_batch(",
        "bus.start_process(",
        "bus.signal(",
        "ctx.limit(",
        "conn=session",
        "def import_file",
        "give_up_on=",
        "ctx.effect_once(",
        "ctx.effect(",
        "ctx.checkpoint(",
        "commandbus effect list",
        "debounce=",
        "chunk=100",
        'key="data.tenant_id"',
        "bus.key_limits.",
        'key_limit="printer"',
        "commandbus keys list",
        "urgent = bus.send",
        '"pay", priority="high"',
        "def test_an_order_is_shipped",
        "bus.queues.",
        "RedisSemaphore(",
        "SyncWorker(",
        "bus.audit.log",
        "transaction=True",
        "class ShipOrder",
        "the payload is not a valid ShipOrder",
        "money_as_json",
        "commandbus handlers",
        "pgmq.send",
        "handlers.schedule(",
        "bus.schedules.create(",
        "bus.get_ledger(",
        "bus.why_waiting(",
        "bus.list_failures(",
        "commandbus failures --domain",
        "commandbus show orders order-17",
        "commandbus doctor",
        "commandbus console",
        "bus.plans.preview(",
        "bus.commands.replay(",
        "mask = [",
        "commandbus rehearse",
        "import rehearse",
        "commandbus plan preview",
        "app = FastAPI(lifespan=console",
        "get_asgi_application()",
        "bus.watch_slots()",
        "commandbus top  ",
        "health_router(worker)",
        "database_url =",
    )
    assert GUIDE.unknown(*known) == []


def test_the_rules_of_the_python_api(bus: CommandBus, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"bus": bus, "timedelta": timedelta, "RetryPolicy": RetryPolicy}
    for words in API:
        exec(block("python", words), names)
    delays = {record.visible_at - record.created_at for record in bus.query_commands() if record.visible_at}
    assert {round(delay.total_seconds()) for delay in delays} == {300}
    assert capsys.readouterr().out.startswith(
        "backoff_schedule: '5 parsecs' is not a duration; give seconds (25, 0.5) or numbers with units: 500ms, "
    )
    assert not names["page"].has_more
    assert bus.pauses().items == []


def test_schedules_fire_as_declared_and_change_at_run_time(
    bus: CommandBus, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"bus": bus, "handlers": HandlerRegistry()}
    exec(block("python", "handlers.schedule("), names)
    assert [item.times.text for item in names["handlers"].schedules] == ["30 2 * * * Europe/Berlin", "every 15m"]
    with Worker(names["handlers"], database_url=database):
        until(lambda: len(bus.schedules.list("orders")) == 2)
        sent = bus.schedules.run_now("orders", "nightly")
        until(lambda: bus.get_command("orders", sent.command_id).status is CommandStatus.COMPLETED)  # type: ignore[union-attr]
    assert capsys.readouterr().out.startswith("for 20")
    exec(block("python", "bus.schedules.create("), names)
    said = capsys.readouterr().out
    assert "PENDING" in said
    assert "report-eu" in said
    assert bus.schedules.get("orders", "report-eu") is None


def test_a_plan_is_previewed_started_and_stopped(
    bus: CommandBus, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        raise PermanentCommandError("no answer", code="API_DOWN")

    for number in range(2):
        bus.send("orders", "ship", command_id=f"s{number}")
    Worker(handlers, database_url=database).run(until_idle=True)
    exec(block("python", "bus.plans.preview("), {"bus": bus})
    said = capsys.readouterr().out
    assert "2 put 2 commands into the queue again" in said
    assert "s0 no answer" in said
    assert "0 of 2 retried, 2 left" in said
    assert bus.plans.get(1).state == "STOPPED"
    with Worker(handlers, database_url=database):
        for line in block("sh", "commandbus plan preview").splitlines():
            words = [sys.executable, "-m", "commandbus.cli", *shlex.split(line)[1:]]
            if words[4] in ("start", "stop"):
                words[5] = "2"
            code = 0 if words[4] != "stop" else 1
            ran = subprocess.run([*words, "--database", database], capture_output=True, text=True, check=False)
            assert (ran.returncode != 0) == bool(code), ran.stderr


def test_the_ledger_of_a_command(bus: CommandBus, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python", "bus.get_ledger("), {"bus": bus})
    assert capsys.readouterr().out.startswith("delayed 20")
    exec(block("python", "bus.why_waiting("), {"bus": bus})
    assert capsys.readouterr().out.startswith("it may run in about 1h (its sender wanted it later)\nNone 3")


def test_the_fleet_is_watched(bus: CommandBus, database: str, capsys: pytest.CaptureFixture[str]) -> None:
    handlers, go_on = HandlerRegistry(), threading.Event()

    @handlers.handler("orders", "ship")
    def ship(_command: Any, _ctx: Any) -> None:
        go_on.wait()

    worker = Worker(handlers, database_url=database)
    worker.start()
    try:
        bus.send("orders", "ship", {}, command_id="ship-17")
        until(lambda: any(item.slots for item in bus.watch_slots()))
        exec(block("python", "bus.watch_slots()"), {"bus": bus})
    finally:
        go_on.set()
        worker.stop()
    said = capsys.readouterr().out
    assert f"{worker.id} RUNNING ship ship-17" in said
    assert "StackFrame(file=" in said
    for line in re.findall(r"^commandbus (.*?)(?: +#|$)", block("sh", "commandbus top  "), re.MULTILINE):
        assert line.split()[0] in COMMANDS


def test_failures_that_are_alike(bus: CommandBus, database: str, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship", retry_policy=RetryPolicy(max_attempts=1))
    def ship(command: Any, ctx: Any) -> None:
        raise KeyError("zip")

    bus.send("orders", "ship")
    bus.send("orders", "ship")
    Worker(handlers, settings=Settings(database_url=database, code_version="8f3a")).run(until_idle=True)
    exec(
        block("python", "bus.list_failures("),
        {"bus": bus, "datetime": datetime, "UTC": UTC, "timedelta": timedelta},
    )
    said = capsys.readouterr().out
    assert said.startswith("2 KeyError ")
    assert said.endswith("test_guide.py: ship 2 8f3a\n")


def test_a_command_is_replayed_and_a_mask_is_read(bus: CommandBus, database: str, tmp_path: Path) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> None:
        raise PermanentCommandError("no such city")

    bus.send("orders", "ship", {"city": "Bon", "n": 1}, command_id="ship-17")
    Worker(handlers, database_url=database).run(until_idle=True)
    names: dict[str, Any] = {"bus": bus}
    exec(block("python", "bus.commands.replay("), names)
    new, old = bus.get_command("orders", names["sent"].command_id), bus.get_command("orders", "ship-17")
    assert new is not None
    assert old is not None
    assert (new.data, old.status) == ({"city": "Bonn", "n": 1}, CommandStatus.CANCELED)
    (tmp_path / "commandbus.toml").write_text(block("toml", "mask = ["))
    loaded = load_settings({}, config_file=tmp_path / "commandbus.toml")
    assert loaded.mask == ("*.password", "data.card.number", "result.token")


def test_a_command_is_rehearsed(
    bus: CommandBus, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    text = (
        "from commandbus import HandlerRegistry\nhandlers = HandlerRegistry()\n"
        "@handlers.handler('orders', 'ship')\ndef ship(command, ctx):\n    return 'shipped'\n"
    )
    (tmp_path / "shop.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    bus.send("orders", "ship", {}, command_id="ship-17")
    exec(block("python", "import rehearse"), {"bus": bus})
    assert "shop.ship would complete\nshipped [] [] []" in capsys.readouterr().out
    words = shlex.split(block("sh", "commandbus rehearse"))[1:]
    ran = subprocess.run(
        [sys.executable, "-m", "commandbus.cli", *words, "--database", database], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_the_console_is_mounted_in_an_application(bus: CommandBus, database: str) -> None:
    names: dict[str, Any] = {"database_url": database}
    exec(block("python", "app = FastAPI(lifespan=console"), names)
    server = uvicorn.Server(uvicorn.Config(names["app"], port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    request = urllib.request.Request(f"http://127.0.0.1:{port}/console/", headers={"X-User": "ann"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    assert 'href="/console/static/console.css"' in text
    assert "ann (operator)" in text
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


DJANGO_PROJECT = """
import sys
import urllib.request

from django.conf import settings
from django.http import HttpResponse
from django.urls import path

settings.configure(ROOT_URLCONF="__main__", ALLOWED_HOSTS=["127.0.0.1"], SECRET_KEY="of the tests")
urlpatterns = [path("hello", lambda request: HttpResponse("hello from Django"))]
database_url = sys.argv[1]
exec(sys.argv[2])

from support.consoles import served

with served(application) as port:
    for where in ("/hello", "/console/", "/console/commands"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{where}", headers={"X-User": "ann"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            print(answer.status, answer.read().decode())
"""


def test_the_console_is_mounted_in_a_django_project(bus: CommandBus, database: str) -> None:
    """As a process of its own: Django has one configuration in a process."""
    code = block("python", "get_asgi_application()")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    ran = subprocess.run(
        [sys.executable, "-c", DJANGO_PROJECT, database, code],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "200 hello from Django" in ran.stdout
    assert ran.stdout.count('href="/console/static/console.css"') == 2
    assert ran.stdout.count("ann (operator)") == 2


def test_a_worker_inside_an_application_has_health_checks_and_metrics(bus: CommandBus, database: str) -> None:
    names: dict[str, Any] = {"database_url": database}
    exec(block("python", "health_router(worker)"), names)
    sent = bus.send("orders", "ship", {"order_no": 17})
    with served(names["app"]) as port:
        until(lambda: bus.get_command("orders", sent.command_id).status is CommandStatus.COMPLETED)  # type: ignore[union-attr]
        base = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{base}/health/ready", timeout=30) as answer:
            assert json.load(answer)["status"] == "healthy"
        counted = 'commandbus_attempts_total{domain="orders",command_type="ship",outcome="completed"} 1'
        until(lambda: counted in urllib.request.urlopen(f"{base}/metrics", timeout=30).read().decode())


def test_writes_commit_with_the_completion(bus: CommandBus, database: str) -> None:
    bus.create_domain("mail")
    names: dict[str, Any] = {"bus": bus}
    exec(block("python", '"ship", transaction=True'), names)
    with bus.connect() as conn:
        conn.execute("CREATE TABLE orders (order_no integer, shipped_at timestamptz)")
        conn.execute("INSERT INTO orders VALUES (17)")
    sent = bus.send("orders", "ship", {"order_no": 17})
    bus.send("orders", "ship", {"no order_no": 17}, command_id="bad", max_attempts=1)
    Worker(names["handlers"], database_url=database).run(until_idle=True)
    found = bus.get_command("orders", sent.command_id)
    assert found is not None
    assert found.result == {"shipped": True}
    assert [record.data for record in bus.query_commands(domain="mail")] == [{"order_no": 17}]
    with bus.connect() as conn:
        assert conn.execute("SELECT count(shipped_at) FROM orders").fetchone() == (1,)


def test_payloads_have_types(bus: CommandBus, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"bus": bus, "__name__": "shop"}
    exec(compile(block("python", "class ShipOrder"), "shop", "exec", dont_inherit=True), names)
    items = [{"name": "nut", "price": "1"}] * 3 + [{"name": "nut", "price": "cheap"}]
    bus.send("orders", "ship", {"order_no": 1, "items": items}, command_id="bad")
    Worker(names["handlers"], database_url=database).run(until_idle=True)
    bad, good = bus.query_commands(domain="orders")
    assert good.result == {"total": "0.30", "due": "2026-01-31"}
    assert good.data["items"] == [{"name": "nut", "price": "0.10", "count": 3}]
    assert bad.error_code == "INVALID_PAYLOAD"
    assert block("text", "the payload is not a valid ShipOrder").strip() == bad.error

    class Money:
        cents = 5

    monkeypatch.setenv("COMMANDBUS_DATABASE_URL", database)
    names |= {"Money": Money, "CommandBus": CommandBus}
    exec(block("python", "money_as_json"), names)
    with names["bus"] as own:
        own.send("orders", "pay", [Money()], command_id="money")
    found = bus.get_command("orders", "money")
    assert found is not None
    assert found.data == [{"cents": 5}]
    printed = json.dumps({"orders/ship": schema_of(names["ShipOrder"])}, indent=2)
    shown = block("console", "commandbus handlers").splitlines()[1:-1]
    assert printed.splitlines()[: len(shown)] == shown


def test_the_configuration_file_loads_and_each_line_of_it_counts(tmp_path: Path) -> None:
    file = tmp_path / "commandbus.toml"
    file.write_text(block("toml", "database_url ="))
    settings = load_settings(environ={}, directory=tmp_path)
    given = {name for name, origin in settings.origins.items() if origin.startswith(str(file))}
    assert given == {
        "database_url", "handlers", "concurrency", "shutdown_timeout", "max_attempts", "backoff_schedule",
        "limits.docai",
    }  # fmt: skip
    assert settings.warnings == ()
    assert (settings.shutdown_timeout, settings.backoff_schedule) == (25.0, (10.0, 60.0, 300.0))


def test_the_fates_of_odd_handlers_are_as_in_the_table(bus: CommandBus, database: str) -> None:
    handlers = HandlerRegistry()
    handlers.register("orders", "odd", lambda command, ctx: object())
    for command_type in ("odd", "unknown"):
        bus.send("orders", command_type, command_id=command_type)
    Worker(handlers, database_url=database).run(until_idle=True)
    codes = {item.command_type: item.error_code for item in TroubleshootingQueue(bus).list("orders")}
    assert codes == {"odd": "INVALID_RESULT"}
    waiting = bus.get_command("orders", "unknown")
    assert waiting is not None
    assert waiting.waiting_for == "handler"
    Worker(handlers, settings=load_settings({"database_url": database, "unknown_type_timeout": 0})).run(
        until_idle=True
    )
    codes = {item.command_type: item.error_code for item in TroubleshootingQueue(bus).list("orders")}
    assert codes == {"odd": "INVALID_RESULT", "unknown": "UNKNOWN_COMMAND_TYPE"}
    assert all(f"`{code}`" in GUIDE.text for code in codes.values())


def test_a_reply_has_the_fields_that_are_named(bus: CommandBus, database: str) -> None:
    bus.create_queue("shop_replies")
    handlers = HandlerRegistry()

    def refuse(command: Any, ctx: Any) -> None:
        raise BusinessRuleException("no")

    def give_up(command: Any, ctx: Any) -> None:
        raise PermanentCommandError("no")

    handlers.register("orders", "good", lambda command, ctx: 1)
    handlers.register("orders", "refused", refuse)
    handlers.register("orders", "given_up", give_up)
    for command_type in ("good", "refused", "given_up"):
        bus.send("orders", command_type, reply_to="shop_replies")
    Worker(handlers, database_url=database).run(until_idle=True)
    bus.cancel("orders", bus.send("orders", "good", reply_to="shop_replies", delay=60).command_id)
    with psycopg.connect(database) as conn:
        replies = [row[0] for row in conn.execute("SELECT message FROM pgmq.q_shop_replies")]
    fields = {"outcome", "domain", "command_id", "command_type", "correlation_id", "result"}
    assert {reply["outcome"]: reply.keys() - fields for reply in replies} == {
        "SUCCESS": set(), "FAILED": {"error"}, "CANCELED": {"error"}
    }  # fmt: skip
    assert len(replies) == 3
    (described,) = re.findall(r"A reply is `(.*?)`, with `(.*?)`", GUIDE.text, re.DOTALL)
    named = set(re.findall(r'"([a-z_]+)"', " ".join(described)))
    assert named == fields | {"error"} | next(reply["error"].keys() for reply in replies if "error" in reply)


def test_the_example_with_time_limits_runs(bus: CommandBus, database: str) -> None:
    handlers, asked = HandlerRegistry(), []
    names: dict[str, Any] = {"handlers": handlers, "fetch": lambda page, timeout: asked.append(timeout)}
    exec(block("python", "def import_file"), names)
    bus.send("orders", "import", {"pages": 2}, command_id="import-7")
    Worker(handlers, database_url=database).run(until_idle=True)
    record = bus.get_command("orders", "import-7")
    assert record is not None
    assert record.status is CommandStatus.COMPLETED, record.error
    assert all(590 < timeout <= 600 for timeout in asked)


def test_the_example_of_a_retry_policy_runs(bus: CommandBus, database: str) -> None:
    handlers = HandlerRegistry()
    exec(block("python", "give_up_on="), {"handlers": handlers})
    for command_id, data in (("snoozed", {"printed": False}), ("hopeless", {}), ("good", {"printed": True})):
        bus.send("orders", "label", data, command_id=command_id)
    Worker(handlers, database_url=database).run(until_idle=True)
    found = {name: bus.get_command("orders", name) for name in ("snoozed", "hopeless", "good")}
    assert {name: record.status for name, record in found.items() if record} == {
        "snoozed": CommandStatus.PENDING, "hopeless": CommandStatus.FAILED, "good": CommandStatus.COMPLETED,
    }  # fmt: skip


class Payments:
    """A provider that answers some calls too late, and then knows what it has done."""

    def __init__(self) -> None:
        self.charges: dict[str, dict[str, Any]] = {}
        self.calls = 0

    def charge(self, amount: int, *, idempotency_key: str) -> dict[str, Any]:
        self.calls += 1
        if amount == -13:
            raise LookupError("nothing to refund")
        self.charges[idempotency_key] = {"id": f"ch_{len(self.charges) + 1}", "amount": amount}
        if amount > 100:
            raise TimeoutError("no answer")
        return self.charges[idempotency_key]

    def find(self, *, idempotency_key: str) -> dict[str, Any] | None:
        return self.charges.get(idempotency_key)


def test_the_examples_of_effects_and_checkpoints_run(bus: CommandBus, database: str) -> None:
    handlers, payments = HandlerRegistry(), Payments()
    names: dict[str, Any] = {"handlers": handlers, "payments": payments}
    exec(block("python", "ctx.effect_once(").replace('settle_after="10m"', "settle_after=0"), names)
    exec(block("python", "ctx.effect("), names)
    exec(block("python", "ctx.checkpoint("), names)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("CREATE TABLE shipped (order_no integer PRIMARY KEY)")
    bus.send("orders", "pay", {"amount": 50}, command_id="paid")
    bus.send("orders", "pay", {"amount": 500}, command_id="late")  # the first attempt does not hear the answer
    bus.send("orders", "refund", {"amount": 20}, command_id="refunded")
    bus.send("orders", "refund", {"amount": 13}, command_id="refused", max_attempts=1)
    bus.send("orders", "import", {"orders": [4, 5, 6]}, command_id="imported")
    policy = RetryPolicy(max_attempts=3, backoff_schedule=[0], jitter=0)
    Worker(handlers, database_url=database, retry_policy=policy).run(until_idle=True)
    found = {record.command_id: record for record in bus.query_commands(domain="orders")}
    assert found["paid"].result in ("ch_1", "ch_2", "ch_3")
    assert {found[name].status for name in ("paid", "late", "refunded", "imported")} == {CommandStatus.COMPLETED}
    assert (len(payments.charges), payments.calls) == (3, 4)
    (refused,) = bus.commands.get_effects("orders", "refused")
    assert refused.state == "NOT_DONE"
    assert found["imported"].result == 3
    words = [shlex.split(line, comments=True) for line in block("sh", "commandbus effect list").splitlines()]
    assert [word[:3] for word in words] == [
        ["commandbus", "effect", "list"], ["commandbus", "show", "orders"],
        ["commandbus", "effect", "resolve"], ["commandbus", "tsq", "retry"],
    ]  # fmt: skip


def test_the_examples_of_unique_keys_run(bus: CommandBus) -> None:
    exec(block("python", "debounce="), {"bus": bus})
    waiting = sorted((record.command_type, record.data) for record in bus.query_commands(domain="orders"))
    assert waiting == [
        ("invoice", {"order_no": 17}), ("reindex", {"page": 2}), ("save_draft", {"text": "Hello"}),
    ]  # fmt: skip


def test_the_example_of_a_chunk_handler_runs(bus: CommandBus, database: str) -> None:
    bus.create_domain("search")
    names: dict[str, Any] = {"handlers": HandlerRegistry(), "PermanentCommandError": PermanentCommandError}
    exec(block("python", "chunk=100"), names)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("CREATE TABLE pages (page text, text text)")
        pages = [{"page": "a", "text": "two words"}, {"page": "b"}, {"page": "c", "text": ""}]
        sent = bus.send_many("search", [NewCommand("index", page) for page in pages])
        Worker(names["handlers"], database_url=database).run(until_idle=True)
        assert conn.execute("SELECT page FROM pages ORDER BY 1").fetchall() == [("a",), ("c",)]
    found = [bus.get_command("search", each.command_id) for each in sent]
    assert [each and each.result for each in found] == [{"words": 2}, None, {"words": 0}]
    assert [item.error_code for item in TroubleshootingQueue(bus).list("search").items] == ["NO_TEXT"]


def test_the_examples_of_key_limits_run(bus: CommandBus, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"bus": bus, "NewCommand": NewCommand, "Limit": Limit, "handlers": HandlerRegistry()}
    exec(block("python", 'key="data.tenant_id"'), names)
    Worker(names["handlers"], settings=bus.settings).run(until_idle=True)  # declares the limits
    exec(block("python", "bus.key_limits.override"), names)
    assert capsys.readouterr().out == "tenant 17: 0 of 10, 1 waiting\n"
    (line,) = bus.key_limits.lines("orders", "account")
    assert (line.key, line.released, line.waiting) == ("DE-4711", 0, 2)
    exec(block("python", 'key_limit="printer"'), names)
    assert [line.key for line in bus.key_limits.lines("orders", "printer")] == ["second floor"]


def test_the_example_of_priorities_runs(bus: CommandBus, database: str) -> None:
    exec(block("python", "urgent = bus.send"), {"bus": bus})
    order: list[Any] = []
    handlers = HandlerRegistry()
    handlers.register("orders", "invoice", lambda command, ctx: order.append(command.data["order_no"]))
    Worker(handlers, database_url=database, concurrency=1).run(until_idle=True)
    assert order[0] == 20
    assert sorted(order) == [18, 19, 20]
    exec(block("python", '"pay", priority="high"'), {"handlers": handlers})
    Worker(handlers, database_url=database).run(until_idle=True)  # it declares the priority
    sent = bus.send("orders", "pay")
    found = bus.get_command("orders", sent.command_id)
    assert found is not None
    assert found.priority == "high"


def test_the_batch_example_runs(bus: CommandBus, database: str, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda command, ctx: None)

    def work() -> None:
        Worker(handlers, database_url=database).run(until_idle=True)

    class Waits(CommandBus):
        """The worker is started when the example waits: by then its handlers are registered."""

        def wait_for_batch(self, *args: Any, **options: Any) -> Any:
            work()
            return super().wait_for_batch(*args, **options)

    with Waits(database) as waiting:
        exec(block("python", "bus.create_batch("), {"bus": waiting, "handlers": handlers})
    work()
    said = capsys.readouterr().out.splitlines()
    assert "COMPLETED 2000 0 0" in said
    assert "COMPLETED 2000" in said, "what the handler of the completion printed"


def test_what_the_end_of_a_batch_sends_has_the_fields_that_are_named(bus: CommandBus, database: str) -> None:
    bus.create_queue("shop_replies")
    handlers, sent = HandlerRegistry(), []
    handlers.register("orders", "done", lambda command, ctx: sent.append((command.data, command.headers["batch"])))
    promises: tuple[Any, ...] = (
        {"domain": "orders", "command_type": "done"},
        OnComplete("orders", "done", data=[1]),
        {"reply_to": "shop_replies"},
    )
    for promise in promises:
        bus.create_batch("orders", [], on_complete=promise)
    Worker(handlers, database_url=database).run(until_idle=True)
    with psycopg.connect(database) as conn:
        ((told,),) = conn.execute("SELECT message FROM pgmq.q_shop_replies").fetchall()
    (described,) = re.findall(r"`on_complete` has as its data `(\{.*?\})`", GUIDE.text, re.DOTALL)
    fields = set(re.findall(r'"([a-z_]+)"', described))
    assert '`"event": "batch_completed"`' in GUIDE.text
    assert told.pop("event") == "batch_completed"
    assert told.keys() == fields
    assert sorted(sent, key=lambda item: isinstance(item[0], list))[1][0] == [1]
    assert all(summary.keys() == fields for _, summary in sent)
    assert any(data == summary for data, summary in sent)


def test_the_limit_example_runs(bus: CommandBus, database: str) -> None:
    """Three pages, and an API that refuses the first call."""
    bus.create_domain("ocr")
    answers = [429, 200, 200, 200]

    class Response:
        def __init__(self, status_code: int) -> None:
            self.status_code = status_code
            self.headers = {"Retry-After": "0.1"} if status_code == 429 else {}
            self.text = "read"

    def ask_docai(data: Any, timeout: float) -> Response:
        assert 0 < timeout <= 60
        return Response(answers.pop(0))

    handlers = HandlerRegistry()
    exec(block("python", "ctx.limit("), {"handlers": handlers, "ask_docai": ask_docai})
    sent = [bus.send("ocr", "page", n) for n in range(3)]
    with Worker(handlers, settings=Settings(database_url=database)):
        until(lambda: all(bus.get_command("ocr", each.command_id).result == "read" for each in sent), 30)
    assert bus.get_limit("docai").rate_limited == 1
    assert answers == []


def test_the_process_example_runs(bus: CommandBus, database: str) -> None:
    handlers, did = HandlerRegistry(), []
    for domain, command_type in (("stock", "reserve"), ("billing", "charge"), ("shipping", "ship")):
        handlers.register(domain, command_type, lambda command, ctx: did.append(command.command_type))
    for domain in ("processes", "stock", "billing", "shipping"):
        bus.create_domain(domain)
    code = block("python", "bus.start_process(")
    assert len(code.strip().splitlines()) <= 15
    with ConnectionPool(database, open=True) as pool:
        exec(code, {"bus": bus, "handlers": handlers, "pool": pool})
    Worker(handlers, database_url=database).run(until_idle=True)
    record = bus.get_process("processes", "order-17")
    assert record is not None
    assert (record.status, did) == ("COMPLETED", ["reserve", "charge", "ship"])


def test_the_example_of_a_signal_runs(bus: CommandBus, database: str) -> None:
    handlers = HandlerRegistry()
    for command_type in ("block_amount", "unblock", "pay"):
        handlers.register("billing", command_type, lambda command, ctx: None)
    for domain in ("processes", "billing"):
        bus.create_domain(domain)
    code = "from commandbus import Saga, step\n" + block("python", "bus.signal(")
    exec(code, {"bus": bus, "handlers": handlers})
    Worker(handlers, database_url=database).run(until_idle=True)
    record = bus.get_process("processes", "payout-3")
    assert record is not None
    assert (record.status, record.state["approval"]) == ("COMPLETED", {"by": "ann"})


def test_the_sending_example_runs(bus: CommandBus) -> None:
    bus.create_queue("shop_replies")
    names: dict[str, Any] = {"bus": bus}
    exec(block("python", 'command_id="ship-18"'), names)
    assert names["sent"].created
    record = bus.get_command("orders", "ship-18")
    assert record is not None
    assert (record.correlation_id, record.max_attempts) == ("cart-4711", 5)


def test_several_registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    billing = HandlerRegistry()
    billing.register("billing", "bill", lambda command, ctx: None)
    folder = tmp_path / "shop" / "handlers"
    folder.mkdir(parents=True)
    (folder / "orders.py").write_text(
        "from commandbus import HandlerRegistry\nparts = HandlerRegistry()\n"
        "parts.register('orders', 'ship', lambda command, ctx: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"HandlerRegistry": HandlerRegistry, "billing": billing}
    exec(block("python", "handlers.discover("), names)
    assert names["handlers"].domains == ["billing", "orders"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def test_middleware_around_attempts_and_the_life_of_a_worker(
    bus: CommandBus, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Mailer:
        """What the example connects to."""

        sent: ClassVar[list[Any]] = []

        async def send(self, *what: Any) -> None:
            self.sent.append(what)

        async def close(self) -> None:
            self.sent.append("closed")

    async def connect_to_mailer() -> Mailer:
        return Mailer()

    handlers = HandlerRegistry()
    names: dict[str, Any] = {"handlers": handlers, "connect_to_mailer": connect_to_mailer}
    exec(block("python", "@handlers.lifespan"), names)
    bus.send("orders", "mail", {"to": "ann"})
    Worker(handlers, database_url=database).run(until_idle=True)
    assert Mailer.sent == [({"to": "ann"}, 1.1), "closed"]
    timed = HandlerRegistry()
    exec(block("python", "ctx.outcome_of(error)"), {"handlers": timed})

    @timed.handler("orders", "ship", retry_policy=RetryPolicy(2, [600], jitter=0))
    def ship(command: Any, ctx: Any) -> None:
        if command.data:
            raise LookupError(command.data)

    bus.send_many("orders", [{"command_type": "ship", "data": data} for data in (None, "no")])
    with caplog.at_level("INFO", "shop"):
        Worker(timed, database_url=database).run(until_idle=True)
    said = sorted(record.getMessage() for record in caplog.records if record.name == "shop")
    assert said == ["ship: RETRY, again in 600 s", "ship: done in 0.0 s"]


def test_the_trace_example_runs(bus: CommandBus, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMANDBUS_DATABASE_URL", database)
    handlers, seen = HandlerRegistry(), []
    handlers.register("orders", "mail", lambda command, ctx: seen.append((command.data, command.headers)))
    names: dict[str, Any] = {"handlers": handlers}

    def run() -> None:
        exec(block("python", "@handlers.send_middleware"), names)

    contextvars.copy_context().run(run)
    Worker(handlers, database_url=database).run(until_idle=True)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert seen == [({"trace": trace}, {"traceparent": trace})]
    names["bus"].close()


def test_a_send_that_cannot_hang(bus: CommandBus, capsys: pytest.CaptureFixture[str], database: str) -> None:
    names: dict[str, Any] = {"bus": bus}
    exec(block("python", "SendFailedError"), names)
    assert names["sent"].created
    assert capsys.readouterr().out == ""


def test_the_calling_example_runs(bus: CommandBus, database: str) -> None:
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda command, ctx: {"shipped": command.data["order_no"]})
    worker = Worker(handlers, database_url=database)
    worker.start()
    names: dict[str, Any] = {"bus": bus}
    try:
        exec(block("python", "bus.call("), names)
        exec(block("python", "bus.wait_all("), names)
    finally:
        worker.stop(wait=4)
    assert names["shipped"] == {"shipped": 21}
    assert [each.result for each in names["outcomes"]] == [{"shipped": 22}, {"shipped": 23}]


def test_the_example_with_other_peoples_connections_runs(bus: CommandBus, database: str) -> None:
    import django
    from django.conf import settings

    parts = psycopg.conninfo.conninfo_to_dict(database)
    if not settings.configured:
        engine = "django.db.backends.postgresql"
        names = {"NAME": parts["dbname"], "USER": parts["user"], "HOST": parts["host"], "PORT": parts["port"]}
        settings.configure(DATABASES={"default": {"ENGINE": engine, **names}})
        django.setup()
    # All of it in one program: its sync part blocks the loop of its async part, and is told so.
    with pytest.warns(RuntimeWarning, match="CommandBus is used on a running event loop"):
        asyncio.run(_run_with_connections(block("python", "conn=session"), bus, database))
    assert len(bus.query_commands(domain="orders").items) == 5


async def _run_with_connections(code: str, bus: CommandBus, database: str) -> None:
    import django.db

    url = database.replace("postgresql://", "postgresql+psycopg://")
    engine, async_engine = create_engine(url), create_async_engine(url)
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    try:
        pool = NullConnectionPool(database, open=True)
        with Session(engine) as session, psycopg.connect(database) as conn, pool:
            async with AsyncSession(async_engine) as async_session, AsyncCommandBus(database) as abus:
                names = {"bus": bus, "abus": abus, "data": {}, "session": session, "async_session": async_session,
                         "pool": pool, "django": django, "tx": HandlerTransaction(conn, 1024)}  # fmt: skip
                compiled = compile(code, "docs/guide", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                await eval(compiled, names)
                session.commit()
                await async_session.commit()
    finally:
        django.db.connection.close()
        del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]
        engine.dispose()
        await async_engine.dispose()


def test_the_envelope_for_other_languages_is_accepted(bus: CommandBus, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(block("sql", "pgmq.send"))  # type: ignore[call-overload]
    handlers = HandlerRegistry()
    seen: list[Any] = []
    handlers.register("orders", "ship", lambda command, ctx: seen.append((command.command_id, command.data)))
    Worker(handlers, database_url=database).run(until_idle=True)
    assert seen == [("ship-19", {"order_no": 19})]


def test_the_commands_for_operators_run(bus: CommandBus, database: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from commandbus import HandlerRegistry\nhandlers = HandlerRegistry()\n"
        "@handlers.handler('orders', 'ship')\ndef ship(command, ctx): return 1\n"
    )
    bus.send("orders", "ship", {}, command_id="ship-17")
    environ = {**os.environ, "COMMANDBUS_DATABASE_URL": database}
    for line in block("sh", "commandbus doctor").splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "commandbus"
        with subprocess.Popen(
            [sys.executable, "-m", "commandbus.cli", *words[1:]],
            cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            if words[1] == "worker":
                until(lambda: bus.get_command("orders", "ship-17").status is CommandStatus.COMPLETED)
                process.terminate()
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, (line, out, err)
        assert "Traceback" not in err


def test_the_example_of_a_test_runs(bus: CommandBus) -> None:
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda command, ctx: None)
    names: dict[str, Any] = {"Worker": Worker}
    exec(block("python", "def test_an_order_is_shipped"), names)
    names["test_an_order_is_shipped"](bus, handlers)


def test_the_number_of_ways_to_hang_is_right() -> None:
    from commandbus.testing import hang

    assert f"in {len(hang.ANIMALS)} ways" in GUIDE.text


def test_replies_are_read_as_the_page_on_queues_says(
    bus: CommandBus, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> dict[str, Any]:
        return {"shipped": command.data["order_no"]}

    with Worker(handlers, database_url=database):
        exec(block("python", "bus.queues."), {"bus": bus})
    assert capsys.readouterr().out.split(" ", 1)[1] == "SUCCESS {'shipped': 7}\n"
    assert bus.queues.metrics("answers").queue_length == 0


def test_the_page_on_data_access_finds_what_it_wrote(bus: CommandBus, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python", "bus.audit.log"), {"bus": bus})
    assert capsys.readouterr().out == "ship-8 ['SENT', 'LABEL_PRINTED']\n"


@pytest.mark.parametrize("kind", ["commands", "audit", "batches", "processes"])
def test_the_page_on_data_access_names_every_method(bus: CommandBus, kind: str) -> None:
    (row,) = re.findall(rf"^\| `bus\.{kind}`, .*", GUIDE.text, re.MULTILINE)
    told = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    assert told == {name for name in vars(type(getattr(bus, kind))) if not name.startswith("_")}


def test_the_page_on_limits_without_a_worker(redis_url: str) -> None:
    refusals = iter([RateLimitError("429", retry_after=0)])

    def read_page(page: bytes) -> str:
        for refusal in refusals:
            raise refusal
        return page.decode()

    seen: dict[str, Any] = {"redis_url": redis_url, "page": b"text", "read_page": read_page}
    exec(block("python", "RedisSemaphore("), seen)
    assert seen["text"] == "text"
    assert not seen["semaphore"].is_held


def test_the_page_on_the_names_of_the_specification(bus: CommandBus, database: str) -> None:
    seen: dict[str, Any] = {"database_url": database}
    seen["wait_for_it"] = lambda: until(
        lambda: seen["bus"].get_command("orders", "ship-9").status is CommandStatus.COMPLETED
    )
    try:
        exec(block("python", "SyncWorker("), seen)
    finally:
        seen["pool"].close()
