"""What an operation is made of.

    @operation(atomic=True)
    def verb(...) -> Steps[Result]:
        rows = yield Statement(sql.text("verb", domain=domain), {...})
        return Result(...)

One operation is one transaction. `atomic=False` says that it usually needs one statement only. That statement is
then its own transaction and costs one round trip. A second statement may follow to find out why the first did
nothing. A database error is raised at the `yield`, where the operation may translate it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar

import psycopg

from commandbus.errors import SchemaError

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")

Row: TypeAlias = tuple[Any, ...]


class Statement(NamedTuple):
    """One round trip: SQL text and its parameters.

    `only_inserts`: it looks for no existing row of a table that can become large, so its plan is good at any size.
    `by_keys`: its plan is good at any size in a session that never scans a table (`db/pool.py`, BY_KEYS).
    `quick`: its parameters are a sequence of texts, and the code that reads the result takes bytes
    for any value (`db/quick_statements.py`).
    """

    sql: bytes
    params: Mapping[str, Any] | Sequence[Any] | None = None
    only_inserts: bool = False
    by_keys: bool = False
    quick: bool = False


Steps: TypeAlias = Generator[Statement, list[Row], T]


@dataclass(slots=True)
class Operation(Generic[T]):
    """Steps that are to be run once, on one connection."""

    steps: Steps[T]
    atomic: bool
    whole: bool = False  # all or nothing in a lent transaction, too: there it gets a savepoint


Plan: TypeAlias = Generator[Operation[Any], Any, T]
"""Several operations, each in a transaction of its own: long work in small bites. An error of commandbus is raised
at the `yield`, where the plan may continue without that operation."""


def then(operation: Operation[T], make: Callable[[T], R]) -> Operation[R]:
    """The same operation, with `make` applied to its result."""

    def steps() -> Steps[R]:
        result = yield from operation.steps
        return make(result)

    return Operation(steps(), operation.atomic, operation.whole)


def operation(
    *, atomic: bool, whole: bool = False
) -> Callable[[Callable[P, Steps[T]]], Callable[P, Operation[T]]]:
    """Make a generator function an operation."""

    def decorate(function: Callable[P, Steps[T]]) -> Callable[P, Operation[T]]:
        @functools.wraps(function)
        def start(*args: P.args, **kwargs: P.kwargs) -> Operation[T]:
            return Operation(function(*args, **kwargs), atomic, whole)

        return start

    return decorate


def explain_absence(error: psycopg.Error) -> Exception:
    """If the missing table or schema is one of ours, returns the error that says that nobody has migrated."""
    message = error.diag.message_primary or ""
    return no_schema() if "commandbus" in message or "pgmq" in message else error


def no_schema() -> SchemaError:
    """The error for a database that nobody has migrated."""
    return SchemaError("this database has no commandbus schema; run `commandbus migrate` (or `bus.migrate()`)")
