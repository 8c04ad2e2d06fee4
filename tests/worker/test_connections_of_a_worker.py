"""How many connections a worker holds when every slot uses one, counted on the server (docs/database.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, Saga, Worker, step
from support.isolated_handlers import HELD
from support.isolated_handlers import handlers as isolated
from support.waiting import until

pytestmark = pytest.mark.waits
Db = psycopg.Connection[Any]
StartWorker = Callable[..., Worker]
SLOTS, OWN = 3, 4


@pytest.fixture
def held(database: str) -> Iterator[None]:
    """Whoever asks for the lock waits, with a connection."""
    with psycopg.connect(database) as conn:
        conn.execute("SELECT pg_advisory_xact_lock(%s)", (HELD,))
        yield


@pytest.fixture
def most(db: Db) -> Callable[[Worker, int], None]:
    """Until a worker has exactly so many sessions; it never has more, nor does it fall behind them."""

    def sessions(worker: Worker) -> list[str]:
        query = (
            "SELECT application_name FROM pg_stat_activity WHERE datname = current_database() "
            "AND starts_with(application_name, 'commandbus ' || %s) ORDER BY 1"
        )
        return [name for (name,) in db.execute(query, (worker.id[:40],)).fetchall()]

    def check(worker: Worker, expected: int) -> None:
        seen: list[int] = []

        def is_there() -> bool:
            seen.append(len(sessions(worker)))
            return seen[-20:] == [expected] * 20

        until(is_there, what=lambda: sessions(worker))
        assert max(seen) == expected, seen

    return check


def waiting(**options: Any) -> HandlerRegistry:
    """A handler that holds a connection until the lock is free."""
    registry = HandlerRegistry()

    def wait(command: Any, ctx: Any) -> None:
        with ctx.connection() as conn:
            conn.execute("SELECT pg_advisory_xact_lock_shared(%s)", (HELD,))

    registry.register("orders", "wait_for_lock", wait, timeout=60, **options)
    return registry


def fill_slots(bus: CommandBus) -> None:
    bus.send_many("orders", [NewCommand("wait_for_lock") for _ in range(SLOTS)])


@pytest.mark.parametrize(
    ("limit", "more"),
    [
        (None, 0),
        (Limit("docai", concurrency=SLOTS, store="postgres"), 1),
        (Limit("docai", concurrency=SLOTS, store="redis"), 2),
    ],
    ids=["without limits", "limits in PostgreSQL", "limits in Redis"],
)
def test_slots_and_four_and_those_of_limits(
    bus: CommandBus,
    start_worker: StartWorker,
    redis_url: str,
    most: Callable[[Worker, int], None],
    held: None,
    limit: Limit | None,
    more: int,
) -> None:
    fill_slots(bus)
    options = {} if limit is None else {"limits": [limit]}
    settings = {"redis_url": redis_url} if limit is not None and limit.store == "redis" else {}
    worker = start_worker(waiting(**options), concurrency=SLOTS, statement_timeout=25, **settings)
    most(worker, SLOTS + OWN + more)


def test_messages_of_processes_have_two_more(
    bus: CommandBus, database: str, start_worker: StartWorker, most: Callable[[Worker, int], None], held: None
) -> None:
    """Beside other work. They wait for the rows of their processes, which somebody has locked."""
    registry = waiting()
    bus.create_domain("sagas")
    saga = Saga("order", step("ship", "orders"), domain="sagas")
    registry.register_process(saga)
    for _ in range(4):
        bus.start_process(saga, {})
    fill_slots(bus)
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM commandbus.process FOR UPDATE")
        worker = start_worker(registry, concurrency=SLOTS, domains=["orders", "sagas"], statement_timeout=25)
        most(worker, SLOTS + OWN + 2)


def test_isolated_attempts_count_as_slots(
    bus: CommandBus, start_worker: StartWorker, most: Callable[[Worker, int], None], held: None
) -> None:
    fill_slots(bus)
    most(start_worker(isolated, concurrency=SLOTS, statement_timeout=25), SLOTS + OWN)
