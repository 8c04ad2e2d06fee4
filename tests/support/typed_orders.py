"""One payload, written as each of the four kinds of types, and handlers that take it in child processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, NotRequired, TypedDict
from uuid import UUID

import msgspec
import pydantic

import commandbus
from commandbus import HandlerRegistry


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Item:
    name: str
    price: Decimal
    count: int = 1


@commandbus.command("orders", "ship_dataclass")
@dataclass
class DataclassOrder:
    order_no: int
    items: list[Item]
    color: Color = Color.RED
    at: datetime | None = None
    day: date | None = None
    id: UUID | None = None
    within: timedelta | None = None
    size: Literal["s", "m", 3] = "s"
    tags: dict[str, float] = field(default_factory=dict)
    parent: DataclassOrder | None = None

    def __post_init__(self) -> None:
        if self.order_no < 0:
            raise ValueError("order_no must not be negative")


class DictItem(TypedDict):
    name: str
    price: Decimal


class DictOrder(TypedDict):
    order_no: int
    items: list[DictItem]
    color: NotRequired[Color]


class ModelItem(pydantic.BaseModel):
    name: str
    price: Decimal
    count: int = 1


@commandbus.command("orders", "ship_model")
class ModelOrder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    order_no: int = pydantic.Field(alias="orderNo", ge=0)
    items: list[ModelItem]
    color: Color = Color.RED
    at: datetime | None = None


class StructItem(msgspec.Struct):
    name: str
    price: Decimal
    count: int = 1


@commandbus.command("orders", "ship_struct")
class StructOrder(msgspec.Struct):
    order_no: int
    items: list[StructItem]
    color: Color = Color.RED
    at: datetime | None = None


NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
ORDERS: list[Any] = [
    DataclassOrder(17, [Item("nut", Decimal("0.10"))], Color.BLUE, NOON, parent=DataclassOrder(1, [])),
    ModelOrder(orderNo=17, items=[ModelItem(name="nut", price=Decimal("0.10"))], color=Color.BLUE, at=NOON),
    StructOrder(17, [StructItem("nut", Decimal("0.10"))], Color.BLUE, NOON),
]

handlers = HandlerRegistry()


@handlers.handler("orders", "isolated", isolation="process")
def isolated(order: DataclassOrder, ctx: Any) -> Any:
    return {"pid": os.getpid(), "again": order, "kind": type(order).__name__}


@handlers.handler("orders", "isolated_async", isolation="process", transaction=True)
async def isolated_async(order: ModelOrder, ctx: Any, tx: Any) -> Any:
    await tx.execute("INSERT INTO effects VALUES (%s)", (str(order.order_no),))
    return order
