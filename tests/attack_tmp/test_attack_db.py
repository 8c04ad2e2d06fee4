from __future__ import annotations
import asyncio, logging, random, sys, threading, time
import pytest, psycopg
from support.waiting import until, until_settled, verdicts, one
from commandbus import *

from commandbus import sql as _s
import re as _re
Q = _re.search(r"FROM pgmq\.([a-z_]+)", str(_s.text("pending_cancels", domain="orders"))).group(1)
def pool_of(w): return w._parts._connections._own

def test_cancel_during_return_leaks(bus, db, handlers, start_worker):
    seen = []
    @handlers.handler("orders", "bad", timeout=0)
    async def bad(ctx):
        async def use():
            async with ctx.connection() as conn:
                await conn.execute("select 1")
        for i in range(600):
            t = asyncio.create_task(use())
            await asyncio.sleep(random.random() * 0.003)
            t.cancel()
            try: await t
            except asyncio.CancelledError: pass
            except BaseException as e: seen.append(repr(e))
            ctx._attempt.extras.has_connection = False
    bus.send("orders", "bad", command_id="b")
    w = start_worker(handlers, concurrency=2, max_attempts=1, pool_timeout=1.0)
    until_settled(db, 60)
    p = pool_of(w)
    until(lambda: (lambda s: s["pool_available"] == s["pool_size"])(p.get_stats()), 4, what=lambda: (p.get_stats(), seen[:3], len(seen)))
    print(p.get_stats(), seen[:3])

def test_zombie_return_pool_size(bus, db, handlers, start_worker, gate):
    @handlers.handler("orders", "bad")
    def bad(ctx):
        with ctx.connection() as c:
            c.execute("select 1")
            gate.wait(30)
    for i in range(4):
        bus.send("orders", "bad", command_id=f"b{i}")
    w = start_worker(handlers, concurrency=1, max_attempts=1, task_timeout=0.3, cancel_grace=0.2)
    until_settled(db, 30)
    p = pool_of(w)
    print("before", p.get_stats(), w._parts._connections._lost)
    gate.set()
    time.sleep(1)
    n = db.execute("select count(*) from pg_stat_activity where application_name like '%handlers%'").fetchone()[0]
    print("after", p.get_stats(), n)
    assert n <= 1
    bus.send("orders", "bad", command_id="z")
    until_settled(db, 10)
    assert db.execute("select status from commandbus.command where command_id='z'").fetchone()[0] == "COMPLETED"

def test_pgbouncer_mode_key(bus, db, handlers, start_worker, gate):
    got = []
    @handlers.handler("orders", "bad")
    def bad(ctx):
        from commandbus.runtime.connections import advisory_key
        got.append(advisory_key(ctx._attempt))
        with ctx.connection() as c:
            try:
                c.execute("select pg_sleep(20)")
            except psycopg.Error as e:
                got.append(type(e).__name__)
                raise
    for i in range(6):
        bus.send("orders", "bad", command_id=f"b{i}")
    w = start_worker(handlers, concurrency=6, max_attempts=1, task_timeout=0.5, cancel_grace=5, prepared_statements=False)
    until_settled(db, 10)
    print(got)
    assert got.count("QueryCanceled") == 6

def test_pgbouncer_mode_second_transaction(bus, db, handlers, start_worker, gate):
    db.execute("create table t (x int)")
    ended = threading.Event()
    @handlers.handler("orders", "bad")
    def bad(ctx):
        try:
            with ctx.connection() as c:
                c.execute("select 1"); c.commit()
                c.execute("insert into t values (1)")
                gate.wait(30)
        finally:
            ended.set()
    bus.send("orders", "bad", command_id="b")
    w = start_worker(handlers, concurrency=1, max_attempts=1, task_timeout=0.3, cancel_grace=0.3, prepared_statements=False)
    until_settled(db, 10)
    gate.set(); ended.wait(5); time.sleep(0.2)
    assert db.execute("select count(*) from t").fetchone()[0] == 0

def test_direct_second_transaction(bus, db, handlers, start_worker, gate):
    db.execute("create table t (x int)")
    ended = threading.Event()
    @handlers.handler("orders", "bad")
    def bad(ctx):
        try:
            with ctx.connection() as c:
                c.execute("select 1"); c.commit()
                c.execute("insert into t values (1)")
                gate.wait(30)
        finally:
            ended.set()
    bus.send("orders", "bad", command_id="b")
    w = start_worker(handlers, concurrency=1, max_attempts=1, task_timeout=0.3, cancel_grace=0.3)
    until_settled(db, 10)
    gate.set(); ended.wait(5); time.sleep(0.2)
    assert db.execute("select count(*) from t").fetchone()[0] == 0

def test_executor_full_of_zombies(bus, db, handlers, start_worker, gate):
    @handlers.handler("orders", "bad", timeout=0.2)
    async def bad(ctx):
        await asyncio.to_thread(gate.wait, 60)
    @handlers.handler("orders", "ok", timeout=3)
    async def ok(ctx):
        async with ctx.connection() as c:
            await c.execute("select 1")
    for i in range(40):
        bus.send("orders", "bad", command_id=f"b{i}")
    w = start_worker(handlers, concurrency=8, max_attempts=1, cancel_grace=0.5)
    until_settled(db, 30)
    bus.send("orders", "ok", command_id="ok")
    until_settled(db, 10)
    assert verdicts(db, "ok") in ([], [(1,"COMPLETED")]), verdicts(db, "ok")

def test_cancel_in_settlement_is_deadline(bus, db, database, handlers, start_worker):
    other = psycopg.connect(database)
    @handlers.handler("orders", "bad")
    def bad(ctx):
        with ctx.transaction() as tx:
            other.execute("select 1 from pgmq.%s for update" % Q + "")
    bus.send("orders", "bad", command_id="b")
    try:
        w = start_worker(handlers, concurrency=1, max_attempts=1, task_timeout=0.5, cancel_grace=3)
        time.sleep(2.5)
        other.rollback()
        until_settled(db, 10)
        row = db.execute("select verdict,error_type,error_code,rung,error from commandbus.attempt").fetchall()
        print(row)
        assert row[0][2] == "TIMEOUT"
    finally:
        other.close()

@pytest.mark.parametrize("bad_progress", ["\x00", {"\x00": 1}, "\ud800", float("inf"), 10**3000, "x" * 5000, [[[]]], {1: 2}, {"a" : "\\u0000"}])
def test_progress(bus, db, handlers, start_worker, bad_progress):
    @handlers.handler("orders", "bad")
    def bad(ctx):
        try: ctx.heartbeat(bad_progress)
        except Exception as e: print(type(e))
        time.sleep(1.6)
    bus.send("orders", "bad", command_id="b")
    w = start_worker(handlers, concurrency=1, max_attempts=1)
    until_settled(db, 8)
    assert w._parts._keeper._thread.is_alive()
    assert status(db) == "COMPLETED"

def status(db):
    return db.execute("select status from commandbus.command").fetchone()[0]
