"""Processes against everything that can happen: whatever the order, none is stuck, and nothing is undone twice.

The machine starts processes (some in batches), works their steps (they succeed, fail, break, hang), handles their
messages with the real router, and interrupts it: the connection breaks before any statement, the manager's code
raises, somebody else moves the process in between. Messages are doubled, forged and ended by people; leases run
out; timers ring; operators retry, cancel and complete whatever they find, commands, messages and processes.

After each rule the tables must say:

- what a process waits for exists: every outstanding step has its command or its reply under way or in the
  troubleshooting queue, a process with none has a message there, and `waits_for` names it
- no step is undone while a step is outstanding, one at a time, in reverse, each once
- `in_tsq` counts the process's commands in the troubleshooting queue, and its status says so
- it moves only as `model.process.MOVES` allows (a trigger writes all moves down), and sends no step after a
  request to cancel it
- a batch's counts are those of its processes

At the end all comes to its end: each process is COMPLETED, COMPENSATED or CANCELED, and the trail agrees with the
commands. Time is the server's: leases run out and timers ring because the machine moves `vt` back.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.types.json import Jsonb

from commandbus import (
    BusinessRuleException,
    CommandBus,
    InvalidOperationError,
    PermanentCommandError,
    Saga,
    TroubleshootingQueue,
    parallel,
    sequence,
    step,
)
from commandbus.errors import AttemptFencedError, CommandNotFoundError
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import leftovers
from commandbus.flow.commands.claim import claim, put_right
from commandbus.flow.commands.settle import Settlement, cancellation, settle
from commandbus.model.outcome import Judgement, Verdict, judge_failure
from commandbus.model.process import MOVES, ProcessStatus
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.process_messages import handler_of
from support.by_hand import Broken, Harness, Interruption
from support.running import examples

STEPS, PROCESSES = "orders", "processes"
MOST = 3  # processes of one life
WORKERS = st.sampled_from(["w1", "w2"])
POLICY = RetryPolicy(max_attempts=2, backoff_schedule=[0], jitter=0)
ENDED = ("COMPLETED", "COMPENSATED", "CANCELED")
ERRORS: dict[str, Exception] = {
    "fail": BusinessRuleException("no"),
    "break": PermanentCommandError("broken"),
    "stumble": ValueError("oops"),
}
EVIL: list[Any] = [
    None,
    {},
    {"process": "nobody", "event": "start"},
    {"event": "start"},
    {"event": "retry"},
    {"event": "deadline", "step": 99},
    {"event": "reply", "step": 99, "reply": {"outcome": "SUCCESS"}},
    {"event": "reply", "reply": {"outcome": ["SUCCESS"]}},
    {"event": "reply", "reply": {"outcome": "MAYBE"}},
]


class Moody(Saga):
    """A saga whose code fails when it is told to: at the n-th question."""

    PARTS: ClassVar[tuple[Any, ...]] = (
        step("a", STEPS, undo="undo_a"),
        parallel(
            step("b", STEPS, undo="undo_b"),
            sequence(step("c", STEPS, undo="undo_c", deadline="1 h"), step("d", STEPS)),
        ),
        step("e", STEPS, undo="undo_e"),
        step("f", STEPS),
    )
    others: tuple[Saga, ...] = ()

    def __init__(self) -> None:
        super().__init__("trip", *self.PARTS, deadline="2 h")
        self.fails_at: int | None = None
        self.error: Exception = ValueError("moody")

    def ask(self) -> None:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                raise self.error

    def load_state(self, data: Any) -> dict[str, Any]:
        self.ask()
        return super().load_state(data)

    def build_command(self, step: str, state: dict[str, Any]) -> Any:
        self.ask()
        return super().build_command(step, state)

    def compensation(self, step: str, state: dict[str, Any]) -> Any:
        self.ask()
        return super().compensation(step, state)

    def on_compensating(self, process: Any, tx: Any) -> None:
        self.ask()


OUTCOMES = st.sampled_from(["done", "done", "done", "done", "fail", "break", "stumble", "canceled"])
UNDONE = {"a", "b", "c", "e", "n"}
PREPARATION = """
CREATE TABLE move (id bigint GENERATED ALWAYS AS IDENTITY, process bigint, before text, after text);
CREATE FUNCTION write_down() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO move (process, before, after) VALUES (new.id, old.status, new.status);
    RETURN new;
END $$;
CREATE TRIGGER write_down AFTER UPDATE ON commandbus.process
    FOR EACH ROW WHEN (old.status <> new.status OR (old.finished_at IS NOT NULL AND old.version <> new.version))
    EXECUTE FUNCTION write_down();
CREATE TABLE late (process bigint, number integer);
CREATE FUNCTION write_down_late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO late SELECT id, new.number FROM commandbus.process WHERE id = new.process AND cancel IS NOT NULL;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER write_down AFTER INSERT ON commandbus.process_step DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (new.undoes IS NULL) EXECUTE FUNCTION write_down_late();
"""
EMPTY = b"""
TRUNCATE move, late, pgmq.q_orders__commands, pgmq.q_processes__commands, commandbus.command, commandbus.attempt,
    commandbus.tsq, commandbus.operator_action, commandbus.rejected_message, commandbus.batch,
    commandbus.batch_delta, commandbus.process, commandbus.process_step, commandbus.stray_reply
"""

COUNTS = b"""
SELECT (SELECT count(*) FROM pgmq.q_orders__commands WHERE vt <= now()),
       (SELECT count(*) FROM pgmq.q_processes__commands WHERE vt <= now()),
       (SELECT count(*) FROM pgmq.q_processes__commands WHERE vt > now() AND headers IS NULL),
       (SELECT count(*) FROM commandbus.tsq),
       (SELECT count(*) FROM commandbus.process WHERE status = 'FAILED'),
       (SELECT count(*) FROM commandbus.process WHERE finished_at IS NULL AND NOT is_compensating)
"""
LOOK = """
WITH message AS MATERIALIZED (
    SELECT c.process, c.data ->> 'event' AS event, (c.data ->> 'step')::integer AS step
      FROM commandbus.command c
     WHERE c.process IS NOT NULL AND c.step = 0 AND (
           c.status = 'IN_TROUBLESHOOTING_QUEUE'
           OR c.status = 'PENDING' AND EXISTS (SELECT FROM pgmq.q_processes__commands q WHERE q.msg_id = c.msg_id))
), waiting AS MATERIALIZED (
    SELECT c.process, abs(c.step) AS step, c.step < 0 AS is_undo
      FROM commandbus.command c
     WHERE c.process IS NOT NULL AND c.step <> 0 AND (
           c.status = 'IN_TROUBLESHOOTING_QUEUE'
           OR c.status = 'PENDING' AND EXISTS (SELECT FROM pgmq.q_orders__commands q WHERE q.msg_id = c.msg_id))
)
SELECT p.id, p.process_id, p.status, p.finished_at IS NOT NULL, p.is_compensating, p.in_tsq,
       (SELECT count(*) FROM commandbus.command c JOIN commandbus.tsq t ON t.command = c.id
         WHERE c.process = p.id),
       ARRAY(SELECT s.number FROM commandbus.process_step s WHERE s.process = p.id AND s.status = 'SENT'
                AND NOT EXISTS (SELECT FROM waiting w WHERE w.process = p.id AND w.step = s.number)
                AND NOT EXISTS (SELECT FROM message m WHERE m.process = p.id AND m.event = 'reply'
                                                        AND m.step = s.number)),
       EXISTS (SELECT FROM commandbus.process_step s WHERE s.process = p.id AND s.status = 'SENT'),
       EXISTS (SELECT FROM message m WHERE m.process = p.id AND m.event IN ('start', 'retry')),
       ARRAY(SELECT (undoes IS NOT NULL)::text FROM commandbus.process_step s
              WHERE s.process = p.id AND s.status = 'SENT'),
       ARRAY(SELECT is_undo::text FROM waiting w WHERE w.process = p.id)
  FROM commandbus.process p
 ORDER BY p.id
"""
TRAIL = """
SELECT s.process, s.number, s.name, s.undoes, s.status, s.closed, c.status::text
  FROM commandbus.process_step s LEFT JOIN commandbus.command c ON c.id = s.command AND s.kind IS NULL
 ORDER BY s.process, s.number
"""
BATCHES = """
SELECT b.batch_id, b.is_open, b.status, b.finished_at IS NOT NULL,
       ARRAY[b.total + sum(coalesce(d.total, 0)), b.completed + sum(coalesce(d.completed, 0)),
             b.failed + sum(coalesce(d.failed, 0)), b.canceled + sum(coalesce(d.canceled, 0)),
             b.in_tsq + sum(coalesce(d.in_tsq, 0))]::integer[],
       (SELECT ARRAY[count(*), count(*) FILTER (WHERE status = 'COMPLETED'),
                     count(*) FILTER (WHERE status IN ('FAILED', 'COMPENSATED')),
                     count(*) FILTER (WHERE status = 'CANCELED'),
                     count(*) FILTER (WHERE in_tsq > 0 AND finished_at IS NULL)]::integer[]
          FROM commandbus.process p WHERE p.batch = b.id)
  FROM commandbus.batch b LEFT JOIN commandbus.batch_delta d ON d.batch = b.id
 GROUP BY b.id
"""


class Processes(RuleBasedStateMachine):
    """The machine. `bus`, `busy` (it does not wait long for locks), `db` and `harness` are set before it runs."""

    bus: CommandBus
    busy: CommandBus
    db: psycopg.Connection[Any]
    harness: Harness
    other_harness: Harness
    faults: list[str]
    look: str = LOOK
    unfinished: str = "status <> ALL (%s::text[])"
    not_retried: tuple[type[Exception], ...] = ()
    completes: ClassVar[dict[str, str]] = {"trip": "abcdef"}  # the steps of a process that completed

    @initialize(rounds=st.integers(0, 4))
    def begin(self, rounds: int) -> None:
        """Two processes in a closed batch, some way along; and an open batch."""
        self.db.execute(EMPTY)
        self.saga = self.make_saga()
        self.handlers = {saga.process_type: handler_of(saga) for saga in (self.saga, *self.saga.others)}
        self.held: list[tuple[str, Attempt]] = []
        self.seen_moves = 0
        self.bus.create_process_batch(
            self.saga, [{"process_id": "p0", "data": {}}, {"process_id": "p1", "data": {}}], batch_id="closed"
        )
        self.bus.create_process_batch(self.saga, [], batch_id="open", is_open=True)
        self.started = 2
        self._work("w1", rounds)
        self._count()

    def make_saga(self) -> Moody:
        return Moody()

    def _count(self) -> None:
        """What there is to do: rules that have nothing to do are left out."""
        row = self.db.execute(COUNTS).fetchone()
        assert row is not None
        self.steps, self.messages, self.timers, self.troubles, self.failed, self.cancelable = row

    # --- starting -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.started < MOST)
    @rule(in_batch=st.booleans())
    def start(self, in_batch: bool) -> None:
        new = {"process_id": f"p{self.started}", "data": {}}
        if in_batch and self._one("SELECT is_open FROM commandbus.batch WHERE batch_id = 'open'"):
            self.bus.add_processes_to_batch(self.saga, "open", [new])
        else:
            self.bus.start_processes(self.saga, [new])
        self.started += 1

    # --- a worker's doings --------------------------------------------------------------------------------------

    @precondition(lambda self: self.steps)
    @rule(worker=WORKERS, outcomes=st.lists(OUTCOMES, min_size=1, max_size=4))
    def work_steps(self, worker: str, outcomes: list[str]) -> None:
        """What a worker mostly does: take and settle."""
        for (_, attempt), outcome in zip(self._claim(STEPS, worker, len(outcomes)), outcomes, strict=False):
            self._settle(worker, attempt, outcome)

    @precondition(lambda self: self.messages)
    @rule(worker=WORKERS, n=st.integers(1, 4))
    def work_messages(self, worker: str, n: int) -> None:
        for _, attempt in self._claim(PROCESSES, worker, n):
            self._handle(worker, attempt)

    @precondition(lambda self: self.steps or self.messages)
    @rule(worker=WORKERS, rounds=st.integers(1, 3))
    def work(self, worker: str, rounds: int) -> None:
        """For a while all goes well."""
        self._work(worker, rounds)

    def _work(self, worker: str, rounds: int) -> None:
        for _ in range(rounds):
            for _, attempt in self._claim(PROCESSES, worker, 9):
                self._handle(worker, attempt)
            for _, attempt in self._claim(STEPS, worker, 9):
                self._settle(worker, attempt, "done")

    @precondition(lambda self: self.steps)
    @rule(worker=WORKERS, n=st.integers(1, 3))
    def hold_steps(self, worker: str, n: int) -> None:
        self._claim(STEPS, worker, n)

    @precondition(lambda self: self.messages)
    @rule(worker=WORKERS, n=st.integers(1, 3))
    def hold_messages(self, worker: str, n: int) -> None:
        self._claim(PROCESSES, worker, n)

    def _claim(self, domain: str, worker: str, n: int) -> list[tuple[str, Attempt]]:
        found = self.bus.run(claim(domain=domain, worker=worker, n=n, lease_seconds=3600, cursor=None))
        rows = list(found.ready)
        if found.odd:
            rows += self.bus.run(put_right(domain=domain, worker=worker, odd=found.odd, max_bytes=9999))[0]
        taken = []
        for row in rows:
            attempt = Attempt(domain, tuple(row), None, 0.0)
            attempt.started = attempt.row[17] / 1e6
            taken.append((worker, attempt))
        self.held += taken
        return taken

    def _of(self, domain: str) -> list[tuple[str, Attempt]]:
        return [item for item in self.held if item[1].domain == domain]

    def _some(self, domain: str, data: st.DataObject) -> tuple[str, Attempt] | None:
        """One that a worker holds, or takes now."""
        found = self._of(domain) or self._claim(domain, "w1", 3)
        return data.draw(st.sampled_from(found)) if found else None

    @precondition(lambda self: self._of(STEPS))
    @rule(data=st.data(), outcome=OUTCOMES)
    def settle_late(self, data: st.DataObject, outcome: str) -> None:
        """Maybe long after its lease ran out."""
        worker, attempt = data.draw(st.sampled_from(self._of(STEPS)))
        self._settle(worker, attempt, outcome)

    @precondition(lambda self: self._of(PROCESSES))
    @rule(data=st.data())
    def handle_late(self, data: st.DataObject) -> None:
        self._handle(*data.draw(st.sampled_from(self._of(PROCESSES))))

    @precondition(lambda self: self.messages or self._of(PROCESSES))
    @rule(data=st.data(), statement=st.integers(1, 8))
    def handle_and_die(self, data: st.DataObject, statement: int) -> None:
        """Before any statement; the message stays with the dead worker until its lease runs out."""
        if found := self._some(PROCESSES, data):
            self._handle(*found, Interruption(statement))

    @precondition(lambda self: self.messages or self._of(PROCESSES))
    @rule(data=st.data(), question=st.integers(0, 3), error=st.sampled_from(sorted(ERRORS)))
    def handle_with_broken_code(self, data: st.DataObject, question: int, error: str) -> None:
        if found := self._some(PROCESSES, data):
            self.saga.fails_at, self.saga.error = question, ERRORS[error]
            self._handle(*found)

    @precondition(lambda self: self.messages + len(self._of(PROCESSES)) + self.steps > 1)
    @rule(data=st.data(), outcomes=st.lists(OUTCOMES, max_size=3), statement=st.integers(1, 8))
    def handle_two_at_once(self, data: st.DataObject, outcomes: list[str], statement: int) -> None:
        """In the middle of one message another worker handles another one, mostly of the same process."""
        self.work_steps("w2", outcomes)
        self._claim(PROCESSES, "w1", 9)
        by_process: dict[str, list[tuple[str, Attempt]]] = {}
        for item in self._of(PROCESSES):
            by_process.setdefault(item[1].row[9], []).append(item)
        pairs = [items for items in by_process.values() if len(items) > 1] or [self._of(PROCESSES)]
        chosen = data.draw(st.permutations(data.draw(st.sampled_from(pairs))))[:2]
        if len(chosen) > 1:
            first, second = chosen
            then = partial(self._handle, *second, harness=self.other_harness)
            self._handle(*first, Interruption(statement, then))

    @precondition(lambda self: self.messages or self._of(PROCESSES))
    @rule(data=st.data(), statement=st.integers(1, 6))
    def handle_while_a_person_acts(self, data: st.DataObject, statement: int) -> None:
        found = self._some(PROCESSES, data)
        act = data.draw(st.sampled_from([self.operate, self.cancel_command, self.retry_process]))
        if found:
            self._handle(*found, Interruption(statement, lambda: self._busily(act, data)))

    @precondition(lambda self: self.messages or self._of(PROCESSES))
    @rule(data=st.data(), statement=st.integers(2, 6))
    def handle_while_the_process_is_canceled(self, data: st.DataObject, statement: int) -> None:
        found = self._some(PROCESSES, data)
        if found and found[1].row[9] is not None:
            name = found[1].row[9]
            self._handle(*found, Interruption(statement, lambda: self._busily(self._cancel_process, name)))

    @precondition(lambda self: self.messages or self._of(PROCESSES))
    @rule(data=st.data(), statement=st.integers(1, 8), outcome=OUTCOMES)
    def handle_while_a_step_ends(self, data: st.DataObject, statement: int, outcome: str) -> None:
        found, ending = self._some(PROCESSES, data), self._some(STEPS, data)
        if found and ending:
            self._handle(*found, Interruption(statement, lambda: self._busily(self._settle, *ending, outcome)))

    def _busily(self, act: Callable[..., None], *args: Any) -> None:
        """While somebody is in the middle of a transaction: who would have to wait for it gives up."""
        bus, held = self.bus, list(self.held)
        self.bus = self.busy
        try:
            act(*args)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            self.held = held
        finally:
            self.bus = bus

    def _handle(
        self,
        worker: str,
        attempt: Attempt,
        interruption: Interruption | None = None,
        *,
        harness: Harness | None = None,
    ) -> None:
        self._forget(attempt)
        self.saga.fails_at = self.saga.fails_at if interruption is None else None
        try:
            handler = self.handlers[attempt.command().command_type]
            (harness or self.harness).handle(handler, worker, attempt, interruption)
        except (Broken, AttemptFencedError, psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            return
        except (ValueError, PermanentCommandError, BusinessRuleException) as error:
            self.saga.fails_at = None
            self._conclude(worker, attempt, _failed(attempt, error))
        finally:
            self.saga.fails_at = None

    def _settle(self, worker: str, attempt: Attempt, outcome: str) -> None:
        self._forget(attempt)
        if outcome == "done":
            settlement = attempt.complete('{"n": 1}')
        elif outcome == "canceled":
            settlement = attempt.complete(None) if not self._is_asked(attempt) else _canceled(attempt)
        else:
            settlement = _failed(attempt, ERRORS[outcome])
        self._conclude(worker, attempt, settlement)

    def _conclude(self, worker: str, attempt: Attempt, settlement: Settlement) -> None:
        """As a settler does: what somebody asked to cancel, and did not complete, is settled as canceled."""
        answers = self.bus.run(settle(attempt.domain, worker, [settlement]))
        if "canceled" in answers.values():
            self.bus.run(settle(attempt.domain, worker, [_canceled(attempt)]))

    def _is_asked(self, attempt: Attempt) -> bool:
        rows = self.db.execute(
            f"SELECT headers ? 'cancel' FROM pgmq.q_{attempt.domain}__commands WHERE msg_id = %s".encode(),
            (attempt.msg_id,),
        ).fetchall()
        return bool(rows and rows[0][0])

    def _forget(self, attempt: Attempt) -> None:
        self.held = [item for item in self.held if item[1] is not attempt]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leases_run_out(self, data: st.DataObject) -> None:
        domain = data.draw(st.sampled_from([STEPS, PROCESSES]))
        self._move_back(domain, "headers ? 'held_by'")

    @precondition(lambda self: self.held)
    @rule()
    def workers_die(self) -> None:
        """They forget what they held; their leases run out at once."""
        self.held.clear()
        for domain in (STEPS, PROCESSES):
            self._move_back(domain, "headers ? 'held_by'")

    @precondition(lambda self: self.timers)
    @rule(which=st.integers(0, 9), is_heard=st.booleans())
    def a_timer_rings(self, which: int, is_heard: bool) -> None:
        """The code that hears it may be broken: then it needs a person."""
        rows = self.db.execute(
            "SELECT msg_id FROM pgmq.q_processes__commands WHERE vt > now() AND headers IS NULL ORDER BY 1"
        ).fetchall()
        if rows:
            msg_id = rows[which % len(rows)][0]
            self._move_back(PROCESSES, f"msg_id = {msg_id}")
            if not is_heard:
                self._break(lambda attempt: attempt.msg_id == msg_id)

    def _break(self, is_wanted: Callable[[Attempt], bool]) -> list[str]:
        """Messages that the process's code cannot handle: to the troubleshooting queue with them."""
        broken = [item for item in self._claim(PROCESSES, "w1", 9) if is_wanted(item[1])]
        for worker, attempt in broken:
            self.saga.fails_at, self.saga.error = 0, ERRORS["break"]
            self._handle(worker, attempt)
        return [attempt.command_id for _, attempt in broken]

    def _move_back(self, domain: str, condition: str) -> None:
        self.db.execute(
            f"UPDATE pgmq.q_{domain}__commands SET vt = now() - interval '1 s' WHERE {condition}".encode()
        )

    # --- what should not happen ---------------------------------------------------------------------------------

    @rule(which=st.integers(0, 30))
    def double_a_message(self, which: int) -> None:
        """A copy of any message that there ever was, as another command."""
        rows = self.db.execute(
            "SELECT id FROM commandbus.command WHERE domain = %s AND step = 0 ORDER BY id", (PROCESSES,)
        ).fetchall()
        if rows:
            self.db.execute(
                "WITH copy AS (INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, "
                "correlation_id, data, process, step) SELECT domain, gen_random_uuid()::text, command_type, "
                "nextval('pgmq.q_processes__commands_msg_id_seq'), correlation_id, data, process, step "
                "FROM commandbus.command WHERE id = %s RETURNING id, msg_id) "
                "INSERT INTO pgmq.q_processes__commands (msg_id, vt, message) OVERRIDING SYSTEM VALUE "
                "SELECT msg_id, clock_timestamp(), jsonb_build_object('command', id) FROM copy",
                (rows[which % len(rows)][0],),
            )

    @rule(evil=st.sampled_from(EVIL), name=st.integers(0, 2), number=st.integers(1, 5), raw=st.booleans())
    def send_rubbish(self, evil: Any, name: int, number: int, raw: bool) -> None:
        """Among it replies to real steps that say nothing."""
        if isinstance(evil, dict):
            evil = {"process": f"p{name}", "step": number} | evil
        if raw:
            self.db.execute("SELECT pgmq.send('processes__commands', %s)", (Jsonb(evil),))
        else:
            self.bus.send(PROCESSES, "trip", evil)

    # --- people's doings ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.troubles)
    @rule(data=st.data())
    def operate(self, data: st.DataObject) -> None:
        """Something in the troubleshooting queue: a step, a compensation or a message."""
        rows = self.db.execute(
            "SELECT c.domain, c.command_id FROM commandbus.tsq t JOIN commandbus.command c ON c.id = t.command "
            "ORDER BY c.id"
        ).fetchall()
        if rows:
            operator_action = data.draw(st.sampled_from(["retry", "retry", "retry", "cancel", "complete"]))
            domain, command_id = data.draw(st.sampled_from(rows))
            getattr(TroubleshootingQueue(self.bus), f"operator_{operator_action}")(
                domain, command_id, operator="ann"
            )

    @precondition(lambda self: self.messages or self.steps)
    @rule(
        data=st.data(),
        operator_action=st.sampled_from(["cancel", "complete"]),
        outcomes=st.lists(OUTCOMES, max_size=2),
    )
    def give_messages_up(self, data: st.DataObject, operator_action: str, outcomes: list[str]) -> None:
        """The process's code cannot handle them, and a person loses patience."""
        self.work_steps("w2", outcomes)
        chosen = data.draw(st.sampled_from([f"p{n}" for n in range(self.started)]))
        self._break(lambda attempt: bool(attempt.row[9] == chosen))
        for command_id in self._troubled(PROCESSES)[: data.draw(st.integers(1, 3))]:
            getattr(TroubleshootingQueue(self.bus), f"operator_{operator_action}")(
                PROCESSES, command_id, operator="fay"
            )

    def _troubled(self, domain: str) -> list[str]:
        rows = self.db.execute(
            "SELECT c.command_id FROM commandbus.tsq t JOIN commandbus.command c ON c.id = t.command "
            "WHERE c.domain = %s ORDER BY c.id",
            (domain,),
        )
        return [name for (name,) in rows]

    @precondition(lambda self: self.troubles)
    @rule(
        domain=st.sampled_from([STEPS, PROCESSES]),
        operator_action=st.sampled_from(["retry", "retry", "cancel", "complete"]),
    )
    def operate_on_all(self, domain: str, operator_action: str) -> None:
        count = len(self._troubled(domain))
        done = getattr(TroubleshootingQueue(self.bus), f"{operator_action}_all")(domain, operator="gus")
        with self._remembering():
            assert done == count

    @rule(data=st.data())
    def cancel_command(self, data: st.DataObject) -> None:
        """Any that waits or runs: a step, a compensation, a message, a timer."""
        rows = self.db.execute(
            "SELECT domain, command_id FROM commandbus.command WHERE status = 'PENDING' ORDER BY id"
        ).fetchall()
        if rows:
            domain, command_id = data.draw(st.sampled_from(rows))
            try:
                self.bus.cancel(domain, command_id, operator="bob")
            except (InvalidOperationError, CommandNotFoundError):
                with self._remembering():
                    assert self.bus is self.busy, "only somebody else can have been first"

    @precondition(lambda self: self.cancelable)
    @rule(data=st.data())
    def cancel_process(self, data: st.DataObject) -> None:
        self._cancel_process(f"p{data.draw(st.integers(0, self.started - 1))}")

    def _cancel_process(self, name: str) -> None:
        is_possible = self._one(
            "SELECT finished_at IS NULL AND NOT is_compensating FROM commandbus.process WHERE process_id = %s",
            name,
        )
        try:
            self.bus.cancel_process(PROCESSES, name, operator="cem")
        except InvalidOperationError:
            with self._remembering():
                assert not is_possible or self.bus is self.busy

    @precondition(lambda self: self.failed)
    @rule(data=st.data())
    def retry_process(self, data: st.DataObject) -> None:
        name = f"p{data.draw(st.integers(0, self.started - 1))}"
        is_possible = self._one("SELECT status = 'FAILED' FROM commandbus.process WHERE process_id = %s", name)
        try:
            self.bus.retry_process(PROCESSES, name, operator="dan")
        except InvalidOperationError:
            with self._remembering():
                assert not is_possible or self.bus is self.busy

    @rule(batch=st.sampled_from(["open", "closed"]))
    def cancel_batch(self, batch: str) -> None:
        is_possible = self._one(
            "SELECT is_open OR EXISTS (SELECT FROM commandbus.process p WHERE p.batch = b.id "
            "AND p.finished_at IS NULL) FROM commandbus.batch b WHERE batch_id = %s",
            batch,
        )
        try:
            self.bus.cancel_batch(PROCESSES, batch, operator="eve")
        except InvalidOperationError:
            with self._remembering():
                assert not is_possible

    def _one(self, query: str, *params: Any) -> Any:
        row = self.db.execute(query.encode(), params).fetchone()
        assert row is not None
        return row[0]

    # --- what must be true --------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        if not hasattr(self, "saga"):
            return
        with self._remembering():
            self._count()
            self.what_it_waits_for_exists()
            self.it_moved_as_it_may()
            self.nothing_is_undone_twice()
            self.batches_count_their_processes()

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        """Whatever hypothesis makes of it: what was found is found."""
        try:
            yield
        except AssertionError as fault:
            self.faults.append(str(fault))
            raise

    def what_it_waits_for_exists(self) -> None:
        for row in self.db.execute(self.look.encode()).fetchall():
            (_, name, status, is_final, is_compensating, in_tsq, troubled, lost, is_waiting, has_message, sent,
             waiting) = row  # fmt: skip
            where = f"{name} is {status}"
            assert in_tsq == troubled, where
            assert is_final == ProcessStatus(status).is_final, where
            assert sent.count("true") <= 1, f"{where}: one compensation at a time"
            assert len(set(sent)) <= 1, f"{where}: a compensation beside a step"
            assert waiting.count("true") <= 1, where
            assert len(set(waiting)) <= 1, f"{where}: a compensation's command beside a step's"
            if is_final:
                assert status == "FAILED" or not is_waiting, where
                continue
            assert (status == "WAITING_FOR_TSQ") == (in_tsq > 0), where
            assert lost == [], f"{where}: nothing will tell it about steps {lost}"
            assert is_waiting or has_message, f"{where}: nothing will ever move it"
            assert is_compensating or status != "COMPENSATING", where
        for record in self.bus.query_processes(limit=MOST):
            assert (record.waits_for is None) == record.status.is_final, record.process_id

    def it_moved_as_it_may(self) -> None:
        for id_, before, after in self.db.execute(
            "SELECT id, before, after FROM move WHERE id > %s ORDER BY id", (self.seen_moves,)
        ):
            self.seen_moves = id_
            assert self._may_move(ProcessStatus(before), ProcessStatus(after)), f"{before} → {after}"
        assert self._one("SELECT count(*) FROM late") == 0, "a step was sent after the request to cancel"

    def _may_move(self, before: ProcessStatus, after: ProcessStatus) -> bool:
        return after in MOVES[before]

    def nothing_is_undone_twice(self) -> None:
        for steps in self._trails().values():
            undone, to_undo = _undone(steps)
            assert undone == to_undo[: len(undone)], "each once, the last one first"

    def batches_count_their_processes(self) -> None:
        for name, is_open, status, is_finished, counted, real in self.db.execute(BATCHES.encode()).fetchall():
            assert counted == real, f"batch {name} ({status})"
            if is_open:
                assert not is_finished

    def _trails(self) -> dict[int, list[tuple[Any, ...]]]:
        trails: dict[int, list[tuple[Any, ...]]] = {}
        for process, *line in self.db.execute(TRAIL.encode()).fetchall():
            trails.setdefault(process, []).append(tuple(line))
        return trails

    def teardown(self) -> None:
        """Whatever happened: workers work, people retry, and all comes to its end."""
        if not hasattr(self, "saga"):
            return
        with self._remembering():
            self._come_to_the_end()

    def _come_to_the_end(self) -> None:
        self.held.clear()
        tsq = TroubleshootingQueue(self.bus)
        for _ in range(60):
            for domain in (STEPS, PROCESSES):
                tsq.retry_all(domain, operator="ann")
                self._move_back(domain, "headers ? 'held_by'")
            for record in self.bus.query_processes(status="FAILED"):
                with contextlib.suppress(*self.not_retried):
                    self.bus.retry_process(PROCESSES, record.process_id, operator="ann")
            self._work("last", 2)
            self.all_is_well()
            left = self._one(f"SELECT count(*) FROM commandbus.process WHERE {self.unfinished}", list(ENDED))
            if not left and not self._one("SELECT count(*) FROM commandbus.tsq"):
                break
        else:
            raise AssertionError(self.bus.query_processes())
        self._check_the_end()

    def _check_the_end(self) -> None:
        trails = self._trails()
        rows = self.db.execute(
            "SELECT id, process_type, status, cancel IS NOT NULL, in_tsq FROM commandbus.process"
        ).fetchall()
        for id_, process_type, status, is_canceled, in_tsq in rows:
            steps = trails.get(id_, [])
            assert in_tsq == 0
            assert all(step[3] == step[5] for step in steps if step[5]), f"the trail is not the commands': {steps}"
            undone, to_undo = _undone(steps)
            done = Counter(name for _, name, undoes, state, *_ in steps if undoes is None and state == "COMPLETED")
            if status == "COMPLETED":
                assert (undone, done) == ([], Counter(self.completes[process_type]))
            elif status != "FAILED":
                assert undone == to_undo
                assert (status == "CANCELED") == is_canceled
        left = self._one("SELECT count(*) FROM commandbus.command WHERE status = 'PENDING' AND domain = 'orders'")
        assert left == 0
        self.bus.close_batch(PROCESSES, "open")
        left_over = self.bus.run(leftovers())  # as a worker's sweep does: of two that ended at once one may have
        for batch in left_over.to_fold:  # found the batch locked by the other
            self.bus.run(fold([batch]))
        states = {record.status.value for record in self.bus.query_batches().items}
        assert states <= {"COMPLETED", "COMPLETED_WITH_FAILURES", "CANCELED"}, states


def _undone(steps: list[tuple[Any, ...]]) -> tuple[list[int], list[int]]:
    """Which steps were undone, in order; and which are to be, the last one first."""
    undone = sorted((closed, undoes) for _, _, undoes, status, closed, _ in steps
                    if undoes is not None and status == "COMPLETED")  # fmt: skip
    done = sorted(((closed, number) for number, name, undoes, status, closed, _ in steps
                   if undoes is None and status == "COMPLETED" and name in UNDONE), reverse=True)  # fmt: skip
    return [number for _, number in undone], [number for _, number in done]


def _failed(attempt: Attempt, error: Exception) -> Settlement:
    return attempt.fail(
        judge_failure(error, charge=attempt.charge, policy=POLICY, max_attempts=attempt.max_attempts)
    )


def _canceled(attempt: Attempt) -> Settlement:
    return attempt.fail(Judgement(Verdict.CANCELED, cancellation("ann", None)))


@pytest.fixture
def machine(database: str) -> Iterator[type[Processes]]:
    """The machine on a database of its own, emptied before each of its lives."""
    impatient = psycopg.conninfo.make_conninfo(database, options="-c lock_timeout=30 -c synchronous_commit=off")
    with (
        CommandBus(database) as bus,
        CommandBus(impatient) as busy,
        psycopg.connect(database, autocommit=True) as db,
    ):
        for domain in (STEPS, PROCESSES):
            bus.create_domain(domain)
        db.execute(PREPARATION)
        db.execute("SET synchronous_commit = off")
        harnesses = Harness(database), Harness(impatient)
        yield type(
            "ProcessesHere",
            (Processes,),
            {
                "bus": bus,
                "busy": busy,
                "db": db,
                "faults": [],
                "harness": harnesses[0],
                "other_harness": harnesses[1],
            },
        )
        for harness in harnesses:
            harness.close()


@pytest.mark.long
def test_processes(machine: type[Processes]) -> None:
    """Real locks, clocks and servers are not quite the same twice; where an example goes otherwise than when it
    was made, hypothesis cannot go on, and the same examples are played from the beginning. No fault is lost by
    that: a check that failed once has failed."""
    chosen = settings(
        max_examples=examples(12, thorough=300),
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    for _ in range(3):
        with contextlib.suppress(FlakyStrategyDefinition):
            run_state_machine_as_test(machine, settings=chosen)
            assert machine.faults == []
            return
        assert machine.faults == []
    pytest.fail("three runs were disturbed: this machine is too busy to play the examples")
