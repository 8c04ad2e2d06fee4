"""`stuck`: attempts that a limit had to stop, over all commands: which, where, and what they hung in."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from commandbus.cli import autopsy
from commandbus.cli.parameters import SINCE, page_options
from commandbus.cli.render import age, print_table, say, say_heading
from commandbus.cli.session import CliCommand, CliSession, check_known
from commandbus.cli.table import columns
from commandbus.flow.commands.history import StuckAttempt, list_stuck
from commandbus.model.outcome import Verdict


@click.command(cls=CliCommand)
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@click.option("--type", "command_type", metavar="TYPE", help="Only of this command type.")
@click.option(
    "--since", type=SINCE, metavar="TIME", help="Only stopped since: an ISO instant, or a duration such as 2h."
)
@click.option("--all", "everything", is_flag=True, help="Also list attempts that were not to blame.")
@click.option("--by-frame", is_flag=True, help="Group them by where in your code they hung.")
@page_options
@click.option("--autopsy", "with_autopsy", is_flag=True, help="Also show the autopsy of each.")
@click.pass_obj
def stuck(
    session: CliSession,
    domain: str | None,
    command_type: str | None,
    since: datetime | None,
    everything: bool,  # noqa: FBT001
    by_frame: bool,  # noqa: FBT001
    limit: int,
    cursor: str | None,
    with_autopsy: bool,  # noqa: FBT001
) -> None:
    """List attempts that had to be stopped, newest first.

    RUNG says what stopped the attempt: statement (a query took too long), lock (it waited too long for a lock),
    deadline (it ended within its grace), stuck (it did not end within its grace, and was given up), kill (its
    process was killed), crash (its process died). AFTER is how long the attempt ran.

    --all adds attempts that were not charged: bystanders of a crash or of a blocked event loop, and attempts that
    stopped when they were asked to: cancel (by an operator), shutdown (of the worker), lease (it was lost, or the
    database was unreachable).
    """
    if by_frame:
        _list_groups(session, domain, command_type, since, limit)
        return
    with session.bus() as bus:
        page = bus.run(
            list_stuck(domain, command_type, since=since, limit=limit, cursor=cursor, everything=everything)
        )
        if not page.items:
            check_known(bus, domain)
    session.answer(
        [_document(item, with_autopsy=with_autopsy) for item in page.items],
        lambda: _print(page.items, with_autopsy=with_autopsy),
    )
    session.say_more(page)


def _list_groups(
    session: CliSession, domain: str | None, command_type: str | None, since: datetime | None, limit: int
) -> None:
    with session.bus() as bus:
        found = bus.list_stuck_groups(domain, command_type, since=since, limit=limit)
        if not found.items:
            check_known(bus, domain)
    session.answer(
        found.items,
        lambda: print_table(
            columns("domain type :attempts last first? =last_command stopped_by ~where"),
            [(item.domain, item.command_type, item.count, item.last_at, item.first_at, item.command_id,
              ", ".join(f"{rung}: {count}" for rung, count in item.rungs.items()), item.own_frame or "nobody saw")
             for item in found],
            empty="no attempt had to be stopped",
        ),
    )  # fmt: skip
    if found.is_partial:
        say("this is not all: these are among the newest 5,000 attempts that had to be stopped", is_error=True)


def _document(item: StuckAttempt, *, with_autopsy: bool) -> dict[str, Any]:
    document = {name: getattr(item, name) for name in StuckAttempt.__dataclass_fields__}
    document["what"] = autopsy.headline(item.autopsy)
    if not with_autopsy:
        del document["autopsy"]
    return document


def _print(found: list[StuckAttempt], *, with_autopsy: bool) -> None:
    print_table(
        columns("when?? domain type =command_id :attempt_number?? rung :after? worker??? ~what"),
        [
            (
                item.finished_at, item.domain, item.command_type, item.command_id, item.number, item.rung,
                _after(item.duration_ms), item.worker, _what(item),
            )
            for item in found
        ],
        empty="no attempt had to be stopped",
    )  # fmt: skip
    for item in found if with_autopsy else []:
        title = f"{item.domain} {item.command_id}, attempt number {item.number}"
        if item.autopsy is None:
            say_heading(f"{title}: no autopsy")
            continue
        say_heading(title)
        for line in autopsy.lines(item.autopsy):
            say(f"  {line}")


def _what(item: StuckAttempt) -> str:
    """Where the attempt hung; if it was not to blame, why it was stopped."""
    if item.verdict == Verdict.WAIVED:
        error = item.error or ""
        return error if "not charged" in error else f"not charged: {error}"
    what = autopsy.headline(item.autopsy) or item.error or ""
    return f"canceled: {what}" if item.verdict == Verdict.CANCELED else what


def _after(duration_ms: int | None) -> str:
    return "" if duration_ms is None else age(duration_ms / 1000)


COMMANDS = [stuck]
