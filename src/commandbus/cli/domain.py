"""`domain create|list`, and `queue create` for replies."""

from __future__ import annotations

import click

from commandbus.cli.render import print_json, print_table, say
from commandbus.cli.session import CliGroup, CliSession
from commandbus.cli.table import columns


@click.group(cls=CliGroup)
def domain() -> None:
    """Domains: queues of commands."""


@domain.command("create")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.pass_obj
def create_domain(session: CliSession, names: tuple[str, ...]) -> None:
    """Create domains; those that exist are left as they are."""
    with session.bus() as bus:
        made = [{"domain": name, "created": bus.create_domain(name)} for name in names]
    if session.as_json:
        print_json(made)
        return
    for item in made:
        say(f"domain {item['domain']} {'created' if item['created'] else 'was there already'}")


@domain.command("list")
@click.pass_obj
def list_domains(session: CliSession) -> None:
    """List all domains."""
    with session.bus() as bus:
        found = bus.list_domains().items
    session.answer(
        [{"domain": item.name, "queue": item.queue, "created_at": item.created_at} for item in found],
        lambda: print_table(
            columns("=domain =queue created?"),
            [(item.name, item.queue, item.created_at) for item in found],
            empty="no domains; `commandbus domain create NAME` creates one",
        ),
    )


@click.group(cls=CliGroup)
def queue() -> None:
    """Plain PGMQ queues, for example for replies."""


@queue.command("create")
@click.argument("name")
@click.pass_obj
def create_queue(session: CliSession, name: str) -> None:
    """Create a queue for `send --reply-to`."""
    with session.bus() as bus:
        bus.create_queue(name)
    session.answer({"queue": name}, lambda: say(f"queue {name} is there"))


COMMANDS = [domain, queue]
