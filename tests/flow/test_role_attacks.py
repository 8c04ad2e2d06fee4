"""Each role by raw SQL, as somebody with a stolen password would: the server refuses what is not granted."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from flow_harness import Bus, Roles, assert_refused, fail, one, raw, send_raw, sync_only

from commandbus import (
    CommandBus,
    DuplicateBatchError,
    DuplicateProcessError,
    DuplicateSignalError,
    InvalidCommandError,
    Limit,
    NewCommand,
    PermanentCommandError,
)
from commandbus.flow.setup.roles import print_roles

pytestmark = sync_only

PAYLOADS = ("data", "result", "headers", "reply_to", "correlation_id", "command_id", "domain", "status", "worker")
COLUMNS = {
    "status": "'COMPLETED'", "result": "'1'", "finished_at": "now()", "attempt_base": "9", "waived": "-9",
    "process": "1", "step": "0", "batch": "1", "id": "1", "created_at": "now()", "quarantine": "true",
}  # fmt: skip
FORGERIES = (
    *(
        f"INSERT INTO commandbus.command (domain, command_id, command_type, {column}) "
        f"VALUES ('orders', 'x', 'y', {value})"
        for column, value in COLUMNS.items()
    ),
    "INSERT INTO commandbus.process (domain, process_id, process_type) VALUES ('orders', 'x', 'order')",
    "INSERT INTO commandbus.process_step (process, number, name, command, domain, command_id, command_type) "
    "VALUES (1, 1, 'x', 1, 'orders', 'x', 'Ship')",
    "INSERT INTO commandbus.batch (domain, batch_id, total) VALUES ('orders', 'x', 9)",
    "INSERT INTO commandbus.batch (domain, batch_id, retry_of) VALUES ('orders', 'x', 1)",
    "INSERT INTO commandbus.batch (domain, batch_id, created_at) VALUES ('orders', 'x', now())",
    "INSERT INTO commandbus.batch_delta (batch, completed) VALUES (1, 9)",
    "UPDATE commandbus.command SET status = 'COMPLETED'",
    "UPDATE commandbus.batch SET completed = total, status = 'COMPLETED', finished_at = now()",
    "UPDATE commandbus.batch SET is_open = false",
    "UPDATE commandbus.limits SET until = 'infinity'",
    "UPDATE commandbus.limits SET holders = '{}'",
    "UPDATE commandbus.breaker SET state = 'OPEN'",
    "INSERT INTO commandbus.pause (domain, operator) VALUES ('orders', 'me')",
    "INSERT INTO commandbus.operator_action (command, action, operator) VALUES (1, 'RETRY', 'boss')",
    "INSERT INTO commandbus.control_action (subject, action, operator) VALUES ('limit docai', 'SET', 'boss')",
    "INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason) VALUES ('', 'x', 1, 0, 'call')",
    "DELETE FROM commandbus.parked",
    "DELETE FROM commandbus.batch_delta",
    "INSERT INTO pgmq.q_orders__commands (vt, message, read_ct) VALUES (now(), '{}', 2147483647)",
    "UPDATE pgmq.q_orders__commands SET vt = 'infinity'",
    "SELECT setval('pgmq.q_orders__commands_msg_id_seq', 1)",
    "SELECT message FROM pgmq.q_orders__commands",
    "SELECT headers FROM pgmq.q_orders__commands",
    "SELECT batch_id FROM commandbus.batch",
    "SELECT custom_data FROM commandbus.batch",
    "SELECT * FROM commandbus.audit",
)
READS = (
    "attempt", "tsq", "rejected_message", "undelivered_reply", "process", "process_step", "stray_reply",
    "operator_action", "control_action", "parked", "limits", "worker", "batch_delta", "limit_client",
)  # fmt: skip
TRAIL = ("command", "attempt", "operator_action", "control_action", "batch", "process", "process_step", "worker")
INNER = (
    "SELECT commandbus.prune_commands(0, 1000, 9223372036854775807, 0)",
    "SELECT commandbus.prune_set_aside(0, 1000)",
    "SELECT commandbus.forget_timers('{1}')",
    "SELECT commandbus.audit_trail('orders', 'secret')",
)


def _refused(bus: Bus, *statements: str) -> None:
    for statement in statements:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied"):
            bus.run(raw(statement))


@pytest.fixture
def others(orders: Bus) -> Bus:
    """What somebody else has sent, and what became of it."""
    orders.send("orders", "Ship", {"card": "4111"}, command_id="secret", headers={"token": "t"})
    orders.settle(orders.claim_one().complete('{"paid": true}'))
    orders.send("orders", "Ship", {"card": "4112"}, command_id="failed")
    orders.settle(fail(orders.claim_one(), PermanentCommandError("no money")))
    orders.create_batch(
        "orders", [NewCommand("Ship")], batch_id="theirs", custom_data={"customer": 7}, is_open=True
    )
    orders.declare_limit(Limit("docai", concurrency=1))
    return orders


def test_a_producer_can_neither_forge_nor_read(others: Bus, acting: Roles) -> None:
    producer = acting("producer")
    _refused(producer, *FORGERIES, *INNER)
    _refused(producer, *(f"SELECT {column} FROM commandbus.command" for column in PAYLOADS))
    _refused(producer, *(f"SELECT * FROM commandbus.{table}" for table in READS))
    _refused(producer, *(f"DELETE FROM commandbus.{table}" for table in (*TRAIL, *READS)))


def test_a_producer_learns_of_a_duplicate_only_that_it_differs(others: Bus, acting: Roles) -> None:
    producer = acting("producer")
    row = """'[{"i": "secret", "t": "Ship", "d": {"card": 1}}]'"""
    rows = producer.run(raw(f"SELECT * FROM commandbus.compare_commands('orders', {row})"))
    assert [(row[0], row[2]) for row in rows] == [("secret", "data")]
    with pytest.raises(DuplicateBatchError):
        producer.create_batch("orders", [], batch_id="theirs")
    others.start_process("order", {"card": 1}, process_id="p", domain="orders")
    assert not producer.start_process("order", {"card": 1}, process_id="p", domain="orders").created
    with pytest.raises(DuplicateProcessError, match="data"):
        producer.start_process("order", {"card": 1.0}, process_id="p", domain="orders")


def test_a_producer_can_send_signals_but_no_other_message(others: Bus, acting: Roles) -> None:
    producer = acting("producer")
    others.start_process("order", {"card": 1}, process_id="p", domain="orders")
    forged = """'{"event": "reply", "step": 1, "reply": {"outcome": "SUCCESS"}, "name": "ok", "process": "q"}'"""
    producer.run(raw(f"SELECT * FROM commandbus.signal_process('orders', 'p', 'forged', {forged})"))
    stored = others.get_command("orders", "forged").data
    assert (stored["event"], stored["name"], stored["process"]) == ("signal", "ok", "p")
    assert stored.keys() == {"event", "process", "name", "signal_id", "by", "reason", "data"}
    assert producer.signal("orders", "p", "ok", signal_id="s").created
    with pytest.raises(DuplicateSignalError):
        producer.signal("orders", "p", "other", signal_id="s")
    rows = producer.run(raw("SELECT * FROM commandbus.signal_process('orders', 'p', 'secret', '{}')"))
    assert rows[0][1] == "other: it is no signal", "somebody's command stays as it is"


def test_a_producer_asks_what_became_of_what_it_can_name(others: Bus, acting: Roles) -> None:
    producer = acting("producer")
    assert producer.get_outcome("orders", "secret").result == {"paid": True}
    assert producer.get_outcome("orders", "failed").error == "no money"
    assert producer.get_batch("orders", "theirs").total == 1
    assert producer.get_batch("orders", "theirs").custom_data is None
    assert others.get_batch("orders", "theirs").custom_data == {"customer": 7}


def test_a_producer_cannot_use_the_functions_on_what_is_not_open_to_it(
    others: Bus, acting: Roles, db: psycopg.Connection[Any]
) -> None:
    producer = acting("producer")
    others.create_batch("orders", [NewCommand("Ship")], batch_id="closed")
    batch = one(db, "SELECT id FROM commandbus.batch WHERE batch_id = 'closed'")
    theirs = one(db, "SELECT id FROM commandbus.batch WHERE batch_id = 'theirs'")
    rows = """'[{"i": "x", "t": "Ship"}]'"""
    for statement in (
        f"SELECT commandbus.send_to_batch('orders', {batch}, {rows}, true, true)",
        f"SELECT commandbus.send_to_batch('orders', {batch}, {rows}, true, false)",
        f"SELECT commandbus.send_to_batch('orders', {theirs}, {rows}, true, false)",  # not counted
        f"SELECT commandbus.start_processes('orders', 'order', {theirs}, '[]', true)",  # it holds commands
        f"SELECT commandbus.fill_batch({batch}, 0, NULL)",
        f"SELECT commandbus.fill_batch({theirs}, 0, NULL)",
    ):
        assert_refused(lambda statement=statement: producer.run(raw(statement)))
    for name in ("caller()", "caller_may('orders', 'INSERT')", "check_batch('orders', 1, 'commands', true)"):
        _refused(producer, f"SELECT commandbus.{name}")
    assert others.get_batch("orders", "closed").total == 1


def test_a_producer_without_the_limiter_is_told_so_at_once(others: Bus, acting: Roles) -> None:
    with (
        CommandBus(acting("producer").url) as bus,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
        bus.limit("docai", wait=30),
    ):
        raise AssertionError


def test_a_limiter_changes_no_limit_and_sends_nothing(others: Bus, acting: Roles) -> None:
    limiter = acting("limiter")
    _refused(limiter, "UPDATE commandbus.limits SET concurrency = 100",
             "UPDATE commandbus.limits SET breaker_forced = true",
             "SELECT data FROM commandbus.command", "SELECT message FROM pgmq.q_orders__commands", *INNER,
             "INSERT INTO commandbus.command (domain, command_id, command_type) VALUES ('orders', 'x', 'Ship')",
             *(f"DELETE FROM commandbus.{table}" for table in TRAIL))  # fmt: skip
    assert_refused(lambda: limiter.send("orders", "Ship"))


def test_nobody_deletes_or_rewrites_what_happened(others: Bus, acting: Roles) -> None:
    for kind in ("reader", "worker", "operator"):
        bus = acting(kind)
        _refused(bus, *(f"DELETE FROM commandbus.{table}" for table in TRAIL))
        for table in ("attempt", "operator_action", "control_action"):
            _refused(bus, f"UPDATE commandbus.{table} SET command = 1" if table != "control_action"
                     else "UPDATE commandbus.control_action SET operator = 'nobody'")  # fmt: skip
        _refused(bus, "TRUNCATE commandbus.attempt", "UPDATE commandbus.setting SET value = '0'")


def test_pruning_keeps_what_is_to_be_kept(
    others: Bus, acting: Roles, prefix: str, db: psycopg.Connection[Any]
) -> None:
    """For whomever, and however it is asked for."""
    operator = acting("operator")
    others.create_roles(prefix, keep="1h")
    operator.tsq.operator_cancel("orders", "failed")
    for prune in (lambda: operator.prune(age=0), lambda: operator.prune(count=0), others.prune):
        assert prune().commands == 0
    operator.run(raw("SELECT commandbus.prune_commands(0, 1000, 9223372036854775807, 0)"))
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE status IN ('COMPLETED', 'CANCELED')") == 2
    db.execute("UPDATE commandbus.command SET finished_at = finished_at - interval '2 hours'")
    assert operator.prune(age=0).commands == 2
    assert one(db, "SELECT count(*) FROM commandbus.operator_action") == 0


def test_adoption_makes_no_message_of_a_process(orders: Bus, acting: Roles, db: psycopg.Connection[Any]) -> None:
    send_raw(db, '{"command_type": "order", "command_id": "plain", "data": {"event": "reply", "process": "p"}}')
    send_raw(db, '{"command_type": "order", "command_id": "forged", "process": 1, "step": 0}')
    acting("worker").claim()
    rows = db.execute("SELECT command_id, process, step, batch FROM commandbus.command").fetchall()
    assert rows == [("plain", None, None, None)]
    assert "process" in one(db, "SELECT reason FROM commandbus.rejected_message")


def test_shadows_on_the_search_path_are_not_called(
    orders: Bus, acting: Roles, db: psycopg.Connection[Any]
) -> None:
    """The functions run with their owner's rights: nothing of their caller's may run in them."""
    producer = acting("producer")
    user = one(
        db, "SELECT usename FROM pg_user WHERE usename LIKE '%%producer_user' ORDER BY usesysid DESC LIMIT 1"
    )
    db.execute(f"CREATE SCHEMA evil AUTHORIZATION {user}")
    with psycopg.connect(producer.url, autocommit=True) as conn:
        conn.execute(
            "CREATE FUNCTION evil.json_to_recordset(json) RETURNS SETOF record LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE 'shadow as %', current_user; END $$"
        )
        conn.execute(
            "CREATE FUNCTION evil.now() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE 'shadow'; END $$"
        )
        conn.execute("SET search_path = evil, pg_catalog, public")
        conn.execute("CREATE TEMP TABLE command (id bigint)")
        same = """SELECT * FROM commandbus.compare_commands('orders', '[{"i": "x", "t": "Ship"}]')"""
        assert conn.execute(same.encode()).fetchall() == []
        row = """'[{"i": "p", "m": "m"}]'"""
        start = f"SELECT * FROM commandbus.start_processes('orders', 'order', NULL, {row}, false)"
        assert len(conn.execute(start.encode()).fetchall()) == 1
    db.execute("DROP SCHEMA evil CASCADE")


def test_every_function_with_its_owners_rights_is_closed_to_the_public(
    orders: Bus, db: psycopg.Connection[Any]
) -> None:
    rows = db.execute(
        "SELECT proname, prosecdef, proconfig, has_function_privilege('public', oid, 'EXECUTE') FROM pg_proc "
        "WHERE pronamespace = 'commandbus'::regnamespace"
    ).fetchall()
    assert len(rows) > 20
    expressions = {"moving_rate", "due_at", "shift_for"}  # with their caller's rights, inlined
    assert not any(is_definer for name, is_definer, *_ in rows if name in expressions)
    for name, _is_definer, config, is_public in rows:
        if name not in expressions:
            assert config == ["search_path=pg_catalog, pg_temp"], name
            assert not is_public, name


def test_an_old_grant_goes_when_roles_are_granted_again(
    orders: Bus, acting: Roles, prefix: str, db: psycopg.Connection[Any]
) -> None:
    producer = acting("producer")
    db.execute(f"GRANT SELECT, DELETE ON commandbus.command, pgmq.q_orders__commands TO {prefix}_producer")
    producer.run(raw("SELECT data FROM commandbus.command"))
    db.execute(orders.run(print_roles(prefix)).encode())
    _refused(producer, "SELECT data FROM commandbus.command", "DELETE FROM pgmq.q_orders__commands")
    with pytest.raises(InvalidCommandError, match="another prefix"):
        orders.create_roles(prefix, domains=["orders"])
