"""`breakers`, `breakers open|close|reset`: which breakers are open, why, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from commandbus.cli.parameters import operator_options
from commandbus.cli.render import print_table, say
from commandbus.cli.session import CliSession, ListingGroup
from commandbus.cli.table import columns
from commandbus.flow.breakers.operate import BreakerInfo
from commandbus.flow.commands.known_types import doubt_type
from commandbus.model.counting import counted

F = TypeVar("F", bound=Callable[..., Any])
_STATES = {"CLOSED": "closed", "OPEN": "open", "HALF_OPEN": "half open"}


def _which(function: F) -> F:
    """DOMAIN TYPE, or --limit NAME."""
    for parameter in (
        click.option("--limit", metavar="NAME", help="The breaker of this limit, instead of a command type's."),
        click.argument("command_type", metavar="[TYPE]", required=False),
        click.argument("domain", metavar="[DOMAIN]", required=False),
    ):
        function = parameter(function)
    return operator_options(function)


@click.group(cls=ListingGroup)
@click.pass_context
def breakers(ctx: click.Context) -> None:
    """List the breakers of command types and limits: their state, why they are open, and until when.

    An open breaker stops a command type, or the calls of an API, for a while. Then one command is the probe. If it
    succeeds, the breaker closes. A command type is listed once its breaker has counted something. OTHERS are its
    attempts that ended in another way since the first bad one began: the breaker opens only if they are not the
    majority.
    """
    if ctx.invoked_subcommand is not None:
        return
    session: CliSession = ctx.obj
    with session.bus() as bus:
        found = bus.breakers().items
    session.answer(
        found,
        lambda: print_table(
            columns("of =name state until :stuck?? :failures?? :others?? :parked? ~reason"),
            [(item.kind, item.name, _state(item), _until(item), item.stuck, item.failures,
              item.others if item.kind == "type" else None, item.parked, item.reason) for item in found],
            empty="no breaker has counted anything, and there are no limits",
        ),
    )  # fmt: skip


@breakers.command("open")
@_which
@click.pass_obj
def open_breaker(
    session: CliSession,
    domain: str | None,
    command_type: str | None,
    limit: str | None,
    operator: str | None,
    reason: str | None,
) -> None:
    """Open a breaker until somebody closes it. Running attempts go on; waiting commands are parked."""
    name = _name(domain, command_type, limit)
    with session.bus() as bus:
        changed = bus.open_breaker(domain, command_type, limit=limit, operator=operator, reason=reason)
        doubt = bus.run(doubt_type(domain, command_type)) if domain and command_type else None
    session.warn(doubt)
    session.answer(
        {"breaker": name, "state": "OPEN", "changed": changed, "warning": doubt},
        lambda: say(f"the breaker of {name} {'is' if changed else 'was already'} open, until somebody closes it"),
    )


@breakers.command("close")
@_which
@click.pass_obj
def close_breaker(
    session: CliSession,
    domain: str | None,
    command_type: str | None,
    limit: str | None,
    operator: str | None,
    reason: str | None,
) -> None:
    """Close an open breaker, no matter who has opened it. Its parked commands go on."""
    name = _name(domain, command_type, limit)
    with session.bus() as bus:
        released = bus.close_breaker(domain, command_type, limit=limit, operator=operator, reason=reason)
    session.answer(
        {"breaker": name, "state": "CLOSED", "released": released},
        lambda: say(f"the breaker of {name} is closed; {_released(released, limit)}"),
    )


@breakers.command("reset")
@_which
@click.pass_obj
def reset_breaker(
    session: CliSession,
    domain: str | None,
    command_type: str | None,
    limit: str | None,
    operator: str | None,
    reason: str | None,
) -> None:
    """Close a breaker and clear its counts. A limit's back-off ends, too."""
    name = _name(domain, command_type, limit)
    with session.bus() as bus:
        released = bus.reset_breaker(domain, command_type, limit=limit, operator=operator, reason=reason)
    session.answer(
        {"breaker": name, "state": "CLOSED", "released": released},
        lambda: say(f"the breaker of {name} is closed, and its counts are cleared; {_released(released, limit)}"),
    )


def _name(domain: str | None, command_type: str | None, limit: str | None) -> str:
    if limit is not None:
        if domain is not None:
            raise click.UsageError("give DOMAIN TYPE or --limit NAME, not both")
        return f"limit {limit}"
    if domain is None or command_type is None:
        raise click.UsageError("no breaker is named; give DOMAIN TYPE, or --limit NAME")
    return f"{domain}/{command_type}"


def _released(count: int, limit: str | None) -> str:
    if limit is not None:
        return f"{counted(count, 'command')} waited for the limit"
    return f"{counted(count, 'parked command')} went back to the queue"


def _state(item: BreakerInfo) -> str:
    return _STATES[item.state] + (f", {item.probe} is the probe" if item.kind == "type" and item.probe else "")


def _until(item: BreakerInfo) -> object:
    return "somebody closes it" if item.is_forced else item.until if item.state == "OPEN" else None


COMMANDS = [breakers]
