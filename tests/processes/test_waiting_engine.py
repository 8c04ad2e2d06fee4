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
from support.engine_desk import Desk, Plain


def approved(**options: Any) -> Saga:
    return Saga("t", step("a", "d", undo="undo_a"), wait_for("ok", **options), step("z", "d"))


def waiting(saga: Saga) -> Desk:
    """A process that waits for its signal."""
    desk = Desk(saga)
    desk.start()
    desk.answer("a")
    assert desk.sent() == ["ok"]
    return desk


def over(desk: Desk, number: int = 2, **details: Any) -> None:
    desk.tell(Message("deadline", number, details=details))


# --- signals ----------------------------------------------------------------------------------------------------


def test_a_signal_is_the_result_of_the_step_that_waits_for_it() -> None:
    desk = waiting(approved())
    made = desk.signal("ok", {"by": "ann"})
    assert made.taken == {2: 1}
    assert desk.view.state["ok"] == {"by": "ann"}
    assert desk.sent() == ["z"]
    assert desk.view.result_of("ok") == {"by": "ann"}


def test_a_signal_that_comes_first_is_taken_when_the_wait_begins() -> None:
    desk = Desk(approved(deadline="2d"))
    early = desk.send_signal("ok", 1)
    assert desk.tell(early).touches
    desk.start()
    made = desk.answer("a")
    assert made.taken == {2: 1}
    assert desk.sent() == ["z"]
    assert desk.tell(early).aside == "a step has taken the signal already"


def test_signals_of_one_name_are_taken_in_their_order_and_each_once() -> None:
    saga = Saga("t", wait_for("ok", name="first"), wait_for("ok", name="second"), wait_for("ok", name="third"))
    desk = Desk(saga)
    messages = [desk.send_signal("ok", n) for n in (1, 2)]
    desk.start()
    assert desk.view.state == {"first": 1, "second": 2}
    assert [desk.tell(message).aside for message in messages] == ["a step has taken the signal already"] * 2
    desk.signal("ok", 3)
    assert (desk.status, desk.view.state["third"]) == ("COMPLETED", 3)


def test_a_handled_signal_is_not_the_one_that_is_taken_but_the_oldest_is() -> None:
    desk = waiting(approved())
    desk.send_signal("ok", "old")
    desk.tell(desk.send_signal("ok", "new"))
    assert desk.view.state["ok"] == "old"


def test_a_thousand_signals_that_came_early_need_no_deep_stack() -> None:
    class Counting(Plain):
        def build_command(self, step: str, state: Any) -> Any:
            return StepSignal("go")

        def update_state(self, step: str, reply: Any, state: Any) -> None:
            state["n"] = state.get("n", 0) + 1

        def next_step(self, step: str, reply: Any, state: Any) -> Any:
            return "a" if state["n"] < 3000 else None

    desk = Desk(Counting())
    for n in range(3000):
        desk.send_signal("go", n)
    desk.start()
    assert (desk.status, desk.view.state) == ("COMPLETED", {"n": 3000})


def test_parallel_waits_take_one_signal_each() -> None:
    saga = Saga("t", parallel(wait_for("ok", name="x"), wait_for("ok", name="y"), step("a", "d")))
    desk = Desk(saga)
    desk.send_signal("ok", 1)
    desk.start()
    assert desk.sent() == ["y", "a"]
    assert desk.signal("other").touches
    desk.signal("ok", 2)
    desk.answer("a")
    assert (desk.status, desk.view.state["x"], desk.view.state["y"]) == ("COMPLETED", 1, 2)


def test_without_a_signal_the_step_fails_and_the_process_is_undone() -> None:
    desk = waiting(approved(deadline="2d"))
    over(desk)
    assert desk.sent() == ["-a"]
    assert desk.view.failure == {
        "type": "DeadlineExceeded", "code": "DEADLINE_EXCEEDED", "step": "ok",
        "message": "step 2 (ok) failed: no signal 'ok' came in time",
    }  # fmt: skip
    late = desk.signal("ok")
    assert late.aside == "the process is undone: no step will take the signal"
    desk.drain()
    assert desk.status == "COMPENSATED"


def test_without_a_signal_it_may_go_on() -> None:
    saga = approved(deadline="2d", on_timeout="continue", otherwise={"by": None})
    desk = waiting(saga)
    over(desk, on_timeout="continue", otherwise={"by": None})
    assert (desk.sent(), desk.view.state["ok"]) == (["z"], {"by": None})
    assert desk.signal("ok").touches, "it is kept for a later wait"


def test_a_signal_that_is_there_wins_over_the_deadline() -> None:
    desk = waiting(approved(deadline="2d"))
    message = desk.send_signal("ok", 1)
    over(desk)
    assert desk.sent() == ["z"]
    assert desk.tell(message).aside == "a step has taken the signal already"
    over(desk)
    assert desk.sent() == ["z"], "the deadline of a step that has ended"


def test_a_failed_wait_is_begun_again_by_a_retry() -> None:
    desk = Desk(Saga("t", wait_for("ok", deadline=1)))
    desk.start()
    over(desk, 1)
    assert desk.status == "FAILED"
    desk.send_signal("ok", 7)
    desk.retry()
    assert (desk.status, desk.view.state) == ("COMPLETED", {"ok": 7})


def test_a_signal_that_came_while_it_was_failed_is_found_by_the_retry() -> None:
    desk = waiting(approved())
    desk.view.status = ProcessStatus.FAILED  # somebody ended another message
    assert desk.signal("ok", 7).aside == "the process is FAILED, and that is final"
    desk.retry()
    assert desk.sent() == ["z"]


def test_a_wait_in_a_branch_and_a_sequence() -> None:
    saga = Saga(
        "t",
        branch(lambda s: s["big"], sequence(sleep("1h"), wait_for("ok")), step("b", "d")),
        step("z", "d"),
    )
    desk = Desk(saga, {"big": True})
    desk.start()
    desk.wake()
    desk.signal("ok")
    assert desk.sent() == ["z"]


# --- sleeps -----------------------------------------------------------------------------------------------------


def test_a_sleep_ends_once_and_leaves_nothing_in_the_state() -> None:
    desk = Desk(Saga("t", sleep(lambda s: s["hours"] * 3600), step("z", "d")), {"hours": 2})
    made = desk.start()
    assert made.sends[0].command == StepSleep(7200)
    desk.wake()
    assert (desk.sent(), desk.view.state) == (["z"], {"hours": 2})
    assert desk.tell(Message("wake", 1)).aside == "step 1 does not sleep any more"
    assert desk.tell(Message("wake", 2)).aside == "step 2 does not sleep any more"


def test_a_canceled_process_stops_waiting_at_once() -> None:
    desk = Desk(Saga("t", step("a", "d", undo="undo_a"), parallel(sleep("3d"), wait_for("ok"), step("b", "d"))))
    desk.start()
    desk.answer("a")
    desk.request_cancel()
    made = desk.tell(Message("cancel"))
    assert [one.name for one, _ in made.cancels] == ["b"]
    assert desk.sent() == ["b"], "the others have ended"
    assert desk.view.steps[1].error["message"] == "the process is undone: canceled by ann"  # type: ignore[index]
    assert desk.tell(Message("cancel")).aside == "the process is being undone already"
    desk.answer("b", "CANCELED")
    desk.drain()
    assert desk.status == "CANCELED"


def test_a_step_that_fails_ends_the_waits_beside_it() -> None:
    desk = Desk(Saga("t", parallel(sleep("3d"), wait_for("ok"), step("b", "d"))))
    desk.start()
    desk.answer("b", "FAILED")
    assert desk.status == "FAILED"
    desk.retry()
    assert desk.sent() == ["sleep", "ok", "b"]


# --- nested processes -------------------------------------------------------------------------------------------

INNER = Saga("inner", step("i", "d", undo="undo_i"), step("j", "d", undo="undo_j"))
OUTER = Saga("outer", step("a", "d", undo="undo_a"), nested("in", INNER, deadline="1h"), step("z", "d"))


def test_a_nested_process_is_a_step() -> None:
    desk = Desk(OUTER, {"n": 1})
    desk.start()
    made = desk.answer("a", result=5)
    assert made.sends[0].command == StepProcess(INNER, {"n": 1, "a": 5}, deadline="1h")
    assert desk.view.outstanding[0].kind == "process"
    desk.answer("in", result={"i": 1})
    assert desk.view.state["in"] == {"i": 1}
    desk.answer("z", "FAILED")
    assert desk.sent() == ["-in"]
    assert desk.look(Message("deadline")).aside is not None
    desk.drain()
    assert desk.status == "COMPENSATED"
    assert desk.log[-3:] == [("undone", "in"), ("undo", "a"), ("undone", "a")]


def test_a_canceled_parent_cancels_its_nested_process_and_waits_for_it() -> None:
    desk = Desk(OUTER)
    desk.start()
    desk.answer("a")
    desk.request_cancel()
    made = desk.tell(Message("cancel"))
    assert [one.name for one, _ in made.cancels] == ["in"]
    assert desk.sent() == ["in"], "it undoes its own steps first"
    desk.answer("in", "CANCELED")
    assert desk.sent() == ["-a"]


def test_a_nested_process_is_not_undone_if_it_is_said_so() -> None:
    desk = Desk(Saga("t", nested("in", "inner", undo=False), step("z", "d")))
    desk.start()
    desk.answer("in")
    desk.answer("z", "FAILED")
    assert desk.status == "FAILED"


def test_a_nested_process_is_canceled_by_a_message() -> None:
    desk = Desk(INNER)
    desk.view.parent_step = 2
    desk.tell(Message("cancel", details={"by": "process p", "reason": "why"}))
    assert (desk.status, desk.hooks) == ("CANCELED", ["on_canceled"])
    assert desk.view.cancel == {"by": "process p", "reason": "why", "at": None}
    assert desk.start().aside is not None


def test_a_nested_process_that_completed_is_undone() -> None:
    desk = Desk(INNER)
    desk.view.parent_step = 2
    desk.start()
    desk.drain()
    assert desk.status == "COMPLETED"
    undo = read_message({"event": "undo", "step": 4, "by": "process 'p'"})
    desk.tell(undo)
    assert (desk.sent(), desk.view.parent_step) == (["-j"], -4)
    assert desk.view.failure == {
        "type": "ParentUndone", "code": "PARENT_UNDONE",
        "message": "process 'p' is undone, and this nested process with it",
    }  # fmt: skip
    assert desk.tell(undo).aside is not None
    desk.answer("j", "CANCELED")
    assert desk.status == "FAILED", "somebody gave the compensation up"
    desk.tell(undo)
    assert desk.sent() == ["-j"]
    desk.drain()
    assert (desk.status, desk.hooks[-2:]) == ("COMPENSATED", ["on_failed", "on_compensated"])
    assert not desk.tell(undo).sends
    assert desk.status == "COMPENSATED"


def test_a_nested_process_without_compensations_counts_as_undone() -> None:
    desk = Desk(Saga("t", step("a", "d")))
    desk.view.parent_step = 1
    desk.start()
    desk.drain()
    desk.tell(Message("undo", 3))
    assert desk.status == "COMPENSATED"


def test_a_process_that_is_not_nested_cannot_be_undone() -> None:
    desk = Desk(INNER)
    desk.start()
    desk.drain()
    assert "only a nested process" in str(desk.tell(Message("undo", 3)).aside)
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
        Desk(Plain(build_command=lambda *_: command)).start()
    assert found.value.code == "INVALID_STEP"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (StepSleep(timedelta(1)), "must return a StepCommand or StepUndo"),
        (StepUndo(), "step 1 was no nested process"),
    ],
)
def test_compensations_that_cannot_be(command: Any, complaint: str) -> None:
    desk = Desk(Plain(compensation=lambda *_: command, build_command=lambda *_: StepCommand("d", "x")))
    desk.start()
    desk.answer("a")
    with pytest.raises(PermanentCommandError, match=complaint):
        desk.answer("b", "FAILED")


@pytest.mark.parametrize("event", ["wake", "undo", "reply"])
def test_a_message_about_a_step_must_name_it(event: str) -> None:
    with pytest.raises(MalformedMessageError, match=f"a {event} names no step"):
        read_message({"event": event})
