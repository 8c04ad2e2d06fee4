"""The database, as limits in Redis see it. If it is unreachable, that is logged once, and nothing stops.

Without the database the fleet decides nothing. This program still uses Redis as long as it may ask Redis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from commandbus.db.drivers import Runnable
from commandbus.db.service_connection import LastingConnection
from commandbus.db.transient_errors import PassingError
from commandbus.logger import safe_logger
from commandbus.settings import Settings

T = TypeVar("T")
logger = safe_logger("commandbus.limits")


class PatientConnection:
    """One connection, one thread."""

    def __init__(self, settings: Settings, *, name: str) -> None:
        self._connection = LastingConnection(settings, name=name)
        self._is_unwell = False  # is PostgreSQL out of reach?

    def run(self, operation: Runnable[T]) -> T:
        """Run an operation; raises PassingError while the server is unreachable."""
        result = self._connection.run(operation)
        if self._is_unwell:
            self._is_unwell = False
            logger.info("limits in Redis: the database is back")
        return result

    def safely(self, action: Callable[[], T], otherwise: T) -> T:
        """Do something that needs the database, or return the default if it is unreachable."""
        try:
            return action()
        except PassingError as error:
            if not self._is_unwell:
                self._is_unwell = True
                logger.warning("limits in Redis: the database does not answer: %s", str(error).strip())
            return otherwise

    def close(self) -> None:
        """Close it."""
        self._connection.close()
