"""In the middle of a move a signal comes, its message is handled, or the worker dies. Nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, Saga, nested, sleep, step, wait_for
from commandbus.flow.commands.claim import claim
from commandbus.flow.commands.settle import settle
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.process_messages import handler_of
from support.by_hand import Broken, Harness, Interruption

P = "processes"
STATEMENTS = range(1, 13)  # a move has fewer
Db = psycopg.Connection[Any]

APPROVAL = Saga("approval", step("a", "orders"), wait_for("ok", deadline="2d", on_timeout="continue"))
INNER = Saga("inner", sleep("1h"))
OUTER = Saga("outer", nested("in", INNER))


class Hands:
    """Workers by hand, for messages and for steps."""

    def __init__(self, bus: CommandBus, database: str) -> None:
        self.bus = bus
        impatient = psycopg.conninfo.make_conninfo(database, options="-c lock_timeout=30")
        self.harnesses = [Harness(database), Harness(impatient)]
        self.handlers: dict[str, Callable[..., None]] = {
            saga.process_type: handler_of(saga) for saga in (APPROVAL, INNER, OUTER)
        }

    def claim(self, domain: str = P) -> list[Attempt]:
        rows = self.bus.run(claim(domain=domain, worker="w", n=9, lease_seconds=3600, cursor=None)).ready
        return [self._attempt(domain, row) for row in rows]

    def _attempt(self, domain: str, row: Any) -> Attempt:
        attempt = Attempt(domain, tuple(row), None, 0.0)
        attempt.started = attempt.row[17] / 1e6
        return attempt

    def handle(self, attempt: Attempt, interruption: Interruption | None = None, *, harness: int = 0) -> None:
        handler = self.handlers[attempt.command().command_type]
        self.harnesses[harness].handle(handler, "w", attempt, interruption)

    def handle_others(self, attempts: list[Attempt]) -> None:
        """By another worker. What has to wait for a lock is left to be handled later."""
        while attempts:
            try:
                self.handle(attempts[-1], harness=1)
            except psycopg.errors.LockNotAvailable:
                return
            attempts.pop()

    def work(self) -> None:
        """All that is due, until nothing is."""
        while True:
            attempts = self.claim()
            for attempt in attempts:
                self.handle(attempt)
            steps = self.claim("orders")
            for attempt in steps:
                self.bus.run(settle("orders", "w", [attempt.complete("1")]))
            if not attempts and not steps:
                return

    def reply(self) -> Attempt:
        """The process of this name is about to wait: the message that makes it do so."""
        for attempt in self.claim():
            self.handle(attempt)
        for attempt in self.claim("orders"):
            self.bus.run(settle("orders", "w", [attempt.complete("1")]))
        (attempt,) = self.claim()
        return attempt

    def release(self, db: Db) -> None:
        """The leases of the dead run out."""
        db.execute("UPDATE pgmq.q_processes__commands SET vt = now() - interval '1 s' WHERE headers ? 'held_by'")
        db.execute("UPDATE pgmq.q_processes__commands SET headers = NULL")


@pytest.fixture
def hands(bus: CommandBus, database: str) -> Iterator[Hands]:
    hands = Hands(bus, database)
    yield hands
    for harness in hands.harnesses:
        harness.close()


@pytest.mark.parametrize("count", [3, 7, 8])
def test_signals_are_read_in_portions_and_taken_once_in_their_order(
    bus: CommandBus, hands: Hands, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("commandbus.worker.process_messages.MOST_SIGNALS", 4)
    many = Saga("many", *(wait_for("ok", name=f"ok{n}") for n in range(count)))
    hands.handlers["many"] = handler_of(many)
    bus.start_process(many, {}, process_id="p")
    for n in range(count + 1):
        bus.signal(P, "p", "ok", n)
    hands.work()
    record = bus.get_process(P, "p")
    assert record is not None
    assert (record.status, record.state) == ("COMPLETED", {f"ok{n}": n for n in range(count)})
    assert [signal.step for signal in record.signals] == [*range(1, count + 1), None]


def test_a_signal_in_the_middle_of_a_move_is_taken(bus: CommandBus, hands: Hands) -> None:
    """Whichever statement comes next, and although its own message found nobody who waits."""
    for statement in STATEMENTS:
        name = f"p{statement}"
        bus.start_process(APPROVAL, {}, process_id=name)
        reply = hands.reply()

        others: list[Attempt] = []

        def come(name: str = name, others: list[Attempt] = others) -> None:
            bus.signal(P, name, "ok", name)
            others.extend(hands.claim())
            hands.handle_others(others)

        hands.handle(reply, Interruption(statement, come))
        if not bus.get_process(P, name).signals:  # type: ignore[union-attr]
            come()
        hands.handle_others(others)
        record = bus.get_process(P, name)
        assert record is not None
        assert (record.status, record.state) == ("COMPLETED", {"a": 1, "ok": name}), f"statement {statement}"
        assert [signal.step for signal in record.signals] == [2]
        assert record.strays == []


def test_a_signal_and_a_deadline_in_the_middle_of_each_other(bus: CommandBus, hands: Hands, db: Db) -> None:
    """The signal is taken, or it is left, and the deadline has decided: never both, never neither."""
    seen = set()
    for statement in STATEMENTS:
        for signal_is_first in (True, False):
            name = f"p{statement}{signal_is_first}"
            bus.start_process(APPROVAL, {}, process_id=name)
            hands.handle(hands.reply())
            if signal_is_first:
                bus.signal(P, name, "ok", "signal")
                (one,) = hands.claim()
                db.execute("UPDATE pgmq.q_processes__commands SET vt = now() WHERE headers IS NULL")
                others = hands.claim()
            else:
                db.execute("UPDATE pgmq.q_processes__commands SET vt = now() WHERE headers IS NULL")
                (one,) = hands.claim()
                bus.signal(P, name, "ok", "signal")
                others = hands.claim()

            def come(others: list[Attempt] = others) -> None:
                hands.handle_others(others)

            hands.handle(one, Interruption(statement, come))
            come()
            record = bus.get_process(P, name)
            assert record is not None
            taken = [signal.step for signal in record.signals]
            found = (record.status.value, record.state["ok"], taken)  # type: ignore[index, call-overload]
            assert found in (("COMPLETED", "signal", [2]), ("COMPLETED", None, [None]))
            seen.add(found[1])
    assert seen == {"signal"}, "a signal that is there wins"


@pytest.mark.parametrize("saga", [APPROVAL, OUTER])
def test_a_worker_that_dies_in_the_middle_loses_nothing(bus: CommandBus, hands: Hands, db: Db, saga: Saga) -> None:
    """Before each statement of each message: of waits, sleeps, nested processes, their ends and their undoing."""
    for statement in STATEMENTS:
        name = f"p{statement}"
        bus.start_process(saga, {}, process_id=name)
        if saga is APPROVAL:
            bus.signal(P, name, "ok", name)
        for _ in range(30):
            for attempt in hands.claim():
                try:
                    hands.handle(attempt, Interruption(statement))
                except Broken:
                    hands.release(db)
                    break
            hands.work()
            if bus.get_process(P, name).status == "COMPLETED":  # type: ignore[union-attr]
                break
            db.execute("UPDATE pgmq.q_processes__commands SET vt = now()")
        record = bus.get_process(P, name)
        assert record is not None
        assert record.status == "COMPLETED", record
        assert len(record.steps) == (2 if saga is APPROVAL else 1)
        assert record.strays == []
    assert db.execute("SELECT count(*) FROM commandbus.process WHERE finished_at IS NULL").fetchone() == (0,)
