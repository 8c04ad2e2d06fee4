"""Batches against their commands: whatever happens in whatever order, the counts are those of the commands.

The machine creates batches, adds to open ones and closes them; claims, settles and lets leases run out; operates
on the troubleshooting queue, cancels single members and whole batches (and dies half-way), sends what failed
again; folds, sweeps, or does neither. After each step every batch is read and compared with its members:

- each count is that of the members in that state, folded or not
- a batch is finished only if it is closed and all its members are final, and never moves again
- what `on_complete` asks for was sent once if the batch is finished, and not before

At the end everything is settled and swept once: then every closed batch is finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from commandbus import (
    BatchRecord,
    BatchStatus,
    BusinessRuleException,
    CommandBus,
    InvalidOperationError,
    NewCommand,
    OnComplete,
    PermanentCommandError,
    TroubleshootingQueue,
)
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import leftovers
from commandbus.flow.batches.operate import cancel_bite, mark, resume
from commandbus.flow.commands import operate
from commandbus.flow.commands.claim import claim, put_right
from commandbus.flow.commands.settle import Settlement, cancellation, settle
from commandbus.model.outcome import Judgement, Verdict, judge_failure
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt
from support.running import examples

POLICY = RetryPolicy(max_attempts=2, backoff_schedule=[0], jitter=0)
TABLES = ("command", "attempt", "tsq", "operator_action", "batch", "batch_delta")
PICK = st.integers(0, 99)
SIZES = st.integers(0, 3)
RARELY = st.integers(0, 5).map(lambda n: n == 5)
COUNTS = """
    SELECT count(*), count(*) FILTER (WHERE status = 'COMPLETED'), count(*) FILTER (WHERE status = 'FAILED'),
           count(*) FILTER (WHERE status = 'CANCELED'), count(*) FILTER (WHERE status = 'IN_TROUBLESHOOTING_QUEUE')
      FROM commandbus.command WHERE batch = %s
"""


def _failed(attempt: Attempt, error: Exception) -> Settlement:
    return attempt.fail(judge_failure(error, charge=attempt.charge, policy=POLICY, max_attempts=None))


OUTCOMES: dict[str, Any] = {
    "complete": lambda attempt: attempt.complete(None),
    "retry": lambda attempt: _failed(attempt, ValueError("x")),
    "refuse": lambda attempt: _failed(attempt, BusinessRuleException("x")),
    "break": lambda attempt: _failed(attempt, PermanentCommandError("x")),
    "give back": lambda attempt: attempt.give_back(),
}


class Batches(RuleBasedStateMachine):
    """The machine. `bus` and `db` are set for the test's database before it runs."""

    bus: CommandBus
    db: psycopg.Connection[Any]

    @initialize(size=SIZES)
    def begin(self, size: int) -> None:
        tables = b", ".join(b"commandbus." + name.encode() for name in TABLES)
        self.db.execute(b"TRUNCATE pgmq.q_orders__commands, pgmq.q_done__commands, " + tables)
        self.tsq = TroubleshootingQueue(self.bus)
        self.names: list[str] = []
        self.held: list[Attempt] = []
        self.final: dict[str, BatchRecord] = {}
        self.create(size + 5, is_open=False)
        self.create(size + 5, is_open=True)

    def batch(self, pick: int) -> str:
        return self.names[pick % len(self.names)]

    def record(self, name: str) -> BatchRecord:
        record = self.bus.get_batch("orders", name)
        assert record is not None
        return record

    # --- batches ------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.names) < 5)
    @rule(size=SIZES, is_open=st.booleans())
    def create(self, size: int, is_open: bool) -> None:
        members = [NewCommand("Ship") for _ in range(size)]
        on_complete = OnComplete("done", "Done")
        self.names.append(
            self.bus.create_batch("orders", members, is_open=is_open, on_complete=on_complete).batch_id
        )

    @rule(pick=PICK, size=SIZES)
    def add(self, pick: int, size: int) -> None:
        name = self.batch(pick)
        members = [NewCommand("Ship") for _ in range(size)]
        if self.record(name).is_open:
            assert self.bus.add_to_batch("orders", name, members) == size
        else:
            with pytest.raises(InvalidOperationError):
                self.bus.add_to_batch("orders", name, members)

    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        was_open = self.record(self.batch(pick)).is_open
        assert self.bus.close_batch("orders", self.batch(pick)) == was_open

    @rule(pick=PICK, how=st.sampled_from(["wholly", "marked", "bitten"]), really=RARELY)
    def cancel_batch(self, pick: int, how: str, really: bool) -> None:
        if not really:
            return  # else hardly a batch would live long enough to see anything else
        name = self.batch(pick)
        try:
            if how == "wholly":
                self.bus.cancel_batch("orders", name, operator="ann")
                return
            canceling = self.bus.run(mark("orders", name, operate.operator_action("ann", action="CANCEL")))
            if how == "bitten":
                self.bus.run(cancel_bite(canceling, after_id=0, is_sweep=False, bite=1))
        except InvalidOperationError:
            record = self.record(name)
            assert record.finished == record.total
            assert not record.is_open

    @precondition(lambda self: len(self.names) < 8)
    @rule(pick=PICK)
    def retry_failed(self, pick: int) -> None:
        before = self.record(self.batch(pick))
        on_complete = OnComplete("done", "Done")
        report = self.bus.retry_failed("orders", self.batch(pick), operator="ann", on_complete=on_complete)
        assert (report.retried, report.sent_again + report.sent_before) == (before.in_tsq, before.failed)
        if report.new_batch_id is not None:
            self.names.append(report.new_batch_id)

    # --- workers ------------------------------------------------------------------------------------------------

    @rule(n=st.integers(1, 4))
    def claim(self, n: int) -> None:
        self.held += self.claimed(n)

    def claimed(self, n: int) -> list[Attempt]:
        found = self.bus.run(claim(domain="orders", worker="w", n=n, lease_seconds=60, cursor=None))
        rows = list(found.ready)
        if found.odd:
            rows += self.bus.run(put_right(domain="orders", worker="w", odd=found.odd, max_bytes=9999))[0]
        return [Attempt("orders", tuple(row), None, 0.0) for row in rows]

    @rule(
        fates=st.lists(st.sampled_from([*sorted(OUTCOMES), "break", "refuse"]), min_size=1, max_size=4),
        folds=st.booleans(),
    )
    def work(self, fates: list[str], folds: bool) -> None:
        """Claim some and settle them, each with its own outcome, in one go."""
        attempts = self.claimed(len(fates))
        if attempts:
            self.settle_these(attempts, fates, folds=folds)

    @precondition(lambda self: self.held)
    @rule(
        picks=st.lists(PICK, min_size=1, max_size=3),
        outcome=st.sampled_from(sorted(OUTCOMES)),
        folds=st.booleans(),
    )
    def settle(self, picks: list[int], outcome: str, folds: bool) -> None:
        chosen = [self.held.pop(pick % len(self.held)) for pick in picks if self.held]
        self.settle_these(chosen, [outcome] * len(chosen), folds=folds)

    def settle_these(self, chosen: list[Attempt], fates: list[str], *, folds: bool) -> None:
        outcomes = [OUTCOMES[fate](attempt) for attempt, fate in zip(chosen, fates, strict=False)]
        answers = self.bus.run(settle("orders", "w", outcomes))
        for attempt in chosen:
            if answers.get((attempt.msg_id, attempt.read_ct)) == "canceled":
                self.end_canceled(attempt)
        if folds:
            self.bus.run(fold({attempt.batch for attempt in chosen if attempt.batch is not None}))

    def end_canceled(self, attempt: Attempt) -> None:
        outcome = attempt.fail(Judgement(Verdict.CANCELED, cancellation("ann", None)))
        assert self.bus.run(settle("orders", "w", [outcome])) == {}

    @precondition(lambda self: self.held)
    @rule()
    def crash(self) -> None:
        """All that is held is lost."""
        self.held.clear()
        self.db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 s' WHERE headers ? 'held_by'")

    # --- people -------------------------------------------------------------------------------------------------

    @rule(pick=PICK, action=st.sampled_from(["retry", "cancel", "complete"]))
    def operate(self, pick: int, action: str) -> None:
        entries = self.tsq.list("orders")
        if entries:
            act = getattr(self.tsq, f"operator_{action}")
            act("orders", entries[pick % len(entries)].command_id, operator="ann")

    @rule(action=st.sampled_from(["retry", "cancel", "complete"]), really=RARELY)
    def operate_on_all(self, action: str, really: bool) -> None:
        if not really:
            return
        getattr(self.tsq, f"{action}_all")("orders", operator="ann")

    @rule(pick=PICK, really=RARELY)
    def cancel_one(self, pick: int, really: bool) -> None:
        if not really:
            return
        items = self.bus.query_commands(domain="orders", status="PENDING").items
        if items:
            self.bus.cancel("orders", items[pick % len(items)].command_id, operator="ann")

    # --- folding ------------------------------------------------------------------------------------------------

    @rule(picks=st.lists(PICK, min_size=1, max_size=3))
    def fold(self, picks: list[int]) -> None:
        self.bus.run(fold({self.record(self.batch(pick)).id for pick in picks}))

    @rule()
    def sweep(self) -> None:
        found = self.bus.run(leftovers())
        for canceling in found.to_cancel:
            self.bus.follow(resume(canceling))
        self.bus.run(fold(found.to_fold))

    # --- what must be true --------------------------------------------------------------------------------------

    @invariant()
    def counts_are_those_of_the_commands(self) -> None:
        for name in getattr(self, "names", []):
            record = self.record(name)
            counts = self.db.execute(COUNTS, (record.id,)).fetchone()
            assert counts is not None
            found = (record.total, record.completed, record.failed, record.canceled, record.in_tsq)
            assert found == counts, name
            sent = self.db.execute(
                "SELECT count(*) FROM commandbus.command WHERE domain = 'done' AND correlation_id = %s", (name,)
            ).fetchone()
            assert sent == (int(record.is_finished),), name
            if record.is_finished:
                self.check_final(record)
            else:
                assert record.status in (BatchStatus.PENDING, BatchStatus.IN_PROGRESS)

    def check_final(self, record: BatchRecord) -> None:
        assert not record.is_open
        assert record.finished == record.total
        if record.cancel is not None:
            expected = BatchStatus.CANCELED
        elif record.completed == record.total:
            expected = BatchStatus.COMPLETED
        else:
            expected = BatchStatus.COMPLETED_WITH_FAILURES
        assert record.status == expected
        assert self.final.setdefault(record.batch_id, record) == record, "it moved after its end"

    def teardown(self) -> None:
        """Whatever happened, everything can still be brought to its end."""
        if not hasattr(self, "names"):
            return
        for name in self.names:
            self.bus.close_batch("orders", name)
        self.sweep()
        self.tsq.complete_all("orders", operator="ann")
        self.held.clear()
        self.db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 s'")
        attempts = self.claimed(999)
        if attempts:
            assert self.bus.run(settle("orders", "w", [attempt.complete(None) for attempt in attempts])) == {}
        self.sweep()
        self.counts_are_those_of_the_commands()
        assert all(self.record(name).is_finished for name in self.names)
        left = self.db.execute(
            "SELECT (SELECT count(*) FROM pgmq.q_orders__commands), (SELECT count(*) FROM commandbus.batch_delta)"
        ).fetchone()
        assert left == (0, 0)


@pytest.fixture
def machine(database: str) -> Iterator[type[Batches]]:
    """The machine on a database of its own, emptied before each of its lives."""
    with CommandBus(database) as bus, psycopg.connect(database, autocommit=True) as db:
        bus.create_domain("orders")
        bus.create_domain("done")
        db.execute("SET synchronous_commit = off")
        yield type("BatchesHere", (Batches,), {"bus": bus, "db": db})


@pytest.mark.long
def test_batches(machine: type[Batches]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(14, thorough=300),
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
