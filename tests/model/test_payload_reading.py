"""Payloads read as types: what fits, and what is said, with its path, about what does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NewType, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commandbus import Command, ConfigurationError, InvalidPayloadError, PermanentCommandError
from commandbus.model.payload_reading import reader_of
from commandbus.model.payload_schema import schema_of
from commandbus.model.payload_types import MismatchError, is_payload_type, read_payload
from support.schemas import validator_of
from support.typed_orders import (
    Color,
    DataclassOrder,
    DictOrder,
    Item,
    ModelItem,
    ModelOrder,
    StructItem,
    StructOrder,
)

T = TypeVar("T")
OrderNo = NewType("OrderNo", int)


@dataclasses.dataclass
class Box(Generic[T]):
    content: T
    size: int = dataclasses.field(init=False, default=0)


class Total(TypedDict, total=False):
    a: int


class Base(TypedDict):
    b: OrderNo


class Both(Base, Total):
    c: Annotated[str, "text"]


def refusal(kind: Any, data: Any) -> str:
    with pytest.raises(InvalidPayloadError) as refused:
        read_payload(reader_of(kind), data, kind)
    assert isinstance(refused.value, PermanentCommandError)
    assert refused.value.code == "INVALID_PAYLOAD"
    return str(refused.value)


NUT = {"name": "nut", "price": "0.10"}
EMPTY = {"order_no": 1, "items": []}


def test_a_dataclass_with_everything() -> None:
    read = reader_of(DataclassOrder)
    data = {
        "order_no": 17, "items": [NUT, NUT | {"count": 2, "price": 5}], "color": "blue",
        "at": "2026-01-31T12:00:00Z", "day": "2026-01-31", "id": str(UUID(int=1)), "within": "PT1H30M",
        "size": 3, "tags": {"a": 1}, "parent": {"order_no": 1, "items": []},
    }  # fmt: skip
    assert read(data) == DataclassOrder(
        17,
        [Item("nut", Decimal("0.10")), Item("nut", Decimal(5), 2)],
        Color.BLUE,
        datetime(2026, 1, 31, 12, tzinfo=UTC),
        date(2026, 1, 31),
        UUID(int=1),
        timedelta(hours=1.5),
        3,
        {"a": 1.0},
        DataclassOrder(1, []),
    )
    assert reader_of(DictOrder)({"order_no": 1, "items": [NUT], "color": "red"}) == {
        "order_no": 1,
        "items": [{"name": "nut", "price": Decimal("0.10")}],
        "color": Color.RED,
    }
    assert reader_of(Both)({"b": 1, "c": "x"}) == {"b": 1, "c": "x"}
    assert reader_of(Box[int])({"content": [1], "size": 9}) == Box([1])


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        (DataclassOrder, [], "the payload is not a valid DataclassOrder: data: must be an object, not []"),
        (DataclassOrder, {"items": []}, "data.order_no: is missing"),
        (DataclassOrder, {"order_no": True, "items": []}, "data.order_no: must be a whole number, not True"),
        (DataclassOrder, {"order_no": 1.0, "items": []}, "data.order_no: must be a whole number, not 1.0"),
        (DataclassOrder, {"order_no": 1, "items": [NUT] * 3 + [NUT | {"price": "x"}]},
         "data.items[3].price: must be a decimal number, as text or as a number, not 'x'"),
        (DataclassOrder, EMPTY | {"x": 1}, "data.x: is not a field of DataclassOrder, which has"),
        (DataclassOrder, EMPTY | {"color": "green"},
         """data.color: must be one of "red", "blue", not 'green'"""),
        (DataclassOrder, EMPTY | {"size": True}, """must be one of "s", "m", 3, not True"""),
        (DataclassOrder, EMPTY | {"at": "soon"}, "data.at: must be a date and time in ISO 8601"),
        (DataclassOrder, EMPTY | {"within": "P"}, "data.within: must be a duration in ISO 8601"),
        (DataclassOrder, EMPTY | {"within": "P99999999999D"}, "data.within: must be a duration"),
        (DataclassOrder, EMPTY | {"tags": {"a": "1"}}, "data.tags.a: must be a number, not '1'"),
        (DataclassOrder, EMPTY | {"parent": {"order_no": 2}}, "data.parent.items: is missing"),
        (DataclassOrder, {"order_no": -1, "items": []}, "data: order_no must not be negative"),
        (DictOrder, EMPTY | {"items": [{"name": 1, "price": 1}]}, "data.items[0].name: must be text, not 1"),
        (Both, {"b": None, "c": "x"}, "data.b: must be a whole number, not None"),
        (ModelOrder, {"orderNo": 1, "items": [NUT, NUT | {"price": []}]}, "data.items[1].price: "),
        (ModelOrder, {"order_no": 1, "items": []}, "data.orderNo: Field required"),
        (ModelOrder, {"orderNo": -1, "items": []}, "data.orderNo: Input should be greater than or equal to 0"),
        (StructOrder, {"order_no": 1, "items": [NUT, NUT | {"price": []}]},
         "data.items[1].price: Expected `decimal`, got `array`"),
        (StructOrder, {"items": []}, "Object missing required field `order_no`"),
        (StructOrder, 5, "data: Expected `object`, got `int`"),
        (Item | StructItem, {"price": 1}, "fits none of Item, StructItem (Item: data.name: is missing; Struct"),
        (Item | None, {"name": "x"}, "data.price: is missing"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_path(kind: Any, data: Any, said: str) -> None:
    assert said in refusal(kind, data)


def test_all_mistakes_are_told_and_the_text_is_bounded() -> None:
    text = refusal(DataclassOrder, {"order_no": "x" * 10_000, "items": 1, "color": 5, "a": 1, "b": 1})
    assert text.endswith("; and 2 more")
    assert len(text) < 1000
    with pytest.raises(InvalidPayloadError) as refused:
        read_payload(reader_of(ModelOrder), {"orderNo": "1", "items": 5}, ModelOrder)
    details: Any = refused.value.details
    assert [each["path"] for each in details] == ["data.orderNo", "data.items"]


def test_unions_and_containers() -> None:
    kind = Item | ModelItem | None
    assert is_payload_type(kind)
    assert isinstance(reader_of(kind)(NUT), Item)
    assert reader_of(kind)(None) is None
    assert reader_of(tuple[int, str])([1, "a"]) == (1, "a")
    assert reader_of(tuple[int, ...])([1, 2]) == (1, 2)
    assert reader_of(set[int])([1, 1]) == {1}
    assert reader_of(frozenset[str])(["a"]) == frozenset("a")
    assert reader_of(Sequence[Any])([{}]) == [{}]
    assert reader_of(dict[int, time])({"1": "12:00"}) == {1: time(12)}
    assert reader_of(Mapping[str, object])({"1": None}) == {"1": None}
    for bad, data in ((tuple[int, str], [1]), (dict[int, int], {"x": 1}), (list[int], "12"), (bool, 1), (None, 0)):
        with pytest.raises(MismatchError):
            reader_of(bad)(data)


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Bus(msgspec.Struct, tag=True):
    seats: int = 0


class Car(msgspec.Struct, tag=True):
    seats: int = 0


class Untagged(msgspec.Struct):
    wheels: int


def test_packages_read_unions_of_their_own_types() -> None:
    pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    assert reader_of(pet)({"kind": "dog"}) == Dog(kind="dog")
    assert "data.cat.lives: Input should be a valid integer" in refusal(pet, {"kind": "cat", "lives": "x"})
    assert "discriminator" in schema_of(pet)
    assert reader_of(Bus | Car)({"type": "Car", "seats": 4}) == Car(4)
    assert reader_of(Untagged | StructItem)({"name": "nut", "price": 1}) == StructItem("nut", Decimal(1))
    for kind in (pet, Bus | Car, Untagged | StructItem):
        validator_of(schema_of(kind))


def test_what_is_nested_too_deeply_is_refused() -> None:
    nested: Any = dict(EMPTY)
    for _ in range(2000):
        nested = EMPTY | {"parent": nested}
    assert refusal(DataclassOrder, nested).endswith("data: is nested too deeply")


def test_what_describes_a_payload() -> None:
    for kind in (DataclassOrder, DictOrder, ModelOrder, StructOrder, Box[int], Annotated[Item, 1], Item | None):
        assert is_payload_type(kind), kind
    for kind in (Command, dict, dict[str, Any], int, Any, object, None, Item | int, "Item", list[Item]):
        assert not is_payload_type(kind), kind


def test_a_type_without_json_is_refused_with_its_field() -> None:
    @dataclasses.dataclass
    class Photo:
        pixels: bytes

    with pytest.raises(ConfigurationError, match=r"field 'pixels' of .*Photo: the type bytes has no form in JSON"):
        reader_of(Photo)
    with pytest.raises(ConfigurationError, match="field 'pixels'"):
        reader_of(Photo)  # it was not remembered half made


@dataclasses.dataclass
class Plain:
    text: str
    number: int | float
    choice: Literal["a", 1]
    color: Color
    pair: tuple[int, bool]
    rest: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    nothing: None = None
    nested: Plain | None = None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.5, "a", "red", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "text"]), inner, max_size=2),
    max_leaves=4,
)
FITTING = st.fixed_dictionaries(
    {
        "text": st.text() | JSON,
        "number": st.integers() | JSON,
        "choice": st.sampled_from(["a", 1, True]),
        "color": st.sampled_from(["red", "blue", "x"]),
        "pair": st.tuples(st.integers(), st.booleans()).map(list) | JSON,
    },
    optional={"rest": JSON, "nothing": st.none() | JSON, "nested": JSON, "more": JSON},
)


def test_the_schema_says_what_the_reader_does() -> None:
    validator, read = validator_of(schema_of(Plain)), reader_of(Plain)

    @settings(max_examples=150)
    @given(FITTING | JSON)
    def both_agree(data: Any) -> None:
        try:
            read(data)
        except MismatchError:
            fits = False
        else:
            fits = True
        assert validator.is_valid(data) == fits

    both_agree()


@pytest.mark.parametrize(
    "kind", [DataclassOrder, DictOrder, ModelOrder, StructOrder, Item | ModelItem, Box[int], Both]
)
def test_schemas_are_schemas(kind: Any) -> None:
    schema = schema_of(kind)
    validator = validator_of(schema)
    number = "orderNo" if kind is ModelOrder else "order_no"
    good: Any = {number: 1, "items": [NUT]}
    if kind == Item | ModelItem:
        good = NUT
    elif kind is Both:
        good = {"b": 1, "c": "x"}
    elif kind == Box[int]:
        good = {"content": 1}
    assert validator.is_valid(good), list(validator.iter_errors(good))
    assert not validator.is_valid(5)
    assert reader_of(kind)(good) is not None
