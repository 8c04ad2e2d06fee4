"""What the server really does when a page of the console is opened again and again: psycopg prepares its
statements, and after five executions PostgreSQL may choose a plan for any values. What is read stays bounded.

The server's own counters say what was read. A session reports them when it ends, so each page has a console of its
own, with one connection.

The tests of other files write into the same database and roll back. That leaves dead rows, which a page walks
over, and autovacuum, which clears them up, counts as a reader of the tables. So they are cleared up before, and
autovacuum does nothing meanwhile. What the crowd's onlooker keeps stays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg
import pytest

from commandbus import Settings
from commandbus.web.app import create_console
from commandbus.web.pages import page_routes
from support.consoles import served
from support.waiting import until
from web.conftest import Visit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.plans,
    pytest.mark.shared_setup("crowded"),
    pytest.mark.parametrize("statistics", ["known"], indirect=True),
]
VISITS = 10
LARGE = ("command", "attempt", "tsq", "q_backlog__commands", "q_delayed__commands", "q_calm__commands")
NAMED = {  # pages that need parameters; what the crowd does not have is looked for all the same
    "/command": "domain=history&id=history-17",
    "/stack": "domain=backlog&id=backlog-100000-17",
    "/plan": "id=1",
    "/limit": "name=docai",
    "/breaker": "name=history/work",
    "/key": "domain=history&name=tenant",
    "/schedule": "domain=history&name=none",
    "/batch": "domain=history&id=none",
    "/process": "domain=history&id=none",
}
MORE = [
    "/commands?search=history-17",
    "/commands?search=status:tsq+domain:trouble",
    "/commands?search=status:failed",
    "/commands?search=correlation:trace",
    "/troubleshooting?domain=trouble&command_type=work",
    "/audit?domain=trouble&since=1h",
    "/prune?count=1000",
    "/metrics",
]
COUNTING = 75_000  # up to 10,000 of each kind in each of the domains
FEW = 1_000
GROUPING = 12_000  # up to 5,000 attempts that were stopped, each with its command
PREVIEWING = 2_500  # the oldest 20,000 commands, and the newest as far as a thousand of them have finished
BLOCKS = {
    "/": COUNTING,
    "/domains": COUNTING,
    "/metrics": COUNTING,
    "/stuck": GROUPING,
    "/prune?count=1000": PREVIEWING,
}


class Read(NamedTuple):
    """What was read of a table: rows by scanning it, and blocks of it and its indexes."""

    scanned: int
    blocks: int


def addresses() -> list[str]:
    """Every page that has a route; each must have its parameters here."""
    app = create_console(Settings(database_url="postgresql://nobody@127.0.0.1:1/none"))
    paths = [route.path for route in page_routes(app.state.console).routes]
    pages = [path for path in paths if not path.endswith(("/events", "/export"))]
    return [f"{path}?{NAMED[path]}" if path in NAMED else path for path in pages] + MORE


def counters(conn: psycopg.Connection[Any]) -> dict[str, Read]:
    rows = conn.execute(
        "SELECT s.relname, s.seq_tup_read, "
        "heap_blks_hit + heap_blks_read + COALESCE(idx_blks_hit + idx_blks_read, 0) "
        "FROM pg_stat_user_tables s JOIN pg_statio_user_tables b USING (relid)"
    ).fetchall()
    return {name: Read(scanned, blocks) for name, scanned, blocks in rows}


@pytest.fixture(scope="module")
def tidy(crowded: str) -> None:
    """The tables without what other tests have rolled back, and without autovacuum."""
    with psycopg.connect(crowded, autocommit=True) as conn:
        tables = conn.execute(
            "SELECT format('%I.%I', schemaname, relname) FROM pg_stat_user_tables "
            "WHERE schemaname IN ('commandbus', 'pgmq')"
        ).fetchall()
        for (table,) in tables:
            conn.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
        conn.execute("VACUUM ANALYZE")


def until_alone(conn: psycopg.Connection[Any]) -> None:
    """Until all sessions but the onlooker of the crowd have ended, and reported."""
    others = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    until(lambda: conn.execute(others).fetchone() == (1,))


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("address", addresses())
def test_a_page_that_is_opened_again_and_again_reads_a_bounded_number_of_blocks(
    crowded: str, statistics: str, address: str
) -> None:
    with psycopg.connect(crowded, autocommit=True) as conn:
        if conn.info.server_version < 150_000:
            pytest.skip("before PostgreSQL 15 the counters of a session arrive some time after its end")
        until_alone(conn)
        before = counters(conn)
        app = create_console(Settings(database_url=crowded), connections=1)
        with served(app) as port:
            for _ in range(VISITS):
                assert Visit(port).get(address).status in (200, 303, 404)
        until_alone(conn)
        after = counters(conn)
    read = {name: Read(*(a - b for a, b in zip(after[name], was, strict=True))) for name, was in before.items()}
    seen = {name: one for name, one in read.items() if any(one)}
    assert all(read[name].scanned == 0 for name in LARGE), seen
    assert sum(one.blocks for one in read.values()) <= VISITS * BLOCKS.get(address, FEW), seen
