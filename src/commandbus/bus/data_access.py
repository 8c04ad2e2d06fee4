"""The data-access layer of a bus: its parts (`bus.queues`, `bus.commands`, `bus.audit`, `bus.batches`,
`bus.processes`, `bus.schedules`, `bus.key_limits`, `bus.plans`), and short names for their methods. Only the parts
contain the code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from commandbus.bus.one_body import short
from commandbus.bus.queues import AsyncPgmqClient, PgmqClient
from commandbus.bus.repositories.audit import AsyncAuditLogger, AuditLogger
from commandbus.bus.repositories.batches import AsyncBatchRepository, BatchRepository
from commandbus.bus.repositories.commands import AsyncCommandRepository, CommandRepository
from commandbus.bus.repositories.processes import AsyncProcessRepository, ProcessRepository
from commandbus.lazy import lazy

if TYPE_CHECKING:
    from commandbus.bus.repositories import key_limits as key_limit_repositories
    from commandbus.bus.repositories import plans as plan_repositories
    from commandbus.bus.repositories import schedules as schedule_repositories
    from commandbus.bus.repositories.key_limits import AsyncKeyLimitRepository, KeyLimitRepository
    from commandbus.bus.repositories.plans import AsyncPlanRepository, PlanRepository
    from commandbus.bus.repositories.schedules import AsyncScheduleRepository, ScheduleRepository
else:
    key_limit_repositories = lazy("commandbus.bus.repositories.key_limits")
    plan_repositories = lazy("commandbus.bus.repositories.plans")
    schedule_repositories = lazy("commandbus.bus.repositories.schedules")


class DataAccess:
    """The data-access layer of CommandBus."""

    @property
    def queues(self) -> PgmqClient:
        """The PGMQ queues of this database."""
        return PgmqClient(cast(Any, self))

    @property
    def commands(self) -> CommandRepository:
        """The commands of this database."""
        return CommandRepository(cast(Any, self))

    @property
    def audit(self) -> AuditLogger:
        """The audit trails of commands."""
        return AuditLogger(cast(Any, self))

    @property
    def batches(self) -> BatchRepository:
        """The batches of this database."""
        return BatchRepository(cast(Any, self))

    @property
    def processes(self) -> ProcessRepository:
        """The processes of this database."""
        return ProcessRepository(cast(Any, self))

    @property
    def key_limits(self) -> KeyLimitRepository:
        """The key limits of this database."""
        return key_limit_repositories.KeyLimitRepository(cast(Any, self))

    @property
    def schedules(self) -> ScheduleRepository:
        """The schedules of this database."""
        return schedule_repositories.ScheduleRepository(cast(Any, self))

    @property
    def plans(self) -> PlanRepository:
        """Plans: what operators do to many commands in the troubleshooting queue."""
        return plan_repositories.PlanRepository(cast(Any, self))

    send_many = short("commands", CommandRepository.save_many)
    cancel = short("commands", CommandRepository.cancel)
    get_outcome = short("commands", CommandRepository.get_outcome)
    get_command = short("commands", CommandRepository.get)
    query_commands = short("commands", CommandRepository.query)
    get_attempts = short("commands", CommandRepository.get_attempts)
    get_ledger = short("commands", CommandRepository.get_ledger)
    why_waiting = short("commands", CommandRepository.why_waiting)
    list_stuck = short("commands", CommandRepository.list_stuck)
    list_stuck_groups = short("commands", CommandRepository.list_stuck_groups)
    list_failures = short("commands", CommandRepository.list_failures)
    rejected = short("commands", CommandRepository.list_rejected)
    undelivered_replies = short("commands", CommandRepository.list_undelivered)

    get_audit_trail = short("audit", AuditLogger.get_events)

    create_batch = short("batches", BatchRepository.save)
    add_to_batch = short("batches", BatchRepository.add)
    close_batch = short("batches", BatchRepository.close)
    get_batch = short("batches", BatchRepository.get)
    query_batches = short("batches", BatchRepository.query)
    wait_for_batch = short("batches", BatchRepository.wait_for)
    cancel_batch = short("batches", BatchRepository.cancel)
    retry_failed = short("batches", BatchRepository.retry_failed)

    start_processes = short("processes", ProcessRepository.save_many)
    create_process_batch = short("processes", ProcessRepository.save_batch)
    add_processes_to_batch = short("processes", ProcessRepository.add_to_batch)
    get_process = short("processes", ProcessRepository.get)
    query_processes = short("processes", ProcessRepository.query)
    signal = short("processes", ProcessRepository.signal)
    cancel_process = short("processes", ProcessRepository.cancel)
    retry_process = short("processes", ProcessRepository.retry)
    stray_replies = short("processes", ProcessRepository.list_strays)

    create_queue = short("queues", PgmqClient.create_queue)


class AsyncDataAccess:
    """The data-access layer of AsyncCommandBus."""

    @property
    def queues(self) -> AsyncPgmqClient:
        """The PGMQ queues of this database."""
        return AsyncPgmqClient(cast(Any, self))

    @property
    def commands(self) -> AsyncCommandRepository:
        """The commands of this database."""
        return AsyncCommandRepository(cast(Any, self))

    @property
    def audit(self) -> AsyncAuditLogger:
        """The audit trails of commands."""
        return AsyncAuditLogger(cast(Any, self))

    @property
    def batches(self) -> AsyncBatchRepository:
        """The batches of this database."""
        return AsyncBatchRepository(cast(Any, self))

    @property
    def processes(self) -> AsyncProcessRepository:
        """The processes of this database."""
        return AsyncProcessRepository(cast(Any, self))

    @property
    def key_limits(self) -> AsyncKeyLimitRepository:
        """The key limits of this database."""
        return key_limit_repositories.AsyncKeyLimitRepository(cast(Any, self))

    @property
    def schedules(self) -> AsyncScheduleRepository:
        """The schedules of this database."""
        return schedule_repositories.AsyncScheduleRepository(cast(Any, self))

    @property
    def plans(self) -> AsyncPlanRepository:
        """Plans: what operators do to many commands in the troubleshooting queue."""
        return plan_repositories.AsyncPlanRepository(cast(Any, self))

    send_many = short("commands", AsyncCommandRepository.save_many)
    cancel = short("commands", AsyncCommandRepository.cancel)
    get_outcome = short("commands", AsyncCommandRepository.get_outcome)
    get_command = short("commands", AsyncCommandRepository.get)
    query_commands = short("commands", AsyncCommandRepository.query)
    get_attempts = short("commands", AsyncCommandRepository.get_attempts)
    get_ledger = short("commands", AsyncCommandRepository.get_ledger)
    why_waiting = short("commands", AsyncCommandRepository.why_waiting)
    list_stuck = short("commands", AsyncCommandRepository.list_stuck)
    list_stuck_groups = short("commands", AsyncCommandRepository.list_stuck_groups)
    list_failures = short("commands", AsyncCommandRepository.list_failures)
    rejected = short("commands", AsyncCommandRepository.list_rejected)
    undelivered_replies = short("commands", AsyncCommandRepository.list_undelivered)

    get_audit_trail = short("audit", AsyncAuditLogger.get_events)

    create_batch = short("batches", AsyncBatchRepository.save)
    add_to_batch = short("batches", AsyncBatchRepository.add)
    close_batch = short("batches", AsyncBatchRepository.close)
    get_batch = short("batches", AsyncBatchRepository.get)
    query_batches = short("batches", AsyncBatchRepository.query)
    wait_for_batch = short("batches", AsyncBatchRepository.wait_for)
    cancel_batch = short("batches", AsyncBatchRepository.cancel)
    retry_failed = short("batches", AsyncBatchRepository.retry_failed)

    start_processes = short("processes", AsyncProcessRepository.save_many)
    create_process_batch = short("processes", AsyncProcessRepository.save_batch)
    add_processes_to_batch = short("processes", AsyncProcessRepository.add_to_batch)
    get_process = short("processes", AsyncProcessRepository.get)
    query_processes = short("processes", AsyncProcessRepository.query)
    signal = short("processes", AsyncProcessRepository.signal)
    cancel_process = short("processes", AsyncProcessRepository.cancel)
    retry_process = short("processes", AsyncProcessRepository.retry)
    stray_replies = short("processes", AsyncProcessRepository.list_strays)

    create_queue = short("queues", AsyncPgmqClient.create_queue)
