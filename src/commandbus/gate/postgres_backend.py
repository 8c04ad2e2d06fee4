"""Places kept in PostgreSQL: in the limit's own row. The default, so that limits work out of the box."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus.flow import places
from commandbus.flow.limits import LimitRow, get_limit
from commandbus.gate.row_link import RowLink
from commandbus.model.limit import Look


class PostgresBackend:
    """Places of limits in their rows."""

    mode = "postgres"

    def __init__(self, link: RowLink) -> None:
        self._link = link

    def take(self, limit: LimitRow, tokens: Sequence[str], seconds: float) -> list[str]:
        """Take places for some seconds; answers the tokens that have one."""
        return self._link.run(places.take(limit.name, tokens, seconds=seconds, newcomers=False), limit=limit.name)

    def renew(self, limit: LimitRow, tokens: Sequence[str]) -> list[str]:
        """Renew leases; answers the tokens that hold no place any more."""
        return self._link.run(places.renew(limit.name, tokens), limit=limit.name)

    def give(self, limit: LimitRow, tokens: Sequence[str]) -> None:
        """Give places back."""
        self._link.run(places.give(limit.name, tokens), limit=limit.name)

    def look(self, limit: LimitRow) -> Look:
        """Who holds a place, and how fast they are given."""
        return self._link.run(get_limit(limit.name)).look
