"""Processes that wait, against everything that can happen: the machine of test_process_machine.py, with signals
that come early, late and twice, timers that ring, and nested processes that fail, are canceled and are undone.

What must be true besides:

- no signal is lost: no step waits for a signal that is there, and whose message was handled
- each signal is taken at most once, and its data is the result of the step that took it
- a sleep has its timer under way, and a step with a nested process has that process, or its answer, under way
- a process that is canceled, and waits for no command, has the request under way
- a nested process never outlives its parent
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest
import test_process_machine as base
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from test_process_machine import PROCESSES, STEPS, Moody, Processes

from commandbus import (
    InvalidOperationError,
    ProcessNotFoundError,
    Saga,
    nested,
    parallel,
    sequence,
    sleep,
    step,
    wait_for,
)
from commandbus.model.process import NESTED_MOVES, ProcessStatus
from support.by_hand import Interruption
from support.running import examples

machine = base.machine  # the fixture

INNER = Saga("inner", step("c", STEPS, undo="undo_c"), wait_for("ok", name="i"), step("d", STEPS))
NAMES = st.sampled_from(["ok", "ok", "ok", "other"])


class Waiting(Moody):
    """Waits for a signal beside a sleep, and then for a nested process that waits for a signal, too."""

    PARTS: ClassVar[tuple[Any, ...]] = (
        step("a", STEPS, undo="undo_a"),
        parallel(
            wait_for("ok", name="w", deadline="1 h"),
            sequence(sleep("1 h", name="s"), step("b", STEPS, undo="undo_b")),
            wait_for("ok", name="v", deadline="1 h", on_timeout="continue"),
        ),
        nested("n", INNER, data=lambda _: {}),
        step("e", STEPS, undo="undo_e"),
    )
    others = (INNER,)


_LOST = """
       ARRAY(SELECT s.number FROM commandbus.process_step s WHERE s.process = p.id AND s.status = 'SENT'
                AND NOT EXISTS (SELECT FROM message m WHERE m.process = p.id AND m.event = 'reply'
                                                        AND m.step = s.number)
                AND CASE s.kind
                    WHEN 'sleep' THEN NOT EXISTS (SELECT FROM message m WHERE m.process = p.id AND m.event = 'wake'
                                                     AND m.step = s.number)
                    WHEN 'signal' THEN EXISTS (SELECT FROM commandbus.command c
                         WHERE c.process = p.id AND c.step = 0 AND c.data ->> 'event' = 'signal'
                           AND c.data ->> 'name' = s.command_type AND c.status = 'COMPLETED'
                           AND NOT EXISTS (SELECT FROM commandbus.process_step t WHERE t.command = c.id)
                           AND NOT EXISTS (SELECT FROM commandbus.operator_action a WHERE a.command = c.id)
                           AND NOT EXISTS (SELECT FROM commandbus.stray_reply r WHERE r.process = p.id
                                              AND r.message ->> 'signal_id' = c.data ->> 'signal_id'))
                         OR p.cancel IS NOT NULL AND NOT p.is_compensating
                            AND NOT EXISTS (SELECT FROM message m WHERE m.process = p.id)
                            AND NOT EXISTS (SELECT FROM waiting w WHERE w.process = p.id)
                    WHEN 'process' THEN NOT EXISTS (SELECT FROM commandbus.process n
                         WHERE n.parent = p.id AND n.process_id = s.command_id
                           AND (n.finished_at IS NULL OR EXISTS (SELECT FROM message m
                                   WHERE m.process = n.id AND m.event = 'undo')))
                    ELSE NOT EXISTS (SELECT FROM waiting w WHERE w.process = p.id AND w.step = s.number) END),
"""
_BEGIN = base.LOOK.index("       ARRAY(SELECT s.number FROM commandbus.process_step s")
_END = base.LOOK.index("       EXISTS (SELECT FROM commandbus.process_step s WHERE s.process = p.id")
LOOK = base.LOOK[:_BEGIN] + _LOST.lstrip("\n") + base.LOOK[_END:]
TAKEN = """
SELECT p.process_id, s.number, count(*) OVER (PARTITION BY s.command), s.command_type,
       c.data ->> 'name', s.result::text, (c.data -> 'data')::text, c.process = p.id
  FROM commandbus.process_step s
  JOIN commandbus.process p ON p.id = s.process
  JOIN commandbus.command c ON c.id = s.command
 WHERE s.kind = 'signal' AND s.command IS NOT NULL
"""


class WaitingProcesses(Processes):
    """The machine, with what people tell processes."""

    look = LOOK
    unfinished = "NOT (status = ANY (%s::text[]) OR parent IS NOT NULL AND status = 'FAILED')"
    not_retried = (InvalidOperationError,)
    completes: ClassVar[dict[str, str]] = {"trip": "awsbvne", "inner": "cid"}

    @initialize(rounds=st.integers(0, 9), early=st.integers(0, 4))
    def begin(self, rounds: int, early: int) -> None:
        """As in the other machine; some of the signals come first."""
        super().begin(0)
        for name in ("p0", "p1")[: early % 3]:
            for _ in range(early):
                self._signal(name, "ok")
        for _ in range(rounds):
            self._wake()
            self._work("w1", 1)
            for name in self._processes():
                if early and name.endswith("/n"):
                    self._signal(name, "ok")
        self._count()

    def make_saga(self) -> Moody:
        self.signals = 0
        return Waiting()

    def _may_move(self, before: ProcessStatus, after: ProcessStatus) -> bool:
        return super()._may_move(before, after) or after in NESTED_MOVES.get(before, frozenset())

    def _processes(self) -> list[str]:
        rows = self.db.execute("SELECT process_id FROM commandbus.process ORDER BY id").fetchall()
        return [name for (name,) in rows]

    def _signal(self, process_id: str, name: str, number: int | None = None) -> None:
        if number is None:
            self.signals += 1
            number = self.signals
        try:
            self.bus.signal(PROCESSES, process_id, name, {"n": number}, signal_id=f"{name}-{number}")
        except InvalidOperationError:
            with self._remembering():
                is_over = self._one(
                    "SELECT finished_at IS NOT NULL OR is_compensating OR cancel IS NOT NULL "
                    "FROM commandbus.process WHERE process_id = %s",
                    process_id,
                )
                assert is_over or self.bus is self.busy
        except ProcessNotFoundError:
            with self._remembering():
                assert self.bus is self.busy

    @rule(data=st.data(), name=NAMES)
    def signal(self, data: st.DataObject, name: str) -> None:
        self._signal(data.draw(st.sampled_from(self._processes())), name)

    @precondition(lambda self: self.signals)
    @rule(data=st.data(), name=NAMES)
    def signal_again(self, data: st.DataObject, name: str) -> None:
        number = data.draw(st.integers(1, self.signals))
        self._signal(data.draw(st.sampled_from(self._processes())), name, number)

    @precondition(lambda self: self.messages or self._of(PROCESSES))
    @rule(data=st.data(), statement=st.integers(1, 8), is_handled=st.booleans())
    def handle_while_a_signal_comes(self, data: st.DataObject, statement: int, is_handled: bool) -> None:
        """And maybe another worker handles it at once."""
        found = self._some(PROCESSES, data)
        if not found or found[1].row[9] is None:
            return
        name = found[1].row[9]

        def come() -> None:
            self._busily(self._signal, name, "ok")
            if is_handled:
                for worker, attempt in self._claim(PROCESSES, "w2", 3):
                    self._handle(worker, attempt, harness=self.other_harness)

        if name in self._processes():
            self._handle(*found, Interruption(statement, come))

    @precondition(lambda self: self.timers)
    @rule()
    def sleeps_end(self) -> None:
        self._wake()

    def _wake(self) -> None:
        self._move_back(
            PROCESSES,
            "msg_id IN (SELECT msg_id FROM commandbus.command "
            "WHERE data ->> 'event' = 'wake' AND status = 'PENDING')",
        )

    def what_it_waits_for_exists(self) -> None:
        super().what_it_waits_for_exists()
        for name, number, times, wanted, got, result, data, is_own in self.db.execute(TAKEN.encode()).fetchall():
            where = f"step {number} of {name}"
            assert times == 1, f"{where}: its signal was taken {times} times"
            assert (wanted, is_own) == (got, True), where
            assert result.replace(" ", "") == data.replace(" ", ""), where
        orphans = self._one(
            "SELECT count(*) FROM commandbus.process n JOIN commandbus.process p ON p.id = n.parent "
            "WHERE n.finished_at IS NULL AND p.status IN ('COMPLETED', 'COMPENSATED', 'CANCELED')"
        )
        assert orphans == 0, "a nested process outlives its parent"

    def _work(self, worker: str, rounds: int) -> None:
        if worker == "last":  # at the end: nothing waits for ever
            self._wake()
            for name in self._processes():
                for _ in range(2):
                    self._signal(name, "ok")
        super()._work(worker, rounds)


@pytest.mark.long
def test_processes_that_wait(machine: type[Processes]) -> None:
    waiting: Any = type("WaitingHere", (WaitingProcesses, machine), {"look": LOOK})
    for name in ("unfinished", "not_retried", "completes"):
        setattr(waiting, name, getattr(WaitingProcesses, name))
    chosen = settings(
        max_examples=examples(8, thorough=300),
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    for _ in range(3):
        with contextlib.suppress(FlakyStrategyDefinition):
            run_state_machine_as_test(waiting, settings=chosen)
            assert waiting.faults == []
            return
        assert waiting.faults == []
    pytest.fail("three runs were disturbed: this machine is too busy to play the examples")
