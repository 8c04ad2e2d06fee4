from __future__ import annotations
import asyncio, random, threading, time, sys
import pytest
from support.waiting import until
from commandbus import *

def left(db): return db.execute("select count(*) from commandbus.command where status not in ('COMPLETED','FAILED','CANCELED','IN_TROUBLESHOOTING_QUEUE')").fetchone()[0]

def test_stress(bus, db, handlers, start_worker, gate):
    """many small batches, both lanes, stuck and blocking in between; places return to 0."""
    @handlers.handler("orders", "a")
    async def a(ctx): await asyncio.sleep(random.random() * 0.01)
    @handlers.handler("orders", "s")
    def s(ctx): time.sleep(random.random() * 0.01)
    @handlers.handler("orders", "stuck_s")
    def stuck_s(ctx):
        t = time.monotonic() + 0.45 + random.random() * 0.3
        while time.monotonic() < t: time.sleep(0.01)
    @handlers.handler("orders", "stuck_a")
    async def stuck_a(ctx):
        t = time.monotonic() + 0.45 + random.random() * 0.3
        while time.monotonic() < t:
            try: await asyncio.sleep(0.01)
            except asyncio.CancelledError: pass
    @handlers.handler("orders", "block_a")
    async def block_a(ctx):
        t = time.monotonic() + 0.45 + random.random() * 0.3
        while time.monotonic() < t: time.sleep(0.01)
    @handlers.handler("orders", "edge_a")
    async def edge_a(ctx):
        try: await asyncio.sleep(10)
        except asyncio.CancelledError:
            await asyncio.sleep(0.19 + random.random() * 0.03)
            raise
    @handlers.handler("orders", "self_a")
    async def self_a(ctx):
        t = asyncio.current_task()
        asyncio.get_running_loop().call_later(random.random() * 0.1, t.cancel)
    w = start_worker(handlers, concurrency=4, task_timeout=0.3, cancel_grace=0.2, max_attempts=3)
    p = w._parts
    low = 0
    end = time.monotonic() + 25
    kinds = ["a", "s"] * 12 + ["stuck_s", "stuck_a", "block_a", "edge_a", "self_a"]
    n = 0
    mins = []
    def watch():
        while time.monotonic() < end + 30 and w.is_running:
            mins.append(p._places.taken); time.sleep(0.001)
    threading.Thread(target=watch, daemon=True).start()
    while time.monotonic() < end:
        k = random.randint(1, 8)
        bus.send_many("orders", [NewCommand(random.choice(kinds)) for _ in range(k)])
        n += k
        time.sleep(random.random() * 0.05)
        if left(db) > 60: until(lambda: left(db) < 30, 30)
    until(lambda: left(db) == 0, 60, what=lambda: (left(db), p._places.taken, len(p.running), len(p.held), p._waiting()))
    until(lambda: p._places.taken == 0 and not p.running and not p.held, 5, what=lambda: (p._places.taken, p.running, p.held))
    assert min(mins) >= 0 and max(mins) <= 4, (min(mins), max(mins))
    print("N", n, "stuck", p.stuck, min(mins), max(mins), threading.active_count(), db.execute("select verdict, error_type, count(*) from commandbus.attempt group by 1,2").fetchall())
    # still full capacity
    t = time.monotonic()
    r = w.stop(timeout=5)
    print(r, time.monotonic() - t)
