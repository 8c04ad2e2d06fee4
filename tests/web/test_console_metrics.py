"""The console's /metrics: the fleet, from the database."""

from __future__ import annotations

import psycopg
from prometheus_client.parser import text_string_to_metric_families

from commandbus import CommandBus, HandlerRegistry, Limit, Settings, Worker
from commandbus.web.access import Access, Visitor
from commandbus.web.app import create_console
from support.consoles import served
from web.conftest import Serve, Visit


def parsed(text: str) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}  # fmt: skip


def test_it_counts_domains_limits_and_workers(serve: Serve, bus: CommandBus, database: str) -> None:
    bus.send("orders", "unknown")
    bus.send("orders", "ship", delay=3600)
    bus.schedules.create("orders", "nightly", cron="0 3 * * *")
    visit = serve()
    found = parsed(visit.get("/metrics").text)
    assert found["commandbus_ready", "orders"] == 1
    assert found["commandbus_troubleshooting_queue", "orders"] == 0
    assert found["commandbus_database_up",] == 1
    assert found["commandbus_schedule_fired_total", "orders", "nightly"] == 0
    assert found["commandbus_fleet_workers", "healthy"] == 0
    bus.send("orders", "unknown")
    assert parsed(visit.get("/metrics").text)["commandbus_ready", "orders"] == 1, "it asks once in three seconds"


def test_a_live_worker_shows(serve: Serve, bus: CommandBus, database: str) -> None:
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda command, ctx: None, limits=[Limit("api", concurrency=2)])
    with Worker(handlers, database_url=database):
        found = parsed(serve().get("/metrics").text)
    assert found["commandbus_fleet_workers", "healthy"] == 1
    assert found["commandbus_limit_permits", "api"] == 2


def test_without_a_database_it_says_so(serve: Serve) -> None:
    away = Settings(database_url="postgresql://127.0.0.1:9/x?connect_timeout=1", pool_timeout=0.5)
    with served(create_console(away)) as port:
        found = parsed(Visit(port).get("/metrics").text)
    assert found == {("commandbus_database_up",): 0}


def test_a_locked_table_is_no_dead_database(serve: Serve, bus: CommandBus, database: str) -> None:
    visit = serve()
    with psycopg.connect(database) as other:
        other.execute("LOCK commandbus.tsq IN ACCESS EXCLUSIVE MODE")
        assert parsed(visit.get("/metrics").text) == {("commandbus_database_up",): 1}


def test_strangers_get_no_metrics(serve: Serve) -> None:
    tokens = {"0123456789abcdef0123": Visitor("prometheus", "reader")}
    visit = serve(Access(tokens=tokens))
    assert visit.get("/metrics").status == 401
    allowed = Visit(visit.port, Authorization="Bearer 0123456789abcdef0123")
    assert allowed.get("/metrics").status == 200
