"""`tsq list|count|retry|cancel|complete`: the troubleshooting queue, commands that need a person.

One command is named by `DOMAIN ID`, many by `--all --domain …`. Before it changes many commands, it asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from commandbus.cli import find_id
from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.parameters import JsonType, operator_options, page_options
from commandbus.cli.render import age_of, print_table, say
from commandbus.cli.session import CliGroup, CliSession, check_known
from commandbus.cli.table import columns
from commandbus.errors import InvalidOperationError
from commandbus.model.counting import counted
from commandbus.troubleshooting import TroubleshootingQueue

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class Target:
    """The commands that an action is for: one command, or all that match."""

    domain: str
    command_id: str | None
    command_type: str | None
    error_code: str | None
    is_confirmed: bool


@click.group(cls=CliGroup)
def tsq() -> None:
    """The troubleshooting queue: commands that need a person."""


def _filters(function: F) -> F:
    function = click.option("--code", "error_code", metavar="CODE", help="Only those with this error code.")(
        function
    )
    function = click.option("--type", "command_type", metavar="TYPE", help="Only of this command type.")(function)
    return click.option("--domain", "domain_option", metavar="NAME", help="Only of this domain.")(function)


def _target(function: F) -> F:
    function = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")(function)
    function = click.option("--all", "everything", is_flag=True, help="All that match, in --domain.")(function)
    function = _filters(operator_options(function))
    function = click.argument("command_id", metavar="[ID]", required=False)(function)
    return click.argument("domain", metavar="[DOMAIN]", required=False)(function)


@tsq.command("list")
@_filters
@click.option("--fingerprint", metavar="FINGERPRINT", help="Only those with this failure, as `failures` lists it.")
@page_options
@click.pass_obj
def list_entries(
    session: CliSession,
    domain_option: str | None,
    command_type: str | None,
    error_code: str | None,
    fingerprint: str | None,
    limit: int,
    cursor: str | None,
) -> None:
    """List the commands that need a person, and why."""
    with session.bus() as bus:
        page = TroubleshootingQueue(bus).list(
            domain_option,
            command_type,
            error_code=error_code,
            fingerprint=fingerprint,
            limit=limit,
            cursor=cursor,
        )
        if not page.items:
            check_known(bus, domain_option)
    session.answer(
        page.items,
        lambda: print_table(
            columns(":id domain type =command_id :attempt_number??? since?? code ~error?"),
            [(f"#{item.id}", item.domain, item.command_type, item.command_id, item.attempt,
              f"{age_of(item.entered_at)} ago", item.error_code, item.error) for item in page.items],
            empty="no command needs a person",
        ),
    )  # fmt: skip
    session.say_more(page)


@tsq.command()
@_filters
@click.pass_obj
def count(
    session: CliSession, domain_option: str | None, command_type: str | None, error_code: str | None
) -> None:
    """Count the commands that need a person, by domain and type."""
    with session.bus() as bus:
        found = TroubleshootingQueue(bus).count_by_type(domain_option, command_type, error_code=error_code)
        if not found:
            check_known(bus, domain_option)
    session.answer(
        [{"domain": domain, "command_type": kind, "count": number} for (domain, kind), number in found.items()],
        lambda: print_table(
            columns("domain type :count"),
            [(domain, kind, number) for (domain, kind), number in found.items()],
            empty="no command needs a person",
        ),
    )


@tsq.command()
@_target
@click.pass_context
def retry(ctx: click.Context, /, **words: Any) -> None:
    """Retry commands; their attempts are counted from 1 again."""
    _move(ctx, "retry", "retried", **words)


@tsq.command()
@_target
@click.pass_context
def cancel(ctx: click.Context, /, **words: Any) -> None:
    """Cancel commands: they end CANCELED."""
    _move(ctx, "cancel", "canceled", **words)


@tsq.command()
@_target
@click.option("--result", type=JsonType(), metavar="JSON", help="The result, as if its handler had returned it.")
@click.pass_context
def complete(ctx: click.Context, /, result: Any, **words: Any) -> None:
    """Complete commands that were done by hand: they end COMPLETED, with a result."""
    _move(ctx, "complete", "completed", {"result": result}, **words)


def _move(
    ctx: click.Context, verb: str, done: str, given: Mapping[str, Any] | None = None, /, *,
    operator: str | None, reason: str | None, **words: Any,
) -> None:  # fmt: skip
    """Retry, cancel or complete one command, or all that the options choose."""
    target = _aim(**words)
    options = {"operator": operator, "reason": reason, **(given or {})}
    with ctx.obj.bus() as bus:
        queue = TroubleshootingQueue(bus)
        if target.command_id is not None:
            target.command_id = find_id.of_command(bus, target.domain, target.command_id)
            getattr(queue, f"operator_{verb}")(target.domain, target.command_id, **options)
            moved = 1
        else:
            _confirm(ctx, queue, target, verb)
            options["error_code"] = target.error_code
            moved = getattr(queue, f"{verb}_all")(target.domain, target.command_type, **options)
    _say(ctx.obj, target, done, moved)


def _aim(
    *, domain: str | None, command_id: str | None, domain_option: str | None, command_type: str | None,
    error_code: str | None, everything: bool, yes: bool,
) -> Target:  # fmt: skip
    if not everything:
        if domain is None or command_id is None:
            raise click.UsageError("name one command (DOMAIN ID), or many (--all --domain DOMAIN)")
        if domain_option or command_type or error_code:
            raise click.UsageError("--domain, --type and --code choose among many: use them with --all")
        return Target(domain, command_id, None, None, is_confirmed=True)
    if domain is not None:
        raise click.UsageError("--all takes its domain as --domain DOMAIN, and no ID")
    if domain_option is None:
        raise click.UsageError("--all needs --domain DOMAIN")
    return Target(domain_option, None, command_type, error_code, is_confirmed=yes)


def _confirm(ctx: click.Context, queue: TroubleshootingQueue, target: Target, verb: str) -> None:
    number = queue.count(target.domain, target.command_type, error_code=target.error_code)
    if target.is_confirmed or number == 0:
        return
    if not is_somebody_there():
        raise InvalidOperationError(
            f"this would {verb} {counted(number, 'command')}, and there is no terminal to ask at; add --yes"
        )
    if not click.confirm(f"{verb} {counted(number, 'command')} of domain {target.domain}?", err=True):
        say("nothing was changed", is_error=True)
        ctx.exit(ExitCode.NO)


def is_somebody_there() -> bool:
    """Can the program ask a question and get an answer?"""
    return sys.stdin.isatty()


def _say(session: CliSession, target: Target, done: str, moved: int) -> None:
    what = counted(moved, "command") if target.command_id is None else target.command_id
    session.answer(
        {"domain": target.domain, "command_id": target.command_id, "action": done, "count": moved},
        lambda: say(f"{done} {what} of domain {target.domain}"),
    )


COMMANDS = [tsq]
