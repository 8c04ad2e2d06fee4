"""`rejected`: messages of other clients that were no commands, moved aside by the worker that met them."""

from __future__ import annotations

import click

from commandbus.cli.render import print_table, shortened
from commandbus.cli.session import CliCommand, CliSession, check_known
from commandbus.cli.table import columns
from commandbus.flow.commands.inspect import RejectedMessage, list_rejected


@click.command(cls=CliCommand)
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--before-id", type=int, metavar="ID", help="The next page: before this id.")
@click.pass_obj
def rejected(session: CliSession, domain: str | None, limit: int, before_id: int | None) -> None:
    """List messages that were not commands, newest first, with the reason."""
    with session.bus() as bus:
        found = bus.run(list_rejected(domain=domain, limit=limit, before_id=before_id))
        if not found:
            check_known(bus, domain)
    session.answer(
        found,
        lambda: print_table(
            columns(":id domain rejected?? ~reason ~message?"),
            [(item.id, item.domain, item.rejected_at, item.reason, _shown(item)) for item in found],
            empty="no rejected messages",
        ),
    )


def _shown(item: RejectedMessage) -> str:
    return "(not read)" if item.preview is None else shortened(item.message or item.preview)


COMMANDS = [rejected]
