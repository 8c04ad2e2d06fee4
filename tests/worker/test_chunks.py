"""Chunk handlers: a list of commands, an outcome for each; a chunk that fails charges nobody."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    BusinessRuleException,
    CommandBus,
    HandlerRegistry,
    Limit,
    NewCommand,
    PermanentCommandError,
    Snooze,
    TransactionUsedError,
    TransientCommandError,
    Worker,
)
from support.waiting import one, statuses, until, until_settled, verdicts
from support.workers import AT_ONCE, add, done, either, opened, short_lease

StartWorker = Callable[..., Worker]
Db = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def ledger(db: Db) -> None:
    """A table of the application's own."""
    db.execute("CREATE TABLE ledger (command_id text)")


def send(bus: CommandBus, count: int, command_type: str = "index", **options: Any) -> list[str]:
    ids = [f"c{number:03}" for number in range(count)]
    bus.send_many(
        "orders", [NewCommand(command_type, {"n": n}, command_id=id_, **options) for n, id_ in enumerate(ids)]
    )
    return ids


def executions(db: Db) -> Counter[str]:
    return Counter(name for (name,) in db.execute("SELECT command_id FROM ledger"))


def charge(db: Db, command_id: str) -> int:
    """How many attempts of a settled command were charged."""
    found: int = one(db, "SELECT attempt - waived FROM commandbus.command WHERE command_id = %s", command_id)
    return found


def judged(db: Db, command_id: str) -> list[str]:
    """What the history says, without the waits before busy slots of a busy machine."""
    return [verdict for _, verdict in verdicts(db, command_id) if verdict != "GIVEN_BACK"]


def history(db: Db, command_id: str) -> list[tuple[Any, ...]]:
    return db.execute(
        "SELECT a.verdict, a.error_code, a.error, a.rung, a.traceback, a.autopsy FROM commandbus.attempt a "
        "JOIN commandbus.command c ON c.id = a.command WHERE c.command_id = %s ORDER BY a.number",
        (command_id,),
    ).fetchall()


def test_a_full_queue_comes_in_full_chunks_and_the_rest_after_its_wait(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: list[list[int]] = []

    async def index(commands: Any, ctx: Any) -> None:
        assert ctx.commands == commands
        assert [ctx.attempt_of(command) for command in commands] == [1] * len(commands)
        assert 0 < ctx.remaining() <= 30
        seen.append([command.data["n"] for command in commands])

    add(handlers, lane, "index", index, chunk=20, chunk_wait="1s", timeout=30)
    send(bus, 105)
    worker = start_worker(handlers, concurrency=2)
    until_settled(db)
    sizes = list(map(len, seen))
    assert max(sizes) == 20
    assert sizes.count(20) >= 4, sizes
    assert sorted(number for numbers in seen for number in numbers) == list(range(105))
    assert all(numbers == sorted(numbers) for numbers in seen)
    assert statuses(db) == {"COMPLETED": 105}
    assert one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict <> 'GIVEN_BACK'") == 0
    assert worker.stop().settled == 105


def test_each_command_gets_its_own_outcome(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    outcomes = [
        None,
        {"kept": 1},
        PermanentCommandError("no such page"),
        TransientCommandError("busy"),
        BusinessRuleException("not allowed"),
        Snooze("10m", "later"),
        object(),
    ]
    first = threading.Event()

    async def index(commands: Any, ctx: Any) -> Any:
        if first.is_set():  # the transient one comes again, in a chunk of its own
            return {command.command_id: "at last" for command in commands}
        first.set()
        return outcomes

    add(handlers, lane, "index", index, chunk=7, retry_policy=AT_ONCE)
    bus.create_queue("answers")
    ids = send(bus, 7, reply_to="answers")
    start_worker(handlers)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'PENDING'") == 1)
    found = dict(db.execute("SELECT command_id, status::text FROM commandbus.command").fetchall())
    assert [found[id_] for id_ in ids] == [
        "COMPLETED",
        "COMPLETED",
        "IN_TROUBLESHOOTING_QUEUE",
        "COMPLETED",
        "FAILED",
        "PENDING",
        "IN_TROUBLESHOOTING_QUEUE",
    ]
    results = dict(db.execute("SELECT command_id, result FROM commandbus.command").fetchall())
    assert (results["c001"], results["c003"]) == ({"kept": 1}, "at last")
    assert charge(db, "c003") == 2
    assert [verdict for _, verdict in verdicts(db, "c005")] == ["SNOOZED"]
    assert history(db, "c006")[0][1] == "INVALID_RESULT"
    assert one(db, "SELECT count(*) FROM pgmq.q_answers WHERE message ->> 'outcome' = 'SUCCESS'") == 3


@pytest.mark.parametrize(
    "bad", [["one"], "all of them", {"c000": None}, {f"c{n:03}": None for n in range(9)} | {"else": 1}, 7]
)
def test_what_is_no_list_of_outcomes_completes_nobody(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, bad: Any
) -> None:
    sizes: list[int] = []

    def index(commands: Any, ctx: Any) -> Any:
        sizes.append(len(commands))
        return bad if len(commands) > 1 else [None]

    handlers.register("orders", "index", index, chunk=9, chunk_wait="1s")
    ids = send(bus, 9)
    start_worker(handlers)
    until_settled(db)
    assert sizes == [9] + [1] * 9
    assert statuses(db) == {"COMPLETED": 9}
    assert {charge(db, id_) for id_ in ids} == {1}
    verdict, code, text, *_ = history(db, "c004")[0]
    assert (verdict, code) == ("WAIVED", "CHUNK_FAILED")
    assert "a chunk of 9" in text
    assert "one outcome per command" in text
    assert "runs by itself" in text


def test_a_command_that_runs_by_itself_is_charged_for_bad_outcomes(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "index", lambda commands, ctx: [1, 2], chunk=9, chunk_wait=0)
    send(bus, 1)
    start_worker(handlers)
    until_settled(db)
    verdict, code, *_ = history(db, "c000")[0]
    assert (verdict, code) == ("PERMANENT", "INVALID_OUTCOMES")


def test_one_poisonous_command_of_fifty_ends_alone_in_the_troubleshooting_queue(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    async def index(commands: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            for command in commands:
                await done(tx.execute("INSERT INTO ledger VALUES (%s)", (command.command_id,)))
                if command.data["n"] == 17:
                    raise ValueError("poison")

    add(handlers, lane, "index", index, chunk=50, chunk_wait="2s", retry_policy=AT_ONCE)
    ids = send(bus, 50)
    start_worker(handlers)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 49, "IN_TROUBLESHOOTING_QUEUE": 1}
    assert executions(db) == dict.fromkeys(set(ids) - {"c017"}, 1)
    assert {charge(db, id_) for id_ in ids if id_ != "c017"} == {1}
    assert judged(db, "c017") == ["WAIVED", "RETRY", "RETRY", "EXHAUSTED"]
    assert judged(db, "c016") == ["WAIVED"]
    kept = [id_ for id_ in ids if history(db, id_)[0][4] is not None]
    assert kept == ["c000"], "the traceback is kept once"
    assert "see command 'c000'" in history(db, "c049")[0][2]


def test_a_hanging_chunk_charges_nobody_and_its_commands_run_by_themselves(
    bus: CommandBus,
    db: Db,
    handlers: HandlerRegistry,
    start_worker: StartWorker,
    lane: str,
    go_on: threading.Event,
) -> None:
    sizes: list[int] = []

    async def index(commands: Any, ctx: Any) -> None:
        sizes.append(len(commands))
        if len(commands) > 1:
            await opened(go_on)
            async with either(ctx.connection()) as conn:  # it gets none any more
                await done(conn.execute("INSERT INTO ledger VALUES ('zombie')"))

    add(handlers, lane, "index", index, chunk=8, chunk_wait="1s", timeout=0.3)
    ids = send(bus, 8)
    worker = start_worker(handlers, concurrency=1, cancel_grace=0.2)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 8}
    assert sizes == [8] + [1] * 8
    assert {charge(db, id_) for id_ in ids} == {1}
    for id_ in ids:
        verdict, code, text, rung, _, autopsy = history(db, id_)[0]
        assert verdict == "WAIVED"
        assert "a chunk of 8 that" in text
        assert "300ms" in text
        assert (rung is not None) == (id_ == ids[0])
        if lane == "sync":  # an async one can be canceled
            assert (code, autopsy is not None) == ("CHUNK_STUCK", id_ == ids[0])
    go_on.set()
    worker.stop()
    assert executions(db) == {}


def test_a_chunk_that_stops_at_its_deadline_is_not_charged(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    def index(commands: Any, ctx: Any) -> None:
        if len(commands) > 1:
            ctx.sleep(60)

    handlers.register("orders", "index", index, chunk=3, chunk_wait="1s", timeout=60)
    bus.send("orders", "index", command_id="a")
    bus.send("orders", "index", command_id="b", timeout=0.2)  # the shortest one counts for all
    bus.send("orders", "index", command_id="c")
    start_worker(handlers)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 3}
    verdict, code, text, *_ = history(db, "c")[0]
    assert (verdict, code) == ("WAIVED", "CHUNK_TIMEOUT")
    assert "deadline of 200ms" in text


def test_writes_and_all_completions_are_one_commit(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    seen: list[Any] = []

    async def index(commands: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            for command in commands:
                await done(tx.execute("INSERT INTO ledger VALUES (%s)", (command.command_id,)))
            with pytest.raises(PermanentCommandError, match="returned 1 outcomes"):
                tx.complete(["too few"])
            tx.complete([PermanentCommandError("bad") if c.data["n"] == 2 else c.data["n"] for c in commands])
            seen.append((statuses(db), len(executions(db))))
        seen.append(
            (one(db, "SELECT count(*) FROM commandbus.command WHERE status = 'COMPLETED'"), len(executions(db)))
        )
        with pytest.raises(TransactionUsedError):
            async with either(ctx.transaction()):
                pass

    add(handlers, lane, "index", index, chunk=5, chunk_wait="2s")
    bus.create_queue("answers")
    send(bus, 5, reply_to="answers")
    start_worker(handlers)
    until_settled(db)
    assert seen == [({"PENDING": 5}, 0), (4, 5)]
    assert statuses(db) == {"COMPLETED": 4, "IN_TROUBLESHOOTING_QUEUE": 1}
    assert one(db, "SELECT result FROM commandbus.command WHERE command_id = 'c004'") == 4
    assert one(db, "SELECT count(*) FROM pgmq.q_answers") == 4


def test_a_handler_with_transaction_true_gets_one_for_the_chunk(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "index", chunk=4, chunk_wait="100ms", transaction="repeatable read", timeout=30)
    def index(commands: Any, ctx: Any, tx: Any) -> list[Any]:
        with pytest.raises(TransactionUsedError):
            ctx.transaction()
        for command in commands:
            tx.execute("INSERT INTO ledger VALUES (%s)", (command.command_id,))
        return [PermanentCommandError("bad") if c.data["n"] == 2 else {"n": c.data["n"]} for c in commands]

    @handlers.handler("orders", "lazy", chunk=4, chunk_wait="100ms", transaction="serializable", timeout=30)
    async def lazy(commands: Any, ctx: Any, tx: Any) -> Any:
        if len(commands) > 1:
            await tx.execute("INSERT INTO ledger VALUES ('rolled back')")
            raise ValueError("again, one by one")
        await tx.execute("INSERT INTO ledger VALUES (%s)", (commands[0].command_id,))
        return {commands[0].command_id: "single"}

    ids = send(bus, 5)  # a chunk, and one by itself
    bus.send_many("orders", [NewCommand("lazy", command_id=id_) for id_ in ("x1", "x2")])
    start_worker(handlers, concurrency=1)  # two serializable transactions at once may be refused
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 6, "IN_TROUBLESHOOTING_QUEUE": 1}
    assert executions(db) == dict.fromkeys([*ids, "x1", "x2"], 1)
    results = dict(db.execute("SELECT command_id, result FROM commandbus.command").fetchall())
    assert (results["c000"], results["c004"], results["x1"]) == ({"n": 0}, {"n": 4}, "single")
    assert charge(db, "x2") == 1


def test_if_one_lease_is_lost_nothing_of_the_chunk_is_committed(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    stolen = threading.Event()

    async def index(commands: Any, ctx: Any) -> None:
        async with either(ctx.transaction()) as tx:
            for command in commands:
                await done(tx.execute("INSERT INTO ledger VALUES (%s)", (command.command_id,)))
            if len(commands) > 1 and not stolen.is_set():
                stolen.set()
                db.execute(  # as if its lease had run out, and another worker had it
                    'UPDATE pgmq.q_orders__commands SET headers = \'{"held_by": "other"}\', '
                    "read_ct = read_ct + 1, "
                    "vt = now() + interval '1 s' WHERE msg_id = (SELECT msg_id FROM commandbus.command "
                    "WHERE command_id = 'c003')"
                )

    add(handlers, lane, "index", index, chunk=6, chunk_wait="2s")
    ids = send(bus, 6)
    start_worker(handlers)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 6}
    assert executions(db) == dict.fromkeys(ids, 1), "what was rolled back ran again, once"
    assert {charge(db, id_) for id_ in ids if id_ != "c003"} == {1}
    text = history(db, "c000")[0][2]  # at the commit, or by a renewal before it
    assert "no longer holds 1 of the 6" in text or "its lease was lost" in text


def test_a_trickle_comes_in_incomplete_chunks_and_a_lone_command_by_itself(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    sizes: list[int] = []

    @handlers.handler("orders", "index", chunk=100, chunk_wait="50ms")
    def index(commands: Any, ctx: Any) -> None:
        sizes.append(len(commands))

    start_worker(handlers)
    for number in range(3):
        bus.send("orders", "index")
        until(lambda number=number: statuses(db).get("COMPLETED") == number + 1)  # type: ignore[misc]
    assert sizes == [1, 1, 1]
    bus.send_many("orders", [NewCommand("index") for _ in range(4)])
    until_settled(db)
    assert sum(sizes) == 7


def test_a_stop_gives_back_what_was_gathered(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    calls: list[int] = []
    handlers.register(
        "orders", "index", lambda commands, ctx: calls.append(len(commands)), chunk=9, chunk_wait="60s"
    )
    ids = send(bus, 4)
    worker = start_worker(handlers)
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE read_ct = 1") == 4)
    report = worker.stop()
    assert (report.given_back, report.abandoned, report.unwritten) == (4, 0, 0)
    assert calls == []
    assert statuses(db) == {"PENDING": 4}
    assert one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers IS NULL AND vt <= now()") == 4
    assert {tuple(verdicts(db, id_)) for id_ in ids} == {((1, "GIVEN_BACK"),)}


def test_until_idle_does_not_wait_for_more(
    bus: CommandBus, database: str, handlers: HandlerRegistry, db: Db
) -> None:
    sizes: list[int] = []
    handlers.register(
        "orders", "index", lambda commands, ctx: sizes.append(len(commands)), chunk=9, chunk_wait="60s"
    )
    send(bus, 12)
    Worker(handlers, database_url=database).run(until_idle=True)
    assert sorted(sizes) == [3, 9]
    assert statuses(db) == {"COMPLETED": 12}


def test_a_canceled_command_does_not_stop_its_chunk(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "index", chunk=4, chunk_wait="2s", timeout=60)
    def index(commands: Any, ctx: Any) -> list[Any]:
        started.set()
        go_on.wait(30)
        assert not ctx.canceled.is_set()
        return [TransientCommandError("no") if command.data["n"] == 1 else None for command in commands]

    send(bus, 4)
    start_worker(handlers)
    assert started.wait(60)
    bus.cancel("orders", "c001", reason="not needed")
    go_on.set()
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 3, "CANCELED": 1}


def test_leases_of_all_members_are_renewed_while_the_chunk_runs(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    def still_held() -> bool:
        return bool(one(db, "SELECT bool_and(vt > now() AND read_ct = 1) FROM pgmq.q_orders__commands"))

    @handlers.handler("orders", "index", chunk=5, chunk_wait="2s", timeout=1)
    def index(commands: Any, ctx: Any) -> None:
        ctx.extend(60)
        ctx.heartbeat({"at": "work"})
        first = one(db, "SELECT min(vt) FROM pgmq.q_orders__commands")
        until(lambda: one(db, "SELECT min(vt) FROM pgmq.q_orders__commands") > first)
        until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE headers ? 'progress'") == 5)
        assert still_held()

    send(bus, 5)
    start_worker(handlers, **short_lease())
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 5}
    assert one(db, "SELECT count(*) FROM commandbus.attempt") == 0


def test_commands_that_expire_while_they_are_gathered_do_not_run(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen: list[str] = []

    @handlers.handler("orders", "index", chunk=3, chunk_wait="1s")
    def index(commands: Any, ctx: Any) -> None:
        seen.extend(command.command_id for command in commands)

    bus.send("orders", "index", command_id="late", expires="300ms")
    bus.send("orders", "index", command_id="kept")
    start_worker(handlers)
    until_settled(db)
    assert seen == ["kept"]
    assert statuses(db) == {"COMPLETED": 1, "CANCELED": 1}


def test_a_command_whose_lease_was_lost_while_it_was_gathered_does_not_run(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen: list[list[str]] = []

    @handlers.handler("orders", "index", chunk=4, chunk_wait="700ms")
    def index(commands: Any, ctx: Any) -> None:
        seen.append([command.command_id for command in commands])

    send(bus, 3)
    worker = start_worker(handlers)
    assert worker._runtime is not None
    held = worker._runtime.attempts.held
    until(lambda: len(held) == 3)
    for attempt in held.copy():
        attempt.is_lost = attempt.command_id == "c000"
    until(lambda: statuses(db).get("COMPLETED") == 2)
    assert seen == [["c001", "c002"]]
    assert worker.stop().unwritten == 0


def test_singles_beside_chunks_do_not_wait_for_them_or_swamp_the_worker(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    sizes: list[int] = []
    handlers.register("orders", "index", lambda commands, ctx: sizes.append(len(commands)), chunk=50)
    handlers.register("orders", "ship", lambda command, ctx: None)
    kinds = ["ship" if number % 5 == 0 else "index" for number in range(500)]
    bus.send_many("orders", [NewCommand(kind) for kind in kinds])
    start_worker(handlers, concurrency=4)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 500}
    assert sum(sizes) == 400
    assert len(sizes) < 100, sizes
    assert one(db, "SELECT count(*) FROM commandbus.attempt") < 100, "hardly anything was given back"


def test_a_chunk_that_waits_for_more_keeps_no_slot_from_others(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    handlers.register("orders", "index", lambda commands, ctx: None, chunk=50, chunk_wait="60s")
    handlers.register("orders", "ship", lambda command, ctx: None)
    send(bus, 3)
    worker = start_worker(handlers, concurrency=1)
    until(lambda: one(db, "SELECT count(*) FROM pgmq.q_orders__commands WHERE read_ct = 1") == 3)
    bus.send_many("orders", [NewCommand("ship") for _ in range(20)])
    until(lambda: statuses(db) == {"COMPLETED": 20, "PENDING": 3})
    assert worker.stop().given_back == 3


def test_a_chunk_that_loses_a_lease_is_asked_to_stop_and_the_others_run_again_together(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, lane: str
) -> None:
    sizes: list[int] = []

    async def index(commands: Any, ctx: Any) -> None:
        sizes.append(len(commands))
        if len(sizes) == 1:
            db.execute(
                "DELETE FROM pgmq.q_orders__commands WHERE msg_id = (SELECT msg_id FROM commandbus.command "
                "WHERE command_id = 'c001')"
            )
            await done(ctx.sleep(60))

    add(handlers, lane, "index", index, chunk=4, chunk_wait="100ms", timeout=0)
    ids = send(bus, 4)
    start_worker(handlers, **short_lease())
    until(lambda: statuses(db) == {"COMPLETED": 3, "PENDING": 1})  # the row of one is gone
    assert sizes == [4, 3]
    assert {charge(db, id_) for id_ in ids if id_ != "c001"} == {1}
    verdict, code, text, *_ = history(db, "c000")[0]
    assert (verdict, code) == ("WAIVED", "LEASE")
    assert "lost" in text


def test_a_stop_that_does_not_wait_gives_a_running_chunk_back_unmarked(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    sizes: list[int] = []

    @handlers.handler("orders", "index", chunk=3, chunk_wait="100ms", timeout=0)
    def index(commands: Any, ctx: Any) -> None:
        sizes.append(len(commands))
        if len(sizes) == 1:
            go_on.wait(60)

    ids = send(bus, 3)
    worker = start_worker(handlers, cancel_grace=0.2, shutdown_timeout=1.0)
    until(lambda: sizes)
    report = worker.stop()
    assert (report.abandoned, report.unwritten, report.settled) == (3, 0, 0)
    assert statuses(db) == {"PENDING": 3}
    start_worker(handlers)
    until_settled(db)
    assert sizes == [3, 3]
    assert {charge(db, id_) for id_ in ids} == {1}


def test_an_async_chunk_that_blocks_the_event_loop_is_given_up(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker, go_on: threading.Event
) -> None:
    started = threading.Event()

    @handlers.handler("orders", "index", chunk=3, chunk_wait="100ms", timeout=0.5)
    async def index(commands: Any, ctx: Any) -> None:
        if len(commands) > 1:
            assert started.wait(60)
            go_on.wait(60)  # no await: the loop stands still

    @handlers.handler("orders", "near", timeout=60)
    async def near(command: Any, ctx: Any) -> None:
        started.set()
        await ctx.sleep(0.1)

    send(bus, 3)
    bus.send("orders", "near", command_id="near")
    start_worker(handlers, cancel_grace=0.3)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 4}
    assert history(db, "c001")[0][1] == "CHUNK_STUCK"
    assert {charge(db, id_) for id_ in ("c000", "near")} == {1}


def test_members_of_batches_and_processes_are_counted_in_the_transaction(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "index", chunk=5, chunk_wait="100ms", transaction=True)
    def index(commands: Any, ctx: Any, tx: Any) -> None:
        tx.execute("INSERT INTO ledger VALUES ('chunk')")

    batch = bus.create_batch("orders", [NewCommand("index") for _ in range(7)], batch_id="b")
    start_worker(handlers)
    found = bus.wait_for_batch("orders", batch.batch_id, wait=20)
    assert (found.completed, found.total) == (7, 7)


def test_commands_of_an_ordered_key_never_meet_in_a_chunk(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    seen: list[list[tuple[str, int]]] = []
    account = Limit("account", key="data.account", ordered=True, concurrency=1)

    @handlers.handler("orders", "book", chunk=10, chunk_wait="30ms", limits=[account])
    def book(commands: Any, ctx: Any) -> None:
        seen.append([(command.data["account"], command.data["n"]) for command in commands])

    start_worker(handlers, concurrency=4)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.type_rule") == 1)
    booked = [{"account": account, "n": n} for n in range(4) for account in "abc"]
    bus.send_many("orders", [NewCommand("book", data) for data in booked])
    until_settled(db)
    for chunk in seen:
        assert len({account for account, _ in chunk}) == len(chunk)
    for name in "abc":
        assert [n for chunk in seen for account, n in chunk if account == name] == [0, 1, 2, 3]


def test_a_handler_may_return_an_awaitable(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    async def work(commands: Any, ctx: Any) -> list[int]:
        async with ctx.transaction() as tx:
            await tx.execute("SELECT 1")
            tx.complete([command.data["n"] for command in commands])
        return None  # type: ignore[return-value]

    handlers.register("orders", "index", lambda commands, ctx: work(commands, ctx), chunk=3, chunk_wait="50ms")
    send(bus, 4)
    start_worker(handlers)
    until_settled(db)
    assert dict(db.execute("SELECT command_id, result FROM commandbus.command").fetchall())["c003"] == 3


def test_a_child_context_completes_the_commands_of_its_parent(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "index", chunk=3, chunk_wait="100ms")
    def index(commands: Any, ctx: Any) -> None:
        with ctx.child(timeout=20) as child, child.transaction() as tx:
            tx.complete([PermanentCommandError("bad") if c.data["n"] in (1, 3) else "good" for c in commands])
        with pytest.raises(TransactionUsedError):
            ctx.transaction()

    send(bus, 4)  # a chunk, and one by itself
    worker = start_worker(handlers)
    until_settled(db)
    assert statuses(db) == {"COMPLETED": 2, "IN_TROUBLESHOOTING_QUEUE": 2}
    assert worker._runtime is not None
    assert worker._runtime.settler.refused == 0


def test_what_is_raised_or_returned_after_the_commit_is_only_noted(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    @handlers.handler("orders", "index", chunk=2, chunk_wait="2s")
    def index(commands: Any, ctx: Any) -> list[int]:
        with ctx.transaction():
            pass
        if commands[0].data["n"] == 0:
            raise ValueError("too late")
        return [1, 2]

    send(bus, 4)
    start_worker(handlers, concurrency=1)
    until_settled(db)
    until(lambda: one(db, "SELECT count(*) FROM commandbus.attempt WHERE verdict = 'NOTE'") == 4)
    assert statuses(db) == {"COMPLETED": 4}
    assert [history(db, id_)[0][1] for id_ in ("c000", "c003")] == ["ERROR", "RETURNED_TOO_LATE"]


def test_commands_of_a_handler_that_is_registered_late_run_by_themselves(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    sizes: list[int] = []
    handlers.register("orders", "ship", lambda command, ctx: None)
    start_worker(handlers)
    handlers.register("orders", "index", lambda commands, ctx: sizes.append(len(commands)), chunk=5)
    send(bus, 5)
    until_settled(db)
    assert sizes == [1] * 5
    assert statuses(db) == {"COMPLETED": 5}


def test_what_does_not_go_with_chunks_is_refused(handlers: HandlerRegistry) -> None:
    def index(commands: Any, ctx: Any) -> None: ...

    for message, options in (
        ("chunk must be from 1 to 1000, not 0", {"chunk": 0}),
        ("not 1001", {"chunk": 1001}),
        ("chunk_wait must be at most 1m, not 2m", {"chunk": 5, "chunk_wait": "2m"}),
        ("chunk_wait='1s' needs chunk=", {"chunk_wait": "1s"}),
        ('isolation="process" is for one command', {"chunk": 5, "isolation": "process"}),
        (r"limits=\['docai'\] is for one command", {"chunk": 5, "limits": ["docai"]}),
        ("fresh_thread is for one command", {"chunk": 5, "fresh_thread": True}),
    ):
        with pytest.raises(ValueError, match=message):
            handlers.register("orders", "index", index, **options)  # type: ignore[arg-type]
    for chunk in (True, "100", 1.5):
        with pytest.raises(TypeError, match="chunk must be a number of commands"):
            handlers.register("orders", "index", index, chunk=chunk)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must take \(commands, ctx\)"):
        handlers.register("orders", "index", lambda ctx: None, chunk=5)
    assert len(handlers) == 0


def test_the_context_of_a_chunk_says_what_belongs_to_one_command(
    bus: CommandBus, db: Db, handlers: HandlerRegistry, start_worker: StartWorker
) -> None:
    said: list[str] = []

    @handlers.handler("orders", "index", chunk=2, chunk_wait="50ms")
    def index(commands: Any, ctx: Any) -> None:
        for name in ("command", "attempt", "attempt_number", "max_attempts", "internal_id"):
            with pytest.raises(AttributeError):
                getattr(ctx, name)
        with pytest.raises(TypeError, match=r"bus\.limit"):
            ctx.limit("docai", wait=1)
        with ctx.child(timeout=5) as child:
            assert child.commands == commands
        ctx.log.info("indexed")
        said.append(f"{len(commands)} {ctx.worker} {ctx.log.extra['chunk']}")

    send(bus, 3)  # a chunk, and one by itself
    worker = start_worker(handlers)
    until_settled(db)
    assert sorted(said) == [f"1 {worker.id} 1", f"2 {worker.id} 2"]
    assert statuses(db) == {"COMPLETED": 3}
