"""`cancel`, `pause`, `resume`, `pauses`: what people do to commands that wait."""

from __future__ import annotations

import click

from commandbus.cli.parameters import operator_options
from commandbus.cli.render import columns, counted, print_table
from commandbus.cli.session import Command, Session


@click.command(cls=Command)
@click.argument("domain")
@click.argument("command_id", metavar="ID")
@operator_options
@click.pass_obj
def cancel(session: Session, domain: str, command_id: str, operator: str | None, reason: str | None) -> None:
    """Cancel a command that nobody is running yet."""
    with session.bus() as bus:
        bus.cancel(domain, command_id, operator=operator, reason=reason)
    session.answer(
        {"domain": domain, "command_id": command_id, "status": "CANCELED"},
        lambda: click.echo(f"canceled {domain} {command_id}"),
    )


@click.command(cls=Command)
@click.argument("domain")
@click.argument("command_type", metavar="[TYPE]", required=False)
@operator_options
@click.pass_obj
def pause(
    session: Session, domain: str, command_type: str | None, operator: str | None, reason: str | None
) -> None:
    """Pause a domain, or one command type of it. What runs goes on; what waits, waits."""
    with session.bus() as bus:
        changed = bus.pause(domain, command_type, operator=operator, reason=reason)
    session.answer(
        {"domain": domain, "command_type": command_type, "paused": True, "changed": changed},
        lambda: click.echo(f"{_what(domain, command_type)} {'is' if changed else 'was already'} paused"),
    )


@click.command(cls=Command)
@click.argument("domain")
@click.argument("command_type", metavar="[TYPE]", required=False)
@click.pass_obj
def resume(session: Session, domain: str, command_type: str | None) -> None:
    """Resume what was paused, with the same arguments."""
    with session.bus() as bus:
        released = bus.resume(domain, command_type)
    session.answer(
        {"domain": domain, "command_type": command_type, "paused": False, "released": released},
        lambda: click.echo(
            f"{_what(domain, command_type)} goes on; {counted(released, 'parked command')} went back to the queue"
        ),
    )


@click.command(cls=Command)
@click.pass_obj
def pauses(session: Session) -> None:
    """What is paused, by whom, and why."""
    with session.bus() as bus:
        found = bus.pauses()
    session.answer(
        found,
        lambda: print_table(
            columns("domain type since operator reason"),
            [(item.domain, item.command_type or "(all)", item.paused_at, item.operator, item.reason)
             for item in found],
            empty="nothing is paused",
        ),
    )  # fmt: skip


def _what(domain: str, command_type: str | None) -> str:
    return f"domain {domain}" if command_type is None else f"{command_type} of domain {domain}"


COMMANDS = [cancel, pause, resume, pauses]
