"""migrate, domain, queue, roles, config, embedded: what is done once."""

from __future__ import annotations

import json
import uuid

import psycopg
import pytest
from cli_harness import run
from psycopg import sql

from commandbus import HandlerRegistry, Worker
from commandbus.cli.exit_codes import ExitCode
from commandbus.model.counting import counted
from commandbus.sql import migrations
from support.waiting import until


def test_migrate_says_what_it_applied_and_how_pgmq_came(bare_cli, empty_database):
    first = bare_cli("migrate", "--domain", "orders", "--database", empty_database)
    assert first.code == 0
    numbers = ", ".join(f"{number:04d}" for number in migrations())
    assert f"applied {counted(len(migrations()), 'migration')}: {numbers}\n" in first.out
    assert "PGMQ 1." in first.out
    assert "domain orders is there" in first.out
    again = bare_cli("migrate", "--database", empty_database, "--json")
    assert again.document["newly_applied"] == []
    assert again.document["applied"] == list(migrations())
    assert again.document["pgmq_way"] in ("sql", "extension")


def test_check_answers_for_deploy_scripts(bare_cli, empty_database):
    missing = bare_cli("migrate", "--check", "--database", empty_database)
    assert (missing.code, missing.err) == (ExitCode.NO, "")
    assert "commandbus migrate" in missing.out
    assert bare_cli("migrate", "--database", empty_database).code == 0
    assert bare_cli("migrate", "--check", "--database", empty_database).code == 0
    lacks = bare_cli("migrate", "--check", "--domain", "orders", "--json", "--database", empty_database)
    assert (lacks.code, lacks.document["missing_domains"]) == (ExitCode.NO, ["orders"])


def test_check_changes_nothing(bare_cli, empty_database):
    bare_cli("migrate", "--check", "--database", empty_database)
    with psycopg.connect(empty_database) as conn:
        assert conn.execute("SELECT to_regnamespace('commandbus')").fetchone() == (None,)


def test_the_printed_sql_needs_no_database_and_does_the_same(bare_cli, empty_database):
    script = bare_cli("migrate", "--print")
    assert (script.code, script.err) == (0, "")
    assert bare_cli("migrate", "--print", "--json").document["sql"] == script.out
    for _ in range(2):
        with psycopg.connect(empty_database, autocommit=True) as conn:
            conn.execute(script.out.encode())
    assert bare_cli("migrate", "--check", "--database", empty_database).code == 0


def test_contradicting_options_are_refused(bare_cli):
    assert bare_cli("migrate", "--print", "--check").code == ExitCode.USAGE
    assert bare_cli("migrate", "--print", "--domain", "orders").code == ExitCode.USAGE


def test_a_newer_schema_is_refused(cli, database):
    with psycopg.connect(database) as conn:
        conn.execute("INSERT INTO commandbus.migration (number, name) VALUES (9999, 'future')")
    for words in (["migrate"], ["migrate", "--check"]):
        answer = cli(*words)
        assert answer.code == ExitCode.DATABASE
        assert "newer" in answer.err


def test_a_newer_schema_that_is_compatible_is_used(cli, database):
    with psycopg.connect(database) as conn:
        conn.execute("INSERT INTO commandbus.migration VALUES (9999, 'future', now(), true)")
    told = "the schema is at migration 9999, newer than this release knows, and compatible with it\n"
    assert f"nothing to apply: {told}" in cli("migrate").out
    checked = cli("migrate", "--check")
    assert (checked.code, checked.out.startswith(told)) == (0, True)
    assert cli("migrate", "--check", "--json").document["newer"] == [9999]
    assert f"at migration 9999, {told.partition(', ')[2]}" in cli("doctor").out
    refused = cli("roles")
    assert refused.code == ExitCode.DATABASE
    assert "make roles with the newer release" in refused.err


def test_a_migration_that_is_not_compatible_is_told(cli, database, monkeypatch):
    later = max(migrations()) + 1
    found = migrations() | {later: ("later", "-- Compatible: no\nSELECT 1")}
    registry = HandlerRegistry()
    registry.register("orders", "ship", lambda ctx: None)
    with Worker(registry, database_url=database) as worker:
        until(lambda: worker.id in cli("workers").out)
        monkeypatch.setattr("commandbus.sql.migrations", lambda: found)
        told = f"{later:04d} is not compatible with programs of older releases"
        checked = cli("migrate", "--check")
        assert checked.code == ExitCode.NO
        assert f"{told}: stop their workers first, or restart them right after it\n" in checked.out
        assert cli("migrate", "--check", "--json").document["incompatible"] == [later]
        assert f"{told}: restart 1 running worker with this release ({worker.id})\n" in cli("migrate").out
        assert told not in cli("migrate").out


def test_domains(cli):
    assert cli("domain", "list").out.startswith("no domains")
    made = cli("domain", "create", "orders", "bills")
    assert made.out == "domain orders created\ndomain bills created\n"
    assert cli("domain", "create", "orders", "--json").document == [{"domain": "orders", "created": False}]
    assert [item["domain"] for item in cli("domain", "list", "--json").document] == ["bills", "orders"]
    assert "orders__commands" in cli("domain", "list").out
    bad = cli("domain", "create", "Orders; DROP")
    assert bad.code == ExitCode.USAGE


def test_a_reply_queue(cli, database):
    assert cli("queue", "create", "replies").out == "queue replies is there\n"
    assert cli("queue", "create", "replies", "--json").document == {"queue": "replies"}
    with psycopg.connect(database) as conn:
        assert conn.execute("SELECT to_regclass('pgmq.q_replies') IS NOT NULL").fetchone() == (True,)


def test_roles_are_printed_and_created(orders, server_admin):
    prefix = f"t{uuid.uuid4().hex[:8]}"
    try:
        script = orders("roles", "--print", "--prefix", prefix)
        assert f"CREATE ROLE {prefix}_worker" in script.out
        for setting in ("lock_timeout", "statement_timeout", "default_transaction_isolation"):
            assert f"-- ALTER ROLE app SET {setting} = " in script.out, "for workers behind PgBouncer"
        assert orders("roles", "--print", "--prefix", prefix, "--json").document["sql"] == script.out
        made = orders("roles", "--prefix", prefix, "--json").document
        assert {item["kind"] for item in made} == {"reader", "producer", "limiter", "worker", "operator"}
        assert f"{prefix}_producer" in orders("roles", "--prefix", prefix).out
        assert orders("roles", "--prefix", "Bad-Prefix").code == ExitCode.USAGE
    finally:
        for kind in ("reader", "producer", "worker", "operator"):
            name = sql.Identifier(f"{prefix}_{kind}")
            _drop_role(orders, server_admin, name)


def _drop_role(cli, server_admin, name):
    database = cli("config", "--json").document[0]["value"]
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(sql.SQL("DROP OWNED BY {}").format(name))
    server_admin(sql.SQL("DROP ROLE IF EXISTS {}").format(name))


def test_config_names_values_and_origins(bare_cli, tmp_path, monkeypatch):
    (tmp_path / "commandbus.toml").write_text(
        'database_url = "postgresql://a:hidden@h/d"\n[worker]\nconcurrency = 7\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORKER_POLL_INTERVAL", "3s")
    monkeypatch.setenv("WORKER_CONCURENCY", "9")
    table = bare_cli("config")
    assert "hidden" not in table.out
    assert "warning: environment WORKER_CONCURENCY" in table.err
    found = {item["name"]: item for item in bare_cli("config", "--json").document}
    assert (found["concurrency"]["value"], found["poll_interval"]["from"]) == (
        7,
        "environment WORKER_POLL_INTERVAL",
    )
    assert found["database_url"]["value"] == "postgresql://a:***@h/d"
    assert found["max_messages"]["from"] == "default"
    assert (found["concurrency"]["toml"], found["concurrency"]["environment"]) == (
        "worker.concurrency",
        "WORKER_CONCURRENCY",
    )
    assert "worker.concurrency" in table.out
    assert "WORKER_MAX_MESSAGES" in table.out
    changed = bare_cli("config", "--changed", "--json").document
    assert {item["name"] for item in changed} == {"database_url", "concurrency", "poll_interval"}


def test_config_shows_limits_and_breakers(bare_cli, tmp_path, monkeypatch):
    (tmp_path / "commandbus.toml").write_text(
        '[limits.docai]\nconcurrency = 5\nrate = "120/m"\n[breakers."orders/ship"]\nstuck = 3\n'
    )
    monkeypatch.chdir(tmp_path)
    table = bare_cli("config", "--changed").out
    assert "concurrency=5, rate=120/m" in table
    found = {item["name"]: item for item in bare_cli("config", "--changed", "--json").document}
    assert found["limits.docai"]["value"] == {"concurrency": 5, "rate": "120/m"}
    assert found["breakers.orders/ship"]["value"] == {"stuck": 3}
    assert found["breakers.orders/ship"]["from"].endswith('[breakers."orders/ship"]')


def test_the_deadline_that_follows_from_other_settings_is_shown(bare_cli, monkeypatch):
    monkeypatch.setenv("WORKER_VISIBILITY_TIMEOUT", "60s")
    found = {item["name"]: item for item in bare_cli("config", "--json").document}["task_timeout"]
    assert (found["value"], found["default"], found["from"]) == (55.0, 55.0, "default")
    (row,) = [line for line in bare_cli("config").out.splitlines() if line.startswith("task_timeout ")]
    assert row.split() == ["task_timeout", "55s", "default", "worker.task_timeout", "WORKER_TASK_TIMEOUT"]
    monkeypatch.setenv("WORKER_TASK_TIMEOUT", "0")
    found = {item["name"]: item for item in bare_cli("config", "--json").document}["task_timeout"]
    assert found["value"] == 0


def test_a_config_file_can_be_named(bare_cli, tmp_path):
    file = tmp_path / "other.toml"
    file.write_text("[worker]\nconcurrency = 11\n")
    found = bare_cli("config", "--changed", "--json", "--config", str(file)).document
    assert [item["value"] for item in found] == [11]


@pytest.mark.slow
def test_the_embedded_server_is_left_up_and_stopped(folder):
    place = str(folder / "data")
    assert run("embedded", "status", "--folder", place, "--json").document["running"] is False
    started = run("embedded", "start", "--folder", place, "--json")
    try:
        address = started.document["address"]
        with psycopg.connect(address) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
        assert run("migrate", "--database", f"embedded:{place}").code == 0  # joins it, and leaves it up
        again = json.loads(run("embedded", "start", "--folder", place, "--json").out)
        assert again["pid"] == started.document["pid"]
        assert "running  yes" in run("embedded", "status", "--database", f"embedded:{place}").out
    finally:
        stopped = run("embedded", "stop", "--folder", place)
    assert stopped.out.startswith("stopped; the data is in")
    assert run("embedded", "stop", "--folder", place, "--json").document["stopped"] is False
