"""`prune`: forget finished commands, by age or by count. Workers do the same in the background."""

from __future__ import annotations

import click

from commandbus.bus.base import whoami
from commandbus.cli.parameters import DURATION, operator_options
from commandbus.cli.render import say
from commandbus.cli.session import CliCommand, CliSession
from commandbus.flow.commands.prune import PREVIEW_WALK, PrunePreview


@click.command(cls=CliCommand)
@click.option("--age", type=DURATION, help="Delete what finished longer ago than this, such as 30d.")
@click.option("--count", type=click.IntRange(min=0), help="Keep only this many of the newest.")
@click.option("--preview", is_flag=True, help="Only show what would be deleted.")
@operator_options
@click.pass_obj
def prune(
    session: CliSession,
    age: float | None,
    count: int | None,
    preview: bool,  # noqa: FBT001 - click's way
    operator: str | None,
    reason: str | None,
) -> None:
    """Delete finished commands, old archives and rejected messages.

    Without --age and --count the settings decide (retention.age, retention.count). Unfinished commands are never
    deleted. The audit records who pruned, and what was deleted.
    """
    with session.bus() as bus:
        if preview:
            found = bus.preview_prune(age=age, count=count)
            session.answer(found, lambda: _print(found))
            return
        report = bus.prune(age=age, count=count, operator=operator or whoami(), reason=reason)
    session.answer(report, lambda: say(report.text))


def _print(found: PrunePreview) -> None:
    at_least = "at least " if found.is_partial and "commands" not in found.capped else ""
    say(f"would delete {at_least}{found.commands} commands")
    if found.keeps is not None and found.keeps > PREVIEW_WALK:
        say(f"  and {_about(found)} beyond the newest {found.keeps}, by the server's statistics")
    for status, number in found.by_status.items():
        say(f"  {number} {status.lower()}")
    say(f"  {found.archived} archived messages")
    for kind, number in found.asides.items():
        say(f"  {number} {kind}")
    say(f"  of {found.batches} batches and {found.processes} processes those that have no commands left then")
    if found.is_partial:
        say("only the oldest 12,000 commands were looked at")


def _about(found: PrunePreview) -> str:
    return "an unknown number" if found.about is None else f"about {found.about}"


COMMANDS = [prune]
