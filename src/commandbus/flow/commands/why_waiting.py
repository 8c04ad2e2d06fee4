"""why_waiting: why a command does not run now, its place in line, and how long that will take. Reads only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from commandbus import sql
from commandbus.flow.commands.inspect import WORKER_ALIVE_SECONDS
from commandbus.flow.commands.lookup import get_command
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.command import CommandRecord, CommandStatus
from commandbus.model.count import MOST_COUNTED, Count, capped
from commandbus.model.durations import roughly
from commandbus.quick_dataclass import dataclass

_ENDS = {
    CommandStatus.COMPLETED: "it has completed",
    CommandStatus.FAILED: "it has failed for good",
    CommandStatus.CANCELED: "it was canceled",
    CommandStatus.IN_TROUBLESHOOTING_QUEUE: "it needs a person: nothing happens to it until somebody retries, "
    "cancels or completes it",
}


@dataclass(frozen=True, slots=True)
class WhyWaiting:
    """Why a command does not run now, or that it does: `text`. `ahead` is how many come before it, and
    `estimated_seconds` how long that will take, if somebody can say. `waits` is False for one that runs or has
    ended."""

    text: str
    waits: bool = False
    ahead: int | None = None
    estimated_seconds: float | None = None


@operation(atomic=False)
def why_waiting(domain: str, command_id: str) -> Steps[WhyWaiting | None]:
    """Why a command does not run now; None if there is no such command."""
    record = yield from get_command(domain, command_id).steps
    if record is None:
        return None
    known = _known(record)
    return known if known is not None else (yield from _in_queue(record))


def _known(record: CommandRecord) -> WhyWaiting | None:
    """What its record says. None: it waits in the queue, and could run."""
    if record.status in _ENDS:
        return WhyWaiting(_ENDS[record.status])
    if record.status is CommandStatus.IN_PROGRESS:
        return WhyWaiting(f"it runs: worker {record.worker} has it")
    if record.waiting_text is not None:
        return WhyWaiting(record.waiting_text, True, record.waiting_ahead, record.waiting_estimated_seconds)
    left = 0.0 if record.visible_at is None else (record.visible_at - datetime.now(UTC)).total_seconds()
    if left <= 0:
        return None
    why = f"attempt {record.attempts} is over" if record.attempts else "its sender wanted it later"
    return WhyWaiting(f"it may run in about {roughly(left)} ({why})", True, None, left)


def _in_queue(record: CommandRecord) -> Steps[WhyWaiting]:
    params: dict[str, Any] = {
        "domain": record.domain,
        "command_id": record.command_id,
        "most": MOST_COUNTED + 1,
        "alive": WORKER_ALIVE_SECONDS,
    }
    rows = yield Statement(sql.text("commands/place_in_queue", domain=record.domain), params)
    if not rows:
        return WhyWaiting("a worker is taking it this very moment", True)
    number, workers, rate, knows = rows[0]
    ahead = capped(number)
    seconds = int(ahead) / rate if rate > 0 and not ahead.is_capped else None
    if not workers:
        return WhyWaiting(f"no worker of domain {record.domain} runs; {_line(ahead)}", True, ahead)
    if not knows:
        return WhyWaiting(f"no running worker handles {record.domain}/{record.command_type}", True, ahead)
    about = "" if seconds is None or not ahead else f", about {roughly(seconds)}"
    return WhyWaiting(f"it waits for a free slot: {_line(ahead)}{about}", True, ahead, seconds)


def _line(ahead: Count) -> str:
    return f"{ahead} before it in the queue" if ahead else "it is the next in the queue"
