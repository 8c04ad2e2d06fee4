"""`failures`: failures that are alike, counted together."""

from __future__ import annotations

from datetime import datetime

import click

from commandbus.cli.parameters import SINCE
from commandbus.cli.render import age_of, print_table
from commandbus.cli.session import CliCommand, CliSession, check_known
from commandbus.cli.table import columns
from commandbus.flow.commands.failures import FailureGroup


@click.command(cls=CliCommand)
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@click.option("--type", "command_type", metavar="TYPE", help="Only of this command type.")
@click.option(
    "--since", type=SINCE, metavar="TIME", help="Only seen since: an ISO instant, or a duration such as 2h."
)
@click.option("--tsq", "in_troubleshooting", is_flag=True, help="Only failures of commands that need a person.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="How many to list at most.")
@click.pass_obj
def failures(
    session: CliSession,
    domain: str | None,
    command_type: str | None,
    since: datetime | None,
    in_troubleshooting: bool,  # noqa: FBT001
    limit: int,
) -> None:
    """List failures that are alike, the one that was seen last first.

    Failures of one command type are alike if they have the same error type, error code, and innermost frame of
    your own code (WHERE). COUNT is how many attempts failed like this (since --since), WAIT how many of their
    commands need a person, SHARE how much of the type's attempts failed like this, among the newest 5,000
    commands. VERSION is the version of the code that failed like this first; "new in" means that this version runs
    now, and another one ran before it.
    """
    with session.bus() as bus:
        page = bus.list_failures(
            domain, command_type, since=since, in_troubleshooting=in_troubleshooting, limit=limit
        )
        if not page.items:
            check_known(bus, domain)
    session.answer(
        page.items,
        lambda: print_table(
            columns("fingerprint type :count :wait :share? last?? first??? version?? code ~where ~error?"),
            [_row(item) for item in page.items],
            empty="no failures",
        ),
    )


def _row(item: FailureGroup) -> tuple[object, ...]:
    return (
        item.fingerprint,
        f"{item.domain}/{item.command_type}",
        item.count,
        item.in_troubleshooting,
        None if item.share is None else f"{item.share:.0%}",
        f"{age_of(item.last_seen)} ago",
        f"{age_of(item.first_seen)} ago",
        f"new in {item.since_version}" if item.is_new else item.since_version,
        f"{item.error_type} [{item.error_code}]",
        item.own_frame,
        item.error,
    )


COMMANDS = [failures]
