"""commandbus under the names of its specification for sync programs (`SyncWorker`, `SyncCommandBus`, …).

Thin: each name is a class of the package itself, or one of it that takes the specification's arguments, such as a
psycopg pool and milliseconds. A new program can as well use `commandbus.Worker` and `commandbus.CommandBus`.
"""

from commandbus.sync.bus import SyncCommandBus
from commandbus.sync.handler import SyncHandlerRegistry
from commandbus.sync.health import HealthState, HealthStatus
from commandbus.sync.pgmq import SyncPgmqClient
from commandbus.sync.pool import check_connection, create_pool
from commandbus.sync.process import SyncBaseProcessManager, SyncProcessReplyRouter
from commandbus.sync.repositories import (
    SyncAuditLogger,
    SyncBatchRepository,
    SyncCommandRepository,
    SyncProcessRepository,
)
from commandbus.sync.watchdog import WorkerWatchdog
from commandbus.sync.worker import SyncWorker

__all__ = [
    "HealthState",
    "HealthStatus",
    "SyncAuditLogger",
    "SyncBaseProcessManager",
    "SyncBatchRepository",
    "SyncCommandBus",
    "SyncCommandRepository",
    "SyncHandlerRegistry",
    "SyncPgmqClient",
    "SyncProcessReplyRouter",
    "SyncProcessRepository",
    "SyncWorker",
    "WorkerWatchdog",
    "check_connection",
    "create_pool",
]
