"""Objects on their way into JSON: known types, the application's own, and advice about all others."""

from __future__ import annotations

import math
from collections import OrderedDict, UserList
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.errors import InvalidCommandError
from commandbus.model import payload
from commandbus.model.payload_reading import reader_of
from support.typed_orders import ORDERS, Color


class Size(StrEnum):
    S = "s"


class Level(IntEnum):
    HIGH = 3


@dataclass
class Box:
    content: Any


class Opaque:
    def __repr__(self) -> str:
        return "an opaque thing"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime(2026, 1, 31, 12, tzinfo=UTC), '"2026-01-31T12:00:00+00:00"'),
        (date(2026, 1, 31), '"2026-01-31"'),
        (time(12, 30), '"12:30:00"'),
        (timedelta(days=2, seconds=3, microseconds=500), '"P2DT3.0005S"'),
        (timedelta(days=-1), '"-P1D"'),
        (timedelta(0), '"PT0S"'),
        (UUID(int=7), '"00000000-0000-0000-0000-000000000007"'),
        (Decimal("0.10"), '"0.10"'),
        ((Color.RED, Size.S, Level.HIGH), '["red","s",3]'),
        ({Size.S: 1}, '{"s":1}'),
        (Box({"a": Box([Decimal(1)])}), '{"content":{"a":{"content":["1"]}}}'),
        (MappingProxyType({"a": OrderedDict(b=UserList([1]))}), '{"a":{"b":[1]}}'),
        ([ORDERS[1].items[0], ORDERS[2].items[0]], '[{"name":"nut","price":"0.10","count":1}]'[:-1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_known_types_are_sent_as_they_are_read(value: Any, text: str) -> None:
    assert payload.dump({"x": value}, what="data").startswith(f'{{"x":{text}'.removesuffix("]"))
    assert payload.dump(value, what="data").startswith(text.removesuffix("]"))


@given(st.timedeltas())
def test_durations_come_back(value: timedelta) -> None:
    found = reader_of(timedelta)(payload.loads(payload.dump(value, what="data")))
    assert abs(found - value) <= timedelta(microseconds=abs(value.days) // 10**6 + 1)


@pytest.mark.parametrize(
    ("leaf", "advice"),
    [
        (b"x", "base64"),
        ({1}, "sorted(value)"),
        (Path("/tmp"), "str(path)"),
        (Opaque(), "json_default"),
        (Box, "send an instance, Box(…)"),
        (math.nan, "no NaN"),
        (Decimal("Infinity"), "no NaN and no infinity"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_refused_comes_with_its_place_and_advice(leaf: Any, advice: str) -> None:
    with pytest.raises(InvalidCommandError) as refused:
        payload.dump(Box({"lines": [1, leaf]}), what="data")
    said = str(refused.value)
    assert "(at $.content.lines[1]: " in said
    assert advice in said


def test_keys_are_not_converted() -> None:
    with pytest.raises(
        InvalidCommandError, match=r"data has a key that is not text \(1 of type int at \$\.content\)"
    ):
        payload.dump(Box({1: "a"}), what="data")
    with pytest.raises(InvalidCommandError, match="keys must be str"):
        payload.dump({UUID(int=1): 1}, what="data")


def test_the_application_has_the_last_word() -> None:
    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        x: Opaque

    class Struct(msgspec.Struct):
        x: Opaque

    def default(value: Any) -> Any:
        if isinstance(value, Opaque):
            return {"opaque": datetime(2026, 1, 1, tzinfo=UTC).date()}
        raise TypeError(f"no idea about {value!r}")

    values = [Opaque(), Box(Opaque()), Struct(Opaque())]
    text = payload.dump(values, what="data", default=default)
    one = '{"opaque":"2026-01-01"}'
    assert text == f'[{one},{{"content":{one}}},{{"x":{one}}}]'
    assert payload.dump(Model(x=Opaque()), what="data", default=lambda _: "opaque") == '{"x":"opaque"}'
    with pytest.raises(InvalidCommandError, match="no idea about"):
        payload.dump([Fraction(1, 2)], what="data", default=default)
    with pytest.raises(InvalidCommandError, match=r"at \$: Opaque"):
        payload.dump(Opaque(), what="data", default=lambda value: value)


def test_what_contains_itself_is_refused() -> None:
    box = Box(None)
    box.content = [box]
    with pytest.raises(InvalidCommandError, match="data is not JSON"):
        payload.dump(box, what="data")


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_object_comes_back_as_it_was(order: Any) -> None:
    assert reader_of(type(order))(payload.loads(payload.dump(order, what="data"))) == order
