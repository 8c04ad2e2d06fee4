"""A worker whose role may not work: one sentence with the remedy and an exit code, and no restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql as pgsql

from commandbus import CommandBus, HandlerRegistry, MissingPrivilegeError, SchemaError, Worker
from commandbus.cli.exit_codes import ExitCode
from support.supervised import Supervised
from support.waiting import until
from support.workers import quick_settings

Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]
Login = Callable[..., str]


@pytest.fixture
def prefix(database: str, db: Db) -> Iterator[str]:
    """Roles belong to the server, not to the database: those of the test are gone after it."""
    name = f"w_{database.rsplit('/', 1)[1].partition('?')[0]}"
    yield name
    for (role,) in db.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE %s", (name + "%",)).fetchall():
        db.execute(pgsql.SQL("DROP OWNED BY {}").format(pgsql.Identifier(role)))
        db.execute(pgsql.SQL("DROP ROLE {}").format(pgsql.Identifier(role)))


@pytest.fixture
def login(database: str, bus: CommandBus, db: Db, prefix: str) -> Login:
    """The address of a new login with one of the roles, or with none."""
    bus.create_roles(prefix)

    def make(kind: str | None) -> str:
        user = f"{prefix}_{kind or 'nobody'}_user"
        roles = "" if kind is None else f"IN ROLE {prefix}_{kind}"
        db.execute(f"CREATE ROLE {user} LOGIN {roles}".encode())
        return database.replace("//postgres@", f"//{user}@", 1)

    return make


def ended(supervised: Supervised) -> str:
    """It has ended with the documented code, and has started no worker twice; returns what it said last."""
    code, _ = supervised.end()
    assert code == ExitCode.REFUSED, supervised.log
    assert "next in" not in supervised.log
    assert "Traceback" not in supervised.log
    return supervised.log.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        (None, "USAGE ON SCHEMA commandbus and "),
        ("reader", "UPDATE ON commandbus.command and "),
        ("producer", "UPDATE ON commandbus.command and "),
    ],
)
def test_a_role_that_may_not_work_is_told_what_it_lacks_before_a_worker_is_started(
    supervise: Supervise, login: Login, prefix: str, kind: str | None, lacks: str
) -> None:
    supervised = supervise(database_url=login(kind), processes=2)
    said = ended(supervised)
    role = f"{prefix}_{kind or 'nobody'}_user"
    assert f"role {role} may not run a worker: it lacks {lacks}" in said
    assert f"run `commandbus roles` as the owner of the schema, then GRANT commandbus_worker TO {role}" in said
    assert "worker process" not in supervised.log


def test_a_queue_that_the_role_may_not_use_is_named(
    supervise: Supervise, login: Login, db: Db, prefix: str
) -> None:
    address = login("worker")
    db.execute(f"REVOKE UPDATE ON pgmq.q_orders__commands FROM {prefix}_worker".encode())
    said = ended(supervise(database_url=address, processes=2))
    assert f"role {prefix}_worker_user may not run a worker: it lacks UPDATE ON pgmq.q_orders__commands;" in said


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("pause", "REVOKE SELECT ON commandbus.pause FROM {role}"),
        (
            "q_orders__commands",
            "REVOKE UPDATE ON pgmq.q_orders__commands FROM {role}; "
            "GRANT UPDATE (message) ON pgmq.q_orders__commands TO {role}",
        ),
    ],
)
def test_a_right_that_is_missed_only_at_work_ends_it_too(
    supervise: Supervise, login: Login, db: Db, prefix: str, table: str, change: str
) -> None:
    """Nobody looks for these rights before they are needed."""
    address = login("worker")
    db.execute(change.format(role=f"{prefix}_worker").encode())
    supervised = supervise(database_url=address, processes=2)
    code, _ = supervised.end()
    assert code == ExitCode.REFUSED, supervised.log
    said = supervised.log.strip().splitlines()[-1]
    assert f"role {prefix}_worker_user may not run a worker: permission denied for table {table}" in said
    assert "next in" not in supervised.log


def test_a_right_that_is_taken_away_later_is_waited_for(
    supervise: Supervise, login: Login, db: Db, prefix: str, bus: CommandBus, impatient: Callable[[str], None]
) -> None:
    """Workers have worked: a person may be repairing something, so the usual back-off holds."""
    impatient("worker_processes.EARLY_SECONDS = restart_budget.EARLY_SECONDS = 0.0")
    supervised = supervise(database_url=login("worker")).until_ready()
    until(lambda: supervised.ask("/health/ready")[0] == 200)
    bus.send("orders", "quick", command_id="a")
    until(lambda: bus.get_command("orders", "a").status == "COMPLETED")
    supervised.until_said("is ready (process")
    db.execute(f"REVOKE UPDATE ON pgmq.q_orders__commands FROM {prefix}_worker".encode())
    bus.send("orders", "quick", command_id="b")
    supervised.until_said("could not start: role")
    db.execute(f"GRANT UPDATE ON pgmq.q_orders__commands TO {prefix}_worker".encode())
    until(lambda: bus.get_command("orders", "b").status == "COMPLETED", 40, what=lambda: supervised.log)
    assert supervised.stop()[0] == 0


def test_a_database_without_the_schema_ends_it(supervise: Supervise, empty_database: str) -> None:
    supervised = supervise(database_url=empty_database, processes=2)
    assert supervised.end()[0] == ExitCode.DATABASE
    assert "run `commandbus migrate`" in supervised.log
    assert "next in" not in supervised.log


def test_a_domain_that_nobody_knows_ends_it(supervise: Supervise, login: Login, tasks: Path) -> None:
    with (tasks / "tasks.py").open("a") as file:
        file.write('handlers.register("shipping", "quick", quick)\n')
    supervised = supervise(database_url=login("worker"), domains="shipping", processes=2)
    assert supervised.end()[0] == ExitCode.NOT_FOUND
    assert "create it with `commandbus domain create shipping`" in supervised.log
    assert "next in" not in supervised.log


def test_the_role_of_workers_works(supervise: Supervise, login: Login, bus: CommandBus, tasks: Path) -> None:
    supervised = supervise(database_url=login("worker")).until_ready()
    bus.send("orders", "quick", command_id="a")
    until(lambda: bus.get_command("orders", "a").status == "COMPLETED")
    assert supervised.stop()[0] == 0


# --- inside an application


@pytest.fixture
def registry() -> HandlerRegistry:
    handlers = HandlerRegistry()
    handlers.register("orders", "quick", lambda command, ctx: 1)
    return handlers


@pytest.mark.parametrize("kind", [None, "reader", "producer"])
def test_start_raises_the_same_sentence(login: Login, registry: HandlerRegistry, kind: str | None) -> None:
    worker = Worker(registry, settings=quick_settings(login(kind)))
    with pytest.raises(MissingPrivilegeError, match=r"may not run a worker: it lacks .*`commandbus roles`"):
        worker.start()
    assert not worker.is_running


def test_start_says_that_nobody_has_migrated(empty_database: str, registry: HandlerRegistry) -> None:
    with pytest.raises(SchemaError, match="commandbus migrate"):
        Worker(registry, settings=quick_settings(empty_database)).start()


def test_a_queue_that_somebody_dropped_is_made_again(
    database: str, bus: CommandBus, db: Db, registry: HandlerRegistry
) -> None:
    db.execute("SELECT pgmq.drop_queue('orders__commands')")
    with Worker(registry, settings=quick_settings(database)):
        bus.send("orders", "quick", command_id="a")
        until(lambda: bus.get_command("orders", "a").status == "COMPLETED")
