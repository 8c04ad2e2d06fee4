"""send and send_many: what is stored, what is refused, and that a refusal writes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from flow_harness import Bus, one, queue_length, snapshot, sync_only

from commandbus import (
    CommandBusError,
    CommandStatus,
    DuplicateCommandError,
    InvalidCommandError,
    NewCommand,
    UnknownDomainError,
    sql,
)
from commandbus.flow.commands.send import prepare, send


def test_a_command_is_stored_as_it_was_sent(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.create_queue("answers")
    data = {"text": "naïve ☃ \U0001f600 ' \" \\ %s %(x)s {} \\u0000", "n": [1, 1.5, -0.0, None, True], "": {}}
    sent = orders.send(
        "orders", "Ship", data, command_id="a b'c", correlation_id="c", reply_to="answers", max_attempts=5,
        headers={"trace": [1, {"x": "ü"}]}, timeout="1m30s",
    )  # fmt: skip
    assert (sent.domain, sent.command_id, sent.created) == ("orders", "a b'c", True)
    record = orders.get_command("orders", "a b'c")
    assert (record.id, record.command_type, record.status) == (sent.id, "Ship", CommandStatus.PENDING)
    assert (record.data, record.headers, record.result) == (data, {"trace": [1, {"x": "ü"}]}, None)
    assert (record.correlation_id, record.reply_to, record.max_attempts) == ("c", "answers", 5)
    assert (record.attempts, record.worker, record.finished_at, record.waiting_for) == (0, None, None, None)
    assert (record.timeout, record.progress, record.cancel_requested) == (90.0, None, None)
    assert record.created_at.tzinfo is not None
    assert abs(record.visible_at - record.created_at) < timedelta(seconds=10)
    message = one(db, "SELECT message FROM pgmq.q_orders__commands")
    assert message == {"command": sent.id}


def test_little_is_needed(orders: Bus) -> None:
    sent = orders.send("orders", "Ship")
    assert UUID(sent.command_id).version == 7
    record = orders.get_command("orders", sent.command_id)
    assert (record.data, record.headers, record.correlation_id, record.max_attempts) == (None, None, None, None)
    assert orders.get_command("orders", "unknown") is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (0, 0.0), (5, 5.0), (0.1, 0.1), (1e-5, 1e-5), ("2m", 120.0), (timedelta(hours=1), 3600.0)],
    ids=str,
)
def test_a_time_limit_of_its_own(orders: Bus, value: Any, seconds: float | None) -> None:
    """Stored exactly, told, and handed to whoever claims it; 0 says that it has none, None that others decide."""
    orders.send("orders", "Ship", command_id="one", timeout=value)
    orders.send_many("orders", [NewCommand("Ship", command_id="two", timeout=value)])
    assert not orders.send("orders", "Ship", command_id="two", timeout=value).created
    for name in ("one", "two"):
        assert orders.get_command("orders", name).timeout == seconds
    assert [attempt.row[18] for attempt in orders.claim()] == [seconds, seconds]


def test_a_plain_command_takes_the_short_way() -> None:
    """Only options cost their parameters."""
    plain = next(send("orders", prepare(NewCommand("Ship", 1))).steps)
    assert plain.sql == sql.text("commands/send_plain", domain="orders", conflict="")
    limited = next(send("orders", prepare(NewCommand("Ship", 1, timeout=0))).steps)
    assert limited.sql == sql.text("commands/send", domain="orders", conflict="")


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, 1.5, "x" * 1_048_574], ids=lambda v: repr(v)[:9])
def test_any_json_value_is_data(orders: Bus, value: Any) -> None:
    sent = orders.send("orders", "Ship", value)
    many = orders.send_many("orders", [{"command_type": "Ship", "data": value}])
    for command in (sent, *many):
        found = orders.get_command("orders", command.command_id).data
        assert found == value
        assert type(found) is type(value)


def test_ids_may_be_uuids(orders: Bus) -> None:
    identity, correlation = uuid4(), uuid4()
    sent = orders.send("orders", "Ship", command_id=identity, correlation_id=correlation)
    assert sent.command_id == str(identity)
    assert not orders.send("orders", "Ship", command_id=str(identity), correlation_id=str(correlation)).created
    record = orders.get_command("orders", identity)
    assert (record.id, record.correlation_id) == (sent.id, str(correlation))
    assert len(orders.get_audit_trail("orders", identity)) == 1
    assert orders.query_commands(correlation_id=correlation).items == [record]
    orders.cancel("orders", identity)
    assert orders.get_command("orders", identity).status is CommandStatus.CANCELED


def test_delay_and_at_are_honoured(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """By the server's clock, whatever the session's time zone."""
    soon = datetime.now(UTC) + timedelta(hours=1)
    far_east = timezone(timedelta(hours=14))
    delays = {
        "none": {},
        "zero": {"delay": 0},
        "seconds": {"delay": 90},
        "fraction": {"delay": 0.5},
        "delta": {"delay": timedelta(minutes=2)},
        "text": {"delay": "2m"},
        "at": {"at": soon},
        "east": {"at": soon.astimezone(far_east)},
        "past": {"at": datetime(2020, 1, 1, tzinfo=UTC)},
    }
    for command_id, when in delays.items():
        orders.send("orders", "Ship", command_id=command_id, **when)
        orders.send_many("orders", [{"command_type": "Ship", "command_id": f"many-{command_id}", **when}])
    expected = {
        "none": 0,
        "zero": 0,
        "seconds": 90,
        "fraction": 0.5,
        "delta": 120,
        "text": 120,
        "at": None,
        "east": None,
    }
    for prefix in ("", "many-"):
        for command_id, seconds in expected.items():
            record = orders.get_command("orders", prefix + command_id)
            if seconds is None:
                assert record.visible_at == soon
            else:
                waits = (record.visible_at - record.created_at).total_seconds()
                assert seconds <= waits < seconds + 1, command_id
    claimable = {attempt.command_id for attempt in orders.claim()}
    assert {"none", "zero", "past", "many-none", "many-zero", "many-past"} <= claimable
    assert not claimable & {"seconds", "delta", "at", "east", "many-seconds", "many-delta", "many-at"}
    db.execute("UPDATE pgmq.q_orders__commands SET vt = vt - interval '91 seconds' WHERE headers IS NULL")
    assert {"seconds", "many-seconds"} <= {attempt.command_id for attempt in orders.claim()}


def test_a_moment_in_the_past_means_now_and_overtakes_nobody(orders: Bus, db: psycopg.Connection[Any]) -> None:
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    orders.send("orders", "Ship", command_id="first")
    orders.send("orders", "Ship", command_id="late", at=long_ago)
    orders.send_many("orders", [{"command_type": "Ship", "command_id": "late-many", "at": long_ago}])
    orders.send("orders", "Ship", command_id="last")
    by_vt = (
        "SELECT c.command_id FROM commandbus.command c JOIN pgmq.q_orders__commands q USING (msg_id) ORDER BY q.vt"
    )
    assert [row[0] for row in db.execute(by_vt).fetchall()] == ["first", "late", "late-many", "last"]


@sync_only
def test_a_long_open_transaction_does_not_send_into_the_past(orders: Bus, database: str) -> None:
    """created_at is the transaction's; when it is visible is the moment of the send."""
    with psycopg.connect(database) as conn:
        began = one(conn, "SELECT now()")
        one(conn, "SELECT pg_sleep(0.02)::text")  # time must pass on the server between the two
        sent = orders.send("orders", "Ship", conn=conn)
        record = orders.get_command("orders", sent.command_id, conn=conn)
        assert record.created_at == began
        assert record.visible_at - began >= timedelta(milliseconds=20)


def _loop() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


BAD = [
    # field, value, what the error must name
    *(
        ("domain", value, named)
        for value, named in [
            ("Orders", "'Orders'"),
            ("orders; drop table commandbus.command", "drop table"),
            ("orders--", "orders--"),
            ('orders"', "orders"),
            ("", "''"),
            ("x" * 38, "at most 37"),
            ("orders\x00", r"\x00"),
            ("ordérs", r"ord\xe9rs"),
            (None, "None"),
            (5, "5"),
            (b"orders", "b'orders'"),
            (10**5000, "int"),
        ]
    ),
    *(
        ("command_type", value, "command_type")
        for value in ("", "x" * 201, "a\x00b", "a\nb", "\ud800", None, 5, True, b"x", ["x"])
    ),
    *(("command_id", value, "command_id") for value in ("", "x" * 256, "a\x00b", "a\tb", "\udfff", 5, True, b"x")),
    *(("correlation_id", value, "correlation_id") for value in ("", "x" * 256, "a\x00b", "\ud800", 5, b"x")),
    *(
        ("reply_to", value, "reply_to")
        for value in ("", "Answers", "a b", "a;b", "x" * 48, "x; drop table pgmq.meta", 5, "a\x00")
    ),
    *(
        ("max_attempts", value, "max_attempts")
        for value in (0, -1, True, False, 1.0, 1.5, math.nan, "3", 10**7, 2**31, 10**5000)
    ),
    *(
        ("timeout", value, "timeout")
        for value in (
            -1, -0.001, math.nan, math.inf, "soon", "", "5 parsecs", True, 10**10, 10**400, 1e300, timedelta(-1),
            timedelta.max, [], 5j, b"5", object(),
        )
    ),
    *(
        ("delay", value, "delay")
        for value in (
            -1, -0.001, math.nan, math.inf, -math.inf, "5 parsecs", True, 10**9, 10**400, 1e300, timedelta(-1),
            timedelta.max, [], 5j,
        )
    ),
    *(
        ("at", value, "at must be")
        for value in (
            datetime(2030, 1, 1),  # noqa: DTZ001
            "2030-01-01T00:00:00Z", 5, True, datetime.max.replace(tzinfo=UTC),
            datetime.min.replace(tzinfo=UTC), datetime(9999, 12, 31, tzinfo=timezone(timedelta(hours=-14))),
        )
    ),
    *(
        ("headers", value, "headers")
        for value in ([], "x", 5, True, {"a": math.nan}, {"a": "\x00"}, {"a": object()})
    ),
    ("headers", {"a": "x" * 1_048_576}, "headers is 1048584 bytes"),
    *(
        ("data", value, "data")
        for value in (
            "\x00", {"a": ["\x00"]}, {"\x00": 1}, "\ud800", math.nan, [math.inf], object(), {1, 2}, b"x",
            Decimal("NaN"), {("a", "b"): 1}, _loop(), 10**5000,
        )
    ),
    ("data", "x" * 1_048_575, "data is 1048577 bytes of JSON, over the limit of 1048576"),
]  # fmt: skip


def test_bad_input_is_named_and_nothing_is_written(orders: Bus, db: psycopg.Connection[Any]) -> None:
    before = snapshot(db)
    for field, value, named in BAD:
        arguments: dict[str, Any] = {"domain": "orders", "command_type": "Ship", field: value}
        with pytest.raises(InvalidCommandError) as caught:
            orders.send(**arguments)
        assert named in str(caught.value), (field, named)
        assert len(str(caught.value)) < 1000
        domain = arguments.pop("domain")
        good = {"command_type": "Ship"}
        with pytest.raises(InvalidCommandError) as caught:
            orders.send_many(domain, [good, arguments, good])
        assert named in str(caught.value), (field, named)
    assert snapshot(db) == before


def test_contradictions_are_refused(orders: Bus, db: psycopg.Connection[Any]) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(InvalidCommandError, match="delay or at, not both"):
        orders.send("orders", "Ship", delay=5, at=soon)
    with pytest.raises(InvalidCommandError, match="delay or at, not both"):
        orders.send("orders", "Ship", delay=0, at=soon)
    for items, named in [
        ([5], "5 is not a command; give NewCommand or dicts"),
        (["Ship"], "'Ship' is not a command"),
        ([{"command_typ": "Ship"}], "unknown field 'command_typ'"),
        ([{"data": 1}], "no command_type"),
        ([{"command_type": "Ship", 5: 1}], "unknown field '5'"),
    ]:
        with pytest.raises(InvalidCommandError, match=named):
            orders.send_many("orders", items)
    for size in (0, -1, True, 1.5, "10", None):
        with pytest.raises(ValueError, match="chunk_size"):
            orders.send_many("orders", [], chunk_size=size)
    assert queue_length(db) == 0


def test_the_payload_limit_can_be_set(connect: Callable[..., Bus], orders: Bus, database: str) -> None:
    from commandbus import load_settings

    small = connect(None, settings=load_settings({"database_url": database, "max_payload_bytes": 1024}))
    small.send("orders", "Ship", "x" * 1022)
    with pytest.raises(InvalidCommandError, match="over the limit of 1024"):
        small.send("orders", "Ship", "x" * 1023)


def test_an_unknown_domain_is_named_with_the_remedy(bus: Bus, db: psycopg.Connection[Any]) -> None:
    for act in (
        lambda: bus.send("nowhere", "Ship"),
        lambda: bus.send_many("nowhere", [NewCommand("Ship")]),
        lambda: bus.cancel("nowhere", "x"),
        lambda: bus.pause("nowhere"),
        lambda: bus.pause("nowhere", "Ship"),
        lambda: bus.status("nowhere"),
        lambda: bus.query_commands(domain="nowhere", status="PENDING"),
        lambda: bus.tsq.retry_all("nowhere"),
        lambda: bus.claim_raw(domain="nowhere"),
    ):
        with pytest.raises(UnknownDomainError, match=r"unknown domain 'nowhere'.*domain create nowhere"):
            act()
    assert one(db, "SELECT count(*) FROM commandbus.command") == 0
    assert bus.list_domains().items == []


def test_send_many_in_chunks_keeps_the_order(orders: Bus, db: psycopg.Connection[Any]) -> None:
    commands = [NewCommand("Ship", {"n": n}, command_id=f"c{n}" if n % 3 else None) for n in range(25)]
    sent = orders.send_many("orders", iter(commands), chunk_size=10)
    assert len({command.id for command in sent}) == 25
    assert all(command.created for command in sent)
    assert [orders.get_command("orders", command.command_id).data["n"] for command in sent] == list(range(25))
    assert queue_length(db) == 25
    by_visibility = [
        row[0]
        for row in db.execute(
            "SELECT (c.data ->> 'n')::int FROM pgmq.q_orders__commands q "
            "JOIN commandbus.command c ON c.msg_id = q.msg_id ORDER BY q.vt, q.msg_id"
        )
    ]
    assert by_visibility == list(range(25))
    assert orders.send_many("orders", []) == []


def test_every_field_goes_through_send_many(orders: Bus) -> None:
    orders.create_queue("answers")
    fields = {
        "command_type": 'Sh"ip',
        "data": {"x": 'quo"te\\'},
        "command_id": 'i"d',
        "correlation_id": 'c"o',
        "reply_to": "answers",
        "max_attempts": 7,
        "timeout": 0.25,
        "headers": {"h": 'x"'},
    }
    orders.send_many("orders", [fields])
    record = orders.get_command("orders", 'i"d')
    for name, value in fields.items():
        assert getattr(record, name) == value


def test_a_chunk_is_all_or_none(orders: Bus, db: psycopg.Connection[Any]) -> None:
    orders.send("orders", "Ship", 1, command_id="taken")
    with pytest.raises(DuplicateCommandError, match=r"'taken'.*other content \(data\)"):
        orders.send_many(
            "orders", [NewCommand("Ship", n, command_id=f"c{n}") for n in range(5)] + [
                NewCommand("Ship", 2, command_id="taken")]
        )  # fmt: skip
    assert queue_length(db) == 1
    assert one(db, "SELECT count(*) FROM commandbus.command") == 1


def test_earlier_chunks_stay(orders: Bus, db: psycopg.Connection[Any]) -> None:
    commands: list[Any] = [NewCommand("Ship", n) for n in range(5)]
    with pytest.raises(InvalidCommandError):
        orders.send_many("orders", [*commands, {"command_type": ""}], chunk_size=2)
    assert queue_length(db) == 4
    with psycopg.connect(orders.url) as conn:
        if orders.driver == "sync":
            with pytest.raises(InvalidCommandError):
                orders.send_many("orders", [*commands, {"command_type": ""}], chunk_size=2, conn=conn)
            conn.rollback()
            assert queue_length(db) == 4


def test_duplicates_inside_a_chunk(orders: Bus, db: psycopg.Connection[Any]) -> None:
    same = NewCommand("Ship", {"a": 1, "b": 2}, command_id="same")
    reordered = NewCommand("Ship", {"b": 2, "a": 1}, command_id="same")
    sent = orders.send_many("orders", [same, NewCommand("Ship"), reordered])
    assert sent[0].id == sent[2].id
    assert queue_length(db) == 2
    with pytest.raises(DuplicateCommandError, match=r"other content \(command_type\)"):
        orders.send_many("orders", [NewCommand("A", command_id="x"), NewCommand("B", command_id="x")])
    assert queue_length(db) == 2


def test_a_lent_pool_is_used_and_left_open(connect: Callable[..., Bus], orders: Bus, database: str) -> None:
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

    if orders.driver == "sync":
        with ConnectionPool(database, min_size=1, max_size=1, open=True) as pool:
            lent = connect(database, pool=pool)
            lent.send("orders", "Ship", command_id="x")
            lent.send_many("orders", [NewCommand("Ship", command_id="y")])
            with pytest.raises(UnknownDomainError):
                lent.send("nowhere", "Ship")
            lent.close()
            assert not pool.closed
            with pool.connection() as conn:
                assert one(conn, "SELECT count(*) FROM commandbus.command") == 2
    else:

        async def with_pool() -> int:
            from commandbus import AsyncCommandBus

            async with AsyncConnectionPool(database, min_size=1, max_size=1, open=False) as pool:
                async with AsyncCommandBus(database, pool=pool) as bus:
                    await bus.send("orders", "Ship", command_id="x")
                    await bus.send_many("orders", [NewCommand("Ship", command_id="y")])
                    with pytest.raises(UnknownDomainError):
                        await bus.send("nowhere", "Ship")
                async with pool.connection() as conn:
                    row = await (await conn.execute("SELECT count(*) FROM commandbus.command")).fetchone()
                assert row is not None
                count: int = row[0]
                return count

        assert orders.runner.run(with_pool()) == 2


def test_nobody_is_notified_unless_somebody_waits(orders: Bus, database: str) -> None:
    from commandbus.flow.commands.claim import announce, withdraw

    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute("LISTEN commandbus_orders")
        orders.send("orders", "Ship")
        orders.run(announce(worker="w1", domains=["orders"], seconds=60))
        orders.send("orders", "Ship")
        orders.send_many("orders", [NewCommand("Ship"), NewCommand("Ship", delay=60)])
        assert len(list(listener.notifies(timeout=10, stop_after=2))) == 2
        orders.run(withdraw("w1"))
        orders.send("orders", "Ship")
        orders.run(announce(worker="w1", domains=["orders"], seconds=-1))
        orders.send("orders", "Ship")
        listener.execute("SELECT 1")  # what was sent before has arrived by now
        assert list(listener.notifies(timeout=0)) == []


def test_errors_are_of_one_family(orders: Bus) -> None:
    for act in (lambda: orders.send("Bad", "x"), lambda: orders.send("nowhere", "x")):
        with pytest.raises(CommandBusError):
            act()


def test_the_receipts_of_many_name_the_rows_that_were_made(orders: Bus, db: psycopg.Connection[Any]) -> None:
    """With ids of ours, of the caller's, and of both; of a thousand and more."""
    for ids in ([None] * 1100, [f"own-{1100 - n:04d}" for n in range(1100)], [None, "x", None, "own-0007", None]):
        sent = orders.send_many("orders", [NewCommand("Ship", command_id=id_) for id_ in ids])
        rows = db.execute(
            "SELECT id, command_id FROM commandbus.command WHERE id = ANY (%s)", ([s.id for s in sent],)
        )
        assert dict(rows.fetchall()) == {receipt.id: receipt.command_id for receipt in sent}
        assert [receipt.command_id for receipt in sent if receipt.command_id in ids] == [id_ for id_ in ids if id_]


@pytest.mark.parametrize("bad", [{"data": 1}, 7, {"command_type": "Ship", "data": {1: 2}}, {"command_type": ""}])
def test_an_error_of_send_many_says_which_command_it_was(orders: Bus, bad: Any) -> None:
    good = [{"command_type": "Ship"}] * 4
    with pytest.raises(InvalidCommandError, match=r"^command 4 of send_many: "):
        orders.send_many("orders", [*good[:3], bad, *good], chunk_size=2)


def test_an_error_of_start_processes_says_which_process_it_was(orders: Bus) -> None:
    with pytest.raises(InvalidCommandError, match=r"^process 2 of those to be started: unknown field 'x'"):
        orders.start_processes("order", [{}, {"x": 1}, {}], domain="orders")
    with pytest.raises(InvalidCommandError, match=r"^data has a key"):
        orders.start_process("order", {1: 2}, domain="orders")


def test_plain_commands_are_stored_whatever_characters_they_have(orders: Bus) -> None:
    """They travel as arrays, in which quotes, backslashes, commas, braces and NULL mean something."""
    texts = ['"', "\\", '\\"', "a,b", "{}", "{a,NULL}", "NULL", "", " ", "ü ☃ \U0001f600", "%s %(ids)s", "'; --"]
    types = [text for text in texts if text.strip()]
    values: list[Any] = [*texts, {text: [text] for text in texts}, None, 0, True, [], {}]
    sent = orders.send_many("orders", [NewCommand(types[n % len(types)], value) for n, value in enumerate(values)])
    records = [orders.get_command("orders", receipt.command_id) for receipt in sent]
    assert [record.data for record in records] == values
    assert [record.command_type for record in records] == [types[n % len(types)] for n in range(len(values))]
    assert [record.id for record in records] == [receipt.id for receipt in sent]
    assert len({record.id for record in records}) == len(values)
