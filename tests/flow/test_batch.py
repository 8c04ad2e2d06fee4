"""Batches: created all or nothing, added to, closed, and looked at."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from flow_harness import Bus, at_once, fail, one, queue_length, snapshot, sync_only, wait_until_blocked

from commandbus import (
    BatchNotFoundError,
    BatchStatus,
    BatchTimeoutError,
    BusinessRuleException,
    CommandBus,
    DuplicateBatchError,
    DuplicateCommandError,
    HandlerRegistry,
    InvalidCommandError,
    InvalidOperationError,
    NewCommand,
    OnComplete,
    PermanentCommandError,
    SchemaError,
    UnknownDomainError,
    handler,
)
from commandbus.flow.batches.fold_and_complete import fold
from support.running import examples

Db = psycopg.Connection[Any]


def commands(count: int, **fields: Any) -> list[NewCommand]:
    return [NewCommand("Ship", {"n": n}, **fields) for n in range(count)]


def batches(db: Db) -> list[Any]:
    return db.execute("SELECT b::text FROM commandbus.batch b ORDER BY id").fetchall()


# --- creating ---------------------------------------------------------------------------------------------------


def test_a_batch_of_commands(orders: Bus, db: Db) -> None:
    made = orders.create_batch(
        "orders", commands(3), batch_id="import-7", name="Import", custom_data={"file": "a.csv"}
    )
    assert made == ("orders", "import-7", made.id, 3, True)
    record = orders.get_batch("orders", "import-7")
    assert (record.status, record.total, record.finished, record.running) == (BatchStatus.PENDING, 3, 0, 0)
    assert (record.name, record.custom_data, record.holds) == ("Import", {"file": "a.csv"}, "commands")
    assert (record.progress, record.eta_seconds, record.is_open, record.is_finished) == (0.0, None, False, False)
    assert queue_length(db) == 3
    page = orders.query_commands(domain="orders", batch_id="import-7")
    assert [item.data["n"] for item in page.items] == [2, 1, 0]
    assert {item.batch_id for item in page.items} == {"import-7"}
    orders.send("orders", "Ship", command_id="alone")
    assert orders.get_command("orders", "alone").batch_id is None
    assert orders.query_commands(domain="orders", batch_id="other").items == []
    with pytest.raises(InvalidCommandError, match="batch_id 'import-7' needs its domain"):
        orders.query_commands(batch_id="import-7")


def test_ids_are_made_where_none_are_given(orders: Bus) -> None:
    first, second = orders.create_batch("orders", commands(1)), orders.create_batch("orders", commands(1))
    assert len(first.batch_id) == 36
    assert first.batch_id != second.batch_id
    by_uuid = uuid4()
    orders.create_batch("orders", [], batch_id=by_uuid)
    assert orders.get_batch("orders", by_uuid).batch_id == str(by_uuid)


def test_every_option_of_a_command_is_kept(orders: Bus) -> None:
    new = {"command_type": "Ship", "data": [1], "command_id": "a", "correlation_id": "c", "reply_to": "r",
           "max_attempts": 7, "headers": {"h": 1}, "timeout": "2m", "delay": 60}  # fmt: skip
    orders.create_batch("orders", [new, NewCommand("Other")])
    record = orders.get_command("orders", "a")
    assert (record.data, record.correlation_id, record.reply_to, record.max_attempts) == ([1], "c", "r", 7)
    assert (record.headers, record.timeout) == ({"h": 1}, 120.0)
    assert [attempt.command_type for attempt in orders.claim()] == ["Other"], "the other one is delayed"


def test_the_order_is_kept(orders: Bus) -> None:
    orders.create_batch("orders", (NewCommand("Ship", n, f"{9 - n}") for n in range(10)))
    assert [attempt.command().data for attempt in orders.claim()] == list(range(10))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch_id": ""}, "batch_id '' is not valid"),
        ({"batch_id": 5}, "batch_id 5 is not valid"),
        ({"name": "a\nb"}, "name 'a\\\\nb' is not valid"),
        ({"custom_data": {1, 2}}, "custom_data is not JSON"),
        ({"custom_data": "\x00"}, "custom_data contains a NUL character"),
        ({"is_open": "yes"}, "is_open must be True or False, not 'yes'"),
        ({"on_complete": 17}, "on_complete 17 is not OnComplete"),
        ({"on_complete": "work/finished"}, '"domain": …, "command_type": …'),
        ({"on_complete": {"domain": "orders"}}, "on_complete has no command_type"),
        ({"on_complete": {"domain": "Orders", "command_type": "x"}}, "domain 'Orders' is not a domain name"),
        (
            {"on_complete": {"domain": "orders", "command_type": "x", "speed": 1}},
            "unknown field 'speed' of on_com",
        ),
        ({"on_complete": {"reply_to": "Q"}}, "reply_to 'Q' is not a queue name"),
        (
            {"on_complete": {"reply_to": "q", "domain": "orders"}},
            "reply_to and domain: it is a reply or a command",
        ),
        ({"on_complete": {"reply_to": "nowhere"}}, "no queue 'nowhere' for the reply"),
        ({"on_complete": OnComplete("orders", "x", command_id="")}, "command_id '' is not valid"),
        ({"on_complete": OnComplete("orders", "x", data={1})}, "on_complete is not JSON"),
    ],
)
def test_a_wrong_definition_is_named(orders: Bus, db: Db, wrong: dict[str, Any], says: str) -> None:
    before = snapshot(db), batches(db)
    with pytest.raises(InvalidCommandError, match=says):
        orders.create_batch("orders", commands(2), **wrong)
    assert (snapshot(db), batches(db)) == before


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (NewCommand(""), "command 1501 of the batch: command_type '' is not valid"),
        (NewCommand("x", {1}), "command 1501 of the batch: data is not JSON"),
        (5, "command 1501 of the batch: 5 is not a command; give NewCommand or dicts"),
        ({"data": 1}, "command 1501 of the batch: it has no command_type"),
        ({"command_type": "x", "speed": 1}, "command 1501 of the batch: unknown field 'speed'"),
    ],
)
def test_all_or_nothing(orders: Bus, db: Db, wrong: Any, says: str) -> None:
    """The first chunk has been sent when the bad one comes."""
    before = snapshot(db), batches(db)
    with pytest.raises(InvalidCommandError, match=says):
        orders.create_batch("orders", [*commands(1500), wrong, *commands(10)])
    assert (snapshot(db), batches(db)) == before


def test_an_iterable_that_fails(orders: Bus, db: Db) -> None:
    def failing() -> Iterator[NewCommand]:
        yield from commands(1500)
        raise ZeroDivisionError

    before = snapshot(db), batches(db)
    with pytest.raises(ZeroDivisionError):
        orders.create_batch("orders", failing())
    assert (snapshot(db), batches(db)) == before


def test_unknown_domains(orders: Bus, db: Db) -> None:
    for domain, on_complete in (("nowhere", None), ("orders", OnComplete("nowhere", "x"))):
        for members in (commands(1), []):
            with pytest.raises(UnknownDomainError, match="'nowhere'"):
                orders.create_batch(domain, members, on_complete=on_complete)
    assert batches(db) == []


def test_no_schema(connect: Any, empty_database: str) -> None:
    bus = connect(empty_database)
    for act in (
        lambda: bus.create_batch("orders", commands(1)),
        lambda: bus.create_batch("orders", []),
        lambda: bus.get_batch("orders", "b"),
        lambda: bus.query_batches(),
        lambda: bus.cancel_batch("orders", "b"),
    ):
        with pytest.raises(SchemaError, match="migrate"):
            act()


@pytest.mark.parametrize("where", ["first", "later"])
def test_a_command_that_exists_already(orders: Bus, db: Db, where: str) -> None:
    orders.send("orders", "Ship", {"n": 0}, command_id="taken")
    before = snapshot(db), batches(db)
    members = commands(1200)
    members[0 if where == "first" else -1] = NewCommand("Ship", {"n": 0}, "taken")
    with pytest.raises(
        DuplicateCommandError, match="'taken' already exists in domain 'orders', and a batch has only"
    ):
        orders.create_batch("orders", members)
    assert (snapshot(db), batches(db)) == before


@pytest.mark.parametrize("apart", [1, 1100])
def test_a_command_twice_in_a_batch(orders: Bus, db: Db, apart: int) -> None:
    before = snapshot(db), batches(db)
    twice = NewCommand("Ship", {}, "twice")
    with pytest.raises(DuplicateCommandError, match="'twice'"):
        orders.create_batch("orders", [twice, *commands(apart - 1), twice])
    assert (snapshot(db), batches(db)) == before


# --- the same again ---------------------------------------------------------------------------------------------


def test_the_same_batch_again(orders: Bus, db: Db) -> None:
    def create(**changes: Any) -> Any:
        given: dict[str, Any] = {"batch_id": "b", "name": "n", "custom_data": {"x": 1, "y": 2},
                                 "on_complete": OnComplete("orders", "Done")}  # fmt: skip
        members = changes.pop("members", [NewCommand("Ship", {"a": 1, "b": 2}, "own"), NewCommand("Ship")])
        return orders.create_batch("orders", members, **(given | changes))

    first = create()
    before = snapshot(db), batches(db)
    again = create(custom_data={"y": 2, "x": 1})
    assert again == first._replace(created=False)
    other_order = [NewCommand("Ship", {"b": 2, "a": 1}, "own", delay=60), NewCommand("Ship")]
    assert not create(members=other_order).created, "when to run is no content"
    for changes in (
        {"name": "m"}, {"custom_data": {"x": 1}}, {"on_complete": None}, {"is_open": True}, {"members": []},
        {"members": [NewCommand("Ship", {"a": 1, "b": 2}, "own")]},
        {"members": [NewCommand("Ship", {"a": 1, "b": 2}, "own"), NewCommand("Shop")]},
        {"members": [NewCommand("Ship", {"a": True, "b": 2}, "own"), NewCommand("Ship")]},
        {"members": [NewCommand("Ship", {"a": 1, "b": 2}, "own", timeout=5), NewCommand("Ship")]},
    ):  # fmt: skip
        with pytest.raises(DuplicateBatchError, match="batch_id 'b' already exists in domain 'orders' with other"):
            create(**changes)
    assert (snapshot(db), batches(db)) == before


def test_a_batch_id_belongs_to_a_domain(orders: Bus) -> None:
    orders.create_domain("billing")
    orders.create_batch("orders", commands(1), batch_id="b")
    assert orders.create_batch("billing", commands(2), batch_id="b").created


@sync_only
def test_many_creators_of_one_batch(orders: Bus, db: Db) -> None:
    answers = at_once([lambda: orders.create_batch("orders", commands(50), batch_id="b")] * 8)
    assert sorted(answer.created for answer in answers if not isinstance(answer, BaseException)) == [False] * 7 + [
        True
    ]
    assert len({answer.id for answer in answers if not isinstance(answer, BaseException)}) == 1
    assert one(db, "SELECT count(*) FROM commandbus.command") == 50


# --- in the caller's transaction --------------------------------------------------------------------------------


@sync_only
def test_in_the_callers_transaction(orders: Bus, db: Db) -> None:
    with psycopg.connect(orders.url) as conn:
        orders.create_batch("orders", commands(1200), batch_id="b", conn=conn)
        assert queue_length(db) == 0
        conn.rollback()
        assert batches(db) == []
        orders.create_batch("orders", commands(3), batch_id="b", is_open=True, conn=conn)
        orders.add_to_batch("orders", "b", commands(2), conn=conn)
        orders.close_batch("orders", "b", conn=conn)
        conn.commit()
    record = orders.get_batch("orders", "b")
    assert (record.total, record.is_open, queue_length(db)) == (5, False, 5)


@sync_only
@pytest.mark.parametrize("autocommit", [False, True])
def test_what_fails_leaves_nothing_in_the_callers_transaction(orders: Bus, db: Db, autocommit: bool) -> None:
    orders.create_batch("orders", [], batch_id="open", is_open=True)
    bad = [*commands(1100), NewCommand("")]
    with psycopg.connect(orders.url, autocommit=autocommit) as conn:
        conn.execute("CREATE TABLE mine (n int)")
        with conn.transaction():
            conn.execute("INSERT INTO mine VALUES (1)")
            with pytest.raises(InvalidCommandError):
                orders.create_batch("orders", bad, batch_id="b", conn=conn)
            with pytest.raises(InvalidCommandError):
                orders.add_to_batch("orders", "open", bad, conn=conn)
            with pytest.raises(DuplicateCommandError):
                orders.create_batch("orders", [NewCommand("x", None, "i")] * 2, batch_id="b", conn=conn)
            orders.send("orders", "Ship", command_id="mine", conn=conn)
    assert one(db, "SELECT count(*) FROM mine") == 1
    assert [row[0] for row in db.execute("SELECT command_id FROM commandbus.command")] == ["mine"]
    assert orders.get_batch("orders", "b") is None
    assert orders.get_batch("orders", "open").total == 0


@sync_only
def test_closing_needs_read_committed(orders: Bus) -> None:
    orders.create_batch("orders", commands(1), batch_id="b", is_open=True)
    with psycopg.connect(orders.url) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        orders.add_to_batch("orders", "b", commands(1), conn=conn)
        with pytest.raises(InvalidOperationError, match="close_batch needs a READ COMMITTED transaction"):
            orders.close_batch("orders", "b", conn=conn)


# --- open batches -----------------------------------------------------------------------------------------------


def test_adding_and_closing(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(1), batch_id="b", is_open=True)
    assert orders.add_to_batch("orders", "b", commands(1100)) == 1100
    assert orders.add_to_batch("orders", "b", []) == 0
    record = orders.get_batch("orders", "b")
    assert (record.total, record.is_open) == (1101, True)
    orders.settle([attempt.complete(None) for attempt in orders.claim(n=2000)])
    record = orders.get_batch("orders", "b")
    assert (record.completed, record.status, record.eta_seconds) == (1101, BatchStatus.IN_PROGRESS, None)
    orders.run(fold([record.id]))
    assert orders.get_batch("orders", "b").status == BatchStatus.IN_PROGRESS, "it is still open"
    assert orders.close_batch("orders", "b")
    record = orders.get_batch("orders", "b")
    assert (record.status, record.total, record.completed) == (BatchStatus.COMPLETED, 1101, 1101)
    assert not orders.close_batch("orders", "b"), "it was closed before"
    with pytest.raises(InvalidOperationError, match="cannot add to batch 'b' of domain 'orders': it is COMPLETED"):
        orders.add_to_batch("orders", "b", commands(1))
    assert one(db, "SELECT count(*) FROM commandbus.batch_delta") == 0


def test_a_closed_batch_takes_no_more(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(1), batch_id="b")
    before = snapshot(db)
    with pytest.raises(InvalidOperationError, match="cannot add to batch 'b' of domain 'orders': it is closed"):
        orders.add_to_batch("orders", "b", commands(1))
    assert snapshot(db) == before
    for act in (orders.close_batch, orders.cancel_batch, orders.retry_failed, orders.wait_for_batch):
        with pytest.raises(BatchNotFoundError, match="no batch 'c' in domain 'orders'"):
            act("orders", "c")
    with pytest.raises(BatchNotFoundError):
        orders.add_to_batch("orders", "c", commands(1))


@sync_only
def test_a_close_waits_for_who_adds(orders: Bus, db: Db) -> None:
    """And counts what was added: it must not be complete without."""
    orders.create_batch("orders", commands(1), batch_id="b", is_open=True)
    orders.settle(orders.claim_one().complete(None))
    with psycopg.connect(orders.url) as conn:
        orders.add_to_batch("orders", "b", commands(2), conn=conn)

        def commit() -> None:
            wait_until_blocked(db)
            conn.commit()

        assert at_once([lambda: orders.close_batch("orders", "b"), commit]) == [True, None]
    record = orders.get_batch("orders", "b")
    assert (record.total, record.completed, record.is_finished) == (3, 1, False)


@sync_only
def test_who_adds_waits_for_a_close(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", [], batch_id="b", is_open=True)
    with psycopg.connect(orders.url) as conn:
        orders.close_batch("orders", "b", conn=conn)

        def commit() -> None:
            wait_until_blocked(db)
            conn.commit()

        refused, _ = at_once([lambda: orders.add_to_batch("orders", "b", commands(2)), commit])
    assert isinstance(refused, InvalidOperationError)
    assert one(db, "SELECT count(*) FROM commandbus.command") == 0


@sync_only
def test_adding_settling_and_closing_at_once(orders: Bus, db: Db) -> None:
    """Whatever the order: what was added is counted, and the batch ends when the last of it is done."""
    for number in range(10):
        batch_id = f"b{number}"
        orders.create_batch("orders", [], batch_id=batch_id, is_open=True)

        def add(batch_id: str = batch_id) -> int:
            with CommandBus(orders.url) as bus:
                return sum(bus.add_to_batch("orders", batch_id, commands(3)) for _ in range(5))

        def work(batch_id: str = batch_id) -> None:
            with CommandBus(orders.url) as bus:
                mine = Bus(bus, None, "sync", orders.url, orders.runner)
                for _ in range(10):
                    made = mine.claim(f"w{batch_id}", 5)
                    if made:
                        mine.settle([attempt.complete(None) for attempt in made], f"w{batch_id}")
                    record = bus.get_batch("orders", batch_id)
                    assert record is not None
                    bus.run(fold([record.id]))

        answers = at_once([add, add, work, lambda batch_id=batch_id: orders.close_batch("orders", batch_id)])
        added = [answer for answer in answers[:2] if not isinstance(answer, BaseException)]
        assert answers[2] is None, answers[2]
        assert all(isinstance(item, int | InvalidOperationError) for item in answers[:2]), added
        for attempt in orders.claim(f"w{batch_id}", 100):
            orders.settle(attempt.complete(None), f"w{batch_id}")
        record = orders.get_batch("orders", batch_id)
        orders.run(fold([record.id]))
        record = orders.get_batch("orders", batch_id)
        members = one(db, "SELECT count(*) FROM commandbus.command WHERE batch = %s", record.id)
        assert (record.status, record.total, record.completed) == (BatchStatus.COMPLETED, members, members)


# --- on_complete ------------------------------------------------------------------------------------------------


def sent_by(orders: Bus, command_type: str) -> list[Any]:
    found: list[Any] = orders.query_commands(domain="orders", command_type=command_type).items
    return found


def test_an_empty_batch_completes_at_once(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", [], batch_id="b", custom_data=[1], on_complete=OnComplete("orders", "Done"))
    record = orders.get_batch("orders", "b")
    assert (record.status, record.total, record.progress, record.eta_seconds) == (
        BatchStatus.COMPLETED,
        0,
        1.0,
        0.0,
    )
    (done,) = sent_by(orders, "Done")
    summary = {"domain": "orders", "batch_id": "b", "name": None, "status": "COMPLETED", "total": 0,
               "completed": 0, "failed": 0, "canceled": 0, "in_troubleshooting": 0,
               "custom_data": [1]}  # fmt: skip
    assert (done.data, done.headers, done.correlation_id) == (summary, {"batch": summary}, "b")
    orders.create_batch("orders", iter(()), batch_id="o", is_open=True, on_complete=OnComplete("orders", "Done"))
    assert len(sent_by(orders, "Done")) == 1
    orders.close_batch("orders", "o")
    assert len(sent_by(orders, "Done")) == 2
    assert one(db, "SELECT count(*) FROM commandbus.batch_delta") == 0


@pytest.mark.parametrize("kind", ["object", "dict", "function", "async function", "method", "callable"])
def test_a_command_when_it_is_complete(orders: Bus, kind: str) -> None:
    registry = HandlerRegistry()

    @registry.handler("orders", "Done")
    def function(ctx: Any) -> None: ...

    other = HandlerRegistry()

    @other.handler("orders", "Done")
    async def coroutine(ctx: Any) -> None: ...

    class Methods:
        @handler("orders", "Done")
        def done(self, ctx: Any) -> None: ...

        def __call__(self, ctx: Any) -> None: ...

    methods, called = Methods(), Methods()
    HandlerRegistry().register_instance(methods)
    HandlerRegistry().register("orders", "Done", called)
    given: Any = {
        "object": OnComplete("orders", "Done", {"own": 1}, "done-1"),
        "dict": {"domain": "orders", "command_type": "Done", "data": {"own": 1}, "command_id": "done-1"},
        "function": function,
        "async function": coroutine,
        "method": methods.done,
        "callable": called,
    }[kind]
    orders.create_batch("orders", commands(1), batch_id="b", on_complete=given)
    attempt = orders.claim_one()
    orders.settle(attempt.complete(None))
    assert sent_by(orders, "Done") == [], "only the fold decides"
    orders.run(fold([attempt.batch]))
    orders.run(fold([attempt.batch]))
    (done,) = sent_by(orders, "Done")
    assert done.headers["batch"]["completed"] == 1
    if kind in ("object", "dict"):
        assert (done.data, done.command_id) == ({"own": 1}, "done-1")
    else:
        assert done.data == done.headers["batch"]
    record = orders.get_batch("orders", "b")
    assert (record.on_complete["domain"], record.on_complete["command_type"]) == ("orders", "Done")


def test_a_function_that_no_worker_could_find(orders: Bus) -> None:
    def nobody(ctx: Any) -> None: ...

    with pytest.raises(InvalidCommandError, match="nobody is not a registered handler"):
        orders.create_batch("orders", commands(1), on_complete=nobody)
    first, second = HandlerRegistry(), HandlerRegistry()
    first.register("orders", "Done", nobody)
    second.register("orders", "Done", nobody)
    orders.create_batch("orders", commands(1), on_complete=nobody)
    second.register("billing", "Also", nobody)
    says = "is the handler of 2 commands \\('Done' of domain 'orders', 'Also' of domain 'billing'\\)"
    with pytest.raises(InvalidCommandError, match=says):
        orders.create_batch("orders", commands(1), on_complete=nobody)
    with pytest.raises(InvalidCommandError, match="print is not a registered handler"):
        orders.create_batch("orders", commands(1), on_complete=print)


def test_a_reply_when_it_is_complete(orders: Bus, db: Db) -> None:
    orders.create_queue("answers")
    orders.create_batch("orders", commands(2), batch_id="b", on_complete={"reply_to": "answers"})
    first, second = orders.claim()
    orders.settle([first.complete(None), fail(second, BusinessRuleException("no"))])
    orders.run(fold([first.batch]))
    message = one(db, "SELECT message FROM pgmq.q_answers")
    assert message == {
        "event": "batch_completed", "domain": "orders", "batch_id": "b", "name": None, "total": 2, "completed": 1,
        "status": "COMPLETED_WITH_FAILURES", "failed": 1, "canceled": 0, "in_troubleshooting": 0,
        "custom_data": None,
    }  # fmt: skip


def test_a_completion_that_cannot_be_sent_is_put_aside(orders: Bus, db: Db) -> None:
    """Its queue is gone, or its command_id is taken: the batch is complete all the same."""
    orders.create_domain("gone")
    orders.create_queue("lost")
    for name, on_complete in (
        ("a", OnComplete("gone", "Done")), ("b", OnComplete("orders", "Done", command_id="taken")),
        ("c", {"reply_to": "lost"}),
    ):  # fmt: skip
        orders.create_batch("orders", commands(1), batch_id=name, on_complete=on_complete)
    orders.send("orders", "Other", command_id="taken")
    db.execute("SELECT pgmq.drop_queue('gone__commands'), pgmq.drop_queue('lost')")
    made = orders.claim()
    orders.settle([attempt.complete(None) for attempt in made])
    orders.run(fold({attempt.batch for attempt in made if attempt.batch}))
    assert {orders.get_batch("orders", name).status for name in "abc"} == {BatchStatus.COMPLETED}
    aside = db.execute("SELECT queue, reason FROM commandbus.undelivered_reply ORDER BY queue").fetchall()
    assert [queue for queue, _ in aside] == ["gone__commands", "lost", "orders__commands"]
    assert "domain 'gone' does not exist" in aside[0][1]
    assert "command_id 'taken' already exists" in aside[2][1]


# --- looking ----------------------------------------------------------------------------------------------------


def test_the_record_of_a_batch_at_work(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(10), batch_id="b")
    made = orders.claim(n=8)
    record = orders.get_batch("orders", "b")
    assert (record.status, record.running, record.finished) == (BatchStatus.IN_PROGRESS, 8, 0)
    assert [item.status for item in orders.query_batches().items] == [BatchStatus.IN_PROGRESS]
    orders.settle([item.complete(None) for item in made[:4]])
    orders.settle([fail(made[4], BusinessRuleException("no")), fail(made[5], PermanentCommandError("no"))])
    record = orders.get_batch("orders", "b")
    assert (record.completed, record.failed, record.canceled, record.in_tsq, record.running) == (4, 1, 0, 1, 2)
    assert (record.progress, record.remaining) == (0.5, 5)
    orders.run(fold([record.id]))
    folded = orders.get_batch("orders", "b")
    assert (folded.completed, folded.failed, folded.in_tsq, folded.running) == (4, 1, 1, 2)
    assert folded.started_at is not None
    assert one(db, "SELECT count(*) FROM commandbus.batch_delta") == 0


def test_the_rate_falls_while_nothing_happens(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", commands(100), batch_id="b")
    batch = orders.get_batch("orders", "b").id
    assert orders.get_batch("orders", "b").rate_per_second == 0

    def some(n: int, seconds_later: float) -> None:
        db.execute("UPDATE commandbus.batch SET rate_at = rate_at - make_interval(secs => %s)", (seconds_later,))
        orders.settle([item.complete(None) for item in orders.claim(n=n)])
        orders.run(fold([batch]))

    some(10, 0)
    some(10, 2)
    record = orders.get_batch("orders", "b")
    assert record.rate_per_second == pytest.approx(10, rel=0.1), "20 in 2 s"
    assert record.eta_seconds == pytest.approx(8, rel=0.1)
    some(20, 4)
    record = orders.get_batch("orders", "b")
    assert record.rate_per_second == pytest.approx(10 - 5 * 0.33, rel=0.1), "then 5 a second for 4 s"
    db.execute("UPDATE commandbus.batch SET rate_at = rate_at - interval '10 seconds'")
    stalled = orders.get_batch("orders", "b")
    assert stalled.rate_per_second == pytest.approx(record.rate_per_second * 0.37, rel=0.1)
    assert stalled.eta_seconds > record.eta_seconds
    some(60, 1)
    record = orders.get_batch("orders", "b")
    assert (record.is_finished, record.rate_per_second, record.eta_seconds) == (True, 0.0, 0.0)


def test_pages_of_batches(orders: Bus) -> None:
    orders.create_domain("billing")
    for n in range(5):
        orders.create_batch("orders", [], batch_id=f"done-{n}")
        orders.create_batch("billing", commands(1), batch_id=f"new-{n}")
    names, before = [], None
    while True:
        page = orders.query_batches(limit=3, cursor=before)
        names += [item.batch_id for item in page.items]
        before = page.next_cursor
        if before is None:
            break
    assert names == [name for n in reversed(range(5)) for name in (f"new-{n}", f"done-{n}")]
    assert [item.batch_id for item in orders.query_batches("orders", limit=1).items] == ["done-4"]
    assert len(orders.query_batches(status="COMPLETED").items) == 5
    assert len(orders.query_batches("billing", BatchStatus.PENDING).items) == 5
    orders.claim(n=2, domain="billing")
    assert len(orders.query_batches(status=BatchStatus.PENDING).items) == 3
    assert [item.batch_id for item in orders.query_batches(status="IN_PROGRESS").items] == ["new-1", "new-0"]
    for wrong, says in (
        ({"status": "DONE"}, "status 'DONE' is none of PENDING"), ({"limit": 0}, "limit must be"),
        ({"cursor": "x"}, "cursor 'x' is not one of this list"), ({"domain": "X"}, "domain 'X'"),
    ):  # fmt: skip
        with pytest.raises(InvalidCommandError, match=says):
            orders.query_batches(**wrong)


def test_waiting_for_a_batch(orders: Bus) -> None:
    orders.create_batch("orders", commands(3), batch_id="b")
    seen: list[int] = []

    def look(record: Any) -> None:
        seen.append(record.finished)

    with pytest.raises(
        BatchTimeoutError, match="not finished within 200ms: it is PENDING, 3 of 3 are left; it goes on"
    ):
        orders.wait_for_batch("orders", "b", wait="200ms", on_progress=look)
    assert seen
    assert set(seen) == {0}
    assert isinstance(BatchTimeoutError(), TimeoutError)
    made = orders.claim()
    orders.settle([fail(made[0], PermanentCommandError("no")), *(item.complete(None) for item in made[1:])])
    with pytest.raises(
        BatchTimeoutError, match="1 of 3 are left, 1 of them in the troubleshooting queue; it goes on"
    ):
        orders.wait_for_batch("orders", "b", wait=0)
    orders.tsq.operator_cancel("orders", made[0].command_id)
    record = orders.wait_for_batch("orders", "b", wait=5, on_progress=look)
    assert (record.status, seen[-1]) == (BatchStatus.COMPLETED_WITH_FAILURES, 3)
    orders.create_batch("orders", [], batch_id="o", is_open=True)
    with pytest.raises(BatchTimeoutError, match="still open, and nothing is left"):
        orders.wait_for_batch("orders", "o", wait=0)
    with pytest.raises(InvalidCommandError, match="wait"):
        orders.wait_for_batch("orders", "o", wait="soon")


# --- size -------------------------------------------------------------------------------------------------------


@sync_only
def test_a_large_batch(orders: Bus, db: Db) -> None:
    count = examples(20_000, thorough=100_000)
    members = (NewCommand("Ship", {"n": n, "text": "x" * 100}) for n in range(count))
    made = orders.create_batch("orders", members, batch_id="large")
    assert made.total == count
    assert queue_length(db) == count
    assert one(db, "SELECT count(*) FROM commandbus.command WHERE batch = %s", made.id) == count
    assert orders.get_batch("orders", "large").total == count


@sync_only
def test_memory_stays_bounded(orders: Bus) -> None:
    """What is read is sent, then forgotten."""
    orders.create_batch("orders", commands(10))
    tracemalloc.start()
    try:
        orders.create_batch("orders", (NewCommand("Ship", {"text": "x" * 1000}) for _ in range(20_000)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20, "all of them would be more than 20 MB"


@sync_only
def test_large_commands_go_in_smaller_chunks(orders: Bus, db: Db) -> None:
    orders.create_batch("orders", (NewCommand("Ship", "x" * 1_000_000) for _ in range(30)), batch_id="b")
    assert queue_length(db) == 30
