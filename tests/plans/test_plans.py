"""The plans of the hot statements: by index or TID only, and no more rows than the batch asks for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from plan_reading import Plan, explain, first_statement, plans_of

from commandbus.db.drivers import run
from commandbus.flow.commands.claim import Claim, claim, next_due
from commandbus.flow.commands.expire import BEGINNING, due_to_expire, expire
from commandbus.flow.commands.history import BUDGET, list_stuck
from commandbus.flow.commands.operate import cancel, operator_action, set_priority
from commandbus.flow.commands.query import CommandQuery, query_commands
from commandbus.flow.commands.renew import pending_cancels, renew
from commandbus.flow.commands.send import prepare
from commandbus.flow.commands.send_unique import send_unique
from commandbus.flow.commands.settle import settle
from commandbus.flow.commands.tsq import list_tsq
from commandbus.flow.keys.operate import list_lines
from commandbus.flow.keys.positions import positions
from commandbus.flow.keys.release import KEYS, LineKey, ended, find_new, release
from commandbus.model.command import NewCommand
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.model.priority import HIGH, LOW
from commandbus.model.unique_key import OnConflict, UniqueRule
from commandbus.worker.execution.attempt import Attempt

pytestmark = [pytest.mark.slow, pytest.mark.plans, pytest.mark.shared_setup("crowded")]
Conn = psycopg.Connection[Any]
BATCH = 200
DIRECT = {"Index Scan", "Index Only Scan", "Tid Scan", "Tid Range Scan", "Bitmap Heap Scan"}


def queue(domain: str) -> str:
    return f"q_{domain}__commands"


def check_direct(plan: Plan, domain: str, *, batch: int = BATCH, per_row: float = 4) -> None:
    """No scan of the whole queue or of all commands; visited rows are a small multiple of the batch."""
    for relation in (queue(domain), "command"):
        assert plan.kinds(relation) <= DIRECT, plan
        assert plan.visited(relation) <= per_row * batch + 20, plan


def claimed(conn: Conn, domain: str, n: int = BATCH, cursor: datetime | None = None) -> Claim:
    found = run(conn, claim(domain=domain, worker="w", n=n, lease_seconds=30, cursor=cursor))
    assert len(found.ready) == n
    return found


def attempts(conn: Conn, domain: str, n: int = BATCH) -> list[Attempt]:
    made = [Attempt(domain, row, None, 0.0) for row in claimed(conn, domain, n).ready]
    for attempt in made:
        attempt.started = 1.0
    return made


# --- claim ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", ["backlog", "delayed"])
def test_claim(conn: Conn, generic: bool, domain: str) -> None:
    statement = first_statement(claim(domain=domain, worker="w", n=BATCH, lease_seconds=30, cursor=None))
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == BATCH
    check_direct(plan, domain)
    assert plan.buffers < 30 * BATCH, plan


def test_claim_from_a_cursor(conn: Conn, generic: bool) -> None:
    cursor = claimed(conn, "backlog").last_vt
    statement = first_statement(claim(domain="backlog", worker="w", n=BATCH, lease_seconds=30, cursor=cursor))
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == BATCH
    check_direct(plan, "backlog")


def test_an_idle_claim_behind_delayed_messages_visits_next_to_nothing(conn: Conn, generic: bool) -> None:
    found = claimed(conn, "delayed", 300)
    statement = first_statement(
        claim(domain="delayed", worker="w", n=BATCH, lease_seconds=30, cursor=found.claimed_at)
    )
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == 0
    assert plan.visited(queue("delayed")) == 0, plan
    assert plan.buffers < 20, plan


def test_the_cursor_passes_over_what_a_long_transaction_keeps(conn: Conn, generic: bool) -> None:
    """Without it a claim walks over all that was settled since that transaction began."""
    first = conn.execute("SELECT min(vt) FROM pgmq.q_shadow__commands").fetchone()
    assert first is not None
    plans = {}
    for name, cursor in (("from the beginning", None), ("from the cursor", first[0])):
        statement = first_statement(claim(domain="shadow", worker=name, n=50, lease_seconds=30, cursor=cursor))
        plans[name] = explain(conn, statement, generic=generic)
        assert plans[name].rows == 50
        check_direct(plans[name], "shadow", batch=50)
    assert plans["from the cursor"].buffers < 30 * 50, plans
    assert plans["from the cursor"].buffers < plans["from the beginning"].buffers / 3, plans


@pytest.mark.parametrize("band", [HIGH, LOW])
def test_claim_of_another_priority(conn: Conn, generic: bool, band: int) -> None:
    """It visits only its own band, and the claim of normal ones looks at one entry of it. Statistics that know
    nothing of the band yet would choose a bitmap, which a session that goes by keys does not."""
    conn.execute("SET LOCAL enable_bitmapscan = off")
    shift = "- interval '8766000 hours'" if band == HIGH else "+ interval '8766000 hours'"
    conn.execute(f"UPDATE pgmq.q_backlog__commands SET vt = vt {shift} WHERE msg_id % 50 = 0".encode())
    statement = first_statement(
        claim(domain="backlog", worker="w", n=BATCH, lease_seconds=30, cursor=None, band=band)
    )
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == BATCH
    check_direct(plan, "backlog")
    normal = run(conn, claim(domain="backlog", worker="w", n=5, lease_seconds=30, cursor=None))
    assert normal.others == (1 if band == HIGH else 2)


def test_set_priority(conn: Conn, generic: bool) -> None:
    waiting = conn.execute("SELECT command_id FROM commandbus.command WHERE domain = 'backlog' LIMIT 1").fetchone()
    assert waiting is not None
    statement = first_statement(set_priority("backlog", waiting[0], "high", operator_action("ann")))
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == 1
    check_direct(plan, "backlog", batch=1)


def test_next_due(conn: Conn, generic: bool) -> None:
    """Also under the long transaction: the ends of leases that were settled long ago are not walked over."""
    for domain, within in (("calm", 1e9), ("calm", 1.0), ("shadow", 1.0)):
        plan = explain(conn, first_statement(next_due(domain, within_seconds=within)), generic=generic)
        assert plan.kinds(queue(domain)) <= {"Index Scan", "Index Only Scan"}, plan
        assert plan.visited(queue(domain)) <= 1, plan
        assert plan.buffers < 20, plan


# --- settle and renew -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", ["backlog", "delayed", "shadow"])
@pytest.mark.parametrize("waiting", [False, True], ids=["skipping", "waiting"])
def test_settle_final(conn: Conn, generic: bool, domain: str, waiting: bool) -> None:
    n = 1 if waiting else BATCH
    made = attempts(conn, domain, n)
    statement = first_statement(settle(domain, "w", [each.complete(None) for each in made], waiting=waiting))
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == 0, "all were settled"
    check_direct(plan, domain, batch=n)
    assert plan.buffers < 40 * n + 50, plan


@pytest.mark.parametrize("domain", ["backlog", "delayed", "shadow"])
def test_settle_again(conn: Conn, generic: bool, domain: str) -> None:
    retry = Judgement(Verdict.RETRY, Failure("Error", "ERROR", "x"), 60.0)
    made = attempts(conn, domain)
    outcomes = [each.fail(retry) if number % 2 else each.give_back() for number, each in enumerate(made)]
    plan = explain(conn, first_statement(settle(domain, "w", outcomes)), generic=generic)
    assert plan.rows == 0
    check_direct(plan, domain)
    assert plan.buffers < 60 * BATCH, plan


@pytest.mark.parametrize("domain", ["backlog", "delayed", "shadow"])
def test_renew(conn: Conn, generic: bool, domain: str) -> None:
    fences = list(attempts(conn, domain))
    plan = explain(conn, first_statement(renew(domain, "w", fences, lease_seconds=60)), generic=generic)
    assert plan.rows == 0
    check_direct(plan, domain)


@pytest.mark.parametrize("domain", ["backlog", "delayed", "shadow"])
def test_renew_with_progress(conn: Conn, generic: bool, domain: str) -> None:
    fences = list(attempts(conn, domain))
    progress = dict.fromkeys([each.msg_id for each in fences], '{"done": 5}')
    statement = first_statement(renew(domain, "w", fences, lease_seconds=60, progress=progress))
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == 0
    check_direct(plan, domain)


@pytest.mark.parametrize("domain", ["backlog", "shadow"])
def test_pending_cancels(conn: Conn, generic: bool, domain: str) -> None:
    fences = list(attempts(conn, domain))
    asked = fences[7].msg_id
    conn.execute(
        f'UPDATE pgmq.{queue(domain)} SET headers = headers || \'{{"cancel": {{"by": "ann"}}}}\' '
        f"WHERE msg_id = {asked}".encode()
    )
    plan = explain(conn, first_statement(pending_cancels(domain, "w", fences)), generic=generic)
    assert plan.rows == 1
    check_direct(plan, domain, per_row=1)


@pytest.mark.parametrize("held", [False, True], ids=["waiting", "running"])
def test_cancel(conn: Conn, generic: bool, held: bool) -> None:
    name = attempts(conn, "backlog", 1)[0].command_id if held else "backlog-100000-99999"
    statement = first_statement(cancel("backlog", name, operator_action("ann", action="CANCEL")))
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == 1
    check_direct(plan, "backlog", batch=1)


# --- looking --------------------------------------------------------------------------------------------------


ANALYSED = pytest.mark.parametrize("statistics", ["known"], indirect=True)


@ANALYSED
def test_the_very_first_page_of_commands(conn: Conn) -> None:
    plan = explain(conn, first_statement(query_commands(CommandQuery(), limit=50)), generic=False)
    assert plan.rows == 51
    assert plan.kinds("command") <= {"Index Scan"}, plan
    assert plan.visited("command") == 51, plan


@ANALYSED
def test_one_command_by_its_id(conn: Conn) -> None:
    query = CommandQuery(domain="history", command_id="history-17")
    plan = explain(conn, first_statement(query_commands(query, limit=1)), generic=False)
    assert plan.visited("command") == 1, plan
    assert plan.buffers < 20, plan


def make_late(conn: Conn) -> list[int]:
    """Let some commands that wait expire; returns their ids."""
    picked = conn.execute("SELECT id FROM commandbus.command WHERE domain = 'backlog' LIMIT %s", [BATCH])
    ids = [id_ for (id_,) in picked]
    conn.execute("UPDATE commandbus.command SET expires_at = now() WHERE id = ANY (%s)", [ids])
    return ids


def test_expired_commands_are_found_by_their_expiry(conn: Conn, generic: bool) -> None:
    make_late(conn)
    plan = explain(conn, first_statement(due_to_expire(BEGINNING, 0)), generic=generic)
    assert plan.rows == BATCH
    assert plan.kinds("command") <= DIRECT, plan
    assert plan.visited("command") <= 2 * BATCH, plan


def test_expire(conn: Conn, generic: bool) -> None:
    plan = explain(conn, first_statement(expire("backlog", make_late(conn))), generic=generic)
    assert plan.rows == BATCH
    check_direct(plan, "backlog", per_row=6)


@pytest.mark.parametrize("on_conflict", ["ignore", "replace"])
@pytest.mark.parametrize("key", ["taken", "free"])
def test_send_with_a_key(conn: Conn, generic: bool, key: str, on_conflict: OnConflict) -> None:
    """A function's statements are not in the plan, but the pages that they read are."""
    conn.execute(
        "INSERT INTO commandbus.unique_key (domain, key, command, command_id) "
        "SELECT domain, 'k' || id, id, command_id FROM commandbus.command WHERE domain = 'backlog'"
    )
    picked = conn.execute("SELECT key FROM commandbus.unique_key LIMIT 1").fetchone()
    assert picked is not None
    rule = UniqueRule(picked[0] if key == "taken" else key, "waiting", None, on_conflict)
    for _ in range(2):  # what is run for the first time reads catalogs
        run(conn, send_unique("backlog", prepare(NewCommand("Ship")), rule._replace(key="first")))
    statement = first_statement(send_unique("backlog", prepare(NewCommand("Ship")), rule))
    plan = explain(conn, statement, generic=generic)
    assert plan.rows == 1
    assert plan.buffers < 120, plan


def test_release_of_keys(conn: Conn, generic: bool) -> None:
    """Of 100,000 commands in the lines of 1,001 keys, one of which has half of them, some keys are released."""
    conn.execute(
        "INSERT INTO commandbus.keyed (command, msg_id, domain, key_limit, key, state) "
        "SELECT id, msg_id, domain, 'tenant', CASE WHEN id % 2 = 0 THEN 'big' ELSE 'k' || id / 2 % 1000 END, "
        "'WAITING' "
        "FROM commandbus.command WHERE domain = 'backlog'"
    )
    conn.execute("INSERT INTO commandbus.key_limit VALUES ('backlog', 'tenant', 3, false, true)")
    keys = [LineKey("tenant", "big"), *(LineKey("tenant", f"k{n}") for n in range(20))]
    releasing = release("backlog", keys).steps
    next(releasing)
    plan = explain(conn, releasing.send(list(keys)), generic=generic)
    for relation in (queue("backlog"), "command", "keyed"):
        assert plan.kinds(relation) <= DIRECT, plan
        assert plan.visited(relation) <= 10 * 3 * len(keys), plan
    released = conn.execute("SELECT count(*) FROM commandbus.keyed WHERE state = 'RELEASED'").fetchone()
    assert released == (3 * len(keys),)
    conn.execute("UPDATE commandbus.keyed SET state = 'NEW' WHERE state = 'WAITING' AND command % 3 = 0")
    last = conn.execute("SELECT max(command) FROM commandbus.keyed").fetchone()
    assert last is not None
    looks = {
        "find_new": (find_new("backlog").steps, 110 * KEYS),
        "ended": (ended("backlog", None).steps, 2000),
        "show": (list_lines("backlog", "tenant", keys=None, limit=50).steps, 1001 * 120 + 2000),
        "position": (positions([last[0]]), 110_000),
    }
    for name, (steps, most) in looks.items():
        plan = explain(conn, next(steps), generic=generic)
        assert plan.kinds("keyed") <= DIRECT, (name, plan)
        assert plan.visited("keyed") <= most, (name, plan)


@ANALYSED
def test_list_tsq(conn: Conn, generic: bool) -> None:
    for domain in ("trouble", None):
        listing = list_tsq(domain=domain, command_type=None, error_code=None, limit=50)
        plan = plans_of(conn, listing, generic=generic)[1][-1]
        assert plan.rows == 51  # one more, to know whether there is a next page
        assert plan.kinds("command") <= {"Index Scan"}, plan
        assert plan.visited("command") <= 51, plan
        assert plan.visited("tsq") <= 60, plan


@ANALYSED
@pytest.mark.parametrize("filters", [{}, {"domain": "history"}, {"domain": "history", "command_type": "work"}])
@pytest.mark.parametrize("since", [None, datetime(2020, 1, 1, tzinfo=UTC)])
@pytest.mark.parametrize("cursor", [None, "2100-01-01T00:00:00+00:00|7|1|RETRY"])
def test_list_stuck(
    conn: Conn, generic: bool, filters: dict[str, str], since: datetime | None, cursor: str | None
) -> None:
    """From the newest on, however many there are; never over those that just failed."""
    *bounds, plan = plans_of(conn, list_stuck(**filters, since=since, limit=50, cursor=cursor), generic=generic)[1]
    assert len(bounds) == bool(filters), "a filtered search first looks how far it may go"
    for bound in bounds:
        assert {scan.index for scan in bound.scans("attempt")} == {"attempt_stopped"}, bound
        assert bound.visited("attempt") <= BUDGET, bound
    assert plan.rows == 51  # one more, to know whether there is a next page
    assert {scan.index for scan in plan.scans("attempt")} == {"attempt_stopped"}, plan
    assert plan.visited("attempt") <= 100, plan  # those that ended together are sorted, 32 at a time
    assert plan.kinds("command") <= {"Index Scan"}, plan
    assert plan.visited("command") <= 100, plan
    assert plan.buffers < 400, plan
