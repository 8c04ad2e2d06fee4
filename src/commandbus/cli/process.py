"""`process start|list|show|signal|cancel|retry|strays`: sagas, with their whole trail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import click

from commandbus.bus import CommandBus
from commandbus.bus.base import whoami
from commandbus.cli import find_id, process_text
from commandbus.cli.batch import completion
from commandbus.cli.json_lines import check_unique, read_items
from commandbus.cli.parameters import DURATION, JsonType, operator_options, page_options
from commandbus.cli.render import age_of, print_json, print_table, say, shortened
from commandbus.cli.session import CliGroup, CliSession, check_known
from commandbus.cli.table import columns
from commandbus.errors import (
    DuplicateProcessError,
    InvalidCommandError,
    InvalidOperationError,
    ProcessNotFoundError,
)
from commandbus.flow.commands.known_types import doubt_type
from commandbus.flow.processes import start as process_start
from commandbus.model import names
from commandbus.model.process import DEFAULT_DOMAIN, NewProcess, ProcessRecord, ProcessStatus
from commandbus.model.safe_text import unescaped

DOMAIN = click.option("--domain", metavar="NAME", help="Its domain, if several domains have this process id.")
UNDONE = "nothing was started"


@click.group(cls=CliGroup)
def process() -> None:
    """Processes (sagas): commands that follow each other, and are undone if one fails."""


@process.command()
@click.argument("process_type", metavar="TYPE")
@click.option("--data", type=JsonType(), metavar="JSON", help="Data of the process, as JSON.")
@click.option("--process-id", metavar="ID", help="Idempotency key: the same id again starts nothing twice.")
@click.option("--domain", metavar="NAME", default=DEFAULT_DOMAIN, show_default=True)
@click.option(
    "--deadline", type=DURATION, metavar="TIME", help="How long it may take in all; then it is undone. 0: none."
)
@click.option(
    "--correlation-id",
    metavar="ID",
    help="For the process, its reply and its commands. [default for the commands: the process's id]",
)
@click.option("--reply-to", metavar="QUEUE", help="The queue that is told how the process, or the batch, ended.")
@click.option("--from", "source", metavar="FILE", help="Start many, as one batch: JSON lines; - is stdin.")
@click.option("--batch-id", metavar="ID", help="With --from: the same id again creates nothing twice.")
@click.option("--name", metavar="TEXT", help="With --from: a name of the batch, for people.")
@click.option("--batch-data", type=JsonType(), metavar="JSON", help="With --from: stored with the batch.")
@click.option("--on-complete", metavar="DOMAIN/TYPE", help="With --from: when all have ended, send this command.")
@click.pass_obj
def start(
    session: CliSession, /, process_type: str, domain: str, source: str | None, reply_to: str | None, **fields: Any
) -> None:
    """Start a process. A worker that has TYPE's manager takes it from there.

    --from starts one process per line, all of them or none, as one batch. Each line is an object
    {"data": …, "process_id": …, "deadline": "1h", "reply_to": …, "correlation_id": …}; every key is optional.

    The command line does not know the manager's own deadline. Without --deadline the process has none.
    """
    of_one = {name: fields[name] for name in ("data", "process_id", "deadline", "correlation_id")}
    of_batch = {name: fields[name] for name in ("batch_id", "name", "batch_data", "on_complete")}
    if source is None:
        _refuse(of_batch, "needs --from")
        _start_one(session, process_type, domain, reply_to=reply_to, **of_one)
    else:
        _refuse(of_one, "excludes --from: give it in the lines of the file")
        _start_batch(session, process_type, domain, source, reply_to=reply_to, **of_batch)


def _refuse(options: Mapping[str, Any], why: str) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise click.UsageError(f"--{given[0].replace('_', '-')} {why}")


def _start_one(session: CliSession, process_type: str, domain: str, *, data: Any, **fields: Any) -> None:
    with session.bus() as bus:
        doubt = _doubt(bus, domain, process_type)
        receipt = bus.start_process(process_type, data, domain=domain, **fields)
    done = "started" if receipt.created else "was there already"
    session.warn(doubt)
    session.answer(
        receipt._asdict() | {"warning": doubt}, lambda: say(f"{done}: {receipt.domain} {receipt.process_id}")
    )


def _doubt(bus: CommandBus, domain: str, process_type: str) -> str | None:
    """A warning if nobody knows the process type. Called before the start, which sends a command of that type."""
    return bus.run(doubt_type(names.check_domain(domain), names.check_type(process_type), what="process type"))


def _start_batch(
    session: CliSession,
    process_type: str,
    domain: str,
    source: str,
    *,
    batch_id: str | None,
    name: str | None,
    batch_data: Any,
    on_complete: str | None,
    reply_to: str | None,
) -> None:
    names.check_domain(domain)
    names.check_type(process_type)
    then = completion(on_complete, reply_to)
    processes = _read(session, source)
    with session.bus() as bus, _told_by_line(source, processes):
        doubt = _doubt(bus, domain, process_type)
        receipt = bus.create_process_batch(
            process_type, list(processes.values()), batch_id=batch_id, name=name, custom_data=batch_data,
            on_complete=then, domain=domain,
        )  # fmt: skip
    done = "started" if receipt.created else "was there already"
    many = "1 process" if receipt.total == 1 else f"{receipt.total} processes"
    session.warn(doubt)
    session.answer(
        receipt._asdict() | {"warning": doubt}, lambda: say(f"{done}: batch {domain} {receipt.batch_id} ({many})")
    )


def _read(session: CliSession, source: str) -> dict[int, NewProcess]:
    """The processes by line. A batch has each of its processes once, so the second line with the same id is
    bad."""
    most = session.settings().max_payload_bytes

    def process_of(line: Any) -> NewProcess:
        if not isinstance(line, dict):
            raise InvalidCommandError('it is not an object such as {"data": {}, "process_id": "order-17"}')
        new = process_start.to_new_process(line)
        process_start.prepare_start(new, deadline=None, max_bytes=most)
        return new

    found = read_items(source, process_of, undone=UNDONE)
    check_unique(source, found, "process_id", undone=UNDONE)
    return found


@contextmanager
def _told_by_line(source: str, processes: Mapping[int, NewProcess]) -> Iterator[None]:
    """Name the line of a process that exists already."""
    try:
        yield
    except DuplicateProcessError as error:
        for number, new in processes.items():
            if new.process_id == error.process_id:
                raise InvalidOperationError(
                    f"{source}, line {number}: process_id {error.process_id!r} already exists in domain "
                    f"{error.domain!r}, and a batch has only new processes; {UNDONE}"
                ) from None
        raise


@process.command("list")
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@click.option("--type", "process_type", metavar="TYPE", help="Only of this process type.")
@click.option(
    "--status", type=click.Choice(list(map(str, ProcessStatus)), case_sensitive=False), help="Only in this status."
)
@click.option("--batch", "batch_id", metavar="ID", help="Only members of this batch.")
@page_options
@click.pass_obj
def list_processes(
    session: CliSession,
    domain: str | None,
    process_type: str | None,
    status: str | None,
    batch_id: str | None,
    limit: int,
    cursor: str | None,
) -> None:
    """List processes, newest first, and what they wait for.

    # is an internal id. `process show` and the other commands take the PROCESS ID.
    """
    with session.bus() as bus:
        if batch_id is not None and unescaped(batch_id) != batch_id:
            domain, batch_id = find_id.of_batch(bus, batch_id, domain)
        page = bus.processes.summaries(
            domain=domain, process_type=process_type, status=status, batch_id=batch_id, limit=limit,
            cursor=cursor,
        )  # fmt: skip
        if not page.items:
            check_known(bus, domain)
            if batch_id is not None:
                find_id.of_batch(bus, batch_id, None)
    session.answer(
        page.items,
        lambda: print_table(
            columns(":# domain type =process_id status started?? ~note?"),
            [(item.id, item.domain, item.process_type, item.process_id, item.status,
              f"{age_of(item.created_at)} ago", process_text.note(item)) for item in page.items],
            empty="no processes",
        ),
    )  # fmt: skip
    session.say_more(page)


@process.command()
@click.argument("process_id", metavar="ID")
@DOMAIN
@click.pass_obj
def show(session: CliSession, process_id: str, domain: str | None) -> None:
    """Show one process: its fields, its state, what it waits for, its trail, and its signals.

    The trail has every command that the process sent, and everything else that it waited for. UNDOES is the number
    of the step that a compensation undoes. TOOK is the time from sending the command to its end.
    """
    with session.bus() as bus:
        record = _find(bus, process_id, domain)
    if session.as_json:
        print_json(record)
        return
    process_text.print_record(record)
    process_text.print_trail(record)


@process.command()
@click.argument("process_id", metavar="ID")
@click.argument("name", metavar="NAME")
@DOMAIN
@click.option("--data", type=JsonType(), metavar="JSON", help="Data of the signal, as JSON.")
@click.option("--signal-id", metavar="ID", help="Idempotency key: the same id again sends nothing twice.")
@operator_options
@click.pass_obj
def signal(
    session: CliSession,
    process_id: str,
    name: str,
    domain: str | None,
    data: Any,
    signal_id: str | None,
    operator: str | None,
    reason: str | None,
) -> None:
    """Send a signal to a process, for a step that waits for it, now or later.

    `process show` lists the signals of a process, and the step that took each.
    """
    with session.bus() as bus:
        of_domain, process_id = find_id.of_process(bus, process_id, domain)
        sent = bus.signal(
            of_domain, process_id, name, data, signal_id=signal_id, operator=operator or whoami(), reason=reason
        )
    done = "sent" if sent.created else "was sent already"
    session.answer(
        sent._asdict(), lambda: say(f"{done}: signal {name} to process {process_id} of domain {of_domain}")
    )


@process.command()
@click.argument("process_id", metavar="ID")
@DOMAIN
@operator_options
@click.pass_obj
def cancel(
    session: CliSession, process_id: str, domain: str | None, operator: str | None, reason: str | None
) -> None:
    """Cancel a process: outstanding steps are canceled, completed ones that have an undo are undone,
    and it ends CANCELED."""
    with session.bus() as bus:
        of_domain, process_id = find_id.of_process(bus, process_id, domain)
        status = bus.cancel_process(of_domain, process_id, operator=operator, reason=reason)
    session.answer(
        {"domain": of_domain, "process_id": process_id, "was": status},
        lambda: say(f"asked process {process_id} of domain {of_domain} to stop; it was {status}"),
    )


@process.command()
@click.argument("process_id", metavar="ID")
@DOMAIN
@operator_options
@click.pass_obj
def retry(
    session: CliSession, process_id: str, domain: str | None, operator: str | None, reason: str | None
) -> None:
    """Let a FAILED process go on from the step, or the compensation, that failed."""
    with session.bus() as bus:
        of_domain, process_id = find_id.of_process(bus, process_id, domain)
        bus.retry_process(of_domain, process_id, operator=operator, reason=reason)
    session.answer(
        {"domain": of_domain, "process_id": process_id, "action": "retried"},
        lambda: say(f"process {process_id} of domain {of_domain} goes on"),
    )


@process.command()
@click.option("--domain", metavar="NAME", help="Only of this domain.")
@click.option("--process", "process_id", metavar="ID", help="Only for this process.")
@page_options
@click.pass_obj
def strays(
    session: CliSession, domain: str | None, process_id: str | None, limit: int, cursor: str | None
) -> None:
    """List replies that moved nothing, newest first, with the reason: late, duplicated, malformed, no process."""
    with session.bus() as bus:
        page = bus.stray_replies(domain, process_id=process_id, limit=limit, cursor=cursor)
        if not page.items:
            check_known(bus, domain)
            if process_id is not None:
                _find(bus, process_id, domain)
    session.answer(
        page.items,
        lambda: print_table(
            columns(":id domain =process at?? ~reason ~message?"),
            [(item.id, item.domain, item.process_id or "-", item.at, item.reason, shortened(item.message))
             for item in page.items],
            empty="no stray replies",
        ),
    )  # fmt: skip
    session.say_more(page)


def _find(bus: CommandBus, process_id: str, domain: str | None) -> ProcessRecord:
    of_domain, process_id = find_id.of_process(bus, process_id, domain)
    record = bus.get_process(of_domain, process_id)
    if record is None:
        check_known(bus, domain)
        raise ProcessNotFoundError(f"no process {process_id!r} in domain {of_domain!r}")
    return record


COMMANDS = [process]
