"""The ground of all measurements: a private PostgreSQL with fsync on, filled the same way every time."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from commandbus import CommandBus
from commandbus.embedded import EmbeddedPostgres

DATA = {"order": 4711, "lines": [{"sku": "A-1", "n": 2}], "note": "x" * 60}


class Ground:
    """A server, a bus on it and an admin connection."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bus = CommandBus(url)
        self.bus.migrate()
        self.admin = psycopg.connect(url, autocommit=True)
        self.sent: dict[str, int] = {}
        self.admin.execute(
            "CREATE TABLE IF NOT EXISTS bare "
            "(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, command_type text, data json)"
        )

    def domain(self, name: str) -> str:
        """A fresh, paused domain."""
        self.bus.create_domain(name)
        self.bus.pause(name, operator="bench")
        return name

    def fill(self, domain: str, count: int, *, delay_seconds: float = 0.0, in_batch: bool = False) -> None:
        """Queue commands by one statement, and leave the tables as a settled server would have them."""
        self.insert(domain, count, delay_seconds=delay_seconds, in_batch=in_batch)
        self.settle_down(domain)

    def insert(self, domain: str, count: int, *, delay_seconds: float = 0.0, in_batch: bool = False) -> None:
        """Queue commands by one statement."""
        batch = None
        if in_batch:
            batch = self.one(
                "INSERT INTO commandbus.batch (domain, batch_id, total) VALUES (%s, gen_random_uuid()::text, %s) "
                "RETURNING id", domain, count,
            )  # fmt: skip
        self.admin.execute(
            f"""
            WITH sent AS (
                INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, data, batch)
                SELECT %(domain)s, gen_random_uuid()::text, 'work',
                       nextval('pgmq.q_{domain}__commands_msg_id_seq'), %(data)s, %(batch)s
                  FROM generate_series(1, %(count)s)
                RETURNING id, msg_id
            )
            INSERT INTO pgmq.q_{domain}__commands (msg_id, vt, message) OVERRIDING SYSTEM VALUE
            SELECT msg_id, clock_timestamp() + make_interval(secs => %(delay)s), jsonb_build_object('command', id)
              FROM sent
            """,
            {
                "domain": domain,
                "count": count,
                "data": json.dumps(DATA),
                "delay": delay_seconds,
                "batch": batch,
            },
        )
        self.sent[domain] = self.sent.get(domain, 0) + (0 if delay_seconds else count)

    def settle_down(self, domain: str) -> None:
        """Vacuum and checkpoint, so that no round pays for the one before."""
        self.admin.execute(f"VACUUM ANALYZE pgmq.q_{domain}__commands")
        self.admin.execute("VACUUM ANALYZE commandbus.command")
        self.admin.execute("CHECKPOINT")

    def one(self, query: str, *args: Any) -> Any:
        """The first value of a query."""
        row = self.admin.execute(query, args).fetchone()  # type: ignore[call-overload]
        return row[0]

    def close(self) -> None:
        self.admin.close()
        self.bus.close()


@contextmanager
def ground(url: str | None, binaries: Path | None = None) -> Iterator[Ground]:
    """On the given server, or on an embedded one that is thrown away (with the programs of that folder)."""
    if url is not None:
        made = Ground(url)
        try:
            yield made
        finally:
            made.close()
        return
    folder = tempfile.mkdtemp(prefix="commandbus-bench-")
    os.chmod(folder, 0o755)  # as root the server runs as another user, who must get in
    try:
        settings = {"max_connections": "200", "shared_buffers": "512MB"}
        with EmbeddedPostgres(folder, binaries=binaries, settings=settings) as server:
            made = Ground(server.dsn)
            try:
                yield made
            finally:
                made.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
