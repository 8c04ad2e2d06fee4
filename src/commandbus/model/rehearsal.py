"""What a rehearsal of a command has shown: what its handler would have done."""

from __future__ import annotations

from typing import Literal, NamedTuple

from commandbus.model.json_values import Json
from commandbus.quick_dataclass import dataclass


class TableChanges(NamedTuple):
    """Rows of a table that were written, also by parts that the handler rolled back."""

    table: str
    inserted: int
    updated: int
    deleted: int


class RehearsedSend(NamedTuple):
    """A command that would have been sent."""

    domain: str
    command_type: str
    command_id: str


class RehearsedCall(NamedTuple):
    """What the handler asked its context for, and was not done: "limit", "effect", "checkpoint", "heartbeat" or
    "extend"."""

    kind: str
    name: str
    details: Json


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What today's handler would have done with a command. Everything in the database was rolled back.

    `outcome`: COMPLETED, FAILED (it raised; `verdict` says what would become of the command), or STOPPED (it was
    killed after its time). `is_isolated`: it ran without a network. `statements` are the first of
    `statement_count`. `notes` say what was different from a real attempt.
    """

    domain: str
    command_id: str
    command_type: str
    handler: str
    outcome: Literal["COMPLETED", "FAILED", "STOPPED"]
    verdict: str | None
    result: Json
    error_type: str | None
    error: str | None
    traceback: str | None
    seconds: float
    is_isolated: bool
    statement_count: int
    statements: list[str]
    tables: list[TableChanges]
    sends: list[RehearsedSend]
    calls: list[RehearsedCall]
    notes: list[str]
    output: str

    @property
    def text(self) -> str:
        """What it would have done, as a sentence without its end."""
        end = {
            "COMPLETED": "would complete",
            "FAILED": f"would fail: {self.error_type}: {self.error}",
            "STOPPED": f"did not end within its time: {self.error}",
        }[self.outcome]
        return f"{self.handler} {end}" + (f" ({self.verdict})" if self.verdict else "")
