"""Kinds of values on the command line: durations, instants, JSON; and options made from the table of settings.

A bad value is a usage error (exit code 2) that names the option and what it accepts. Options made from settings
keep the settings' own error and code (3), because a file or the environment may be the cause.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from commandbus.model.durations import parse_seconds
from commandbus.settings import SETTINGS, Setting

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    AnyType = click.ParamType[Any]
else:
    AnyType = click.ParamType  # before click 8.3 it takes no type arguments at run time


class DurationType(AnyType):
    """`5m`, `1h30m`, `250ms` or seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_seconds(value, name=self.name)
        except ValueError as error:
            self.fail(str(error).removeprefix(f"{self.name}: "), param, ctx)  # click names the option


class InstantType(AnyType):
    """An ISO 8601 instant with its time zone; with `or_ago` also a duration, counted back from now."""

    name = "instant"

    def __init__(self, *, or_ago: bool = False) -> None:
        self._or_ago = or_ago

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        if self._or_ago:
            try:
                return datetime.now(UTC) - timedelta(seconds=parse_seconds(value, name="since"))
            except (ValueError, OverflowError):
                pass
        try:
            return parse_instant(value)
        except ValueError as error:
            self.fail(f"{error}{', or a duration such as 2h' if self._or_ago else ''}", param, ctx)


class JsonType(AnyType):
    """A JSON value."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_json(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


DURATION = DurationType()
INSTANT = InstantType()
SINCE = InstantType(or_ago=True)


def parse_instant(text: str) -> datetime:
    """An instant from ISO 8601. The time zone must be given, because without it the instant is ambiguous."""
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not an instant; give 2026-01-31T09:30:00Z or …+01:00") from None
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone; add Z for UTC, or an offset such as +01:00")
    return found


def parse_json(text: str) -> Any:
    """A JSON value; the error says where the JSON is wrong."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"not JSON: {error.msg} at {where}{_quoting_hint(text)}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None


def operator_options(function: F) -> F:
    """`--operator` and `--reason`, for actions of people."""
    function = click.option("--reason", metavar="TEXT", help="The reason; it is recorded.")(function)
    return click.option("--operator", metavar="NAME", help="Your name, for the record. [default: your login]")(
        function
    )


def page_options(function: F) -> F:
    """`--limit` and `--cursor`, for lists; `CliSession.say_more` prints the next cursor."""
    function = click.option("--cursor", metavar="CURSOR", help="The next page: what the last one said.")(function)
    return click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)(function)


def setting_options(settings: Iterable[Setting]) -> Callable[[F], F]:
    """An option for each setting, not parsed yet: `load_settings` reports what is wrong with it."""

    def decorate(function: F) -> F:
        for setting in reversed(list(settings)):
            shown = setting.kind.show(setting.default)
            function = click.option(
                f"--{setting.name.replace('_', '-')}",
                setting.name,
                metavar="VALUE",
                help=f"{setting.help}. [{setting.env}; default: {shown}]",
            )(function)
        return function

    return decorate


def settings_in(*sections: str) -> list[Setting]:
    """The settings of some sections of commandbus.toml."""
    return [setting for setting in SETTINGS.values() if setting.toml.partition(".")[0] in sections]


def _quoting_hint(text: str) -> str:
    is_bare_word = text[:1].isalpha() and text not in ("true", "false", "null")
    return "; a string needs its own quotes: '\"text\"'" if is_bare_word else ""
