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
from support.engine_desk import Desk, Plain, order, wide

# --- forwards ---------------------------------------------------------------------------------------------------


def test_steps_follow_each_other_and_the_process_completes() -> None:
    desk = Desk(order(), {"order": 7})
    made = desk.start()
    assert [(one.step.number, one.step.name, one.step.undoes) for one in made.sends] == [(1, "reserve", None)]
    assert made.sends[0].command == StepCommand("stock", "reserve", {"order": 7})
    assert desk.status == "WAITING_FOR_REPLY"
    made = desk.answer("reserve", result={"place": 3})
    assert made.closed[0].result == {"place": 3}
    assert made.sends[0].command.data == {"order": 7, "reserve": {"place": 3}}
    desk.answer("charge")
    desk.answer("ship")
    assert desk.status == "COMPLETED"
    assert desk.hooks == ["on_started", "on_completed"]
    assert [one.closed for one in desk.view.steps] == [1, 2, 3]


def test_parallel_steps_are_joined() -> None:
    desk = Desk(wide())
    desk.start()
    desk.answer("reserve")
    assert desk.sent() == ["charge", "label"]
    assert desk.answer("label").sends == []
    assert desk.status == "WAITING_FOR_REPLY"
    desk.answer("charge")
    assert desk.sent() == ["ship"]


def test_a_sequence_inside_a_parallel_goes_on_by_itself() -> None:
    saga = Saga(
        "t",
        parallel(sequence(step("a", "d"), parallel(step("b", "d"), step("c", "d"))), step("x", "d")),
        step("end", "d"),
    )
    desk = Desk(saga)
    desk.start()
    assert desk.sent() == ["a", "x"]
    desk.answer("a")
    assert desk.sent() == ["x", "b", "c"]
    desk.answer("c")
    desk.answer("b")
    assert desk.sent() == ["x"]
    desk.answer("x")
    assert desk.sent() == ["end"]


@pytest.mark.parametrize(("gift", "way"), [(True, "wrap"), (False, "bill")])
def test_a_branch_takes_one_way(gift: bool, way: str) -> None:
    saga = Saga(
        "t",
        step("pack", "d"),
        branch(lambda s: s["pack"]["gift"], step("wrap", "d"), step("bill", "d")),
        step("z", "d"),
    )
    desk = Desk(saga)
    desk.start()
    desk.answer("pack", result={"gift": gift})
    assert desk.sent() == [way]
    assert desk.view.state["branch:wrap"] is gift
    desk.drain()
    assert [one.name for one in desk.view.done()] == ["pack", way, "z"]


def test_a_branch_is_decided_once() -> None:
    """What later steps do to the state does not change the way that was taken."""
    asked: list[bool] = []

    def condition(state: dict[str, Any]) -> bool:
        asked.append("b" not in state)
        return asked[-1]

    saga = Saga("t", branch(condition, sequence(step("a", "d"), step("b", "d")), step("c", "d")), step("z", "d"))
    desk = Desk(saga)
    desk.start()
    desk.drain()
    assert [one.name for one in desk.view.done()] == ["a", "b", "z"]
    assert asked == [True]


def test_a_branch_within_a_branch_is_asked_for_itself() -> None:
    inner = branch(lambda s: s["a"], step("x", "d"), step("y", "d"))
    desk = Desk(Saga("t", branch(lambda s: s["b"], sequence(inner), step("z", "d"))), {"a": False, "b": True})
    desk.start()
    assert desk.sent() == ["y"]


def test_a_branch_without_another_way_is_skipped() -> None:
    desk = Desk(Saga("t", branch(lambda s: False, step("a", "d")), step("b", "d")))
    desk.start()
    assert desk.sent() == ["b"]


def test_a_process_with_nothing_to_do_completes_at_once() -> None:
    desk = Desk(Saga("t", branch(lambda s: False, step("a", "d"))))
    desk.start()
    assert desk.status == "COMPLETED"
    desk = Desk(Plain(first_step=lambda state: None))
    desk.start()
    assert desk.status == "COMPLETED"
    assert desk.hooks == ["on_started", "on_completed"]


def test_a_manager_may_begin_with_several_steps_and_is_asked_once_for_what_follows() -> None:
    asked: list[str] = []

    def next_step(step: str, reply: StepReply, state: Any) -> Any:
        asked.append(step)
        return ("c", "d") if step == "b" else None

    desk = Desk(Plain(first_step=lambda state: ["a", "b"], next_step=next_step))
    desk.start()
    desk.answer("a")
    assert asked == []
    desk.answer("b")
    assert desk.sent() == ["c", "d"]
    desk.answer("d")
    desk.answer("c")
    assert asked == ["b", "c"]
    assert desk.status == "COMPLETED"


def test_the_state_may_be_replaced() -> None:
    desk = Desk(Plain(update_state=lambda step, reply, state: {**state, "last": step}))
    desk.start()
    desk.answer("a")
    assert desk.view.state == {"last": "a"}


def test_a_process_that_was_cancelled_before_it_started_does_nothing() -> None:
    desk = Desk(order())
    desk.request_cancel()
    desk.start()
    assert (desk.status, desk.view.steps, desk.hooks) == ("CANCELED", [], ["on_canceled"])


# --- backwards --------------------------------------------------------------------------------------------------


def test_a_failed_step_undoes_what_was_done_one_at_a_time_in_reverse() -> None:
    desk = Desk(order())
    desk.start()
    desk.answer("reserve")
    desk.answer("charge")
    made = desk.answer("ship", "FAILED")
    assert desk.sent() == ["-charge"]
    assert made.sends[0].command.command_type == "refund"
    assert desk.status == "COMPENSATING"
    desk.answer("charge")
    assert desk.sent() == ["-reserve"]
    desk.answer("reserve")
    assert desk.status == "COMPENSATED"
    assert desk.view.failure is not None
    assert desk.view.failure["step"] == "ship"
    assert desk.hooks == ["on_started", "on_compensating", "on_compensated"]
    assert [(one.undoes, one.number) for one in desk.view.steps if one.undoes] == [(2, 4), (1, 5)]


def test_the_order_of_undoing_is_that_of_the_replies() -> None:
    desk = Desk(wide())
    desk.start()
    desk.answer("reserve")
    desk.answer("label")
    desk.answer("charge")
    desk.answer("ship", "FAILED")
    desk.drain()
    assert [name for event, name in desk.log if event == "undo"] == ["charge", "label", "reserve"]


def test_siblings_are_cancelled_and_awaited_before_anything_is_undone() -> None:
    desk = Desk(wide())
    desk.start()
    desk.answer("reserve")
    made = desk.answer("label", "FAILED")
    assert [
        (one.name, why.startswith("the process is undone: step 3 (label) failed")) for one, why in made.cancels
    ] == [("charge", True)]
    assert (desk.status, desk.sent()) == ("COMPENSATING", ["charge"])
    desk.answer("charge", "CANCELED")
    assert desk.sent() == ["-reserve"]


def test_a_sibling_that_completes_all_the_same_is_undone() -> None:
    desk = Desk(wide())
    desk.start()
    desk.answer("reserve")
    desk.answer("label", "FAILED")
    desk.answer("charge")
    assert desk.sent() == ["-charge"]
    desk.drain()
    assert desk.status == "COMPENSATED"


def test_the_first_failure_is_the_one_that_is_told() -> None:
    desk = Desk(wide())
    desk.start()
    desk.answer("reserve")
    desk.answer("label", "FAILED")
    desk.answer("charge", "FAILED")
    assert desk.view.failure is not None
    assert desk.view.failure["step"] == "label"


def test_the_failure_says_what_the_step_said() -> None:
    desk = Desk(order())
    desk.start()
    desk.reply(1, "FAILED", error={"type": "NoStock", "code": "NO_STOCK", "message": "shelf 7 is empty"})
    assert desk.view.failure == {
        "type": "NoStock",
        "code": "NO_STOCK",
        "message": "step 1 (reserve) failed: shelf 7 is empty",
        "step": "reserve",
    }


def test_steps_that_cannot_be_undone_are_left() -> None:
    saga = Saga("t", step("a", "d", undo="a2"), step("b", "d"), step("c", "d", undo="c2"), step("z", "d"))
    desk = Desk(saga)
    desk.start()
    desk.drain(z="FAILED")
    assert [name for event, name in desk.log if event == "undo"] == ["c", "a"]
    assert desk.status == "COMPENSATED"


def test_with_nothing_to_undo_it_is_failed_and_goes_on_from_the_failed_step() -> None:
    desk = Desk(order())
    desk.start()
    desk.answer("reserve", "CANCELED")
    assert (desk.status, desk.view.is_compensating) == ("FAILED", False)
    assert desk.hooks == ["on_started", "on_compensating", "on_failed"]
    desk.retry()
    assert desk.view.failure is None
    assert [(one.number, one.name) for one in desk.view.outstanding] == [(2, "reserve")]
    desk.drain()
    assert desk.status == "COMPLETED"


def test_a_retry_sends_every_parallel_step_that_did_not_complete() -> None:
    saga = Saga("t", step("a", "d"), parallel(step("b", "d"), step("c", "d"), step("e", "d")), step("z", "d"))
    desk = Desk(saga)
    desk.start()
    desk.answer("a")
    desk.answer("e")
    desk.answer("b", "FAILED")
    desk.answer("c", "CANCELED")
    assert desk.status == "FAILED"
    desk.retry()
    assert desk.sent() == ["b", "c"]
    desk.answer("b", "FAILED")
    desk.answer("c")
    desk.retry()
    assert desk.sent() == ["b"]
    desk.answer("b")
    assert desk.sent() == ["z"]


def test_a_compensation_that_cannot_be_done_fails_the_process_and_a_retry_goes_on_with_it() -> None:
    desk = Desk(order())
    desk.start()
    desk.answer("reserve")
    desk.answer("charge")
    desk.answer("ship", "FAILED")
    desk.answer("charge", "CANCELED")
    assert (desk.status, desk.view.is_compensating) == ("FAILED", True)
    assert desk.view.failure is not None
    assert "the compensation of step 2 (charge) was canceled" in desk.view.failure["message"]
    desk.retry()
    assert desk.sent() == ["-charge"]
    desk.drain()
    assert desk.status == "COMPENSATED"
    assert [name for event, name in desk.log if event == "undo"] == ["charge", "charge", "reserve"]


# --- canceled --------------------------------------------------------------------------------------------------


def test_a_cancelled_process_is_undone_and_ends_canceled() -> None:
    desk = Desk(order())
    desk.start()
    desk.answer("reserve")
    desk.request_cancel()
    desk.answer("charge", "CANCELED")
    assert (desk.status, desk.sent()) == ("COMPENSATING", ["-reserve"])
    desk.drain()
    assert desk.status == "CANCELED"
    assert desk.hooks[-1] == "on_canceled"


def test_nothing_is_sent_after_the_request_even_if_the_step_completes() -> None:
    desk = Desk(order())
    desk.start()
    desk.request_cancel()
    made = desk.answer("reserve")
    assert desk.sent() == ["-reserve"]
    assert [one.step.undoes for one in made.sends] == [1]


def test_nothing_is_sent_forwards_if_the_request_overtakes_a_retry() -> None:
    desk = Desk(order())
    desk.start()
    desk.answer("reserve", "FAILED")
    desk._move(ProcessStatus.IN_PROGRESS)  # somebody retries it …
    desk.request_cancel()  # … and somebody else cancels it before the retry is handled
    desk.tell(Message("retry"))
    assert (desk.status, desk.sent()) == ("CANCELED", [])


# --- deadlines --------------------------------------------------------------------------------------------------


def test_the_deadline_of_a_step_cancels_it_and_its_reply_turns_the_process_round() -> None:
    desk = Desk(order())
    desk.start()
    desk.answer("reserve")
    made = desk.deadline(2)
    assert [one.name for one, _ in made.cancels] == ["charge"]
    assert (desk.status, made.sends) == ("WAITING_FOR_REPLY", [])
    desk.answer("charge", "CANCELED")
    assert desk.view.failure is not None
    assert desk.view.failure["code"] == "DEADLINE_EXCEEDED"
    desk.drain()
    assert desk.status == "COMPENSATED"


def test_the_deadline_of_a_step_that_ended_says_nothing() -> None:
    desk = Desk(order())
    desk.start()
    desk.answer("reserve")
    assert desk.deadline(1).aside is not None
    assert desk.deadline(9).aside is not None
    assert desk.sent() == ["charge"]


def test_a_process_that_waited_for_the_tsq_does_not_after_the_deadline_took_the_step_out_of_it() -> None:
    desk = Desk(order())
    desk.start()
    desk.view.status = ProcessStatus.WAITING_FOR_TSQ
    desk.deadline(1)
    assert desk.status == "WAITING_FOR_REPLY"
    desk = Desk(order())
    desk.start()
    desk.answer("reserve")
    desk.answer("charge", "FAILED")
    desk.view.status = ProcessStatus.WAITING_FOR_TSQ
    made = desk.deadline(3)
    assert [one.undoes for one, _ in made.cancels] == [1]
    assert desk.status == "COMPENSATING"


def test_the_deadline_of_the_process_undoes_it() -> None:
    desk = Desk(wide())
    desk.start()
    desk.answer("reserve")
    made = desk.deadline()
    assert [one.name for one, _ in made.cancels] == ["charge", "label"]
    assert desk.deadline().aside is not None
    desk.answer("charge", "CANCELED")
    desk.answer("label", "CANCELED")
    desk.drain()
    assert desk.status == "COMPENSATED"
    assert desk.view.failure is not None
    assert desk.view.failure["code"] == "DEADLINE_EXCEEDED"


def test_the_deadline_of_a_process_that_has_done_nothing_fails_it() -> None:
    desk = Desk(order())
    desk.start()
    desk.deadline()
    desk.answer("reserve", "CANCELED")
    assert desk.status == "FAILED"


# --- what moves nothing -----------------------------------------------------------------------------------------


def test_a_second_start_is_set_aside() -> None:
    desk = Desk(order())
    desk.start()
    assert desk.start().aside == "the process has been started already"


def test_a_reply_is_handled_once() -> None:
    desk = Desk(order())
    desk.start()
    desk.reply(1)
    for outcome in ("SUCCESS", "FAILED", "CANCELED"):
        assert desk.reply(1, outcome).aside == "the reply to step 1 (reserve) was handled before: it is COMPLETED"
    assert desk.sent() == ["charge"]


@pytest.mark.parametrize("number", [0, -1, 2, 2**40])
def test_a_reply_to_a_step_that_was_never_sent_is_set_aside(number: int) -> None:
    desk = Desk(order())
    desk.start()
    assert desk.reply(number).aside == f"the process has sent no step {number}"


@pytest.mark.parametrize("status", sorted(FINAL))
@pytest.mark.parametrize(
    "message",
    [Message("start"), Message("retry"), Message("deadline"), Message("deadline", 1),
     Message("reply", 1, StepReply("SUCCESS"))],
)  # fmt: skip
def test_nothing_moves_a_finished_process(status: ProcessStatus, message: Message) -> None:
    desk = Desk(order())
    desk.start()
    desk.view.status = status
    before = copy.deepcopy(desk.view)
    made = desk.tell(message)
    assert made.aside == f"the process is {status}, and that is final"
    assert (made.sends, made.closed, made.cancels) == ([], [], [])
    assert made.view == before


def test_a_retry_of_what_goes_on_changes_nothing() -> None:
    desk = Desk(order())
    desk.start()
    desk.tell(Message("retry"))
    assert (desk.status, desk.sent()) == ("WAITING_FOR_REPLY", ["reserve"])
    desk.answer("reserve")
    desk.answer("charge", "FAILED")
    desk.tell(Message("retry"))
    assert (desk.status, desk.sent()) == ("COMPENSATING", ["-reserve"])


@pytest.mark.parametrize("status", ["IN_PROGRESS", "COMPENSATING", "WAITING_FOR_TSQ"])
def test_a_retry_that_came_out_of_the_tsq_goes_on_with_the_compensation(status: str) -> None:
    """Whatever the process was called meanwhile: nothing is outstanding, so nothing else would move it."""
    desk = Desk(order())
    desk.start()
    desk.answer("reserve")
    desk.answer("charge", "FAILED")
    desk.answer("reserve", "CANCELED")
    desk.view.status = ProcessStatus(status)
    desk.tell(Message("retry"))
    assert desk.sent() == ["-reserve"]


def test_a_retry_of_a_process_that_never_began_begins_it() -> None:
    """Somebody had ended the message with which it was to start."""
    desk = Desk(order())
    desk.view.status = ProcessStatus.FAILED
    desk.retry()
    assert desk.sent() == ["reserve"]
    assert desk.hooks == ["on_started"]


def test_a_retry_while_replies_are_outstanding_waits_for_them() -> None:
    """Somebody had ended a timer, or a reply that is sent again beside."""
    desk = Desk(wide())
    desk.start()
    desk.answer("reserve")
    desk.view.status = ProcessStatus.FAILED
    made = desk.retry()
    assert (made.aside, desk.status, desk.sent()) == (None, "WAITING_FOR_REPLY", ["charge", "label"])
    desk.answer("charge", "FAILED")
    desk.view.status = ProcessStatus.FAILED
    made = desk.retry()
    assert (made.aside, desk.status, desk.sent()) == (None, "COMPENSATING", ["label"])


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
