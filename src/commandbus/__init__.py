"""commandbus: commands on PostgreSQL, run by workers that cannot hang.

The way of one command through this package:

1. **send** — `bus/` takes it; `flow/send.py` writes its row and its queue message in one statement, in the
   caller's transaction if one is lent (`conn=`).
2. **claim** — a worker's `runtime/claimer.py` takes visible messages (`flow/claim.py`, `sql/claim.sql`) under a
   lease. What is odd about some (their last worker vanished, a foreign client sent them, their type is paused) is
   put right before anything runs.
3. **execute** — a slot (`runtime/slots.py`: threads; `runtime/loop.py`: async tasks) runs the handler with its
   context (`runtime/context.py`); `runtime/execute.py` turns whatever happens into an outcome
   (`model/outcome.py` decides the fate). The **ladder** (`runtime/ladder.py`) sees to it that the attempt ends in
   time whatever the handler does; the supervisor (`supervisor/`) sees to it where a thread cannot.
4. **settle** — `runtime/settler.py` writes outcomes in batches, each under its attempt's fence
   (`flow/settle.py`): done, tried again later, failed for good, or in the troubleshooting queue.
5. **operate** — people look (`flow/inspect.py`) and act (`flow/operate.py`): `troubleshooting.py`, `cli/`.
"""

from commandbus.bus import AsyncCommandBus, CommandBus
from commandbus.errors import (
    ApiTimeoutError,
    AttemptCancelledError,
    AttemptFencedError,
    BatchNotFoundError,
    BatchTimeoutError,
    BreakerOpenError,
    BusClosedError,
    BusinessRuleException,
    CallError,
    CallTimeoutError,
    CommandBusError,
    CommandCanceledError,
    CommandFailedError,
    CommandFailure,
    CommandInTroubleshootingError,
    CommandNotFoundError,
    ConfigurationError,
    ConnectionInUseError,
    DeadlineExceededError,
    DuplicateBatchError,
    DuplicateCommandError,
    DuplicateHandlerError,
    DuplicateMemberError,
    DuplicateProcessError,
    EmbeddedPostgresError,
    InvalidCommandError,
    InvalidOperationError,
    LimitTimeoutError,
    MissingPrivilegeError,
    PermanentCommandError,
    ProcessNotFoundError,
    RateLimitError,
    SchemaError,
    TransactionUsedError,
    TransientCommandError,
    UnknownCommandTypeError,
    UnknownDomainError,
    UnknownLimitError,
)
from commandbus.flow.breaker_operate import BreakerInfo
from commandbus.flow.history import AttemptRecord, StuckAttempt
from commandbus.flow.inspect import CommandQuery, DomainStatus, RejectedMessage, UndeliveredReply, WorkerInfo
from commandbus.model.batch import (
    BatchCancelReport,
    BatchRecord,
    BatchRetryReport,
    BatchStatus,
    CreatedBatch,
    OnComplete,
)
from commandbus.model.breaker import Breaker
from commandbus.model.command import (
    AuditEntry,
    AuditEvent,
    CancelRequest,
    CancelResult,
    Command,
    CommandRecord,
    CommandStatus,
    NewCommand,
    SentCommand,
    TsqEntry,
)
from commandbus.model.http import parse_retry_after, raise_for_rate_limit
from commandbus.model.limit import Limit, Rate
from commandbus.model.page import Page
from commandbus.model.process import (
    NewProcess,
    ProcessRecord,
    ProcessStatus,
    StartedProcess,
    StepRecord,
    StepStatus,
)
from commandbus.model.retry import RetryPolicy
from commandbus.process.manager import BaseProcessManager, ProcessView, StepCommand, StepReply
from commandbus.process.saga import Saga, branch, parallel, sequence, step
from commandbus.runtime.context import AsyncHandlerContext, HandlerContext, HandlerTransaction
from commandbus.runtime.handlers import HandlerRegistry, handler
from commandbus.runtime.health import HealthState, HealthStatus
from commandbus.runtime.reply_router import ProcessReplyRouter
from commandbus.runtime.spec import StopReport
from commandbus.runtime.watchdog import WorkerWatchdog
from commandbus.runtime.worker import Worker
from commandbus.settings import Settings, load_settings
from commandbus.troubleshooting import AsyncTroubleshootingQueue, TroubleshootingQueue

__all__ = [
    "ApiTimeoutError",
    "AsyncCommandBus",
    "AsyncHandlerContext",
    "AsyncTroubleshootingQueue",
    "AttemptCancelledError",
    "AttemptFencedError",
    "AttemptRecord",
    "AuditEntry",
    "AuditEvent",
    "BaseProcessManager",
    "BatchCancelReport",
    "BatchNotFoundError",
    "BatchRecord",
    "BatchRetryReport",
    "BatchStatus",
    "BatchTimeoutError",
    "Breaker",
    "BreakerInfo",
    "BreakerOpenError",
    "BusClosedError",
    "BusinessRuleException",
    "CallError",
    "CallTimeoutError",
    "CancelRequest",
    "CancelResult",
    "Command",
    "CommandBus",
    "CommandBusError",
    "CommandCanceledError",
    "CommandFailedError",
    "CommandFailure",
    "CommandInTroubleshootingError",
    "CommandNotFoundError",
    "CommandQuery",
    "CommandRecord",
    "CommandStatus",
    "ConfigurationError",
    "ConnectionInUseError",
    "CreatedBatch",
    "DeadlineExceededError",
    "DomainStatus",
    "DuplicateBatchError",
    "DuplicateCommandError",
    "DuplicateHandlerError",
    "DuplicateMemberError",
    "DuplicateProcessError",
    "EmbeddedPostgresError",
    "HandlerContext",
    "HandlerRegistry",
    "HandlerTransaction",
    "HealthState",
    "HealthStatus",
    "InvalidCommandError",
    "InvalidOperationError",
    "Limit",
    "LimitTimeoutError",
    "MissingPrivilegeError",
    "NewCommand",
    "NewProcess",
    "OnComplete",
    "Page",
    "PermanentCommandError",
    "ProcessNotFoundError",
    "ProcessRecord",
    "ProcessReplyRouter",
    "ProcessStatus",
    "ProcessView",
    "Rate",
    "RateLimitError",
    "RejectedMessage",
    "RetryPolicy",
    "Saga",
    "SchemaError",
    "SentCommand",
    "Settings",
    "StartedProcess",
    "StepCommand",
    "StepRecord",
    "StepReply",
    "StepStatus",
    "StopReport",
    "StuckAttempt",
    "TransactionUsedError",
    "TransientCommandError",
    "TroubleshootingQueue",
    "TsqEntry",
    "UndeliveredReply",
    "UnknownCommandTypeError",
    "UnknownDomainError",
    "UnknownLimitError",
    "Worker",
    "WorkerInfo",
    "WorkerWatchdog",
    "branch",
    "handler",
    "load_settings",
    "parallel",
    "parse_retry_after",
    "raise_for_rate_limit",
    "sequence",
    "step",
]
