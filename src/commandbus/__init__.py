"""commandbus: commands on PostgreSQL, run by workers that cannot hang.

The way of one command through this package:

1. **send**: `bus/` takes it. `flow/commands/send.py` writes its row and its queue message in one statement, in the
   caller's transaction if one is lent (`conn=`).
2. **claim**: a worker's `worker/claimer.py` takes visible messages (`flow/commands/claim.py`) under a lease. If
   something is odd about one (its last worker vanished, another client sent it, its type is paused), that is put
   right before anything runs.
3. **execute**: a slot (`worker/execution/slots.py`: threads; `async_slots.py`: async tasks) runs the handler with
   its context (`context.py`). `execute.py` turns what happens into an outcome (`model/outcome.py` decides). The
   **ladder** (`worker/deadlines/ladder.py`) ends the attempt in time whatever the handler does. Where a thread
   cannot be ended, the supervisor (`supervisor/`) ends the process.
4. **settle**: `worker/settler.py` writes outcomes in batches, each under the fence of its attempt
   (`flow/commands/settle.py`): done, tried again later, failed for good, or in the troubleshooting queue.
5. **operate**: people inspect (`flow/commands/inspect.py`) and act (`flow/commands/operate.py`), by
   `troubleshooting.py` and `cli/`.
"""

import importlib

# Where each name is defined (for type checkers: `__init__.pyi`). A name's module is imported when the name is
# first asked for: a program that sends and one that runs handlers each need only a part of the package.
_NAMES = {
    "commandbus.bus": "AsyncCommandBus CommandBus",
    "commandbus.bus.queues": "AsyncPgmqClient PgmqClient",
    "commandbus.bus.repositories.audit": "AsyncAuditLogger AuditLogger",
    "commandbus.bus.repositories.batches": "AsyncBatchRepository BatchRepository",
    "commandbus.bus.repositories.commands": "AsyncCommandRepository CommandRepository",
    "commandbus.bus.repositories.key_limits": "AsyncKeyLimitRepository KeyLimitRepository",
    "commandbus.bus.repositories.plans": "AsyncPlanRepository PlanRepository",
    "commandbus.bus.repositories.processes": "AsyncProcessRepository ProcessRepository",
    "commandbus.bus.repositories.schedules": "AsyncScheduleRepository ScheduleRepository",
    "commandbus.errors": """
        ApiTimeoutError AttemptCanceledError AttemptFencedError BatchNotFoundError BatchTimeoutError
        BreakerOpenError BusClosedError BusinessRuleException CallError CallTimeoutError CommandBusError
        CommandCanceledError CommandFailedError CommandFailure CommandInTroubleshootingError
        CommandNotFoundError ConfigurationError ConnectionInUseError DatabaseUnavailableError
        DeadlineExceededError DuplicateBatchError DuplicateCommandError DuplicateHandlerError
        DuplicateMemberError DuplicateProcessError DuplicateScheduleError DuplicateSignalError
        EmbeddedPostgresError EffectMisuseError EffectUncertainError
        InvalidCommandError InvalidOperationError InvalidPayloadError InvalidScheduleError
        LimitLostError LimitTimeoutError MiddlewareError MissingPrivilegeError PermanentCommandError
        PlanChangedError PlanNotFoundError ProcessNotFoundError RateLimitError
        RehearsalRefusedError
        ScheduleNotFoundError SchemaError SendFailedError TransactionEndedError TransactionUsedError
        TransientCommandError UnknownCommandTypeError UnknownDomainError UnknownLimitError
        UniqueConflictError UniqueKeyLockedError UnknownKeyLimitError UnknownQueueError
        WorkerStartError
    """,
    "commandbus.flow.audit.list_actions": "ActionRecord",
    "commandbus.flow.breakers.operate": "BreakerInfo",
    "commandbus.flow.commands.audit_events": "NewAuditEvent",
    "commandbus.flow.commands.call": "CommandOutcome",
    "commandbus.flow.commands.failures": "FailureGroup",
    "commandbus.flow.commands.find_id": "FoundId",
    "commandbus.flow.commands.history": "AttemptRecord StuckAttempt",
    "commandbus.flow.commands.stuck_groups": "StuckGroup",
    "commandbus.flow.commands.inspect": """
        DomainStatus RejectedMessage UndeliveredReply WorkerInfo
    """,
    "commandbus.flow.commands.pause": "PauseInfo",
    "commandbus.flow.commands.prune": "PrunePreview PruneReport",
    "commandbus.flow.commands.query": "CommandFilters CommandQuery",
    "commandbus.flow.commands.unhandled_types": "UnhandledType",
    "commandbus.flow.limits.detail": "InLimitLine LimitBackoff LimitDetail PermitHolder",
    "commandbus.flow.commands.why_waiting": "WhyWaiting",
    "commandbus.flow.database.report": """
        DatabaseReport RoleConnections SlowStatement TableHealth TransactionHolder
    """,
    "commandbus.flow.limits.inspect": "ControlAction Estimate LimitInfo",
    "commandbus.flow.schedules.operate": "ScheduleRecord",
    "commandbus.flow.schedules.timeline": "ScheduleFirings ScheduleTimeline",
    "commandbus.flow.setup.domains": "DomainInfo",
    "commandbus.flow.setup.schema_state": "SchemaState",
    "commandbus.flow.workers.post_mortems": "AttemptInDeath PostMortem",
    "commandbus.flow.workers.requests": "LiveStack Stack StackFrame",
    "commandbus.flow.workers.slots": "SlotInfo WorkerSlots",
    "commandbus.limits.with_block": "Hold",
    "commandbus.model.attempt_outcome": "AttemptOutcome",
    "commandbus.model.batch": """
        BatchCancelReport BatchRecord BatchRetryReport BatchStatus CompleteWhen CreatedBatch OnComplete
    """,
    "commandbus.model.breaker": "Breaker",
    "commandbus.model.command": """
        AuditEntry AuditEvent CancelRequest CancelResult Command CommandRecord CommandStatus NewCommand
        SentCommand TsqEntry
    """,
    "commandbus.model.count": "Count",
    "commandbus.model.command_class": "command",
    "commandbus.model.api_errors": "parse_retry_after raise_for_rate_limit",
    "commandbus.model.durations": "Duration",
    "commandbus.model.minute_figures": "HourFigures MinuteFigures VersionMark",
    "commandbus.model.effect": """
        CheckpointRecord EffectAnswer EffectRecord EffectState NOT_DONE OpenEffect UNKNOWN
    """,
    "commandbus.model.json_values": "Json JsonValue",
    "commandbus.model.key_limit": "KeyLimit KeyLine KeyOverride OnFailure",
    "commandbus.model.ledger": "Ledger LedgerAttempt LedgerInterval LedgerState",
    "commandbus.model.limit": "StoreName Limit LimitOptions Rate",
    "commandbus.model.page": "Page",
    "commandbus.model.plan": "PlanAction PlanFilter PlanGroup PlanRecord PlanState PlannedCommand",
    "commandbus.model.priority": "Priority",
    "commandbus.model.process": """
        NewProcess ProcessRecord ProcessStatus ProcessSummary SentSignal SignalRecord StartedProcess StepRecord
        StepStatus StrayReply
    """,
    "commandbus.model.queue": "QueueInfo QueueMessage QueueMetrics",
    "commandbus.model.rehearsal": "Rehearsal RehearsedCall RehearsedSend TableChanges",
    "commandbus.model.retry": "OnExhausted RetryPolicy",
    "commandbus.model.schedule": "MissedPolicy OverlapPolicy Schedule",
    "commandbus.model.schedule_times": "ScheduleTimes",
    "commandbus.model.snooze": "Snooze",
    "commandbus.model.unique_key": "OnConflict UniqueKey",
    "commandbus.processes.manager": """
        BaseProcessManager ProcessView StartOptions StepCommand StepReply StepView
    """,
    "commandbus.processes.saga": "Part Saga Step branch parallel sequence step",
    "commandbus.processes.saga_waits": "Wait nested sleep wait_for",
    "commandbus.processes.waiting_steps": """
        OnTimeout StepKind StepProcess StepSignal StepSleep StepUndo WaitingStep
    """,
    "commandbus.worker.async_worker": "AsyncWorker",
    "commandbus.worker.execution.chunk_context": "AsyncChunkContext ChunkContext ChunkTransaction",
    "commandbus.worker.execution.context": "AsyncHandlerContext HandlerContext HandlerTransaction",
    "commandbus.worker.execution.handler_options": "AllHandlerOptions HandlerOptions",
    "commandbus.worker.execution.effects": "Effect",
    "commandbus.worker.execution.handlers": "Handler HandlerRegistry handler",
    "commandbus.worker.execution.lazy_transaction": "AsyncTransaction Transaction",
    "commandbus.worker.execution.lifespan_declarations": "WorkerState",
    "commandbus.worker.health": "HealthState HealthStatus",
    "commandbus.worker.rehearsal.rehearse": "rehearse",
    "commandbus.worker.reply_router": "ProcessReplyRouter WorkerOptions",
    "commandbus.worker.stop_report": "StopReport",
    "commandbus.worker.watchdog": "WorkerWatchdog",
    "commandbus.worker.worker": "Worker",
    "commandbus.settings": "Settings load_settings",
    "commandbus.troubleshooting": "AsyncTroubleshootingQueue TroubleshootingQueue",
    "commandbus.web.health_router": "health_router",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)  # noqa: PLE0605 - the stub has them one by one


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
