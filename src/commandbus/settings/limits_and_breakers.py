"""Limits and breakers, which have names of their own. They are given as objects, or as options by name.

A limit's key is its name. A breaker's is "DOMAIN/COMMAND_TYPE", "DOMAIN/*" for all types of a domain, or "*".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from commandbus.errors import ConfigurationError, InvalidCommandError
from commandbus.model import breaker as breaker_model
from commandbus.model import limit as limit_model
from commandbus.model.breaker import Breaker
from commandbus.model.limit import Limit, check_limit_name
from commandbus.model.names import check_domain, check_type, shown

TABLES: Final = {"limits": limit_model.OPTIONS, "breakers": breaker_model.OPTIONS}
"""The options that an entry of each table may have."""


def declared_limits(given: object) -> tuple[Limit, ...]:
    """Limits, or options by name: `{"docai": {"concurrency": 5}}`. Each name is kept once, in the given order."""
    if isinstance(given, Mapping):
        return tuple(_limit(name, options) for name, options in given.items())
    if isinstance(given, str | bytes | Limit) or not isinstance(given, Iterable):
        raise ConfigurationError(
            f"limits must be a list such as [Limit('docai', concurrency=5)], not {shown(given)}"
        )
    found: dict[str, Limit] = {}
    for limit in given:
        if not isinstance(limit, Limit):
            raise ConfigurationError(f"limits: {shown(limit)} is not a Limit; give Limit('docai', concurrency=5)")
        if limit.name in found:
            raise ConfigurationError(f"limits: {limit.name!r} is listed twice; list each one once")
        found[limit.name] = limit
    return tuple(found.values())


def declared_breakers(given: object) -> dict[str, Breaker]:
    """Breakers, or options, by key: `{"orders/ship": Breaker(stuck=3), "*": {"stuck": 10}}`."""
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"breakers must be a mapping such as {{'orders/ship': Breaker(stuck=3)}}, not {shown(given)}"
        )
    return {check_breaker_key(key): _breaker(key, options) for key, options in given.items()}


def check_breaker_key(key: object) -> str:
    """Returns the key of a breaker, or raises an error that says what is wrong with it."""
    if key == "*":
        return "*"
    domain, slash, command_type = key.partition("/") if isinstance(key, str) else ("", "", "")
    try:
        if slash:
            return f"{check_domain(domain)}/{check_type(command_type)}"
    except InvalidCommandError as error:
        raise ConfigurationError(f"breakers: {error}") from None
    raise ConfigurationError(
        f'breakers: {shown(key)} names no command type; write "DOMAIN/COMMAND_TYPE" ("orders/ship"), "DOMAIN/*" '
        f'or "*"'
    )


def check_key(table: str, key: object) -> str:
    """Returns the key of an entry of this table, or raises an error that says what is wrong with it."""
    return check_limit_name(key) if table == "limits" else check_breaker_key(key)


def check_options(table: str, options: Iterable[str], origin: str) -> None:
    """Refuse an option that entries of this table do not have. The error suggests a similar one."""
    known = TABLES[table]
    for option in options:
        if option not in known:
            import difflib

            close = difflib.get_close_matches(option, known, n=1)
            guess = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
            raise ConfigurationError(f"{origin} {option:.80}: unknown option; {guess}")


def _limit(name: object, options: object) -> Limit:
    check_limit_name(name)
    if isinstance(options, Limit):
        if options.name != name:
            raise ConfigurationError(f"limits: {options.name!r} stands under the name {name!r}; give one of them")
        return options
    return Limit.from_json(str(name), _options("limits", str(name), options))


def _breaker(key: str, options: object) -> Breaker:
    if isinstance(options, Breaker):
        return options
    given = _options("breakers", key, options)
    try:
        return Breaker.from_json(given)
    except ConfigurationError as error:
        raise ConfigurationError(f"breaker {key!r}{str(error).removeprefix('breaker')}") from None


def _options(table: str, key: str, options: object) -> Mapping[str, Any]:
    if not isinstance(options, Mapping):
        what = "Limit" if table == "limits" else "Breaker"
        raise ConfigurationError(f"{table}: {key!r} must be a {what}, or options by name, not {shown(options)}")
    return options
