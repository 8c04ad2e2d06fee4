"""`show`: one command with its fields, data and result, and its whole history as a timeline."""

from __future__ import annotations

from typing import Any

import click

from commandbus.bus import CommandBus
from commandbus.cli import autopsy, find_id
from commandbus.cli.render import (
    age,
    age_of,
    compact,
    moment,
    print_fields,
    print_json,
    print_table,
    printable,
    printable_lines,
    say,
    say_heading,
    shortened,
)
from commandbus.cli.session import CliCommand, CliSession
from commandbus.cli.table import columns
from commandbus.errors import CommandNotFoundError, InvalidOperationError
from commandbus.flow.commands.history import AttemptRecord, list_attempts
from commandbus.flow.processes.process_of_command import PartOfProcess, process_of
from commandbus.model import ledger_bar
from commandbus.model.command import AuditEntry, CancelRequest, CommandRecord, CommandStatus
from commandbus.model.counting import counted
from commandbus.model.durations import format_seconds
from commandbus.model.effect import CheckpointRecord, EffectRecord, EffectState
from commandbus.model.ledger import Ledger
from commandbus.shell_words import arguments


@click.command(cls=CliCommand)
@click.argument("words", nargs=-1, required=True, metavar="[DOMAIN] ID")
@click.option("--traceback", "with_traceback", is_flag=True, help="Also show the tracebacks of failed attempts.")
@click.option("--autopsy", "with_autopsy", is_flag=True, help="Also show the autopsies of stuck attempts.")
@click.pass_obj
def show(session: CliSession, words: tuple[str, ...], with_traceback: bool, with_autopsy: bool) -> None:  # noqa: FBT001
    """Show one command: its fields, data, result, last error and history.

    ID is the command_id. Without DOMAIN, every domain is searched. '#123' is the internal id. If an id contains
    characters that are shown as escapes (\\x1b, \\u202e), you may give it as it is shown.
    """
    if len(words) > 2:
        raise click.UsageError("give DOMAIN ID, or ID alone")
    with session.bus() as bus:
        record = _find(bus, words)
        trail = bus.get_audit_trail(record.domain, record.command_id).items
        attempts = bus.run(list_attempts(record.domain, record.command_id))
        ledger = bus.get_ledger(record.domain, record.command_id)
        waiting = bus.why_waiting(record.domain, record.command_id)
        part = bus.run(process_of(record.id))
        effects = bus.commands.get_effects(record.domain, record.command_id).items
        checkpoint = bus.commands.get_checkpoint(record.domain, record.command_id)
    if session.as_json:
        without = {"traceback": not with_traceback, "autopsy": not with_autopsy}
        document = _document(record, part, trail, attempts, without={name for name in without if without[name]})
        print_json(
            document | {"effects": effects, "checkpoint": checkpoint, "ledger": ledger, "why_waiting": waiting}
        )
        return
    _print_record(record, part, checkpoint)
    if waiting is not None and waiting.waits and record.waiting_text is None:
        say_heading(f"it does not run now: {waiting.text}")
    if ledger is not None:
        print_ledger(ledger)
    if effects:
        say_heading("effects")
        print_effects(effects)
    say_heading("timeline")
    print_table(columns("at?? :after event :attempt_number? worker??? +details"), _timeline(trail))
    failed = [attempt for attempt in attempts if attempt.traceback]
    if failed and not with_traceback:
        say_heading("--traceback shows where it failed")
    for attempt in failed if with_traceback else []:
        say_heading(f"traceback of attempt number {attempt.number}")
        for line in printable_lines(attempt.traceback or ""):
            say(f"  {line}")
    stopped = [attempt for attempt in attempts if attempt.autopsy is not None]
    if stopped and not with_autopsy:
        say_heading("--autopsy shows what it hung in")
    if with_autopsy and not stopped:
        say_heading("no autopsy")
    for attempt in stopped if with_autopsy else []:
        say_heading(f"autopsy of attempt number {attempt.number}")
        for line in autopsy.lines(attempt.autopsy):
            say(f"  {line}")


def _find(bus: CommandBus, words: tuple[str, ...]) -> CommandRecord:
    if len(words) == 2:
        record = find_id.find_command(bus, *words)
        if record is None:
            raise CommandNotFoundError(f"no command {words[1]!r} in domain {words[0]!r}")
        return record
    if words[0].startswith("#") and (record := find_id.numbered_command(bus, words[0])) is not None:
        return record
    found = [record for item in bus.list_domains() if (record := find_id.find_command(bus, item.name, words[0]))]
    if not found:
        raise CommandNotFoundError(f"no command {words[0]!r} in any domain")
    if len(found) > 1:
        domains = ", ".join(f"`show {arguments(record.domain, record.command_id)}`" for record in found)
        raise InvalidOperationError(f"{len(found)} domains have a command {words[0]!r}: {domains}")
    return found[0]


def _document(
    record: CommandRecord,
    part: PartOfProcess | None,
    trail: list[AuditEntry],
    attempts: list[AttemptRecord],
    *,
    without: set[str],
) -> dict[str, Any]:
    document = {name: getattr(record, name) for name in CommandRecord.__dataclass_fields__}
    document["process"] = part
    document["audit"] = trail
    document["failed_attempts"] = [
        {name: getattr(attempt, name) for name in AttemptRecord.__dataclass_fields__ if name not in without}
        for attempt in attempts
    ]
    return document


def print_ledger(ledger: Ledger) -> None:
    """Where the time went: a bar of characters, and what they stand for."""
    so_far = " so far" if ledger.is_open else ""
    say_heading(f"where the time went ({ledger_bar.how_long(ledger.seconds)}{so_far})")
    if drawn := ledger_bar.bar(ledger):
        say(f"  [{drawn}]")
    for line in ledger_bar.legend(ledger):
        say(f"  {line.text}")


def print_effects(effects: list[EffectRecord]) -> None:
    """A table of the effects of one command."""
    print_table(
        columns("=effect state :attempt_number =key at?? ~receipt? +note"),
        [(item.name, item.state, item.attempt, item.key, item.begun_at, _receipt(item), item.note)
         for item in effects],
    )  # fmt: skip


def _receipt(effect: EffectRecord) -> str | None:
    return shortened(effect.receipt) if effect.state is EffectState.DONE else None


def _print_record(record: CommandRecord, part: PartOfProcess | None, checkpoint: CheckpointRecord | None) -> None:
    print_fields(
        {
            "command": f"{record.domain} {record.command_id}",
            "internal id": f"#{record.id}",
            "type": record.command_type,
            "status": record.status,
            "cancel": None if record.cancel_requested is None else _request(record.cancel_requested),
            "progress": None if record.progress is None else compact(record.progress),
            "checkpoint": None if checkpoint is None else _checkpoint(checkpoint),
            "timeout": None
            if record.timeout is None
            else format_seconds(record.timeout)
            if record.timeout
            else "none",
            "expires": record.expires_at,
            "when used up": record.on_exhausted,
            "key": None if record.key_limit is None else f"{record.key} of {record.key_limit}",
            "unique key": None if record.unique is None else f"{record.unique.key} ({record.unique.text})",
            "priority": None if record.priority == "normal" else record.priority,
            "attempts": attempts_text(record, most=record.max_attempts),
            "snoozed": counted(record.snoozes, "time") if record.snoozes else None,
            "sent": f"{moment(record.created_at)} ({age_of(record.created_at)} ago)",
            "started": record.started_at,
            "finished": record.finished_at,
            "ready from": record.visible_at,
            "runs": record.apart_text,
            "waits for": record.waiting_text,
            "worker": record.worker,
            "batch": record.batch_id,
            "process": None if part is None else _part(part),
            "correlation id": record.correlation_id,
            "reply to": record.reply_to,
            "headers": None if record.headers is None else compact(record.headers),
            "data": compact(record.data),
            "result": compact(record.result) if record.status is CommandStatus.COMPLETED else None,
            "last error": _error(record),
        }
    )


def attempts_text(record: CommandRecord, *, most: int | None = None) -> str:
    """How many attempts are charged, and of how many; also the number of the last attempt, if that is
    different."""
    charged = record.charged_attempts
    if charged is None:
        return f"number {record.attempts}"
    if most is not None and charged > most:  # a convicted command is charged for its earlier crashes at once
        return f"all {most} used up ({charged} charged, crashes of before among them), number {record.attempts}"
    shown = f"{charged}" if most is None else f"{charged} of {most}"
    return shown + ("" if charged == record.attempts else f" charged, number {record.attempts}")


def _part(part: PartOfProcess) -> str:
    if part.step == 0:
        role = "a message to it"
    else:
        role = f"{'compensation' if part.is_compensation else 'step'} {part.step}, {part.name}"
    return f"{part.domain} {part.process_id} ({role})"


def _checkpoint(checkpoint: CheckpointRecord) -> str:
    return f"{shortened(checkpoint.value)} (attempt number {checkpoint.attempt}, {moment(checkpoint.at)})"


def _request(request: CancelRequest) -> str:
    reason = f": {request.reason}" if request.reason else ""
    return f"asked for by {request.by} at {moment(request.at)}{reason}"


def _error(record: CommandRecord) -> str | None:
    if record.error_type is None:
        return None
    return f"{record.error_type} [{record.error_code}]: {record.error}"


def _timeline(trail: list[AuditEntry]) -> list[tuple[object, ...]]:
    return [
        (
            moment(entry.at), f"+{(entry.at - trail[0].at).total_seconds():.3f}s", entry.event,
            entry.attempt, entry.worker, _details(entry),
        )
        for entry in trail
    ]  # fmt: skip


def _details(entry: AuditEntry) -> str:
    parts = [
        f"after={age(value / 1000)}"
        if name == "duration_ms"
        else f"{name}={value if isinstance(value, str) else compact(value)}"
        for name, value in entry.details.items()
    ]
    return printable(", ".join(parts))


COMMANDS = [show]
