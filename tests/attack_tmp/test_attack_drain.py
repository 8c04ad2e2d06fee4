from __future__ import annotations
import asyncio, random, threading, time
import pytest
from support.waiting import until
from commandbus import *
from commandbus.runtime import claimer as C

def insert(bus, n, kinds):
    bus.send_many("orders", [NewCommand(kinds[j % len(kinds)]) for j in range(n)])

def left(db): return db.execute("select count(*) from commandbus.command where status not in ('COMPLETED','FAILED')").fetchone()[0]

@pytest.mark.parametrize("slow", [0.0, 0.03, 0.06])
@pytest.mark.parametrize("kinds", [("a",), ("s",), ("a", "s")])
def test_drain(bus, db, handlers, start_worker, monkeypatch, slow, kinds):
    @handlers.handler("orders", "a")
    async def a(ctx): pass
    @handlers.handler("orders", "s")
    def s(ctx): pass
    n = 8000
    insert(bus, n, kinds)
    sizes = []
    real = C.Claimer._claim
    def slowly(self, domain, k):
        if slow: time.sleep(slow)
        t = time.monotonic()
        got = real(self, domain, k)
        sizes.append((k, got, time.monotonic() - t))
        return got
    monkeypatch.setattr(C.Claimer, "_claim", slowly)
    t = time.monotonic()
    w = start_worker(handlers, concurrency=4)
    try:
        until(lambda: left(db) == 0, 20)
    except AssertionError:
        pass
    took = time.monotonic() - t
    done = n - left(db)
    print(f"RESULT slow={slow} kinds={kinds} done={done} rate={done/took:.0f}/s claims={len(sizes)} mean={sum(x[1] for x in sizes)/len(sizes):.1f} maxclaim={max(x[2] for x in sizes)*1000:.1f}ms hungry={[l.is_hungry for l in w._parts._places._lanes]} taken={w._parts._places.taken}")
