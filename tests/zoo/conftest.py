"""One database and one supervised fleet for a whole module of the zoo."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql

from commandbus import CommandBus
from commandbus.db.embedded import EmbeddedPostgres
from fleet import DOMAIN, Fleet, running_fleet
from support.access import plain_address

TABLES = """
CREATE TABLE marker (command_id text, attempt integer, place text, at timestamptz DEFAULT clock_timestamp());
CREATE TABLE locked (id integer PRIMARY KEY);
INSERT INTO locked VALUES (1)
"""


@pytest.fixture(scope="module")
def zoo_database(
    server: EmbeddedPostgres, server_admin: Callable[[sql.Composable], None], migrated_template: str
) -> Iterator[str]:
    """A migrated database with the domain `zoo`, for all tests of a module."""
    name = f"zoo_{uuid.uuid4().hex[:12]}"
    template = sql.Identifier(migrated_template)
    server_admin(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), template))
    url = plain_address(server, name)
    with psycopg.connect(url) as conn, CommandBus(url) as bus:
        conn.execute(TABLES)
        bus.create_domain(DOMAIN)
    yield url
    server_admin(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture(scope="module")
def fleet(zoo_database: str) -> Iterator[Fleet]:
    """`commandbus worker` with one process of four slots and short limits."""
    with running_fleet(zoo_database) as fleet:
        yield fleet
