"""Sagas that cannot be, and managers whose code says nonsense: each is told what is wrong, and nothing moves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from commandbus import (
    BaseProcessManager,
    ConfigurationError,
    InvalidCommandError,
    NewProcess,
    PermanentCommandError,
    Saga,
    StepCommand,
    branch,
    parallel,
    sequence,
    step,
)
from commandbus.processes.advance_and_compensate import advance
from commandbus.processes.manager import check_manager, check_new
from commandbus.processes.messages import Message
from commandbus.processes.saga import Part
from commandbus.worker.process_messages import _answer
from support.engine_harness import TX, Harness, Plain


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Saga("t"), "saga 't' has no steps"),
        (lambda: Saga("t", step("a", "d"), step("a", "d")), "saga 't' has two steps named 'a'"),
        (
            lambda: Saga("t", step("a", "d"), parallel(step("b", "d"), sequence(step("a", "e")))),
            "two steps named 'a'",
        ),
        (lambda: Saga("t", branch(bool, step("a", "d"), step("a", "d"))), "two steps named 'a'"),
        (lambda: Saga("t", "a"), r"saga 't' is made of step\(…\), .*, not 'a'"),  # type: ignore[arg-type]
        (lambda: Saga("t", [step("a", "d")]), "is made of"),  # type: ignore[arg-type]
        (lambda: sequence("a"), "sequence is made of"),  # type: ignore[arg-type]
        (lambda: parallel(None), "parallel is made of"),  # type: ignore[arg-type]
        (lambda: branch(bool, "a"), "branch is made of"),  # type: ignore[arg-type]
        (lambda: branch(bool, step("a", "d"), "b"), "branch is made of"),  # type: ignore[arg-type]
        (lambda: branch(True, step("a", "d")), "the condition of a branch must be a function"),  # type: ignore[arg-type]
        (lambda: step("a", "d", data={}), "data of step 'a' must be a function of the state"),  # type: ignore[arg-type]
        (lambda: step("a", "d", undo_data=3), "undo_data of step 'a' must be a function"),  # type: ignore[arg-type]
    ],
)
def test_a_saga_that_cannot_be_is_refused(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        make()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: step("a", "No Domain"), "is not a domain name"),
        (lambda: step("", "d"), "is not valid"),
        (lambda: step("a", "d", "x\n"), "is not valid"),
        (lambda: step("a", "d", undo=""), "is not valid"),
        (lambda: step(7, "d"), "is not valid"),  # type: ignore[arg-type]
    ],
)
def test_a_step_with_a_bad_name_is_refused(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(InvalidCommandError, match=complaint):
        make()


@pytest.mark.parametrize(
    "parts",
    [
        lambda: (branch(bool, sequence(), step("a", "d")), branch(bool, sequence(), step("b", "d"))),
        lambda: (branch(bool, step("a", "d"), name="way"), branch(bool, step("b", "d"), name="way")),
    ],
)
def test_two_branches_of_one_name_are_refused(parts: Callable[[], tuple[Part, ...]]) -> None:
    """The second would take the way of the first."""
    with pytest.raises(ConfigurationError, match="two branches named"):
        Saga("t", *parts())


def test_a_branch_with_the_name_of_a_step_is_refused() -> None:
    """The step's result would be taken for the way."""
    with pytest.raises(ConfigurationError, match="a branch and a step named 'a'"):
        Saga("t", step("a", "d"), branch(bool, step("b", "d"), name="a"))


@pytest.mark.parametrize(
    ("manager", "complaint"),
    [
        (Plain, "give an instance: Plain\\(\\) instead of Plain"),
        ("plain", "a process manager is needed, not 'plain'"),
        (type("Nameless", (Plain,), {"process_type": ""})(), "Nameless has no process_type"),
        (type("Odd", (Plain,), {"process_type": "a\nb"})(), "is not valid"),
        (type("Odd", (Plain,), {"domain": "No Domain"})(), "is not a domain name"),
        (type("Odd", (Plain,), {"deadline": "soon"})(), "Odd.deadline: 'soon' is not a duration"),
    ],
)
def test_a_manager_that_cannot_be_registered_is_refused(manager: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_manager(manager)


@pytest.mark.parametrize(
    "following", [7, 1.5, b"a", {"a"}, {"a": 1}, ["a", 7], [""], "", "a" * 201, object(), "a\nb"]
)
@pytest.mark.parametrize("method", ["first_step", "next_step"])
def test_a_manager_that_names_no_steps_is_told_so(method: str, following: object) -> None:
    harness = Harness(Plain(**{method: lambda *_: following}))
    if method == "next_step":
        harness.start()
    before = copy.deepcopy(harness.view)
    with pytest.raises(PermanentCommandError, match=r"Plain returned .* as the next step") as caught:
        harness.reply(1) if method == "next_step" else harness.start()
    assert caught.value.code == "INVALID_STEP"
    assert harness.view == before


@pytest.mark.parametrize("built", [None, "a", {"domain": "d"}, ("d", "a"), StepCommand])
def test_a_manager_that_builds_no_command_is_told_so(built: object) -> None:
    with pytest.raises(PermanentCommandError, match=r"Plain.build_command\('a'\) must return a StepCommand"):
        Harness(Plain(build_command=lambda *_: built)).start()


def test_a_manager_that_compensates_with_nonsense_is_told_so() -> None:
    harness = Harness(Plain(compensation=lambda *_: "undo"))
    harness.start()
    harness.answer("a")
    with pytest.raises(PermanentCommandError, match=r"Plain.compensation\('a'\) must return a StepCommand"):
        harness.answer("b", "FAILED")
    assert harness.sent() == ["b"]


@pytest.mark.parametrize("method", ["first_step", "build_command", "next_step"])
def test_a_manager_without_a_method_says_which(method: str) -> None:
    class Bare(BaseProcessManager[Any]):
        process_type = "bare"

    bare: Any = Bare()
    with pytest.raises(NotImplementedError, match=f"Bare.{method}"):
        getattr(bare, method)(*[None] * {"first_step": 1, "build_command": 2, "next_step": 3}[method])


@dataclass
class Order:
    order_id: int
    done: list[str] = field(default_factory=list)


class Model:
    """What pydantic's models look like from outside."""

    def __init__(self, n: int) -> None:
        self.n = n

    @classmethod
    def model_validate(cls, data: Mapping[str, int]) -> Model:
        return cls(data["n"])

    def model_dump(self, *, mode: str) -> dict[str, int]:
        assert mode == "json"
        return {"n": self.n}


def test_states_are_dicts_dataclasses_or_models() -> None:
    typed = type("Typed", (Plain,), {"state_class": Order})()
    state = typed.load_state({"order_id": 7, "done": ["a"]})
    assert state == Order(7, ["a"])
    assert typed.dump_state(state) == {"order_id": 7, "done": ["a"]}
    modelled = type("Modelled", (Plain,), {"state_class": Model})()
    assert modelled.dump_state(modelled.load_state({"n": 3})) == {"n": 3}
    assert Plain().dump_state(Plain().create_state(None)) == {}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ([1], "must be an object, not"),
        ({"order": 7}, "'order' is no field of Order, .* known are done, order_id"),
        ({}, "no Order can be made of this"),
    ],
)
def test_a_process_cannot_begin_with_what_is_no_state(data: Any, complaint: str) -> None:
    typed = type("Typed", (Plain,), {"state_class": Order})()
    with pytest.raises(InvalidCommandError, match=complaint):
        check_new(typed, NewProcess(data))


@pytest.mark.parametrize("method", ["first_step", "build_command", "on_started"])
def test_a_stop_iteration_of_the_managers_code_is_an_error_and_no_end(method: str) -> None:
    """The engine is a generator, and this is what generators say at their end."""

    def stops(*_: Any) -> Any:
        raise StopIteration("the code's own")

    harness = Harness(Plain(**{method: stops}))
    view = copy.deepcopy(harness.view)
    with pytest.raises(StopIteration, match="the code's own"):
        _answer(advance(harness.manager, view, Message("start"), TX), None)  # type: ignore[arg-type]
