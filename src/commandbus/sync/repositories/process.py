"""SyncProcessRepository(pool)."""

from commandbus.bus.repositories.processes import ProcessRepository as SyncProcessRepository

__all__ = ["SyncProcessRepository"]
