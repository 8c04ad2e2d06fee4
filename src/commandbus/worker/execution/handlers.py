"""HandlerRegistry: which function runs which command.

    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command, ctx): ...

A handler is `def` or `async def`, with `(command, ctx)` or `(ctx)`. With `chunk=100` it gets a list: `(commands,
ctx)`. Methods of a class are marked with `@handler(domain, command_type)` and registered with an instance:
`handlers.register_instance(Orders(db))`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack, overload

from commandbus.errors import ConfigurationError, DuplicateHandlerError, UnknownCommandTypeError
from commandbus.model.command import Command
from commandbus.model.command_class import check_json_default, require_address
from commandbus.model.limit import Limit
from commandbus.model.middleware import Middleware
from commandbus.model.names import ADDRESSES, check_domain, check_type
from commandbus.model.retry import RetryPolicy
from commandbus.quick_dataclass import dataclass
from commandbus.worker.execution.chunk_handlers import many_of, one_of, refuse_with_chunk
from commandbus.worker.execution.handler_options import (
    AllHandlerOptions,
    Options,
    check_options,
    declared_limits,
)
from commandbus.worker.execution.handler_signature import CallForm, call_form, own_signature
from commandbus.worker.execution.lifespan_declarations import LifespanDeclarations
from commandbus.worker.execution.middleware_declarations import MiddlewareDeclarations
from commandbus.worker.execution.payload_parameter import PayloadParameter, payload_parameter, refuse_typed_chunk
from commandbus.worker.execution.schedule_declarations import ScheduleDeclarations
from commandbus.worker.execution.wrapped_handlers import run_to_end, wrap

if TYPE_CHECKING:
    from commandbus.model.to_json import JsonDefault
    from commandbus.processes.manager import BaseProcessManager

F = TypeVar("F", bound=Callable[..., object])
_MARK = "__commandbus_handlers__"


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function and how it is called."""

    domain: str
    command_type: str
    function: Callable[..., Any]
    is_async: bool
    takes_command: bool
    options: Options = Options()
    is_router: bool = False  # it moves processes
    written: Callable[..., Any] | None = None  # what people wrote; `function` may be an adapter around it
    many: Callable[..., Any] | None = None  # of a chunk handler: takes a list; `function` takes one of it
    payload: PayloadParameter | None = None  # how its payload is read, if it does not take the command
    json_default: JsonDefault | None = None  # makes JSON of its result
    middleware: tuple[Middleware, ...] = ()  # of the registries that it was included from; the first is outermost

    @property
    def is_ordinary(self) -> bool:
        """Does it run in its slot's own thread, one command at a time, without permits of limits?"""
        options = self.options
        is_elsewhere = self.is_async or options.fresh_thread or options.isolation == "process"
        return not (is_elsewhere or options.limits or self.many)

    @property
    def retry_policy(self) -> RetryPolicy | None:
        """Its own retry policy, if it has one."""
        return self.options.retry_policy

    @property
    def name(self) -> str:
        """The function's name, for people."""
        module = getattr(self.function, "__module__", "?")
        return f"{module}.{getattr(self.function, '__qualname__', repr(self.function))}"


@overload
def handler(domain: str, command_type: str, **options: Unpack[AllHandlerOptions]) -> Callable[[F], F]: ...
@overload
def handler(command: type, /, **options: Unpack[AllHandlerOptions]) -> Callable[[F], F]: ...
def handler(
    domain: str | type, command_type: str | None = None, **options: Unpack[AllHandlerOptions]
) -> Callable[[F], F]:
    """Mark a method as a handler, for `HandlerRegistry.register_instance`."""
    address = _Address.of(domain, command_type)
    checked, declared = check_options(**options), declared_limits(options)

    def mark(function: F) -> F:
        marks = [*getattr(function, _MARK, ()), (address, checked, declared)]
        setattr(function, _MARK, marks)
        return function

    return mark


class _Address(NamedTuple):
    """What a handler is registered for; `payload` is the class, if it is registered by one."""

    domain: str
    command_type: str
    payload: type | None = None

    @classmethod
    def of(cls, domain: str | type, command_type: str | None) -> _Address:
        if isinstance(domain, type) and command_type is None:
            return cls(*require_address(domain), domain)
        return cls(check_domain(domain), check_type(command_type))


class HandlerRegistry(ScheduleDeclarations, MiddlewareDeclarations, LifespanDeclarations):
    """Handlers by (domain, command_type). Filled at import time, read by workers.

    `json_default`: makes JSON of what handlers return, if that is of a type that is unknown here.
    """

    def __init__(self, *, json_default: JsonDefault | None = None) -> None:
        ScheduleDeclarations.__init__(self)
        MiddlewareDeclarations.__init__(self)
        LifespanDeclarations.__init__(self)
        self._json_default = check_json_default(json_default)
        self._handlers: dict[tuple[str, str], Handler] = {}
        self._limits: dict[str, Limit] = {}

    @property
    def limits(self) -> list[Limit]:
        """The limits that were declared here."""
        return list(self._limits.values())

    def declare_limit(self, limit: Limit) -> Limit:
        """Declare a limit that handlers name. Workers declare it for all programs when they start."""
        if not isinstance(limit, Limit):
            raise TypeError(f"a limit must be a Limit(name, concurrency=…), not {limit!r:.80}")
        if self._limits.setdefault(limit.name, limit) != limit:
            raise ConfigurationError(
                f"limit {limit.name!r} is declared twice, differently: {self._limits[limit.name]} and {limit}"
            )
        return limit

    @overload
    def handler(
        self, domain: str, command_type: str, **options: Unpack[AllHandlerOptions]
    ) -> Callable[[F], F]: ...
    @overload
    def handler(self, command: type, /, **options: Unpack[AllHandlerOptions]) -> Callable[[F], F]: ...
    def handler(
        self, domain: str | type, command_type: str | None = None, **options: Unpack[AllHandlerOptions]
    ) -> Callable[[F], F]:
        """Register the decorated function, by names or by a class that is marked with `@command`; see `Options`.

        If its first parameter is annotated with a pydantic model, dataclass, TypedDict or msgspec struct, it gets
        the payload as that type instead of the command.
        """
        address = _Address.of(domain, command_type)
        checked = check_options(**options)
        for limit in declared_limits(options):
            self.declare_limit(limit)

        def register(function: F) -> F:
            self._add(address, function, checked)
            return function

        return register

    def register(
        self,
        domain: str,
        command_type: str,
        function: Callable[..., object],
        **options: Unpack[AllHandlerOptions],
    ) -> Handler:
        """Register a function; a second one for the same command is refused."""
        checked = check_options(**options)
        for limit in declared_limits(options):
            self.declare_limit(limit)
        return self._add(_Address.of(domain, command_type), function, checked)

    def register_process(self, manager: BaseProcessManager[Any]) -> Handler:
        """Let this registry's workers move the processes of a manager: its messages are commands of its type."""
        from commandbus.processes.manager import check_manager  # most workers have no processes
        from commandbus.worker.process_messages import handler_of  # it needs contexts, and they need us

        check_manager(manager)
        options = check_options(
            retry_policy=manager.retry_policy, timeout=manager.timeout, isolation=manager.isolation
        )
        address = _Address(manager.domain, manager.process_type)
        handler = self._add(address, handler_of(manager), options)
        self._handlers[manager.domain, manager.process_type] = made = replace(handler, is_router=True)
        return made

    def _add(self, address: _Address, function: Callable[..., Any], options: Options) -> Handler:
        key = (address.domain, address.command_type)
        if (existing := self._handlers.get(key)) is not None:
            raise DuplicateHandlerError(
                f"command_type {key[1]!r} of domain {key[0]!r} already has the handler {existing.name}"
            )
        made = replace(_make_handler(address, function, options), json_default=self._json_default)
        if options.fresh_thread and made.is_async:
            raise ValueError(
                f"handler {made.name} is `async def`, which runs on an event loop: fresh_thread is for `def`; "
                f'keep what is its own in context variables, or give it a process with isolation="process"'
            )
        self._handlers[key] = made
        _remember(function, key)
        return made

    def register_instance(self, instance: object) -> list[Handler]:
        """Register every method of an object that is marked with `@handler`; all or none."""
        found = [
            (mark, getattr(instance, name))
            for name in dir(type(instance))
            for mark in _marks_of(inspect.getattr_static(type(instance), name))
        ]
        if not found:
            raise ValueError(
                f"{type(instance).__name__} has no method marked with @commandbus.handler(domain, command_type)"
            )
        trial = HandlerRegistry(json_default=self._json_default)
        trial._handlers, trial._limits = dict(self._handlers), dict(self._limits)
        made = []
        for (address, options, declared), method in found:
            made.append(trial._add(address, method, options))
            for limit in declared:
                trial.declare_limit(limit)
        self._handlers, self._limits = trial._handlers, trial._limits
        return made

    def include(self, other: HandlerRegistry) -> None:
        """Take over the handlers, processes, limits and schedules that another registry has now; all or none."""
        from commandbus.worker.execution.include import include  # it needs us

        include(self, other)

    def discover(self, *modules: str) -> None:
        """Import modules, and include the registries in them. "shop.handlers.*" means all modules of a package."""
        from commandbus.worker.execution.include import discover

        discover(self, modules)

    def get(self, domain: str, command_type: str) -> Handler | None:
        """The handler for a command, if there is one."""
        return self._handlers.get((domain, command_type))

    def dispatch(self, command: Command, context: Any) -> Any:
        """Call the handler of a command with this context and its middleware, in this thread; returns its result.

        What is awaitable is run to its end on an event loop of its own. For tests and for programs that have no
        worker: nothing is leased, bounded in time or settled. A command without a handler is
        UnknownCommandTypeError.
        """
        found = self.get(command.domain, command.command_type)
        if found is None:
            raise UnknownCommandTypeError(command.domain, command.command_type)
        found = wrap(found, self._middleware)
        result = found.function(command, context) if found.takes_command else found.function(context)
        return run_to_end(result) if inspect.isawaitable(result) else result

    def resolve(self) -> None:
        """Resolve the types of all payloads. Workers do that when they start; ConfigurationError names the first
        handler whose annotation cannot be resolved."""
        for each in self:
            if each.payload is not None:
                each.payload.resolve()

    @property
    def domains(self) -> list[str]:
        """The domains that have handlers."""
        return sorted({domain for domain, _ in self._handlers})

    def types(self, domains: Container[str]) -> list[str]:
        """The command types of these domains that have handlers, as "orders/ship"; types of processes, too."""
        return [f"{domain}/{command_type}" for domain, command_type in list(self._handlers) if domain in domains]

    def __iter__(self) -> Iterator[Handler]:
        return iter(list(self._handlers.values()))

    def __len__(self) -> int:
        return len(self._handlers)


def _make_chunk_handler(
    address: _Address, function: Callable[..., Any], form: CallForm, options: Options
) -> Handler:
    is_async = _is_async(function)
    refuse_with_chunk(function, form, options)
    called = many_of(function, form, is_async=is_async, transaction=options.transaction)
    single = one_of(called, is_async=is_async)
    return Handler(*address[:2], single, is_async, True, options, written=function, many=called)


def _make_handler(address: _Address, function: Callable[..., Any], options: Options) -> Handler:
    domain, command_type, by_default = address
    is_async, signature = _is_async(function), own_signature(function)
    payload = None if options.chunk is not None else payload_parameter(function, signature, by_default)
    form = call_form(
        function,
        signature,
        transaction=options.transaction is not False,
        has_payload=payload is not None and payload.is_resolved,
    )
    if options.chunk is not None:
        refuse_typed_chunk(function, signature)
        return _make_chunk_handler(address, function, form, options)
    if payload is None and not form.transaction:
        return Handler(domain, command_type, function, is_async, form.command, options, written=function)
    from commandbus.worker.execution.adapters import adapted  # few handlers need one

    called = adapted(function, form, is_async=is_async, transaction=options.transaction, payload=payload)
    return Handler(domain, command_type, called, is_async, True, options, written=function, payload=payload)


def _remember(function: Callable[..., Any], address: tuple[str, str]) -> None:
    """Note on a function which command it handles, for `on_complete=function` (if it can have attributes)."""
    target = getattr(function, "__func__", function)  # a method has no attributes of its own
    with contextlib.suppress(AttributeError, TypeError):
        setattr(target, ADDRESSES, [*getattr(target, ADDRESSES, ()), address])


def _marks_of(member: object) -> Sequence[tuple[_Address, Options, list[Limit]]]:
    """The marks of a method; a staticmethod or classmethod keeps them on the function inside."""
    found: Sequence[tuple[_Address, Options, list[Limit]]] = getattr(
        getattr(member, "__func__", member), _MARK, ()
    )
    return found


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - a callable object may have an async __call__
    )
