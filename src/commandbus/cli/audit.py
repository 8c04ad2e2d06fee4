"""`audit`: who did what, when and why, over all commands, limits, breakers, pauses and schedules."""

from __future__ import annotations

from datetime import datetime

import click

from commandbus.cli.parameters import SINCE, page_options
from commandbus.cli.render import print_table
from commandbus.cli.session import CliCommand, CliSession, check_known
from commandbus.cli.table import columns
from commandbus.flow.audit.list_actions import ActionRecord
from commandbus.model.action_export import as_csv, as_json_lines


@click.command(cls=CliCommand)
@click.option("--by", "operator", metavar="NAME", help="Only by this person; commandbus itself is `commandbus`.")
@click.option("--action", metavar="ACTION", help="Only this action: RETRY, CANCEL, COMPLETE, PAUSE, OPEN, …")
@click.option("--domain", metavar="NAME", help="Only in this domain.")
@click.option("--since", type=SINCE, metavar="TIME", help="Only since: an ISO instant, or 2h for 2 h ago.")
@click.option("--before", type=SINCE, metavar="TIME", help="Only before: an ISO instant, or 2h for 2 h ago.")
@click.option("--export", type=click.Choice(["csv", "jsonl"]), help="Print CSV or JSON lines, without the table.")
@page_options
@click.pass_obj
def audit(
    session: CliSession,
    operator: str | None,
    action: str | None,
    domain: str | None,
    since: datetime | None,
    before: datetime | None,
    export: str | None,
    limit: int,
    cursor: str | None,
) -> None:
    """List what people did, newest first: who, what, when and why.

    What commandbus does to limits and breakers by itself is among it, by the operator `commandbus`.
    """
    with session.bus() as bus:
        page = bus.audit.list_actions(
            operator=operator, action=action, domain=domain, since=since, before=before, limit=limit, cursor=cursor
        )
        if not page.items:
            check_known(bus, domain)
    if export is not None:
        text = as_csv(page.items) if export == "csv" else as_json_lines(page.items)
        click.echo(text, nl=False)
        session.say_more(page, is_error=True)
        return
    session.answer(page.items, lambda: _print(page.items))
    session.say_more(page)


def _print(found: list[ActionRecord]) -> None:
    print_table(
        columns("when operator action =subject ~reason?"),
        [(item.performed_at, item.operator, item.action, item.subject, item.reason) for item in found],
        empty="nobody did anything",
    )


COMMANDS = [audit]
