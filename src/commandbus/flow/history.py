"""history: the attempts of a command that did not simply complete, and why, tracebacks included.

The audit trail (`inspect.get_audit_trail`) is the short form of it. Reads only, locks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from commandbus import sql
from commandbus.flow.statement import Statement, Steps, operation
from commandbus.model import names, payload


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt; `verdict` is what `model/outcome.py` calls it."""

    number: int
    verdict: str
    started_at: datetime | None
    finished_at: datetime
    retry_at: datetime | None
    worker: str | None
    error_type: str | None
    error_code: str | None
    error: str | None
    details: Any
    traceback: str | None
    rung: str | None


@operation(atomic=False)
def list_attempts(domain: str, command_id: str) -> Steps[list[AttemptRecord]]:
    """Failed, lost and returned attempts in order; empty if there were none, or no such command."""
    names.check_domain(domain)
    rows = yield Statement(sql.text("list_attempts"), {"domain": domain, "command_id": names.to_id(command_id)})
    return [AttemptRecord(*(*head, _loads(details), trace, rung)) for *head, details, trace, rung in rows]


def _loads(text: str | None) -> Any:
    return None if text is None else payload.loads(text)
