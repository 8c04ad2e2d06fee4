"""`rejected`: messages of other clients that were not commands, set aside by the worker that claimed them."""

from __future__ import annotations

import click

from commandbus.cli.parameters import page_options
from commandbus.cli.render import print_table, shortened
from commandbus.cli.session import CliCommand, CliSession, check_known
from commandbus.cli.table import columns
from commandbus.flow.commands.inspect import RejectedMessage, list_rejected


@click.command(cls=CliCommand)
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@page_options
@click.pass_obj
def rejected(session: CliSession, domain: str | None, limit: int, cursor: str | None) -> None:
    """List messages that were not commands, newest first, with the reason."""
    with session.bus() as bus:
        page = bus.run(list_rejected(domain=domain, limit=limit, cursor=cursor))
        if not page.items:
            check_known(bus, domain)
    session.answer(
        page.items,
        lambda: print_table(
            columns(":id domain rejected?? ~reason ~message?"),
            [(item.id, item.domain, item.rejected_at, item.reason, _shown(item)) for item in page.items],
            empty="no rejected messages",
        ),
    )
    session.say_more(page)


def _shown(item: RejectedMessage) -> str:
    return "(not read)" if item.preview is None else shortened(item.message or item.preview)


COMMANDS = [rejected]
