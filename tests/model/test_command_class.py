"""Classes that stand for a command type: @commandbus.command(domain, command_type)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import pytest

from commandbus import InvalidCommandError, NewCommand, command
from commandbus.flow.commands.send import prepare_all, to_new_command
from commandbus.model.command_class import addressed, class_address
from support.typed_orders import ORDERS, DataclassOrder


def test_an_object_knows_its_address() -> None:
    assert [addressed(order)[:2] for order in ORDERS] == [
        ("orders", "ship_dataclass"),
        ("orders", "ship_model"),
        ("orders", "ship_struct"),
    ]


def test_a_derived_class_stands_for_nothing() -> None:
    class Derived(DataclassOrder):
        pass

    assert class_address(Derived) is None
    with pytest.raises(InvalidCommandError, match=r"Derived is not marked .*\(only DataclassOrder is"):
        addressed(Derived(1, []))


def test_what_cannot_be_marked() -> None:
    class Data(TypedDict):
        a: int

    with pytest.raises(TypeError, match="Data is a TypedDict, whose instances are plain dicts"):
        command("orders", "x")(Data)
    with pytest.raises(TypeError, match=r"@command\(…\) above @dataclass"):

        @dataclass
        @command("orders", "x")
        class Early:
            a: int

    with pytest.raises(TypeError, match="marks a class, not 5"):
        command("orders", "x")(5)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="domain"):
        command("no domain!", "x")


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("orders", "not 'orders' alone"),
        (DataclassOrder, "DataclassOrder is a class: send an instance of it"),
        (object(), "object is not marked"),
        (None, "NoneType is not marked"),
        (NewCommand("ship"), "a NewCommand has no domain: use bus.commands.save"),
    ],
)
def test_what_is_no_command_is_refused(item: object, said: str) -> None:
    with pytest.raises(InvalidCommandError, match=said):
        addressed(item)


def test_many() -> None:
    found = list(prepare_all([*ORDERS, NewCommand("ship", ORDERS[0])], max_bytes=9999, domain="orders"))
    assert [each.command_type for each in found] == ["ship_dataclass", "ship_model", "ship_struct", "ship"]
    assert found[0].data == found[3].data
    with pytest.raises(
        InvalidCommandError, match="command 2 of send_many: DataclassOrder is a command of domain 'ord"
    ):
        list(prepare_all([{"command_type": "x"}, ORDERS[0]], max_bytes=9999, domain="mail"))
    with pytest.raises(InvalidCommandError, match="5 is not a command; give NewCommand or dicts"):
        to_new_command(5)  # type: ignore[arg-type]
