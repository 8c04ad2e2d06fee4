"""The public names, for type checkers. `__init__.py` finds them at run time."""

from commandbus.bus import (
    AsyncCommandBus as AsyncCommandBus,
)
from commandbus.bus import (
    CommandBus as CommandBus,
)
from commandbus.bus.queues import (
    AsyncPgmqClient as AsyncPgmqClient,
)
from commandbus.bus.queues import (
    PgmqClient as PgmqClient,
)
from commandbus.bus.repositories.audit import (
    AsyncAuditLogger as AsyncAuditLogger,
)
from commandbus.bus.repositories.audit import (
    AuditLogger as AuditLogger,
)
from commandbus.bus.repositories.batches import (
    AsyncBatchRepository as AsyncBatchRepository,
)
from commandbus.bus.repositories.batches import (
    BatchRepository as BatchRepository,
)
from commandbus.bus.repositories.commands import (
    AsyncCommandRepository as AsyncCommandRepository,
)
from commandbus.bus.repositories.commands import (
    CommandRepository as CommandRepository,
)
from commandbus.bus.repositories.key_limits import (
    AsyncKeyLimitRepository as AsyncKeyLimitRepository,
)
from commandbus.bus.repositories.key_limits import (
    KeyLimitRepository as KeyLimitRepository,
)
from commandbus.bus.repositories.plans import (
    AsyncPlanRepository as AsyncPlanRepository,
)
from commandbus.bus.repositories.plans import (
    PlanRepository as PlanRepository,
)
from commandbus.bus.repositories.processes import (
    AsyncProcessRepository as AsyncProcessRepository,
)
from commandbus.bus.repositories.processes import (
    ProcessRepository as ProcessRepository,
)
from commandbus.bus.repositories.schedules import (
    AsyncScheduleRepository as AsyncScheduleRepository,
)
from commandbus.bus.repositories.schedules import (
    ScheduleRepository as ScheduleRepository,
)
from commandbus.errors import (
    ApiTimeoutError as ApiTimeoutError,
)
from commandbus.errors import (
    AttemptCanceledError as AttemptCanceledError,
)
from commandbus.errors import (
    AttemptFencedError as AttemptFencedError,
)
from commandbus.errors import (
    BatchNotFoundError as BatchNotFoundError,
)
from commandbus.errors import (
    BatchTimeoutError as BatchTimeoutError,
)
from commandbus.errors import (
    BreakerOpenError as BreakerOpenError,
)
from commandbus.errors import (
    BusClosedError as BusClosedError,
)
from commandbus.errors import (
    BusinessRuleException as BusinessRuleException,
)
from commandbus.errors import (
    CallError as CallError,
)
from commandbus.errors import (
    CallTimeoutError as CallTimeoutError,
)
from commandbus.errors import (
    CommandBusError as CommandBusError,
)
from commandbus.errors import (
    CommandCanceledError as CommandCanceledError,
)
from commandbus.errors import (
    CommandFailedError as CommandFailedError,
)
from commandbus.errors import (
    CommandFailure as CommandFailure,
)
from commandbus.errors import (
    CommandInTroubleshootingError as CommandInTroubleshootingError,
)
from commandbus.errors import (
    CommandNotFoundError as CommandNotFoundError,
)
from commandbus.errors import (
    ConfigurationError as ConfigurationError,
)
from commandbus.errors import (
    ConnectionInUseError as ConnectionInUseError,
)
from commandbus.errors import (
    DatabaseUnavailableError as DatabaseUnavailableError,
)
from commandbus.errors import (
    DeadlineExceededError as DeadlineExceededError,
)
from commandbus.errors import (
    DuplicateBatchError as DuplicateBatchError,
)
from commandbus.errors import (
    DuplicateCommandError as DuplicateCommandError,
)
from commandbus.errors import (
    DuplicateHandlerError as DuplicateHandlerError,
)
from commandbus.errors import (
    DuplicateMemberError as DuplicateMemberError,
)
from commandbus.errors import (
    DuplicateProcessError as DuplicateProcessError,
)
from commandbus.errors import (
    DuplicateScheduleError as DuplicateScheduleError,
)
from commandbus.errors import (
    DuplicateSignalError as DuplicateSignalError,
)
from commandbus.errors import (
    EffectMisuseError as EffectMisuseError,
)
from commandbus.errors import (
    EffectUncertainError as EffectUncertainError,
)
from commandbus.errors import (
    EmbeddedPostgresError as EmbeddedPostgresError,
)
from commandbus.errors import (
    InvalidCommandError as InvalidCommandError,
)
from commandbus.errors import (
    InvalidOperationError as InvalidOperationError,
)
from commandbus.errors import (
    InvalidPayloadError as InvalidPayloadError,
)
from commandbus.errors import (
    InvalidScheduleError as InvalidScheduleError,
)
from commandbus.errors import (
    LimitLostError as LimitLostError,
)
from commandbus.errors import (
    LimitTimeoutError as LimitTimeoutError,
)
from commandbus.errors import (
    MiddlewareError as MiddlewareError,
)
from commandbus.errors import (
    MissingPrivilegeError as MissingPrivilegeError,
)
from commandbus.errors import (
    PermanentCommandError as PermanentCommandError,
)
from commandbus.errors import (
    PlanChangedError as PlanChangedError,
)
from commandbus.errors import (
    PlanNotFoundError as PlanNotFoundError,
)
from commandbus.errors import (
    ProcessNotFoundError as ProcessNotFoundError,
)
from commandbus.errors import (
    RateLimitError as RateLimitError,
)
from commandbus.errors import (
    RehearsalRefusedError as RehearsalRefusedError,
)
from commandbus.errors import (
    ScheduleNotFoundError as ScheduleNotFoundError,
)
from commandbus.errors import (
    SchemaError as SchemaError,
)
from commandbus.errors import (
    SendFailedError as SendFailedError,
)
from commandbus.errors import (
    TransactionEndedError as TransactionEndedError,
)
from commandbus.errors import (
    TransactionUsedError as TransactionUsedError,
)
from commandbus.errors import (
    TransientCommandError as TransientCommandError,
)
from commandbus.errors import (
    UniqueConflictError as UniqueConflictError,
)
from commandbus.errors import (
    UniqueKeyLockedError as UniqueKeyLockedError,
)
from commandbus.errors import (
    UnknownCommandTypeError as UnknownCommandTypeError,
)
from commandbus.errors import (
    UnknownDomainError as UnknownDomainError,
)
from commandbus.errors import (
    UnknownKeyLimitError as UnknownKeyLimitError,
)
from commandbus.errors import (
    UnknownLimitError as UnknownLimitError,
)
from commandbus.errors import (
    UnknownQueueError as UnknownQueueError,
)
from commandbus.errors import (
    WorkerStartError as WorkerStartError,
)
from commandbus.flow.audit.list_actions import (
    ActionRecord as ActionRecord,
)
from commandbus.flow.breakers.operate import (
    BreakerInfo as BreakerInfo,
)
from commandbus.flow.commands.audit_events import (
    NewAuditEvent as NewAuditEvent,
)
from commandbus.flow.commands.call import (
    CommandOutcome as CommandOutcome,
)
from commandbus.flow.commands.failures import (
    FailureGroup as FailureGroup,
)
from commandbus.flow.commands.find_id import (
    FoundId as FoundId,
)
from commandbus.flow.commands.history import (
    AttemptRecord as AttemptRecord,
)
from commandbus.flow.commands.history import (
    StuckAttempt as StuckAttempt,
)
from commandbus.flow.commands.inspect import (
    DomainStatus as DomainStatus,
)
from commandbus.flow.commands.inspect import (
    RejectedMessage as RejectedMessage,
)
from commandbus.flow.commands.inspect import (
    UndeliveredReply as UndeliveredReply,
)
from commandbus.flow.commands.inspect import (
    WorkerInfo as WorkerInfo,
)
from commandbus.flow.commands.pause import (
    PauseInfo as PauseInfo,
)
from commandbus.flow.commands.prune import (
    PrunePreview as PrunePreview,
)
from commandbus.flow.commands.prune import (
    PruneReport as PruneReport,
)
from commandbus.flow.commands.query import (
    CommandFilters as CommandFilters,
)
from commandbus.flow.commands.query import (
    CommandQuery as CommandQuery,
)
from commandbus.flow.commands.stuck_groups import (
    StuckGroup as StuckGroup,
)
from commandbus.flow.commands.unhandled_types import (
    UnhandledType as UnhandledType,
)
from commandbus.flow.commands.why_waiting import (
    WhyWaiting as WhyWaiting,
)
from commandbus.flow.database.report import (
    DatabaseReport as DatabaseReport,
)
from commandbus.flow.database.report import (
    RoleConnections as RoleConnections,
)
from commandbus.flow.database.report import (
    SlowStatement as SlowStatement,
)
from commandbus.flow.database.report import (
    TableHealth as TableHealth,
)
from commandbus.flow.database.report import (
    TransactionHolder as TransactionHolder,
)
from commandbus.flow.limits.detail import (
    InLimitLine as InLimitLine,
)
from commandbus.flow.limits.detail import (
    LimitBackoff as LimitBackoff,
)
from commandbus.flow.limits.detail import (
    LimitDetail as LimitDetail,
)
from commandbus.flow.limits.detail import (
    PermitHolder as PermitHolder,
)
from commandbus.flow.limits.inspect import (
    ControlAction as ControlAction,
)
from commandbus.flow.limits.inspect import (
    Estimate as Estimate,
)
from commandbus.flow.limits.inspect import (
    LimitInfo as LimitInfo,
)
from commandbus.flow.schedules.operate import (
    ScheduleRecord as ScheduleRecord,
)
from commandbus.flow.schedules.timeline import (
    ScheduleFirings as ScheduleFirings,
)
from commandbus.flow.schedules.timeline import (
    ScheduleTimeline as ScheduleTimeline,
)
from commandbus.flow.setup.domains import (
    DomainInfo as DomainInfo,
)
from commandbus.flow.setup.schema_state import (
    SchemaState as SchemaState,
)
from commandbus.flow.workers.post_mortems import (
    AttemptInDeath as AttemptInDeath,
)
from commandbus.flow.workers.post_mortems import (
    PostMortem as PostMortem,
)
from commandbus.flow.workers.requests import (
    LiveStack as LiveStack,
)
from commandbus.flow.workers.requests import (
    Stack as Stack,
)
from commandbus.flow.workers.requests import (
    StackFrame as StackFrame,
)
from commandbus.flow.workers.slots import (
    SlotInfo as SlotInfo,
)
from commandbus.flow.workers.slots import (
    WorkerSlots as WorkerSlots,
)
from commandbus.limits.with_block import (
    Hold as Hold,
)
from commandbus.model.api_errors import (
    parse_retry_after as parse_retry_after,
)
from commandbus.model.api_errors import (
    raise_for_rate_limit as raise_for_rate_limit,
)
from commandbus.model.attempt_outcome import (
    AttemptOutcome as AttemptOutcome,
)
from commandbus.model.batch import (
    BatchCancelReport as BatchCancelReport,
)
from commandbus.model.batch import (
    BatchRecord as BatchRecord,
)
from commandbus.model.batch import (
    BatchRetryReport as BatchRetryReport,
)
from commandbus.model.batch import (
    BatchStatus as BatchStatus,
)
from commandbus.model.batch import (
    CompleteWhen as CompleteWhen,
)
from commandbus.model.batch import (
    CreatedBatch as CreatedBatch,
)
from commandbus.model.batch import (
    OnComplete as OnComplete,
)
from commandbus.model.breaker import (
    Breaker as Breaker,
)
from commandbus.model.command import (
    AuditEntry as AuditEntry,
)
from commandbus.model.command import (
    AuditEvent as AuditEvent,
)
from commandbus.model.command import (
    CancelRequest as CancelRequest,
)
from commandbus.model.command import (
    CancelResult as CancelResult,
)
from commandbus.model.command import (
    Command as Command,
)
from commandbus.model.command import (
    CommandRecord as CommandRecord,
)
from commandbus.model.command import (
    CommandStatus as CommandStatus,
)
from commandbus.model.command import (
    NewCommand as NewCommand,
)
from commandbus.model.command import (
    SentCommand as SentCommand,
)
from commandbus.model.command import (
    TsqEntry as TsqEntry,
)
from commandbus.model.command_class import (
    command as command,
)
from commandbus.model.count import (
    Count as Count,
)
from commandbus.model.durations import (
    Duration as Duration,
)
from commandbus.model.effect import (
    NOT_DONE as NOT_DONE,
)
from commandbus.model.effect import (
    UNKNOWN as UNKNOWN,
)
from commandbus.model.effect import (
    CheckpointRecord as CheckpointRecord,
)
from commandbus.model.effect import (
    EffectAnswer as EffectAnswer,
)
from commandbus.model.effect import (
    EffectRecord as EffectRecord,
)
from commandbus.model.effect import (
    EffectState as EffectState,
)
from commandbus.model.effect import (
    OpenEffect as OpenEffect,
)
from commandbus.model.json_values import (
    Json as Json,
)
from commandbus.model.json_values import (
    JsonValue as JsonValue,
)
from commandbus.model.key_limit import (
    KeyLimit as KeyLimit,
)
from commandbus.model.key_limit import (
    KeyLine as KeyLine,
)
from commandbus.model.key_limit import (
    KeyOverride as KeyOverride,
)
from commandbus.model.key_limit import (
    OnFailure as OnFailure,
)
from commandbus.model.ledger import (
    Ledger as Ledger,
)
from commandbus.model.ledger import (
    LedgerAttempt as LedgerAttempt,
)
from commandbus.model.ledger import (
    LedgerInterval as LedgerInterval,
)
from commandbus.model.ledger import (
    LedgerState as LedgerState,
)
from commandbus.model.limit import (
    Limit as Limit,
)
from commandbus.model.limit import (
    LimitOptions as LimitOptions,
)
from commandbus.model.limit import (
    Rate as Rate,
)
from commandbus.model.limit import (
    StoreName as StoreName,
)
from commandbus.model.minute_figures import (
    HourFigures as HourFigures,
)
from commandbus.model.minute_figures import (
    MinuteFigures as MinuteFigures,
)
from commandbus.model.minute_figures import (
    VersionMark as VersionMark,
)
from commandbus.model.page import (
    Page as Page,
)
from commandbus.model.plan import (
    PlanAction as PlanAction,
)
from commandbus.model.plan import (
    PlanFilter as PlanFilter,
)
from commandbus.model.plan import (
    PlanGroup as PlanGroup,
)
from commandbus.model.plan import (
    PlannedCommand as PlannedCommand,
)
from commandbus.model.plan import (
    PlanRecord as PlanRecord,
)
from commandbus.model.plan import (
    PlanState as PlanState,
)
from commandbus.model.priority import (
    Priority as Priority,
)
from commandbus.model.process import (
    NewProcess as NewProcess,
)
from commandbus.model.process import (
    ProcessRecord as ProcessRecord,
)
from commandbus.model.process import (
    ProcessStatus as ProcessStatus,
)
from commandbus.model.process import (
    ProcessSummary as ProcessSummary,
)
from commandbus.model.process import (
    SentSignal as SentSignal,
)
from commandbus.model.process import (
    SignalRecord as SignalRecord,
)
from commandbus.model.process import (
    StartedProcess as StartedProcess,
)
from commandbus.model.process import (
    StepRecord as StepRecord,
)
from commandbus.model.process import (
    StepStatus as StepStatus,
)
from commandbus.model.process import (
    StrayReply as StrayReply,
)
from commandbus.model.queue import (
    QueueInfo as QueueInfo,
)
from commandbus.model.queue import (
    QueueMessage as QueueMessage,
)
from commandbus.model.queue import (
    QueueMetrics as QueueMetrics,
)
from commandbus.model.rehearsal import (
    Rehearsal as Rehearsal,
)
from commandbus.model.rehearsal import (
    RehearsedCall as RehearsedCall,
)
from commandbus.model.rehearsal import (
    RehearsedSend as RehearsedSend,
)
from commandbus.model.rehearsal import (
    TableChanges as TableChanges,
)
from commandbus.model.retry import (
    OnExhausted as OnExhausted,
)
from commandbus.model.retry import (
    RetryPolicy as RetryPolicy,
)
from commandbus.model.schedule import (
    MissedPolicy as MissedPolicy,
)
from commandbus.model.schedule import (
    OverlapPolicy as OverlapPolicy,
)
from commandbus.model.schedule import (
    Schedule as Schedule,
)
from commandbus.model.schedule_times import (
    ScheduleTimes as ScheduleTimes,
)
from commandbus.model.snooze import (
    Snooze as Snooze,
)
from commandbus.model.unique_key import (
    OnConflict as OnConflict,
)
from commandbus.model.unique_key import (
    UniqueKey as UniqueKey,
)
from commandbus.processes.manager import (
    BaseProcessManager as BaseProcessManager,
)
from commandbus.processes.manager import (
    ProcessView as ProcessView,
)
from commandbus.processes.manager import (
    StartOptions as StartOptions,
)
from commandbus.processes.manager import (
    StepCommand as StepCommand,
)
from commandbus.processes.manager import (
    StepReply as StepReply,
)
from commandbus.processes.manager import (
    StepView as StepView,
)
from commandbus.processes.saga import (
    Part as Part,
)
from commandbus.processes.saga import (
    Saga as Saga,
)
from commandbus.processes.saga import (
    Step as Step,
)
from commandbus.processes.saga import (
    branch as branch,
)
from commandbus.processes.saga import (
    parallel as parallel,
)
from commandbus.processes.saga import (
    sequence as sequence,
)
from commandbus.processes.saga import (
    step as step,
)
from commandbus.processes.saga_waits import (
    Wait as Wait,
)
from commandbus.processes.saga_waits import (
    nested as nested,
)
from commandbus.processes.saga_waits import (
    sleep as sleep,
)
from commandbus.processes.saga_waits import (
    wait_for as wait_for,
)
from commandbus.processes.waiting_steps import (
    OnTimeout as OnTimeout,
)
from commandbus.processes.waiting_steps import (
    StepKind as StepKind,
)
from commandbus.processes.waiting_steps import (
    StepProcess as StepProcess,
)
from commandbus.processes.waiting_steps import (
    StepSignal as StepSignal,
)
from commandbus.processes.waiting_steps import (
    StepSleep as StepSleep,
)
from commandbus.processes.waiting_steps import (
    StepUndo as StepUndo,
)
from commandbus.processes.waiting_steps import (
    WaitingStep as WaitingStep,
)
from commandbus.settings import (
    Settings as Settings,
)
from commandbus.settings import (
    load_settings as load_settings,
)
from commandbus.troubleshooting import (
    AsyncTroubleshootingQueue as AsyncTroubleshootingQueue,
)
from commandbus.troubleshooting import (
    TroubleshootingQueue as TroubleshootingQueue,
)
from commandbus.web.health_router import (
    health_router as health_router,
)
from commandbus.worker.async_worker import (
    AsyncWorker as AsyncWorker,
)
from commandbus.worker.execution.chunk_context import (
    AsyncChunkContext as AsyncChunkContext,
)
from commandbus.worker.execution.chunk_context import (
    ChunkContext as ChunkContext,
)
from commandbus.worker.execution.chunk_context import (
    ChunkTransaction as ChunkTransaction,
)
from commandbus.worker.execution.context import (
    AsyncHandlerContext as AsyncHandlerContext,
)
from commandbus.worker.execution.context import (
    HandlerContext as HandlerContext,
)
from commandbus.worker.execution.context import (
    HandlerTransaction as HandlerTransaction,
)
from commandbus.worker.execution.effects import (
    Effect as Effect,
)
from commandbus.worker.execution.handler_options import (
    AllHandlerOptions as AllHandlerOptions,
)
from commandbus.worker.execution.handler_options import (
    HandlerOptions as HandlerOptions,
)
from commandbus.worker.execution.handlers import (
    Handler as Handler,
)
from commandbus.worker.execution.handlers import (
    HandlerRegistry as HandlerRegistry,
)
from commandbus.worker.execution.handlers import (
    handler as handler,
)
from commandbus.worker.execution.lazy_transaction import (
    AsyncTransaction as AsyncTransaction,
)
from commandbus.worker.execution.lazy_transaction import (
    Transaction as Transaction,
)
from commandbus.worker.execution.lifespan_declarations import (
    WorkerState as WorkerState,
)
from commandbus.worker.health import (
    HealthState as HealthState,
)
from commandbus.worker.health import (
    HealthStatus as HealthStatus,
)
from commandbus.worker.rehearsal.rehearse import (
    rehearse as rehearse,
)
from commandbus.worker.reply_router import (
    ProcessReplyRouter as ProcessReplyRouter,
)
from commandbus.worker.reply_router import (
    WorkerOptions as WorkerOptions,
)
from commandbus.worker.stop_report import (
    StopReport as StopReport,
)
from commandbus.worker.watchdog import (
    WorkerWatchdog as WorkerWatchdog,
)
from commandbus.worker.worker import (
    Worker as Worker,
)
