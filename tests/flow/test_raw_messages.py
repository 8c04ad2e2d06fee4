"""Messages of other PGMQ clients: commands if they carry the envelope, moved aside with a reason if not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from flow_harness import (
    Bus,
    at_once,
    expire_leases,
    fail,
    one,
    queue_length,
    send_raw,
    sync_only,
    wait_until_blocked,
)

from commandbus import BusinessRuleException, CommandBus, CommandStatus
from commandbus.flow.commands.claim import claim, put_right
from commandbus.flow.commands.inspect import list_rejected
from commandbus.model.priority import HIGH


def _claim_until_quiet(bus: Bus, worker: str = "w1") -> list[Any]:
    """Claim as a worker would, again after an adoption, until the queue has nothing more to give."""
    got = []
    while True:
        found = bus.claim_raw(worker)
        if not found.ready and not found.odd:
            found = bus.claim_raw(worker, band=HIGH)  # also messages of more than five centuries ago
        if not found.ready and not found.odd:
            return got
        got += [row[3] for row in found.ready]
        if found.odd:
            right, _ = bus.put_right(found, worker)
            got += [row.command_id for row in right]


def _rejected(db: psycopg.Connection[Any]) -> dict[int, str]:
    return {row[0]: row[1] for row in db.execute("SELECT msg_id, reason FROM commandbus.rejected_message")}


def test_an_envelope_is_adopted_and_runs(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.create_queue("answers")
    envelope = {
        "command_type": "Ship",
        "data": {"n": [1, None, "ü"]},
        "command_id": "theirs",
        "correlation_id": "c",
        "reply_to": "answers",
        "max_attempts": 2,
        "timeout": 45,
        "headers": {"trace": 1},
    }
    msg_id = send_raw(db, json.dumps(envelope))
    found = orders.claim_raw()
    assert found.ready == []
    assert orders.put_right(found) == ([], 1)
    record = orders.get_command("orders", "theirs")
    for field, value in envelope.items():
        assert getattr(record, field) == value
    assert (record.status, record.attempts) == (CommandStatus.PENDING, 0)
    attempt = orders.claim_one()
    assert attempt.msg_id == msg_id
    assert (attempt.number, attempt.charge, attempt.command().data) == (1, 1, {"n": [1, None, "ü"]})
    orders.settle(fail(attempt, ValueError()))
    attempt = orders.claim_one()
    assert (attempt.number, attempt.charge) == (2, 2)
    assert orders.settle(attempt.complete('"done"')) == {}
    assert orders.get_command("orders", "theirs").result == "done"
    assert one(db, "SELECT message ->> 'result' FROM pgmq.q_answers") == "done"
    assert queue_length(db) == 0
    assert [entry.event.value for entry in orders.get_audit_trail("orders", "theirs")] == [
        *("SENT", "RECEIVED", "FAILED", "RETRY_SCHEDULED", "RECEIVED", "COMPLETED")
    ]


def test_the_least_is_enough(orders: Bus, db: psycopg.Connection[Any]) -> None:
    msg_id = send_raw(db, '{"command_type": "Ship"}')
    assert _claim_until_quiet(orders) == [f"pgmq-orders__commands-{msg_id}"]


def test_a_message_read_by_others_before_starts_at_attempt_one(orders: Bus, db: psycopg.Connection[Any]) -> None:
    send_raw(db, '{"command_type": "Ship", "command_id": "k", "max_attempts": 1}')
    for _ in range(3):
        db.execute("SELECT * FROM pgmq.read('orders__commands', 0, 1)")
    orders.put_right(orders.claim_raw())
    attempt = orders.claim_one()
    assert (attempt.read_ct, attempt.number, attempt.charge) == (5, 1, 1)
    orders.settle(fail(attempt, BusinessRuleException("no")))
    assert orders.get_command("orders", "k").attempts == 1


def test_headers_of_the_foreign_client_are_no_holder(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """Even if they look like ours: nothing is written down as lost, nothing counts as running."""
    forged = [
        '{"held_by": "somebody", "since": "2020-01-01T00:00:00Z"}',
        '{"held_by": 5}',
        '{"before": {"before": {"held_by": "x"}}}',
        '{"held_by": "x", "since": "no time"}',
        '{"trace": "t"}',
        "[]",
        "5",
        '"text"',
        "null",
    ]
    for n, headers in enumerate(forged):
        send_raw(db, json.dumps({"command_type": "Ship", "command_id": f"k{n}"}), headers)
    bad = send_raw(db, '{"no": "type"}', forged[0])
    got = _claim_until_quiet(orders)
    assert sorted(got) == [f"k{n}" for n in range(len(forged))]
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0
    assert list(_rejected(db)) == [bad]
    assert {record.attempts for record in orders.query_commands().items} == {1}


HOSTILE = [
    ("null", "null"),
    ("[]", "an array"),
    ("[[[]]]", "an array"),
    ('"command"', "a string"),
    ("5", "a number"),
    ("true", "a boolean"),
    ("{}", "no command_type"),
    ('{"command": 1}', "no command 1"),
    ('{"command": "1"}', "no command"),
    ('{"command": 1e400}', "no command 1000"),
    ('{"command": 1e5000}', "digits"),
    ('{"command": -1}', "no command -1"),
    ('{"command": 999999999999999999}', "no command"),
    ('{"command": 99999999999999999999999}', "no command"),
    ('{"command": 1.5}', "no command 1.5"),
    ('{"command": null}', "no command None"),
    ('{"command": [1]}', "no command"),
    ('{"command": {"command": 1}}', "no command"),
    ('{"command_type": ""}', "command_type ''"),
    ('{"command_type": 5}', "command_type 5"),
    ('{"command_type": null}', "command_type None"),
    ('{"command_type": "a\\nb"}', "control characters"),
    ('{"command_type": "x", "command_id": ""}', "command_id"),
    ('{"command_type": "x", "command_id": 5}', "command_id"),
    ('{"command_type": "x", "reply_to": "x; drop table y"}', "reply_to"),
    ('{"command_type": "x", "max_attempts": 0}', "max_attempts"),
    ('{"command_type": "x", "timeout": -1}', "timeout: -1 is negative"),
    ('{"command_type": "x", "timeout": "soon"}', "timeout: 'soon' is not a duration"),
    ('{"command_type": "x", "timeout": [5]}', "timeout: [5] is not a duration"),
    ('{"command_type": "x", "max_attempts": 1e5000}', "digits"),
    ('{"command_type": "x", "max_attempts": 99999999999999}', "max_attempts"),
    ('{"command_type": "x", "headers": [1]}', "headers"),
    ('{"command_type": "x", "headers": {"a": ' + "9" * 400 + ".5}}", "headers is not JSON"),
    ('{"command_type": "x", "data": ' + "9" * 400 + ".5}", "data is not JSON"),
    ('{"command_type": "x", "data": ' + "9" * 5000 + "}", "digits"),
    ('{"command_type": "x", "unknown": 1}', "unknown field 'unknown'"),
    ('{"command_type": "x", "' + "k" * 5000 + '": 1}', "unknown field"),
    ('{"command_type": "x", "data": ' + "[" * 3000 + "]" * 3000 + "}", ""),
    ("[" * 3000 + "]" * 3000, ""),
    ('{"command_type": "x", "data": "' + "x" * 1_048_576 + '"}', "1048578 bytes"),
]


def test_what_is_no_command_is_moved_aside_and_the_queue_goes_on(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="before")
    reasons = {send_raw(db, message): reason for message, reason in HOSTILE}
    orders.send("orders", "Ship", command_id="after")
    assert _claim_until_quiet(orders) == ["before", "after"]
    found = _rejected(db)
    assert found.keys() == reasons.keys()
    for msg_id, reason in reasons.items():
        assert reason in found[msg_id], (found[msg_id][:200], reason)
        assert 0 < len(found[msg_id]) < 3000
    assert queue_length(db) == 2
    assert one(db, "SELECT message FROM commandbus.rejected_message ORDER BY id LIMIT 1") is None
    (status,) = orders.status("orders")
    assert status.rejected == len(HOSTILE)
    listed = orders.run(list_rejected(domain="orders", limit=100))
    assert {message.msg_id for message in listed} == reasons.keys()


@sync_only
@pytest.mark.parametrize("field", ["data", "headers"])
def test_every_nesting_is_adopted_or_moved_aside(orders: Bus, db: psycopg.Connection[Any], field: str) -> None:
    """Around the depth at which Python's parser gives up: whichever step is the first to, none stops the queue."""
    depths = [*range(900, 1000, 1)]
    for depth in depths:
        nested = '{"a":' * depth + "1" + "}" * depth
        send_raw(db, f'{{"command_type": "x", "command_id": "k{depth}", "{field}": {nested}}}')
    got = _claim_until_quiet(orders)
    assert len(got) + len(_rejected(db)) == len(depths)
    assert queue_length(db) == len(got)


def test_a_forged_reference_to_another_command_is_moved_aside(orders: Bus, db: psycopg.Connection[Any]) -> None:
    sent = orders.send("orders", "Ship", command_id="real", delay=600)
    orders.create_domain("billing")
    other = orders.send("billing", "Ship", command_id="other")
    forged = [send_raw(db, f'{{"command": {sent.id}}}'), send_raw(db, f'{{"command": "{sent.id}"}}')]
    forged.append(send_raw(db, f'{{"command": {other.id}}}'))
    held = orders.claim_raw()
    assert orders.get_command("orders", "real").status is CommandStatus.PENDING, "nobody runs it"
    assert [record.command_id for record in orders.query_commands(domain="orders", status="PENDING").items] == [
        "real"
    ]
    assert orders.query_commands(status="IN_PROGRESS").items == []
    orders.put_right(held)
    assert sorted(_rejected(db)) == sorted(forged)
    assert orders.get_command("orders", "real").status is CommandStatus.PENDING
    assert orders.get_command("billing", "other").status is CommandStatus.PENDING


def test_a_forged_reference_to_a_command_of_another_domain(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """Queues count their messages each from 1, so the msg_id alone may well agree."""
    orders.create_domain("billing")
    other = orders.send("billing", "Ship", command_id="other")
    forged = send_raw(db, f'{{"command": {other.id}}}')
    assert one(db, "SELECT msg_id FROM commandbus.command") == forged
    assert _claim_until_quiet(orders) == []
    assert list(_rejected(db)) == [forged]
    attempt = orders.claim_one(domain="billing")
    assert orders.settle(attempt.complete(None)) == {}
    assert orders.get_command("billing", "other").status is CommandStatus.COMPLETED


def test_duplicates(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", command_id="ours")
    envelope = '{"command_type": "Ship", "command_id": "%s"}'
    ours = send_raw(db, envelope % "ours")
    first = send_raw(db, envelope % "theirs")
    second = send_raw(db, envelope % "theirs")
    assert sorted(_claim_until_quiet(orders)) == ["ours", "theirs"]
    found = _rejected(db)
    assert found.keys() == {ours, second}
    assert all("was sent before" in reason for reason in found.values())
    assert one(db, "SELECT msg_id FROM commandbus.command WHERE command_id = 'theirs'") == first
    late = send_raw(db, envelope % "theirs")
    _claim_until_quiet(orders)
    assert late in _rejected(db)


@pytest.mark.parametrize("vt", ["-infinity", "0001-01-01 BC", "1969-01-01"])
def test_a_message_from_the_beginning_of_time(orders: Bus, db: psycopg.Connection[Any], vt: str) -> None:
    """pgmq.send takes any timestamp; psycopg cannot load every one."""
    for n in range(3):
        message = json.dumps({"command_type": "Ship", "command_id": f"k{n}"})
        db.execute("SELECT pgmq.send('orders__commands', %s::jsonb, %s::timestamptz)", (message, vt))
    (status,) = orders.status("orders")
    assert status.ready == 3
    assert sorted(_claim_until_quiet(orders)) == ["k0", "k1", "k2"]


def test_a_message_at_the_end_of_time_waits(orders: Bus, db: psycopg.Connection[Any]) -> None:
    from commandbus.flow.commands.claim import next_due

    message = json.dumps({"command_type": "Ship", "command_id": "k"})
    for vt in ("infinity", "20000-01-01", "2499-12-31"):
        db.execute("SELECT pgmq.send('orders__commands', %s::jsonb, %s::timestamptz)", (message, vt))
    assert _claim_until_quiet(orders) == []
    assert orders.run(next_due("orders")).seconds is None
    (status,) = orders.status("orders")
    assert status.ready == 0


def test_a_worker_that_dies_before_adoption_changes_nothing(orders: Bus, db: psycopg.Connection[Any]) -> None:
    send_raw(db, '{"command_type": "Ship", "command_id": "k"}')
    bad = send_raw(db, "[]")
    orders.claim_raw("dead")
    assert one(db, "SELECT count(*) FROM commandbus.command") == 0
    expire_leases(db)
    late = orders.claim_raw("w2")
    expire_leases(db)
    assert _claim_until_quiet(orders, "w3") == ["k"]
    assert list(_rejected(db)) == [bad]
    assert orders.get_command("orders", "k").attempts == 1
    assert orders.put_right(late, "w2") == ([], 0), "it is somebody else's by now"
    assert list(_rejected(db)) == [bad]
    assert one(db, "SELECT headers ->> 'held_by' FROM pgmq.q_orders__commands") == "w3"


@sync_only
def test_a_message_that_another_claimer_looks_at_is_waited_for(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """A claimer that comes a moment later locks the row to see that it is taken; it is no bad message for that."""
    good = send_raw(db, '{"command_type": "Ship", "command_id": "k"}')
    found = orders.claim_raw()
    with psycopg.connect(orders.url) as other, ThreadPoolExecutor(1) as threads:
        other.execute("SELECT FROM pgmq.q_orders__commands WHERE msg_id = %s FOR UPDATE", (good,))
        putting = threads.submit(orders.put_right, found)
        wait_until_blocked(db)
        other.commit()
        assert putting.result(30) == ([], 1)
    assert _rejected(db) == {}
    assert orders.claim_one().command_id == "k"


@sync_only
def test_claimers_at_once_adopt_every_message(orders: Bus, db: psycopg.Connection[Any]) -> None:
    count = 150
    for n in range(count):
        send_raw(db, f'{{"command_type": "Ship", "command_id": "k{n}"}}')

    def claimer(name: str) -> list[str]:
        got: list[str] = []
        with CommandBus(orders.url) as bus:
            while one(db_of[name], "SELECT count(*) FROM pgmq.q_orders__commands WHERE vt <= now()"):
                found = bus.run(claim(domain="orders", worker=name, n=9, lease_seconds=600, cursor=None))
                got += [row[3] for row in found.ready]
                if found.odd:
                    bus.run(put_right(domain="orders", worker=name, odd=found.odd, max_bytes=1000))
        return got

    names = ["w1", "w2", "w3"]
    db_of = {name: psycopg.connect(orders.url, autocommit=True) for name in names}
    answers: list[Any] = at_once([lambda name=name: claimer(name) for name in names])
    for conn in db_of.values():
        conn.close()
    assert all(isinstance(answer, list) for answer in answers), answers
    assert sorted(name for answer in answers for name in answer) == sorted(f"k{n}" for n in range(count))
    assert _rejected(db) == {}


def test_a_paused_type_is_parked_after_its_adoption(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.pause("orders", "Ship")
    send_raw(db, '{"command_type": "Ship", "command_id": "k"}')
    assert _claim_until_quiet(orders) == []
    assert orders.get_command("orders", "k").waiting_for == "pause"
    orders.resume("orders", "Ship")
    assert _claim_until_quiet(orders) == ["k"]
