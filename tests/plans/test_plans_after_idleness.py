"""Plans of an idle session in a burst: no statement on the path of a command goes by a plan for empty tables.

The tables were new (PostgreSQL takes them for ten pages), vacuumed and empty, or held a few analyzed rows when the
session prepared its statements and ran them. Then they are filled, and nobody analyzes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import psycopg
import pytest
from idle import BATCH, DOMAIN, EMPTY, OF_KEEPERS, SMALL, Idler, Sample, burst, path, pause_autovacuum, take_sample
from plan_reading import Plan

from commandbus import CommandBus, Limit
from commandbus.db.drivers import OwnConnection
from commandbus.db.pool import BY_KEYS
from commandbus.flow.operation import Statement
from support.databases import Databases

pytestmark = [pytest.mark.slow, pytest.mark.plans, pytest.mark.shared_setup]
DIRECT = {"Index Scan", "Index Only Scan", "Tid Scan", "Tid Range Scan", "Bitmap Heap Scan"}
# Rows of one table that a statement may look at: a settle reads its queue rows to lock them, to delete them and to
# say what became of the rest.
MOST = 4 * BATCH + 20
COUNT = 10_000
# Once in two seconds for a whole fleet's limits or batches: these may read a table once.
SWEEPS = {"limit_sweep", "limit_overdue", "batch_sweep"}


@pytest.fixture(scope="module", params=["new", "empty", "few"])
def idlers(request: pytest.FixtureRequest, databases: Databases) -> Iterator[tuple[Idler, Idler, Sample]]:
    """A session that drops its plans, and one that keeps them (`db/pool.py`, BY_KEYS)."""
    with databases.lend(used=False) as url, CommandBus(url) as bus:
        bus.create_domain(DOMAIN)
        bus.create_queue("replies")
        bus.declare_limit(Limit("free", concurrency=10, store="postgres"))
        bus.declare_limit(Limit("full", concurrency=1, store="postgres"))
        with (
            psycopg.connect(url, autocommit=True) as admin,
            OwnConnection.connect(url) as session,
            OwnConnection.connect(url, options=BY_KEYS) as keeping,
        ):
            keeping.goes_by_keys = True
            pause_autovacuum(admin)
            if request.param == "few":
                burst(admin, 20)
            if request.param != "new":
                admin.execute("VACUUM ANALYZE")
            idler, keeper = Idler(session, path(Sample())), Idler(keeping, OF_KEEPERS)
            burst(admin, COUNT)
            yield idler, keeper, take_sample(admin)


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "unprepared"])
@pytest.mark.parametrize("name", path(Sample()))
def test_a_burst_after_idleness(idlers: tuple[Idler, Idler, Sample], name: str, prepared: bool) -> None:
    session, _, sample = idlers
    check(name, session.explain(name, sample, prepared=prepared), EMPTY)


@pytest.mark.parametrize("name", sorted(OF_KEEPERS))
def test_a_burst_on_a_session_that_keeps_its_plans(idlers: tuple[Idler, Idler, Sample], name: str) -> None:
    _, session, sample = idlers
    check(name, session.explain(name, sample, prepared=True))


def test_a_session_that_keeps_its_plans_compiles_none(idlers: tuple[Idler, Idler, Sample]) -> None:
    """Whatever it has to scan: up to PostgreSQL 17 the price of that is above every threshold."""
    _, session, _ = idlers
    plan = session.explain_text(Statement(b"SELECT count(*) FROM commandbus.worker WHERE version = 'x'"))
    assert plan.kinds("worker") == {"Seq Scan"}
    assert "JIT" not in plan.document


def check(name: str, plan: Plan, unused: Set[str] = frozenset()) -> None:
    for relation in plan.relations() - SMALL - unused:
        if name in SWEEPS:
            assert plan.visited(relation) <= 2 * COUNT, plan
        else:
            assert plan.kinds(relation) <= DIRECT, plan
            assert plan.visited(relation) <= MOST, plan
