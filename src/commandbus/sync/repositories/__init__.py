"""The repositories, each made with a pool."""

from commandbus.sync.repositories.audit import SyncAuditLogger
from commandbus.sync.repositories.batch import SyncBatchRepository
from commandbus.sync.repositories.command import SyncCommandRepository
from commandbus.sync.repositories.process import SyncProcessRepository

__all__ = ["SyncAuditLogger", "SyncBatchRepository", "SyncCommandRepository", "SyncProcessRepository"]
