"""The console as its visitors meet it: real HTTP, a real database, real commands."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import psycopg

from commandbus import (
    CommandBus,
    HandlerRegistry,
    NewCommand,
    PermanentCommandError,
    Saga,
    Settings,
    Worker,
    step,
)
from commandbus.web.access import Access, Visitor
from commandbus.web.actions import ACTIONS
from commandbus.web.app import create_console
from support.consoles import served
from support.waiting import until, within
from web.conftest import MARK, Serve, Visit

HOSTILE_ID = '<script>alert("1")</script>\u202e'
HOSTILE = HOSTILE_ID + "\x1b[31m"
PAGES = [
    "/", "/commands", "/troubleshooting", "/stuck", "/limits", "/schedules", "/batches", "/processes", "/workers",
    "/domains", "/rejected", "/plans",
]  # fmt: skip


def settled(database: str, bus: CommandBus) -> None:
    """Commands of every kind, settled by a worker."""
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> object:
        if "bad" in command.data:
            raise PermanentCommandError(command.data["bad"])
        return {"shipped": command.data}

    handlers.register_process(Saga("order", step("ship", "orders", data=lambda state: {"n": 1})))
    bus.create_domain("processes")
    bus.send("orders", "ship", {"n": 1}, command_id="good", correlation_id="all")
    bus.send("orders", "ship", {"bad": HOSTILE}, command_id=HOSTILE_ID, correlation_id="all")
    bus.send("orders", "ship", {"bad": "no address"}, command_id="bad")
    bus.create_batch("orders", [NewCommand("ship", {"n": n}) for n in range(3)], batch_id="three")
    bus.start_process(Saga("order", step("ship", "orders")), {}, process_id="p-1")
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("SELECT pgmq.send('orders__commands', '{\"no\": \"command\"}')")
    Worker(handlers, database_url=database).run(until_idle=True)


def test_every_page_shows_real_data_and_hostile_text_as_text(database: str, bus: CommandBus, serve: Serve) -> None:
    settled(database, bus)
    bus.pause("orders", "later", operator="ann", reason=HOSTILE)
    visit = serve()
    for path in PAGES:
        answer = visit.get(path)
        assert answer.status == 200, path
        assert "<script>alert" not in answer.text
        assert "\u202e" not in answer.text
        assert "\x1b" not in answer.text
        assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "2 commands of orders/ship are in the troubleshooting queue" in visit.get("/").text
    assert "three" in visit.get("/batches").text
    assert "3 of 3" in visit.get("/batch", domain="orders", id="three").text
    assert "COMPLETED" in visit.get("/process", domain="processes", id="p-1").text.upper()
    shown = visit.get("/command", domain="orders", id=HOSTILE_ID).text
    assert "&lt;script&gt;alert" in shown
    assert "\\u202e" in shown


def test_the_search_box_finds_commands_batches_and_processes(database: str, bus: CommandBus, serve: Serve) -> None:
    settled(database, bus)
    visit = serve()
    pages = {"good": "/command?", f"'{HOSTILE_ID}'": "/command?", "three": "/batch?", "p-1": "/process?"}
    for id_, target in pages.items():
        found = visit.get("/commands", search=id_)
        assert (found.status, found.headers["location"][: len(target)]) == (303, target)
        assert visit.get(found.headers["location"]).status == 200
    assert "Nothing has the id nobody" in visit.get("/commands", search="nobody").text
    for search in ("'NO address'", "no address", "error:address", "error:address type:ship domain:orders"):
        assert ">bad</a>" in visit.get("/commands", search=search).text
    assert ">bad</a>" not in visit.get("/commands", search="error:address type:other").text
    assert visit.get("/commands", search="all").headers["location"].startswith("/commands?search=correlation")
    bus.create_domain("twins")
    bus.send("twins", "ship", {}, command_id="good")
    assert "2 things have the id good" in visit.get("/commands", search="good").text
    assert visit.get("/commands", search="good domain:twins").status == 303
    assert {(item["kind"], item["domain"]) for item in visit.get("/api/find", id="good").json} == {
        ("command", "orders"),
        ("command", "twins"),
    }
    rows = re.findall(r'<th scope="row">', visit.get("/commands", search="correlation:all status:tsq").text)
    assert len(rows) == 1
    first = visit.get("/commands").text
    assert "The next page" not in first
    bus.send_many("orders", [NewCommand("ship", {}) for _ in range(60)])
    link = re.search(r'rel="next" href="([^"]+)"', visit.get("/commands", search="domain:orders").text)
    assert link is not None
    assert visit.get(link[1].replace("&amp;", "&")).status == 200


def test_an_operator_acts_and_the_trail_names_them(database: str, bus: CommandBus, serve: Serve) -> None:
    settled(database, bus)
    visit = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "ann"})
    page = "/command?domain=orders&id=bad"
    done = visit.act("retry", page, domain="orders", id="bad", reason="address added")
    assert "orders bad is in its queue again" in done.text
    events = [(entry.event, entry.details) for entry in bus.get_audit_trail("orders", "bad")]
    assert ("OPERATOR_RETRY", {"operator": "ann", "reason": "address added"}) in events
    again = visit.act("retry", "/domains", domain="orders", id="bad")
    assert again.status == 409
    hostile = visit.act("complete", "/domains", domain="orders", id=HOSTILE_ID, result='{"by": "hand"}')
    assert hostile.status == 200
    record = bus.get_command("orders", HOSTILE_ID)
    assert record is not None
    assert (record.status, record.result) == ("COMPLETED", {"by": "hand"})
    assert visit.act("complete", "/domains", domain="orders", id="bad", result="{").status == 400
    assert visit.act("cancel", "/domains", domain="orders").status == 400
    assert visit.act("explode", "/domains").status == 404


def test_a_reader_looks_and_changes_nothing(bus: CommandBus, serve: Serve) -> None:
    visit = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "bob"})
    assert '<form class="action"' not in visit.get("/domains").text
    assert visit.post("/actions/pause", {"domain": "orders"}).status == 403
    assert visit.post_json("/api/actions/pause", {"fields": {"domain": "orders"}}).status == 403
    assert bus.pauses().items == []
    assert Visit(visit.port).get("/").status == 403  # without the proxy


def test_a_form_of_another_site_changes_nothing(bus: CommandBus, serve: Serve) -> None:
    visit = serve()
    mark = until(lambda: MARK.search(visit.get("/domains").text), what="the page has its forms")
    fields = {"domain": "orders", "mark": mark[1]}
    for answer in (
        visit.post("/actions/pause", {"domain": "orders"}),
        visit.post("/actions/pause", fields, Origin="http://evil.example"),
        visit.post("/actions/pause", fields, Sec_Fetch_Site="cross-site"),
        visit.post("/actions/pause", fields, Host="evil.example"),
    ):
        assert answer.status == 403
    assert bus.pauses().items == []
    assert visit.post("/actions/pause", fields).status == 200
    assert [item.domain for item in bus.pauses()] == ["orders"]
    assert "orders goes on" in visit.act("resume", "/domains", domain="orders").text


def test_a_token_signs_in_and_works_as_a_bearer(bus: CommandBus, serve: Serve) -> None:
    visit = serve(Access(tokens={"t" * 20: Visitor("ann", "operator")}))
    assert (visit.get("/").status, visit.get("/").headers["location"]) == (303, "/sign-in")
    assert visit.get("/api/domains").status == 401
    assert visit.post("/sign-in", {"token": "wrong"}).status == 403
    elsewhere = visit.post("/sign-in", {"token": "t" * 20}, Sec_Fetch_Site="cross-site")
    assert (elsewhere.status, "set-cookie" in elsewhere.headers) == (403, False)
    entered = visit.post("/sign-in", {"token": "t" * 20})
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    browser = Visit(visit.port, Cookie=cookie.partition(";")[0])
    assert "ann (operator)" in browser.get("/").text
    program = Visit(visit.port, Authorization=f"Bearer {'t' * 20}")
    done = program.post_json("/api/actions/pause", {"fields": {"domain": "orders"}, "reason": "by a program"})
    assert done.json == {"done": "orders is paused"}
    assert [(item.operator, item.reason) for item in bus.pauses()] == [("ann", "by a program")]


def test_a_field_that_an_action_does_not_have_is_refused(bus: CommandBus, serve: Serve) -> None:
    """A program that misspells a field would else do more than it wanted: pause a domain, not one of its types."""
    access = Access(tokens={"t" * 20: Visitor("ann", "operator")})
    program = serve(access, headers={"Authorization": f"Bearer {'t' * 20}"})
    wrong = program.post_json("/api/actions/pause", {"fields": {"domain": "orders", "type": "ship"}})
    assert wrong.status == 400
    assert wrong.json == {"error": "there is no field 'type'; there are domain, command_type, reason"}
    for document in (
        {"domain": "orders"},
        {"fields": {"domain": "orders"}, "command_type": "ship"},
        {"fields": {"domain": "orders"}, "\ud800": "half a character"},
        {"fields": {"domain": "orders", "\ud800": "half a character"}},
        {"fields": {"domain": "orders"}, "x" * 100_000: "a long name"},
    ):
        refused = program.post_json("/api/actions/pause", document)
        assert (refused.status in {400, 422}, list(refused.json)) == (True, ["error"]), refused.text[:500]
        assert len(refused.text) < 1_000
    assert program.post_json("/api/rehearse", {"domain": "orders", "id": "a", "app": "b"}).status == 422
    assert not bus.pauses().items
    given = {"domain": "orders", "command_type": "ship", "reason": "as every other field"}
    assert program.post_json("/api/actions/pause", {"fields": given}).json == {"done": "orders/ship is paused"}
    assert [item.reason for item in bus.pauses()] == ["as every other field"]


def test_nobody_else_signs_a_visitor_out(serve: Serve) -> None:
    visit = serve(Access(tokens={"t" * 20: Visitor("ann", "operator")}))
    entered = visit.post("/sign-in", {"token": "t" * 20})
    visit.headers["Cookie"] = entered.headers["set-cookie"].partition(";")[0]
    assert 'action="/sign-out"' in visit.get("/domains").text
    assert visit.post("/sign-out", {}).status == 403, "no mark: not a form of this console"
    mark = visit.mark("/domains")
    assert visit.post("/sign-out", {"mark": mark}, Sec_Fetch_Site="cross-site").status == 403
    gone = visit.post("/sign-out", {"mark": mark})
    assert (gone.status, gone.headers["location"]) == (303, "/sign-in")
    assert "Max-Age=0" in gone.headers["set-cookie"]


def test_the_api_describes_itself_and_gives_what_the_pages_show(
    database: str, bus: CommandBus, serve: Serve
) -> None:
    settled(database, bus)
    visit = serve()
    described = visit.get("/api/openapi.json").json["paths"]
    needed = {
        "/api/command",
        "/api/find",
        "/api/ledger",
        "/api/limit",
        "/api/key",
        "/api/key/overrides",
        "/api/key/actions",
        "/api/limit/estimate",
        "/api/prune",
        "/api/schedule",
        "/api/breaker/actions",
        "/api/stack",
        "/api/batch",
        "/api/batch/commands",
        "/api/batch/actions",
        "/api/process",
        "/api/process/graph",
        "/api/plan",
        "/api/rehearse",
        *(f"/api/actions/{name}" for name in ACTIONS),
    }
    for path in described.keys() - needed:
        answer = visit.get(path)
        assert answer.status == 200, path
        assert answer.json is not None
    command = visit.get("/api/command", domain="orders", id="bad").json
    assert command["command"]["status"] == "IN_TROUBLESHOOTING_QUEUE"
    assert command["attempts"][0]["error"] == "no address"
    assert visit.get("/api/batch", domain="orders", id="three").json["completed"] == 3
    assert visit.get("/api/process", domain="processes", id="p-1").json["steps"][0]["name"] == "ship"
    assert visit.get("/api/command", domain="orders", id="nobody").status == 404
    assert visit.get("/api/commands", limit=9999).status == 422
    assert visit.get("/api/commands", cursor="nonsense").status == 400
    assert visit.get("/api/commands", search="status:nonsense").status == 400


def test_the_first_page_changes_while_it_is_open(bus: CommandBus, serve: Serve) -> None:
    visit = serve()
    connection = HTTPConnection("127.0.0.1", visit.port, timeout=30)
    connection.request("GET", "/now/events")
    stream = connection.getresponse()
    assert stream.headers["content-type"].startswith("text/event-stream")

    def says(text: str) -> bool:
        return text in stream.readline().decode()

    within(20, lambda: says("Nothing needs you."))
    bus.pause("orders", operator="ann")
    within(20, lambda: says("orders is paused: all of it"))
    connection.close()


def test_a_locked_table_is_an_answer_after_two_seconds_and_then_all_is_well(
    database: str, bus: CommandBus, serve: Serve
) -> None:
    visit = serve()
    assert visit.get("/commands").status == 200
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE commandbus.command IN ACCESS EXCLUSIVE MODE")
        answer = visit.get("/commands")
        assert answer.status == 503
        assert "does not answer" in answer.text or "took too long" in answer.text
        assert visit.get("/health/live").json == {"status": "alive"}
    assert visit.get("/commands").status == 200
    assert visit.get("/health/ready").json == {"status": "ready"}


def test_a_locked_command_holds_up_no_other_operator(database: str, bus: CommandBus, serve: Serve) -> None:
    settled(database, bus)
    visit = serve()
    mark = visit.mark("/domains")
    with psycopg.connect(database) as other, ThreadPoolExecutor(1) as aside:
        other.execute("SELECT FROM commandbus.tsq FOR UPDATE")
        begun = time.monotonic()
        waits = aside.submit(visit.post, "/actions/retry", {"mark": mark, "domain": "orders", "id": "bad"})
        paused = visit.post("/actions/pause", {"mark": mark, "domain": "orders"})
        assert "orders is paused" in paused.text
        answer = waits.result()
        assert time.monotonic() - begun < 15  # two seconds on an idle machine; it was a minute
        assert answer.status == 503
        assert "Another session has locked what this needs, so nothing was done" in answer.text
    assert visit.act("retry", "/domains", domain="orders", id="bad").status == 200


def test_fields_that_no_database_can_hold_are_refused(bus: CommandBus, serve: Serve) -> None:
    visit = serve()
    mark = visit.mark("/domains")
    deep = "[" * 20_000
    for name, fields in {
        "replay": {"domain": "orders", "id": "x", "data": deep},
        "complete": {"domain": "orders", "id": "x", "result": deep},
        "delete-key-limit": {"domain": "orders", "name": "\ud800"},
    }.items():
        answer = visit.post_json(f"/api/actions/{name}", {"fields": fields}, x_mark=mark)
        assert answer.status == 400, (name, answer.text)
        assert re.search("nested too deeply|half of a character", answer.json["error"])


def test_what_cannot_be_read_is_not_called_not_found(bus: CommandBus, serve: Serve) -> None:
    answer = serve().get("/commands", search="status:lost")
    assert answer.status == 400
    assert "<h1>This cannot be shown</h1>" in answer.text
    assert "status:lost is none of" in answer.text


def test_addresses_that_make_no_sense(bus: CommandBus, serve: Serve) -> None:
    visit = serve()
    for path in ("/command", "/command?domain=orders", "/batch?domain=x%00&id=1", "/process?id=%ff", "/nowhere"):
        answer = visit.get(path)
        assert answer.status in (400, 404, 422), path
        assert "Traceback" not in answer.text


def test_a_command_shows_its_unique_key(bus: CommandBus, serve: Serve) -> None:
    key = '<script>alert("1")</script>'
    sent = bus.send("orders", "ship", unique=key, debounce="5s")
    visit = serve()
    page = visit.get("/command", domain="orders", id=sent.command_id).text
    assert "Unique key" in page
    assert "debounced for 5s, at most 50s" in page
    assert key not in page
    found = visit.get("/api/command", domain="orders", id=sent.command_id).json["command"]["unique"]
    assert (found["key"], found["debounce_seconds"], found["has_key"]) == (key, 5.0, True)


def test_a_fault_of_the_console_is_an_answer_like_others(database: str) -> None:
    app = create_console(Settings(database_url=database))

    async def broken() -> None:
        raise RuntimeError("a fault")

    app.add_api_route("/broken", broken)
    app.add_api_route("/api/broken", broken)
    with served(app) as port:
        visit = Visit(port)
        page, document = visit.get("/broken"), visit.get("/api/broken")
        after = visit.get("/commands")
    for answer in (page, document):
        assert answer.status == 500
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert "This is a fault of the console" in answer.text
        assert "RuntimeError" not in answer.text  # what went wrong is for the log
    assert list(document.json) == ["error"]
    assert after.status == 200
