"""SyncBaseProcessManager: one class for sync and async code; its methods are `def` or `async def`."""

from commandbus.processes.manager import BaseProcessManager as SyncBaseProcessManager

__all__ = ["SyncBaseProcessManager"]
