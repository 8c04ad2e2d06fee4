"""The engine alone: steps that wait for signals, sleeps and nested processes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from commandbus import (
    ConfigurationError,
    InvalidCommandError,
    PermanentCommandError,
    Saga,
    StepCommand,
    StepProcess,
    StepSignal,
    StepSleep,
    StepUndo,
    branch,
    nested,
    parallel,
    sequence,
    sleep,
    step,
    wait_for,
)
from commandbus.model.process import NESTED_MOVES, ProcessStatus
from commandbus.processes.messages import MalformedMessageError, Message, read_message
from support.engine_harness import Harness, Plain


def approved(**options: Any) -> Saga:
    return Saga("t", step("a", "d", undo="undo_a"), wait_for("ok", **options), step("z", "d"))


def waiting(saga: Saga) -> Harness:
    """A process that waits for its signal."""
    harness = Harness(saga)
    harness.start()
    harness.answer("a")
    assert harness.sent() == ["ok"]
    return harness


def over(harness: Harness, number: int = 2, **details: Any) -> None:
    harness.tell(Message("deadline", number, details=details))


# --- signals ----------------------------------------------------------------------------------------------------


def test_a_signal_is_the_result_of_the_step_that_waits_for_it() -> None:
    harness = waiting(approved())
    made = harness.signal("ok", {"by": "ann"})
    assert made.taken == {2: 1}
    assert harness.view.state["ok"] == {"by": "ann"}
    assert harness.sent() == ["z"]
    assert harness.view.result_of("ok") == {"by": "ann"}


def test_a_signal_that_comes_first_is_taken_when_the_wait_begins() -> None:
    harness = Harness(approved(deadline="2d"))
    early = harness.send_signal("ok", 1)
    assert harness.tell(early).touches
    harness.start()
    made = harness.answer("a")
    assert made.taken == {2: 1}
    assert harness.sent() == ["z"]
    assert harness.tell(early).aside == "a step has taken the signal already"


def test_signals_of_one_name_are_taken_in_their_order_and_each_once() -> None:
    saga = Saga("t", wait_for("ok", name="first"), wait_for("ok", name="second"), wait_for("ok", name="third"))
    harness = Harness(saga)
    messages = [harness.send_signal("ok", n) for n in (1, 2)]
    harness.start()
    assert harness.view.state == {"first": 1, "second": 2}
    assert [harness.tell(message).aside for message in messages] == ["a step has taken the signal already"] * 2
    harness.signal("ok", 3)
    assert (harness.status, harness.view.state["third"]) == ("COMPLETED", 3)


def test_a_handled_signal_is_not_the_one_that_is_taken_but_the_oldest_is() -> None:
    harness = waiting(approved())
    harness.send_signal("ok", "old")
    harness.tell(harness.send_signal("ok", "new"))
    assert harness.view.state["ok"] == "old"


def test_a_thousand_signals_that_came_early_need_no_deep_stack() -> None:
    class Counting(Plain):
        def build_command(self, step: str, state: Any) -> Any:
            return StepSignal("go")

        def update_state(self, step: str, reply: Any, state: Any) -> None:
            state["n"] = state.get("n", 0) + 1

        def next_step(self, step: str, reply: Any, state: Any) -> Any:
            return "a" if state["n"] < 3000 else None

    harness = Harness(Counting())
    for n in range(3000):
        harness.send_signal("go", n)
    harness.start()
    assert (harness.status, harness.view.state) == ("COMPLETED", {"n": 3000})


def test_parallel_waits_take_one_signal_each() -> None:
    saga = Saga("t", parallel(wait_for("ok", name="x"), wait_for("ok", name="y"), step("a", "d")))
    harness = Harness(saga)
    harness.send_signal("ok", 1)
    harness.start()
    assert harness.sent() == ["y", "a"]
    assert harness.signal("other").touches
    harness.signal("ok", 2)
    harness.answer("a")
    assert (harness.status, harness.view.state["x"], harness.view.state["y"]) == ("COMPLETED", 1, 2)


def test_without_a_signal_the_step_fails_and_the_process_is_undone() -> None:
    harness = waiting(approved(deadline="2d"))
    over(harness)
    assert harness.sent() == ["-a"]
    assert harness.view.failure == {
        "type": "DeadlineExceeded", "code": "DEADLINE_EXCEEDED", "step": "ok",
        "message": "step 2 (ok) failed: no signal 'ok' came in time",
    }  # fmt: skip
    late = harness.signal("ok")
    assert late.aside == "the process is undone: no step will take the signal"
    harness.drain()
    assert harness.status == "COMPENSATED"


def test_without_a_signal_it_may_go_on() -> None:
    saga = approved(deadline="2d", on_timeout="continue", otherwise={"by": None})
    harness = waiting(saga)
    over(harness, on_timeout="continue", otherwise={"by": None})
    assert (harness.sent(), harness.view.state["ok"]) == (["z"], {"by": None})
    assert harness.signal("ok").touches, "it is kept for a later wait"


def test_a_signal_that_is_there_wins_over_the_deadline() -> None:
    harness = waiting(approved(deadline="2d"))
    message = harness.send_signal("ok", 1)
    over(harness)
    assert harness.sent() == ["z"]
    assert harness.tell(message).aside == "a step has taken the signal already"
    over(harness)
    assert harness.sent() == ["z"], "the deadline of a step that has ended"


def test_a_failed_wait_is_begun_again_by_a_retry() -> None:
    harness = Harness(Saga("t", wait_for("ok", deadline=1)))
    harness.start()
    over(harness, 1)
    assert harness.status == "FAILED"
    harness.send_signal("ok", 7)
    harness.retry()
    assert (harness.status, harness.view.state) == ("COMPLETED", {"ok": 7})


def test_a_signal_that_came_while_it_was_failed_is_found_by_the_retry() -> None:
    harness = waiting(approved())
    harness.view.status = ProcessStatus.FAILED  # somebody ended another message
    assert harness.signal("ok", 7).aside == "the process is FAILED, and that is final"
    harness.retry()
    assert harness.sent() == ["z"]


def test_a_wait_in_a_branch_and_a_sequence() -> None:
    saga = Saga(
        "t",
        branch(lambda s: s["big"], sequence(sleep("1h"), wait_for("ok")), step("b", "d")),
        step("z", "d"),
    )
    harness = Harness(saga, {"big": True})
    harness.start()
    harness.wake()
    harness.signal("ok")
    assert harness.sent() == ["z"]


# --- sleeps -----------------------------------------------------------------------------------------------------


def test_a_sleep_ends_once_and_leaves_nothing_in_the_state() -> None:
    harness = Harness(Saga("t", sleep(lambda s: s["hours"] * 3600), step("z", "d")), {"hours": 2})
    made = harness.start()
    assert made.sends[0].command == StepSleep(7200)
    harness.wake()
    assert (harness.sent(), harness.view.state) == (["z"], {"hours": 2})
    assert harness.tell(Message("wake", 1)).aside == "step 1 does not sleep any more"
    assert harness.tell(Message("wake", 2)).aside == "step 2 does not sleep any more"


def test_a_canceled_process_stops_waiting_at_once() -> None:
    harness = Harness(
        Saga("t", step("a", "d", undo="undo_a"), parallel(sleep("3d"), wait_for("ok"), step("b", "d")))
    )
    harness.start()
    harness.answer("a")
    harness.request_cancel()
    made = harness.tell(Message("cancel"))
    assert [one.name for one, _ in made.cancels] == ["b"]
    assert harness.sent() == ["b"], "the others have ended"
    assert harness.view.steps[1].error["message"] == "the process is undone: canceled by ann"  # type: ignore[index]
    assert harness.tell(Message("cancel")).aside == "the process is being undone already"
    harness.answer("b", "CANCELED")
    harness.drain()
    assert harness.status == "CANCELED"


def test_a_step_that_fails_ends_the_waits_beside_it() -> None:
    harness = Harness(Saga("t", parallel(sleep("3d"), wait_for("ok"), step("b", "d"))))
    harness.start()
    harness.answer("b", "FAILED")
    assert harness.status == "FAILED"
    harness.retry()
    assert harness.sent() == ["sleep", "ok", "b"]


# --- nested processes -------------------------------------------------------------------------------------------

INNER = Saga("inner", step("i", "d", undo="undo_i"), step("j", "d", undo="undo_j"))
OUTER = Saga("outer", step("a", "d", undo="undo_a"), nested("in", INNER, deadline="1h"), step("z", "d"))


def test_a_nested_process_is_a_step() -> None:
    harness = Harness(OUTER, {"n": 1})
    harness.start()
    made = harness.answer("a", result=5)
    assert made.sends[0].command == StepProcess(INNER, {"n": 1, "a": 5}, deadline="1h")
    assert harness.view.outstanding[0].kind == "process"
    harness.answer("in", result={"i": 1})
    assert harness.view.state["in"] == {"i": 1}
    harness.answer("z", "FAILED")
    assert harness.sent() == ["-in"]
    assert harness.look(Message("deadline")).aside is not None
    harness.drain()
    assert harness.status == "COMPENSATED"
    assert harness.log[-3:] == [("undone", "in"), ("undo", "a"), ("undone", "a")]


def test_a_canceled_parent_cancels_its_nested_process_and_waits_for_it() -> None:
    harness = Harness(OUTER)
    harness.start()
    harness.answer("a")
    harness.request_cancel()
    made = harness.tell(Message("cancel"))
    assert [one.name for one, _ in made.cancels] == ["in"]
    assert harness.sent() == ["in"], "it undoes its own steps first"
    harness.answer("in", "CANCELED")
    assert harness.sent() == ["-a"]


def test_a_nested_process_is_not_undone_if_it_is_said_so() -> None:
    harness = Harness(Saga("t", nested("in", "inner", undo=False), step("z", "d")))
    harness.start()
    harness.answer("in")
    harness.answer("z", "FAILED")
    assert harness.status == "FAILED"


def test_a_nested_process_is_canceled_by_a_message() -> None:
    harness = Harness(INNER)
    harness.view.parent_step = 2
    harness.tell(Message("cancel", details={"by": "process p", "reason": "why"}))
    assert (harness.status, harness.hooks) == ("CANCELED", ["on_canceled"])
    assert harness.view.cancel == {"by": "process p", "reason": "why", "at": None}
    assert harness.start().aside is not None


def test_a_nested_process_that_completed_is_undone() -> None:
    harness = Harness(INNER)
    harness.view.parent_step = 2
    harness.start()
    harness.drain()
    assert harness.status == "COMPLETED"
    undo = read_message({"event": "undo", "step": 4, "by": "process 'p'"})
    harness.tell(undo)
    assert (harness.sent(), harness.view.parent_step) == (["-j"], -4)
    assert harness.view.failure == {
        "type": "ParentUndone", "code": "PARENT_UNDONE",
        "message": "process 'p' is undone, and this nested process with it",
    }  # fmt: skip
    assert harness.tell(undo).aside is not None
    harness.answer("j", "CANCELED")
    assert harness.status == "FAILED", "somebody gave the compensation up"
    harness.tell(undo)
    assert harness.sent() == ["-j"]
    harness.drain()
    assert (harness.status, harness.hooks[-2:]) == ("COMPENSATED", ["on_failed", "on_compensated"])
    assert not harness.tell(undo).sends
    assert harness.status == "COMPENSATED"


def test_a_nested_process_without_compensations_counts_as_undone() -> None:
    harness = Harness(Saga("t", step("a", "d")))
    harness.view.parent_step = 1
    harness.start()
    harness.drain()
    harness.tell(Message("undo", 3))
    assert harness.status == "COMPENSATED"


def test_a_process_that_is_not_nested_cannot_be_undone() -> None:
    harness = Harness(INNER)
    harness.start()
    harness.drain()
    assert "only a nested process" in str(harness.tell(Message("undo", 3)).aside)
    assert NESTED_MOVES.keys() == {ProcessStatus.COMPLETED, ProcessStatus.FAILED, ProcessStatus.COMPENSATED}


# --- misuse -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: wait_for(""), "signal '' is not valid"),
        (lambda: wait_for("x", deadline="soon"), "deadline: 'soon' is not a duration"),
        (lambda: wait_for("x", on_timeout="explode"), "on_timeout 'explode' is neither"),  # type: ignore[arg-type]
        (lambda: wait_for("x", otherwise=1), 'otherwise= needs on_timeout="continue"'),
        (lambda: wait_for("x", on_timeout="continue", otherwise=object()), "otherwise"),  # type: ignore[arg-type]
        (sleep, "a duration or until="),
        (lambda: sleep("1h", until=datetime.now(UTC)), "a duration or until="),
        (lambda: sleep("-1h"), "is negative"),
        (lambda: sleep(until=datetime(2030, 1, 1)), "with a time zone"),  # noqa: DTZ001
        (lambda: sleep(until="tomorrow"), "with a time zone"),  # type: ignore[arg-type]
        (lambda: nested("x", Saga), "give an instance"),  # type: ignore[arg-type]
        (lambda: nested("x", INNER, data={}), "must be a function of the state"),  # type: ignore[arg-type]
        (lambda: nested("x", INNER, deadline="x"), "is not a duration"),
        (lambda: Saga("t", sleep(1), sleep(2)), "two steps named 'sleep': name them"),
        (lambda: Saga("t", wait_for("a"), step("a", "d")), "two steps named 'a'"),
    ],
)
def test_parts_that_cannot_be(make: Any, complaint: str) -> None:
    with pytest.raises((ConfigurationError, InvalidCommandError), match=complaint):
        make()


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (StepSignal(""), "signal '' is not valid"),
        (StepSignal("x", deadline="soon"), "is not a duration"),
        (StepSleep(), "a duration or until="),
        (StepSleep(until=datetime(2030, 1, 1)), "with a time zone"),  # noqa: DTZ001
        (StepUndo(), "must return a StepCommand, StepSignal, StepSleep or StepProcess"),
        (None, "must return a StepCommand, StepSignal, StepSleep or StepProcess"),
    ],
)
def test_steps_that_cannot_be(command: Any, complaint: str) -> None:
    with pytest.raises(PermanentCommandError, match=complaint) as found:
        Harness(Plain(build_command=lambda *_: command)).start()
    assert found.value.code == "INVALID_STEP"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (StepSleep(timedelta(1)), "must return a StepCommand or StepUndo"),
        (StepUndo(), "step 1 was no nested process"),
    ],
)
def test_compensations_that_cannot_be(command: Any, complaint: str) -> None:
    harness = Harness(Plain(compensation=lambda *_: command, build_command=lambda *_: StepCommand("d", "x")))
    harness.start()
    harness.answer("a")
    with pytest.raises(PermanentCommandError, match=complaint):
        harness.answer("b", "FAILED")


@pytest.mark.parametrize("event", ["wake", "undo", "reply"])
def test_a_message_about_a_step_must_name_it(event: str) -> None:
    with pytest.raises(MalformedMessageError, match=f"a {event} names no step"):
        read_message({"event": event})
