"""Exit codes: the one table of the exit codes of `commandbus`, and which error has which code.

| code | name         | meaning                                                                              |
|------|--------------|--------------------------------------------------------------------------------------|
| 0    | OK           | success                                                                              |
| 1    | NO           | an expected "no": `migrate --check` misses something, `doctor` found a failure,      |
|      |              | the batch that `batch watch` saw did not complete in full, or not in time, the       |
|      |              | command that `wait` waited for has another outcome than COMPLETED, or none, ...      |
| 2    | USAGE        | the command line, or a value on it, makes no sense; nothing was done                 |
| 3    | CONFIGURATION| a setting (also one given as an option of `worker`, or `--database`) is missing,     |
|      |              | malformed or contradicts another; a registry cannot be loaded, or a function that    |
|      |              | it runs at the start of a worker (`on_start`) fails                                  |
| 4    | NOT_FOUND    | no such command, batch, process, domain, limit or schedule                           |
| 5    | REFUSED      | something forbids it: the state of the command, another one with the same id,        |
|      |              | missing privileges of the role, or a lock that another transaction holds             |
| 6    | DATABASE     | the database cannot be reached, or its schema is missing or newer than this release  |
| 7    | LEFT_BEHIND  | a worker stopped while attempts were running or outcomes were not written            |
| 70   | BUG          | an unexpected error; `--debug` shows where                                           |
| 130  | INTERRUPTED  | Ctrl-C                                                                               |
| 141  | BROKEN_PIPE  | the program that read the output has ended (`| head`)                                |
| 143  | TERMINATED   | SIGTERM                                                                              |

A worker that stops cleanly on SIGTERM or Ctrl-C exits with 0, not 143 or 130: it did what it was asked to do.

`EXPLAINED` maps errors to codes; the first class that matches counts. psycopg is imported when there is an error
to explain, so that a command line without one starts fast. Nothing here prints or exits.
"""

from __future__ import annotations

from enum import IntEnum

from commandbus.errors import (
    BatchNotFoundError,
    BatchTimeoutError,
    CallError,
    CommandBusError,
    CommandNotFoundError,
    ConfigurationError,
    DatabaseUnavailableError,
    DuplicateCommandError,
    EmbeddedPostgresError,
    InvalidCommandError,
    InvalidOperationError,
    MissingPrivilegeError,
    ProcessNotFoundError,
    ScheduleNotFoundError,
    SchemaError,
    UnknownDomainError,
    UnknownLimitError,
    UnknownQueueError,
    WorkerStartError,
)

NO_SCHEMA = "this database has no commandbus schema; run `commandbus migrate`"
LOCKED = (
    "another transaction holds a lock that this command needs: end that transaction (`commandbus doctor` names "
    "the oldest), and run this again"
)
NO_RIGHT = "{reason}; `commandbus doctor` says what this role may do, and `commandbus roles` grants privileges"


class ExitCode(IntEnum):
    """The exit code."""

    OK = 0
    NO = 1
    USAGE = 2
    CONFIGURATION = 3
    NOT_FOUND = 4
    REFUSED = 5
    DATABASE = 6
    LEFT_BEHIND = 7
    BUG = 70
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


EXPLAINED: tuple[tuple[type[Exception], ExitCode], ...] = (
    (ConfigurationError, ExitCode.CONFIGURATION),
    (WorkerStartError, ExitCode.CONFIGURATION),
    (InvalidCommandError, ExitCode.USAGE),
    (UnknownDomainError, ExitCode.NOT_FOUND),
    (UnknownLimitError, ExitCode.NOT_FOUND),
    (UnknownQueueError, ExitCode.NOT_FOUND),
    (CommandNotFoundError, ExitCode.NOT_FOUND),
    (BatchNotFoundError, ExitCode.NOT_FOUND),
    (ProcessNotFoundError, ExitCode.NOT_FOUND),
    (ScheduleNotFoundError, ExitCode.NOT_FOUND),
    (BatchTimeoutError, ExitCode.NO),
    (CallError, ExitCode.NO),
    (InvalidOperationError, ExitCode.REFUSED),
    (DuplicateCommandError, ExitCode.REFUSED),
    (MissingPrivilegeError, ExitCode.REFUSED),
    (SchemaError, ExitCode.DATABASE),
    (EmbeddedPostgresError, ExitCode.DATABASE),
    (DatabaseUnavailableError, ExitCode.DATABASE),
    (CommandBusError, ExitCode.REFUSED),
)


def code_for(error: BaseException) -> ExitCode:
    """The code of an error; BUG for an unexpected one."""
    found = next((code for kind, code in EXPLAINED if isinstance(error, kind)), None)
    return _code_of_database(error) if found is None else found


def _code_of_database(error: BaseException) -> ExitCode:
    import psycopg

    if isinstance(error, psycopg.errors.InsufficientPrivilege | psycopg.errors.LockNotAvailable):
        return ExitCode.REFUSED
    return ExitCode.DATABASE if isinstance(error, psycopg.Error) else ExitCode.BUG


def sentence_for(error: BaseException) -> str:
    """One line about an error, with a remedy if the database's own text has none."""
    from psycopg import errors as pg

    if isinstance(error, pg.UndefinedTable | pg.InvalidSchemaName):
        return NO_SCHEMA
    if isinstance(error, pg.InsufficientPrivilege):
        return NO_RIGHT.format(reason=error.diag.message_primary or one_line(error))
    if isinstance(error, pg.LockNotAvailable):
        return LOCKED
    if code_for(error) is ExitCode.BUG:
        return f"unexpected {type(error).__name__}: {one_line(error)} (--debug shows where)"
    return one_line(error)


def one_line(error: object) -> str:
    """An error's text without its line breaks."""
    return " ".join(str(error).split())
