"""Keys, effects, signals, priorities and stray replies in the console, and what operators can do about them."""

from __future__ import annotations

from typing import Any

import psycopg

from commandbus import CommandBus, HandlerRegistry, PermanentCommandError, Saga, Worker, wait_for
from commandbus.web.access import Access
from web.conftest import Serve

HOSTILE = '<script>alert("1")</script>'
APPROVED = Saga("approved", wait_for("approval"))


def worked(database: str, bus: CommandBus) -> None:
    """A key with a line, a call that may have been made, and a process that waits."""
    handlers = HandlerRegistry()

    @handlers.handler("orders", "pay")
    def pay(command: Any, ctx: Any) -> None:
        with ctx.effect(HOSTILE):
            raise PermanentCommandError("the line broke")

    handlers.register_process(APPROVED)
    bus.create_domain("processes")
    bus.send("orders", "pay", {}, command_id="paid")
    bus.start_process(APPROVED, {}, process_id="p")
    Worker(handlers, database_url=database).run(until_idle=True)
    bus.key_limits.set("orders", "tenant", concurrency=1, ordered=True)
    for number in range(3):
        bus.send("orders", "read", {}, command_id=f"k{number}", key_limit="tenant", key=HOSTILE)


def test_keys_and_their_lines(database: str, bus: CommandBus, serve: Serve) -> None:
    worked(database, bus)
    visit = serve()
    assert ">tenant</a>" in visit.get("/keys").text
    shown = visit.get("/key", domain="orders", name="tenant")
    assert "in the order of sending" in shown.text
    assert "&lt;script&gt;" in shown.text
    assert "<script>alert" not in shown.text
    assert [item["name"] for item in visit.get("/api/keys").json] == ["tenant"]
    (line,) = visit.get("/api/key", domain="orders", name="tenant").json
    assert (line["key"], line["concurrency"], line["released"] + line["waiting"]) == (HOSTILE, 1, 3)
    for path in ("/key", "/api/key"):
        unknown = visit.get(path, domain="orders", name="nobody")
        assert unknown.status == 404
        assert "no key limit" in unknown.text


def test_an_operator_says_how_an_effect_ended(database: str, bus: CommandBus, serve: Serve) -> None:
    worked(database, bus)
    visit = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "ann"})
    shown = visit.get("/effects").text
    assert "&lt;script&gt;" in shown
    assert "<script>alert" not in shown
    assert [item["command_id"] for item in visit.get("/api/effects").json["items"]] == ["paid"]
    fields = {"domain": "orders", "id": "paid", "effect": HOSTILE}
    for wrong in ({"done": "perhaps"}, {"done": "no", "receipt": "1"}, {"done": "yes", "receipt": "{"}):
        assert visit.act("resolve-effect", "/effects", **fields, **wrong).status == 400
    done = visit.act("resolve-effect", "/command?domain=orders&id=paid", **fields, done="yes", receipt='"r-1"')
    assert "was made" in done.text
    assert "No effect is open" in visit.get("/effects").text
    events = [(entry.event, entry.details.get("operator")) for entry in bus.get_audit_trail("orders", "paid")]
    assert any(operator == "ann" for _, operator in events), events


def test_an_operator_sends_a_signal_and_changes_a_priority(database: str, bus: CommandBus, serve: Serve) -> None:
    worked(database, bus)
    visit = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "ann"})
    page = "/process?domain=processes&id=p"
    for expected in ("was sent", "had been sent already"):
        sent = visit.act(
            "signal", page, domain="processes", id="p", name="approval", data='{"a": 1}', signal_id="s"
        )
        assert expected in sent.text
    record = bus.get_process("processes", "p")
    assert record is not None
    assert [(signal.name, signal.data, signal.by) for signal in record.signals] == [("approval", {"a": 1}, "ann")]
    assert visit.act("signal", page, domain="processes", id="p", name="approval", data="{").status == 400

    page = "/command?domain=orders&id=k2"
    done = visit.act("set-priority", page, domain="orders", id="k2", priority="high")
    assert "has high priority now (it had normal)" in done.text
    assert visit.act("set-priority", page, domain="orders", id="k2", priority="highest").status == 400
    changed = bus.get_command("orders", "k2")
    assert changed is not None
    assert changed.priority == "high"


def test_a_breaker_is_reset(bus: CommandBus, serve: Serve) -> None:
    bus.open_breaker("orders", "ship", operator="ann", reason="down")
    visit = serve()
    page = "/breaker?name=orders%2Fship"
    done = visit.act("reset-breaker", page, domain="orders", command_type="ship")
    assert "is closed, and its counts are cleared" in done.text
    assert [item.state for item in bus.breakers() if item.name == "orders/ship"] in ([], ["CLOSED"])


def test_replies_that_went_nowhere(database: str, bus: CommandBus, serve: Serve) -> None:
    worked(database, bus)
    bus.send("processes", "approved", {"event": HOSTILE, "process_id": "p"}, command_id="stray")
    handlers = HandlerRegistry()
    handlers.register_process(APPROVED)
    Worker(handlers, database_url=database).run(until_idle=True)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO commandbus.undelivered_reply (queue, message, reason) VALUES ('gone', %s, 'no queue')",
            [f'{{"text": "{HOSTILE.replace(chr(34), chr(39))}"}}'],
        )
    visit = serve()
    (stray,) = bus.stray_replies()
    assert stray.reason.startswith("there is no process")
    for path, expected in (("/strays", "there is no process"), ("/undelivered", "no queue")):
        shown = visit.get(path)
        assert shown.status == 200
        assert expected in shown.text
        assert "<script>alert" not in shown.text
        assert expected in visit.get(f"/api{path}").text
