"""`undelivered`: replies that found no queue, kept with the reason."""

from __future__ import annotations

import click

from commandbus.cli.render import print_table, shortened
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns


@click.command(cls=CliCommand)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--before-id", type=int, metavar="ID", help="The next page: before this id.")
@click.pass_obj
def undelivered(session: CliSession, limit: int, before_id: int | None) -> None:
    """List replies that could not be delivered, newest first, with the reason.

    These are replies whose queue was gone, and messages that a batch could not send at its end. Nothing sends them
    again.
    """
    with session.bus() as bus:
        found = bus.undelivered_replies(limit=limit, before_id=before_id)
    session.answer(
        found,
        lambda: print_table(
            columns(":id =queue at?? ~reason ~message?"),
            [(item.id, item.queue, item.created_at, item.reason, shortened(item.message)) for item in found],
            empty="every reply was delivered",
        ),
    )


COMMANDS = [undelivered]
