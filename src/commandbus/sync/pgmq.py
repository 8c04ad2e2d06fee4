"""SyncPgmqClient(pool)."""

from commandbus.bus.queues import PgmqClient as SyncPgmqClient

__all__ = ["SyncPgmqClient"]
