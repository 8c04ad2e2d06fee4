"""When a failed attempt is tried again.

The schedule's last value repeats; jitter spreads a herd. Charge, not number, is compared with max_attempts: a
waived attempt costs nothing (DESIGN: attempt). Randomness comes in as an argument, so that this stays pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commandbus.model.durations import LONGEST_SECONDS

DEFAULT_SCHEDULE: tuple[float, ...] = (10.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after how long. `jitter=0.1` spreads each delay by up to 10% either way."""

    max_attempts: int = 3
    backoff_schedule: Sequence[float] = DEFAULT_SCHEDULE
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ValueError(f"max_attempts must be a whole number of at least 1, not {self.max_attempts!r}")
        if (
            isinstance(self.backoff_schedule, str)
            or not isinstance(self.backoff_schedule, Sequence)
            or not all(
                isinstance(delay, int | float) and not isinstance(delay, bool) and 0 <= delay <= LONGEST_SECONDS
                for delay in self.backoff_schedule
            )
        ):
            raise ValueError(
                f"backoff_schedule must be seconds from 0 to ten years, not {self.backoff_schedule!r}"
            )
        if not isinstance(self.jitter, int | float) or not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be between 0 and 1, not {self.jitter!r}")
        object.__setattr__(self, "backoff_schedule", tuple(float(delay) for delay in self.backoff_schedule))

    def may_retry(self, charge: int, *, max_attempts: int | None = None) -> bool:
        """May another attempt follow the one that was the `charge`-th to be charged?"""
        return charge < (max_attempts or self.max_attempts)

    def delay_seconds(self, charge: int, *, spread: float = 0.5) -> float:
        """Seconds until the next attempt; `spread` in [0, 1) is the draw for the jitter."""
        if not self.backoff_schedule:
            return 0.0
        base = self.backoff_schedule[min(max(charge, 1), len(self.backoff_schedule)) - 1]
        return base * (1 + self.jitter * (2 * spread - 1))
