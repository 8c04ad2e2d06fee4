"""With a rule on, a secret of a payload, a result or an error appears on no page, in no answer, line or log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import uvicorn

from commandbus import (
    CommandBus,
    HandlerRegistry,
    InvalidCommandError,
    PermanentCommandError,
    RetryPolicy,
    Saga,
    Settings,
    Worker,
    step,
)
from commandbus.bus.masked import bus_for_people
from commandbus.web.app import create_console
from commandbus.worker import masking
from support.waiting import until
from web.conftest import Visit

RULES = ("*.password", "data.card.number", "result.token", "headers.key")
SECRETS = ("hunter2secret", "4111222233334444", "tok-98765", "hdr-55555", "state-secret-1")
PATHS = (
    "/", "/commands", "/troubleshooting?domain=orders", "/stuck", "/batches", "/processes", "/schedules",
    "/limits",
    "/workers", "/domains", "/rejected", "/plans", "/plan?id=1", "/command?domain=orders&id=bad",
    "/command?domain=orders&id=good", "/command?domain=orders&id=retried", "/api/commands", "/api/troubleshooting",
    "/api/command?domain=orders&id=bad", "/api/command?domain=orders&id=good", "/api/stuck", "/api/rejected",
    "/effects", "/keys", "/audit", "/strays", "/undelivered", "/database", "/api/audit", "/api/failures",
    "/api/effects",
    "/api/schedules", "/api/plan?id=1", "/api/breakers", "/api/command?domain=orders&id=retried",
    "/metrics", "/api/keys", "/key?domain=orders&name=account", "/api/key?domain=orders&name=account",
    "/api/key/overrides?domain=orders&name=account", "/api/hours", "/api/workers", "/api/slots",
)  # fmt: skip
LINES = (
    "show bad --traceback --autopsy", "show bad --json", "show good", "show good --json",
    "show retried --traceback", "commands", "commands --json", "tsq list", "tsq list --json",
    "stuck --all --autopsy", "stuck --json", "rejected", "rejected --json", "schedules list --json",
    "schedules show orders nightly",
    "wait orders good", "wait orders bad", "plan show 1", "plan show 1 --json", "breakers", "undelivered --json",
)  # fmt: skip


@pytest.fixture
def settings(database: str) -> Any:
    yield Settings(database_url=database, mask=RULES)
    masking._Rules.mask = type(masking._Rules.mask)()  # the rules of a process outlive its workers


@pytest.fixture
def visit(settings: Settings) -> Any:
    server = uvicorn.Server(uvicorn.Config(create_console(settings), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield Visit(server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join(30)


def fill(settings: Settings, bus: CommandBus) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship", retry_policy=RetryPolicy(max_attempts=2, backoff_schedule=[0]))
    def ship(command: Any, ctx: Any) -> object:
        data = command.data
        if data.get("fails") == "hard":
            raise PermanentCommandError(f"no {data['login']['password']}", details={"data": data})
        if data.get("fails"):
            raise ValueError(f"{data!r} {command.headers}")
        return {"token": "tok-98765", "ok": True}

    secret = {"login": {"password": SECRETS[0]}, "card": {"number": int(SECRETS[1]), "month": 7}}
    headers = {"key": SECRETS[3]}
    bus.send("orders", "ship", secret, command_id="good", headers=headers)
    bus.send("orders", "ship", {**secret, "fails": "hard"}, command_id="bad", headers=headers)
    bus.send("orders", "ship", {**secret, "fails": "soft"}, command_id="retried", headers=headers)
    bus.schedules.create("orders", "nightly", every="1d", command_type="ship", data=secret)
    bus.key_limits.set("orders", "account", concurrency=1)
    bus.key_limits.override("orders", "account", "a-1", concurrency=2, until="1h")
    with psycopg.connect(str(settings.database_url), autocommit=True) as conn:
        conn.execute("SELECT pgmq.send('orders__commands', '{\"password\": \"hunter2secret\"}')")
    Worker(handlers, settings=settings).run(until_idle=True)
    bus.plans.preview("orders", "complete", result={"token": "tok-98765"})


def leaks(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def test_no_page_answer_line_or_log_has_a_secret(
    settings: Settings, bus: CommandBus, visit: Visit, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    with caplog.at_level(logging.DEBUG):
        fill(settings, bus)
    logged = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert "no ***" in logged
    assert leaks(logged) == []
    for path in PATHS:
        answer = visit.get(path)
        assert answer.status == 200, (path, answer.text[:500])
        assert (path, leaks(answer.text)) == (path, [])
    assert "***" in visit.get("/command?domain=orders&id=bad").text
    assert visit.get("/api/command?domain=orders&id=good").json["command"]["result"] == {
        "token": "***",
        "ok": True,
    }
    environment = {
        **os.environ,
        "COMMANDBUS_DATABASE_URL": str(settings.database_url),
        "COMMANDBUS_MASK": ",".join(RULES),
    }
    script = (
        "import sys, commandbus.cli.entry as entry\n"
        "for line in sys.argv[1:]:\n"
        "    try: entry.main(line.split())\n"
        "    except SystemExit: pass"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, *LINES], env=environment, capture_output=True, text=True, check=False,
        cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert leaks(ran.stdout + ran.stderr) == []
    assert ran.stdout.count("***") > len(LINES), ran.stderr
    record = bus.get_command("orders", "good")
    assert record is not None
    assert record.result == {"token": "tok-98765", "ok": True}, "programs get what is there"
    attempts = bus.get_attempts("orders", "retried").items
    assert leaks(str(attempts)) == [], "what is stored of a failure has no secret either"


def test_a_hidden_value_cannot_be_found_out_by_searching(
    settings: Settings, bus: CommandBus, visit: Visit
) -> None:
    secret = {
        "login": {"password": SECRETS[0]},
        "card": {"number": int(SECRETS[1])},
        "cards": [{"password": "abcd"}],
    }
    bus.send("orders", "ship", {**secret, "order_no": 17}, command_id="one")
    assert [
        item["command_id"] for item in visit.get("/api/commands", search="data.order_no=17").json["items"]
    ] == ["one"]
    for search in (
        f"data.login.password={SECRETS[0]}",
        f"data.Card.Number={SECRETS[1]}",
        "data.cards.0.password=abcd",
        f'data.login={{"password":"{SECRETS[0]}"}}',
    ):
        for path in ("/commands", "/api/commands"):
            answer = visit.get(path, search=search)
            assert (answer.status, "mask" in answer.text) == (400, True), (path, search, answer.status)
    with (
        bus_for_people(settings) as shown,
        pytest.raises(InvalidCommandError, match=r"data\.login\.password is masked"),
    ):
        shown.query_commands(data={"login.password": SECRETS[0]})
    assert len(bus.query_commands(data={"login.password": SECRETS[0]})) == 1, "programs get what is there"


def test_a_replay_of_masked_data_has_the_old_values(settings: Settings, bus: CommandBus, visit: Visit) -> None:
    fill(settings, bus)
    page = "/command?domain=orders&id=bad"
    shown = visit.get("/api" + page).json["command"]["data"]
    assert shown["login"] == {"password": "***"}
    edited = {**shown, "fails": None}
    done = visit.act("replay", page, domain="orders", id="bad", data=json.dumps(edited), cancel="yes")
    assert done.status == 303, done.text
    new_id = done.headers["location"].rpartition("=")[2]
    new, old = bus.get_command("orders", new_id), bus.get_command("orders", "bad")
    assert new is not None
    assert old is not None
    assert new.data == {**old.data, "fails": None}  # type: ignore[dict-item]
    assert (old.status, new.headers) == ("CANCELED", {"key": SECRETS[3]})
    wrong = {**edited, "other": {"password": "***"}}
    refused = visit.act("replay", page, domain="orders", id="bad", data=json.dumps(wrong))
    assert (refused.status, "data.other.password is ***" in refused.text) == (400, True)


def test_async_code_for_people_is_masked_too(settings: Settings, bus: CommandBus) -> None:
    from commandbus.bus.masked import async_bus_for_people, bus_for_people

    bus.send("orders", "ship", {"password": SECRETS[0]}, command_id="x")

    async def look() -> Any:
        async with async_bus_for_people(settings) as asked:
            return (await asked.get_command("orders", "x")).data  # type: ignore[union-attr]

    assert asyncio.run(look()) == {"password": "***"}
    assert type(bus_for_people(replace(settings, mask=()))) is CommandBus


def test_a_command_with_hidden_values_is_not_offered_as_a_copy(
    settings: Settings, bus: CommandBus, visit: Visit
) -> None:
    bus.send("orders", "ship", {"login": {"password": SECRETS[0]}}, command_id="masked")
    bus.send("orders", "ship", {"n": 1}, command_id="by-header", headers={"key": SECRETS[3]})
    bus.send("orders", "ship", {"n": 1}, command_id="plain")
    for command_id in ("masked", "by-header"):
        page = visit.get("/command", domain="orders", id=command_id).text
        assert "commandbus send" not in page
        assert "bus.send(" not in page
        assert "a copy would send <code>***</code>" in page
    assert "commandbus send orders ship" in visit.get("/command", domain="orders", id="plain").text


def test_the_state_of_a_process_hides_what_its_data_and_results_hide(
    settings: Settings, bus: CommandBus, visit: Visit
) -> None:
    bus.create_domain("processes")
    handlers = HandlerRegistry()

    @handlers.handler("orders", "first")
    def first(command: Any, ctx: Any) -> object:
        return {"token": SECRETS[2], "ok": True}

    saga = Saga("order", step("first", "orders"))
    handlers.register_process(saga)
    bus.start_process(saga, {"card": {"number": int(SECRETS[1]), "month": 7}}, process_id="p")
    Worker(handlers, settings=settings).run(until_idle=True)
    shown = visit.get("/api/process", domain="processes", id="p").json
    assert shown["state"]["first"] == {"token": "***", "ok": True}
    assert shown["state"]["card"] == {"number": "***", "month": 7}
    assert leaks(visit.get("/process", domain="processes", id="p").text) == []
    with bus_for_people(settings) as people:
        assert leaks(str(people.get_process("processes", "p"))) == []
    record = bus.get_process("processes", "p")
    assert record is not None
    assert SECRETS[2] in str(record.state), "programs get what is there"
