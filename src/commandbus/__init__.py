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

import importlib

# Where each name is defined (for type checkers: `__init__.pyi`). A name's module is imported when the name is
# first asked for: a program that sends and one that runs handlers each need only a part of the package.
_NAMES = {
    "commandbus.bus": "AsyncCommandBus CommandBus",
    "commandbus.errors": """
        ApiTimeoutError AttemptCancelledError AttemptFencedError BatchNotFoundError BatchTimeoutError
        BreakerOpenError BusClosedError BusinessRuleException CallError CallTimeoutError CommandBusError
        CommandCanceledError CommandFailedError CommandFailure CommandInTroubleshootingError
        CommandNotFoundError ConfigurationError ConnectionInUseError DatabaseUnavailableError
        DeadlineExceededError DuplicateBatchError DuplicateCommandError DuplicateHandlerError
        DuplicateMemberError DuplicateProcessError EmbeddedPostgresError InvalidCommandError
        InvalidOperationError LimitLostError LimitTimeoutError MissingPrivilegeError PermanentCommandError
        ProcessNotFoundError RateLimitError SchemaError TransactionEndedError TransactionUsedError
        TransientCommandError UnknownCommandTypeError UnknownDomainError UnknownLimitError
    """,
    "commandbus.flow.breaker_operate": "BreakerInfo",
    "commandbus.flow.history": "AttemptRecord StuckAttempt",
    "commandbus.flow.inspect": "CommandQuery DomainStatus RejectedMessage UndeliveredReply WorkerInfo",
    "commandbus.model.batch": """
        BatchCancelReport BatchRecord BatchRetryReport BatchStatus CreatedBatch OnComplete
    """,
    "commandbus.model.breaker": "Breaker",
    "commandbus.model.command": """
        AuditEntry AuditEvent CancelRequest CancelResult Command CommandRecord CommandStatus NewCommand
        SentCommand TsqEntry
    """,
    "commandbus.model.http": "parse_retry_after raise_for_rate_limit",
    "commandbus.model.limit": "Limit Rate",
    "commandbus.model.page": "Page",
    "commandbus.model.process": "NewProcess ProcessRecord ProcessStatus StartedProcess StepRecord StepStatus",
    "commandbus.model.retry": "RetryPolicy",
    "commandbus.process.manager": "BaseProcessManager ProcessView StepCommand StepReply",
    "commandbus.process.saga": "Saga branch parallel sequence step",
    "commandbus.runtime.context": "AsyncHandlerContext HandlerContext HandlerTransaction",
    "commandbus.runtime.handlers": "HandlerRegistry handler",
    "commandbus.runtime.health": "HealthState HealthStatus",
    "commandbus.runtime.reply_router": "ProcessReplyRouter",
    "commandbus.runtime.spec": "StopReport",
    "commandbus.runtime.watchdog": "WorkerWatchdog",
    "commandbus.runtime.worker": "Worker",
    "commandbus.settings": "Settings load_settings",
    "commandbus.troubleshooting": "AsyncTroubleshootingQueue TroubleshootingQueue",
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
