"""Log lines about a dead worker: how it died, which attempt is charged, and what happened to the other commands.

No line repeats another: only the first one names the cause.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from commandbus.flow.commands.rescue import Held
from commandbus.flow.commands.settle import Settlement
from commandbus.logger import safe_logger
from commandbus.model.command import CommandStatus
from commandbus.model.counting import counted
from commandbus.model.crash_attribution import Cause, Death, Finding
from commandbus.supervisor.worker_process import WorkerProcess

logger = safe_logger("commandbus.supervisor")

NAMED: Final = 5
_AFTERWARDS: Final[dict[str | None, str]] = {
    CommandStatus.IN_TROUBLESHOOTING_QUEUE: "to the troubleshooting queue",
    CommandStatus.FAILED: "the command has failed",
    CommandStatus.CANCELED: "the command is canceled",
}


def say_death(worker: WorkerProcess, death: Death) -> None:
    """Log how a worker ended."""
    if worker.failed is not None and worker.ready_at is None:
        logger.error("worker %s could not start: %s", worker.name, worker.failed.message)
        return
    grave = (Cause.FROZEN, Cause.OVER_MEMORY, Cause.NONSENSE)
    level = logging.ERROR if death.cause in grave else logging.WARNING
    place = "" if worker.hello is None else f" (process {worker.pid})"
    logger.log(level, "worker %s%s %s", worker.name, place, worker.epitaph(death))


def say_culprit(worker: str, domain: str, held: Held, finding: Finding, settlement: Settlement) -> None:
    """Log that an attempt is charged with its worker's death."""
    status = json.loads(settlement.row).get("s") if settlement.is_final else None
    logger.log(
        logging.ERROR if status == CommandStatus.IN_TROUBLESHOOTING_QUEUE else logging.WARNING,
        "attempt number %d of command %s (%s) is held responsible: %s; %s",
        held.row.attempt_base + held.row.read_ct,
        held.row.command_id,
        held.row.command_type,
        finding.evidence,
        _AFTERWARDS.get(status, "it will be retried"),
        extra={"domain": domain, "command_id": held.row.command_id, "worker": worker},
    )


def say_done(worker: str, named: Mapping[str, Sequence[str]], *, after_seconds: float, was_planned: bool) -> None:
    """Log that everything that a dead worker held is settled. After a planned end there is usually nothing to
    log."""
    logger.log(
        logging.DEBUG if was_planned and not named else logging.INFO,
        "post-mortem of worker %s: %s (%.2f s after its end)",
        worker,
        summary(named),
        after_seconds,
        extra={"worker": worker},
    )


def summary(named: Mapping[str, Sequence[str]]) -> str:
    """`1 culprit (a), 2 bystanders (b, c), 7 given back`: what happened to commands, the first few with their
    ids."""
    parts = []
    for what, ids in sorted(named.items()):
        if what == "given back":
            parts.append(f"{len(ids)} given back")
            continue
        more = ", …" if len(ids) > NAMED else ""
        parts.append(f"{counted(len(ids), what)} ({', '.join(ids[:NAMED])}{more})")
    return ", ".join(parts) or "nothing was left"
