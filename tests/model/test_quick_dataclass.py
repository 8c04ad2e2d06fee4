"""Our own `dataclass` makes what the standard one makes: whatever one can see of a frozen class is the same."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any, Generic, TypeVar

import pytest

from commandbus import quick_dataclass

T = TypeVar("T")
Decorator = Callable[..., Any]


def make(dataclass: Decorator) -> Any:
    """A class with a field of every kind that we use."""

    @dataclass(frozen=True, slots=True)
    class Example(Generic[T]):
        """An example."""

        name: str
        size: int = 3
        parts: list[Any] = field(default_factory=list, compare=False)
        secret: str = field(default="x", repr=False)
        counted: int = field(default=7, init=False)
        made: list[Any] = field(default_factory=list, init=False, compare=False)
        key: int = field(default=0, kw_only=True, hash=False)
        needed: int = field(kw_only=True)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError(f"size is negative: {self.size}")

    return Example


@quick_dataclass.dataclass(frozen=True, slots=True)
class Ours:
    """For pickle, which looks a class up by its name."""

    name: str
    parts: tuple[int, ...] = ()


@pytest.fixture(params=[dataclasses.dataclass, quick_dataclass.dataclass], ids=["standard", "ours"])
def example(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


def test_both_make_the_same_class() -> None:
    standard, ours = make(dataclasses.dataclass), make(quick_dataclass.dataclass)
    assert str(inspect.signature(ours)) == str(inspect.signature(standard))
    assert ours.__init__.__annotations__ == standard.__init__.__annotations__
    assert repr(ours.__dataclass_params__) == repr(standard.__dataclass_params__)
    assert (ours.__slots__, ours.__match_args__, ours.__doc__) == (
        standard.__slots__,
        standard.__match_args__,
        standard.__doc__,
    )
    described = [[str(found) for found in dataclasses.fields(each)] for each in (standard, ours)]
    assert described[0] == described[1]
    assert ours.__repr__.__qualname__ == standard.__repr__.__qualname__


def test_values(example: Any) -> None:
    value = example("a", needed=1)
    assert (value.size, value.parts, value.counted, value.made, value.key) == (3, [], 7, [], 0)
    assert repr(value) == (
        "make.<locals>.Example(name='a', size=3, parts=[], counted=7, made=[], key=0, needed=1)"
    )
    assert example("b", needed=1).parts is not value.parts
    assert value == example("a", 3, ["not compared"], needed=1)
    assert value != example("a", 4, needed=1)
    assert value != ("a", 3)
    assert hash(value) == hash(example("a", needed=1, key=5))
    assert value != example("a", needed=1, key=5)
    assert {value: 1}[example("a", needed=1)] == 1
    assert dataclasses.replace(value, size=9).size == 9
    assert dataclasses.asdict(value)["secret"] == "x"
    assert (copy.copy(value), copy.deepcopy(value)) == (value, value)


def test_nobody_changes_it(example: Any) -> None:
    value = example("a", needed=1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'name'"):
        value.name = "b"
    with pytest.raises((FrozenInstanceError, TypeError)):  # the standard one trips over its own class here
        value.other = "b"
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'name'"):
        del value.name
    with pytest.raises(ValueError, match="size is negative: -1"):
        example("a", -1, needed=1)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'needed'"):
        example("a")


def test_a_value_that_holds_itself_can_be_shown(example: Any) -> None:
    value = example("a", needed=1)
    value.parts.append(value)
    assert "parts=[...]" in repr(value)


def test_it_can_be_pickled() -> None:
    value = Ours("a", (1, 2))
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize("dataclass", [dataclasses.dataclass, quick_dataclass.dataclass])
def test_a_subclass_adds_to_it(dataclass: Decorator) -> None:
    @dataclass(frozen=True, slots=True)
    class More(Ours):
        """A frozen class on top of ours."""

        more: int = 0

    value = More("a", (), 5)
    assert (value.name, value.more, value == More("a", (), 5)) == ("a", 5, True)
    with pytest.raises(FrozenInstanceError):
        value.name = "b"


def test_own_methods_stay() -> None:
    @quick_dataclass.dataclass(frozen=True, slots=True)
    class Own:
        """It shows and compares itself."""

        name: str

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

    assert (repr(Own("a")), Own("a") == 3, hash(Own("a"))) == ("own", True, 1)


def test_it_is_the_quick_way_that_is_tested() -> None:
    """The standard library compiles `__eq__`; ours does not."""
    is_quick = Ours.__eq__.__code__.co_filename == quick_dataclass.__file__
    assert is_quick == (sys.version_info < (3, 13))
