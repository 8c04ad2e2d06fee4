"""What a bus has of the data-access layer: `bus.queues`, `bus.commands`, `bus.audit`, `bus.batches` and
`bus.processes`. Each is made when it is first asked for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from commandbus.lazy import lazy

if TYPE_CHECKING:
    from commandbus.bus import queues as queue_clients
    from commandbus.bus.queues import AsyncPgmqClient, PgmqClient
    from commandbus.bus.repositories import audit as audit_loggers
    from commandbus.bus.repositories import batches as batch_repositories
    from commandbus.bus.repositories import commands as command_repositories
    from commandbus.bus.repositories import processes as process_repositories
    from commandbus.bus.repositories.audit import AsyncAuditLogger, AuditLogger
    from commandbus.bus.repositories.batches import AsyncBatchRepository, BatchRepository
    from commandbus.bus.repositories.commands import AsyncCommandRepository, CommandRepository
    from commandbus.bus.repositories.processes import AsyncProcessRepository, ProcessRepository
else:
    queue_clients = lazy("commandbus.bus.queues")
    audit_loggers = lazy("commandbus.bus.repositories.audit")
    batch_repositories = lazy("commandbus.bus.repositories.batches")
    command_repositories = lazy("commandbus.bus.repositories.commands")
    process_repositories = lazy("commandbus.bus.repositories.processes")


class DataAccess:
    """What CommandBus has of them."""

    @cached_property
    def queues(self) -> PgmqClient:
        """The PGMQ queues of this database."""
        return queue_clients.PgmqClient(cast(Any, self))

    @cached_property
    def commands(self) -> CommandRepository:
        """The commands of this database."""
        return command_repositories.CommandRepository(cast(Any, self))

    @cached_property
    def audit(self) -> AuditLogger:
        """The audit trails of commands."""
        return audit_loggers.AuditLogger(cast(Any, self))

    @cached_property
    def batches(self) -> BatchRepository:
        """The batches of this database."""
        return batch_repositories.BatchRepository(cast(Any, self))

    @cached_property
    def processes(self) -> ProcessRepository:
        """The processes of this database."""
        return process_repositories.ProcessRepository(cast(Any, self))


class AsyncDataAccess:
    """What AsyncCommandBus has of them."""

    @cached_property
    def queues(self) -> AsyncPgmqClient:
        """The PGMQ queues of this database."""
        return queue_clients.AsyncPgmqClient(cast(Any, self))

    @cached_property
    def commands(self) -> AsyncCommandRepository:
        """The commands of this database."""
        return command_repositories.AsyncCommandRepository(cast(Any, self))

    @cached_property
    def audit(self) -> AsyncAuditLogger:
        """The audit trails of commands."""
        return audit_loggers.AsyncAuditLogger(cast(Any, self))

    @cached_property
    def batches(self) -> AsyncBatchRepository:
        """The batches of this database."""
        return batch_repositories.AsyncBatchRepository(cast(Any, self))

    @cached_property
    def processes(self) -> AsyncProcessRepository:
        """The processes of this database."""
        return process_repositories.AsyncProcessRepository(cast(Any, self))
