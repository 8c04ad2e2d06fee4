"""The engine alone, without a database: what a message does to a process, and what moves nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from commandbus import (
    Saga,
    StepCommand,
    branch,
    parallel,
    sequence,
    step,
)
from commandbus.model.process import FINAL, MOVES, ProcessStatus, StepStatus
from commandbus.processes.manager import ProcessView, StepReply, StepView
from commandbus.processes.messages import MalformedMessageError, Message, read_message
from support.engine_harness import Harness, Plain, order, wide

# --- forwards ---------------------------------------------------------------------------------------------------


def test_steps_follow_each_other_and_the_process_completes() -> None:
    harness = Harness(order(), {"order": 7})
    made = harness.start()
    assert [(one.step.number, one.step.name, one.step.undoes) for one in made.sends] == [(1, "reserve", None)]
    assert made.sends[0].command == StepCommand("stock", "reserve", {"order": 7})
    assert harness.status == "WAITING_FOR_REPLY"
    made = harness.answer("reserve", result={"place": 3})
    assert made.closed[0].result == {"place": 3}
    assert made.sends[0].command.data == {"order": 7, "reserve": {"place": 3}}
    harness.answer("charge")
    harness.answer("ship")
    assert harness.status == "COMPLETED"
    assert harness.hooks == ["on_started", "on_completed"]
    assert [one.closed for one in harness.view.steps] == [1, 2, 3]


def test_parallel_steps_are_joined() -> None:
    harness = Harness(wide())
    harness.start()
    harness.answer("reserve")
    assert harness.sent() == ["charge", "label"]
    assert harness.answer("label").sends == []
    assert harness.status == "WAITING_FOR_REPLY"
    harness.answer("charge")
    assert harness.sent() == ["ship"]


def test_a_sequence_inside_a_parallel_goes_on_by_itself() -> None:
    saga = Saga(
        "t",
        parallel(sequence(step("a", "d"), parallel(step("b", "d"), step("c", "d"))), step("x", "d")),
        step("end", "d"),
    )
    harness = Harness(saga)
    harness.start()
    assert harness.sent() == ["a", "x"]
    harness.answer("a")
    assert harness.sent() == ["x", "b", "c"]
    harness.answer("c")
    harness.answer("b")
    assert harness.sent() == ["x"]
    harness.answer("x")
    assert harness.sent() == ["end"]


@pytest.mark.parametrize(("gift", "way"), [(True, "wrap"), (False, "bill")])
def test_a_branch_takes_one_way(gift: bool, way: str) -> None:
    saga = Saga(
        "t",
        step("pack", "d"),
        branch(lambda s: s["pack"]["gift"], step("wrap", "d"), step("bill", "d")),
        step("z", "d"),
    )
    harness = Harness(saga)
    harness.start()
    harness.answer("pack", result={"gift": gift})
    assert harness.sent() == [way]
    assert harness.view.state["branch:wrap"] is gift
    harness.drain()
    assert [one.name for one in harness.view.done()] == ["pack", way, "z"]


def test_a_branch_is_decided_once() -> None:
    """What later steps do to the state does not change the way that was taken."""
    asked: list[bool] = []

    def condition(state: dict[str, Any]) -> bool:
        asked.append("b" not in state)
        return asked[-1]

    saga = Saga("t", branch(condition, sequence(step("a", "d"), step("b", "d")), step("c", "d")), step("z", "d"))
    harness = Harness(saga)
    harness.start()
    harness.drain()
    assert [one.name for one in harness.view.done()] == ["a", "b", "z"]
    assert asked == [True]


def test_a_branch_within_a_branch_is_asked_for_itself() -> None:
    inner = branch(lambda s: s["a"], step("x", "d"), step("y", "d"))
    harness = Harness(
        Saga("t", branch(lambda s: s["b"], sequence(inner), step("z", "d"))), {"a": False, "b": True}
    )
    harness.start()
    assert harness.sent() == ["y"]


def test_a_branch_without_another_way_is_skipped() -> None:
    harness = Harness(Saga("t", branch(lambda s: False, step("a", "d")), step("b", "d")))
    harness.start()
    assert harness.sent() == ["b"]


def test_a_process_with_nothing_to_do_completes_at_once() -> None:
    harness = Harness(Saga("t", branch(lambda s: False, step("a", "d"))))
    harness.start()
    assert harness.status == "COMPLETED"
    harness = Harness(Plain(first_step=lambda state: None))
    harness.start()
    assert harness.status == "COMPLETED"
    assert harness.hooks == ["on_started", "on_completed"]


def test_a_manager_may_begin_with_several_steps_and_is_asked_once_for_what_follows() -> None:
    asked: list[str] = []

    def next_step(step: str, reply: StepReply, state: Any) -> Any:
        asked.append(step)
        return ("c", "d") if step == "b" else None

    harness = Harness(Plain(first_step=lambda state: ["a", "b"], next_step=next_step))
    harness.start()
    harness.answer("a")
    assert asked == []
    harness.answer("b")
    assert harness.sent() == ["c", "d"]
    harness.answer("d")
    harness.answer("c")
    assert asked == ["b", "c"]
    assert harness.status == "COMPLETED"


def test_the_state_may_be_replaced() -> None:
    harness = Harness(Plain(update_state=lambda step, reply, state: {**state, "last": step}))
    harness.start()
    harness.answer("a")
    assert harness.view.state == {"last": "a"}


def test_a_process_that_was_cancelled_before_it_started_does_nothing() -> None:
    harness = Harness(order())
    harness.request_cancel()
    harness.start()
    assert (harness.status, harness.view.steps, harness.hooks) == ("CANCELED", [], ["on_canceled"])


# --- backwards --------------------------------------------------------------------------------------------------


def test_a_failed_step_undoes_what_was_done_one_at_a_time_in_reverse() -> None:
    harness = Harness(order())
    harness.start()
    harness.answer("reserve")
    harness.answer("charge")
    made = harness.answer("ship", "FAILED")
    assert harness.sent() == ["-charge"]
    assert made.sends[0].command.command_type == "refund"
    assert harness.status == "COMPENSATING"
    harness.answer("charge")
    assert harness.sent() == ["-reserve"]
    harness.answer("reserve")
    assert harness.status == "COMPENSATED"
    assert harness.view.failure is not None
    assert harness.view.failure["step"] == "ship"
    assert harness.hooks == ["on_started", "on_compensating", "on_compensated"]
    assert [(one.undoes, one.number) for one in harness.view.steps if one.undoes] == [(2, 4), (1, 5)]


def test_the_order_of_undoing_is_that_of_the_replies() -> None:
    harness = Harness(wide())
    harness.start()
    harness.answer("reserve")
    harness.answer("label")
    harness.answer("charge")
    harness.answer("ship", "FAILED")
    harness.drain()
    assert [name for event, name in harness.log if event == "undo"] == ["charge", "label", "reserve"]


def test_siblings_are_cancelled_and_awaited_before_anything_is_undone() -> None:
    harness = Harness(wide())
    harness.start()
    harness.answer("reserve")
    made = harness.answer("label", "FAILED")
    assert [
        (one.name, why.startswith("the process is undone: step 3 (label) failed")) for one, why in made.cancels
    ] == [("charge", True)]
    assert (harness.status, harness.sent()) == ("COMPENSATING", ["charge"])
    harness.answer("charge", "CANCELED")
    assert harness.sent() == ["-reserve"]


def test_a_sibling_that_completes_all_the_same_is_undone() -> None:
    harness = Harness(wide())
    harness.start()
    harness.answer("reserve")
    harness.answer("label", "FAILED")
    harness.answer("charge")
    assert harness.sent() == ["-charge"]
    harness.drain()
    assert harness.status == "COMPENSATED"


def test_the_first_failure_is_the_one_that_is_told() -> None:
    harness = Harness(wide())
    harness.start()
    harness.answer("reserve")
    harness.answer("label", "FAILED")
    harness.answer("charge", "FAILED")
    assert harness.view.failure is not None
    assert harness.view.failure["step"] == "label"


def test_the_failure_says_what_the_step_said() -> None:
    harness = Harness(order())
    harness.start()
    harness.reply(1, "FAILED", error={"type": "NoStock", "code": "NO_STOCK", "message": "shelf 7 is empty"})
    assert harness.view.failure == {
        "type": "NoStock",
        "code": "NO_STOCK",
        "message": "step 1 (reserve) failed: shelf 7 is empty",
        "step": "reserve",
    }


def test_steps_that_cannot_be_undone_are_left() -> None:
    saga = Saga("t", step("a", "d", undo="a2"), step("b", "d"), step("c", "d", undo="c2"), step("z", "d"))
    harness = Harness(saga)
    harness.start()
    harness.drain(z="FAILED")
    assert [name for event, name in harness.log if event == "undo"] == ["c", "a"]
    assert harness.status == "COMPENSATED"


def test_with_nothing_to_undo_it_is_failed_and_goes_on_from_the_failed_step() -> None:
    harness = Harness(order())
    harness.start()
    harness.answer("reserve", "CANCELED")
    assert (harness.status, harness.view.is_compensating) == ("FAILED", False)
    assert harness.hooks == ["on_started", "on_compensating", "on_failed"]
    harness.retry()
    assert harness.view.failure is None
    assert [(one.number, one.name) for one in harness.view.outstanding] == [(2, "reserve")]
    harness.drain()
    assert harness.status == "COMPLETED"


def test_a_retry_sends_every_parallel_step_that_did_not_complete() -> None:
    saga = Saga("t", step("a", "d"), parallel(step("b", "d"), step("c", "d"), step("e", "d")), step("z", "d"))
    harness = Harness(saga)
    harness.start()
    harness.answer("a")
    harness.answer("e")
    harness.answer("b", "FAILED")
    harness.answer("c", "CANCELED")
    assert harness.status == "FAILED"
    harness.retry()
    assert harness.sent() == ["b", "c"]
    harness.answer("b", "FAILED")
    harness.answer("c")
    harness.retry()
    assert harness.sent() == ["b"]
    harness.answer("b")
    assert harness.sent() == ["z"]


def test_a_compensation_that_cannot_be_done_fails_the_process_and_a_retry_goes_on_with_it() -> None:
    harness = Harness(order())
    harness.start()
    harness.answer("reserve")
    harness.answer("charge")
    harness.answer("ship", "FAILED")
    harness.answer("charge", "CANCELED")
    assert (harness.status, harness.view.is_compensating) == ("FAILED", True)
    assert harness.view.failure is not None
    assert "the compensation of step 2 (charge) was canceled" in harness.view.failure["message"]
    harness.retry()
    assert harness.sent() == ["-charge"]
    harness.drain()
    assert harness.status == "COMPENSATED"
    assert [name for event, name in harness.log if event == "undo"] == ["charge", "charge", "reserve"]


# --- canceled --------------------------------------------------------------------------------------------------


def test_a_cancelled_process_is_undone_and_ends_canceled() -> None:
    harness = Harness(order())
    harness.start()
    harness.answer("reserve")
    harness.request_cancel()
    harness.answer("charge", "CANCELED")
    assert (harness.status, harness.sent()) == ("COMPENSATING", ["-reserve"])
    harness.drain()
    assert harness.status == "CANCELED"
    assert harness.hooks[-1] == "on_canceled"


def test_nothing_is_sent_after_the_request_even_if_the_step_completes() -> None:
    harness = Harness(order())
    harness.start()
    harness.request_cancel()
    made = harness.answer("reserve")
    assert harness.sent() == ["-reserve"]
    assert [one.step.undoes for one in made.sends] == [1]


def test_nothing_is_sent_forwards_if_the_request_overtakes_a_retry() -> None:
    harness = Harness(order())
    harness.start()
    harness.answer("reserve", "FAILED")
    harness._move(ProcessStatus.IN_PROGRESS)  # somebody retries it …
    harness.request_cancel()  # … and somebody else cancels it before the retry is handled
    harness.tell(Message("retry"))
    assert (harness.status, harness.sent()) == ("CANCELED", [])


# --- deadlines --------------------------------------------------------------------------------------------------


def test_the_deadline_of_a_step_cancels_it_and_its_reply_turns_the_process_round() -> None:
    harness = Harness(order())
    harness.start()
    harness.answer("reserve")
    made = harness.deadline(2)
    assert [one.name for one, _ in made.cancels] == ["charge"]
    assert (harness.status, made.sends) == ("WAITING_FOR_REPLY", [])
    harness.answer("charge", "CANCELED")
    assert harness.view.failure is not None
    assert harness.view.failure["code"] == "DEADLINE_EXCEEDED"
    harness.drain()
    assert harness.status == "COMPENSATED"


def test_the_deadline_of_a_step_that_ended_says_nothing() -> None:
    harness = Harness(order())
    harness.start()
    harness.answer("reserve")
    assert harness.deadline(1).aside is not None
    assert harness.deadline(9).aside is not None
    assert harness.sent() == ["charge"]


def test_a_process_that_waited_for_the_tsq_does_not_after_the_deadline_took_the_step_out_of_it() -> None:
    harness = Harness(order())
    harness.start()
    harness.view.status = ProcessStatus.WAITING_FOR_TSQ
    harness.deadline(1)
    assert harness.status == "WAITING_FOR_REPLY"
    harness = Harness(order())
    harness.start()
    harness.answer("reserve")
    harness.answer("charge", "FAILED")
    harness.view.status = ProcessStatus.WAITING_FOR_TSQ
    made = harness.deadline(3)
    assert [one.undoes for one, _ in made.cancels] == [1]
    assert harness.status == "COMPENSATING"


def test_the_deadline_of_the_process_undoes_it() -> None:
    harness = Harness(wide())
    harness.start()
    harness.answer("reserve")
    made = harness.deadline()
    assert [one.name for one, _ in made.cancels] == ["charge", "label"]
    assert harness.deadline().aside is not None
    harness.answer("charge", "CANCELED")
    harness.answer("label", "CANCELED")
    harness.drain()
    assert harness.status == "COMPENSATED"
    assert harness.view.failure is not None
    assert harness.view.failure["code"] == "DEADLINE_EXCEEDED"


def test_the_deadline_of_a_process_that_has_done_nothing_fails_it() -> None:
    harness = Harness(order())
    harness.start()
    harness.deadline()
    harness.answer("reserve", "CANCELED")
    assert harness.status == "FAILED"


# --- what moves nothing -----------------------------------------------------------------------------------------


def test_a_second_start_is_set_aside() -> None:
    harness = Harness(order())
    harness.start()
    assert harness.start().aside == "the process has been started already"


def test_a_reply_is_handled_once() -> None:
    harness = Harness(order())
    harness.start()
    harness.reply(1)
    for outcome in ("SUCCESS", "FAILED", "CANCELED"):
        assert (
            harness.reply(1, outcome).aside == "the reply to step 1 (reserve) was handled before: it is COMPLETED"
        )
    assert harness.sent() == ["charge"]


@pytest.mark.parametrize("number", [0, -1, 2, 2**40])
def test_a_reply_to_a_step_that_was_never_sent_is_set_aside(number: int) -> None:
    harness = Harness(order())
    harness.start()
    assert harness.reply(number).aside == f"the process has sent no step {number}"


@pytest.mark.parametrize("status", sorted(FINAL))
@pytest.mark.parametrize(
    "message",
    [Message("start"), Message("retry"), Message("deadline"), Message("deadline", 1),
     Message("reply", 1, StepReply("SUCCESS"))],
)  # fmt: skip
def test_nothing_moves_a_finished_process(status: ProcessStatus, message: Message) -> None:
    harness = Harness(order())
    harness.start()
    harness.view.status = status
    before = copy.deepcopy(harness.view)
    made = harness.tell(message)
    assert made.aside == f"the process is {status}, and that is final"
    assert (made.sends, made.closed, made.cancels) == ([], [], [])
    assert made.view == before


def test_a_retry_of_what_goes_on_changes_nothing() -> None:
    harness = Harness(order())
    harness.start()
    harness.tell(Message("retry"))
    assert (harness.status, harness.sent()) == ("WAITING_FOR_REPLY", ["reserve"])
    harness.answer("reserve")
    harness.answer("charge", "FAILED")
    harness.tell(Message("retry"))
    assert (harness.status, harness.sent()) == ("COMPENSATING", ["-reserve"])


@pytest.mark.parametrize("status", ["IN_PROGRESS", "COMPENSATING", "WAITING_FOR_TSQ"])
def test_a_retry_that_came_out_of_the_tsq_goes_on_with_the_compensation(status: str) -> None:
    """Whatever the process was called meanwhile: nothing is outstanding, so nothing else would move it."""
    harness = Harness(order())
    harness.start()
    harness.answer("reserve")
    harness.answer("charge", "FAILED")
    harness.answer("reserve", "CANCELED")
    harness.view.status = ProcessStatus(status)
    harness.tell(Message("retry"))
    assert harness.sent() == ["-reserve"]


def test_a_retry_of_a_process_that_never_began_begins_it() -> None:
    """Somebody had ended the message with which it was to start."""
    harness = Harness(order())
    harness.view.status = ProcessStatus.FAILED
    harness.retry()
    assert harness.sent() == ["reserve"]
    assert harness.hooks == ["on_started"]


def test_a_retry_while_replies_are_outstanding_waits_for_them() -> None:
    """Somebody had ended a timer, or a reply that is sent again beside."""
    harness = Harness(wide())
    harness.start()
    harness.answer("reserve")
    harness.view.status = ProcessStatus.FAILED
    made = harness.retry()
    assert (made.aside, harness.status, harness.sent()) == (None, "WAITING_FOR_REPLY", ["charge", "label"])
    harness.answer("charge", "FAILED")
    harness.view.status = ProcessStatus.FAILED
    made = harness.retry()
    assert (made.aside, harness.status, harness.sent()) == (None, "COMPENSATING", ["label"])


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (None, "is an object, not None"),
        ([1], "is an object, not"),
        ("start", "is an object, not 'start'"),
        ({}, "event None is none of start, reply, deadline, wake, signal, cancel, undo, retry"),
        ({"event": "stop"}, "event 'stop' is none of"),
        ({"event": ["start"]}, "is none of"),
        ({"event": {"a": 1}}, "is none of"),
        ({"event": "reply"}, "names no step"),
        ({"event": "reply", "step": "1"}, "step '1' is no number"),
        ({"event": "reply", "step": True}, "step True is no number"),
        ({"event": "reply", "step": 1.0}, "step 1.0 is no number"),
        ({"event": "deadline", "step": "x"}, "step 'x' is no number"),
        ({"event": "reply", "step": 1}, "outcome None is none of SUCCESS, FAILED, CANCELED"),
        ({"event": "reply", "step": 1, "reply": "SUCCESS"}, "outcome 'SUCCESS' is none of"),
        ({"event": "reply", "step": 1, "reply": {"outcome": "success"}}, "outcome 'success' is none of"),
        ({"event": "reply", "step": 1, "reply": {"outcome": None}}, "outcome None is none of"),
        ({"event": "reply", "step": 1, "reply": {"outcome": ["SUCCESS"]}}, "is none of"),
        ({"event": "reply", "step": 1, "reply": {"outcome": {}}}, "is none of"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_said_so(data: Any, complaint: str) -> None:
    with pytest.raises(MalformedMessageError, match=complaint):
        read_message(data)


def test_the_table_of_moves_is_whole() -> None:
    assert MOVES.keys() == set(ProcessStatus)
    for status in (ProcessStatus.COMPLETED, ProcessStatus.COMPENSATED, ProcessStatus.CANCELED):
        assert MOVES[status] == frozenset()


def test_the_views_of_a_process() -> None:
    view: ProcessView[Any] = ProcessView("p", "t", ProcessStatus.COMPENSATING, None, {})
    view.steps = [
        StepView(1, "a", None, StepStatus.COMPLETED, 2, "old"),
        StepView(2, "b", None, StepStatus.COMPLETED, 1),
        StepView(3, "a", None, StepStatus.COMPLETED, 3, "new"),
        StepView(4, "a", 3, StepStatus.COMPLETED, 4, "undone"),
        StepView(5, "b", 2),
    ]
    assert [one.number for one in view.done()] == [2, 1, 3]
    assert [one.number for one in view.outstanding] == [5]
    assert view.result_of("a") == "new"
    assert view.result_of("z") is None
