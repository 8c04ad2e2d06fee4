"""One table of SQLSTATEs decides what passes."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors as pg

from commandbus.db.transient_errors import PassingError, is_locked, is_of_the_database, is_passing

PASSING = [
    *("08000", "08003", "08006", "08001", "08004", "08007"),
    *("25006", "25P03", "40001", "40P01", "53000", "53100", "53200", "53300", "53400", "55P03"),
    *("57P01", "57P02", "57P03", "57P04", "57P05"),
]
LASTING = ["22P02", "23505", "42501", "42601", "42P01", "0A000", "3D000", "28P01", "XX000", "XX001"]
LASTING += ["26000", "40002", "54000", "54001", "55000", "55006", "57000", "HV000"]  # OperationalErrors


def error_of(state: str) -> psycopg.Error:
    """As the server would raise it: the class is the one that psycopg has for this state."""
    try:
        return pg.lookup(state)("from a test")
    except KeyError:
        error = psycopg.DatabaseError("from a test")
        error.sqlstate = state
        return error


@pytest.mark.parametrize("state", PASSING)
def test_what_passes_whatever_its_class(state: str) -> None:
    assert is_passing(error_of(state))
    assert is_of_the_database(error_of(state), is_lost=False) == (state not in ("53200", "53400"))


@pytest.mark.parametrize("state", LASTING)
def test_what_does_not_pass(state: str) -> None:
    assert not is_passing(error_of(state))
    assert not is_of_the_database(error_of(state), is_lost=False)


@pytest.mark.parametrize("state", ["XX000", "XX001"])
def test_an_internal_error_passes_if_the_connection_was_lost_with_it(state: str) -> None:
    assert is_passing(error_of(state), is_lost=True)
    assert not is_passing(error_of("42601"), is_lost=True)


def test_an_error_without_a_state() -> None:
    assert is_passing(psycopg.OperationalError("the connection is closed"), is_lost=True)
    assert is_passing(PassingError("a descriptor was closed"))
    assert not is_passing(psycopg.OperationalError("number of parameters must be between 0 and 65535"))
    assert not is_passing(psycopg.ProgrammingError("the query has 1 placeholder"))
    assert is_passing(psycopg.DatabaseError("lost synchronization"), is_lost=True)
    assert not is_passing(ValueError("not of the database"), is_lost=True)


@pytest.mark.parametrize(
    ("state", "locked"), [("55P03", True), ("57014", True), ("40P01", False), ("25006", False)]
)
def test_somebody_elses_lock(state: str, locked: bool) -> None:
    assert is_locked(error_of(state)) is locked
