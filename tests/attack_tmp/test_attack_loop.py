from __future__ import annotations
import asyncio, logging, sys, threading, time
import pytest
from support.waiting import until, until_settled, verdicts, one
from commandbus import *

def status(db, cid):
    return db.execute("select status from commandbus.command where command_id=%s", (cid,)).fetchone()[0]

def healthy(handlers):
    @handlers.handler("orders", "ok")
    async def ok(ctx):
        await asyncio.sleep(0)

BASE = dict(task_timeout=0.4, cancel_grace=0.4, max_attempts=1, concurrency=2)

def check_ok(bus, db, worker, n=20):
    for i in range(n):
        bus.send("orders", "ok", command_id=f"ok{i}-{time.monotonic_ns()}")
    until(lambda: db.execute("select count(*) from commandbus.command where command_type='ok' and status<>'COMPLETED'").fetchone()[0] == 0, 6)
    until(lambda: worker._parts._places.taken == 0, 5)

def test_loop_stopped_by_handler(bus, db, handlers, start_worker):
    healthy(handlers)
    @handlers.handler("orders", "bad")
    async def bad(ctx):
        asyncio.get_running_loop().stop()
    bus.send("orders", "bad", command_id="b")
    w = start_worker(handlers, **BASE)
    until_settled(db)
    check_ok(bus, db, w)

def test_system_exit_in_child_task(bus, db, handlers, start_worker):
    healthy(handlers)
    @handlers.handler("orders", "bad")
    async def bad(ctx):
        async def child():
            sys.exit(3)
        t = asyncio.create_task(child())
        await asyncio.sleep(0.1)
    bus.send("orders", "bad", command_id="b")
    w = start_worker(handlers, **BASE)
    until_settled(db)
    check_ok(bus, db, w)

def test_child_task_blocks_loop(bus, db, handlers, start_worker, gate):
    healthy(handlers)
    @handlers.handler("orders", "bad")
    async def bad(ctx):
        async def child():
            gate.wait(60)
        async with asyncio.TaskGroup() as tg:
            tg.create_task(child())
    bus.send("orders", "bad", command_id="b")
    w = start_worker(handlers, **BASE)
    until(lambda: status(db, "b") not in ("PENDING", "IN_PROGRESS") , 6)
    print(verdicts(db, "b"))
    check_ok(bus, db, w)

def test_self_cancel(bus, db, handlers, start_worker):
    healthy(handlers)
    @handlers.handler("orders", "bad")
    async def bad(ctx):
        asyncio.current_task().cancel()
    for i in range(6):
        bus.send("orders", "bad", command_id=f"b{i}")
    w = start_worker(handlers, **BASE)
    until_settled(db)
    check_ok(bus, db, w)

def test_stray_cancel_of_idle_slot(bus, db, handlers, start_worker):
    healthy(handlers)
    @handlers.handler("orders", "bad")
    async def bad(ctx):
        t = asyncio.current_task()
        asyncio.get_running_loop().call_later(0.2, t.cancel)
    for i in range(6):
        bus.send("orders", "bad", command_id=f"b{i}")
    w = start_worker(handlers, **BASE)
    until_settled(db)
    time.sleep(0.4)
    check_ok(bus, db, w)

class Raising(logging.Handler):
    def emit(self, record):
        raise RuntimeError("log handler is broken")

@pytest.mark.parametrize("lane", ["sync", "async"])
def test_raising_logger(bus, db, handlers, start_worker, gate, lane):
    healthy(handlers)
    if lane == "sync":
        @handlers.handler("orders", "bad")
        def bad(ctx):
            gate.wait(60)
    else:
        @handlers.handler("orders", "bad")
        async def bad(ctx):
            while not gate.is_set():
                try: await asyncio.sleep(0.05)
                except asyncio.CancelledError: pass
    h = Raising()
    logging.getLogger("commandbus").addHandler(h)
    try:
        bus.send("orders", "bad", command_id="b")
        w = start_worker(handlers, **BASE)
        until(lambda: status(db, "b") not in ("PENDING", "IN_PROGRESS"), 6)
        check_ok(bus, db, w)
        w.stop(timeout=4)
    finally:
        logging.getLogger("commandbus").removeHandler(h)

def test_evil_loader(bus, db, handlers, start_worker, gate):
    healthy(handlers)
    class Evil:
        def get_source(self, name): raise RuntimeError("no source")
    code = compile("def go(gate):\n    gate.wait(60)\n", "nofile-x.py", "exec")
    ns = {"__name__": "x_mod", "__loader__": Evil()}
    exec(code, ns)
    @handlers.handler("orders", "bad")
    def bad(ctx):
        ns["go"](gate)
    bus.send("orders", "bad", command_id="b")
    w = start_worker(handlers, **BASE)
    until(lambda: status(db, "b") not in ("PENDING", "IN_PROGRESS"), 6)
    check_ok(bus, db, w)

@pytest.mark.parametrize("what", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_evil_str(bus, db, handlers, start_worker, what):
    healthy(handlers)
    class Evil(Exception):
        def __str__(self): raise what("x")
        __repr__ = __str__
    @handlers.handler("orders", "bad")
    def bad(ctx):
        raise Evil()
    @handlers.handler("orders", "abad")
    async def abad(ctx):
        raise Evil()
    bus.send("orders", "bad", command_id="b")
    bus.send("orders", "abad", command_id="a")
    w = start_worker(handlers, **BASE)
    until_settled(db)
    check_ok(bus, db, w)
