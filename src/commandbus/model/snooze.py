"""Snooze: a handler says that its command is to be tried again later, and that this is not a failure."""

from __future__ import annotations

from commandbus.errors import CommandFailure
from commandbus.model.durations import Duration, parse_seconds


class Snooze(CommandFailure):
    """Raised by a handler: try this command again after `delay`, and do not charge this attempt.

    `reason` is for people. The retry policy bounds how often (`max_snoozes`) and how long (`max_snooze_time`).
    """

    default_code = "SNOOZED"

    def __init__(self, delay: Duration, reason: str = "", *, details: object = None) -> None:
        self.delay_seconds = parse_seconds(delay, name="delay")
        super().__init__(reason, details=details)


class EffectWait(Snooze):
    """The call of an earlier attempt may still arrive: the command is tried again when that is over. The retry
    policy does not bound this."""

    default_code = "EFFECT_WAIT"
