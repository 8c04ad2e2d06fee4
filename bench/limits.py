"""Limits: take and give back a place on each back end, next to the bare round trips, and work beside parked
commands."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from bench.ground import DATA, Ground
from commandbus import Limit, load_settings
from commandbus.db.service_connection import LastingConnection
from commandbus.flow.limits import permits
from commandbus.flow.limits.declare import LimitRow, get_limit
from commandbus.limits.stores.redis.store import RedisPermitStore
from commandbus.settings import Settings

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.redis_server import RedisServer

PARKED = 10_000


@contextmanager
def redis_settings(base: Ground) -> Iterator[Settings]:
    """A Redis that is thrown away."""
    server = RedisServer()
    server.start()
    try:
        yield load_settings({"database_url": base.url, "redis_url": server.url})
    finally:
        server.kill()


def _pairs(once: Callable[[], object], count: int) -> float:
    for _ in range(20):
        once()
    began = time.perf_counter()
    for _ in range(count):
        once()
    return count / (time.perf_counter() - began)


def measure(base: Ground, count: int) -> dict[str, float]:
    """Pairs of take and give back a second, uncontended, and pairs of bare round trips."""
    base.bus.declare_limit(Limit("bench", concurrency=10, store="postgres"))
    figures: dict[str, float] = {}
    connection = LastingConnection(load_settings({"database_url": base.url}), name="bench")
    conn = connection.conn
    conn.execute(
        "CREATE TABLE IF NOT EXISTS public.bare_limit (id integer PRIMARY KEY, n bigint) WITH (fillfactor = 30)"
    )
    conn.execute("INSERT INTO public.bare_limit VALUES (1, 0) ON CONFLICT DO NOTHING")

    def bare() -> None:
        for _ in range(2):
            conn.execute(b"UPDATE public.bare_limit SET n = n + 1 WHERE id = %s RETURNING n", (1,)).fetchone()

    def postgres() -> None:
        assert connection.run(permits.take("bench", ["bench/token"]))
        connection.run(permits.release("bench", ["bench/token"]))

    figures["floor_postgres_pairs_per_s"] = _pairs(bare, count)
    figures["limit_postgres_pairs_per_s"] = _pairs(postgres, count)
    connection.close()
    with redis_settings(base) as settings:
        figures |= _redis(base, settings, count)

    def block() -> None:
        with base.bus.limit("bench"):
            pass

    figures["limit_block_pairs_per_s"] = _pairs(block, count)
    return figures


def _redis(base: Ground, settings: Settings, count: int) -> dict[str, float]:
    base.bus.declare_limit(Limit("bench_redis", concurrency=10, store="postgres"))
    row: LimitRow = base.bus.run(get_limit("bench_redis"))
    store = RedisPermitStore(settings, "bench")
    store.tick()
    client = redis.Redis.from_url(settings.redis_url or "", decode_responses=True)

    def bare() -> None:
        client.ping()
        client.ping()

    def pair() -> None:
        assert store.take(row, ["bench/token"], 60)
        store.release(row, ["bench/token"])

    figures = {"floor_redis_pairs_per_s": _pairs(bare, count), "limit_redis_pairs_per_s": _pairs(pair, count)}
    store.close()
    return figures


def fill_limit(base: Ground) -> None:
    """A limit whose only place is taken."""
    base.bus.declare_limit(Limit("bench_full", concurrency=1, store="postgres"))
    base.admin.execute(
        "UPDATE commandbus.limits SET holders = jsonb_build_object('bench', 4e9) WHERE name = 'bench_full'"
    )


def park(base: Ground, domain: str) -> None:
    """10,000 commands of a domain that wait for that limit."""
    base.admin.execute(
        f"""
        WITH sent AS (
            INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, data, waived)
            SELECT %(domain)s, gen_random_uuid()::text, 'limited', nextval('pgmq.q_{domain}__commands_msg_id_seq'),
                   %(data)s, 1
              FROM generate_series(1, %(count)s)
            RETURNING id, msg_id, created_at
        ), queued AS (
            INSERT INTO pgmq.q_{domain}__commands (msg_id, read_ct, vt, message) OVERRIDING SYSTEM VALUE
            SELECT msg_id, 1, now() + interval '10 years', jsonb_build_object('command', id) FROM sent
        )
        INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since, note)
        SELECT %(domain)s, 'limited', msg_id, id, 'limit', 'bench_full', created_at, 'waits' FROM sent
        """,
        {"domain": domain, "count": PARKED, "data": json.dumps(DATA)},
    )
