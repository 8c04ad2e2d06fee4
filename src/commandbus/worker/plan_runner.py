"""PlanRunner: a worker's part in carrying out plans of operators.

All workers of a domain carry out its plans, one portion at a time each; the database decides whose turn it is. A
worker that knows of a running plan looks at every tick of the maintenance thread, all others now and then, and
when somebody starts a plan.

Called by the maintenance thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from commandbus.clock import monotonic
from commandbus.db.service_connection import LastingConnection
from commandbus.db.transient_errors import PassingError
from commandbus.flow.plans.carry_out import Portion, are_running, carry_out
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.worker")

LOOK_SECONDS: Final = 5.0
SLICE_SECONDS: Final = 0.5
TROUBLE_SECONDS: Final = 60.0


class PlanRunner:
    """Carries out plans of some domains, for a moment at each tick."""

    def __init__(self, domains: Sequence[str]) -> None:
        self._domains = tuple(domains)
        self._look_at = 0.0
        self.has_more = False

    def look_soon(self) -> None:
        """Somebody has started a plan."""
        self._look_at = 0.0

    def sweep(self, connection: LastingConnection, between: Callable[[], None]) -> None:
        """Carry out what is due, for a moment. `between` is called after each portion."""
        self.has_more = False
        now = monotonic()
        if now < self._look_at:
            return
        try:
            self._carry_out(connection, now + SLICE_SECONDS, between)
        except PassingError:
            raise
        except Exception as error:
            if connection.conn_is_lost():
                raise
            self._look_at = now + TROUBLE_SECONDS
            logger.warning("plans cannot be carried out now, trying again in a minute: %s", error)

    def _carry_out(self, connection: LastingConnection, until: float, between: Callable[[], None]) -> None:
        if not connection.run(are_running(self._domains)):
            self._look_at = monotonic() + LOOK_SECONDS
            return
        while (portion := connection.run(carry_out(self._domains))) is not None:
            _tell(portion)
            between()
            if monotonic() >= until:
                self.has_more = True
                return


def _tell(portion: Portion) -> None:
    if portion.trouble is not None:
        logger.error("plan %d was stopped: %s", portion.plan, portion.trouble)
    elif portion.locked:
        text = "plan %d comes back to %d commands that another session has locked"
        logger.info(text, portion.plan, portion.locked)
    elif portion.is_last:
        logger.info("plan %d is done", portion.plan)
