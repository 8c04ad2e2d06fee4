"""The rows of effects and checkpoints: what others record about the process that called, pruning, and pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, InvalidCommandError
from commandbus.db.drivers import run
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.claimed_row import Fence
from commandbus.flow.commands.rescue import note_death
from commandbus.flow.effects.write import Begin, Checkpoint, End, Fenced, FencedWrite, Written, write_all
from commandbus.model.effect import EffectState

Db = psycopg.Connection[Any]
WORKER = "w1"


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        bus.create_domain("orders")
        yield bus


def claimed(db: Db, bus: CommandBus, *command_ids: str) -> list[Fence]:
    for command_id in command_ids:
        bus.send("orders", "pay", command_id=command_id)
    found = run(db, claim(domain="orders", worker=WORKER, n=20, lease_seconds=60, cursor=None))
    return [Fence("orders", row[0], row[1], row[2], row[6] + row[1]) for row in found.ready]


def write(db: Db, *writes: FencedWrite, worker: str = WORKER) -> list[Written]:
    return run(db, write_all("orders", worker, writes))  # type: ignore[no-any-return]


def begin(fence: Fence, **changes: Any) -> FencedWrite:
    return FencedWrite(fence, Begin(**{"name": "charge", "key": "k", "process": "p"} | changes))


def test_writes_of_many_attempts_are_one_statement_and_each_has_its_own_answer(bus: CommandBus, db: Db) -> None:
    one, two, three = claimed(db, bus, "a", "b", "c")
    lost = two._replace(read_ct=2)
    answers = write(db, begin(one), begin(lost), begin(three))
    assert [answer.fenced for answer in answers] == [Fenced.HELD, Fenced.LOST, Fenced.HELD]
    assert [answer.is_done for answer in answers] == [True, False, True]
    assert write(db, begin(two), worker="another")[0].fenced is Fenced.LOST
    stored = write(db, *(FencedWrite(fence, Checkpoint(f'{{"n": {fence.id}}}')) for fence in (three, lost, one)))
    assert [answer.is_done for answer in stored] == [True, False, True]
    record = bus.commands.get_checkpoint("orders", "c")
    assert record is not None
    assert record.value == {"n": three.id}


def test_the_supervisor_and_the_history_say_that_a_process_is_dead(bus: CommandBus, db: Db) -> None:
    one, two = claimed(db, bus, "a", "b")
    write(db, begin(one), begin(two))
    found = [answer.found for answer in write(db, begin(one), begin(two))]
    assert [item.is_dead for item in found if item is not None] == [False, False]
    db.execute(
        "INSERT INTO commandbus.attempt (command, number, verdict, rung, finished_at) "
        "VALUES (%s, 1, 'RETRY', 'kill', now() - interval '1 hour')",
        (two.id,),
    )
    found = [answer.found for answer in write(db, begin(one), begin(two))]
    assert [item.is_dead for item in found if item is not None] == [False, True]
    db.execute(
        "INSERT INTO commandbus.worker (id, host, pid, domains, concurrency, version, state) "
        "VALUES (%s, 'h', 1, '{orders}', 1, '1', 'ACTIVE')",
        (WORKER,),
    )
    run(db, note_death(WORKER))
    found = [answer.found for answer in write(db, begin(one))]
    assert [item.is_dead for item in found if item is not None] == [True]


def test_settle_after_counts_from_the_end_of_the_attempt(bus: CommandBus, db: Db) -> None:
    (one,) = claimed(db, bus, "a")
    write(db, begin(one))
    db.execute("UPDATE commandbus.effect SET begun_at = now() - interval '1 hour'")
    (answer,) = write(db, begin(one))
    assert answer.found is not None
    assert answer.found.ended_ago >= 3600  # it still runs: nothing is recorded about its end
    db.execute("INSERT INTO commandbus.attempt (command, number, verdict) VALUES (%s, 1, 'RETRY')", (one.id,))
    (answer,) = write(db, begin(one))
    assert answer.found is not None
    assert answer.found.ended_ago < 60


def test_an_end_is_written_once_and_only_by_the_attempt_whose_intent_it_is(bus: CommandBus, db: Db) -> None:
    (one,) = claimed(db, bus, "a")
    write(db, begin(one))
    done = FencedWrite(one, End("charge", 1, EffectState.DONE, '{"a": 1}'))
    other = FencedWrite(one, End("charge", 2, EffectState.NOT_DONE))
    assert not write(db, other)[0].is_done
    late = done._replace(fence=one._replace(read_ct=5))
    assert write(db, late)[0] == Written(Fenced.LOST, True)  # true all the same
    assert write(db, done)[0] == Written(Fenced.HELD, True)  # an answer was lost, and it is asked again
    assert not write(db, FencedWrite(one, End("charge", 1, EffectState.NOT_DONE)))[0].is_done
    assert [(item.state, item.receipt) for item in bus.commands.get_effects("orders", "a")] == [("DONE", {"a": 1})]


def test_open_effects_are_listed_in_pages_and_pruned_with_their_commands(bus: CommandBus, db: Db) -> None:
    fences = claimed(db, bus, "a", "b", "c")
    write(db, *(begin(fence) for fence in fences))
    write(db, *(begin(fence, name="refund") for fence in fences))
    write(db, *(FencedWrite(fence, Checkpoint("1")) for fence in fences))
    names, cursor = [], None
    while True:
        page = bus.commands.list_open_effects("orders", limit=4, cursor=cursor)
        names += [(item.command_id, item.name) for item in page]
        if (cursor := page.next_cursor) is None:
            break
    assert names == [(command_id, name) for command_id in "abc" for name in ("charge", "refund")]
    assert bus.commands.list_open_effects("billing").items == []
    with pytest.raises(InvalidCommandError, match="cursor 'x' is not valid"):
        bus.commands.list_open_effects(cursor="x")
    db.execute("UPDATE commandbus.command SET status = 'COMPLETED', finished_at = now() - interval '1 day'")
    bus.prune(age=60)
    assert [
        db.execute(f"SELECT count(*) FROM commandbus.{table}").fetchone() for table in ("effect", "checkpoint")
    ] == [
        (0,),
        (0,),
    ]


def test_what_a_person_says_is_checked(bus: CommandBus, db: Db) -> None:
    with pytest.raises(InvalidCommandError, match="an effect that was not done has no receipt"):
        bus.commands.resolve_effect("orders", "a", "charge", done=False, receipt=1)
    with pytest.raises(LookupError, match="command 'a' of domain 'orders' has no effect 'charge'"):
        bus.commands.resolve_effect("orders", "a", "charge", done=True)
