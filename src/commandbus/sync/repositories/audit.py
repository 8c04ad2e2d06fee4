"""SyncAuditLogger(pool)."""

from commandbus.bus.repositories.audit import AuditLogger as SyncAuditLogger

__all__ = ["SyncAuditLogger"]
