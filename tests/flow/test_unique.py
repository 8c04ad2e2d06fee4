"""unique and debounce: one command per key, decided by the key's row, also among fifty senders at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from flow_harness import (
    Bus,
    Roles,
    assert_refused,
    at_once,
    expire_leases,
    fail,
    one,
    queue_length,
    raw,
    sync_only,
)

from commandbus import (
    AuditEvent,
    CommandBus,
    CommandStatus,
    DuplicateCommandError,
    InvalidCommandError,
    NewCommand,
    PermanentCommandError,
    SentCommand,
    UniqueConflictError,
    UniqueKeyLockedError,
    UnknownDomainError,
)
from commandbus.flow.commands.send import prepare
from support.waiting import until

Db = psycopg.Connection[Any]
WHILES = ["waiting", "unfinished", "1h"]


def send(bus: Any, data: Any = None, key: str = "invoice-17", **options: Any) -> SentCommand:
    sent: SentCommand = bus.send("orders", "Ship", data, unique=key, **options)
    return sent


def vt_in(db: Db, sent: SentCommand) -> float:
    """In how many seconds a command may run."""
    return float(
        one(
            db,
            "SELECT extract(epoch FROM q.vt - clock_timestamp()) FROM commandbus.command c "
            "JOIN pgmq.q_orders__commands q ON q.msg_id = c.msg_id AND (q.message ->> 'command')::bigint = c.id "
            "WHERE c.id = %s",
            sent.id,
        )
    )


def keys(db: Db) -> int:
    count: int = one(db, "SELECT count(*) FROM commandbus.unique_key")
    return count


# --- what has a key ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unique_while", WHILES)
def test_a_second_one_is_ignored_while_the_first_waits(orders: Bus, db: Db, unique_while: str) -> None:
    first = send(orders, {"n": 1}, unique_while=unique_while)
    assert (first.created, first.replaced) == (True, False)
    again = send(orders, {"n": 2}, unique_while=unique_while, on_conflict="ignore")
    assert again == (*first[:3], False, False)
    with pytest.raises(
        UniqueConflictError, match=f"'invoice-17' .*taken by command '{first.command_id}'"
    ) as caught:
        send(orders, unique_while=unique_while, on_conflict="raise")
    assert (caught.value.domain, caught.value.key, caught.value.command_id) == (
        "orders", "invoice-17", first.command_id,
    )  # fmt: skip
    assert send(orders, key="other", unique_while=unique_while).created
    orders.create_domain("billing")
    assert orders.bus.send("billing", "Ship", unique="invoice-17", unique_while=unique_while).created
    assert queue_length(db) == 2
    assert orders.get_command("orders", first.command_id).data == {"n": 1}


STATES: list[tuple[str, set[str]]] = [  # in this state: who has the key
    ("claimed", {"unfinished", "1h"}),
    ("retried", {"waiting", "unfinished", "1h"}),
    ("lost", {"unfinished", "1h"}),
    ("troubled", {"unfinished", "1h"}),
    ("completed", {"1h"}),
    ("canceled", {"1h"}),
    ("parked", {"waiting", "unfinished", "1h"}),
    ("pruned", {"1h"}),
]


def bring(orders: Bus, db: Db, first: SentCommand, state: str) -> None:
    if state == "parked":
        orders.pause("orders", "Ship", operator="ada")
        assert orders.claim() == []
        return
    if state == "canceled":
        orders.cancel("orders", first.command_id, operator="ada")
        return
    attempt = orders.claim_one()
    if state == "lost":
        expire_leases(db)
    elif state == "retried":
        orders.settle(fail(attempt, ValueError()))
    elif state == "troubled":
        orders.settle(fail(attempt, PermanentCommandError()))
    elif state != "claimed":
        orders.settle(attempt.complete(None))
    if state == "pruned":
        assert orders.prune(age=0).commands == 1


@pytest.mark.parametrize(("state", "kept"), STATES)
@pytest.mark.parametrize("unique_while", WHILES)
@sync_only
def test_what_keeps_a_key(orders: Bus, db: Db, state: str, kept: set[str], unique_while: str) -> None:
    first = send(orders, unique_while=unique_while)
    bring(orders, db, first, state)
    second = send(orders, unique_while=unique_while)
    assert second.created is (unique_while not in kept)
    assert (second.command_id == first.command_id) is (unique_while in kept)
    assert keys(db) == 1
    if second.created:  # and now the second one has it
        assert send(orders, unique_while=unique_while) == (*second[:3], False, False)


def test_a_window_ends(orders: Bus, db: Db) -> None:
    first = send(orders, unique_while="1h")
    db.execute("UPDATE commandbus.unique_key SET taken_at = now() - interval '59 minutes'")
    assert not send(orders, unique_while="1h").created
    db.execute("UPDATE commandbus.unique_key SET taken_at = now() - interval '61 minutes'")
    assert send(orders, unique_while="1h").id != first.id


def test_a_command_without_a_key_writes_none(orders: Bus, db: Db) -> None:
    orders.send("orders", "Ship")
    orders.send_many("orders", [NewCommand("Ship")])
    assert keys(db) == 0


def test_a_command_id_is_looked_at_first(orders: Bus, db: Db) -> None:
    first = send(orders, 1, command_id="a", unique_while="waiting")
    orders.settle(orders.claim_one().complete(None))
    assert send(orders, 1, command_id="a", unique_while="waiting") == (*first[:3], False, False)
    with pytest.raises(DuplicateCommandError, match=r"'a' .*\(data\)"):
        send(orders, 2, command_id="a", key="another", unique_while="waiting")
    assert queue_length(db) == 0
    assert send(orders, 2, command_id="b", unique_while="waiting").created


# --- replace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unique_while", WHILES)
def test_a_waiting_command_is_replaced(orders: Bus, db: Db, unique_while: str) -> None:
    first = send(orders, {"n": 1}, unique_while=unique_while, delay=600, expires="1h", max_attempts=7)
    again = orders.bus.send(
        "orders", "Pack", {"n": 2}, unique="invoice-17", unique_while=unique_while, on_conflict="replace",
        correlation_id="c", headers={"h": 1}, timeout=5, on_exhausted="fail",
    )  # fmt: skip
    assert again == (*first[:3], False, True)
    record = orders.get_command("orders", first.command_id)
    assert (record.command_type, record.data, record.correlation_id, record.headers) == (
        "Pack", {"n": 2}, "c", {"h": 1},
    )  # fmt: skip
    assert (record.max_attempts, record.timeout, record.expires_at, record.on_exhausted) == (None, 5, None, "fail")
    assert queue_length(db) == 1
    send(orders, {"n": 3}, unique_while=unique_while, on_conflict="replace")
    attempt = orders.claim_one()
    assert (attempt.command_id, attempt.number, attempt.charge) == (first.command_id, 1, 1)
    trail = orders.get_audit_trail("orders", first.command_id)
    assert [entry.event for entry in trail][:2] == [AuditEvent.SENT, AuditEvent.REPLACED]
    assert trail[1].details == {"times": 2}
    orders.settle(attempt.complete(None))
    assert orders.get_command("orders", first.command_id).status is CommandStatus.COMPLETED


@pytest.mark.parametrize("unique_while", ["unfinished", "1h"])
@pytest.mark.parametrize("state", ["claimed", "troubled"])
@sync_only
def test_what_has_started_is_not_replaced(orders: Bus, db: Db, unique_while: str, state: str) -> None:
    first = send(orders, 1, unique_while=unique_while)
    bring(orders, db, first, state)
    with pytest.raises(UniqueConflictError, match="cannot be replaced; nothing was sent"):
        send(orders, 2, unique_while=unique_while, on_conflict="replace")
    assert one(db, "SELECT count(*) FROM commandbus.command") == 1
    assert orders.get_command("orders", first.command_id).data == 1


def test_under_waiting_a_claimed_one_is_left_to_run_and_the_new_one_is_sent(orders: Bus, db: Db) -> None:
    first = send(orders, 1, unique_while="waiting")
    attempt = orders.claim_one()
    second = send(orders, 2, unique_while="waiting", on_conflict="replace")
    assert (second.created, second.replaced) == (True, False)
    assert orders.settle(attempt.complete(None)) == {}
    assert orders.get_command("orders", first.command_id).data == 1
    assert orders.claim_one().command_id == second.command_id


def test_the_probe_of_a_breaker_is_not_replaced(orders: Bus, db: Db) -> None:
    first = send(orders, 1, unique_while="waiting")
    db.execute(
        "INSERT INTO commandbus.breaker (domain, command_type, state, probe) "
        "VALUES ('orders', 'Ship', 'HALF_OPEN', %s)",
        [first.id],
    )
    assert send(orders, 2, unique_while="waiting", on_conflict="replace").created
    assert orders.get_command("orders", first.command_id).data == 1
    assert [attempt.command_id for attempt in orders.claim()] == [first.command_id], "the other one is parked"


def test_a_replaced_command_keeps_its_place_its_history_and_its_parking_ends(orders: Bus, db: Db) -> None:
    first = send(orders, 1, unique_while="waiting")
    orders.settle(fail(orders.claim_one(), ValueError()))
    orders.send("orders", "Ship", command_id="later")
    assert send(orders, 2, unique_while="waiting", on_conflict="replace").replaced
    attempt = orders.claim_one()
    assert (attempt.command_id, attempt.number, attempt.charge) == (first.command_id, 2, 1)
    orders.settle(fail(attempt, ValueError()))
    orders.pause("orders", "Ship", operator="ada")
    assert orders.claim() == []
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 2
    assert send(orders, 3, unique_while="waiting", on_conflict="replace").replaced
    assert one(db, "SELECT count(*) FROM commandbus.parked") == 1
    orders.resume("orders", "Ship", operator="ada")
    assert {attempt.command_id for attempt in orders.claim()} == {first.command_id, "later"}


# --- debounce ---------------------------------------------------------------------------------------------------


def test_the_last_one_within_the_window_wins(orders: Bus, db: Db) -> None:
    first = send(orders, 1, debounce="60s")
    assert first.created
    assert 50 < vt_in(db, first) <= 60
    again = send(orders, 2, debounce="100s")
    assert (again.id, again.replaced) == (first.id, True)
    assert 90 < vt_in(db, first) <= 100
    assert queue_length(db) == 1
    assert orders.get_command("orders", first.command_id).data == 2


def test_a_debounced_command_is_put_off_no_longer_than_max_delay(orders: Bus, db: Db) -> None:
    first = send(orders, 1, debounce="60s", max_delay="90s")
    db.execute("UPDATE commandbus.unique_key SET taken_at = taken_at - interval '70 s'")
    send(orders, 2, debounce="60s", max_delay="90s")
    assert 10 < vt_in(db, first) <= 20
    db.execute("UPDATE commandbus.unique_key SET taken_at = taken_at - interval '70 s'")
    assert send(orders, 3, debounce="60s", max_delay="90s").replaced
    due = vt_in(db, first)
    assert due <= 0
    assert send(orders, 4, debounce="60s", max_delay="90s").replaced
    assert vt_in(db, first) <= due, "it keeps its place: further ones do not put it off"
    assert orders.claim_one().command_id == first.command_id
    second = send(orders, 5, debounce="60s", max_delay="90s")
    assert second.created
    assert 50 < vt_in(db, second) <= 60


# --- many at once -----------------------------------------------------------------------------------------------


@pytest.fixture
def fifty(orders: Bus) -> Iterator[list[CommandBus]]:
    buses = [CommandBus(orders.url) for _ in range(50)]
    yield buses
    for bus in buses:
        bus.close()


@sync_only
@pytest.mark.parametrize("unique_while", WHILES)
def test_of_fifty_senders_one_creates(orders: Bus, db: Db, fifty: list[CommandBus], unique_while: str) -> None:
    sent = at_once([lambda bus=bus: send(bus, unique_while=unique_while) for bus in fifty])  # type: ignore[misc]
    receipts = [each for each in sent if isinstance(each, SentCommand)]
    assert len(receipts) == 50, sent
    assert sum(each.created for each in receipts) == 1
    assert len({each.id for each in receipts}) == 1
    assert (queue_length(db), one(db, "SELECT count(*) FROM commandbus.command"), keys(db)) == (1, 1, 1)


@sync_only
def test_fifty_replacers_against_workers_that_claim(orders: Bus, db: Db, fifty: list[CommandBus]) -> None:
    """No command runs with content that a later send replaced, and none that waits is doubled."""
    ran: list[tuple[str, Any]] = []
    unsettled: list[dict[tuple[int, int], str]] = []
    done = threading.Event()

    def work(bus: CommandBus) -> None:
        worker = Bus(bus, None, "sync", orders.url, orders.runner)
        while not done.is_set() or queue_length_of(bus):
            for attempt in worker.claim("w1", 5):
                ran.append((attempt.command_id, int(attempt.row[5])))
                # Not busy: it waits for a sender that looks at the row for a moment.
                unsettled.append(worker.settle(attempt.complete(None), waiting=True))

    def queue_length_of(bus: CommandBus) -> int:
        count: int = bus.run(raw("SELECT count(*) FROM pgmq.q_orders__commands"))[0][0]
        return count

    def replace(number: int, bus: CommandBus) -> list[tuple[str, int]]:
        made = []
        for turn in range(4):
            value = number * 10 + turn
            sent = send(bus, value, unique_while="waiting", on_conflict="replace")
            made.append((sent.command_id, value))
        return made

    with CommandBus(orders.url) as other:
        worker = threading.Thread(target=work, args=(other,))
        worker.start()
        answers = at_once([lambda n=n, bus=bus: replace(n, bus) for n, bus in enumerate(fifty)])  # type: ignore[misc]
        done.set()
        worker.join(60)
    assert all(isinstance(answer, list) for answer in answers), answers
    assert [each for each in unsettled if each] == []
    assert len({command_id for command_id, _ in ran}) == len(ran), "each command ran once"
    in_the_end = dict(db.execute("SELECT command_id, data FROM commandbus.command").fetchall())
    assert dict(ran) == in_the_end, "each ran with the content that it had in the end"
    made = {pair for answer in answers for pair in answer}  # type: ignore[union-attr]
    assert set(ran) <= made
    assert orders.bus.run(raw("SELECT count(*) FROM pgmq.q_orders__commands"))[0][0] == 0


# --- transactions -----------------------------------------------------------------------------------------------


@sync_only
def test_a_second_transaction_waits_for_the_first(orders: Bus, db: Db) -> None:
    with psycopg.connect(orders.url) as first, psycopg.connect(orders.url) as second:
        sent = send(orders, 1, conn=first)
        second.execute("SET lock_timeout = '50ms'")
        with pytest.raises(UniqueKeyLockedError, match=r"'invoice-17' .*locked by another transaction"):
            send(orders, 2, conn=second)
        second.rollback()
        assert send(orders, key="another", conn=second).created, "other keys do not wait"
        assert one(second, "SHOW lock_timeout") == "0", "the first SET was rolled back"
        first.commit()
        assert send(orders, 2, conn=second) == (*sent[:3], False, False)
        assert (one(second, "SHOW lock_timeout"), one(second, "SHOW enable_seqscan")) == ("0", "on")


@sync_only
def test_a_transaction_that_keeps_its_snapshot_is_refused_rather_than_wrong(orders: Bus, db: Db) -> None:
    with psycopg.connect(orders.url) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("SELECT")
        conn.execute("SELECT count(*) FROM commandbus.command")
        send(orders, 1)
        with pytest.raises(psycopg.errors.SerializationFailure):
            send(orders, 2, conn=conn)
        conn.rollback()
        assert not send(orders, 2, conn=conn).created
    assert queue_length(db) == 1


@sync_only
def test_one_that_was_ignored_in_a_transaction_starts_after_the_commit(orders: Bus, db: Db) -> None:
    """So its handler sees what that transaction wrote."""
    first = send(orders, 1, unique_while="waiting")
    with psycopg.connect(orders.url) as conn:
        assert not send(orders, 2, unique_while="waiting", conn=conn).created
        assert orders.claim() == []
    assert orders.claim_one().command_id == first.command_id


@sync_only
def test_a_claim_in_flight_is_waited_for_and_its_row_does_not_stay_locked(orders: Bus, db: Db) -> None:
    send(orders, 1, unique_while="waiting")
    with psycopg.connect(orders.url) as claiming, psycopg.connect(orders.url) as conn:
        orders.bus.run(claim_all(), claiming)
        waiting = threading.Thread(
            target=lambda: answers.append(send(orders, 2, unique_while="waiting", conn=conn))
        )
        answers: list[SentCommand] = []
        waiting.start()
        until(lambda: one(db, "SELECT count(*) FROM pg_locks WHERE NOT granted") > 0)
        claiming.commit()
        waiting.join(15)
        assert answers[0].created
        db.execute("SET lock_timeout = '1s'")
        db.execute("UPDATE pgmq.q_orders__commands SET vt = vt + interval '1 s' WHERE headers ? 'held_by'")


def claim_all() -> Any:
    from commandbus.flow.commands.claim import claim

    return claim(domain="orders", worker="w1", n=10, lease_seconds=30, cursor=None)


SENDER = """
import sys, psycopg
from commandbus import CommandBus
conn = psycopg.connect(sys.argv[1])
CommandBus(sys.argv[1]).send("orders", "Ship", "lost", unique="invoice-17", conn=conn)
print("sent", flush=True)
sys.stdin.read()
"""


@sync_only
def test_a_sender_that_is_killed_before_its_commit_leaves_the_key_free(orders: Bus, db: Db) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, orders.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"sent\n"
        answers: list[SentCommand] = []
        waiting = threading.Thread(target=lambda: answers.append(send(orders, "kept")))
        waiting.start()
        until(lambda: one(db, "SELECT count(*) FROM pg_locks WHERE NOT granted") > 0)
        killed.kill()
        waiting.join(15)
    (sent,) = answers
    assert sent.created
    assert [row[0] for row in db.execute("SELECT data FROM commandbus.command")] == ["kept"]


# --- pruning, roles, bad input ----------------------------------------------------------------------------------


def test_keys_that_nobody_needs_are_pruned(orders: Bus, db: Db) -> None:
    send(orders, key="ended")
    send(orders, key="window", unique_while="1h")
    orders.settle([attempt.complete(None) for attempt in orders.claim()])
    send(orders, key="waits")
    orders.prune(age="100d")
    assert sorted(row[0] for row in db.execute("SELECT key FROM commandbus.unique_key")) == ["waits", "window"]
    db.execute("UPDATE commandbus.unique_key SET until = now() WHERE key = 'window'")
    orders.prune(age="100d")
    assert [row[0] for row in db.execute("SELECT key FROM commandbus.unique_key")] == ["waits"]


def test_a_producer_uses_keys_and_reads_none(orders: Bus, acting: Roles, db: Db) -> None:
    producer = acting("producer")
    first = send(producer, 1)
    assert send(producer, 2) == (*first[:3], False, False)
    assert send(producer, 3, on_conflict="replace").replaced
    assert send(producer, 4, key="k", debounce="1h").created
    assert send(producer, 5, key="k", debounce="1h").replaced
    for statement in (
        "SELECT key FROM commandbus.unique_key",
        "SELECT commandbus.prune_keys('', '', 10)",
        "SELECT commandbus.lock_key('orders', 'k')",
        "SELECT commandbus.replace_command('orders', 1, NULL, '{}', '{}')",
    ):
        assert_refused(lambda statement=statement: producer.run(raw(statement)))  # type: ignore[misc]
    orders.create_domain("billing")
    db.execute(f"REVOKE ALL ON pgmq.q_billing__commands FROM {one(db, PRODUCER)}".encode())
    assert_refused(lambda: producer.send("billing", "Ship", unique="invoice-17"))
    acting("worker").prune(age="100d")
    assert keys(db) == 2


PRODUCER = "SELECT value FROM commandbus.setting WHERE name = 'role.producer'"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"unique": ""}, "unique"),
        ({"unique": 7}, "unique"),
        ({"unique": "a\x00"}, "unique"),
        ({"unique_while": "waiting"}, r"unique_while \('waiting'\) needs unique"),
        ({"on_conflict": "raise"}, r"on_conflict \('raise'\) needs unique"),
        ({"debounce": "5s"}, r"debounce \('5s'\) needs unique"),
        ({"unique": "k", "unique_while": "running"}, "unique_while .*'running' is not a duration"),
        ({"unique": "k", "unique_while": 0}, "unique_while must be longer than 0"),
        (
            {"unique": "k", "on_conflict": "update"},
            "on_conflict must be one of ignore, replace, raise, not 'update'",
        ),
        ({"unique": "k", "max_delay": "5s"}, "max_delay .* needs debounce"),
        ({"unique": "k", "debounce": "soon"}, "debounce: 'soon' is not a duration"),
        ({"unique": "k", "debounce": 0}, "debounce must be longer than 0"),
        (
            {"unique": "k", "debounce": 10, "max_delay": 5},
            r"max_delay \(5\) must not be shorter than debounce \(10\)",
        ),
        ({"unique": "k", "debounce": 10, "delay": 5}, r"delay \(5\) cannot be given with debounce"),
        ({"unique": "k", "debounce": 10, "on_conflict": "raise"}, "on_conflict .* with debounce"),
        ({"unique": "k", "debounce": 10, "expires": 5}, "expires"),
        ({"unique": "k", "on_conflict": "replace", "command_id": "a"}, r"command_id \('a'\) names one content"),
    ],
)
def test_bad_input(orders: Bus, db: Db, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidCommandError, match=said):
        orders.send("orders", "Ship", **options)
    assert (queue_length(db), keys(db)) == (0, 0)


def test_many_at_once_and_batches_take_no_keys(orders: Bus, db: Db) -> None:
    new = NewCommand("Ship", unique="k")
    for act in (lambda: orders.send_many("orders", [new]), lambda: orders.create_batch("orders", [new])):
        with pytest.raises(InvalidCommandError, match=r"command 1 of .*unique \('k'\) is for commands .*bus.send"):
            act()
    with pytest.raises(InvalidCommandError, match=r"bus\.send"):
        prepare(new)
    assert send(orders, key="k").created
    with pytest.raises(UnknownDomainError):
        orders.send("nowhere", "Ship", unique="k", unique_while="waiting")
    assert keys(db) == 1


def test_a_command_says_its_key_and_the_rule_of_its_last_send(orders: Bus, db: Db) -> None:
    def shown(command_id: str) -> str | None:
        record = orders.get_command("orders", command_id)
        assert record is not None
        return None if record.unique is None else f"{record.unique.key}: {record.unique.text}"

    plain = orders.send("orders", "Ship").command_id
    kept = orders.send("orders", "Ship", unique="a").command_id
    timed = orders.send("orders", "Ship", unique="b", unique_while="1h", on_conflict="raise").command_id
    late = orders.send("orders", "Ship", unique="c <b>", debounce="5s").command_id
    assert shown(plain) is None
    assert shown(kept) == "a: unique until it has ended; another one is ignored"
    assert shown(timed) == "b: unique for 1h after it was sent; another one is an error"
    assert shown(late) == "c <b>: debounced for 5s, at most 50s"
    assert orders.send("orders", "Ship", unique="c <b>", debounce="7s", max_delay="1m").replaced
    assert shown(late) == "c <b>: debounced for 7s, at most 1m"
    orders.cancel("orders", kept)
    orders.send("orders", "Ship", unique="a", unique_while="waiting")
    assert shown(kept) == "a: unique until it has ended; another one is ignored; it does not have the key any more"
    assert [item.unique.key for item in orders.query_commands(limit=3) if item.unique is not None] == [
        "a",
        "c <b>",
        "b",
    ]
