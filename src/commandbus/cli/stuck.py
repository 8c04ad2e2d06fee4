"""`stuck`: attempts that a limit had to stop, over all commands: which, where, and what they hung in."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from commandbus.cli import autopsy
from commandbus.cli.parameters import SINCE
from commandbus.cli.render import age, columns, print_table
from commandbus.cli.session import Command, Session
from commandbus.flow.history import StuckAttempt


@click.command(cls=Command)
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@click.option("--type", "command_type", metavar="TYPE", help="Only of this command type.")
@click.option(
    "--since", type=SINCE, metavar="TIME", help="Stopped since: an ISO instant, or a duration such as 2h."
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@click.option("--autopsy", "with_autopsy", is_flag=True, help="The stacks and the backend's state of each too.")
@click.pass_obj
def stuck(
    session: Session,
    domain: str | None,
    command_type: str | None,
    since: datetime | None,
    limit: int,
    with_autopsy: bool,  # noqa: FBT001
) -> None:
    """Attempts that a limit had to stop, newest first.

    RUNG is the limit: statement (a query took too long), deadline (it ended within its grace), stuck (it did not,
    and was given up), kill (its process was ended), crash (its process died). AFTER is how long it ran.
    """
    with session.bus() as bus:
        found = bus.list_stuck(domain, command_type, since=since, limit=limit)
    session.answer(
        [_document(item, with_autopsy=with_autopsy) for item in found],
        lambda: _print(found, with_autopsy=with_autopsy),
    )


def _document(item: StuckAttempt, *, with_autopsy: bool) -> dict[str, Any]:
    document = {name: getattr(item, name) for name in StuckAttempt.__dataclass_fields__}
    document["what"] = autopsy.headline(item.autopsy)
    if not with_autopsy:
        del document["autopsy"]
    return document


def _print(found: list[StuckAttempt], *, with_autopsy: bool) -> None:
    print_table(
        columns("when domain type command_id :attempt rung :after worker what"),
        [
            (
                item.finished_at, item.domain, item.command_type, item.command_id, item.number, item.rung,
                _after(item.duration_ms), item.worker, autopsy.headline(item.autopsy) or item.error,
            )
            for item in found
        ],
        empty="no attempt had to be stopped",
    )  # fmt: skip
    for item in found if with_autopsy else []:
        if item.autopsy is not None:
            click.echo(f"\n{item.domain} {item.command_id}, attempt {item.number}")
            for line in autopsy.lines(item.autopsy):
                click.echo(f"  {line}")


def _after(duration_ms: int | None) -> str:
    return "" if duration_ms is None else age(duration_ms / 1000)


COMMANDS = [stuck]
