"""How a supervisor ended, for its caller and the log."""

from __future__ import annotations

import logging

from commandbus.logger import safe_logger
from commandbus.model.counting import counted
from commandbus.quick_dataclass import dataclass

logger = safe_logger("commandbus.supervisor")


@dataclass(frozen=True, slots=True)
class SupervisorReport:
    """How a supervisor ended. Its end cut off `abandoned` attempts, and `unwritten` outcomes were not stored."""

    reason: str
    settled: int
    given_back: int
    abandoned: int
    unwritten: int
    restarts: int
    postmortems: int

    @property
    def is_clean(self) -> bool:
        """Was nothing left behind?"""
        return self.abandoned == 0 and self.unwritten == 0

    def say(self, supervisor: str) -> None:
        """Log it."""
        logger.log(
            logging.INFO if self.is_clean else logging.WARNING,
            "supervisor %s stopped (%s): %d settled, %d given back, %d abandoned, %s unwritten",
            supervisor,
            self.reason,
            self.settled,
            self.given_back,
            self.abandoned,
            counted(self.unwritten, "outcome"),
        )
