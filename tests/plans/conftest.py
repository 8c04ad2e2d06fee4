"""One large database for most plans, which are read without changing it: every test is rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from crowd import analyze, crowded_database
from psycopg import sql

from commandbus.db.embedded import EmbeddedPostgres


@pytest.fixture(scope="session")
def crowded(
    server: EmbeddedPostgres, server_admin: Callable[[sql.Composable], None], migrated_template: str
) -> Iterator[str]:
    """Made once: the modules that use it run in one test worker."""
    with crowded_database(server, server_admin, migrated_template) as url:
        yield url


@pytest.fixture(scope="session", params=["unknown", "known"])
def statistics(request: pytest.FixtureRequest, crowded: str) -> str:
    """What the planner knows of the tables: nothing at all, or all that ANALYZE finds."""
    if request.param == "known":
        analyze(crowded)
    return str(request.param)


@pytest.fixture(params=["custom", "generic"])
def generic(request: pytest.FixtureRequest) -> bool:
    """A plan for these values, or one for any."""
    return bool(request.param == "generic")


@pytest.fixture
def conn(crowded: str, statistics: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection in a transaction that is rolled back: every test finds the same rows."""
    with psycopg.connect(crowded) as conn:
        yield conn
        conn.rollback()
