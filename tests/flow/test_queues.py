"""PgmqClient and AsyncPgmqClient on real queues: PGMQ's examples, transactions, waiting, domains' queues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from flow_harness import Bus, Roles, assert_refused, sync_only
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from commandbus import (
    AsyncPgmqClient,
    CommandBus,
    InvalidCommandError,
    InvalidOperationError,
    PgmqClient,
    QueueMessage,
    UnknownQueueError,
)
from commandbus.flow.commands.settle import settle
from support.waiting import until


@pytest.fixture
def queues(part: Callable[[str], Any]) -> Any:
    """The client, with a queue of the name that PGMQ's documentation uses."""
    queues = part("queues")
    queues.create_queue("my_queue")
    return queues


def bodies(messages: list[QueueMessage]) -> list[Any]:
    return [message.message for message in messages]


# --- the examples of PGMQ's documentation ---------------------------------------------------------------------


def test_send_read_and_wait_out_the_visibility_timeout(queues: Any) -> None:
    assert queues.send("my_queue", {"foo": "bar1"}) == 1
    assert queues.send("my_queue", {"foo": "bar2"}, delay=5) == 2
    (first,) = queues.read("my_queue", vt=30, qty=2)
    assert (first.msg_id, first.read_ct, first.message, first.headers) == (1, 1, {"foo": "bar1"}, None)
    assert timedelta(seconds=28) < first.vt - first.last_read_at < timedelta(seconds=32)
    assert queues.read("my_queue", vt=30, qty=1) == []
    queues.set_vt("my_queue", 1, 0)
    assert [(again.msg_id, again.read_ct) for again in queues.read("my_queue", vt="1m")] == [(1, 2)]


def test_pop_removes_at_once(queues: Any) -> None:
    queues.send_batch("my_queue", [{"foo": "bar1"}, {"foo": "bar2"}])
    assert bodies(queues.pop("my_queue")) == [{"foo": "bar1"}]
    assert bodies(queues.pop("my_queue", qty=5)) == [{"foo": "bar2"}]
    assert queues.pop("my_queue") == []
    assert queues.metrics("my_queue").queue_length == 0


def test_archive_keeps_what_was_read(queues: Any, db: psycopg.Connection[Any]) -> None:
    assert queues.send_batch("my_queue", [{"foo": f"bar{n}"} for n in (3, 4, 5)]) == [1, 2, 3]
    (read,) = queues.read("my_queue")
    assert queues.archive("my_queue", 1)
    assert queues.archive_batch("my_queue", [2, 3, 99]) == [2, 3]
    assert not queues.archive("my_queue", 1)
    kept = db.execute("SELECT msg_id, read_ct, message, last_read_at FROM pgmq.a_my_queue ORDER BY 1").fetchall()
    assert kept == [
        (1, 1, {"foo": "bar3"}, read.last_read_at), (2, 0, {"foo": "bar4"}, None), (3, 0, {"foo": "bar5"}, None),
    ]  # fmt: skip


def test_delete_purge_and_drop(queues: Any) -> None:
    queues.send_batch("my_queue", list(range(6)))
    assert queues.delete("my_queue", 6)
    assert not queues.delete("my_queue", 6)
    assert queues.delete_batch("my_queue", [1, 2, 77]) == [1, 2]
    assert queues.purge("my_queue") == 3
    assert queues.drop_queue("my_queue")
    assert not queues.drop_queue("my_queue")
    assert queues.list_queues() == []


def test_headers_go_with_their_messages(queues: Any) -> None:
    queues.send("my_queue", "one", headers={"trace": 1})
    queues.send_batch("my_queue", ["two", "three"], headers=[None, {"trace": 3}])
    found = queues.read("my_queue", qty=3)
    assert [(message.message, message.headers) for message in found] == [
        ("one", {"trace": 1}), ("two", None), ("three", {"trace": 3}),
    ]  # fmt: skip


def test_a_message_for_a_moment(queues: Any) -> None:
    queues.send("my_queue", "later", at=datetime.now(UTC) + timedelta(hours=1))
    queues.send("my_queue", "now", at=datetime.now(UTC) - timedelta(hours=1))
    assert bodies(queues.read("my_queue", qty=2)) == ["now"]


def test_figures_of_queues(queues: Any, orders: Bus) -> None:
    queues.send_batch("my_queue", [1, 2, 3])
    queues.send("my_queue", 4, delay="1h")
    queues.delete("my_queue", 1)
    figures = queues.metrics("my_queue")
    assert (figures.queue_length, figures.queue_visible_length, figures.total_messages) == (3, 2, 4)
    assert 0 <= figures.newest_msg_age_sec <= figures.oldest_msg_age_sec < 60
    orders.send("orders", "Ship")
    assert {each.queue_name: each.queue_length for each in queues.metrics_all()} == {
        "my_queue": 3, "orders__commands": 1,
    }  # fmt: skip
    assert [(each.queue_name, each.domain) for each in queues.list_queues()] == [
        ("my_queue", None), ("orders__commands", "orders"),
    ]  # fmt: skip
    queues.create_queue("empty")
    empty = queues.metrics("empty")
    assert (empty.queue_length, empty.oldest_msg_age_sec, empty.total_messages) == (0, None, 0)


# --- PGMQ's versions and names --------------------------------------------------------------------------------


def test_queues_of_an_older_pgmq(queues: Any, db: psycopg.Connection[Any]) -> None:
    """In PGMQ 1.5 no queue knew when a message was last read."""
    for table in ("q_my_queue", "a_my_queue"):
        db.execute(f"ALTER TABLE pgmq.{table} DROP COLUMN last_read_at".encode())
    queues.send_batch("my_queue", [1, 2, 3, 4])
    (read,) = queues.read("my_queue")
    assert (read.message, read.read_ct, read.last_read_at) == (1, 1, None)
    assert queues.set_vt("my_queue", read.msg_id, 0).msg_id == read.msg_id
    assert bodies(queues.pop("my_queue")) == [1]
    assert queues.archive_batch("my_queue", [2, 3]) == [2, 3]
    assert queues.delete("my_queue", 4)


def test_a_queue_of_another_client_with_a_name_that_must_be_quoted(
    queues: Any, db: psycopg.Connection[Any]
) -> None:
    db.execute("SELECT pgmq.create('My-Queue of 7')")
    assert queues.send("My-Queue of 7", [1]) == 1
    (sent,) = db.execute("SELECT * FROM pgmq.send('My-Queue of 7', '[2]')").fetchone() or (None,)
    assert sent == 2
    assert bodies(queues.read("My-Queue of 7", qty=5)) == [[1], [2]]
    assert queues.metrics("My-Queue of 7").total_messages == 2
    assert queues.archive("My-Queue of 7", 1)
    assert queues.drop_queue("My-Queue of 7")


def test_what_another_client_sent_that_python_cannot_parse(queues: Any, db: psycopg.Connection[Any]) -> None:
    deep = "[" * 5000 + "]" * 5000
    db.execute("SELECT pgmq.send('my_queue', %s::jsonb)", [deep])
    (found,) = queues.read("my_queue")
    assert found.message == deep


# --- transactions ---------------------------------------------------------------------------------------------


@sync_only
def test_everything_joins_the_callers_transaction(queues: Any, database: str) -> None:
    queues.send_batch("my_queue", [1, 2, 3, 4, 5])
    with psycopg.connect(database) as conn:
        conn.execute("SET search_path = public")
        queues.create_queue("other", conn=conn)
        queues.send("my_queue", 6, conn=conn)
        queues.pop("my_queue", conn=conn)
        queues.read("my_queue", conn=conn)
        queues.delete("my_queue", 3, conn=conn)
        queues.archive("my_queue", 4, conn=conn)
        queues.set_vt("my_queue", 5, 60, conn=conn)
        assert queues.metrics("my_queue", conn=conn).queue_length == 3
        assert queues.purge("my_queue", conn=conn) == 3
        assert conn.execute("SHOW search_path").fetchone() == ("public",)
        assert queues.metrics("my_queue").queue_length == 5
        conn.rollback()
    assert [each.queue_name for each in queues.list_queues()] == ["my_queue"]
    assert bodies(queues.read("my_queue", qty=9)) == [1, 2, 3, 4, 5]
    assert queues.metrics("my_queue").queue_visible_length == 0


def test_a_client_of_a_pool(queues: Any, bus: Bus, database: str) -> None:
    if bus.driver == "sync":
        with ConnectionPool(database, min_size=1, open=True) as pool:
            client = PgmqClient(pool)
            assert client.send("my_queue", 1) == 1
            assert bodies(client.read("my_queue")) == [1]
            assert not client.wait_for("my_queue", wait=0.05)
        return

    async def use() -> None:
        async with AsyncConnectionPool(database, min_size=1, open=False) as pool:
            client = AsyncPgmqClient(pool)
            assert await client.send("my_queue", 1) == 1
            assert bodies(await client.read("my_queue")) == [1]
            assert not await client.wait_for("my_queue", wait=0.05)

    bus.runner.run(use())


# --- waiting --------------------------------------------------------------------------------------------------


def is_listening(db: psycopg.Connection[Any]) -> bool:
    """Has the session that listens looked, too? The first look is made by one of the pool."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%min(q.vt)%'"
    (count,) = db.execute(query.encode()).fetchone() or (0,)
    return bool(count >= 3)  # with this very query


def when_it_listens(db: psycopg.Connection[Any], act: Callable[[], Any]) -> threading.Thread:
    """Act as soon as somebody listens."""

    def run() -> None:
        until(lambda: is_listening(db))
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.fixture
def only_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits looks again only when told."""
    monkeypatch.setattr("commandbus.bus.queues.LOOK_SECONDS", 3600.0)


@pytest.mark.usefixtures("only_told")
def test_a_message_ends_the_wait(queues: Any, db: psycopg.Connection[Any], database: str) -> None:
    with ConnectionPool(database, min_size=1, open=True) as pool:
        sender = when_it_listens(db, lambda: PgmqClient(pool).send("my_queue", "here"))
        began = time.monotonic()
        assert queues.wait_for("my_queue", wait="30s")
        assert time.monotonic() - began < 20
        sender.join()
    assert bodies(queues.read("my_queue")) == ["here"]


@pytest.mark.usefixtures("only_told")
def test_a_reply_ends_the_wait(orders: Bus, queues: Any, db: psycopg.Connection[Any], database: str) -> None:
    orders.send("orders", "Ship", command_id="k", reply_to="my_queue")
    done = orders.claim_one().complete('{"done": true}')
    with CommandBus(database) as worker:
        settling = when_it_listens(db, lambda: worker.run(settle("orders", "w1", [done], waiting=False)))
        assert queues.wait_for("my_queue", wait=30)
        settling.join()
    (reply,) = queues.read("my_queue")
    assert (reply.message["outcome"], reply.message["result"]) == ("SUCCESS", {"done": True})


@pytest.mark.usefixtures("only_told")
def test_what_pgmq_itself_tells_ends_the_wait(queues: Any, db: psycopg.Connection[Any]) -> None:
    db.execute("SELECT pgmq.enable_notify_insert('my_queue', 0)")
    sender = when_it_listens(db, lambda: db.execute("SELECT pgmq.send('my_queue', '1')"))
    assert queues.wait_for("my_queue", wait=30)
    sender.join()


def test_a_message_of_a_program_that_tells_nobody_is_found(queues: Any, db: psycopg.Connection[Any]) -> None:
    sender = when_it_listens(db, lambda: db.execute("SELECT pgmq.send('my_queue', '1')"))
    assert queues.wait_for("my_queue", wait="30s")
    sender.join()


def test_the_wait_ends_when_a_delayed_message_is_due(queues: Any) -> None:
    queues.send("my_queue", 1, delay=0.3)
    assert queues.wait_for("my_queue", wait=10)
    assert bodies(queues.read("my_queue")) == [1]


def test_the_wait_ends_with_its_time(queues: Any) -> None:
    began = time.monotonic()
    assert not queues.wait_for("my_queue", wait="200ms")
    assert 0.2 <= time.monotonic() - began < 5
    assert queues.read_with_poll("my_queue", wait=0.1) == []


def test_polling_finds_what_comes(queues: Any) -> None:
    queues.send("my_queue", 1, delay=0.2)
    assert bodies(queues.read_with_poll("my_queue", wait=10, poll_interval="50ms", qty=3)) == [1]


# --- domains' queues ------------------------------------------------------------------------------------------


def test_a_domains_queue_is_looked_at_and_nothing_is_taken(orders: Bus, queues: Any) -> None:
    sent = orders.send("orders", "Ship", command_id="k")
    for _ in range(3):
        (found,) = queues.read("orders__commands")
        assert (found.read_ct, found.message) == (0, {"command": sent.id})
    assert orders.claim_one().charge == 1


@pytest.mark.parametrize(
    ("act", "instead"),
    [
        (lambda queues: queues.delete("orders__commands", 1), r"bus\.cancel"),
        (lambda queues: queues.delete_batch("orders__commands", [1]), r"bus\.cancel"),
        (lambda queues: queues.archive("Orders__Commands", 1), r"bus\.prune"),
        (lambda queues: queues.archive_batch("orders__commands", [1]), r"bus\.prune"),
        (lambda queues: queues.pop("orders__commands"), "run a Worker"),
        (lambda queues: queues.purge("orders__commands"), r"bus\.cancel"),
        (lambda queues: queues.set_vt("orders__commands", 1, 0), r"bus\.pause"),
        (lambda queues: queues.drop_queue("orders__commands"), "would be lost"),
        (lambda queues: queues.create_queue("more__commands"), r"bus\.create_domain"),
    ],
)
def test_what_would_break_a_domains_books_is_refused(
    orders: Bus, queues: Any, act: Callable[[Any], Any], instead: str
) -> None:
    orders.send("orders", "Ship", command_id="k")
    with pytest.raises(InvalidOperationError, match=rf"queue of domain '\w+'.*{instead}"):
        act(queues)
    assert orders.claim_one().command_id == "k"


def test_a_message_to_a_domains_queue_is_a_command(orders: Bus, queues: Any) -> None:
    queues.send("orders__commands", {"command_type": "Ship", "command_id": "k", "data": {"n": 1}})
    orders.put_right(orders.claim_raw())
    assert orders.get_command("orders", "k").data == {"n": 1}


# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "act",
    [
        lambda queues: queues.send("nowhere", 1),
        lambda queues: queues.read("nowhere"),
        lambda queues: queues.pop("nowhere"),
        lambda queues: queues.delete("nowhere", 1),
        lambda queues: queues.archive("nowhere", 1),
        lambda queues: queues.set_vt("nowhere", 1, 1),
        lambda queues: queues.purge("nowhere"),
        lambda queues: queues.metrics("nowhere"),
        lambda queues: queues.wait_for("nowhere", wait=1),
    ],
)
def test_a_queue_that_there_is_not(queues: Any, act: Callable[[Any], Any]) -> None:
    with pytest.raises(UnknownQueueError, match=r"unknown queue 'nowhere'.*bus\.create_queue"):
        act(queues)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda queues: queues.send("a;b", 1), "is not a queue name"),
        (lambda queues: queues.read('a"b'), "is not a queue name"),
        (lambda queues: queues.read("a%sb"), "is not a queue name"),
        (lambda queues: queues.read("a" * 48), "1 to 47 characters"),
        (lambda queues: queues.read("my_queue", qty=0), "qty must be a whole number from 1"),
        (lambda queues: queues.read("my_queue", vt="soon"), "vt: 'soon' is not a duration"),
        (lambda queues: queues.send("my_queue", {1, 2}), "message is not JSON"),
        (lambda queues: queues.send("my_queue", 1, delay=1, at=datetime.now(UTC)), "delay or at"),
        (lambda queues: queues.send("my_queue", 1, at=datetime(2026, 1, 1)), "time zone"),  # noqa: DTZ001
        (lambda queues: queues.send_batch("my_queue", [1, 2], headers=[None]), "1 for 2 messages"),
        (lambda queues: queues.delete("my_queue", "1"), "msg_id must be a whole number"),
        (lambda queues: queues.wait_for("my_queue", wait=-1), "negative"),
    ],
)
def test_arguments_that_make_no_sense(queues: Any, act: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(InvalidCommandError, match=says):
        act(queues)


def test_nothing_is_sent_for_nobody(queues: Any) -> None:
    assert queues.send_batch("my_queue", []) == []


# --- roles ----------------------------------------------------------------------------------------------------


def test_a_producer_sends_and_a_worker_reads(queues: Any, acting: Roles, part: Callable[..., Any]) -> None:
    producer, worker = part("queues", acting("producer")), part("queues", acting("worker"))
    queues.create_queue("answers")  # granted as it is created
    assert producer.send("answers", 1) == 1
    assert_refused(lambda: producer.read("answers"))
    (read,) = worker.read("answers")
    assert worker.delete("answers", read.msg_id)
    reader = part("queues", acting("reader"))
    assert reader.metrics("answers").total_messages is None
    assert_refused(lambda: reader.pop("answers"))
