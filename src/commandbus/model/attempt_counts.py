"""AttemptCounts: how attempts ended, how long they waited and how long they ran, by domain and command type. Pure.

The sets of labels are bounded. Beyond MOST_TYPES pairs of domain and type, attempts count under `OTHER`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Final

from commandbus.model.outcome import Verdict
from commandbus.quick_dataclass import dataclass

BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""The upper ends of the histograms' buckets, in seconds. One more bucket has no end."""
BUCKETS: Final = len(BOUNDS) + 1
COMPLETED: Final = 0
OUTCOMES: Final = (
    "completed",
    *(verdict.value.lower() for verdict in Verdict if verdict is not Verdict.NOTE),
)
"""How an attempt can end: the names of the label `outcome`, in the order of `TypeCounts.outcomes`. A lost attempt
counts where it is found and recorded: in the worker that claims its command next, or with the coroner."""
OUTCOME_INDEX: Final = {verdict: OUTCOMES.index(verdict.value.lower()) for verdict in Verdict
                        if verdict.value.lower() in OUTCOMES}  # fmt: skip
MOST_TYPES: Final = 200
OTHER: Final = "other"
OTHERS: Final = (OTHER, OTHER)


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values fell into each bucket, and their sum."""

    buckets: tuple[int, ...] = (0,) * BUCKETS
    total: float = 0.0

    def plus(self, more: Histogram) -> Histogram:
        """Both together."""
        return Histogram(_added(self.buckets, more.buckets), self.total + more.total)


@dataclass(frozen=True, slots=True)
class TypeCounts:
    """The attempts of one command type. `waits` has first attempts only, `runs` all that started."""

    outcomes: tuple[int, ...] = (0,) * len(OUTCOMES)
    waits: Histogram = field(default_factory=Histogram)
    runs: Histogram = field(default_factory=Histogram)

    def plus(self, more: TypeCounts) -> TypeCounts:
        """Both together."""
        return TypeCounts(
            _added(self.outcomes, more.outcomes), self.waits.plus(more.waits), self.runs.plus(more.runs)
        )

    def with_one(self, verdict: Verdict) -> TypeCounts:
        """One attempt more, of which only the outcome is known."""
        at = OUTCOME_INDEX[verdict]
        return TypeCounts(
            _added(self.outcomes, [int(i == at) for i in range(len(OUTCOMES))]), self.waits, self.runs
        )


@dataclass(frozen=True, slots=True)
class AttemptCounts:
    """What was counted: by (domain, command type), and for the worker as a whole."""

    by_type: Mapping[tuple[str, str], TypeCounts] = field(default_factory=dict)
    lease_losses: int = 0
    connection_timeouts: int = 0
    connection_waits: Histogram = field(default_factory=Histogram)

    def plus(self, more: AttemptCounts) -> AttemptCounts:
        """Both together. Types that are too many count under `OTHER`."""
        by_type = dict(self.by_type)
        for key, counts in more.by_type.items():
            found = bounded_key(by_type, *key)
            by_type[found] = by_type.get(found, TypeCounts()).plus(counts)
        return AttemptCounts(
            by_type,
            self.lease_losses + more.lease_losses,
            self.connection_timeouts + more.connection_timeouts,
            self.connection_waits.plus(more.connection_waits),
        )

    def with_one(self, domain: str, command_type: str, verdict: Verdict) -> AttemptCounts:
        """One attempt more, of which only the outcome is known."""
        key = bounded_key(self.by_type, domain, command_type)
        by_type = {**self.by_type, key: self.by_type.get(key, TypeCounts()).with_one(verdict)}
        return AttemptCounts(by_type, self.lease_losses, self.connection_timeouts, self.connection_waits)


def bounded_key(known: Mapping[tuple[str, str], object], domain: str, command_type: str) -> tuple[str, str]:
    """Under which labels a type counts."""
    key = (domain, command_type)
    return key if key in known or len(known) < MOST_TYPES else OTHERS


def _added(first: tuple[int, ...], second: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))
