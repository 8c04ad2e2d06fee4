"""`commands`: the commands of a domain, or of all, in pages."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import click

from commandbus.cli import find_id
from commandbus.cli.parameters import SINCE, page_options
from commandbus.cli.render import (
    age,
    age_of,
    compact,
    moment,
    print_json,
    print_table,
)
from commandbus.cli.session import CliCommand, CliSession, check_known
from commandbus.cli.show import attempts_text
from commandbus.cli.table import columns
from commandbus.flow.commands.query import CommandQuery
from commandbus.model.command import CommandRecord, CommandStatus
from commandbus.model.priority import PRIORITIES, Priority

SHORT = {"IN_TSQ": CommandStatus.IN_TROUBLESHOOTING_QUEUE}
STATUSES = [*(status.value for status in CommandStatus), *SHORT]


@click.command(cls=CliCommand)
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@click.option("--type", "command_type", metavar="TYPE", help="Only of this command type.")
@click.option("--status", type=click.Choice(STATUSES, case_sensitive=False), help="Only in this status.")
@click.option("--correlation-id", metavar="ID", help="Only with this correlation id.")
@click.option("--priority", type=click.Choice(PRIORITIES), help="Only with this priority.")
@click.option("--worker", metavar="ID", help="Only settled by this worker.")
@click.option("--error", metavar="TEXT", help="Only with an attempt whose error contains this text.")
@click.option(
    "--data",
    metavar="PATH=VALUE",
    multiple=True,
    help="Only with this value in the payload: order_no=17, to.city=Bern.",
)
@click.option("--batch", "batch_id", metavar="ID", help="Only members of this batch.")
@click.option(
    "--since", type=SINCE, metavar="TIME", help="Only sent since then: an ISO instant, or 2h for 2 h ago."
)
@click.option(
    "--keep-looking", is_flag=True, help="Continue a search that has not seen all, until --limit are found."
)
@page_options
@click.pass_obj
def commands(
    session: CliSession,
    domain: str | None,
    command_type: str | None,
    status: str | None,
    correlation_id: str | None,
    priority: Priority | None,
    worker: str | None,
    error: str | None,
    data: tuple[str, ...],
    batch_id: str | None,
    since: datetime | None,
    keep_looking: bool,  # noqa: FBT001
    limit: int,
    cursor: str | None,
) -> None:
    """List commands, newest first.

    A search looks at a bounded number of commands. If it has not seen all, it says how far back it has looked, and
    how to continue. --keep-looking does that by itself; Ctrl-C stops it.
    """
    paths = dict(_path(word) for word in data)
    wanted = None if status is None else CommandStatus(SHORT.get(status, status))
    with session.bus() as bus:
        if batch_id is not None:
            domain, batch_id = find_id.of_batch(bus, batch_id, domain)
        query = CommandQuery(
            domain=domain, command_type=command_type, status=wanted, correlation_id=correlation_id,
            batch_id=batch_id, priority=priority, created_after=since, worker=worker, error=error,
            data=paths or None,
        )  # fmt: skip
        page = bus.query_commands(query, limit=limit, cursor=cursor)
        while keep_looking and page.is_partial and len(page) < limit:
            more = bus.query_commands(query, limit=limit - len(page), cursor=page.next_cursor)
            page = replace(more, items=page.items + more.items)
        if not page.items:
            check_known(bus, domain)
    if session.as_json:
        print_json(page.items)
        session.say_more(page)
        return
    print_table(
        columns(":id domain type =command_id status :attempts?? sent?? ~note?"),
        [
            (
                f"#{item.id}", item.domain, item.command_type, item.command_id,
                _status(item), attempts_text(item), f"{age_of(item.created_at)} ago", _note(item),
            )
            for item in page.items
        ],
        empty="no commands",
    )  # fmt: skip
    session.say_more(page)


def _path(word: str) -> tuple[str, str]:
    path, equals, value = word.partition("=")
    if not equals or not path:
        raise click.UsageError(f"--data {word!r} is not PATH=VALUE, such as order_no=17")
    return path, value


def _status(item: CommandRecord) -> str:
    """A status, and the priority of a command that has not ended."""
    if item.priority == "normal" or item.status.is_final:
        return item.status
    return f"{item.status} ({item.priority})"


def _note(item: CommandRecord) -> str | None:
    """The note of a command: its progress and a request to stop if it runs, the reason if it is parked, the time
    if it is delayed, else its last error."""
    if item.status is not CommandStatus.IN_PROGRESS:
        return item.waiting_text or _delay(item) or item.error
    asked = None if item.cancel_requested is None else f"asked to stop by {item.cancel_requested.by}"
    progress = None if item.progress is None else f"progress {compact(item.progress)}"
    return "; ".join(filter(None, (asked, progress, item.error)))


def _delay(item: CommandRecord) -> str | None:
    """When a delayed command may run; if it failed before, also why."""
    if item.visible_at is None or (left := (item.visible_at - datetime.now(UTC)).total_seconds()) <= 0:
        return None
    when = f"{moment(item.visible_at)} (in {age(left)})"
    return f"ready from {when}" if item.error is None else f"tried again at {when}: {item.error}"


COMMANDS = [commands]
