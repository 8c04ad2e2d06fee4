"""Parked commands go back to the queue, beside a lease of 1.5 s and commands that are sent meanwhile.

The same is measured for as many commands that were simply sent. What both rounds show comes from the machine or
the worker; only what the second shows alone comes from unparking. On a busy machine a lease of 1.5 s may be lost
in either. So the program also counts what the load does not change: does the session that renews leases ever wait
for a lock?
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from bench.ground import Ground
from commandbus import HandlerRegistry, Worker, load_settings
from commandbus.clock import boottime

LEASE_SECONDS = 1.5
LOOK_SECONDS = 0.02
DOMAIN = "unpark"
QUEUE = f"pgmq.q_{DOMAIN}__commands"
PARKED = f"""
INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason)
SELECT domain, command_type, msg_id, id, 'pause'
  FROM commandbus.command
 WHERE domain = '{DOMAIN}' AND status = 'PENDING' AND command_type = 'work'
 ORDER BY id
"""
RENEWING = b"""
SELECT wait_event_type, wait_event, extract(epoch FROM clock_timestamp() - query_start)::float8
  FROM pg_stat_activity WHERE application_name LIKE 'commandbus % lease keeper' AND state = 'active'
"""
LEASE = f"SELECT read_ct, extract(epoch FROM vt - clock_timestamp())::float8 FROM {QUEUE} WHERE msg_id = %s"
WAITED = f"""
SELECT extract(epoch FROM started_at - created_at)::float8 FROM commandbus.command
 WHERE domain = '{DOMAIN}' AND command_type = 'small' AND created_at >= %s ORDER BY 1
"""


def work(url: str, stop: Any, told: Any) -> None:
    """The process of the worker. `told`: the greatest age of the held lease in the worker's own clock, and how
    much too late a thread woke up there that only sleeps."""
    handlers = HandlerRegistry()

    @handlers.handler(DOMAIN, "hold", timeout=0)
    def hold(command: Any, ctx: Any) -> None:
        assert worker._runtime is not None
        (held,) = [one for one in worker._runtime.attempts.held.copy() if one.command_id == command.command_id]
        while not stop.is_set():
            slept_at = boottime()
            time.sleep(LOOK_SECONDS)
            now = boottime()
            told[0] = max(told[0], now - held.renewed_at)
            told[1] = max(told[1], now - slept_at - LOOK_SECONDS)

    handlers.register(DOMAIN, "work", lambda ctx: None)
    handlers.register(DOMAIN, "small", lambda ctx: None)
    settings = {"database_url": url, "visibility_timeout": LEASE_SECONDS, "statement_timeout": 1.0}
    worker = Worker(handlers, settings=load_settings(settings | {"cancel_grace": 1.0}))
    worker.start()
    stop.wait()
    worker.stop()


class Watch:
    """Looks every 20 ms at the lease that must not end, and at the session that renews it.

    It sends a small command every half second.
    """

    def __init__(self, base: Ground, held: int) -> None:
        self._base = base
        self._held = held
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._next_send = 0.0
        self.shortest = LEASE_SECONDS
        self.looks = self.locked = 0
        self.longest_statement = self.latest_look = 0.0
        self.waits: dict[str, int] = {}
        self.claims: set[int] = set()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._base.url, autocommit=True) as conn:
            while not self._stop.is_set():
                slept_at = time.perf_counter()
                time.sleep(LOOK_SECONDS)
                self.latest_look = max(self.latest_look, time.perf_counter() - slept_at - LOOK_SECONDS)
                self._look(conn)

    def _look(self, conn: psycopg.Connection[Any]) -> None:
        self.looks += 1
        for claims, left in conn.execute(LEASE.encode(), (self._held,)):
            self.claims.add(claims)
            self.shortest = min(self.shortest, left)
        for kind, event, seconds in conn.execute(RENEWING):
            self.longest_statement = max(self.longest_statement, seconds)
            self.locked += kind == "Lock"
            if kind is not None and kind != "Client":
                self.waits[f"{kind}/{event}"] = self.waits.get(f"{kind}/{event}", 0) + 1
        if time.perf_counter() >= self._next_send:
            self._next_send = time.perf_counter() + 0.5
            self._base.bus.send(DOMAIN, "small")


class Bench:
    """A domain, and for each round a worker process that holds a lease of 1.5 s all the time."""

    def __init__(self, base: Ground) -> None:
        self.base = base
        base.bus.create_domain(DOMAIN)

    @contextmanager
    def worker(self) -> Iterator[tuple[int, Any]]:
        """A worker that holds the lease; yields its msg_id, and what the worker tells."""
        context = multiprocessing.get_context("spawn")
        stop, told = context.Event(), context.Array("d", 2)
        process = context.Process(target=work, args=(self.base.url, stop, told))
        self.base.bus.send(DOMAIN, "hold")
        held = self.base.one(f"SELECT max(msg_id) FROM {QUEUE}")
        self.base.admin.execute(f"UPDATE {QUEUE} SET vt = '2000-01-01' WHERE msg_id = %s".encode(), (held,))
        process.start()
        try:
            while not told[0]:
                if not process.is_alive():
                    sys.exit("the worker has ended")
                time.sleep(0.01)
            yield held, told
        finally:
            stop.set()
            process.join()

    def measure(self, what: str, begin: Callable[[], object]) -> Watch:
        """Begin something, and watch until all work is done."""
        with self.worker() as (held, told):
            since, began = self.base.one("SELECT now()"), time.perf_counter()
            told[0] = told[1] = 0.0
            with Watch(self.base, held) as watch:
                begin()
                begun = time.perf_counter() - began
                while self.base.one(f"SELECT count(*) FROM (SELECT FROM {QUEUE} LIMIT 3) q") > 2:
                    time.sleep(0.2)
                drained = time.perf_counter() - began
            oldest, latest = told
        waits = [row[0] for row in self.base.admin.execute(WAITED.encode(), (since,)) if row[0] is not None] or [
            0.0
        ]
        print(f"{what}: begun in {begun:.1f} s, all completed in {drained:.1f} s")
        print(
            f"  the lease of {LEASE_SECONDS} s was {'LOST' if len(watch.claims) > 1 else 'never lost'}", end="; "
        )
        print(f"at least {watch.shortest:.2f} s were left, and the worker renewed it after at most {oldest:.2f} s")
        print(f"  the session that renews waited for a lock in {watch.locked} of {watch.looks} looks", end="; ")
        print(f"longest statement {1000 * watch.longest_statement:.0f} ms; other waits: {watch.waits or 'none'}")
        print(f"  threads that only sleep woke up to {1000 * latest:.0f} ms too late in the worker", end=", ")
        print(f"and {1000 * watch.latest_look:.0f} ms in a process that only looks")
        print(f"  small commands waited {1000 * waits[len(waits) // 2]:.0f} ms (median)", end=", ")
        print(f"{1000 * waits[-1]:.0f} ms (longest of {len(waits)})", flush=True)
        return watch

    def park(self, count: int) -> None:
        """Queue commands that a pause has parked."""
        self.base.bus.pause(DOMAIN, "work", operator="bench")
        with self.base.admin.transaction():
            self.base.insert(DOMAIN, count)
            self.base.admin.execute(f"UPDATE {QUEUE} SET vt = now() + interval '10 years', read_ct = 1")
            self.base.admin.execute(PARKED)
        self.base.settle_down(DOMAIN)


def run(base: Ground, count: int) -> None:
    """Drain an ordinary backlog first, which says what this machine can do; then as many parked commands."""
    bench = Bench(base)
    base.fill(DOMAIN, count)
    usual = bench.measure(f"{count} commands that were sent", lambda: None)
    bench.park(count)
    watch = bench.measure(
        f"{count} commands that were parked", lambda: base.bus.resume(DOMAIN, "work", operator="bench")
    )
    if watch.locked:
        sys.exit("unparking delayed a renewal: its session waited for a lock")
    if len(watch.claims) > 1 and len(usual.claims) == 1:
        sys.exit("the lease was lost beside unparking, and not beside as many commands that were sent")
