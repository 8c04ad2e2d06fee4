"""One attempt: a claimed row, its fence, and what this worker knows of it.

It is made for every command, so it is small: a slotted object around the row that claim.sql returned.
"""

from __future__ import annotations

from typing import Any

from commandbus.flow.reply import Reply, compose
from commandbus.flow.settle import Settlement, completed, given_back, judged
from commandbus.model import payload
from commandbus.model.command import Command
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.runtime.handlers import Handler


class Attempt:
    """An execution of a command by this worker. `renewed_at` (monotonic) is when its lease was last asked for."""

    __slots__ = (
        "charge",
        "domain",
        "handler",
        "has_committed",
        "has_connection",
        "id",
        "is_lost",
        "msg_id",
        "number",
        "read_ct",
        "renewed_at",
        "row",
        "started",
    )

    def __init__(self, domain: str, row: tuple[Any, ...], handler: Handler | None, renewed_at: float) -> None:
        self.domain = domain
        self.row = row
        self.msg_id: int = row[0]
        self.read_ct: int = row[1]
        self.id: int = row[2]
        self.number: int = row[6] + row[1]
        self.charge: int = row[1] - row[7]
        self.handler = handler
        self.renewed_at = renewed_at
        self.started: float | None = None
        self.is_lost = False
        self.has_committed = False
        self.has_connection = False

    @property
    def command_id(self) -> str:
        """The caller's id."""
        found: str = self.row[3]
        return found

    @property
    def command_type(self) -> str:
        """The command's type."""
        found: str = self.row[4]
        return found

    @property
    def max_attempts(self) -> int | None:
        """The command's own limit, if its sender gave one."""
        found: int | None = self.row[8]
        return found

    def command(self) -> Command:
        """What the handler is given."""
        row = self.row
        return Command(
            self.domain,
            row[4],
            row[3],
            None if row[5] is None else payload.loads(row[5]),
            row[9],
            row[10],
            None if row[11] is None else payload.loads(row[11]),
            row[12],
            row[2],
        )

    def complete(self, result: str | None) -> Settlement:
        """The settlement of a completion; `result` is JSON text."""
        settlement = completed(
            self.domain,
            self.msg_id,
            self.read_ct,
            self.id,
            number=self.number,
            started=self.started or 0.0,
            result=result,
        )
        if self.row[10] is not None:
            settlement.reply = self._reply("SUCCESS", result=result)
        return settlement

    def fail(self, judgement: Judgement) -> Settlement:
        """The settlement of a failure."""
        settlement = judged(
            self.domain,
            self.msg_id,
            self.read_ct,
            self.id,
            number=self.number,
            started=self.started,
            command_type=self.row[4],
            judgement=judgement,
        )
        if self.row[10] is not None and judgement.verdict is Verdict.BUSINESS_RULE:
            settlement.reply = self._reply("FAILED", failure=judgement.failure)
        return settlement

    def give_back(self) -> Settlement:
        """The settlement of an attempt that never started."""
        return given_back(self.domain, self.msg_id, self.read_ct, self.id, number=self.number)

    def _reply(self, outcome: Any, *, result: str | None = None, failure: Failure | None = None) -> Reply:
        return compose(
            self.row[10],
            outcome,
            domain=self.domain,
            command_id=self.row[3],
            command_type=self.row[4],
            correlation_id=self.row[9],
            result=result,
            failure=failure,
        )
