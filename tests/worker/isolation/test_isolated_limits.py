"""Limits in handlers with isolation="process": permits are kept and given back, and none leaks, come what may."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus, Limit, Worker
from commandbus.limits.client import LimitClient
from commandbus.limits.requests import Limited, Permit, PermitCall, Release
from commandbus.model.limit_state import ApiAnswer
from commandbus.worker.execution.attempt import NEVER, Attempt, Stop, Why
from commandbus.worker.isolation.channel import ChannelError
from commandbus.worker.isolation.isolation import Isolation
from commandbus.worker.isolation.limit_relay import ChildLimits, LimitRelay
from support.isolated_limits import handlers
from support.isolating import Lab
from support.waiting import one, until, verdicts

StartWorker = Callable[..., Worker]
HOLDERS = (
    "SELECT count(*) FROM commandbus.limits, jsonb_each_text(holders) AS held (token, lease_end) "
    "WHERE lease_end::float8 > extract(epoch FROM clock_timestamp())"
)
WAITING = "SELECT count(*) FROM commandbus.parked WHERE limit_name = 'one' AND woken_at IS NULL"
QUICK = {"visibility_timeout": 20.0, "statement_timeout": 15.0, "cancel_grace": 0.5, "concurrency": 2}


class Harness:
    """A worker, a folder in which handlers write, and a record of what was left at the limit client."""

    def __init__(self, bus: CommandBus, db: psycopg.Connection[Any], worker: Worker, folder: Path) -> None:
        self.bus = bus
        self.db = db
        self.worker = worker
        self.folder = folder
        self.left: list[tuple[ApiAnswer, bool]] = []

    @property
    def limit_client(self) -> LimitClient:
        assert self.worker._runtime is not None
        return self.worker._runtime._limited.limit_client

    def send(self, command_type: str, **more: Any) -> str:
        data = {"folder": str(self.folder)} | more
        return self.bus.send("orders", command_type, data, max_attempts=1, timeout=60).command_id

    def status(self, command_id: str) -> str:
        found = self.bus.get_command("orders", command_id)
        assert found is not None
        return str(found.status)

    def result(self, command_id: str) -> Any:
        until(lambda: self.status(command_id) not in ("PENDING", "IN_PROGRESS", "PARKED"), 30)
        found = self.bus.get_command("orders", command_id)
        assert found is not None
        assert found.status == "COMPLETED", self.last(command_id)
        return found.result

    def failure(self, command_id: str) -> Any:
        until(lambda: self.status(command_id) == "IN_TROUBLESHOOTING_QUEUE", 30)
        return self.last(command_id)

    def last(self, command_id: str) -> Any:
        return self.bus.get_attempts("orders", command_id)[-1]

    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    def go(self) -> None:
        (self.folder / "go").touch()

    def until_free(self) -> None:
        """Nothing is held or renewed here, nobody is in line, and every permit is free."""
        until(lambda: self.limit_client.held == {})
        until(lambda: one(self.db, HOLDERS) == 0)
        until(lambda: one(self.db, WAITING) == 0)


@pytest.fixture
def harness(
    bus: CommandBus,
    db: psycopg.Connection[Any],
    start_worker: StartWorker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Harness:
    harness = Harness(bus, db, start_worker(handlers, **QUICK), tmp_path)
    release, judge = LimitClient.release, LimitClient.judge

    def note(releases: Sequence[Release]) -> None:
        harness.left.extend((item.answer, item.keeps) for item in releases)

    def note_and_release(self: LimitClient, releases: Sequence[Release]) -> None:
        note(releases)
        release(self, releases)

    def note_and_judge(self: LimitClient, limited: Limited) -> None:
        note(limited.releases)
        judge(self, limited)

    monkeypatch.setattr(LimitClient, "release", note_and_release)
    monkeypatch.setattr(LimitClient, "judge", note_and_judge)
    return harness


# --- the limit is kept -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command_type", ["level", "level_async", "block", "block_async"])
def test_isolated_attempts_keep_to_a_limit(harness: Harness, command_type: str) -> None:
    # Nobody loses a permit here, however long this machine lets the worker wait for its turn to renew it.
    harness.bus.declare_limit(Limit("one", concurrency=1, lease=120.0, breaker_failures=0, store="postgres"))
    sent = [harness.send(command_type) for _ in range(6)]
    for command_id in sent:
        harness.result(command_id)
    assert harness.log() == ["in", "out"] * 6
    assert harness.left == [(ApiAnswer.GOOD, False)] * 6
    harness.until_free()


def test_errors_of_the_limit_client_reach_the_child_as_they_are(harness: Harness) -> None:
    holder = harness.send("hold")
    until(lambda: harness.log() == ["in"])
    kind, text, limit = harness.result(harness.send("ask", name="one", wait=0.2))
    assert (kind, limit) == ("LimitTimeoutError", "one")
    assert "one" in text
    kind, text, _ = harness.result(harness.send("ask", name="unheard_of", wait=1))
    assert kind == "UnknownLimitError"
    assert "unknown limit 'unheard_of' (known: one)" in text
    harness.go()
    assert harness.result(holder) is False
    assert harness.result(harness.send("ask", name="one", wait=20)) == ["a permit"]
    harness.until_free()


# --- processes that die ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command_type", ["die", "die_level"])
def test_the_permit_of_a_child_that_was_killed_comes_back_after_its_lease(
    harness: Harness, command_type: str
) -> None:
    said = harness.failure(harness.send(command_type))
    assert (said.verdict, said.error_type, said.rung) == ("EXHAUSTED", "WorkerLost", "crash")
    assert harness.left == [(ApiAnswer.UNKNOWN, True)]
    harness.result(harness.send("block"))
    assert harness.log() == ["in", "in", "out"]
    harness.until_free()


def test_blocks_in_a_child_use_the_permit_that_its_handler_has(harness: Harness) -> None:
    harness.result(harness.send("lent"))
    assert harness.left == [(ApiAnswer.GOOD, False)]
    assert harness.failure(harness.send("lent", dies=True)).error_type == "WorkerLost"
    assert harness.left == [(ApiAnswer.GOOD, False), (ApiAnswer.UNKNOWN, True)]
    assert harness.log() == ["in"] * 6
    harness.until_free()


def test_an_attempt_for_which_there_is_no_process_gives_its_permit_back_at_once(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def fail(_: Isolation) -> Any:
        raise OSError("no processes left")

    monkeypatch.setattr(Isolation, "_make", fail)
    harness: Harness = request.getfixturevalue("harness")
    assert harness.failure(harness.send("level")).error_code == "ISOLATION_FAILED"
    assert harness.left == [(ApiAnswer.UNKNOWN, False)]
    harness.until_free()


def test_a_child_that_is_killed_in_line_waits_no_more(harness: Harness) -> None:
    holder = harness.send("hold")
    until(lambda: harness.log() == ["in"])
    waits = harness.send("in_line")
    until(lambda: len(harness.log()) == 2)
    until(lambda: one(harness.db, WAITING) == 1)
    os.kill(int(harness.log()[1].removeprefix("asks ")), signal.SIGKILL)
    assert harness.failure(waits).error_type == "WorkerLost"
    until(lambda: one(harness.db, WAITING) == 0)
    harness.go()
    harness.result(holder)
    harness.until_free()
    assert harness.left == [(ApiAnswer.GOOD, False)]


LATE = "no answer from one within 0.3 s (timeout of the block)"
# --- time --------------------------------------------------------------------------------------------------------


def test_a_call_that_takes_too_long_fails_its_attempt_with_timeout(harness: Harness) -> None:
    said = harness.failure(harness.send("late"))
    assert (said.error, said.error_code) == (LATE, "TIMEOUT")
    assert harness.left == [(ApiAnswer.TIMEOUT, True)]
    harness.until_free()


def test_a_call_that_comes_back_within_the_grace_is_a_timeout_of_the_limit(harness: Harness) -> None:
    harness.bus.set_limit("one", call_timeout=0.3)
    said = harness.failure(harness.send("late_back"))
    assert (said.error, said.error_code) == ("no answer from one within 0.3 s (limit call timeout)", "TIMEOUT")
    assert harness.left == [(ApiAnswer.TIMEOUT, False)]
    harness.until_free()


def test_a_call_that_ignores_its_time_out_goes_down_the_ladder(harness: Harness) -> None:
    said = harness.failure(harness.send("late_deaf"))
    assert (said.error_type, said.rung) == ("ExecutionStuck", "kill")
    assert said.error == f"did not respond to cancellation within 0.5 seconds: {LATE}; its process was killed"
    assert harness.left == [(ApiAnswer.TIMEOUT, True)]
    harness.until_free()


def test_a_time_out_of_a_handler_with_a_permit_of_its_own_is_told_once(harness: Harness) -> None:
    assert harness.failure(harness.send("late_lent")).error_type == "ExecutionStuck"
    assert harness.left == [(ApiAnswer.TIMEOUT, True), (ApiAnswer.UNKNOWN, True)]
    assert one(harness.db, "SELECT failures FROM commandbus.limits WHERE name = 'one'") == 1
    harness.until_free()


def test_an_async_call_that_takes_too_long_is_canceled_and_the_handler_goes_on(harness: Harness) -> None:
    assert harness.result(harness.send("late_async")) == LATE
    assert harness.left == [(ApiAnswer.TIMEOUT, True)]
    harness.until_free()


def test_after_the_block_the_attempt_has_its_own_deadline_again(harness: Harness) -> None:
    assert 30 < harness.result(harness.send("in_time")) < 60


# --- 429 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command_type", ["refused", "refused_async", "refused_level"])
def test_a_rate_limit_error_in_a_child_parks_the_command(harness: Harness, command_type: str) -> None:
    sent = harness.send(command_type)
    assert harness.result(sent) == "yes"
    assert verdicts(harness.db, sent)[0][1] == "PARKED"
    assert "429 from example" in str(harness.bus.get_attempts("orders", sent)[0].error)
    assert harness.left[0] == (ApiAnswer.RATE_LIMITED, False)
    assert harness.left[-1] == (ApiAnswer.GOOD, False)
    harness.until_free()


# --- permits that are lost, and threads that stay ----------------------------------------------------------------


def test_a_child_hears_that_its_permit_is_lost(harness: Harness) -> None:
    sent = harness.send("hold")
    until(lambda: harness.log() == ["in"])
    harness.db.execute("UPDATE commandbus.limits SET holders = '{}' WHERE name = 'one'")
    assert harness.result(sent) is True
    harness.until_free()


def test_a_permit_that_a_thread_holds_is_left_when_the_attempt_is_over(harness: Harness) -> None:
    harness.result(harness.send("leave_thread"))
    until(lambda: harness.left)
    assert harness.left == [(ApiAnswer.UNKNOWN, True)]
    harness.until_free()
    harness.go()
    until(lambda: harness.log() == ["left"])
    harness.result(harness.send("block"))
    assert harness.left == [(ApiAnswer.UNKNOWN, True), (ApiAnswer.GOOD, False)]


def test_a_thread_of_an_attempt_that_is_over_gets_no_permit(harness: Harness) -> None:
    harness.result(harness.send("ask_later"))
    harness.go()
    until(lambda: harness.log() == ["AttemptFencedError"])
    assert one(harness.db, "SELECT granted FROM commandbus.limits WHERE name = 'one'") == 0


# --- the doorman does not believe --------------------------------------------------------------------------------


class Record:
    """A provider of permits that says who came."""

    def __init__(self) -> None:
        self.calls: list[PermitCall] = []
        self.forgotten: list[PermitCall] = []
        self.left: list[tuple[Permit, ApiAnswer, bool]] = []

    def acquire(self, attempt: Attempt, name: str, wait: float) -> PermitCall:
        number = len(self.calls)
        call = PermitCall(name, f"token {number}", number, 0.0, wait, attempt.command_id, Future(), None)
        self.calls.append(call)
        return call

    def forget(self, call: PermitCall) -> None:
        self.forgotten.append(call)

    def release(
        self, attempt: Attempt, permit: Permit, answer: ApiAnswer, api: Any, *, keeps: bool = False
    ) -> None:
        self.left.append((permit, answer, keeps))

    def note_deadline(self, attempt: Attempt) -> None:
        raise AssertionError("the worker's own deadline is changed in place")

    def grant(self, number: int = 0) -> Permit:
        call = self.calls[number]
        permit = Permit(call.name, call.token, 60.0, holder=call.holder)
        call.answer.set_result(permit)
        return permit


class Relay:
    """A relay of the run number 7, whose attempt has a minute, and what it has sent."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.attempt.deadline_at = self.end = attempt.started_at + 60
        self.provider = Record()
        self.sent: list[dict[str, Any]] = []
        self.limit_relay = LimitRelay(self.provider, attempt, run=7, send=self.sent.append)

    def ask(self, question: int = 1, *, run: int = 7, name: Any = "one", wait: Any = 1.0) -> None:
        self.limit_relay.hear({"k": "limit", "n": run, "q": question, "name": name, "wait": wait})

    def leave(self, question: int, *, run: int = 7) -> None:
        told = {"answer": "good", "api": None, "keeps": False}
        self.limit_relay.hear({"k": "release", "n": run, "q": question, **told})

    def deadline(self, at: float | None, late: Any = None, *, run: int = 7) -> None:
        self.limit_relay.hear({"k": "deadline", "n": run, "at": at, "late": late})


@pytest.fixture
def relay() -> Relay:
    row = (
        1,
        1,
        1,
        "c-1",
        "block",
        None,
        0,
        0,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
    )
    attempt = Attempt("orders", row, None, time.monotonic())
    attempt.started_at = time.monotonic()
    return Relay(attempt)


def test_messages_of_an_earlier_run_take_and_leave_nothing(relay: Relay) -> None:
    relay.ask(run=6)
    assert relay.provider.calls == []
    assert relay.sent[0]["error"]["kind"] == "AttemptFencedError"
    relay.ask()
    relay.provider.grant()
    relay.leave(1, run=6)
    relay.deadline(0.0, "late", run=6)
    relay.limit_relay.hear({"k": "forget", "n": 6, "q": 1})
    assert (relay.provider.left, relay.provider.forgotten) == ([], [])
    assert relay.attempt.deadline_at == relay.end


def test_a_permit_that_comes_after_the_end_is_left_to_the_limit_client(relay: Relay) -> None:
    relay.ask(1)
    relay.ask(2)
    held = relay.provider.grant(0)
    relay.limit_relay.close()
    assert relay.provider.forgotten == [relay.provider.calls[1]]
    assert relay.provider.left == [(held, ApiAnswer.UNKNOWN, True)]
    assert [(message["k"], message["q"]) for message in relay.sent] == [("permit", 1)]


def test_a_permit_that_is_granted_while_it_is_forgotten_is_left_once(relay: Relay) -> None:
    relay.ask()
    relay.provider.grant()
    relay.limit_relay.hear({"k": "forget", "n": 7, "q": 1})
    relay.leave(1)
    relay.limit_relay.close()
    assert relay.provider.forgotten == relay.provider.calls
    assert relay.provider.left == []


def test_a_permit_is_left_once(relay: Relay) -> None:
    relay.ask()
    held = relay.provider.grant()
    relay.leave(1)
    relay.leave(1)
    relay.leave(99)
    relay.limit_relay.close()
    assert relay.provider.left == [(held, ApiAnswer.GOOD, False)]


def test_what_a_child_held_at_its_deadline_timed_out(relay: Relay) -> None:
    relay.ask()
    held = relay.provider.grant()
    relay.attempt.ask_to_stop(Stop(Why.DEADLINE, "timeout", 0.0, 0.0))
    relay.limit_relay.close()
    assert relay.provider.left == [(held, ApiAnswer.TIMEOUT, True)]


@pytest.mark.parametrize(
    ("name", "wait"),
    [
        ("One!", 1.0),
        ("a\x00b", 1.0),
        (None, 1.0),
        ("one", -1),
        ("one", float("nan")),
        ("one", 1e300),
        ("one", "x"),
    ],
)
def test_a_question_that_makes_no_sense_asks_for_nothing(relay: Relay, name: Any, wait: Any) -> None:
    with pytest.raises((ChannelError, ValueError)):
        relay.ask(name=name, wait=wait)
    assert relay.provider.calls == []


def test_a_permit_that_is_lost_is_told_to_the_block_that_has_it_now(relay: Relay) -> None:
    lost: list[Permit] = []
    permit = Permit("one", "token", 60.0, holder="", on_lost=lost.append)
    for question in (1, 2):
        relay.ask(question)
        relay.provider.calls[-1].answer.set_result(permit)
        if question == 1:
            relay.leave(question)
    assert permit.on_lost is not None
    permit.on_lost(permit)
    assert [(message["k"], message["q"]) for message in relay.sent] == [("permit", 1), ("permit", 2), ("lost", 2)]
    assert lost == [permit]


def test_a_number_is_used_for_one_question(relay: Relay) -> None:
    relay.ask()
    with pytest.raises(ChannelError, match="twice"):
        relay.ask()


def test_a_child_may_shorten_its_deadline_and_put_it_back_but_no_more(relay: Relay) -> None:
    attempt, end = relay.attempt, relay.end
    relay.deadline(end - 50, "late")
    assert (attempt.deadline_at, attempt.lateness()) == (end - 50, "late")
    relay.deadline(end - 55, "late")
    relay.deadline(end - 50, "late")
    assert attempt.deadline_at == end - 50
    relay.deadline(end)
    assert attempt.deadline_at == end
    assert attempt.extras.late_text is None
    for wanted in (end + 1, None):
        relay.deadline(wanted)
        assert attempt.deadline_at == end
    relay.deadline(end - 50, "late")
    relay.limit_relay.extend(end + 20)
    assert attempt.deadline_at == end + 20
    relay.deadline(NEVER)
    assert attempt.deadline_at == end + 20
    with pytest.raises(ChannelError):
        relay.deadline(float("nan"))
    attempt.ask_to_stop(Stop(Why.CANCEL, "enough", 0.0, 0.0))
    relay.deadline(end - 50, "late")
    assert attempt.deadline_at == end + 20


def test_who_forgets_on_one_side_is_heard_on_the_other(relay: Relay) -> None:
    """Both sides, without a process between them: whatever the child has let go of, the worker gives back."""
    messages: list[dict[str, Any]] = []
    door = ChildLimits(messages.append, lambda _: 7)
    first, second = (door.acquire(relay.attempt, "one", 1.0) for _ in range(2))
    for message in messages:
        relay.limit_relay.hear(message)
    door.forget(first)  # before the answer
    relay.provider.grant(0)
    relay.provider.grant(1)
    for message in relay.sent:
        door.hear(message)
    assert not first.answer.done()
    assert second.answer.result(0).limit == "one"
    door.forget(second)  # after it
    for message in messages[2:]:
        relay.limit_relay.hear(message)
    assert relay.provider.forgotten == relay.provider.calls
    relay.limit_relay.close()
    assert relay.provider.left == []


def test_handlers_that_use_no_limit_cost_no_limit_client(lab: Lab) -> None:
    lab.result("echo")
    assert lab.limited._limit_client is None
