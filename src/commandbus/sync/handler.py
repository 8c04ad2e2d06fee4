"""SyncHandlerRegistry: handlers by domain and command type, `def` or `async def`; `dispatch` calls one."""

from commandbus.worker.execution.handlers import HandlerRegistry as SyncHandlerRegistry

__all__ = ["SyncHandlerRegistry"]
