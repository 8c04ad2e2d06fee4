"""SyncBatchRepository(pool)."""

from commandbus.bus.repositories.batches import BatchRepository as SyncBatchRepository

__all__ = ["SyncBatchRepository"]
