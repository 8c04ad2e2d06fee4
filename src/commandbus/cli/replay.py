"""`replay`: send a command again, with other data."""

from __future__ import annotations

from typing import Any

import click

from commandbus.cli import find_id
from commandbus.cli.parameters import JsonType, operator_options
from commandbus.cli.render import say
from commandbus.cli.session import CliCommand, CliSession


@click.command(cls=CliCommand)
@click.argument("domain")
@click.argument("command_id", metavar="ID")
@click.option("--data", type=JsonType(), required=True, metavar="JSON", help="The data of the new command.")
@click.option("--id", "new_id", metavar="ID", help="The id of the new command. [default: a new one]")
@click.option("--cancel", is_flag=True, help="Cancel the old one, which needs a person.")
@operator_options
@click.pass_obj
def replay(
    session: CliSession, /, domain: str, command_id: str, *, data: Any, new_id: str | None, cancel: bool,
    operator: str | None, reason: str | None,
) -> None:  # fmt: skip
    """Send a new command like an old one that has ended, with other data.

    The audit trails of both name the other one. Where the old data is masked (***), leave the mask: the new
    command gets the old value.
    """
    with session.bus() as bus:
        old = find_id.of_command(bus, domain, command_id)
        sent = bus.commands.replay(
            domain, old, data, new_id=new_id, cancel=cancel, operator=operator, reason=reason
        )
    session.answer(
        {"domain": domain, "command_id": sent.command_id, "replay_of": old, "canceled": cancel},
        lambda: say(f"sent {sent.command_id} to domain {domain}, a replay of {old}"),
    )


COMMANDS = [replay]
