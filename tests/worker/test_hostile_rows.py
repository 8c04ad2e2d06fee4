"""One row, one message, one notification can never cost more than itself: good work next to it completes."""

from __future__ import annotations

import json
import resource
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from hypothesis import strategies as st

from commandbus import CommandBus, CommandStatus, HandlerRegistry, Limit, NewCommand, Worker
from commandbus.flow.commands.inspect import list_rejected
from support.running import drawn
from support.waiting import one, until

Db = psycopg.Connection[Any]
StartWorker = Callable[..., Worker]
HUGE = "[" + ", ".join(["1e131071"] * 9000) + "]"  # 81 KB as jsonb, more than a gigabyte as text
LARGE = "[" + ", ".join(["1e131071"] * 1500) + "]"  # 200 MB as text: the server can still make it
DEEP = "[" * 6000 + "]" * 6000

# Rows of the queue as anybody who may insert can write them: read_ct, enqueued_at, vt, message, headers.
ROWS: dict[str, tuple[str, str, str, str | None, str | None]] = {
    "huge": ("0", "now()", "now()", HUGE, None),
    "large": ("0", "now()", "now()", LARGE, None),
    "huge_command": ("0", "now()", "now()", f'{{"command": {HUGE}}}', None),
    "huge_data": ("0", "now()", "now()", f'{{"command_type": "work", "data": {HUGE}}}', None),
    "huge_headers": ("0", "now()", "now()", '{"command_type": "work"}', f'{{"x": {HUGE}}}'),
    "huge_holder": ("0", "now()", "now()", '{"command_type": "work"}', f'{{"held_by": {HUGE}, "since": {HUGE}}}'),
    "deep": ("0", "now()", "now()", DEEP, None),
    "deep_data": ("0", "now()", "now()", f'{{"command_type": "work", "data": {DEEP}}}', None),
    "deep_headers": ("0", "now()", "now()", '{"command_type": "work"}', f'{{"before": {DEEP}}}'),
    "last_read": ("2147483647", "now()", "now()", '{"command_type": "work"}', None),
    "negative_read": ("-2147483648", "now()", "now()", '{"command_type": "work"}', None),
    "infinite": ("0", "'infinity'", "'-infinity'", '{"command_type": "work"}', None),
    "long_ago": ("0", "'4713-01-01 BC'", "'4713-01-01 BC'", '{"command_type": "work"}', None),
    "far_year": ("0", "'200000-01-01'", "now()", '{"command_type": "work"}', None),
    "nothing": ("0", "now()", "now()", None, None),
    "null": ("0", "now()", "now()", "null", "null"),
    "odd_headers": ("7", "now()", "now()", '{"command_type": "work"}', "[1, 2]"),
    "odd_holder": ("7", "now()", "now()", '{"command_type": "work"}', '{"held_by": 5, "since": "?", "cancel": 7}'),
    "number": ("0", "now()", "now()", '{"command": 1e131071}', None),
    "long_number": ("0", "now()", "now()", '{"command": "' + "9" * 5000 + '"}', None),
    "odd_digits": ("0", "now()", "now()", '{"command": "²"}', None),
}  # fmt: skip


def insert(db: Db, row: tuple[str, str, str, str | None, str | None]) -> None:
    read_ct, enqueued_at, vt, message, headers = row
    db.execute(
        f"INSERT INTO pgmq.q_orders__commands (read_ct, enqueued_at, vt, message, headers) "
        f"VALUES ({read_ct}, {enqueued_at}, {vt}, %s::jsonb, %s::jsonb)".encode(),
        (message, headers),
    )


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture
def handlers() -> HandlerRegistry:
    registry = HandlerRegistry()
    registry.register("orders", "work", lambda ctx: "done")
    return registry


def send_good(bus: CommandBus, count: int = 20) -> list[str]:
    return [sent.command_id for sent in bus.send_many("orders", [NewCommand("work") for _ in range(count)])]


def until_good(bus: CommandBus, ids: list[str], worker: Worker) -> None:
    def all_are() -> bool:
        return all(
            (found := bus.get_command("orders", id_)) is not None and found.status is CommandStatus.COMPLETED
            for id_ in ids
        )

    until(all_are, what=lambda: (worker.is_running, worker.health_status.reasons, bus.status("orders")))
    assert worker.is_running


@pytest.mark.parametrize("name", ROWS)
def test_an_odd_row_of_the_queue_is_set_aside_alone(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, name: str
) -> None:
    before = send_good(bus)
    insert(db, ROWS[name])
    after = send_good(bus)
    worker = start_worker(handlers, visibility_timeout=30)
    until_good(bus, before + after, worker)
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0)
    until_good(bus, send_good(bus), worker)
    assert worker.stop().is_clean


def test_all_odd_rows_at_once_cost_little_memory(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    for _ in range(3):
        for row in ROWS.values():
            insert(db, row)
    good = send_good(bus)
    used = resident_bytes()
    worker = start_worker(handlers, visibility_timeout=30)
    until_good(bus, good, worker)
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0)
    listed = bus.run(list_rejected(domain="orders", limit=100))
    assert any("more than 400 digits" in item.reason and item.preview is None for item in listed)
    assert resident_bytes() - used < 60e6
    assert worker.stop().is_clean


def test_large_messages_are_not_read_beyond_the_limit(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    for _ in range(4):
        insert(db, ("0", "now()", "now()", json.dumps({"command_type": "work", "data": "x" * 51_000_000}), None))
    good = send_good(bus)
    used = resident_bytes()
    worker = start_worker(handlers, visibility_timeout=30)
    until_good(bus, good, worker)
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0)
    (first, *_) = bus.run(list_rejected(domain="orders", limit=100))
    assert "bytes of text, more than one with max_payload_bytes" in first.reason
    assert resident_bytes() - used < 30e6
    assert worker.stop().is_clean


@pytest.mark.parametrize("ended", ["COMPLETED", "CANCELED", "IN_TROUBLESHOOTING_QUEUE", "FAILED"])
def test_a_producer_cannot_revive_a_command_that_has_ended(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, ended: str
) -> None:
    ran: list[str] = []
    handlers.register("orders", "charge", lambda command, ctx: ran.append(command.command_id))
    sent = bus.send("orders", "charge", command_id="c")
    msg_id = one(db, "SELECT msg_id FROM commandbus.command")
    db.execute("DELETE FROM pgmq.q_orders__commands")
    db.execute("UPDATE commandbus.command SET status = %s", (ended,))
    db.execute(
        "INSERT INTO pgmq.q_orders__commands (msg_id, read_ct, enqueued_at, vt, message) "
        "OVERRIDING SYSTEM VALUE VALUES (%s, 0, now(), now(), %s::jsonb)",
        (msg_id, json.dumps({"command": sent.id})),
    )
    worker = start_worker(handlers)
    until_good(bus, send_good(bus), worker)
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0)
    assert ran == []
    found = bus.get_command("orders", "c")
    assert found is not None
    assert found.status == ended
    (rejected,) = bus.run(list_rejected(domain="orders", limit=10))
    assert "no command" in rejected.reason


# What somebody with rights on the table may have done to a command.
CHANGES = {
    "reply_to": "reply_to = 'no such; queue'",
    "attempt_base": "attempt_base = 2147483647",
    "created_at": "created_at = 'infinity'",
    "long_ago": "created_at = '-infinity'",
    "headers": f"headers = '{{\"x\": {DEEP}}}'",
    "data": f"data = '{DEEP}'",
    "waived": "waived = 2147483647",
    "max_attempts": "max_attempts = 2147483647",
    "timeout": "timeout = 'infinity'",
    "no_time": "timeout = 'nan'",
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_odd_command_row_is_settled_alone(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, name: str
) -> None:
    odd = bus.send("orders", "work").command_id
    db.execute(f"UPDATE commandbus.command SET {CHANGES[name]}".encode())
    worker = start_worker(handlers, visibility_timeout=30)
    until_good(bus, send_good(bus), worker)
    until(lambda: one(db, "SELECT status <> 'PENDING' FROM commandbus.command WHERE command_id = %s", odd))
    until_good(bus, send_good(bus), worker)
    assert worker.stop().is_clean


# --- notifications ----------------------------------------------------------------------------------------------

WORDS = ["cancel ²", "cancel " + "9" * 5000, "cancel -1", "cancel 1e3", "closed x", "limit ", "wake \n", "token ",
         "nan", "inf", "-1", "1e400", "", "{}", "0", "commandbus"]  # fmt: skip
CHANNELS = ["commandbus_orders", "commandbus_limits", "commandbus_call"]


@pytest.fixture
def limited(handlers: HandlerRegistry, bus: CommandBus) -> HandlerRegistry:
    bus.declare_limit(Limit("docai", concurrency=5))
    handlers.register("orders", "page", lambda ctx: "read", limits=["docai"])
    return handlers


def test_no_notification_ends_a_thread(
    bus: CommandBus, db: Db, limited: HandlerRegistry, start_worker: StartWorker
) -> None:
    worker = start_worker(limited, poll_interval=60.0)
    until_good(bus, send_good(bus, 5), worker)
    for channel in CHANNELS:
        for word in WORDS:
            db.execute("SELECT pg_notify(%s, %s)", (channel, word))
    until_good(bus, send_good(bus), worker)
    sent = bus.send("orders", "page").command_id
    until_good(bus, [sent], worker)
    assert bus.call("orders", "work", wait=20) == "done"
    assert worker.health_status.critical_reasons == []


def test_what_notifications_say_is_not_remembered_for_ever(
    bus: CommandBus, db: Db, limited: HandlerRegistry, start_worker: StartWorker
) -> None:
    worker = start_worker(limited)
    until_good(bus, [bus.send("orders", "page").command_id], worker)
    runtime = worker._runtime
    assert runtime is not None
    limit_client = runtime._limited.limit_client
    for kind in ("closed", "wake", "limit"):
        db.execute(
            "SELECT pg_notify('commandbus_limits', %s || ' ' || repeat('x', 100) || n) "
            "FROM generate_series(1, 3000) n",
            (kind,),
        )
    db.execute("SELECT pg_notify('commandbus_orders', 'cancel ' || n) FROM generate_series(1, 3000) n")
    until_good(bus, send_good(bus), worker)
    until_good(bus, [bus.send("orders", "page").command_id], worker)
    until(lambda: not runtime._keeper._to_look_at)
    assert (
        len(limit_client._shut)
        + len(limit_client._told_blocked)
        + len(limit_client._waker._due)
        + len(limit_client._waker._unreachable)
        <= 4
    )


def test_a_stranger_cannot_stop_a_limit_by_saying_that_it_is_closed(
    bus: CommandBus, db: Db, database: str, limited: HandlerRegistry, start_worker: StartWorker
) -> None:
    worker = start_worker(limited)
    stop = threading.Event()

    def lie() -> None:
        with psycopg.connect(database, autocommit=True) as conn:
            while not stop.wait(0.002):
                conn.execute("SELECT pg_notify('commandbus_limits', 'closed docai')")

    liar = threading.Thread(target=lie)
    liar.start()
    try:
        ids = [sent.command_id for sent in bus.send_many("orders", [NewCommand("page") for _ in range(30)])]
        until_good(bus, ids, worker)
        assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict <> 'PARKED'") == 0
    finally:
        stop.set()
        liar.join()


# What somebody with rights on the table may have done to a limit.
LIMIT_CHANGES = {
    "holders": """holders = '{"x": "soon", "y": null, "z": [1]}'""",
    "holders_list": "holders = '[1, 2]'",
    "huge_holders": f"""holders = '{{"x": {HUGE}}}'""",
    "tat": "tat = 'nan'",
    "infinite_tat": "tat = 'infinity'",
    "step": "step = 2147483647, until = now()",
    "until": "until = 'infinity', step = 1",
    "until_long_ago": "until = '-infinity', step = 1",
    "opened": "breaker_open = true, opened_at = 'infinity', open_until = '-infinity', failures = 2147483647",
    "probe": "probe = repeat('x', 100000), probe_until = 'infinity'",
    "counts": "granted = 9223372036854775807, waits = 9223372036854775807, waited_seconds = 'nan'",
    "lease": "lease = 'nan'",
    "endless_lease": "lease = 'infinity'",
    "declared": "declared = '[1]'",
    "no_declaration": "declared = NULL",
    "odd_override": """override = '{"concurrency": "many"}'""",
    "changed_at": "changed_at = 'infinity'",
    "backoff": "backoff = '{}', step = 3, until = now()",
}


@pytest.mark.parametrize("name", LIMIT_CHANGES)
def test_an_odd_limit_holds_up_its_own_commands_alone(
    bus: CommandBus, db: Db, limited: HandlerRegistry, start_worker: StartWorker, name: str
) -> None:
    bus.declare_limit(Limit("odd", concurrency=5))
    limited.register("orders", "odd", lambda ctx: "done", limits=["odd"])
    worker = start_worker(limited)
    until_good(bus, [bus.send("orders", "odd").command_id], worker)
    db.execute(f"UPDATE commandbus.limits SET {LIMIT_CHANGES[name]} WHERE name = 'odd'".encode())
    bus.send_many("orders", [NewCommand("odd") for _ in range(3)])
    until_good(bus, send_good(bus) + [bus.send("orders", "page").command_id for _ in range(5)], worker)
    db.execute("SELECT pg_notify('commandbus_limits', 'wake odd'), pg_notify('commandbus_limits', 'closed odd')")
    until_good(bus, [bus.send("orders", "page").command_id for _ in range(5)], worker)
    assert worker.health_status.critical_reasons == []
    assert worker.stop().is_clean


# --- arbitrary ones ---------------------------------------------------------------------------------------------

scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00"), max_size=20)
documents = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
keys = st.sampled_from(["command", "command_type", "command_id", "data", "reply_to", "max_attempts", "timeout",
                        "headers", "held_by", "since", "before", "cancel", "alone", "progress"])  # fmt: skip
messages = st.dictionaries(keys, documents | st.just("work"), max_size=5) | documents


def test_arbitrary_messages_and_notifications_next_to_good_work(
    bus: CommandBus, db: Db, limited: HandlerRegistry, start_worker: StartWorker
) -> None:
    rows = st.lists(st.tuples(messages, st.none() | messages, st.integers(-(2**31), 2**31 - 1)), max_size=5)
    said = st.lists(st.tuples(st.sampled_from(CHANNELS), texts | st.sampled_from(WORDS)), max_size=5)
    played = drawn(st.tuples(rows, said), 40, thorough=400)
    worker = start_worker(limited, visibility_timeout=30)
    for inserted, notified in played:
        for message, headers, read_ct in inserted:
            insert(db, (str(read_ct), "now()", "now()", json.dumps(message), json.dumps(headers)))
        for channel, word in notified:
            db.execute("SELECT pg_notify(%s, %s)", (channel, word))
        until_good(bus, send_good(bus, 2), worker)
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands") == 0)
    assert worker.health_status.critical_reasons == []
    assert worker.stop().is_clean


numbers = st.integers(-(2**31), 2**31 - 1)
floats = st.sampled_from(["nan", "infinity", "-infinity", "-1", "0", "1e-300", "1e300", "0.5"])
moments = st.sampled_from(["infinity", "-infinity", "4713-01-01 BC", "200000-01-01", "1999-12-31 23:59:60"])
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "reply_to": texts,
    "correlation_id": texts,
    "command_type": texts | st.just("work"),
    "attempt_base": numbers,
    "waived": numbers,
    "max_attempts": st.none() | numbers,
    "timeout": st.none() | floats,
    "batch": st.none() | st.integers(-(2**63), 2**63 - 1),
    "process": st.none() | st.integers(-(2**63), 2**63 - 1),
    "step": st.none() | numbers,
    "created_at": moments,
    "headers": documents.map(json.dumps),
    "data": documents.map(json.dumps),
    "quarantine": st.booleans(),
    "suspect": st.integers(-(2**15), 2**15 - 1),
    "alone": st.booleans(),
}
changes = st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: COLUMNS[name] for name in names})
)


def test_arbitrary_command_rows_next_to_good_work(
    bus: CommandBus, db: Db, limited: HandlerRegistry, start_worker: StartWorker
) -> None:
    played = drawn(st.lists(changes, max_size=4), 40, thorough=400)
    worker = start_worker(limited, visibility_timeout=30, max_attempts=1)
    for rows in played:
        with db.transaction():
            for row in rows:
                sent = bus.send("orders", "work", conn=db)
                db.execute(
                    f"UPDATE commandbus.command SET {', '.join(f'{name} = %s' for name in row)} "
                    f"WHERE id = %s".encode(),
                    (*row.values(), sent.id),
                )
            good = [bus.send("orders", "work", conn=db).command_id for _ in range(2)]
        until_good(bus, good, worker)
    until_good(bus, send_good(bus), worker)
    assert worker.health_status.critical_reasons == []
