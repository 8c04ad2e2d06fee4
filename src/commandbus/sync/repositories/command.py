"""SyncCommandRepository(pool)."""

from commandbus.bus.repositories.commands import CommandRepository as SyncCommandRepository

__all__ = ["SyncCommandRepository"]
