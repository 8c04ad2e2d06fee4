"""AttemptOutcome: what will become of a command after an attempt, as middleware can ask for it."""

from __future__ import annotations

from commandbus.model.command import CommandStatus
from commandbus.model.outcome import STATUS_AFTER, Judgement, Verdict
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """`status` is the command's after the attempt; PENDING: it is tried again, after about `delay_seconds`.

    `verdict` says why, as in the command's history: "RETRY", "SNOOZED", "EXHAUSTED", "BUSINESS_RULE", …; or
    "COMPLETED". `error_code` is the code that the history will have.
    """

    status: CommandStatus
    verdict: str
    delay_seconds: float = 0.0
    error_code: str | None = None

    @property
    def is_retried(self) -> bool:
        """Will the command be tried again without a person?"""
        return self.status is CommandStatus.PENDING


def after(judgement: Judgement) -> AttemptOutcome:
    """The outcome that a judgement means."""
    status = STATUS_AFTER.get(judgement.verdict, CommandStatus.PENDING)
    return AttemptOutcome(status, str(judgement.verdict), judgement.delay_seconds, judgement.failure.error_code)


def tried_again(verdict: Verdict, error_code: str | None, delay_seconds: float = 0.0) -> AttemptOutcome:
    """It will be tried again, and is not charged."""
    return AttemptOutcome(CommandStatus.PENDING, str(verdict), delay_seconds, error_code)


COMPLETED = AttemptOutcome(CommandStatus.COMPLETED, "COMPLETED")
