"""A command's whole life against a model: whatever happens in whatever order, the database agrees.

The machine sends, claims as one of two workers, crashes, lets leases run out, settles in time and too late, gives
back, cancels what waits and what runs, operates, pauses and prunes. Beside it a small model says what must be true
of every command. After each step the tables are read and compared:

- no command is lost: each that is neither final nor in the troubleshooting queue has exactly one queue row, and
  every queue row is that of exactly one such command
- an attempt is settled at most once, and only by its holder; a settled command never moves again
- what was asked to stop ends COMPLETED or CANCELED, and never runs again
- the history is complete: every attempt that started was received and has one end, in order

Time is the server's: leases run out because the machine moves `vt` back, never because it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    BusinessRuleException,
    CancelResult,
    CommandBus,
    CommandNotFoundError,
    DuplicateCommandError,
    InvalidOperationError,
    PermanentCommandError,
    TroubleshootingQueue,
)
from commandbus.flow.commands.claim import claim, put_right
from commandbus.flow.commands.renew import PendingCancel, Renewal, renew
from commandbus.flow.commands.settle import Settlement, cancellation, settle
from commandbus.model.outcome import Failure, Judgement, Verdict, judge, judge_failure
from commandbus.model.retry import RetryPolicy
from commandbus.worker.execution.attempt import Attempt
from support.running import examples

LIVES = 4
IDS = st.sampled_from([f"c{n}" for n in range(LIVES)])
TYPES = ("Ship", "Pack")
WORKERS = st.sampled_from(["w1", "w2"])
POLICY = RetryPolicy(max_attempts=3, backoff_schedule=[0], jitter=0)
FINAL = ("COMPLETED", "FAILED", "CANCELED")
TABLES = ("command", "attempt", "tsq", "operator_action", "parked", "pause", "rejected_message")


ENDS = {"COMPLETED", "FAILED", "BUSINESS_RULE_FAILED", "GIVEN_BACK", "WAIVED", "PARKED", "CANCELED"}
CRASH = Failure("WorkerLost", "WORKER_LOST", "it died", rung="crash")


def _fence(attempt: Attempt) -> tuple[int, int]:
    return attempt.msg_id, attempt.read_ct


def _failed(attempt: Attempt, error: Exception) -> Settlement:
    return attempt.fail(
        judge_failure(error, charge=attempt.charge, policy=POLICY, max_attempts=attempt.max_attempts)
    )


def _crashed(attempt: Attempt) -> Settlement:
    charge = attempt.claimed.charge_after(CRASH)
    return attempt.fail(judge(CRASH, charge=charge, policy=POLICY, max_attempts=attempt.max_attempts))


def _canceled(attempt: Attempt) -> Settlement:
    return attempt.fail(Judgement(Verdict.CANCELED, cancellation("ann", None)))


OUTCOMES: dict[str, Any] = {
    "complete": lambda attempt: attempt.complete('"x"'),
    "retry": lambda attempt: _failed(attempt, ValueError("x")),
    "refuse": lambda attempt: _failed(attempt, BusinessRuleException("x")),
    "break": lambda attempt: _failed(attempt, PermanentCommandError("x")),
    "give back": lambda attempt: attempt.give_back(),
    "crash": _crashed,
    "suspect": lambda attempt: attempt.waive(CRASH, suspect=True),
}


@dataclass
class Life:
    """What the model knows of one command."""

    command_type: str
    data: int
    max_attempts: int | None
    status: str = "PENDING"
    number: int = 0  # attempts ever made
    charge: int = 0  # those since the last operator's retry that were not waived
    suspect: int | None = None  # crashes and losses that were waived: it pays for them when it is convicted
    quarantine: bool = False
    was_lost: bool = False  # so it runs alone
    alone: bool = False  # its holder knows that, and has started it
    vanished: list[tuple[str, bool]] = field(default_factory=list)  # holders not written down yet; who ran alone
    ended_in_crash: bool = False  # the attempt that brought it into the troubleshooting queue
    holder: str | None = None
    parked: bool = False
    expired: bool = False
    asked: int | None = None  # the attempt that was asked to stop
    history: list[tuple[str, int | None]] = field(default_factory=lambda: [("SENT", None)])

    @property
    def limit(self) -> int:
        return self.max_attempts or POLICY.max_attempts

    def start_again(self) -> None:
        """An operator retries it. One whose last attempt got stuck or crashed something goes on in quarantine."""
        self.charge, self.suspect, self.was_lost = 0, None, False
        self.quarantine = self.quarantine or self.ended_in_crash

    def lose(self) -> None:
        """Its holder let its lease run out, and the next claim found it."""
        assert self.holder is not None
        self.vanished.append((self.holder, self.alone))
        self.alone = False

    def pay(self, worker: str) -> None:
        """The loss is written down: that of one that ran alone is charged; the first makes a suspect.

        A worker that writes down its own loss has not vanished: that costs nothing.
        """
        others = [ran_alone for holder, ran_alone in self.vanished if holder != worker]
        self.charge -= len(self.vanished)
        self.vanished = []
        if others:
            self.charge += others[0]
            if not self.was_lost:
                self.suspect = (self.suspect or 0) + 1
            self.was_lost = True

    def told(self) -> list[tuple[str, int | None]]:
        """As the trail tells it: an attempt's start, which is written last, before what was asked of it."""
        told = [entry for entry in self.history if entry[0] != "lost"]
        for entry in self.history:
            start = ("RECEIVED", entry[1])
            if entry[0] == "OPERATOR_CANCEL" and entry[1] is not None and start in told:
                told.remove(entry)
                told.insert(told.index(start) + 1, entry)
        return told


class Lifecycle(RuleBasedStateMachine):
    """The machine. `bus` and `db` are set for the test's database before it runs."""

    bus: CommandBus
    db: psycopg.Connection[Any]

    @initialize()
    def empty(self) -> None:
        self.db.execute(
            b"TRUNCATE pgmq.q_orders__commands, " + b", ".join(b"commandbus." + t.encode() for t in TABLES)
        )
        self.tsq = TroubleshootingQueue(self.bus)
        self.lives: dict[str, Life] = {}
        self.held: list[tuple[str, Attempt]] = []  # what workers believe to hold
        self.zombies: list[tuple[str, Attempt]] = []  # what they no longer do
        self.paused: set[str] = set()
        self.settles: Counter[tuple[int, int]] = Counter()
        for n in range(3):
            self.send(f"c{n}", TYPES[n % 2], data=0, own=None)

    # --- sending ------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.lives) < LIVES)
    @rule(
        command_id=IDS, command_type=st.sampled_from(TYPES), data=st.integers(0, 1), own=st.sampled_from([None, 1])
    )
    def send(self, command_id: str, command_type: str, data: int, own: int | None) -> None:
        known = self.lives.get(command_id)
        same = known is not None and (known.command_type, known.data, known.max_attempts) == (
            command_type,
            data,
            own,
        )
        arguments: Any = {"command_id": command_id, "max_attempts": own}
        if known is not None and not same:
            with pytest.raises(DuplicateCommandError):
                self.bus.send("orders", command_type, data, **arguments)
            return
        sent = self.bus.send("orders", command_type, data, **arguments)
        assert sent.created == (known is None)
        if known is None:
            self.lives[command_id] = Life(command_type, data, own)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), change=st.booleans())
    def send_again(self, data: st.DataObject, change: bool) -> None:
        """The same content is the same command, whatever became of it; other content is refused."""
        name = data.draw(st.sampled_from(sorted(self.lives)))
        life = self.lives[name]
        self.send(name, life.command_type, life.data + change, life.max_attempts)

    # --- a worker's doings --------------------------------------------------------------------------------

    @precondition(lambda self: self._claimable() or not self.lives)
    @rule(worker=WORKERS, n=st.integers(1, 3))
    def claim(self, worker: str, n: int) -> None:
        self._claim_and_put_right(worker, n)

    def _claim_and_put_right(self, worker: str, n: int) -> list[Attempt]:
        found = self._claim(worker, n)
        claimed = []
        rows = list(found.ready)
        if found.odd:
            right, adopted = self.bus.run(put_right(domain="orders", worker=worker, odd=found.odd, max_bytes=9999))
            assert adopted == 0
            rows += right
            self._tell_the_model_of_the_odd(worker, found.odd)
        assert {row[3] for row in rows} == {
            name
            for name in self._just_claimed(found)
            if self.lives[name].command_type not in self.paused and self.lives[name].status == "PENDING"
        }
        for row in rows:
            attempt = Attempt("orders", tuple(row), None, 0.0)
            attempt.started = attempt.row[17] / 1e6
            life = self.lives[attempt.command_id]
            assert (attempt.number, attempt.charge) == (life.number, life.charge)
            assert (attempt.is_suspect, attempt.is_quarantined) == (life.suspect is not None, life.quarantine)
            life.alone = life.was_lost
            self._forget(attempt.command_id)
            self.held.append((worker, attempt))
            claimed.append(attempt)
        return claimed

    @precondition(lambda self: self._claimable())
    @rule(worker=WORKERS, outcomes=st.lists(st.sampled_from(sorted(OUTCOMES)), min_size=1, max_size=4))
    def work(self, worker: str, outcomes: list[str]) -> None:
        """What a worker mostly does: claim, and settle at once."""
        for attempt, outcome in zip(self._claim_and_put_right(worker, len(outcomes)), outcomes, strict=False):
            self._settle(worker, [(attempt, outcome)])

    @precondition(lambda self: self._claimable())
    @rule(worker=WORKERS)
    def claim_and_die_at_once(self, worker: str) -> None:
        """Between the claim and anything else: what it found out about others is not written down either."""
        found = self._claim(worker, 1)
        for name in self._just_claimed(found):
            self._forget(name)
        self._expire(self._just_claimed(found))

    def _claim(self, worker: str, n: int) -> Any:
        found = self.bus.run(claim(domain="orders", worker=worker, n=n, lease_seconds=3600, cursor=None))
        names = self._just_claimed(found)
        claimable = self._claimable()
        assert len(names) == min(n, len(claimable))
        assert set(names) <= claimable
        for name in names:
            life = self.lives[name]
            if life.holder is not None:  # a worker vanished; told to the history when it is written down
                life.history.append(("lost", life.number))
                life.lose()
            life.number += 1
            life.charge += 1
            life.holder, life.expired = worker, False
        return found

    @staticmethod
    def _just_claimed(found: Any) -> list[str]:
        return [row[3] for row in found.ready] + [row.command_id for row in found.odd]

    def _claimable(self) -> set[str]:
        return {name for name, life in self.lives.items() if self._is_claimable(life)}

    def _is_claimable(self, life: Life) -> bool:
        if life.status != "PENDING" or life.parked or "" in self.paused:
            return False
        return life.holder is None or life.expired

    def _tell_the_model_of_the_odd(self, worker: str, odd: Any) -> None:
        for row in odd:
            life = self.lives[row.command_id]
            written = []
            for event, number in life.history:
                written += [("RECEIVED", number), ("FAILED", number)] if event == "lost" else [(event, number)]
            life.history = written
            if life.vanished:
                life.pay(worker)
            if life.asked is not None:
                life.status, life.holder, life.asked = "CANCELED", None, None
                life.history += [("CANCELED", row.attempt_base + row.read_ct)]
                self._forget(row.command_id)
            elif life.command_type in self.paused:
                life.parked, life.holder = True, None
                life.history += [("PARKED", row.attempt_base + row.read_ct)]
                life.charge -= 1
                self._forget(row.command_id)

    def _forget(self, command_id: str) -> None:
        """Whoever held it before is a zombie now."""
        gone = [item for item in self.held if item[1].command_id == command_id]
        self.held = [item for item in self.held if item not in gone]
        self.zombies += gone

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """One batch of some of what one worker holds."""
        worker = data.draw(st.sampled_from(sorted({worker for worker, _ in self.held})))
        mine = [attempt for holder, attempt in self.held if holder == worker]
        chosen = data.draw(st.lists(st.sampled_from(mine), min_size=1, max_size=3, unique=True))
        outcomes = [(attempt, data.draw(st.sampled_from(sorted(OUTCOMES)))) for attempt in chosen]
        self._settle(worker, outcomes)

    def _settle(
        self, worker: str, outcomes: list[tuple[Attempt, str]], zombies: list[Attempt] | None = None
    ) -> None:
        """As a settler does: what is to be canceled is settled so in a second round."""
        batch = [OUTCOMES["complete"](zombie) for zombie in zombies or []]
        batch += [OUTCOMES[outcome](attempt) for attempt, outcome in outcomes]
        asked = [
            attempt
            for attempt, outcome in outcomes
            if self.lives[attempt.command_id].asked is not None and outcome != "complete"
        ]
        expected = {_fence(zombie): "refused" for zombie in zombies or []}
        expected |= {_fence(attempt): "canceled" for attempt in asked}
        assert self.bus.run(settle("orders", worker, batch)) == expected
        if asked:
            assert self.bus.run(settle("orders", worker, [_canceled(attempt) for attempt in asked])) == {}
        for attempt, outcome in outcomes:
            self._settled(attempt, "cancel" if attempt in asked else outcome)
            self._forget(attempt.command_id)

    def _settled(self, attempt: Attempt, outcome: str) -> None:
        life = self.lives[attempt.command_id]
        number = attempt.number
        life.holder, life.expired, life.asked, life.alone = None, False, None, False
        self.settles[(attempt.id, number)] += 1
        received: list[tuple[str, int | None]] = [("RECEIVED", number)]
        if outcome == "complete":
            life.status = "COMPLETED"
            life.history += [*received, ("COMPLETED", number)]
        elif outcome == "cancel":
            life.status = "CANCELED"
            life.history += [*received, ("CANCELED", number)]
        elif outcome == "refuse":
            life.status = "FAILED"
            life.history += [*received, ("BUSINESS_RULE_FAILED", number)]
        elif outcome == "break":
            life.status = "IN_TROUBLESHOOTING_QUEUE"
            life.ended_in_crash = False
            life.history += [*received, ("FAILED", number), ("MOVED_TO_TSQ", number)]
        elif outcome == "give back":
            life.charge -= 1
            life.history += [("GIVEN_BACK", number)]
        elif outcome == "suspect":
            life.charge -= 1
            life.suspect = (life.suspect or 0) + 1
            life.history += [*received, ("WAIVED", number)]
        elif self._charge(life, outcome) < life.limit:
            life.suspect, life.was_lost = None, False
            life.quarantine = life.quarantine or outcome == "crash"
            life.history += [*received, ("FAILED", number), ("RETRY_SCHEDULED", number)]
        else:
            life.status = "IN_TROUBLESHOOTING_QUEUE"
            life.ended_in_crash = outcome == "crash"
            life.history += [
                *received,
                ("FAILED", number),
                ("RETRY_EXHAUSTED", number),
                ("MOVED_TO_TSQ", number),
            ]

    @staticmethod
    def _charge(life: Life, outcome: str) -> int:
        """A crash convicts a suspect: it pays for what was waived before."""
        if outcome == "crash":
            life.charge += life.suspect or 0
        return life.charge

    @precondition(lambda self: self._fenced())
    @rule(data=st.data())
    def settle_late(self, data: st.DataObject) -> None:
        worker, attempt = data.draw(st.sampled_from(self._fenced()))
        outcome = OUTCOMES[data.draw(st.sampled_from(sorted(OUTCOMES)))](attempt)
        fence = (attempt.msg_id, attempt.read_ct)
        assert self.bus.run(settle("orders", worker, [outcome])) == {fence: "refused"}
        assert self.bus.run(renew("orders", worker, [attempt], lease_seconds=60)) == Renewal([fence], [])

    @precondition(lambda self: self.held and self._fenced())
    @rule(data=st.data(), outcome=st.sampled_from(["complete", "retry"]))
    def settle_with_a_zombie_in_the_batch(self, data: st.DataObject, outcome: str) -> None:
        worker, attempt = data.draw(st.sampled_from(self.held))
        late = [zombie for holder, zombie in self._fenced() if holder == worker]
        if late:
            same = [
                zombie for zombie in late if zombie.msg_id == attempt.msg_id
            ]  # it claimed its own lost one again
            zombie = data.draw(st.sampled_from(same or late))
            self._settle(worker, [(attempt, outcome)], [zombie])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), worker=WORKERS)
    def lose_one_to(self, data: st.DataObject, worker: str) -> None:
        """A worker hangs until its lease has run out; the next claim, maybe its own, takes the command."""
        _, attempt = data.draw(st.sampled_from(self.held))
        self._expire([attempt.command_id])
        if "" not in self.paused:
            self.claim(worker, len(self._claimable()))

    @precondition(lambda self: self.held)
    @rule(worker=WORKERS)
    def crash(self, worker: str) -> None:
        """It forgets what it held; the database learns of it when the leases have run out."""
        self.zombies += [item for item in self.held if item[0] == worker]
        self.held = [item for item in self.held if item[0] != worker]

    def _fenced(self) -> list[tuple[str, Attempt]]:
        """Those whose attempt is somebody else's by now, or nobody's."""
        return [item for item in self.zombies if not self._still_holds(*item)]

    def _still_holds(self, worker: str, attempt: Attempt) -> bool:
        life = self.lives.get(attempt.command_id)
        return life is not None and life.holder == worker and life.number == attempt.number

    @precondition(lambda self: any(life.holder for life in self.lives.values()))
    @rule(data=st.data())
    def expire_leases(self, data: st.DataObject) -> None:
        names = sorted(name for name, life in self.lives.items() if life.holder)
        self._expire(data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))

    def _expire(self, chosen: list[str]) -> None:
        self.db.execute(
            "UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 s' WHERE msg_id IN "
            "(SELECT msg_id FROM commandbus.command WHERE command_id = ANY (%s))",
            (chosen,),
        )
        for name in chosen:
            self.lives[name].expired = True

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        worker, attempt = data.draw(st.sampled_from(self.held))
        life = self.lives[attempt.command_id]
        renewal = self.bus.run(renew("orders", worker, [attempt], lease_seconds=3600))
        asked = [] if life.asked is None else [PendingCancel(*_fence(attempt), "ann", None)]
        assert renewal == Renewal([], asked)
        life.expired = False

    # --- people's doings ----------------------------------------------------------------------------------

    @precondition(lambda self: self._troubled())
    @rule(data=st.data(), operator_action=st.sampled_from(["retry", "retry", "cancel", "complete"]))
    def operate(self, data: st.DataObject, operator_action: str) -> None:
        self.operate_on(data.draw(st.sampled_from(self._troubled())), operator_action)

    def _troubled(self) -> list[str]:
        return sorted(name for name, life in self.lives.items() if life.status == "IN_TROUBLESHOOTING_QUEUE")

    @rule(command_id=IDS, operator_action=st.sampled_from(["retry", "cancel", "complete"]))
    def operate_on(self, command_id: str, operator_action: str) -> None:
        act = getattr(self.tsq, f"operator_{operator_action}")
        life = self.lives.get(command_id)
        if life is None:
            with pytest.raises(CommandNotFoundError):
                act("orders", command_id, operator="ann")
            return
        if life.status != "IN_TROUBLESHOOTING_QUEUE":
            with pytest.raises(InvalidOperationError):
                act("orders", command_id, operator="ann")
            return
        act("orders", command_id, operator="ann")
        life.status = {"retry": "PENDING", "cancel": "CANCELED", "complete": "COMPLETED"}[operator_action]
        life.history.append((f"OPERATOR_{operator_action.upper()}", None))
        if operator_action == "retry":
            life.start_again()

    @precondition(lambda self: self._troubled())
    @rule(
        operator_action=st.sampled_from(["retry", "cancel", "complete"]),
        command_type=st.sampled_from([None, *TYPES]),
    )
    def operate_in_bulk(self, operator_action: str, command_type: str | None) -> None:
        chosen = [
            life
            for life in self.lives.values()
            if life.status == "IN_TROUBLESHOOTING_QUEUE" and command_type in (None, life.command_type)
        ]
        assert getattr(self.tsq, f"{operator_action}_all")("orders", command_type, operator="ann") == len(chosen)
        for life in chosen:
            life.status = {"retry": "PENDING", "cancel": "CANCELED", "complete": "COMPLETED"}[operator_action]
            life.history.append((f"OPERATOR_{operator_action.upper()}", None))
            if operator_action == "retry":
                life.start_again()

    @rule(command_id=IDS)
    def cancel(self, command_id: str) -> None:
        life = self.lives.get(command_id)
        if life is None:
            with pytest.raises(CommandNotFoundError):
                self.bus.cancel("orders", command_id, operator="ann")
        elif life.status != "PENDING":
            with pytest.raises(InvalidOperationError):
                self.bus.cancel("orders", command_id, operator="ann")
        elif life.holder is not None:
            self.cancel_running(command_id)
        else:
            assert self.bus.cancel("orders", command_id, operator="ann") is CancelResult.CANCELED
            life.status, life.parked = "CANCELED", False
            life.history.append(("OPERATOR_CANCEL", None))

    @precondition(lambda self: any(life.holder for life in self.lives.values()))
    @rule(data=st.data())
    def cancel_one_that_runs(self, data: st.DataObject) -> None:
        running = sorted(name for name, life in self.lives.items() if life.holder)
        self.cancel_running(data.draw(st.sampled_from(running)))

    def cancel_running(self, command_id: str) -> None:
        life = self.lives[command_id]
        assert self.bus.cancel("orders", command_id, operator="ann") is CancelResult.REQUESTED
        if life.asked != life.number:  # or it was asked of the one whose lease has run out since
            life.asked = life.number
            life.history.append(("OPERATOR_CANCEL", life.number))

    @precondition(lambda self: not self.paused)
    @rule(command_type=st.sampled_from([None, *TYPES]))
    def pause(self, command_type: str | None) -> None:
        assert self.bus.pause("orders", command_type, operator="ann") is True
        assert self.bus.pause("orders", command_type, operator="bob") is False
        self.paused.add(command_type or "")

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        (key,) = self.paused
        parked = [life for life in self.lives.values() if life.parked and life.command_type == key]
        assert self.bus.resume("orders", key or None) == len(parked)
        self.paused.clear()
        for life in parked:
            life.parked = False

    @precondition(lambda self: any(life.status in FINAL for life in self.lives.values()))
    @rule(keep=st.integers(0, 3))
    def prune(self, keep: int) -> None:
        finished = sorted(
            (id_, name)
            for id_, name, status in self.db.execute("SELECT id, command_id, status::text FROM commandbus.command")
            if status in FINAL
        )
        gone = [name for _, name in finished[: max(0, len(finished) - keep)]]
        assert self.bus.prune(count=keep).commands == len(gone)
        for name in gone:
            assert self.lives[name].status in FINAL
            self._forget(name)
            del self.lives[name]

    # --- what must be true --------------------------------------------------------------------------------

    @invariant()
    def the_database_agrees(self) -> None:
        if not hasattr(self, "lives"):
            return
        commands = {
            row[0]: row[1:]
            for row in self.db.execute(
                "SELECT c.command_id, c.id, c.status::text, c.msg_id, coalesce(c.attempt, c.attempt_base + "
                "coalesce(q.read_ct, 0)), q.read_ct - c.waived, q.headers ->> 'held_by', p.seq IS NOT NULL, "
                "t.command IS NOT NULL, q.vt <= now(), c.suspect, c.quarantine IS TRUE, c.alone IS TRUE "
                "FROM commandbus.command c "
                "LEFT JOIN pgmq.q_orders__commands q ON q.msg_id = c.msg_id "
                "LEFT JOIN commandbus.parked p ON p.msg_id = c.msg_id AND p.domain = c.domain "
                "LEFT JOIN commandbus.tsq t ON t.command = c.id"
            )
        }
        queue = self.db.execute("SELECT msg_id, (message ->> 'command')::bigint FROM pgmq.q_orders__commands")
        assert commands.keys() == self.lives.keys()
        pending = {(row[2], row[0]) for row in commands.values() if row[1] == "PENDING"}
        rows = queue.fetchall()
        assert len(rows) == len(set(rows))
        assert set(rows) == pending, "every command that is not settled has its queue row, and no other has one"
        for name, life in self.lives.items():
            _, status, _, number, charge, holder, parked, troubled, visible, *marks = commands[name]
            assert status == life.status, name
            assert number == life.number, name
            assert troubled == (life.status == "IN_TROUBLESHOOTING_QUEUE"), name
            if status == "PENDING" and not life.vanished:
                assert marks == [life.suspect, life.quarantine, life.was_lost], name
            if status == "PENDING":
                assert (charge, holder, parked) == (life.charge, life.holder, life.parked), name
                assert visible == (not parked and (holder is None or life.expired)), name
        assert all(count == 1 for count in self.settles.values())
        orphans = self.db.execute(
            "SELECT (SELECT count(*) FROM commandbus.tsq t LEFT JOIN commandbus.command c ON c.id = t.command "
            "WHERE c.id IS NULL), (SELECT count(*) FROM commandbus.attempt a LEFT JOIN commandbus.command c "
            "ON c.id = a.command WHERE c.id IS NULL), (SELECT count(*) FROM commandbus.parked p LEFT JOIN "
            "pgmq.q_orders__commands q USING (msg_id) WHERE q.msg_id IS NULL)"
        ).fetchone()
        assert orphans == (0, 0, 0)

    @invariant()
    def the_history_is_complete_and_in_order(self) -> None:
        """What the trail says is what the model saw, but for what a dead claimer has not written down yet."""
        if not hasattr(self, "lives"):
            return
        trails: dict[str, list[tuple[str, int | None]]] = {name: [] for name in self.lives}
        for name, event, attempt in self.db.execute(
            "SELECT c.command_id, a.event, a.attempt FROM commandbus.command c "
            "JOIN commandbus.audit a ON a.command = c.id ORDER BY c.id, a.rank, a.at"
        ):
            trails[name].append((event, attempt))
        for name, life in self.lives.items():
            assert trails[name] == life.told(), name
            ends = Counter(number for event, number in trails[name] if event in ENDS)
            starts = Counter(number for event, number in trails[name] if event == "RECEIVED")
            assert all(count == 1 for count in ends.values()), name
            assert starts.keys() <= ends.keys(), name

    def teardown(self) -> None:
        """Whatever happened, everything can still be brought to its end."""
        if not hasattr(self, "lives"):
            return
        for key in sorted(self.paused):
            self.bus.resume("orders", key or None)
        self.paused.clear()
        self.tsq.cancel_all("orders", operator="ann")
        self.db.execute("UPDATE pgmq.q_orders__commands SET vt = now() - interval '1 s'")
        found = self.bus.run(claim(domain="orders", worker="last", n=99, lease_seconds=60, cursor=None))
        rows = list(found.ready)
        if found.odd:
            rows += self.bus.run(put_right(domain="orders", worker="last", odd=found.odd, max_bytes=9999))[0]
        batch = [Attempt("orders", tuple(row), None, 0.0).complete(None) for row in rows]
        if batch:
            assert self.bus.run(settle("orders", "last", batch)) == {}
        left = self.db.execute(
            "SELECT (SELECT count(*) FROM pgmq.q_orders__commands), (SELECT count(*) FROM commandbus.tsq), "
            "(SELECT count(*) FROM commandbus.parked), (SELECT count(*) FROM commandbus.command "
            "WHERE status NOT IN ('COMPLETED', 'FAILED', 'CANCELED'))"
        ).fetchone()
        assert left == (0, 0, 0, 0)


@pytest.fixture
def machine(database: str) -> Iterator[type[Lifecycle]]:
    """The machine on a database of its own, emptied before each of its lives."""
    with CommandBus(database) as bus, psycopg.connect(database, autocommit=True) as db:
        bus.create_domain("orders")
        db.execute("SET synchronous_commit = off")
        yield type("LifecycleHere", (Lifecycle,), {"bus": bus, "db": db})


@pytest.mark.long
def test_lifecycle(machine: type[Lifecycle]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(20, thorough=300),
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
