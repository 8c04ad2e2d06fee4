"""`undelivered`: replies that found no queue, kept with the reason."""

from __future__ import annotations

import click

from commandbus.cli.parameters import page_options
from commandbus.cli.render import print_table, shortened
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns


@click.command(cls=CliCommand)
@page_options
@click.pass_obj
def undelivered(session: CliSession, limit: int, cursor: str | None) -> None:
    """List replies that could not be delivered, newest first, with the reason.

    These are replies whose queue was gone, and messages that a batch could not send at its end. Nothing sends them
    again.
    """
    with session.bus() as bus:
        page = bus.undelivered_replies(limit=limit, cursor=cursor)
    session.answer(
        page.items,
        lambda: print_table(
            columns(":id =queue at?? ~reason ~message?"),
            [(item.id, item.queue, item.created_at, item.reason, shortened(item.message)) for item in page.items],
            empty="every reply was delivered",
        ),
    )
    session.say_more(page)


COMMANDS = [undelivered]
