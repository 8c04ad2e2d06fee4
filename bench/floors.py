"""What the database alone can do: the bus's own statements, without slots, handlers or threads between them."""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import Any

import psycopg
from psycopg_pool import ConnectionPool

from bench.ground import DATA, Ground
from commandbus.db.drivers import run
from commandbus.db.pool import BY_KEYS
from commandbus.flow.commands.claim import Claim, claim
from commandbus.flow.commands.settle import settle_done
from commandbus.model.command import new_command_id
from commandbus.worker.execution.attempt import Attempt

WORKER = "floor"
TWO_ROWS = """
WITH sent AS (
    INSERT INTO floor_command (domain, command_id, command_type, msg_id, data)
    VALUES ('floor', %s, %s, nextval('floor_queue_msg_id_seq'), %s::json)
    RETURNING id, msg_id
)
INSERT INTO floor_queue (msg_id, vt, message) OVERRIDING SYSTEM VALUE
SELECT msg_id, clock_timestamp(), jsonb_build_object('command', id) FROM sent
"""


def _connect(ground: Ground) -> psycopg.Connection[Any]:
    return psycopg.connect(ground.url, autocommit=True, prepare_threshold=2, options=BY_KEYS)


def _claim(conn: psycopg.Connection[Any], domain: str, n: int, cursor: Any) -> Claim:
    return run(conn, claim(domain=domain, worker=WORKER, n=n, lease_seconds=60, cursor=cursor))


def _settle(conn: psycopg.Connection[Any], domain: str, rows: list[tuple[Any, ...]]) -> None:
    attempts = [Attempt(domain, row, None, 0.0) for row in rows]
    now = time.time()
    for attempt in attempts:
        attempt.started = now
    assert run(conn, settle_done(domain, WORKER, attempts)) is None


def serial(ground: Ground, domain: str, count: int) -> float:
    """Claim 100, settle 100, on one connection."""
    conn, done, cursor = _connect(ground), 0, None
    started = time.perf_counter()
    while done < count:
        found = _claim(conn, domain, 100, cursor)
        cursor = found.last_vt if found.full else None
        _settle(conn, domain, found.ready)
        done += len(found.ready)
    elapsed = time.perf_counter() - started
    conn.close()
    return count / elapsed


def overlapped(ground: Ground, domain: str, count: int) -> float:
    """Claim 400 and settle 400 at the same time, on two connections."""
    claiming, settling = _connect(ground), _connect(ground)
    batches: queue.SimpleQueue[list[tuple[Any, ...]] | None] = queue.SimpleQueue()
    ahead = threading.Semaphore(3)

    def settle_all() -> None:
        while (rows := batches.get()) is not None:
            _settle(settling, domain, rows)
            ahead.release()

    settler = threading.Thread(target=settle_all)
    settler.start()
    done, cursor = 0, None
    started = time.perf_counter()
    while done < count:
        ahead.acquire()
        found = _claim(claiming, domain, 400, cursor)
        cursor = found.last_vt if found.full else None
        batches.put(found.ready)
        done += len(found.ready)
    batches.put(None)
    settler.join()
    elapsed = time.perf_counter() - started
    claiming.close()
    settling.close()
    return count / elapsed


def insert(ground: Ground, senders: int, count: int) -> float:
    """Two rows of the same payload in tables like ours, in one statement that commits, through a pool as an
    application would use it. What `bus.send` does beyond that is its own."""
    make_tables(ground)
    with floor_pool(ground, senders) as pool:
        return at_once([lambda: insert_one(pool)] * senders, count)


def floor_pool(ground: Ground, size: int) -> ConnectionPool[psycopg.Connection[Any]]:
    """A pool as an application would have it."""
    settings = {"autocommit": True, "prepare_threshold": 2}
    return ConnectionPool(ground.url, kwargs=settings, min_size=size, max_size=size, open=True)


def insert_one(pool: ConnectionPool[psycopg.Connection[Any]]) -> None:
    """What no program can leave out: an id, the JSON of the payload, a connection of the pool, the two rows."""
    with pool.connection() as conn:
        conn.execute(TWO_ROWS, (new_command_id(), "work", json.dumps(DATA)))


def make_tables(ground: Ground) -> None:
    """Tables with the columns, defaults, indexes and storage parameters of ours, and as many rows."""
    if ground.one("SELECT to_regclass('floor_command')") is not None:
        return
    for name, ours in (("floor_command", "commandbus.command"), ("floor_queue", "pgmq.q_send__commands")):
        options = ground.one(
            "SELECT array_to_string(reloptions, ', ') FROM pg_class WHERE oid = %s::regclass", ours
        )
        ground.admin.execute(
            f"CREATE TABLE {name} (LIKE {ours} INCLUDING ALL) {f'WITH ({options})' if options else ''}".encode()
        )
    ground.admin.execute("INSERT INTO floor_command OVERRIDING SYSTEM VALUE SELECT * FROM commandbus.command")
    ground.admin.execute(
        "SELECT setval(pg_get_serial_sequence('floor_command', 'id'), greatest(max(id), 1)) FROM floor_command"
    )
    ground.admin.execute("VACUUM ANALYZE floor_command")


def send(ground: Ground, domain: str, senders: int, count: int) -> float:
    """The same with `bus.send`."""
    rate = at_once([lambda: ground.bus.send(domain, "work", DATA)] * senders, count)
    ground.sent[domain] = ground.sent.get(domain, 0) + (count // senders + 20) * senders
    return rate


def at_once(calls: list[Any], count: int) -> float:
    """Calls per second of several threads that start together."""
    each = count // len(calls)
    barrier = threading.Barrier(len(calls) + 1)

    def work(call: Any) -> None:
        for _ in range(20):
            call()
        barrier.wait()
        for _ in range(each):
            call()
        barrier.wait()

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    barrier.wait()
    started = time.perf_counter()
    barrier.wait()
    elapsed = time.perf_counter() - started
    for thread in threads:
        thread.join()
    return each * len(calls) / elapsed
