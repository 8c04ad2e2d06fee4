"""How a batch is printed: as fields for people, as a document for programs, and which members are in trouble."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from commandbus.bus import CommandBus
from commandbus.cli import batch_progress as watching
from commandbus.cli.render import age, age_of, compact, moment, print_fields
from commandbus.model.batch import BatchCancelReport, BatchRecord, BatchRetryReport
from commandbus.model.command import CancelRequest, CommandStatus
from commandbus.model.counting import counted
from commandbus.model.process import ProcessStatus
from commandbus.quick_dataclass import dataclass
from commandbus.shell_words import quoted


@dataclass(frozen=True, slots=True)
class Troubled:
    """A member that failed or needs a person: a command or a process."""

    id: str
    type: str
    status: str
    error: str | None


def name(domain: str, batch_id: str) -> str:
    """A batch in a sentence."""
    return f"batch {batch_id} of domain {domain}"


def ending(record: BatchRecord) -> str:
    """How it ended."""
    counts = {"failed": record.failed, "canceled": record.canceled}
    others = "".join(f", {count} {what}" for what, count in counts.items() if count)
    return (
        f"{name(record.domain, record.batch_id)} is {record.status} after {took(record)}: "
        f"{record.completed} of {record.total} completed{others}"
    )


def canceled(report: BatchCancelReport, holds: str) -> str:
    """What was canceled, and what was asked to stop. For processes it is unknown which of them run."""
    which = name(report.domain, report.batch_id)
    if holds == "processes":
        return f"{which}: asked {report.requested} {'process' if report.requested == 1 else 'processes'} to stop"
    asked = f"; asked {report.requested} that {'runs' if report.requested == 1 else 'run'} to stop"
    left = f"; another session has locked {report.left}: a worker cancels the rest"
    return f"canceled {report.canceled} of {which}{asked if report.requested else ''}{left if report.left else ''}"


def retried(report: BatchRetryReport) -> str:
    """What was retried, and what was sent again."""
    parts = []
    if report.retried:
        parts.append(f"retried {report.retried} that needed a person")
    if report.new_batch_id is not None:
        parts.append(f"sent {_failed(report.sent_again)} again, in batch {report.new_batch_id}")
    if report.sent_before:
        verb = "was" if report.sent_before == 1 else "were"
        parts.append(f"{_failed(report.sent_before)} {verb} sent again before")
    return f"{name(report.domain, report.batch_id)}: {'; '.join(parts) or 'nothing to retry'}"


def _failed(count: int) -> str:
    return counted(count, "failed one")


def status(record: BatchRecord) -> str:
    """Its status, and whether members may still be added."""
    return f"{record.status}, open" if record.is_open else record.status


def document(record: BatchRecord) -> dict[str, Any]:
    """A batch for programs, with the values that follow from its counts."""
    stored = {field: getattr(record, field) for field in BatchRecord.__dataclass_fields__}
    return stored | {field: getattr(record, field) for field in ("finished", "remaining", "progress")}


def print_record(record: BatchRecord) -> None:
    """A batch for people."""
    waiting = max(record.remaining - record.in_tsq - record.running, 0)
    ends = record.finished_at
    print_fields(
        {
            "batch": f"{record.domain} {record.batch_id}",
            "internal id": f"#{record.id}",
            "name": record.name,
            "holds": record.holds,
            "status": status(record),
            "cancel": None if record.cancel is None else _request(record.cancel),
            "progress": f"{watching.percent(record)} ({record.finished} of {record.total})",
            "completed": record.completed,
            "failed": record.failed,
            "canceled": record.canceled,
            "in the TSQ": record.in_tsq,
            "running": None if ends else record.running,
            "waiting": None if ends else waiting,
            "rate": None if ends else f"{record.rate_per_second:.1f}/s",
            "ETA": None if ends else watching.eta(record),
            "created": f"{moment(record.created_at)} ({age_of(record.created_at)} ago)",
            "started": record.started_at,
            "finished": None if ends is None else f"{moment(ends)} (after {took(record)})",
            "on complete": None if record.on_complete is None else _promise(record.on_complete),
            "retry of": record.retry_of,
            "data": None if record.custom_data is None else compact(record.custom_data),
        }
    )


def took(record: BatchRecord) -> str:
    """How long it took, from its creation to its end."""
    return age(((record.finished_at or record.created_at) - record.created_at).total_seconds())


def _request(request: CancelRequest) -> str:
    reason = f": {request.reason}" if request.reason else ""
    return f"asked for by {request.by} at {moment(request.at)}{reason}"


def _promise(on_complete: Mapping[str, Any]) -> str:
    if queue := on_complete.get("reply_to"):
        return f"reply to {queue}"
    its_id = f", id {on_complete['command_id']}" if on_complete.get("command_id") else ""
    return f"send {on_complete.get('command_type')} to {on_complete.get('domain')}{its_id}"


def find_troubled(bus: CommandBus, record: BatchRecord, limit: int) -> list[Troubled]:
    """Some members that need a person, and some that failed; the newest of each, by state."""
    found: list[Troubled] = []
    if not limit or not record.failed + record.in_tsq:
        return found
    of_batch: dict[str, Any] = {"domain": record.domain, "batch_id": record.batch_id, "limit": limit}
    if record.holds == "processes":
        for status_of_process in (ProcessStatus.WAITING_FOR_TSQ, ProcessStatus.FAILED, ProcessStatus.COMPENSATED):
            for process in bus.query_processes(status=status_of_process, **of_batch):
                error = process.waits_for or (process.failure or {}).get("message")
                found.append(Troubled(process.process_id, process.process_type, process.status, error))
        return found
    for state in (CommandStatus.IN_TROUBLESHOOTING_QUEUE, CommandStatus.FAILED):
        page = bus.query_commands(status=state, **of_batch)
        found += [Troubled(item.command_id, item.command_type, item.status, item.error) for item in page.items]
    return found


def how_to_see_more(record: BatchRecord, shown: list[Troubled]) -> list[str]:
    """The command lines that list the members in trouble that were not shown."""
    chosen = f"--domain {quoted(record.domain)} --batch {quoted(record.batch_id)}"
    if record.holds == "processes":
        return [f"commandbus process list {chosen}"] if len(shown) < record.failed + record.in_tsq else []
    counts = Counter(item.status for item in shown)
    groups = (
        ("IN_TSQ", CommandStatus.IN_TROUBLESHOOTING_QUEUE, record.in_tsq),
        ("FAILED", CommandStatus.FAILED, record.failed),
    )
    return [
        f"commandbus commands {chosen} --status {word}" for word, state, total in groups if counts[state] < total
    ]
