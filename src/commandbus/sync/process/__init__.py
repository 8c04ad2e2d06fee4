"""Processes: their managers, and the worker that moves them."""

from commandbus.sync.process.base import SyncBaseProcessManager
from commandbus.sync.process.router import SyncProcessReplyRouter

__all__ = ["SyncBaseProcessManager", "SyncProcessReplyRouter"]
