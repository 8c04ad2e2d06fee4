"""HandlerRegistry: which function runs which command.

    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command, ctx): ...

A handler is `def` or `async def`, with `(command, ctx)` or `(ctx)`. Methods of a class are marked with
`@handler(domain, command_type)` and registered with an instance: `handlers.register_instance(Orders(db))`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Literal, TypeVar

from commandbus.errors import ConfigurationError, DuplicateHandlerError, UnknownCommandTypeError
from commandbus.model.batch import ADDRESSES
from commandbus.model.command import Command
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.limit import Limit, check_limit_name
from commandbus.model.names import check_domain, check_type
from commandbus.model.retry import OnExhausted, RetryPolicy, check_on_exhausted
from commandbus.processes.manager import BaseProcessManager, check_manager
from commandbus.worker.execution.schedule_declarations import ScheduleDeclarations

F = TypeVar("F", bound=Callable[..., object])
OnTimeout = Literal["retry", "fail"]
Isolation = Literal["thread", "process"]
_MARK = "__commandbus_handlers__"


@dataclass(frozen=True, slots=True)
class Options:
    """The checked options of a handler.

    `timeout`: how long one attempt may take, in seconds; 0: no deadline; None: the worker's task_timeout.
    `on_timeout`: "retry" after a timeout, or "fail": the command is FAILED for good. `on_exhausted`: what happens
    when the attempts are used up, "troubleshoot" or "fail"; None: as the retry policy says. `isolation`:
    "process" runs it in a child process, which can be killed without harm to its neighbors. `limits`: it needs a
    permit of each of these; until it has them, its commands are parked. `fresh_thread`: each attempt runs in a new
    thread, which ends with it.
    """

    retry_policy: RetryPolicy | None = None
    timeout: float | None = None
    on_timeout: OnTimeout = "retry"
    isolation: Isolation = "thread"
    limits: tuple[str, ...] = ()
    fresh_thread: bool = False
    on_exhausted: OnExhausted | None = None


def _check_options(
    retry_policy: object,
    timeout: Duration | None,
    on_timeout: object,
    isolation: object,
    limits: object = (),
    fresh_thread: object = False,
    on_exhausted: object = None,
) -> Options:
    if retry_policy is not None and not isinstance(retry_policy, RetryPolicy):
        raise TypeError(f"retry_policy must be a RetryPolicy, not {type(retry_policy).__name__}")
    if on_timeout not in ("retry", "fail"):
        raise ValueError(f'on_timeout must be "retry" or "fail", not {on_timeout!r}')
    if isolation not in ("thread", "process"):
        raise ValueError(f'isolation must be "thread" or "process", not {isolation!r}')
    seconds = None if timeout is None else parse_seconds(timeout, name="timeout")
    if not isinstance(fresh_thread, bool):
        raise TypeError(f"fresh_thread must be True or False, not {fresh_thread!r}")
    own = None if on_exhausted is None else check_on_exhausted(on_exhausted)
    return Options(retry_policy, seconds, on_timeout, isolation, _limit_names(limits), fresh_thread, own)


def _limit_names(limits: object) -> tuple[str, ...]:
    if isinstance(limits, str | Limit) or not isinstance(limits, Sequence):
        raise TypeError(f'limits must be a list of names or Limits, such as ["docai"], not {limits!r:.80}')
    # In one order everywhere, so that two handlers never wait for each other's.
    return tuple(sorted({item.name if isinstance(item, Limit) else check_limit_name(item) for item in limits}))


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

    @property
    def retry_policy(self) -> RetryPolicy | None:
        """Its own retry policy, if it has one."""
        return self.options.retry_policy

    @property
    def name(self) -> str:
        """The function's name, for people."""
        module = getattr(self.function, "__module__", "?")
        return f"{module}.{getattr(self.function, '__qualname__', repr(self.function))}"


def handler(
    domain: str,
    command_type: str,
    *,
    retry_policy: RetryPolicy | None = None,
    timeout: Duration | None = None,
    on_timeout: OnTimeout = "retry",
    isolation: Isolation = "thread",
    limits: Sequence[str | Limit] = (),
    fresh_thread: bool = False,
    on_exhausted: OnExhausted | None = None,
) -> Callable[[F], F]:
    """Mark a method as a handler, for `HandlerRegistry.register_instance`."""
    check_domain(domain)
    check_type(command_type)
    options = _check_options(retry_policy, timeout, on_timeout, isolation, limits, fresh_thread, on_exhausted)
    declared = _declared(limits)

    def mark(function: F) -> F:
        marks = [*getattr(function, _MARK, ()), (domain, command_type, options, declared)]
        setattr(function, _MARK, marks)
        return function

    return mark


class HandlerRegistry(ScheduleDeclarations):
    """Handlers by (domain, command_type). Filled at import time, read by workers."""

    def __init__(self) -> None:
        super().__init__()
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

    def handler(
        self,
        domain: str,
        command_type: str,
        *,
        retry_policy: RetryPolicy | None = None,
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "retry",
        isolation: Isolation = "thread",
        limits: Sequence[str | Limit] = (),
        fresh_thread: bool = False,
        on_exhausted: OnExhausted | None = None,
    ) -> Callable[[F], F]:
        """Register the decorated function; see `Options`."""
        options = _check_options(retry_policy, timeout, on_timeout, isolation, limits, fresh_thread, on_exhausted)
        for limit in _declared(limits):
            self.declare_limit(limit)

        def register(function: F) -> F:
            self._add(domain, command_type, function, options)
            return function

        return register

    def register(
        self,
        domain: str,
        command_type: str,
        function: Callable[..., object],
        *,
        retry_policy: RetryPolicy | None = None,
        timeout: Duration | None = None,
        on_timeout: OnTimeout = "retry",
        isolation: Isolation = "thread",
        limits: Sequence[str | Limit] = (),
        fresh_thread: bool = False,
        on_exhausted: OnExhausted | None = None,
    ) -> Handler:
        """Register a function; a second one for the same command is refused."""
        options = _check_options(retry_policy, timeout, on_timeout, isolation, limits, fresh_thread, on_exhausted)
        for limit in _declared(limits):
            self.declare_limit(limit)
        return self._add(domain, command_type, function, options)

    def register_process(self, manager: BaseProcessManager[Any]) -> Handler:
        """Let this registry's workers move the processes of a manager: its messages are commands of its type."""
        from commandbus.worker.process_messages import handler_of  # it needs contexts, and they need us

        check_manager(manager)
        options = _check_options(manager.retry_policy, manager.timeout, "retry", manager.isolation)
        handler = self._add(manager.domain, manager.process_type, handler_of(manager), options)
        self._handlers[manager.domain, manager.process_type] = made = replace(handler, is_router=True)
        return made

    def _add(self, domain: str, command_type: str, function: Callable[..., Any], options: Options) -> Handler:
        key = (check_domain(domain), check_type(command_type))
        if (existing := self._handlers.get(key)) is not None:
            raise DuplicateHandlerError(
                f"command_type {command_type!r} of domain {domain!r} already has the handler {existing.name}"
            )
        made = Handler(domain, command_type, function, _is_async(function), _takes_command(function), options)
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
        trial = HandlerRegistry()
        trial._handlers, trial._limits = dict(self._handlers), dict(self._limits)
        made = []
        for (domain, command_type, options, declared), method in found:
            made.append(trial._add(domain, command_type, method, options))
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
        """Call the handler of a command with this context, in this thread, and return its result.

        What is awaitable is run to its end on an event loop of its own. For tests and for programs that have no
        worker: nothing is leased, bounded in time or settled. A command without a handler is
        UnknownCommandTypeError.
        """
        found = self.get(command.domain, command.command_type)
        if found is None:
            raise UnknownCommandTypeError(command.domain, command.command_type)
        result = found.function(command, context) if found.takes_command else found.function(context)
        return _run_to_end(result) if inspect.isawaitable(result) else result

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


def _remember(function: Callable[..., Any], address: tuple[str, str]) -> None:
    """Note on a function which command it handles, for `on_complete=function` (if it can have attributes)."""
    target = getattr(function, "__func__", function)  # a method has no attributes of its own
    with contextlib.suppress(AttributeError, TypeError):
        setattr(target, ADDRESSES, [*getattr(target, ADDRESSES, ()), address])


def _declared(limits: Sequence[str | Limit]) -> list[Limit]:
    return [item for item in limits if isinstance(item, Limit)]


def _marks_of(member: object) -> Sequence[tuple[str, str, Options, list[Limit]]]:
    """The marks of a method; a staticmethod or classmethod keeps them on the function inside."""
    found: Sequence[tuple[str, str, Options, list[Limit]]] = getattr(
        getattr(member, "__func__", member), _MARK, ()
    )
    return found


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - a callable object may have an async __call__
    )


def _run_to_end(result: Awaitable[Any]) -> Any:
    import asyncio  # a module of handlers is imported by programs that need none

    async def finish() -> Any:
        return await result

    return asyncio.run(finish())


def _takes_command(function: Callable[..., Any]) -> bool:
    """Two parameters: (command, ctx). One: (ctx). A parameter beyond these must have a default."""
    if not callable(function):
        raise TypeError(f"a handler must be callable, not {type(function).__name__}")
    try:
        signature = _own_signature(function)
    except (TypeError, ValueError):
        return True
    name, parameters = getattr(function, "__qualname__", repr(function)), signature.parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if unfilled := [p.name for p in required if p not in places[:2]]:
        raise TypeError(
            f"handler {name!r} must take (command, ctx) or (ctx), not {signature}: nobody gives it "
            f"{', '.join(unfilled)}; give that a default, or bind it with functools.partial"
        )
    if not places and not takes_any:
        raise TypeError(f"handler {name!r} must take (command, ctx) or (ctx), not {signature}")
    if places and places[0].name in _CONTEXT_NAMES:
        return _takes_context_first(name, signature, places)
    if len(places) == 1 and places[0].name == "command" and not takes_any:
        raise TypeError(
            f"handler {name!r} takes (command) alone, but a lone parameter gets the context: write "
            f"(command, ctx), or (ctx) and use ctx.command"
        )
    if len(places) >= 2 and places[1].default is not inspect.Parameter.empty:
        _refuse_other_default(name, signature, places[1])
    return takes_any or len(places) >= 2


_CONTEXT_NAMES = ("ctx", "context")


def _takes_context_first(name: str, signature: inspect.Signature, places: list[inspect.Parameter]) -> bool:
    """Its first parameter is the context, so it takes no command: a second one keeps its default."""
    if len(places) > 1 and (places[1].default is inspect.Parameter.empty or places[1].name == "command"):
        raise TypeError(
            f"handler {name!r} takes {signature}, but command comes first: write (command, ctx), or (ctx) and use "
            f"ctx.command"
        )
    return False


def _refuse_other_default(name: str, signature: inspect.Signature, second: inspect.Parameter) -> None:
    """(command, retries=3): the context would become the number of retries."""
    if second.name not in _CONTEXT_NAMES:
        raise TypeError(
            f"handler {name!r} takes {signature}, but its second parameter gets the context: write "
            f"(command, ctx), and {second.name} after them"
        )


def _own_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The function's own parameters. With `functools.wraps`, a wrapper claims the parameters of the wrapped
    function; that counts only if the wrapper takes `*args`."""
    return inspect.signature(_who_says(function), follow_wrapped=False)


def _who_says(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose parameters count: itself, or what it hands all of its arguments to."""
    if isinstance(function, functools.partial):
        return functools.partial(_who_says(function.func), *function.args, **function.keywords)
    if inspect.ismethod(function):
        return MethodType(_who_says(function.__func__), function.__self__)
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    inner = getattr(function, "__wrapped__", None)
    if inner is None or not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    return _who_says(inner)
