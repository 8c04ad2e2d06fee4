"""The limits with a key among the limits of handlers: `Limit("tenant", concurrency=3, key="data.tenant_id")`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from commandbus.errors import ConfigurationError
from commandbus.model.key_limit import KeyLimit, KeyRule, default_of
from commandbus.model.limit import Limit

if TYPE_CHECKING:
    from commandbus.worker.execution.handlers import Handler, HandlerRegistry


def with_keys(limits: object) -> list[Limit]:
    """Those that have a key."""
    items = limits if isinstance(limits, Iterable) else ()
    return [item for item in items if isinstance(item, Limit) and item.key is not None]


def key_rule(limits: object) -> KeyRule | None:
    """The rule for the commands of a handler with these limits. Two limits with a key are an error."""
    found = {item.name: KeyRule(item.name, item.key) for item in with_keys(limits) if item.key is not None}
    if len(found) > 1:
        raise ConfigurationError(
            f"a handler can have one limit with a key, not {len(found)}: {', '.join(sorted(found))}. A command "
            f"waits in one line"
        )
    return next(iter(found.values()), None)


def name_keys(registry: HandlerRegistry, declared: Iterable[Limit]) -> None:
    """Let handlers that name a limit by its name know that it has a key, now that all limits are known."""
    keyed = {limit.name: limit for limit in with_keys(declared)}
    for address, found in list(registry._handlers.items()):
        options = found.options
        if named := [keyed[name] for name in options.limits if name in keyed]:
            own = [] if options.key is None else [keyed[options.key.key_limit]]
            rest = tuple(name for name in options.limits if name not in keyed)
            changed = replace(options, limits=rest, key=key_rule([*named, *own]))
            registry._handlers[address] = replace(found, options=changed)


def key_limits(handlers: Iterable[Handler], declared: Iterable[Limit], domains: Container[str]) -> list[KeyLimit]:
    """The key limits that handlers of these domains use. A limit with a key belongs to one domain."""
    keyed = {limit.name: limit for limit in with_keys(declared)}
    found: dict[str, KeyLimit] = {}
    for handler in handlers:
        if handler.options.key is None:
            continue
        limit = _in_domain(keyed, handler)
        first = found.setdefault(limit.name, limit)
        if first.domain != limit.domain:
            raise ConfigurationError(
                f"limit {limit.name!r} has a key, and handlers of two domains use it: {first.domain} and "
                f"{limit.domain}. Such a limit counts within one domain: declare one for each, with another name"
            )
    return [limit for limit in found.values() if limit.domain in domains]


def rules(handlers: Iterable[Handler], domains: Container[str]) -> Mapping[tuple[str, str], KeyRule | None]:
    """The rule of each command type of these domains, by domain and type; None if it has none."""
    return {(item.domain, item.command_type): item.options.key for item in handlers if item.domain in domains}


def _in_domain(keyed: Mapping[str, Limit], handler: Handler) -> KeyLimit:
    assert handler.options.key is not None  # noqa: S101
    limit = keyed[handler.options.key.key_limit]
    return KeyLimit(
        handler.domain,
        limit.name,
        limit.concurrency or 1,
        limit.ordered,
        limit.on_failure or default_of(ordered=limit.ordered),
    )
