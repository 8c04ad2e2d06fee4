"""How long the console takes for each page beside a large history: ten million commands, or as many as are wanted.

Three domains: `orders` has most commands, `billing` some, and `rare` a hundred, the oldest of all. A tenth of the
commands waits in the queue, a hundredth has failed attempts, a thousandth needs a person, as many are parked. The
tables are unlogged while they are filled. Every page is asked for in this process, without a network: what is
measured is the server's own time, with the database's. Pages that search in payloads and errors are marked, and
have no limit but their budget.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any, Final
from urllib.parse import quote

from bench.ground import Ground
from commandbus import load_settings
from commandbus.web.app import create_console

MOST_MS: Final = 200.0
QUICK: Final = 300_000
COUNT: Final = 10_000_000
_TABLES: Final = (
    "commandbus.command", "commandbus.attempt", "commandbus.tsq", "commandbus.parked", "commandbus.batch",
    "commandbus.operator_action", "commandbus.control_action", "commandbus.process", "pgmq.q_orders__commands",
)  # fmt: skip
_FILL: Final = (
    """INSERT INTO commandbus.batch (domain, batch_id, total, status, finished_at)
       SELECT 'orders', 'batch-' || n, 100, 'COMPLETED', now() FROM generate_series(1, {count} / 1000) n""",
    """INSERT INTO commandbus.command (domain, command_id, command_type, status, attempt, worker, created_at,
                                       started_at, finished_at, msg_id, data)
       SELECT 'rare', 'rare-' || n, 'audit', 'COMPLETED', 1, 'w1', now() - interval '30 days', now(), now(), n,
              '{{"n": 1}}'
         FROM generate_series(1, 100) n""",
    """INSERT INTO commandbus.command (domain, command_id, command_type, status, attempt, worker, created_at,
                                       started_at, finished_at, msg_id, batch, correlation_id, data)
       SELECT CASE WHEN n % 20 = 0 THEN 'billing' ELSE 'orders' END, 'c-' || n,
              CASE WHEN n % 5000 = 0 THEN 'seldom' ELSE 'ship' END,
              (CASE WHEN n > {count} * 0.9 THEN 'PENDING' WHEN n % 1000 = 3 THEN 'IN_TROUBLESHOOTING_QUEUE'
                    WHEN n % 500 = 7 THEN 'FAILED' ELSE 'COMPLETED' END)::commandbus.command_status,
              1, 'w' || n % 20, now() - make_interval(secs => ({count} - n) * 0.25), now(), now(), n,
              CASE WHEN n % 100 = 1 THEN n / 10000 + 1 END, CASE WHEN n % 50 = 0 THEN 'trace-' || n / 500 END,
              json_build_object('order_no', n, 'note', 'some words of a customer that are read by nobody')
         FROM generate_series(1, {count}) n""",
    """INSERT INTO commandbus.attempt (command, number, verdict, finished_at, error_type, error_code, error, rung)
       SELECT id, 1,
              CASE status WHEN 'FAILED' THEN 'BUSINESS_RULE' WHEN 'COMPLETED' THEN 'RETRY' ELSE 'EXHAUSTED' END,
              created_at, 'ValueError', 'E' || id % 7, 'no address for order ' || id,
              CASE WHEN id % 40 = 0 THEN 'stuck' END
         FROM commandbus.command
        WHERE status IN ('FAILED', 'IN_TROUBLESHOOTING_QUEUE') OR (status = 'COMPLETED' AND id % 200 = 0)""",
    """INSERT INTO commandbus.tsq (command, domain, command_type, attempt, error_type, error_code, error)
       SELECT id, domain, command_type, 1, 'ValueError', 'E' || id % 7, 'no address for order ' || id
         FROM commandbus.command WHERE status = 'IN_TROUBLESHOOTING_QUEUE'""",
    """INSERT INTO pgmq.q_orders__commands (msg_id, vt, message) OVERRIDING SYSTEM VALUE
       SELECT msg_id,
              CASE WHEN id % 10 = 0 THEN now() + interval '10 years' WHEN id % 10 = 1 THEN now() + interval '1 day'
                   ELSE now() - interval '1 hour' END + make_interval(secs => id % 1000),
              jsonb_build_object('command', id)
         FROM commandbus.command WHERE status = 'PENDING' AND domain = 'orders'""",
    """INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since,
                                      first_parked_at)
       SELECT domain, command_type, msg_id, id, 'limit', 'docai', created_at, created_at
         FROM commandbus.command WHERE status = 'PENDING' AND domain = 'orders' AND id % 10 = 0""",
    """INSERT INTO commandbus.operator_action (command, action, operator, reason)
       SELECT id, 'RETRY', 'operator-' || id % 9, 'again' FROM commandbus.command WHERE id % 500 = 0""",
    """INSERT INTO commandbus.process (domain, process_id, process_type, status, finished_at)
       SELECT 'orders', 'p-' || n, 'checkout', 'COMPLETED', now() FROM generate_series(1, {count} / 1000) n""",
)  # fmt: skip
_PAGES: Final = (
    "/", "/commands", "/commands?search=domain:orders", "/commands?search=domain:rare",
    "/commands?search=type:seldom",
    "/commands?search=status:failed", "/commands?search=status:tsq", "/commands?search=status:tsq domain:billing",
    "/commands?search=status:pending", "/commands?search=status:in_progress", "/commands?search=status:canceled",
    "/commands?search=correlation:trace-100", "/commands?search=since:1h status:completed",
    "/commands?search=worker:nobody", "/command?domain=orders&id=c-7",
    "/troubleshooting", "/troubleshooting?domain=orders", "/troubleshooting?domain=orders&error_code=E3",
    "/stuck", "/limits", "/schedules", "/batches", "/batch?domain=orders&id=batch-5", "/processes",
    "/process?domain=orders&id=p-5", "/workers", "/domains", "/rejected", "/database", "/audit",
    "/plans", "/keys", "/effects", "/undelivered", "/strays", "/prune?age=1d",
    "/prune?count=12000", "/prune?count=1000000",
    "/audit?operator=operator-3", "/api/concerns", "/api/domains",
)  # fmt: skip
_SEARCHES: Final = (
    "/commands?search=c-12345",
    "/commands?search=data.order_no=17",
    "/commands?search=error:nowhere",
)


def fill(base: Ground, count: int) -> None:
    """The history. Rows that nobody asks for are left out: queue rows of finished commands, for example."""
    for domain in ("orders", "billing", "rare"):
        base.bus.create_domain(domain)
    base.bus.set_limit("docai", concurrency=3)
    for table in _TABLES:
        base.admin.execute(f"ALTER TABLE {table} SET UNLOGGED".encode())
    for statement in _FILL:
        began = time.monotonic()
        base.admin.execute(statement.format(count=count).encode())
        print(f"  {statement.split('(')[0].strip():40} {time.monotonic() - began:7.1f} s", flush=True)
    base.admin.execute(b"VACUUM ANALYZE")


def run(base: Ground, count: int, rounds: int = 30) -> dict[str, float]:
    """Fill, then ask for each page. Returns the p99 of each in milliseconds."""
    print(f"{count} commands", flush=True)
    fill(base, count)
    found = asyncio.run(_measure(base.url, rounds))
    for path, times in found.items():
        p50, p99 = statistics.median(times), _p99(times)
        note = " (searches in payloads or errors)" if path in _SEARCHES else "" if p99 <= MOST_MS else " TOO SLOW"
        print(f"{path:60} p50 {p50:7.1f} ms   p99 {p99:7.1f} ms{note}", flush=True)
    return {path: _p99(times) for path, times in found.items()}


async def _measure(url: str, rounds: int) -> dict[str, list[float]]:
    app = create_console(load_settings({"database_url": url}))
    found: dict[str, list[float]] = {path: [] for path in (*_PAGES, *_SEARCHES)}
    for _ in range(2):
        for path in found:
            await _get(app, path)
    for _ in range(rounds):
        for path, times in found.items():
            began = time.perf_counter()
            status = await _get(app, path)
            times.append((time.perf_counter() - began) * 1000)
            if status not in (200, 303):
                raise SystemExit(f"{path}: status {status}")
    await app.state.console.close()
    return found


async def _get(app: Any, path: str) -> int:
    """One request, as a server would hand it to the application."""
    name, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": name, "raw_path": name.encode(), "query_string": quote(query, safe="=&").encode(),
        "root_path": "", "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    status: list[int] = []
    is_read = False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:
            await asyncio.sleep(3600)
        is_read = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    await app(scope, receive, send)
    return status[0]


def _p99(times: list[float]) -> float:
    return sorted(times)[max(0, round(len(times) * 0.99) - 1)]
