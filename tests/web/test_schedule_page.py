"""The timeline of schedules: next firings, missed ones, pause and run now."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from commandbus import CommandBus, InvalidCommandError
from commandbus.flow.schedules.timeline import MOST_FIRINGS, MOST_MISSED
from commandbus.web.access import Access
from commandbus.web.charts import WIDTH, firings_chart
from web.conftest import Serve


def test_next_firings_and_missed_ones(bus: CommandBus, database: str, serve: Serve) -> None:
    bus.schedules.create("orders", "nightly", cron="30 2 * * *")
    bus.schedules.create("orders", "often", every="1m")
    bus.schedules.create("orders", "late", every="1h")
    bus.schedules.create("orders", "stopped", every="1h")
    bus.schedules.pause("orders", "stopped", operator="ann", reason="<script>")
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("UPDATE commandbus.schedule SET next_at = now() - interval '150 min' WHERE name = 'late'")
        conn.execute("UPDATE commandbus.schedule SET paused_at = now() - interval '2 days' WHERE name = 'stopped'")
    found = bus.schedules.timeline("orders")
    by_name = {item.schedule.name: item for item in found.schedules}
    assert found.end - found.start == timedelta(days=1)
    assert len(by_name["nightly"].firings) == 1
    assert (len(by_name["often"].firings), by_name["often"].has_more) == (MOST_FIRINGS, True)
    assert len(by_name["late"].missed) in (2, 3)
    assert len(by_name["stopped"].missed) == MOST_MISSED
    assert len(by_name["stopped"].firings) == MOST_FIRINGS, "those that a resume would make"
    assert by_name["often"].missed == by_name["nightly"].missed == []
    chart = firings_chart(found)
    assert {row.name for row in chart.rows[:2]} == {"orders/late", "orders/stopped"}
    assert all(0 <= dot.x <= WIDTH for row in chart.rows for dot in row.dots)
    visit = serve()
    page = visit.get("/schedules").text
    assert "no worker makes its firings" in page
    assert "while it is paused by ann" in page
    assert page.count('class="firing') == sum(len(row.dots) for row in chart.rows)
    assert "<script>" not in page.replace('<script src="', "")
    document = visit.get("/api/schedules/timeline").json
    assert [item["schedule"]["name"] for item in document["schedules"]] == ["late", "nightly", "often", "stopped"]


def test_pause_and_run_now(bus: CommandBus, serve: Serve) -> None:
    bus.schedules.create("orders", "nightly", cron="30 2 * * *", command_type="ship")
    visit = serve()
    assert visit.act("run-schedule", "/schedules", domain="orders", name="nightly").status == 200
    assert [item.command_type for item in bus.query_commands(domain="orders")] == ["ship"]
    visit.act("pause-schedule", "/schedules", domain="orders", name="nightly", reason="not today")
    assert "firing-paused" in visit.get("/schedules").text
    visit.act("resume-schedule", "/schedules", domain="orders", name="nightly")
    assert "firing-paused" not in visit.get("/schedules").text


@pytest.mark.parametrize("within", [0, -5, "367d", "soon"])
def test_a_span_that_makes_no_sense_is_named(bus: CommandBus, within: object) -> None:
    with pytest.raises((InvalidCommandError, ValueError), match="within"):
        bus.schedules.timeline(within=within)  # type: ignore[arg-type]


def test_an_operator_creates_a_schedule_and_its_page_says_who(bus: CommandBus, serve: Serve) -> None:
    ann = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "ann"})
    made = ann.act(
        "create-schedule",
        "/schedules",
        domain="orders",
        name="nightly",
        cron="0 3 * * *",
        timezone="Europe/Berlin",
        data='{"n": 7}',
        command_type="ship",
        missed="skip",
        overlap="queue",
        max_attempts="3",
        reason="quarter end",
    )
    assert made.status == 303
    found = bus.schedules.get("orders", "nightly")
    assert found is not None
    assert (found.cron, found.timezone, found.data, found.missed) == (
        "0 3 * * *",
        "Europe/Berlin",
        {"n": 7},
        "skip",
    )
    page = ann.get(made.headers["location"]).text
    assert "created at run time" in page
    assert "create by ann: quarter end" in page
    document = ann.get("/api/schedule", domain="orders", name="nightly").json
    assert document["schedule"]["overlap"] == "queue"
    assert len(document["next_firings"]) == 10
    assert ann.get("/schedule", domain="orders", name="none").status == 404


def test_a_schedule_that_cannot_be_so_is_refused_with_the_field(bus: CommandBus, serve: Serve) -> None:
    ann = serve(Access(user_header="X-User", operators={"ann"}), headers={"X-User": "ann"})
    whole = {"domain": "orders", "name": "n", "every": "5m"}
    for wrong, word in (
        ({"every": "soon"}, "every"),
        ({"cron": "0 3 * * *"}, "cron"),
        ({"data": "{"}, "data"),
        ({"missed": "perhaps"}, "missed"),
        ({"overlap": "x"}, "overlap"),
        ({"max_attempts": "-1"}, "max_attempts"),
        ({"replace": "1"}, "replace"),
        ({"headers": "[1]"}, "headers"),
    ):
        answer = ann.act("create-schedule", "/schedules", **{**whole, **wrong})
        assert answer.status == 400, (wrong, answer.text)
        assert word in answer.text
    assert bus.schedules.list().items == []
