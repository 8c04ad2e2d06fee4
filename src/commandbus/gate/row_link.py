"""RowLink: the gate's connection. A row that cannot be used is a CommandBusError to whoever asked for it.

Nearly every question of the gate is about one limit. If somebody has written nonsense into that limit's row, only
those who use that limit must hear of it, and the gate goes on for all others.
"""

from __future__ import annotations

from typing import TypeVar

from commandbus.db.drive import Runnable
from commandbus.db.link import Link
from commandbus.db.passing import is_of_a_row
from commandbus.errors import CommandBusError

T = TypeVar("T")


class UnusableRowError(CommandBusError):
    """A row of ours has a value that nobody can use."""


class RowLink:
    """Runs operations on a link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def run(self, operation: Runnable[T]) -> T:
        """As `Link.run`; raises UnusableRowError where a value in a row is to blame."""
        try:
            return self._link.run(operation)
        except CommandBusError:
            raise
        except Exception as error:
            if self._link.conn_is_lost() or not is_of_a_row(error):
                raise
            said = str(error).strip().partition("\n")[0]
            raise UnusableRowError(
                f"a row of commandbus.limits or commandbus.parked cannot be used ({type(error).__name__}: "
                f"{said}); correct the value, or delete the row: workers that start declare their limits again"
            ) from error
