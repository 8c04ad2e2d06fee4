"""`prune`: forget finished commands, by age or by count. Workers do the same in the background."""

from __future__ import annotations

import click

from commandbus.cli.parameters import DURATION
from commandbus.cli.render import say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.model.counting import counted


@click.command(cls=CliCommand)
@click.option("--age", type=DURATION, help="Delete what finished longer ago than this, such as 30d.")
@click.option("--count", type=click.IntRange(min=0), help="Keep only this many of the newest.")
@click.pass_obj
def prune(session: CliSession, age: float | None, count: int | None) -> None:
    """Delete finished commands, old archives and rejected messages.

    Without options the settings decide (retention.age, retention.count). Unfinished commands are never deleted.
    """
    with session.bus() as bus:
        report = bus.prune(age=age, count=count)
    session.answer(
        report,
        lambda: say(
            f"deleted: {counted(report.commands, 'command')}, {counted(report.archived, 'archived message')}, "
            f"{counted(report.asides + sum(report.dropped.values()), 'thing')} put aside"
        ),
    )


COMMANDS = [prune]
