"""What a supervisor needs to know of a worker without importing one: its last report, and its extra slots."""

from __future__ import annotations

from typing import Final

from commandbus.quick_dataclass import dataclass

ROUTER_SLOTS: Final = 2
"""Slots for messages of processes, beside the worker's others."""


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a worker's life ended. `abandoned` attempts were still running, `unwritten` outcomes were lost sight of:
    their commands are tried again when their leases run out."""

    reason: str
    settled: int
    given_back: int
    abandoned: int
    unwritten: int

    @property
    def is_clean(self) -> bool:
        """Nothing was left behind."""
        return self.abandoned == 0 and self.unwritten == 0
