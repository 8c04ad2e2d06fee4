"""A million parked commands go back to the queue, beside a lease of 1.5 s and commands that are sent meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from bench.ground import Ground
from commandbus import HandlerRegistry, Worker, load_settings

LEASE_SECONDS = 1.5
DOMAIN = "unpark"
PARKED = f"""
INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason)
SELECT domain, command_type, msg_id, id, 'pause'
  FROM commandbus.command
 WHERE domain = '{DOMAIN}' AND status = 'PENDING' AND command_type = 'work'
 ORDER BY id
"""
LOCKED = b"""
SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name LIKE 'commandbus %'
"""
HELD = f"""
FROM pgmq.q_{DOMAIN}__commands q JOIN commandbus.command c USING (msg_id)
WHERE c.domain = '{DOMAIN}' AND c.command_id = 'held'
"""


class Watch:
    """Looks every 20 ms at the lease that must not end, and whether a session of ours waits for a lock.

    It sends a small command every half second.
    """

    def __init__(self, base: Ground) -> None:
        self._base = base
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.shortest = LEASE_SECONDS
        self.looks = self.locked = 0
        self.waits: list[float] = []
        self._done = threading.Event()
        self._sent_at = 0.0

    def handled(self) -> None:
        """A small command runs."""
        self.waits.append(time.perf_counter() - self._sent_at)
        self._sent_at = 0.0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        left = f"SELECT extract(epoch FROM q.vt - clock_timestamp())::float8 {HELD}"
        next_send = 0.0
        with psycopg.connect(self._base.url, autocommit=True) as conn:
            while not self._stop.wait(0.02):
                next_send = self._look(conn, left, next_send)

    def _look(self, conn: psycopg.Connection[Any], left: str, next_send: float) -> float:
        (seconds,) = conn.execute(left.encode()).fetchone() or (0.0,)
        (locked,) = conn.execute(LOCKED).fetchone() or (0,)
        self.shortest = min(self.shortest, seconds)
        self.looks, self.locked = self.looks + 1, self.locked + bool(locked)
        if not self._sent_at and time.perf_counter() >= next_send:
            self._sent_at = time.perf_counter()
            self._base.bus.send(DOMAIN, "small")
            return self._sent_at + 0.5
        return next_send


class Bench:
    """A worker with a lease of 1.5 s that is held all the time, and a domain of its own."""

    def __init__(self, base: Ground) -> None:
        self.base = base
        self.gate = threading.Event()
        self._began = threading.Semaphore(0)
        self.watch = Watch(base)
        base.bus.create_domain(DOMAIN)
        settings = {"database_url": base.url, "visibility_timeout": LEASE_SECONDS, "statement_timeout": 1.0}
        self.worker = Worker(self._handlers(), settings=load_settings(settings | {"cancel_grace": 1.0}))

    def _handlers(self) -> HandlerRegistry:
        handlers = HandlerRegistry()

        @handlers.handler(DOMAIN, "hold", timeout=0)
        def hold(command: Any, ctx: Any) -> None:
            self._began.release()
            self.gate.wait()

        handlers.register(DOMAIN, "work", lambda ctx: None)
        handlers.register(DOMAIN, "small", lambda ctx: self.watch.handled())
        return handlers

    def start(self) -> None:
        """Hold the lease."""
        self.worker.start()
        self.base.bus.send(DOMAIN, "hold", command_id="held")
        self._began.acquire()

    def measure(self, what: str, begin: Callable[[], None]) -> bool:
        """Begin something, and watch until all work is done. Returns whether the lease was kept."""
        self.watch = Watch(self.base)
        before = self.base.one(f"SELECT q.read_ct {HELD}")
        with self.watch:
            began = time.perf_counter()
            begin()
            begun = time.perf_counter() - began
            while self.base.one(f"SELECT count(*) FROM pgmq.q_{DOMAIN}__commands") > 2:
                time.sleep(0.5)
            drained = time.perf_counter() - began
        is_kept = bool(self.base.one(f"SELECT q.read_ct {HELD}") == before)
        waits = sorted(self.watch.waits) or [0.0]
        print(f"{what}: begun in {begun:.1f} s, all completed in {drained:.1f} s")
        print(f"  a lease of {LEASE_SECONDS} s was {'never lost' if is_kept else 'LOST'}", end="; ")
        print(f"at least {self.watch.shortest:.2f} s of it were left")
        print(f"  a session of ours waited for a lock in {self.watch.locked} of {self.watch.looks} looks")
        print(f"  small commands waited {1000 * waits[len(waits) // 2]:.0f} ms (median)", end=", ")
        print(f"{1000 * waits[-1]:.0f} ms (longest of {len(waits)})", flush=True)
        return is_kept


def run(base: Ground, count: int) -> None:
    """Drain an ordinary backlog first, which says what this machine can do; then the same with parked commands."""
    bench = Bench(base)
    bench.start()
    bench.measure(f"{count // 10} commands that were sent", lambda: base.insert(DOMAIN, count // 10))
    base.bus.pause(DOMAIN, "work", operator="bench")
    base.admin.execute("BEGIN")
    base.insert(DOMAIN, count)
    base.admin.execute(
        f"UPDATE pgmq.q_{DOMAIN}__commands SET vt = now() + interval '10 years', read_ct = 1 WHERE headers IS NULL"
    )
    base.admin.execute(PARKED)
    base.admin.execute("COMMIT")
    is_kept = bench.measure(
        f"{count} commands that were parked", lambda: base.bus.resume(DOMAIN, "work", operator="bench") and None
    )
    bench.gate.set()
    bench.worker.stop()
    if not is_kept:
        sys.exit(1)
