"""Which database errors are transient, decided by SQLSTATE in one table.

Python classes do not decide: a server that is read-only for a second raises an InternalError, and a statement
that is too complex for the server an OperationalError.
"""

from __future__ import annotations

from typing import Final

import psycopg

# Prefixes of SQLSTATEs after which the same statement may succeed later.
PASSING: Final = (
    "08",  # the connection failed
    "25006",  # read-only: a standby before its promotion, a managed database with a full disk
    "25P03",  # idle in transaction for too long: the server ended the session
    "25P04",  # a transaction took too long: likewise
    "40001",  # could not serialize
    "40P01",  # deadlock
    "53",  # out of memory, disk or connections
    "55P03",  # somebody holds a lock
    "57014",  # canceled: by our own time limit, or by an operator
    "57P01",  # an operator ended the session
    "57P02",  # a neighboring session crashed
    "57P03",  # starting up, or shutting down
    "57P04",  # the database was dropped
    "57P05",  # idle for too long
    "58",  # the server's own disk or system
)
READ_ONLY: Final = "25006"
OF_A_ROW: Final = ("53200", "53400")
CANCELED: Final = "57014"
LOCKED: Final = ("55P03", CANCELED)
_INTERNAL: Final = "XX"


def is_passing(error: BaseException, *, is_lost: bool = False) -> bool:
    """Whether the same statement may succeed later. `is_lost`: the connection ended with the error."""
    if not isinstance(error, psycopg.Error):
        return False
    state = error.sqlstate
    if state is None:
        return is_lost or isinstance(error, PassingError)
    return state.startswith(PASSING) or (is_lost and state.startswith(_INTERNAL))


def is_locked(error: BaseException) -> bool:
    """Whether somebody else's lock was the reason: that row is for later, and its neighbors are not.

    A statement that was canceled counts, too. Behind a pooler the server keeps no `lock_timeout` for us, and what
    our own clock cancels there has mostly waited for a lock.
    """
    return isinstance(error, psycopg.Error) and error.sqlstate in LOCKED


def is_of_the_database(error: BaseException, *, is_lost: bool) -> bool:
    """Whether the connection or the server is the reason, and not what was asked: then everybody waits.

    What a single row can bring about is none of it: a text of more than a gigabyte (53200, 54000), a document that
    is nested too deep for the server's stack (54001).
    """
    if not isinstance(error, psycopg.Error):
        return False
    return is_lost or (is_passing(error) and error.sqlstate not in OF_A_ROW)


def is_of_a_row(error: BaseException) -> bool:
    """Whether a value in a row is the reason: the server or psycopg cannot take it in, or our own code cannot."""
    if isinstance(error, psycopg.Error):
        state = error.sqlstate or ""
        return isinstance(error, psycopg.DataError) or state.startswith("54") or state in OF_A_ROW
    return isinstance(error, ValueError | TypeError | LookupError | ArithmeticError | RecursionError)


class PassingError(psycopg.OperationalError):
    """An error that passes. A thread of ours waits and tries again after this one, and ends with any other."""


class OtherPassingError(PassingError):
    """One that the server or psycopg has raised, as another class. `sqlstate` and `diag` are the original's."""

    def __init__(self, error: psycopg.Error) -> None:
        super().__init__(str(error).strip())
        self.original = error
        self.sqlstate = error.sqlstate

    @property
    def diag(self) -> psycopg.errors.Diagnostic:
        """What the server said."""
        return self.original.diag
