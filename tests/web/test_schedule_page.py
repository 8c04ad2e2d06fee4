"""The timeline of schedules: next firings, missed ones, pause and run now."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from commandbus import CommandBus, InvalidCommandError
from commandbus.flow.schedules.timeline import MOST_FIRINGS, MOST_MISSED
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
