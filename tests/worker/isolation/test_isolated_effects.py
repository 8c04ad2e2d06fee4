"""Effects and checkpoints of handlers with isolation="process": the worker writes them, under the fence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, TroubleshootingQueue, Worker
from commandbus.flow.effects.write import Checkpoint, Fenced, Written
from commandbus.worker.isolation.channel import ChannelError
from commandbus.worker.isolation.write_relay import WriteRelay
from support.isolated_effects import handlers
from support.waiting import until, until_settled, verdicts
from support.workers import AT_ONCE

Db = psycopg.Connection[Any]


def test_a_child_that_dies_in_the_block_charges_once(
    bus: CommandBus, db: Db, start_worker: Callable[..., Worker], tmp_path: Path
) -> None:
    sent = {}
    for kind, dies in (("pay", "after"), ("pay_async", "before"), ("pay_async", "never")):
        data = {"charges": str(tmp_path / f"{kind}-{dies}"), "dies": dies}
        sent[bus.send("orders", kind, data, command_id=f"{kind}-{dies}").command_id] = dies
    bus.send("orders", "refuse", {"charges": str(tmp_path / "refuse")}, command_id="refuse")
    start_worker(handlers, retry_policy=AT_ONCE, concurrency=2)
    until_settled(db, 60)
    for command_id, dies in sent.items():
        record = bus.get_command("orders", command_id)
        (effect,) = bus.commands.get_effects("orders", command_id)
        assert record is not None
        assert (record.status, effect.state) == ("COMPLETED", "DONE"), record.error
        word = "found" if dies == "after" else "charged"
        assert isinstance(record.result, list)
        receipt, (before, last) = record.result
        assert (receipt, before) == ({word: effect.key}, None if dies == "never" else [None, 1])
        assert last == record.attempts
        assert (tmp_path / command_id).read_text().split() == [effect.key]
        ends = [verdict for _, verdict in verdicts(db, command_id) if verdict != "GIVEN_BACK"]
        assert ends == ([] if dies == "never" else ["RETRY"])
    (entry,) = TroubleshootingQueue(bus).list("orders")
    assert (entry.command_id, entry.error_code) == ("refuse", "EFFECT_UNCERTAIN")
    assert len((tmp_path / "refuse").read_text().split()) == 1


def test_the_worker_checks_what_a_child_asks_it_to_write() -> None:
    class Attempt:
        number = 1

    sent: list[Any] = []
    relay = WriteRelay(lambda *_: pytest.fail("not this"), Attempt(), run=2, send=sent.append, max_bytes=100)  # type: ignore[arg-type,return-value]
    usual = {"k": "write", "n": 2, "q": 1}
    for nonsense in (
        {"what": "Checkpoint", "value": "{"},
        {"what": "Checkpoint", "value": f'"{"x" * 200}"'},
        {"what": "Begin", "name": "", "key": "k", "process": None, "instead_of": None},
        {"what": "End", "name": "n", "attempt": 1, "state": "PAID", "receipt": None, "note": None, "is_own": True},
        {"what": "Delete"},
    ):
        with pytest.raises((ChannelError, ValueError)):
            relay.hear(usual | nonsense)
    relay.hear({"k": "write", "n": 1, "q": 7, "what": "Checkpoint", "value": "1"})  # of an attempt that is over
    assert [(message["q"], message["error"]["kind"]) for message in sent] == [(7, "AttemptFencedError")]


def test_a_write_of_an_attempt_that_is_not_held_is_lost(bus: CommandBus, lab: Any, db: Db) -> None:
    attempt = lab.claim("nothing")
    answer: Written = lab.services.write(attempt, Checkpoint("1")).result(10)
    assert (answer.fenced, answer.is_done) == (Fenced.HELD, True)
    db.execute("UPDATE pgmq.q_orders__commands SET read_ct = read_ct + 1")
    answer = lab.services.write(attempt, Checkpoint("2")).result(10)
    assert (answer.fenced, answer.is_done) == (Fenced.LOST, False)
    assert until(lambda: bus.commands.get_checkpoint("orders", attempt.command_id)).value == 1
