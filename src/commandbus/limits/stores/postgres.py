"""Permits kept in PostgreSQL: in the limit's own row. The default, so that limits work out of the box."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus.flow.limits import permits
from commandbus.flow.limits.declare import LimitRow, get_limit
from commandbus.limits.limit_connection import LimitConnection
from commandbus.model.limit import PermitUsage


class PostgresPermitStore:
    """Permits of limits in their rows."""

    mode = "postgres"

    def __init__(self, connection: LimitConnection) -> None:
        self._connection = connection

    def take(self, limit: LimitRow, tokens: Sequence[str], seconds: float) -> list[str]:
        """Take permits for some seconds. Returns the tokens that have one."""
        return self._connection.run(
            permits.take(limit.name, tokens, seconds=seconds, newcomers=False), limit=limit.name
        )

    def renew(self, limit: LimitRow, tokens: Sequence[str]) -> list[str]:
        """Renew leases. Returns the tokens that hold no permit any more."""
        return self._connection.run(permits.renew(limit.name, tokens), limit=limit.name)

    def release(self, limit: LimitRow, tokens: Sequence[str]) -> None:
        """Give permits back."""
        self._connection.run(permits.release(limit.name, tokens), limit=limit.name)

    def usage(self, limit: LimitRow) -> PermitUsage:
        """Who holds a permit, and how fast permits are given."""
        return self._connection.run(get_limit(limit.name)).usage
