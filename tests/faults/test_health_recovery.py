"""Layer 2, seed 003 scenario 4: a database out of reach makes health critical; its return makes it well again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

from commandbus import CommandBus, HandlerRegistry, HealthState, Worker
from support.network import Proxy
from support.waiting import until, until_settled


def test_an_unreachable_database_is_critical_until_it_is_back(
    bus: CommandBus,
    db: psycopg.Connection[Any],
    start_worker: Callable[..., Worker],
    proxy: Proxy,
    through: str,
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "quick")
    def quick(ctx: Any) -> None: ...

    worker = start_worker(handlers, through, pool_reconnect_timeout=0.5)
    bus.send("orders", "quick", command_id="before")
    until_settled(db)  # claimer and settler are connected
    until(lambda: bus.workers())  # and the keeper
    assert worker.health_status.state is HealthState.HEALTHY
    proxy.is_refusing = True
    proxy.cut()
    until(lambda: worker.health_status.state is HealthState.CRITICAL)
    assert any("database" in reason for reason in worker.health_status.reasons)
    assert worker.health_status.critical_reasons == ["database_unreachable"]
    proxy.is_refusing = False
    until(lambda: worker.health_status.state is HealthState.HEALTHY)
    bus.send("orders", "quick", command_id="after")
    until_settled(db)
    assert bus.get_command("orders", "after").status == "COMPLETED"  # type: ignore[union-attr]
