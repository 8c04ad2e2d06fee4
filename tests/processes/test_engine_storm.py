"""Any saga bears anything: hypothesis writes sagas and messages, and the engine keeps to its rules."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commandbus import (
    Saga,
    branch,
    parallel,
    sequence,
    step,
)
from commandbus.model.process import ProcessStatus, StepStatus
from commandbus.processes.manager import ProcessView
from commandbus.processes.messages import MalformedMessageError, Message, read_message
from commandbus.processes.moves import Advance
from commandbus.processes.saga import Branch, Chain, Parallel, Part, Step
from support.engine_harness import Harness, wide

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ALMOST = st.fixed_dictionaries(
    {},
    optional={
        "event": st.sampled_from(["start", "reply", "deadline", "retry"]) | JSON,
        "step": st.integers(-2, 9) | JSON,
        "reply": st.fixed_dictionaries(
            {},
            optional={
                "outcome": st.sampled_from(["SUCCESS", "FAILED", "CANCELED"]) | JSON,
                "result": JSON,
                "error": JSON | st.fixed_dictionaries({"message": JSON, "code": JSON, "type": JSON}),
            },
        )
        | JSON,
    },
)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(data=JSON | ALMOST, started=st.booleans())
def test_any_json_is_a_message_or_malformed_and_moves_a_process_by_the_rules(data: Any, started: bool) -> None:
    storm = Storm(wide())
    harness = storm.harness
    if started:
        harness.start()
    try:
        message = read_message(data)
    except MalformedMessageError:
        return
    before = copy.deepcopy(harness.view)
    made = harness.tell(message)
    storm.assert_rules(before, made)
    assert made.changes or harness.view == before
    assert json.dumps(dataclasses.asdict(harness.view), default=str)


# --- any saga, any disturbance ----------------------------------------------------------------------------------


@st.composite
def sagas(draw: st.DrawFn) -> Saga:
    """Up to seven steps, in rows, side by side and in branches; some cannot be undone."""
    names = iter("abcdefg")
    room = [draw(st.integers(1, 7))]

    def part(depth: int) -> Part:
        kind = draw(st.sampled_from(["step", "step", "sequence", "parallel", "branch"])) if depth else "step"
        if kind == "step" or room[0] <= 1:
            return leaf()
        if kind == "branch":
            key = draw(st.sampled_from(["yes", "no"]))
            then = part(depth - 1)
            other = part(depth - 1) if room[0] > 0 and draw(st.booleans()) else None
            return branch(lambda state, key=key: state[key], then, other)  # type: ignore[misc]
        return (sequence if kind == "sequence" else parallel)(*parts(depth - 1))

    def leaf() -> Part:
        room[0] -= 1
        name = next(names)
        return step(name, "d", undo=f"un{name}" if draw(st.booleans()) else None)

    def parts(depth: int) -> list[Part]:
        return [part(depth) for _ in range(draw(st.integers(1, 3))) if room[0] > 0] or [leaf()]

    return Saga("any", *parts(3))


class Storm:
    """Messages in any order, as often as they like."""

    def __init__(self, saga: Saga) -> None:
        self.harness = Harness(saga, {"yes": True, "no": False})
        self.saga = saga

    def blow(self, data: st.DataObject) -> None:
        kinds = [
            "reply",
            "reply",
            "reply",
            "late",
            "unknown",
            "deadline",
            "step deadline",
            "start",
            "retry message",
        ]
        kinds += ["cancel", "retry"]
        view, before = self.harness.view, copy.deepcopy(self.harness.view)
        kind = data.draw(st.sampled_from(kinds))
        number = data.draw(st.integers(1, len(view.steps) + 1))
        made: Advance | None = None
        if kind == "reply" and view.outstanding:
            one = data.draw(st.sampled_from(view.outstanding))
            made = self.harness.reply(one.number, data.draw(OUTCOME), {"n": one.number})
            assert made.changes != view.status.is_final
        elif kind in ("late", "unknown"):
            known = [one.number for one in view.steps if one.status is not StepStatus.SENT]
            number = data.draw(st.sampled_from(known)) if kind == "late" and known else len(view.steps) + 1
            made = self.harness.reply(number, data.draw(OUTCOME))
            assert made.aside is not None
        elif kind == "deadline" and view.steps:
            made = self.harness.deadline()
        elif kind == "step deadline":
            made = self.harness.deadline(number)
        elif kind == "start":
            made = self.harness.start()
        elif kind == "retry message" and view.steps:
            made = self.harness.tell(Message("retry"))
        elif kind == "cancel" and not view.status.is_final and not view.is_compensating:
            self.harness.request_cancel()
        elif kind == "retry" and view.status is ProcessStatus.FAILED:
            made = self.harness.retry()
            assert made.changes
        if made is not None:
            self.assert_rules(before, made)

    def assert_rules(self, before: ProcessView[Any], made: Advance) -> None:
        view = self.harness.view
        if before.status.is_final and before.status is not ProcessStatus.FAILED:
            assert view == before, "a finished process never moves"
        if made.aside is not None:
            assert (made.sends, made.closed, made.cancels) == ([], [], [])
        forwards = [one for one in view.outstanding if one.undoes is None]
        backwards = [one for one in view.outstanding if one.undoes is not None]
        assert not (forwards and backwards), "nothing is undone while a step is outstanding"
        assert len(backwards) <= 1, "one at a time"
        if view.is_compensating or before.cancel is not None:
            assert all(one.step.undoes is not None for one in made.sends), "nothing goes forwards any more"
        if view.status.is_final:
            assert not view.outstanding
        else:
            assert view.outstanding or not view.steps, "something will move it"
        assert [one.number for one in view.steps] == list(range(1, len(view.steps) + 1))
        self.assert_undone(is_complete=False)

    def assert_undone(self, *, is_complete: bool) -> None:
        view = self.harness.view
        undone = [one.undoes for one in sorted(view.steps, key=lambda one: one.closed or 0)
                  if one.undoes is not None and one.status is StepStatus.COMPLETED]  # fmt: skip
        assert all(count == 1 for count in Counter(undone).values()), "each exactly once"
        to_undo = [one.number for one in reversed(view.done()) if self.saga.compensation(one.name, view.state)]
        assert undone == to_undo[: len(undone)], "the last one first"
        if is_complete:
            assert undone == to_undo

    def calm(self) -> None:
        """Everything succeeds from now on, and people retry: it comes to its end."""
        for _ in range(100):
            view, before = self.harness.view, copy.deepcopy(self.harness.view)
            if view.status is ProcessStatus.FAILED:
                made = self.harness.retry()
            elif view.status.is_final:
                break
            elif view.outstanding:
                made = self.harness.reply(view.outstanding[0].number)
            else:
                made = self.harness.start()
            assert made.changes
            self.assert_rules(before, made)

    def assert_ended(self) -> None:
        """Either every step was done, or every step that was done is undone."""
        view = self.harness.view
        if view.status is ProcessStatus.COMPLETED:
            assert not any(one.undoes for one in view.steps)
            assert view.cancel is None
            expected = Counter(_taken(self.saga._whole, view.state))
            assert Counter(one.name for one in view.done()) == expected, "every step of the way taken, once"
        else:
            assert view.status in (ProcessStatus.COMPENSATED, ProcessStatus.CANCELED)
            assert (view.status is ProcessStatus.CANCELED) == (view.cancel is not None)
            self.assert_undone(is_complete=True)
        _assert_order(self.saga._whole, self.harness.log)


OUTCOME = st.sampled_from(["SUCCESS", "SUCCESS", "FAILED", "CANCELED"])


def _taken(part: Part, state: Mapping[str, Any]) -> list[str]:
    """The steps of the way that the branches took."""
    if isinstance(part, Step):
        return [part.name]
    if isinstance(part, Branch):
        return _taken(part.then if state[part.name] else part.otherwise, state)
    return [name for one in part.parts for name in _taken(one, state)]


def _names(part: Part) -> set[str]:
    if isinstance(part, Step):
        return {part.name}
    if isinstance(part, Branch):
        return _names(part.then) | _names(part.otherwise)
    return {name for one in part.parts for name in _names(one)}


def _assert_order(part: Part, log: list[tuple[str, str]]) -> None:
    """Of parts that follow each other none begins before the one before it has ended."""
    if isinstance(part, Branch):
        _assert_order(part.then, log)
        _assert_order(part.otherwise, log)
    elif isinstance(part, Chain | Parallel):
        for one in part.parts:
            _assert_order(one, log)
    if isinstance(part, Chain):
        for first, second in zip(part.parts, part.parts[1:], strict=False):
            begins = [n for n, (event, name) in enumerate(log) if event == "sent" and name in _names(second)]
            ends = [n for n, (event, name) in enumerate(log) if event == "closed" and name in _names(first)]
            assert not begins or not ends or max(ends) < min(begins)


@settings(
    max_examples=600, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(saga=sagas(), moves=st.integers(0, 30), data=st.data())
def test_any_saga_bears_anything(saga: Saga, moves: int, data: st.DataObject) -> None:
    storm = Storm(saga)
    for _ in range(moves):
        storm.blow(data)
    storm.calm()
    storm.assert_ended()
