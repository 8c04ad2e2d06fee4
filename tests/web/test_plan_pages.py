"""Plans in the console: preview, start, progress and stop, and two operators at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from commandbus import CommandBus, HandlerRegistry, PermanentCommandError, Worker
from commandbus.web.access import Access
from web.conftest import Serve, Visit

HOSTILE = "<script>alert(1)</script>\u202e"
PAGE = "/troubleshooting?domain=orders&command_type=ship"


def trouble(database: str, bus: CommandBus, *ids: str) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> object:
        raise PermanentCommandError(HOSTILE, code="BROKEN")

    for name in ids:
        bus.send("orders", "ship", {}, command_id=name)
    Worker(handlers, database_url=database).run(until_idle=True)


def preview(visit: Visit, action: str = "retry", **fields: str) -> str:
    """Press the button on the page; the page of the plan."""
    answer = visit.act("preview-plan", PAGE, domain="orders", command_type="ship", action=action, **fields)
    assert answer.status == 303, answer.text
    return answer.headers["location"]


def test_an_operator_previews_starts_watches_and_stops(database: str, bus: CommandBus, serve: Serve) -> None:
    trouble(database, bus, "a", HOSTILE)
    visit = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "ann"})
    assert "Do something about all 2 of them" in visit.get(PAGE).text
    page = preview(visit, over="10m", reason=HOSTILE)
    shown = visit.get(page).text
    assert "evenly over 10m (about 0.2 a minute)" in shown
    assert "Retry 2" in shown
    assert "No worker of orders runs" not in shown
    assert "<script>alert" not in shown
    assert "\u202e" not in shown
    (plan,) = bus.plans.list()
    assert (plan.previewed_by, plan.reason, bus.status("orders")[0].in_tsq) == ("ann", HOSTILE, 2)
    assert visit.act("start-plan", page, plan=str(plan.id)).headers["location"] == page
    running = visit.get(page).text
    assert 'data-refresh="1"' in running
    assert "No worker of orders runs. The plan goes on when one does." in running
    assert "0 of 2 retried, 2 left" in running
    assert visit.act("stop-plan", page, plan=str(plan.id)).status == 303
    ended = visit.get(page).text
    assert "stopped by ann" in ended
    assert 'data-refresh="1"' not in ended
    assert '<form class="action"' not in ended
    assert "stopped" in visit.get("/plans").text
    found = visit.get("/api/plan", id=plan.id).json
    assert (found["plan"]["state"], found["progress"]) == ("STOPPED", "0 of 2 retried, 2 left")
    assert [item["command_id"] for item in found["commands"]["items"]] == ["a", HOSTILE]
    assert visit.get("/api/plans").json["items"][0]["id"] == plan.id


def test_a_changed_set_and_bad_input_are_refused(database: str, bus: CommandBus, serve: Serve) -> None:
    trouble(database, bus, "a", "b")
    visit = serve()
    page = preview(visit, "cancel")
    bus.commands.operator_cancel("orders", "a")
    trouble(database, bus, "c")
    refused = visit.act("start-plan", page, plan=page.rpartition("=")[2])
    assert refused.status == 409
    assert "1 came and 1 went of 2 commands" in refused.text
    for fields in ({"action": "explode"}, {"action": "retry", "over": "soon"}, {"action": "retry", "result": "1"}):
        assert visit.act("preview-plan", PAGE, domain="orders", **fields).status == 400
    assert visit.act("preview-plan", PAGE, domain="orders", action="retry", command_type="x").status == 409
    assert visit.act("start-plan", page, plan="99").status == 404
    assert visit.act("start-plan", page, plan="x").status == 400
    assert visit.get("/plan", id="99").status == 404
    assert visit.get("/plan", id="x").status == 400
    assert visit.get("/api/plan", id="x").status == 422
    assert visit.get("/api/plan", id="99").status == 404


def test_a_reader_sees_a_plan_and_cannot_touch_it(database: str, bus: CommandBus, serve: Serve) -> None:
    trouble(database, bus, "a")
    plan = bus.plans.preview("orders", "cancel")
    visit = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "bob"})
    shown = visit.get("/plan", id=plan.id)
    assert shown.status == 200
    assert '<form class="action"' not in shown.text
    assert visit.post("/actions/start-plan", {"plan": str(plan.id)}).status == 403
    assert bus.plans.get(plan.id).state == "PREVIEWED"


def test_of_two_operators_at_once_one_starts_the_plan(database: str, bus: CommandBus, serve: Serve) -> None:
    trouble(database, bus, "a", "b", "c")
    visit = serve()
    page = preview(visit)
    with ThreadPoolExecutor(4) as operators:
        answers = list(operators.map(lambda _: visit.act("start-plan", page, plan=page[-1]), range(4)))
    assert sorted(answer.status for answer in answers) == [303, 409, 409, 409]


def test_a_plan_of_what_was_selected(database: str, bus: CommandBus, serve: Serve) -> None:
    trouble(database, bus, "a", HOSTILE, "c")
    bus.create_domain("billing")
    visit = serve()
    shown = visit.get("/troubleshooting").text
    assert shown.count('name="chosen"') == 3
    assert 'value="orders a"' in shown
    nothing = visit.act("preview-plan", "/troubleshooting", action="retry")
    assert nothing.status == 400
    assert "select at least one command" in nothing.text
    both = visit.act("preview-plan", "/troubleshooting", action="retry", chosen="orders a\nbilling b")
    assert "a plan is about one domain" in both.text
    fields = [("mark", visit.mark("/troubleshooting")), ("action", "cancel"), ("reason", "old")]
    made = visit.post(
        "/actions/preview-plan", [*fields, ("chosen", "orders a"), ("chosen", f"orders {quote(HOSTILE)}")]
    )
    assert made.status == 303, made.text
    (plan,) = bus.plans.list()
    assert (plan.total, plan.filter.command_ids, plan.reason) == (2, ("a", HOSTILE), "old")
    page = made.headers["location"]
    assert "Cancel 2" in visit.get(page).text
    bus.commands.operator_retry("orders", "a")
    refused = visit.act("start-plan", page, plan=str(plan.id))
    assert refused.status == 409
    assert "0 came and 1 went of 2 commands" in refused.text
    again = visit.post("/actions/preview-plan", [*fields, ("chosen", f"orders {quote(HOSTILE)}")]).headers[
        "location"
    ]
    assert visit.act("start-plan", again, plan=again.rpartition("=")[2]).status == 303
    assert bus.status("orders")[0].in_tsq == 2, "workers carry it out; `c` was not selected"


def test_a_form_with_too_many_fields_is_refused(bus: CommandBus, serve: Serve) -> None:
    visit = serve()
    answer = visit.post("/actions/preview-plan", [("chosen", f"orders {n}") for n in range(400)])
    assert answer.status == 409
    assert "more than 300 fields" in answer.text
