"""A million parked commands go back to the queue, beside a lease of 1.5 s and commands that are sent meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from bench.ground import Ground
from commandbus import HandlerRegistry, Worker, load_settings

LEASE_SECONDS = 1.5
DOMAIN = "unpark"
PARKED = f"""
INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason)
SELECT domain, command_type, msg_id, id, 'pause' FROM commandbus.command WHERE domain = '{DOMAIN}' ORDER BY id
"""

HELD = f"""
FROM pgmq.q_{DOMAIN}__commands q JOIN commandbus.command c USING (msg_id)
WHERE c.domain = '{DOMAIN}' AND c.command_id = 'held'
"""


class Watch:
    """Looks every 20 ms at the lease that must not end, and sends a small command every half second."""

    def __init__(self, base: Ground) -> None:
        self._base = base
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.shortest = LEASE_SECONDS
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
        while not self._stop.wait(0.02):
            self.shortest = min(self.shortest, self._base.one(left))
            if not self._sent_at and time.perf_counter() >= next_send:
                next_send = self._sent_at = time.perf_counter()
                next_send += 0.5
                self._base.bus.send(DOMAIN, "small")


def run(base: Ground, count: int) -> None:
    """Print how long it took, and what it did to leases and to other commands."""
    base.bus.create_domain(DOMAIN)
    base.insert(DOMAIN, count)
    base.bus.pause(DOMAIN, "work", operator="bench")
    base.admin.execute(f"UPDATE pgmq.q_{DOMAIN}__commands SET vt = now() + interval '10 years', read_ct = 1")
    base.admin.execute(f"UPDATE commandbus.command SET waived = 1 WHERE domain = '{DOMAIN}'")
    base.admin.execute(PARKED)
    handlers, gate, begun = HandlerRegistry(), threading.Event(), threading.Event()
    watch = Watch(base)

    @handlers.handler(DOMAIN, "hold", timeout=0)
    def hold(command: Any, ctx: Any) -> None:
        begun.set()
        gate.wait()

    handlers.register(DOMAIN, "work", lambda ctx: None)
    handlers.register(DOMAIN, "small", lambda ctx: watch.handled())
    settings = {
        "database_url": base.url,
        "visibility_timeout": LEASE_SECONDS,
        "statement_timeout": 1.0,
        "cancel_grace": 1.0,
    }
    worker = Worker(handlers, settings=load_settings(settings))
    worker.start()
    base.bus.send(DOMAIN, "hold", command_id="held")
    begun.wait()
    with watch:
        began = time.perf_counter()
        base.bus.resume(DOMAIN, "work", operator="bench")
        resumed = time.perf_counter() - began
        while base.one("SELECT EXISTS (SELECT FROM commandbus.parked)"):
            time.sleep(0.1)
        awake = time.perf_counter() - began
        left = f"SELECT count(*) FROM pgmq.q_{DOMAIN}__commands"
        while base.one(left) > 2:
            time.sleep(0.5)
        drained = time.perf_counter() - began
    read_ct = base.one(f"SELECT q.read_ct {HELD}")
    gate.set()
    worker.stop()
    waits = sorted(watch.waits) or [0.0]
    print(f"{count} parked commands: resume() took {resumed:.1f} s; none is parked after {awake:.1f} s")
    print(f"all completed after {drained:.1f} s")
    print(f"a lease of {LEASE_SECONDS} s was {'never lost' if read_ct == 1 else 'LOST'}")
    print(f"at least {watch.shortest:.2f} s of it were left")
    print(f"{len(waits)} small commands waited {1000 * waits[len(waits) // 2]:.0f} ms (median)")
    print(f"and at most {1000 * waits[-1]:.0f} ms")
    if read_ct != 1:
        sys.exit(1)
