"""Classes that stand for a command type: `bus.send(ShipOrder(order_no=17))`.

    @commandbus.command("orders", "ship")
    @dataclass
    class ShipOrder:
        order_no: int

The class knows its domain and its type, so that neither a sender nor a handler repeats them. A class that is
derived from it stands for nothing until it is marked itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from commandbus.errors import InvalidCommandError
from commandbus.model import names
from commandbus.model.command import NewCommand

C = TypeVar("C", bound=type)
D = TypeVar("D")
_MARK = "__commandbus_command__"


def command(domain: str, command_type: str) -> Callable[[C], C]:
    """Mark a pydantic model, a dataclass or a msgspec struct as the payload of a command type."""
    address = names.check_domain(domain), names.check_type(command_type)

    def mark(cls: C) -> C:
        _check_class(cls)
        setattr(cls, _MARK, address)
        return cls

    return mark


def _check_class(cls: Any) -> None:
    from commandbus.model import payload_types as types

    if not isinstance(cls, type):
        raise TypeError(f"@command(domain, command_type) marks a class, not {names.shown(cls)}")
    if types.is_typed_dict(cls):
        raise TypeError(
            f"{cls.__name__} is a TypedDict, whose instances are plain dicts and do not know their class: use a "
            f"dataclass, or send it by name, bus.send(domain, command_type, data)"
        )
    if not types.is_payload_type(cls):
        raise TypeError(
            f"{cls.__name__} is no pydantic model, dataclass or msgspec struct; if it is about to become a "
            f"dataclass, write @command(…) above @dataclass"
        )


def class_address(cls: type) -> tuple[str, str] | None:
    """The domain and type that a class is marked with; None if it is not."""
    found: tuple[str, str] | None = vars(cls).get(_MARK)
    return found


def require_address(cls: type) -> tuple[str, str]:
    """The domain and type of a class; TypeError if it is not marked."""
    if (found := class_address(cls)) is not None:
        return found
    parent = next((base for base in cls.__mro__[1:] if class_address(base) is not None), None)
    more = "" if parent is None else f" (only {parent.__name__} is, from which it is derived)"
    raise TypeError(
        f"{cls.__name__} is not marked with @commandbus.command(domain, command_type){more}: mark it, or name "
        f"domain and type"
    )


def addressed(value: object) -> tuple[str, str, Any]:
    """The domain and type of an object that stands for a command, and the object as its payload."""
    if isinstance(value, str):
        raise InvalidCommandError(
            f"send takes a domain and a command_type, or one object whose class is marked with "
            f"@commandbus.command(domain, command_type), not {names.shown(value)} alone"
        )
    if isinstance(value, type):
        raise InvalidCommandError(f"{value.__name__} is a class: send an instance of it, {value.__name__}(…)")
    if isinstance(value, NewCommand):
        raise InvalidCommandError(
            "a NewCommand has no domain: use bus.commands.save(domain, command), or send_many(domain, [command])"
        )
    try:
        domain, command_type = require_address(type(value))
    except TypeError as error:
        raise InvalidCommandError(str(error)) from None
    return domain, command_type, value


def check_json_default(function: D) -> D:
    """Return the application's function that makes JSON of its own types, or None; TypeError for anything else."""
    if function is not None and not callable(function):
        raise TypeError(
            f"json_default must be a function that makes JSON of an object, not {names.shown(function)}"
        )
    return function
