"""HandlerRegistry: what can be a handler, how it is called, and what is refused at registration."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from commandbus import DuplicateHandlerError, HandlerRegistry, InvalidCommandError, RetryPolicy, handler
from commandbus.worker.execution.handlers import Handler


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
        (lambda ctx, retries=3: None, False, False),
        (lambda ctx, *more: None, False, False),
        (lambda command, ctx=None: None, False, True),
        (lambda command, *more: None, False, True),
        (lambda command, ctx, extra=None: None, False, True),
        (_async_two, True, True),
        (_Callable(), False, True),
        (_AsyncCallable(), True, False),
        (functools.partial(_three, "settings"), False, True),
        (functools.partial(_async_three, "settings"), True, True),
        (functools.partial(_AsyncCallable()), True, False),
        (functools.partial(_three, "settings", "command"), False, False),
    ],
    ids=["two", "one", "star", "keyword-default", "second-default", "context-star",
         "context-default", "command-star",
         "third-default", "async", "object", "async-object", "partial",
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


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda command, ctx, *args, db: None, "nobody gives it db"),
        (lambda *args, db: None, "nobody gives it db"),
        (lambda command, ctx, db, *args: None, "nobody gives it db"),
        (lambda command, ctx, db, cache: None, "nobody gives it db, cache"),
        (lambda command, ctx, **more: None, None),
        (lambda command, ctx, *args, db=None: None, None),
        (lambda command, retries=3: None, "second parameter gets the context"),
        (lambda ctx, retries: None, "command comes first"),
        (lambda ctx, command=None: None, "command comes first"),
        (functools.partial(_three, "settings", ctx=None), "command"),
    ],
)
def test_parameters_that_nobody_fills_are_refused(
    handlers: HandlerRegistry, function: Any, text: str | None
) -> None:
    if text is None:
        assert handlers.register("orders", "ship", function).takes_command
        return
    with pytest.raises(TypeError, match=text):
        handlers.register("orders", "ship", function)
    assert len(handlers) == 0


# --- wrappers -------------------------------------------------------------------------------------------------


def _named_wrapper(function: Any) -> Any:
    """Takes (command, ctx), whatever it wraps."""

    @functools.wraps(function)
    def wrapper(command: Any, ctx: Any) -> Any:
        return ("wrapped", function(ctx))

    return wrapper


def _any_wrapper(function: Any) -> Any:
    """Takes anything, and passes it on."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ("any", function(*args, **kwargs))

    return wrapper


def _needy_wrapper(function: Any) -> Any:
    """Takes more than anybody gives."""

    @functools.wraps(function)
    def wrapper(command: Any, ctx: Any, db: Any) -> Any:
        return function(command, ctx)

    return wrapper


def _method_wrapper(function: Any) -> Any:
    """Takes (self, command, ctx), and gives a method the context alone."""

    @functools.wraps(function)
    def wrapper(self: Any, command: Any, ctx: Any) -> Any:
        return ("wrapped", function(self, ctx))

    return wrapper


class _Wrapped:
    @handler("orders", "named")
    @_method_wrapper
    def named(self, ctx: Any) -> Any:
        return ctx

    @handler("orders", "any")
    @_any_wrapper
    def any(self, ctx: Any) -> Any:
        return ctx


def _call(made: Handler) -> Any:
    """As the executor does."""
    return made.function("command", "ctx") if made.takes_command else made.function("ctx")


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (_named_wrapper(lambda ctx: ctx), ("wrapped", "ctx")),
        (_any_wrapper(lambda ctx: ctx), ("any", "ctx")),
        (_any_wrapper(lambda command, ctx: (command, ctx)), ("any", ("command", "ctx"))),
        (_any_wrapper(_named_wrapper(lambda ctx: ctx)), ("any", ("wrapped", "ctx"))),
        (_named_wrapper(_any_wrapper(lambda ctx: ctx)), ("wrapped", ("any", "ctx"))),
        (functools.partial(_any_wrapper(lambda more, ctx: (more, ctx)), "more"), ("any", ("more", "ctx"))),
        (functools.update_wrapper(functools.partial(_named_wrapper(lambda ctx: ctx)), _three), ("wrapped", "ctx")),
    ],
    ids=["named", "any-of-one", "any-of-two", "any-of-named", "named-of-any", "partial", "updated-partial"],
)
def test_a_wrapper_is_called_with_what_it_takes_itself(
    handlers: HandlerRegistry, function: Any, answer: Any
) -> None:
    """functools.wraps gives a wrapper the signature of what it wraps, which it need not have."""
    assert _call(handlers.register("orders", "ship", function)) == answer


def test_wrapped_methods_are_called_with_what_they_take(handlers: HandlerRegistry) -> None:
    made = {each.command_type: each for each in handlers.register_instance(_Wrapped())}
    assert _call(made["any"]) == ("any", "ctx")
    assert _call(made["named"]) == ("wrapped", "ctx")


def test_a_wrapper_that_needs_more_is_refused_whatever_it_wraps(handlers: HandlerRegistry) -> None:
    with pytest.raises(TypeError, match="nobody gives it db"):
        handlers.register("orders", "ship", _needy_wrapper(lambda command, ctx: None))


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
