"""`wait`: wait for a command that was sent, and print its result."""

from __future__ import annotations

import click

from commandbus.cli.parameters import DURATION
from commandbus.cli.render import compact, say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.model.mask import Mask


@click.command(cls=CliCommand)
@click.argument("domain")
@click.argument("command_id", metavar="ID")
@click.option("--wait", "seconds", type=DURATION, default=30.0, metavar="TIME", help="How long to wait: 30s.")
@click.pass_obj
def wait(session: CliSession, domain: str, command_id: str, seconds: float) -> None:
    """Wait for a command, and print its result.

    Exits with 1 if it failed, was canceled, is in the troubleshooting queue, or has no outcome in time.
    """
    with session.bus() as bus:
        result = bus.wait(domain, command_id, wait=seconds)
        result = Mask(bus.settings.mask).hide("result", result)
    session.answer(result, lambda: say(compact(result)))


COMMANDS = [wait]
