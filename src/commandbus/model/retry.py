"""When a failed attempt is tried again.

The schedule's last value repeats; jitter spreads a herd. Charge, not number, is compared with max_attempts: a
waived attempt costs nothing (DESIGN: attempt). Randomness comes in as an argument, so that this stays pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from commandbus.model.durations import Duration, parse_seconds

DEFAULT_SCHEDULE: tuple[float, ...] = (10.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after how long. `jitter=0.1` spreads each delay by up to 10% either way.

    `backoff_schedule` is a list of durations: `[1, "10s", timedelta(minutes=5)]`.
    """

    max_attempts: int = 3
    backoff_schedule: Sequence[Duration] = DEFAULT_SCHEDULE
    jitter: float = 0.1

    def __post_init__(self) -> None:
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ValueError(f"max_attempts must be a whole number of at least 1, not {self.max_attempts!r}")
        if isinstance(self.backoff_schedule, str) or not isinstance(self.backoff_schedule, Sequence):
            raise ValueError(  # noqa: TRY004 - one kind of error for a bad policy
                f'backoff_schedule must be a list of durations such as [1, "10s"], not {self.backoff_schedule!r}'
            )
        if not isinstance(self.jitter, int | float) or not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be between 0 and 1, not {self.jitter!r}")
        seconds = tuple(parse_seconds(delay, name="backoff_schedule") for delay in self.backoff_schedule)
        object.__setattr__(self, "backoff_schedule", seconds)

    @property
    def backoff_seconds(self) -> tuple[float, ...]:
        """The schedule in seconds, as a type checker knows it."""
        return cast("tuple[float, ...]", self.backoff_schedule)

    def may_retry(self, charge: int, *, max_attempts: int | None = None) -> bool:
        """May another attempt follow the one that was the `charge`-th to be charged?"""
        return charge < (max_attempts or self.max_attempts)

    def delay_seconds(self, charge: int, *, spread: float = 0.5) -> float:
        """Seconds until the next attempt; `spread` in [0, 1) is the draw for the jitter."""
        schedule = self.backoff_seconds
        if not schedule:
            return 0.0
        base = schedule[min(max(charge, 1), len(schedule)) - 1]
        return base * (1 + self.jitter * (2 * spread - 1))
