"""HandlerRegistry: what can be a handler, how it is called, and what is refused at registration."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from commandbus import DuplicateHandlerError, HandlerRegistry, InvalidCommandError, RetryPolicy, handler


def test_the_decorator_registers_and_leaves_the_function_as_it_is(handlers: HandlerRegistry) -> None:
    def ship(command: Any, ctx: Any) -> str:
        return "shipped"

    assert handlers.handler("orders", "ship")(ship) is ship
    found = handlers.get("orders", "ship")
    assert found is not None
    assert found.function is ship
    assert (found.is_async, found.takes_command, found.retry_policy) == (False, True, None)
    assert found.name.endswith("ship")
    assert len(handlers) == 1
    assert [each.command_type for each in handlers] == ["ship"]
    assert handlers.get("orders", "bill") is None
    assert handlers.get("other", "ship") is None


def test_domains_are_those_that_have_handlers(handlers: HandlerRegistry) -> None:
    for domain, command_type in [("orders", "ship"), ("mail", "send"), ("orders", "bill")]:
        handlers.register(domain, command_type, lambda ctx: None)
    assert handlers.domains == ["mail", "orders"]


def test_a_second_handler_for_the_same_command_is_refused(handlers: HandlerRegistry) -> None:
    @handlers.handler("orders", "ship")
    def first(ctx: Any) -> None: ...

    with pytest.raises(DuplicateHandlerError, match=r"'ship'.*'orders'.*first"):
        handlers.register("orders", "ship", lambda ctx: None)
    found = handlers.get("orders", "ship")
    assert found is not None
    assert found.function is first


@pytest.mark.parametrize(
    ("domain", "command_type"), [("Orders", "ship"), ("orders; drop", "ship"), ("", "ship"), ("orders", "")]
)
def test_bad_names_are_refused(handlers: HandlerRegistry, domain: str, command_type: str) -> None:
    with pytest.raises(InvalidCommandError):
        handlers.register(domain, command_type, lambda ctx: None)
    with pytest.raises(InvalidCommandError):
        handler(domain, command_type)
    assert len(handlers) == 0


def test_a_retry_policy_must_be_one(handlers: HandlerRegistry) -> None:
    with pytest.raises(TypeError, match="RetryPolicy, not int"):
        handlers.register("orders", "ship", lambda ctx: None, retry_policy=3)  # type: ignore[arg-type]


# --- signatures -----------------------------------------------------------------------------------------------


class _Callable:
    def __call__(self, command: Any, ctx: Any) -> None: ...


class _AsyncCallable:
    async def __call__(self, ctx: Any) -> None: ...


async def _async_two(command: Any, ctx: Any) -> None: ...


def _three(settings: Any, command: Any, ctx: Any) -> None: ...


async def _async_three(settings: Any, command: Any, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "is_async", "takes_command"),
    [
        (lambda command, ctx: None, False, True),
        (lambda ctx: None, False, False),
        (lambda *args: None, False, True),
        (lambda ctx, *, retries=3: None, False, False),
        (lambda command, ctx, extra=None: None, False, True),
        (_async_two, True, True),
        (_Callable(), False, True),
        (_AsyncCallable(), True, False),
        (functools.partial(_three, "settings"), False, True),
        (functools.partial(_async_three, "settings"), True, True),
        (functools.partial(_AsyncCallable()), True, False),
        (functools.partial(_three, "settings", "command"), False, False),
    ],
    ids=["two", "one", "star", "keyword-default", "third-default", "async", "object", "async-object", "partial",
         "async-partial", "partial-of-async-object", "partial-one"],
)  # fmt: skip
def test_accepted_signatures(
    handlers: HandlerRegistry, function: Any, is_async: bool, takes_command: bool
) -> None:
    made = handlers.register("orders", "ship", function)
    assert (made.is_async, made.takes_command) == (is_async, takes_command)
    assert made.name


@pytest.mark.parametrize(
    "function",
    [lambda: None, _three, _async_three, lambda command, ctx, *, must: None, lambda *, ctx: None],
    ids=["none", "three", "async-three", "required-keyword", "keyword-only"],
)
def test_refused_signatures(handlers: HandlerRegistry, function: Any) -> None:
    with pytest.raises(TypeError, match=r"\(command, ctx\) or \(ctx\)"):
        handlers.register("orders", "ship", function)
    assert len(handlers) == 0


@pytest.mark.parametrize("thing", [None, 3, "ship", object()])
def test_only_callables_are_handlers(handlers: HandlerRegistry, thing: Any) -> None:
    with pytest.raises(TypeError, match="callable"):
        handlers.register("orders", "ship", thing)


# --- methods of a class ---------------------------------------------------------------------------------------


class Orders:
    """Handlers as methods, some inherited."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    @handler("orders", "ship")
    @handler("orders", "send")
    def ship(self, command: Any, ctx: Any) -> str:
        return f"{self.prefix} shipped"

    @handler("orders", "bill", retry_policy=RetryPolicy(max_attempts=7))
    async def bill(self, ctx: Any) -> None: ...

    @staticmethod
    @handler("mail", "greet")
    def greet(ctx: Any) -> None: ...

    def plain(self) -> None: ...


def test_register_instance_takes_marked_methods(handlers: HandlerRegistry) -> None:
    made = handlers.register_instance(Orders("by sea"))
    assert {(each.domain, each.command_type) for each in made} == {
        ("orders", "ship"),
        ("orders", "send"),
        ("orders", "bill"),
        ("mail", "greet"),
    }
    ship, bill = handlers.get("orders", "ship"), handlers.get("orders", "bill")
    assert ship is not None
    assert bill is not None
    assert ship.function(None, None) == "by sea shipped"
    assert (ship.is_async, ship.takes_command) == (False, True)
    assert (bill.is_async, bill.takes_command) == (True, False)
    assert bill.retry_policy == RetryPolicy(max_attempts=7)


def test_register_instance_is_all_or_none(handlers: HandlerRegistry) -> None:
    handlers.register("orders", "ship", lambda ctx: None)
    with pytest.raises(DuplicateHandlerError):
        handlers.register_instance(Orders("x"))
    assert len(handlers) == 1


def test_an_object_without_marked_methods_is_refused(handlers: HandlerRegistry) -> None:
    with pytest.raises(ValueError, match="object has no method marked"):
        handlers.register_instance(object())


def test_a_property_that_raises_is_left_alone(handlers: HandlerRegistry) -> None:
    class Touchy(Orders):
        @property
        def dangerous(self) -> int:
            raise RuntimeError("must not be looked at")

    assert len(handlers.register_instance(Touchy("x"))) == 4
