"""`prune`: forget finished commands, by age or by count. Workers do the same in the background."""

from __future__ import annotations

import click

from commandbus.cli.parameters import DURATION
from commandbus.cli.render import say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.model.counting import counted


@click.command(cls=CliCommand)
@click.option("--age", type=DURATION, help="Forget what finished longer ago than this, such as 30d.")
@click.option("--count", type=click.IntRange(min=0), help="Keep only the newest so many.")
@click.pass_obj
def prune(session: CliSession, age: float | None, count: int | None) -> None:
    """Forget finished commands, old archives and rejected messages.

    Without options the settings decide (retention.age, retention.count). What is not finished is never touched.
    """
    with session.bus() as bus:
        report = bus.prune(age=age, count=count)
    session.answer(
        report,
        lambda: say(
            f"forgotten: {counted(report.commands, 'command')}, {counted(report.archived, 'archived message')}, "
            f"{counted(report.asides + sum(report.dropped.values()), 'thing')} put aside"
        ),
    )


COMMANDS = [prune]
