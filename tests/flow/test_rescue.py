"""rescue: what a dead worker held, and the end of its connections."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, expire_leases, one, send_raw, sync_only
from psycopg import sql

from commandbus import CommandStatus
from commandbus.flow.commands.database_session import (
    DatabaseSession,
    cancel_session,
    find_session,
    look_at_session,
    terminate_session,
)
from commandbus.flow.commands.rescue import (
    Held,
    Rule,
    claimable_work,
    held_by,
    mark_worker_dead,
    outcome,
    terminate_backends,
)
from commandbus.model.crash_attribution import Finding, Role
from commandbus.model.outcome import Failure
from commandbus.model.retry import RetryPolicy

AT_ONCE = Rule(RetryPolicy(max_attempts=2, backoff_schedule=[0], jitter=0))
STUCK = Failure("ExecutionStuck", "EXECUTION_STUCK", "it froze", rung="kill", duration_ms=1500)
LOST = Failure("WorkerLost", "WORKER_LOST", "it died", rung="crash")


def held(orders: Bus, worker: str = "w1", *, running: list[int] | None = None) -> list[Held]:
    found: list[Held] = orders.run(
        held_by("orders", worker, running=running or [], past_seconds=10, lease_seconds=40)
    )
    return found


def settle(orders: Bus, item: Held, finding: Finding | None, rule: Rule = AT_ONCE) -> dict[tuple[int, int], str]:
    return orders.settle(outcome("orders", item, finding, rule, started=1_700_000_000.0, spread=0.5))


def test_it_finds_what_the_worker_holds_and_nothing_else(orders: Bus, db: psycopg.Connection[Any]) -> None:
    for n in range(4):
        orders.send("orders", "Ship", command_id=f"c{n}", max_attempts=7, reply_to=None, correlation_id="x")
    orders.claim("w1", 2)
    orders.claim("w2", 1)
    found = held(orders)
    assert [item.row.command_id for item in found] == ["c0", "c1"]
    row = found[0].row
    assert (row.command_type, row.read_ct, row.attempt_base, row.waived, row.max_attempts) == ("Ship", 1, 0, 0, 7)
    assert (row.correlation_id, row.before, row.suspect, found[0].cancel) == ("x", None, None, None)
    assert held(orders, "w3") == []


def test_a_long_lease_is_found_by_its_id(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="a")
    attempt = orders.claim_one(lease=3600)
    assert held(orders) == []
    assert [item.row.msg_id for item in held(orders, running=[attempt.msg_id])] == [attempt.msg_id]


def test_a_lease_that_has_just_ended_is_still_rescued(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="a")
    orders.claim_one()
    expire_leases(db)
    assert len(held(orders)) == 1
    orders.claim_one("w2")
    assert held(orders) == []


def test_unstarted_work_is_given_back(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="a")
    orders.claim_one()
    (item,) = held(orders)
    assert settle(orders, item, None) == {}
    again = orders.claim_one("w2")
    assert (again.number, again.charge) == (2, 1)


@pytest.mark.parametrize("role", [Role.BYSTANDER, Role.SUSPECT])
def test_bystanders_and_suspects_are_not_charged(orders: Bus, db: psycopg.Connection[Any], role: Role) -> None:
    orders.send("orders", "Ship", command_id="a")
    orders.claim_one()
    (item,) = held(orders)
    assert settle(orders, item, Finding(role, LOST)) == {}
    again = orders.claim_one("w2")
    assert (again.charge, again.is_suspect) == (1, role is Role.SUSPECT)
    assert one(db, "SELECT verdict || rung FROM commandbus.attempt") == "WAIVEDcrash"


def test_a_culprit_is_charged_until_its_attempts_are_used_up(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="a")
    for _ in range(2):
        orders.claim_one()
        (item,) = held(orders)
        assert settle(orders, item, Finding(Role.CULPRIT, STUCK)) == {}
    assert orders.get_command("orders", "a").status is CommandStatus.IN_TROUBLESHOOTING_QUEUE
    rows = db.execute("SELECT number, verdict, rung, duration_ms, worker FROM commandbus.attempt").fetchall()
    assert rows == [(1, "RETRY", "kill", 1500, "w1"), (2, "EXHAUSTED", "kill", 1500, "w1")]


def test_on_timeout_fail_is_final_for_a_stuck_one_and_its_sender_hears_of_it(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    db.execute("SELECT pgmq.create('answers')")
    final = Rule(AT_ONCE.policy, on_timeout="fail")
    for name, failure in (("stuck", STUCK), ("lost", LOST)):
        orders.send("orders", "Ship", command_id=name, reply_to="answers")
        orders.claim_one()
        (item,) = held(orders)
        settle(orders, item, Finding(Role.CULPRIT, failure), final)
    assert orders.get_command("orders", "stuck").status is CommandStatus.FAILED
    assert orders.get_command("orders", "lost").status is CommandStatus.PENDING
    (reply,) = [row[0] for row in db.execute("SELECT message FROM pgmq.q_answers")]
    assert (reply["command_id"], reply["outcome"], reply["error"]["code"]) == (
        "stuck",
        "FAILED",
        "EXECUTION_STUCK",
    )


def test_a_requested_cancel_is_fulfilled(orders: Bus) -> None:
    orders.send("orders", "Ship", command_id="a")
    orders.claim_one()
    orders.cancel("orders", "a", operator="eve", reason="not needed")
    (item,) = held(orders)
    assert item.cancel is not None
    assert item.cancel.error == "canceled by eve: not needed"
    assert settle(orders, item, Finding(Role.SUSPECT, LOST)) == {}
    assert orders.get_command("orders", "a").status is CommandStatus.CANCELED


def test_raw_messages_and_lost_predecessors_are_seen(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="a")
    orders.claim_raw("w0")
    expire_leases(db)
    send_raw(db, '{"command_type": "Ship", "data": 1}')
    orders.claim_raw("w1")  # and it dies before it has put anything right
    known, raw = held(orders)
    assert (known.row.command_id, known.row.before) == ("a", True)
    assert (raw.row.id, raw.row.before) == (None, None)


def test_the_registry_hears_of_the_death(orders: Bus, db: psycopg.Connection[Any]) -> None:
    db.execute(
        "INSERT INTO commandbus.worker (id, host, pid, domains, concurrency, version, state, running) "
        "VALUES ('w1', 'h', 1, '{}', 4, '1', 'ACTIVE', 3), ('w2', 'h', 2, '{}', 4, '1', 'ACTIVE', 3)"
    )
    db.execute("INSERT INTO commandbus.waiting VALUES ('orders', 'w1', now()), ('orders', 'w2', now())")
    orders.run(mark_worker_dead("w1"))
    rows = db.execute("SELECT id, state, running FROM commandbus.worker ORDER BY id").fetchall()
    assert rows == [("w1", "STOPPED", 0), ("w2", "ACTIVE", 3)]
    assert db.execute("SELECT worker FROM commandbus.waiting").fetchall() == [("w2",)]


def test_the_scout_sees_what_could_be_claimed(orders: Bus, db: psycopg.Connection[Any]) -> None:
    seen = orders.run(claimable_work("orders"))
    assert (seen.ready, seen.oldest_seconds, seen.in_tsq) == (0, None, 0)
    for n in range(3):
        orders.send("orders", "Ship", command_id=f"c{n}")
    db.execute("UPDATE pgmq.q_orders__commands SET enqueued_at = '2026-01-01Z'")
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '60 s' WHERE msg_id = 1")
    orders.claim_raw(n=1)
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '20 s' WHERE msg_id = 2")
    seen = orders.run(claimable_work("orders"))
    assert seen.ready == 2
    assert 20 <= seen.oldest_seconds < 40
    orders.pause("orders", operator="me")
    seen = orders.run(claimable_work("orders"))
    assert (seen.ready, seen.oldest_seconds) == (0, None)


# --- connections -------------------------------------------------------------------------------------------


@contextmanager
def session(database: str, name: str, **more: Any) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, application_name=name, autocommit=True, **more) as conn:
        yield conn


def is_open(db: psycopg.Connection[Any], conn: psycopg.Connection[Any]) -> bool:
    found: bool = one(db, "SELECT count(*) > 0 FROM pg_stat_activity WHERE pid = %s", conn.info.backend_pid)
    return found


def began(db: psycopg.Connection[Any], conn: psycopg.Connection[Any]) -> int:
    query = "SELECT (extract(epoch FROM backend_start) * 1000000)::bigint FROM pg_stat_activity WHERE pid = %s"
    found: int = one(db, query, conn.info.backend_pid)
    return found


@sync_only
def test_the_connections_of_one_worker_end(orders: Bus, db: psycopg.Connection[Any], database: str) -> None:
    with (
        session(database, "commandbus w_1 settler") as its,
        session(database, "renamed") as known,
        session(database, "commandbus wx1 settler") as other,
        session(database, "commandbus w_11 settler") as longer,
    ):
        later = DatabaseSession(
            other.info.backend_pid, began(db, other) + 1
        )  # of a process id that somebody else has now
        sessions = [DatabaseSession(known.info.backend_pid, began(db, known)), later]
        assert orders.run(terminate_backends("w_1", sessions)) == (2, 0)
        while is_open(db, its) or is_open(db, known):
            pass
        assert orders.run(terminate_backends("w_1", sessions)) == (0, 0)
        assert is_open(db, other)
        assert is_open(db, longer)


@sync_only
def test_a_session_whose_process_id_is_somebody_elses_by_now_is_left_alone(
    orders: Bus, db: psycopg.Connection[Any], database: str
) -> None:
    """A stuck attempt's session is known by its process id and by when it began."""
    with session(database, "somebody else") as other:
        pid, started = other.info.backend_pid, began(db, other)
        for wrong in (DatabaseSession(pid, started - 1), DatabaseSession(pid, started + 1)):
            assert not orders.run(cancel_session(wrong))
            assert not orders.run(terminate_session(wrong))
            assert orders.run(look_at_session(wrong)) is None
        assert is_open(db, other)
        assert orders.run(find_session(pid, 0, None)) is None, "one that nobody has asked about is not named"
        assert orders.run(terminate_session(DatabaseSession(pid, started)))
        assert not is_open(db, other)


@sync_only
def test_another_roles_connection_is_left_alone_and_told(
    orders: Bus, db: psycopg.Connection[Any], database: str, server_admin: Callable[[sql.Composable], None]
) -> None:
    stranger = f"stranger_{uuid.uuid4().hex[:8]}"
    server_admin(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(stranger)))
    try:
        with session(database, "commandbus w1 handlers", user=stranger) as theirs:
            assert orders.run(terminate_backends("w1")) == (0, 1)
            assert is_open(db, theirs)
    finally:
        server_admin(sql.SQL("DROP ROLE {}").format(sql.Identifier(stranger)))


@sync_only
def test_a_role_without_statistics_is_told_of_anothers_connection_too(
    orders: Bus, db: psycopg.Connection[Any], database: str, server_admin: Callable[[sql.Composable], None]
) -> None:
    """To such a role the server does not say what kind of session another role has. It must not take that for
    nobody: a statement which that session left running could still commit."""
    plain, stranger = (f"{name}_{uuid.uuid4().hex[:8]}" for name in ("plain", "stranger"))
    for role in (plain, stranger):
        server_admin(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
    try:
        with (
            session(database, "commandbus w1 handlers", user=stranger) as theirs,
            session(database, "commandbus w1 settler", user=plain) as own,
            session(database, "coroner", user=plain) as conn,
        ):
            kind = "SELECT backend_type FROM pg_stat_activity WHERE pid = %s"
            assert one(conn, kind, theirs.info.backend_pid) is None, "it is hidden"
            assert orders.run(terminate_backends("w1"), conn) == (1, 1)
            while is_open(db, own):
                pass
            assert is_open(db, theirs)
            assert orders.run(terminate_backends("w1"), conn) == (0, 1)
            assert orders.run(terminate_backends("w2"), conn) == (0, 0), (
                "processes of the server itself do not count"
            )
    finally:
        for role in (plain, stranger):
            server_admin(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))
