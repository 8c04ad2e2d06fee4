"""Limits and breakers in /metrics: read with Prometheus' own parser, and fed by a real supervisor's look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
from prometheus_client.parser import text_string_to_metric_families

from commandbus import CommandBus, Limit, Settings
from commandbus.flow.breakers.breaker import Bad, report
from commandbus.flow.commands.claim import claim, put_right
from commandbus.flow.limits.metrics import BreakerFigures, FleetFigures, LimitFigures, ScheduleFigures, figures
from commandbus.flow.limits.permits import answer
from commandbus.model.breaker import Breaker
from commandbus.model.command import NewCommand
from commandbus.model.limit_state import ApiAnswer
from commandbus.supervisor.coroner import CoronerLook
from commandbus.supervisor.view import View, metrics
from support.supervised import Supervised
from support.waiting import until

Supervise = Callable[..., Supervised]
HANDLERS = """
import time
from pathlib import Path
from commandbus import HandlerRegistry, Limit

handlers = HandlerRegistry()

@handlers.handler("orders", "page", limits=[Limit("docai", concurrency=2)], timeout=0)
def page(command, ctx):
    while not Path("go").exists():
        time.sleep(0.02)
"""


def parsed(text: str) -> dict[tuple[str, str], float]:
    """(name, the labels' values) → value."""
    return {
        (sample.name, "/".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_limit(text: str, name: str = "docai") -> dict[str, float]:
    prefix = "commandbus_limit_"
    return {key.removeprefix(prefix): value for (key, label), value in parsed(text).items()
            if key.startswith(prefix) and label == name}  # fmt: skip


def test_every_figure_has_its_metric() -> None:
    docai = LimitFigures("docai", 5, 3, 17, 2, 12.5, True, True, 100, 4, 40, 61.25)
    free = replace(docai, name="free", permits=None, breaker_open=False, is_degraded=False)
    breakers = {("orders", "ship"): BreakerFigures(True, 5, 212), ("orders", "bill"): BreakerFigures(False, 1, 0)}
    shared = FleetFigures((docai, free), breakers, {("orders", "nightly"): ScheduleFigures(7.5, 12, 3)})
    text = metrics(View(1.0, "RUNNING", look=CoronerLook(1.0, figures=shared)))
    assert of_limit(text) == {
        "permits": 5, "in_use": 3, "parked": 17, "callers": 2, "backoff_seconds": 12.5, "breaker_open": 1,
        "degraded": 1, "granted_total": 100, "rate_limited_total": 4, "waits_total": 40,
        "wait_seconds_total": 61.25,
    }  # fmt: skip
    assert "permits" not in of_limit(text, "free"), "any number may be in use"
    assert (of_limit(text, "free")["breaker_open"], of_limit(text, "free")["degraded"]) == (0, 0)
    found = parsed(text)
    assert found["commandbus_breaker_open", "orders/ship"] == 1
    assert found["commandbus_breaker_open", "orders/bill"] == 0
    assert found["commandbus_breaker_stuck", "orders/ship"] == 5
    assert found["commandbus_breaker_parked", "orders/ship"] == 212
    assert found["commandbus_schedule_late_seconds", "orders/nightly"] == 7.5
    assert found["commandbus_schedule_fired_total", "orders/nightly"] == 12
    assert found["commandbus_schedule_skipped_total", "orders/nightly"] == 3
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert kinds["commandbus_limit_in_use"] == "gauge"
    assert kinds["commandbus_limit_granted"] == "counter"


def test_nothing_is_said_of_limits_that_are_not_there() -> None:
    text = metrics(View(1.0, "RUNNING"))
    assert of_limit(text) == {}
    assert "# TYPE commandbus_limit_in_use gauge" in text


def test_the_figures_are_those_of_the_database(bus: CommandBus, db: psycopg.Connection[Any]) -> None:
    bus.declare_limit(Limit("docai", concurrency=2, breaker_failures=2))
    bus.declare_limit(Limit("other", rate="5/s"))
    with bus.limit("docai"):
        (docai, other) = bus.run(figures(["orders"])).limits
    assert (docai.permits, docai.in_use, docai.granted, docai.is_degraded) == (2, 1, 1, False)
    assert (other.permits, other.in_use) == (None, 0)
    until(lambda: bus.run(figures(["orders"])).limits[0].in_use == 0)  # its good answer comes before the bad ones
    for _ in range(2):
        db.execute("UPDATE commandbus.limits SET until = NULL")
        bus.run(answer("docai", None, ApiAnswer.RATE_LIMITED, gives=False, reason="429", retry_after=500.0))
    docai = bus.run(figures(["orders"])).limits[0]
    assert docai.rate_limited == 2
    assert docai.breaker_open
    assert 400 < docai.backoff_seconds <= 500
    bus.run(report("orders", "ship", Breaker(stuck=1), bad=[Bad(1, is_stuck=True, text="it hangs")]))
    assert bus.run(figures(["orders"])).breakers == {("orders", "ship"): BreakerFigures(True, 1, 0)}
    bus.send("orders", "ship")
    found = bus.run(claim(domain="orders", worker="w", n=10, lease_seconds=30, cursor=None))
    bus.run(put_right(domain="orders", worker="w", odd=found.odd, max_bytes=1000))
    db.execute("UPDATE commandbus.breaker SET recent = '[[1, true, 0, 0]]'")
    assert bus.run(figures(["orders"])).breakers == {("orders", "ship"): BreakerFigures(True, 0, 1)}
    assert bus.run(figures(["bills"])).breakers == {}
    bus.schedules.create("orders", "nightly", every="1h")
    bus.schedules.run_now("orders", "nightly")
    assert bus.run(figures(["orders"])).schedules == {("orders", "nightly"): ScheduleFigures(0.0, 1, 0)}
    db.execute("UPDATE commandbus.schedule SET next_at = now() - interval '1 minute'")
    late = bus.run(figures(["orders"])).schedules["orders", "nightly"].late_seconds
    assert 60 <= late < 90


def test_the_figures_of_permits_in_redis(
    bus: CommandBus, db: psycopg.Connection[Any], database: str, redis_url: str
) -> None:
    with CommandBus(settings=Settings(database_url=database, redis_url=redis_url)) as user:
        user.declare_limit(Limit("docai", concurrency=5))
        with user.limit("docai"):
            until(lambda: bus.run(figures([])).limits[0].in_use >= 1)
            until(lambda: bus.run(figures([])).limits[0].granted == 1)
            assert not bus.run(figures([])).limits[0].is_degraded
            db.execute("UPDATE commandbus.limit_mode SET mode = 'degraded'")
            assert bus.run(figures([])).limits[0].is_degraded


def test_a_supervisor_tells_of_limits(supervise: Supervise, tasks: Path, bus: CommandBus) -> None:
    (tasks / "pages.py").write_text(HANDLERS)
    bus.send_many("orders", [NewCommand("page") for _ in range(6)])
    bus.run(report("orders", "ship", Breaker(stuck=1), bad=[Bad(1, is_stuck=True, text="it hangs")]))
    supervised = supervise(reference="pages:handlers", task_timeout="0").until_ready()

    def seen() -> dict[str, float]:
        return of_limit(supervised.ask("/metrics")[1])

    until(lambda: (seen().get("in_use"), seen().get("parked")) == (2, 4), what=lambda: f"{seen()}")
    found = seen()
    assert (found["permits"], found["breaker_open"], found["degraded"], found["backoff_seconds"]) == (2, 0, 0, 0)
    assert found["granted_total"] == 2
    text = supervised.ask("/metrics")[1]
    assert 'commandbus_breaker_open{domain="orders",command_type="ship"} 1' in text
    (tasks / "go").touch()
    until(lambda: seen().get("granted_total") == 6, what=lambda: f"{seen()}")
    until(
        lambda: (seen()["waits_total"], seen()["parked"], seen()["in_use"]) == (4, 0, 0), what=lambda: f"{seen()}"
    )
    assert seen()["wait_seconds_total"] > 0
