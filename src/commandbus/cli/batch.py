"""`batch create|watch|list|show|add|close|cancel|retry-failed`: commands that are counted together.

A batch is named by its id, and by `--domain` if several domains have one of that id.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import click

from commandbus.bus.base import whoami
from commandbus.cli import batch_progress as watching
from commandbus.cli import batch_text, find_id
from commandbus.cli.exit_codes import ExitCode
from commandbus.cli.json_lines import check_unique
from commandbus.cli.parameters import DURATION, JsonType, operator_options, page_options
from commandbus.cli.render import age_of, print_json, print_table, say, say_heading
from commandbus.cli.send import read_commands
from commandbus.cli.session import CliGroup, CliSession, check_known
from commandbus.cli.table import columns
from commandbus.errors import BatchNotFoundError, DuplicateMemberError, InvalidOperationError
from commandbus.model import names
from commandbus.model.batch import COMPLETE_WHEN, BatchStatus, completion_of
from commandbus.model.command import NewCommand
from commandbus.model.counting import counted
from commandbus.model.priority import PRIORITIES

F = TypeVar("F", bound=Callable[..., Any])
FEW = 5

DOMAIN = click.option("--domain", metavar="NAME", help="Its domain, if several domains have a batch with this id.")
BATCH = click.argument("batch_id", metavar="ID")


@click.group(cls=CliGroup)
def batch() -> None:
    """Batches: commands that are watched as one, and what happens when all are done."""


def _when_complete(function: F) -> F:
    function = click.option("--reply-to", metavar="QUEUE", help="At its end, send its summary to this queue.")(
        function
    )
    return click.option("--on-complete", metavar="DOMAIN/TYPE", help="At its end, send this command.")(function)


@batch.command()
@click.argument("domain")
@click.option(
    "--from", "source", metavar="FILE", help="One command per line of this file of JSON lines; - is stdin."
)
@click.option("--batch-id", metavar="ID", help="Idempotency key: the same id again creates nothing twice.")
@click.option("--name", metavar="TEXT", help="For people.")
@click.option("--data", "custom_data", type=JsonType(), metavar="JSON", help="JSON that is stored with the batch.")
@_when_complete
@click.option(
    "--complete-when",
    type=click.Choice(COMPLETE_WHEN),
    default="finished",
    help="When --on-complete or --reply-to is sent.",
)
@click.option(
    "--on-exhausted",
    type=click.Choice(["troubleshoot", "fail"]),
    help="What happens to its commands when their attempts are used up.",
)
@click.option("--priority", type=click.Choice(PRIORITIES), help="For commands that have none of their own.")
@click.option("--open", "is_open", is_flag=True, help="Leave it open for `batch add`, until `batch close`.")
@click.pass_obj
def create(
    session: CliSession,
    /,
    domain: str,
    source: str | None,
    on_complete: str | None,
    reply_to: str | None,
    is_open: bool,  # noqa: FBT001
    **fields: Any,
) -> None:
    """Send commands as one batch: all of them, or none.

    Each line is an object {"command_type": …, "data": …, "command_id": …, "delay": "5m", …}, as for `send --from`.
    """
    names.check_domain(domain)
    if source is None and not is_open:
        raise click.UsageError("give its commands with --from FILE, or --open to add them later")
    then = completion(on_complete, reply_to)
    commands = {} if source is None else _read(session, source)
    with session.bus() as bus, _told_by_line(source, commands):
        receipt = bus.create_batch(domain, list(commands.values()), on_complete=then, is_open=is_open, **fields)
    done = "created" if receipt.created else "was there already"
    still = ", open" if is_open else ""
    session.answer(
        receipt,
        lambda: _say(f"{done}: {domain} {receipt.batch_id} ({counted(receipt.total, 'command')}{still})"),
    )


@batch.command()
@BATCH
@DOMAIN
@click.option("--wait", type=DURATION, metavar="TIME", help="Wait no longer than this: 10m.")
@click.pass_context
def watch(ctx: click.Context, /, batch_id: str, domain: str | None, wait: float | None) -> None:
    """Follow a batch until it ends.

    Prints a bar with rate and ETA on a terminal, elsewhere a line for each change (with --json an object). The
    exit code is 0 if every command completed, and 1 if not, or if the batch did not end in time. Ctrl-C ends the
    watching, not the batch.
    """
    session: CliSession = ctx.obj
    with session.bus() as bus:
        of_domain, batch_id = find_id.of_batch(bus, batch_id, domain)
        with _watcher(session) as show:
            record = bus.wait_for_batch(of_domain, batch_id, wait=wait, on_progress=show)
    if not session.as_json:
        _say(batch_text.ending(record))
    if record.status is not BatchStatus.COMPLETED:
        ctx.exit(ExitCode.NO)


@batch.command("list")
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@click.option(
    "--status", type=click.Choice(list(map(str, BatchStatus)), case_sensitive=False), help="Only in this status."
)
@page_options
@click.pass_obj
def list_batches(
    session: CliSession, domain: str | None, status: str | None, limit: int, cursor: str | None
) -> None:
    """List batches, newest first, with their progress.

    # is an internal id. `batch show` and the other commands take the BATCH ID. DONE is the share of members
    that have ended. TSQ is how many need a person. RATE is how many end per second.
    """
    with session.bus() as bus:
        page = bus.query_batches(domain, status, limit=limit, cursor=cursor)
        if not page.items:
            check_known(bus, domain)
    if session.as_json:
        print_json([batch_text.document(item) for item in page.items])
        session.say_more(page)
        return
    print_table(
        columns(
            ":# domain =batch_id status :done :total?? :completed??? :failed? :canceled??? :tsq? :rate?? :eta? "
            "created??? ~name?"
        ),
        [
            (
                item.id, item.domain, item.batch_id, batch_text.status(item), watching.percent(item),
                item.total, item.completed, item.failed, item.canceled, item.in_tsq,
                "-" if item.is_finished else f"{item.rate_per_second:.1f}/s",
                "-" if item.is_finished else watching.eta(item), f"{age_of(item.created_at)} ago", item.name,
            )
            for item in page.items
        ],
        empty="no batches",
    )  # fmt: skip
    session.say_more(page)


@batch.command()
@BATCH
@DOMAIN
@click.option(
    "--limit", type=click.IntRange(0, 10_000), default=FEW, show_default=True,
    help="How many failed members to show, and how many that need a person.",
)  # fmt: skip
@click.pass_obj
def show(session: CliSession, batch_id: str, domain: str | None, limit: int) -> None:
    """Show one batch: counts, progress, and what failed.

    Also shows the newest members that failed or need a person, with their errors, and how to see the rest.
    """
    with session.bus() as bus:
        of_domain, batch_id = find_id.of_batch(bus, batch_id, domain)
        record = bus.get_batch(of_domain, batch_id)
        if record is None:
            check_known(bus, domain)
            raise BatchNotFoundError(of_domain, batch_id)
        troubled = batch_text.find_troubled(bus, record, limit)
    if session.as_json:
        print_json(batch_text.document(record) | {"troubled": troubled})
        return
    batch_text.print_record(record)
    if troubled:
        say_heading("failed, or in need of a person")
        print_table(
            columns("=id type status ~error"), [(item.id, item.type, item.status, item.error) for item in troubled]
        )
    for line in batch_text.how_to_see_more(record, troubled):
        _say(f"more: `{line}`")


@batch.command()
@BATCH
@DOMAIN
@click.option("--from", "source", required=True, metavar="FILE", help="A file of JSON lines; - is stdin.")
@click.pass_obj
def add(session: CliSession, batch_id: str, domain: str | None, source: str) -> None:
    """Add commands to an open batch: all, or none."""
    commands = _read(session, source)
    with session.bus() as bus, _told_by_line(source, commands):
        of_domain, batch_id = find_id.of_batch(bus, batch_id, domain)
        added = bus.add_to_batch(of_domain, batch_id, list(commands.values()))
    session.answer(
        {"domain": of_domain, "batch_id": batch_id, "added": added},
        lambda: _say(f"added {counted(added, 'command')} to {batch_text.name(of_domain, batch_id)}"),
    )


@batch.command()
@BATCH
@DOMAIN
@operator_options
@click.pass_obj
def close(
    session: CliSession, batch_id: str, domain: str | None, operator: str | None, reason: str | None
) -> None:
    """Close an open batch: nothing more will be added.

    An open batch ends only after that.
    """
    with session.bus() as bus:
        of_domain, batch_id = find_id.of_batch(bus, batch_id, domain)
        changed = bus.close_batch(of_domain, batch_id, operator=operator or whoami(), reason=reason)
    session.answer(
        {"domain": of_domain, "batch_id": batch_id, "closed": True, "changed": changed},
        lambda: _say(f"{batch_text.name(of_domain, batch_id)} {'is' if changed else 'was already'} closed"),
    )


@batch.command()
@BATCH
@DOMAIN
@operator_options
@click.pass_obj
def cancel(
    session: CliSession, batch_id: str, domain: str | None, operator: str | None, reason: str | None
) -> None:
    """Cancel the members that wait, and ask those that run to stop.

    Processes are asked to stop, and undo their completed steps. A process that has sent nothing yet ends at once.
    The batch ends CANCELED when its last member has stopped.
    """
    with session.bus() as bus:
        of_domain, batch_id = find_id.of_batch(bus, batch_id, domain)
        report = bus.cancel_batch(of_domain, batch_id, operator=operator, reason=reason)
        record = bus.get_batch(of_domain, batch_id)
    holds = "commands" if record is None else record.holds
    session.answer(report, lambda: _say(batch_text.canceled(report, holds)))


@batch.command("retry-failed")
@BATCH
@DOMAIN
@click.option("--name", metavar="TEXT", help="Name of the new batch. [default: retry of ID]")
@_when_complete
@operator_options
@click.pass_obj
def retry_failed(
    session: CliSession,
    batch_id: str,
    domain: str | None,
    name: str | None,
    on_complete: str | None,
    reply_to: str | None,
    operator: str | None,
    reason: str | None,
) -> None:
    """Retry the members that did not succeed.

    Members in the troubleshooting queue are retried in this batch. Those that FAILED for good are sent again, each
    once, in a new batch that names this one. --name, --on-complete and --reply-to are for the new batch.
    """
    then = completion(on_complete, reply_to)
    with session.bus() as bus:
        of_domain, batch_id = find_id.of_batch(bus, batch_id, domain)
        report = bus.retry_failed(
            of_domain, batch_id, operator=operator, reason=reason, name=name, on_complete=then
        )
    session.answer(report, lambda: _say(batch_text.retried(report)))


# --- what it reads ------------------------------------------------------------------------------------------


def completion(on_complete: str | None, reply_to: str | None) -> Mapping[str, Any] | None:
    """What `on_complete` does when a batch ends."""
    if on_complete is not None and reply_to is not None:
        raise click.UsageError("--on-complete and --reply-to exclude each other; give one of them")
    if reply_to is not None:
        return completion_of({"reply_to": reply_to})
    if on_complete is None:
        return None
    domain, slash, command_type = on_complete.partition("/")
    if not slash:
        raise click.BadParameter(f"{on_complete!r} is not DOMAIN/TYPE", param_hint="--on-complete")
    return completion_of({"domain": domain, "command_type": command_type})


def _read(session: CliSession, source: str) -> dict[int, NewCommand]:
    """The commands by line. A batch has each of its commands once, so the second line with the same id is bad."""
    found = read_commands(source, session.settings())
    check_unique(source, found, "command_id", undone="nothing was sent")
    return found


@contextmanager
def _told_by_line(source: str | None, commands: Mapping[int, NewCommand]) -> Iterator[None]:
    """Name the line of a command that exists already."""
    try:
        yield
    except DuplicateMemberError as error:
        for number, new in commands.items():
            if new.command_id == error.command_id:
                raise InvalidOperationError(f"{source}, line {number}: {error}") from None
        raise


# --- what it says -------------------------------------------------------------------------------------------


def _watcher(session: CliSession) -> AbstractContextManager[watching.Show]:
    if session.as_json:
        return watching.changes(lambda record: print_json(batch_text.document(record), on_one_line=True))
    if sys.stdout.isatty():
        return watching.bar()
    return watching.changes(lambda record: say(watching.change_line(record)))


def _say(text: str) -> None:
    say(text)


COMMANDS = [batch]
