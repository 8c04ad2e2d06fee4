"""Registries made of registries: a part of HandlerRegistry.

handlers.include(billing.handlers)
handlers.discover("shop.handlers.*")
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType

from commandbus.errors import ConfigurationError, DuplicateHandlerError
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.load_handlers import import_module


def include(registry: HandlerRegistry, *others: HandlerRegistry) -> None:
    """Take over what other registries have; all or none."""
    trial = HandlerRegistry()
    trial._handlers, trial._limits = dict(registry._handlers), dict(registry._limits)
    trial._schedules = dict(registry._schedules)
    trial._send_middleware, trial._lifespans = registry._send_middleware, registry._lifespans
    for other in others:
        if not isinstance(other, HandlerRegistry):
            raise TypeError(f"include takes a HandlerRegistry, not {other!r:.80}")
        _take_over(trial, other)
    registry._handlers, registry._limits, registry._schedules = trial._handlers, trial._limits, trial._schedules
    registry._send_middleware, registry._lifespans = trial._send_middleware, trial._lifespans


def _take_over(trial: HandlerRegistry, other: HandlerRegistry) -> None:
    for key, new in other._handlers.items():
        if (existing := trial._handlers.get(key)) is not None:
            raise DuplicateHandlerError(
                f"command_type {new.command_type!r} of domain {new.domain!r} has two handlers: {existing.name}, "
                f"and {new.name} of a registry that is included; remove one of them"
            )
        trial._handlers[key] = replace(new, middleware=(*other._middleware, *new.middleware))
    for limit in other.limits:
        trial.declare_limit(limit)
    for schedule in other.schedules:
        trial.declare_schedule(schedule)
    trial._adopt_middleware(other)
    trial._adopt_lifespans(other)


def discover(registry: HandlerRegistry, names: Sequence[str]) -> None:
    """Import modules, and include each registry that they have as a variable. Modules that register their handlers
    with this registry need no more than the import."""
    found: dict[int, HandlerRegistry] = {}
    for name in names:
        for module in _modules(name):
            values = [value for value in vars(module).values() if isinstance(value, HandlerRegistry)]
            found |= {id(value): value for value in values if value is not registry}
    include(registry, *found.values())


def _modules(name: str) -> Iterator[ModuleType]:
    if not name.endswith(".*"):
        yield import_module(name)
        return
    package = import_module(name.removesuffix(".*"))
    if not hasattr(package, "__path__"):
        raise ConfigurationError(f"handlers: {name!r} names a module, not a package; leave out the .*")
    for each in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        yield import_module(f"{package.__name__}.{each}")
