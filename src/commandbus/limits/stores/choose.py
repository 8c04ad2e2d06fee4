"""Permit stores: where the permits of limits are kept, and which store keeps those of a limit.

PostgreSQL is always there. The external store (Redis) is made when a limit first asks for it, on the limit
client's thread. So a program without limits in Redis never connects to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from commandbus.errors import CommandBusError
from commandbus.flow.limits.declare import LimitRow
from commandbus.limits.limit_connection import LimitConnection
from commandbus.limits.stores.postgres import PostgresPermitStore
from commandbus.model.limit import PermitUsage


class PermitStore(Protocol):
    """Where the permits of some limits are kept."""

    @property
    def mode(self) -> str:
        """postgres, redis, degraded, joining or lost."""

    def take(self, limit: LimitRow, tokens: Sequence[str], seconds: float) -> list[str]:
        """Take permits for some seconds. Returns the tokens that have one."""

    def renew(self, limit: LimitRow, tokens: Sequence[str]) -> list[str]:
        """Renew leases. Returns the tokens that hold no permit any more."""

    def release(self, limit: LimitRow, tokens: Sequence[str]) -> None:
        """Give permits back."""

    def usage(self, limit: LimitRow) -> PermitUsage:
        """Who holds a permit, and how fast permits are given."""


class ExternalStore(PermitStore, Protocol):
    """A permit store outside PostgreSQL, which needs regular care (`tick`)."""

    def renew_beside(self, limit: LimitRow, tokens: Sequence[str]) -> list[str]:
        """Renew leases on a separate thread, without PostgreSQL. Returns the tokens that were renewed."""

    def renewed_at(self, limit: LimitRow, token: str) -> float | None:
        """When (of `clock.boottime`) this token's last successful renewal was requested; None: the token is not
        known."""

    def close_backstop(self) -> None:
        """Close the connection of `renew_beside`, on its thread."""

    def keep_for_others(self, limit: LimitRow, tokens: Sequence[str], seconds: float) -> list[str]:
        """Take permits that others will adopt. Returns the tokens that have one."""

    def tick(self) -> None:
        """Look after the store. Called about every second."""

    def hurry(self) -> None:
        """Note that the fleet's mode has changed: the next tick looks at it."""

    def close(self) -> None:
        """Sign off from the fleet."""


class PermitStores:
    """The permit stores of one program."""

    def __init__(
        self,
        connection: LimitConnection,
        make_external: Callable[[], ExternalStore] | None,
        on_external: Callable[[ExternalStore], None] = lambda _: None,
    ) -> None:
        self._postgres = PostgresPermitStore(connection)
        self._make_external = make_external
        self._on_external = on_external
        self._external: ExternalStore | None = None
        self.is_untended = False  # the Redis store is new, and `tick` was not called yet

    def of(self, row: LimitRow) -> PermitStore:
        """The store that keeps the permits of this limit."""
        return self._postgres if row.store == "postgres" else self.external(row)

    def external(self, row: LimitRow) -> ExternalStore:
        """The store outside PostgreSQL, for a limit that is kept there."""
        if self._external is None:
            if self._make_external is None:
                raise CommandBusError(
                    f"limit {row.name!r} is kept in Redis, and this program has no redis_url: set "
                    f'COMMANDBUS_REDIS_URL, or declare one under another name with store="postgres"'
                )
            self._external = self._make_external()
            self.is_untended = True
            self._on_external(self._external)
        return self._external

    @property
    def mode_external(self) -> str:
        """The mode of the external store; called from other threads."""
        return "unknown" if self._external is None else self._external.mode  # only the client's thread makes it

    def tick(self) -> bool:
        """Look after the external store. Returns False if there is none."""
        if self._external is None:
            return False
        self.is_untended = False
        self._external.tick()
        return True

    def hurry(self) -> None:
        """Note that the mode of the fleet has changed."""
        if self._external is not None:
            self._external.hurry()

    def close(self) -> None:
        """Sign off from the fleet."""
        if self._external is not None:
            self._external.close()
