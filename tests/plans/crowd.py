"""A large database to plan for: 100k ready, 100k delayed, 200k finished, 20k in the troubleshooting queue.
Of 100k attempts that failed, every fiftieth had to be stopped.

`backlog`, `delayed`, `history` and `trouble` are domains; so is `shadow`, in which 50k commands were claimed and
settled while a transaction elsewhere stayed open, so that their index entries are all still there. Nothing is
vacuumed or analysed but by the tests themselves. `calm` has delayed messages only, and nobody ever claims there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from commandbus import CommandBus
from commandbus.db.embedded import EmbeddedPostgres
from support.access import plain_address

DOMAINS = ["backlog", "delayed", "history", "trouble", "shadow", "calm"]

PENDING = """
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, data)
    SELECT '{domain}', '{domain}-{count}-' || n, 'work', nextval('pgmq.q_{domain}__commands_msg_id_seq'),
           '{{"n": 1}}' FROM generate_series(1, {count}) n
"""
QUEUED = """
    INSERT INTO pgmq.q_{domain}__commands (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT msg_id, {vt} + make_interval(secs => (id % 1000) * 0.001), jsonb_build_object('command', id)
      FROM commandbus.command WHERE domain = '{domain}' AND msg_id > {after} ORDER BY id
"""
FINISHED = """
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, data, status, attempt, worker,
                                    started_at, finished_at)
    SELECT '{domain}', '{domain}-' || n, 'work', n, '{{"n": 1}}', '{status}', 1, 'w', now(), now()
      FROM generate_series(1, {count}) n
"""


@contextmanager
def crowded_database(
    server: EmbeddedPostgres, server_admin: Callable[[sql.Composable], None], template: str
) -> Iterator[str]:
    """Its address."""
    name = f"crowded_{uuid.uuid4().hex[:12]}"
    copy = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
    server_admin(copy.format(sql.Identifier(name), sql.Identifier(template)))
    url = plain_address(server, name)
    try:
        with CommandBus(url) as bus:
            for domain in DOMAINS:
                bus.create_domain(domain)
        with psycopg.connect(url) as onlooker:
            with psycopg.connect(url, autocommit=True) as conn:  # it ends here, and reports what it has read
                _fill(conn, onlooker)
            yield url
    finally:
        server_admin(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def analyze(url: str) -> None:
    """From now on the planner knows the tables."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("ANALYZE")


def _fill(conn: psycopg.Connection[Any], onlooker: psycopg.Connection[Any]) -> None:
    def run(template: str, **parts: Any) -> None:
        conn.execute(template.format(**parts).encode())

    for table in [
        "commandbus.command",
        "commandbus.tsq",
        "commandbus.attempt",
        "commandbus.parked",
        *(f"pgmq.q_{domain}__commands" for domain in DOMAINS),
    ]:
        run("ALTER TABLE {table} SET (autovacuum_enabled = false)", table=table)
    run(FINISHED, domain="history", status="COMPLETED", count=200_000)
    run(FINISHED, domain="trouble", status="IN_TROUBLESHOOTING_QUEUE", count=20_000)
    run(
        "INSERT INTO commandbus.tsq (command, domain, command_type, attempt, error_code) "
        "SELECT id, domain, command_type, 1, 'ERROR' FROM commandbus.command WHERE domain = 'trouble'"
    )
    run(
        "INSERT INTO commandbus.attempt (command, number, verdict, finished_at, rung) "
        "SELECT id, 1, 'RETRY', now() - make_interval(secs => id), CASE WHEN id % 50 = 0 THEN 'stuck' END "
        "FROM commandbus.command WHERE domain = 'history' ORDER BY id LIMIT 100000"
    )
    run(PENDING, domain="backlog", count=100_000)
    run(QUEUED, domain="backlog", after=0, vt="now() - interval '1 hour'")
    run(PENDING, domain="delayed", count=100_000)
    run(QUEUED, domain="delayed", after=0, vt="now() + interval '1 day'")
    run(PENDING, domain="delayed", count=300)
    run(QUEUED, domain="delayed", after=100_000, vt="now() - interval '1 minute'")
    run(PENDING, domain="calm", count=20_000)
    run(QUEUED, domain="calm", after=0, vt="now() + interval '1 day'")

    onlooker.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    onlooker.execute("SELECT count(*) FROM pgmq.q_shadow__commands")
    run(FINISHED, domain="shadow", status="COMPLETED", count=50_000)
    run(QUEUED, domain="shadow", after=0, vt="now() - interval '1 hour'")
    run("UPDATE pgmq.q_shadow__commands SET vt = now() + interval '30 s', read_ct = 1")
    run("DELETE FROM pgmq.q_shadow__commands")
    run("SELECT setval('pgmq.q_shadow__commands_msg_id_seq', 60000)")
    run(PENDING, domain="shadow", count=20_000)
    run(QUEUED, domain="shadow", after=60_000, vt="now() - interval '1 minute'")
