"""Workers of an older release on a newer schema: those that run when it is migrated, and those that start later.

The supervisors are real processes that know the migrations of this release. The migration is that of a later one.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator

import pytest
from psycopg import sql as pgsql

from commandbus import CommandBus, CommandStatus
from commandbus.cli.exit_codes import ExitCode
from commandbus.db.embedded import EmbeddedPostgres
from commandbus.sql import migrations
from support.access import plain_address
from support.supervised import Supervised
from support.waiting import until

Supervise = Callable[..., Supervised]
COMPATIBLE = """
-- What a later release adds.
--
-- Compatible: yes
ALTER TABLE commandbus.command ADD COLUMN added text;
ALTER TABLE commandbus.worker ADD COLUMN added text;
"""
INCOMPATIBLE = "-- Compatible: no\nALTER TABLE commandbus.command ADD COLUMN added text"
LATER = max(migrations()) + 1


@pytest.fixture
def database(
    server: EmbeddedPostgres, server_admin: Callable[[pgsql.Composable], None], migrated_template: str
) -> Iterator[str]:
    """A migrated database of the test's own: its schema is what is tampered with here."""
    name = f"older_{uuid.uuid4().hex[:8]}"
    template = pgsql.Identifier(migrated_template)
    server_admin(pgsql.SQL("CREATE DATABASE {} TEMPLATE {}").format(pgsql.Identifier(name), template))
    yield plain_address(server, name)
    server_admin(pgsql.SQL("DROP DATABASE {} WITH (FORCE)").format(pgsql.Identifier(name)))


@pytest.fixture
def migrate_later(database: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Migrates as a later release with this one migration more would."""

    def migrate(text: str) -> None:
        with monkeypatch.context() as later, CommandBus(database) as bus:
            found = migrations() | {LATER: ("later", text)}
            later.setattr("commandbus.sql.migrations", lambda: found)
            assert bus.migrate().missing == (LATER,)

    return migrate


def _works(bus: CommandBus, command_id: str) -> None:
    bus.send("orders", "quick", command_id=command_id)
    until(lambda: bus.get_command("orders", command_id).status is CommandStatus.COMPLETED)  # type: ignore[union-attr]


def test_a_compatible_migration_disturbs_no_worker_and_keeps_none_from_starting(
    supervise: Supervise, bus: CommandBus, migrate_later: Callable[[str], None]
) -> None:
    supervised = supervise().until_ready()
    _works(bus, "before")
    migrate_later(COMPATIBLE)
    _works(bus, "after")
    (worker,) = supervised.workers()
    os.kill(worker, signal.SIGKILL)
    supervised.until_ready(2)
    assert (
        f"the schema is at migration {LATER}, newer than this release knows, and compatible with it"
        in supervised.log
    )
    _works(bus, "by its replacement")
    supervised.stop()
    another = supervise().until_ready()
    _works(bus, "by another supervisor")
    assert another.stop()[0] == ExitCode.OK


def test_an_incompatible_one_keeps_older_workers_from_starting(
    supervise: Supervise, bus: CommandBus, migrate_later: Callable[[str], None]
) -> None:
    supervised = supervise().until_ready()
    migrate_later(INCOMPATIBLE)
    _works(bus, "by a worker that had started before")
    another = supervise()
    assert another.end()[0] == ExitCode.DATABASE
    told = (
        f"this database's commandbus schema is at migration {LATER}, newer than this release knows ({LATER - 1}), "
        f"and migration {LATER} is not compatible with older releases; install a newer commandbus"
    )
    assert another.log.splitlines()[-1].endswith(told)
    (worker,) = supervised.workers()
    os.kill(worker, signal.SIGKILL)
    supervised.until_said(told)
