"""The doctor: says OK, WARN or FAIL, and what to do; exit code 1 only for FAIL."""

from __future__ import annotations

import re
import uuid

import psycopg
import pytest
from psycopg import sql

from commandbus.cli.doctor import server
from commandbus.cli.exit_codes import ExitCode
from commandbus.settings import load_settings


def findings(answer, level):
    return {item["check"]: item for item in answer.document if item["level"] == level}


def test_all_is_well(orders):
    answer = orders("doctor", "--json")
    assert (answer.code, findings(answer, "FAIL")) == (0, {})
    checks = {item["check"] for item in answer.document}
    assert {"configuration", "timeouts", "server", "version", "clock", "schema", "pgmq", "privileges", "domains",
            "connections", "transactions", "workers", "troubleshooting queue"} <= checks  # fmt: skip
    text = orders("doctor").out
    assert "OK    schema: at migration " in text
    assert text.splitlines()[-1].endswith("0 failures")


def test_the_tests_server_runs_without_fsync_and_is_told_so(orders):
    assert "fsync" in findings(orders("doctor", "--json"), "WARN")


def test_a_missing_schema_fails_and_names_the_remedy(bare_cli, empty_database):
    answer = bare_cli("doctor", "--json", "--database", empty_database)
    assert answer.code == ExitCode.NO
    assert "commandbus migrate" in findings(answer, "FAIL")["schema"]["remedy"]


def test_a_newer_schema_fails(cli, database):
    with psycopg.connect(database) as conn:
        conn.execute("INSERT INTO commandbus.migration (number, name) VALUES (9999, 'future')")
    assert "newer" in findings(cli("doctor", "--json"), "FAIL")["schema"]["message"]


def test_an_unreachable_server_fails(bare_cli):
    answer = bare_cli("doctor", "--database", "postgresql://a:secret@127.0.0.1:1/a")
    assert answer.code == ExitCode.NO
    assert "FAIL  server: " in answer.out
    assert "refused" in answer.out
    assert "secret" not in answer.out


def test_a_bad_configuration_fails(bare_cli, monkeypatch):
    monkeypatch.setenv("WORKER_STATEMENT_TIMEOUT", "60s")
    answer = bare_cli("doctor", "--json")
    assert answer.code == ExitCode.NO
    assert "statement_timeout" in findings(answer, "FAIL")["configuration"]["message"]


def test_without_a_database_the_advice_is_to_set_one(bare_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COMMANDBUS_DATABASE_URL", raising=False)
    failed = findings(bare_cli("doctor", "--json"), "FAIL")["server"]
    assert "no database is configured" in failed["message"]
    assert failed["remedy"].startswith("set it: COMMANDBUS_DATABASE_URL=")
    assert "1 failure\n" in bare_cli("doctor").out


def test_a_file_that_is_no_toml_is_to_be_corrected_there(bare_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "commandbus.toml").write_text("[worker\n")
    assert findings(bare_cli("doctor", "--json"), "FAIL")["configuration"]["remedy"] == "correct it there"


@pytest.mark.parametrize(
    ("task_timeout", "attempt"),
    [
        ("default", "deadline 25s + grace 10s = stuck at 35s"),
        ("1m", "deadline 1m + grace 10s = stuck at 1m10s"),
        ("0", "no deadline"),
    ],
)
def test_the_layers_are_shown_in_their_order(orders, monkeypatch, task_timeout, attempt):
    monkeypatch.setenv("WORKER_TASK_TIMEOUT", task_timeout)
    timeouts = findings(orders("doctor", "--json"), "OK")["timeouts"]
    assert timeouts["message"] == f"statement 25s < lease 30s; {attempt}; heartbeat 15s; shutdown 30s"


@pytest.mark.parametrize("is_embedded", [True, False])
def test_a_setting_of_the_server_is_advised_only_where_the_server_is_somebodys(database, is_embedded):
    with psycopg.connect(database, autocommit=True) as conn:
        found = server.examine(conn, load_settings({"database_url": database}), is_embedded=is_embedded)
        checks = {finding.check for finding in found}
    assert ("client_connection_check_interval" in checks) is not is_embedded


@pytest.mark.parametrize(
    ("whole", "types", "told"),
    [
        (True, (), "domain mail is paused"),
        (False, ("nop",), "command type nop of domain mail is paused"),
        (False, ("nop", "post"), "command types nop, post of domain mail are paused"),
    ],
)
def test_what_is_paused_is_told_in_a_sentence(orders, bus, whole, types, told):
    bus.create_domain("mail")
    for command_type in types or (None,):
        bus.pause("mail", command_type)
    assert findings(orders("doctor", "--json"), "WARN")["pauses"]["message"] == told


def test_one_command_waits_and_two_wait(orders, bus, troubled):
    for command_id in ("s2", "s3", "b1"):
        troubled("tsq", "cancel", "orders", command_id)
    warned = findings(orders("doctor", "--json"), "WARN")["troubleshooting queue"]
    assert warned["message"] == "1 command waits: 1 of orders"


def test_doubts_are_warnings(orders, monkeypatch):
    monkeypatch.setenv("WORKER_CONCURENCY", "9")
    monkeypatch.setenv("WORKER_CONCURRENCY", "5000")
    answer = orders("doctor", "--json")
    warned = findings(answer, "WARN")
    assert answer.code == 0
    assert "WORKER_CONCURENCY" in warned["configuration"]["message"]
    assert "need up to 5005 (1 × (5000 slots + 4) + 1)" in warned["connections"]["message"]


def test_what_needs_a_look(troubled, database):
    troubled("pause", "orders", "bill")
    with psycopg.connect(database) as conn:
        conn.execute(
            "INSERT INTO commandbus.worker (id, host, pid, domains, concurrency, version, state, heartbeat_at) "
            "VALUES ('dead-1', 'far', 1, '{orders}', 4, '0', 'ACTIVE', now() - interval '5 minutes')"
        )
        conn.execute(
            "INSERT INTO commandbus.undelivered_reply (queue, message, reason) VALUES ('gone', '{}', 'x')"
        )
        conn.execute(
            "INSERT INTO commandbus.rejected_message (domain, msg_id, reason) VALUES ('orders', 1, 'no command')"
        )
    troubled("send", "orders", "ship")
    warned = [item for item in troubled("doctor", "--json").document if item["level"] == "WARN"]
    told = "\n".join(f"{item['message']} {item['remedy']}" for item in warned)
    for expected in ("dead-1", "5m", "4 commands wait: 4 of orders", "queue gone",
                     "1 message to domain orders was no command",
                     "command type bill of domain orders is paused", "no worker serves it"):  # fmt: skip
        assert expected in told


def test_a_schema_in_which_every_login_may_create_is_named_with_the_statement_that_mends_it(orders, database):
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("GRANT CREATE ON SCHEMA public TO PUBLIC")  # as PostgreSQL 14 does by itself
        conn.execute('CREATE SCHEMA "App"; GRANT ALL ON SCHEMA "App" TO PUBLIC')
        conn.execute("CREATE SCHEMA apart; GRANT ALL ON SCHEMA apart TO PUBLIC")
        name = conn.info.dbname
        conn.execute(f'ALTER DATABASE "{name}" SET search_path = "App", public'.encode())
        found = [item for item in orders("doctor", "--json").document if item["check"] == "strangers"]
        assert [item["level"] for item in found] == ["WARN", "WARN"]
        for item in found:
            conn.execute(item["remedy"].encode())
    assert findings(orders("doctor", "--json"), "OK")["strangers"]


def test_a_search_path_with_pg_catalog_behind_others_is_named(orders, database):
    with psycopg.connect(database, autocommit=True) as conn:
        set_path = f'ALTER DATABASE "{conn.info.dbname}" SET search_path = '
        conn.execute((set_path + "pg_catalog, public").encode())
        assert "search path" not in findings(orders("doctor", "--json"), "WARN")
        conn.execute((set_path + "public, pg_catalog").encode())
        assert "public, pg_catalog" in findings(orders("doctor", "--json"), "WARN")["search path"]["message"]


def test_where_the_oldest_of_what_was_put_aside_is_dropped(orders, database, monkeypatch):
    with psycopg.connect(database) as conn:
        conn.execute(
            "INSERT INTO commandbus.rejected_message (domain, msg_id, reason) "
            "SELECT 'orders', n, 'no command' FROM generate_series(1, 50) n"
        )
    assert "the oldest are dropped" not in orders("doctor").out
    monkeypatch.setenv("COMMANDBUS_RETENTION_ASIDES_COUNT", "50")
    found = findings(orders("doctor", "--json"), "WARN")["rejected messages"]
    assert "50 are kept" in found["message"]
    assert "the oldest are dropped" in found["message"]


def test_a_lost_queue_fails(orders, database):
    with psycopg.connect(database) as conn:
        conn.execute("SELECT pgmq.drop_queue('orders__commands')")
    answer = orders("doctor", "--json")
    assert answer.code == ExitCode.NO
    assert "commandbus domain create orders" in findings(answer, "FAIL")["domains"]["remedy"]


def test_limits_of_the_servers_own_are_compared_with_ours(orders, database):
    _database_setting(database, "statement_timeout", "'5s'")
    _database_setting(database, "synchronous_commit", "off")
    _database_setting(database, "default_transaction_isolation", "'serializable'")
    warned = findings(orders("doctor", "--json"), "WARN")
    assert {"statement_timeout", "synchronous_commit", "isolation"} <= warned.keys()
    assert (
        "statement_timeout = 5s, less than our statement_timeout (25s)" in warned["statement_timeout"]["message"]
    )


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("statement_timeout", "24s", "statement_timeout (25s)"),
        ("lock_timeout", "19s", "lock_timeout, 80% of statement_timeout (20s)"),
        ("idle_in_transaction_session_timeout", "24s", "statement_timeout (25s)"),
        ("idle_session_timeout", "9min", "pool_max_idle (10m)"),
        ("transaction_timeout", "34s", "visibility_timeout + 5s (35s)"),
    ],
)
def test_each_limit_of_the_server_that_undercuts_ours_is_named_with_both_values(
    orders, database, name, value, ours
):
    with psycopg.connect(database) as conn:
        if name == "transaction_timeout" and conn.info.server_version < 170_000:
            pytest.skip("PostgreSQL has transaction_timeout since 17")
    assert "server limits" in findings(orders("doctor", "--json"), "OK")
    _database_setting(database, name, f"'{value}'")
    answer = orders("doctor", "--json")
    warned = findings(answer, "WARN")[name]
    assert answer.code == 0
    assert f"{name} = {value.replace('in', '')}, less than our {ours}: " in warned["message"]
    assert f"SET {name} = 0" in warned["remedy"]
    assert "server limits" not in findings(answer, "OK")


@pytest.mark.parametrize(
    ("name", "value"),
    [("statement_timeout", "25s"), ("lock_timeout", "20s"), ("idle_session_timeout", "10min")],
)
def test_a_limit_of_the_server_that_is_as_long_as_ours_is_fine(orders, database, name, value):
    _database_setting(database, name, f"'{value}'")
    assert "server limits" in findings(orders("doctor", "--json"), "OK")


def test_behind_pgbouncer_the_limits_of_the_role_are_asked_for_and_then_praised(orders, database, monkeypatch):
    """The remedy that it names is one that it does not warn of afterwards."""
    monkeypatch.setenv("COMMANDBUS_PREPARED_STATEMENTS", "false")
    warned = findings(orders("doctor", "--json"), "WARN")["role limits"]
    assert "no lock_timeout and no statement_timeout" in warned["message"]
    for name, value in re.findall(r"SET (\w+) = ('\w+')", warned["remedy"]):
        _database_setting(database, name, value)
    answer = orders("doctor", "--json")
    assert "role limits" in findings(answer, "OK")
    assert "server limits" in findings(answer, "OK")


def test_a_locked_table_is_not_waited_for_without_end(orders, database, monkeypatch):
    monkeypatch.setattr("commandbus.cli.doctor.LOCK_SECONDS", 1)
    with psycopg.connect(database) as holder:
        holder.execute("LOCK TABLE commandbus.worker IN ACCESS EXCLUSIVE MODE")
        failed = findings(orders("doctor", "--json"), "FAIL")
    assert "another transaction holds a lock that this command needs" in failed["fleet"]["message"]


@pytest.mark.parametrize(
    ("task_timeout", "ours"), [("2m", "task_timeout + cancel_grace (2m10s)"), ("0", "statement_timeout (25s)")]
)
def test_how_long_a_transaction_may_take_follows_from_the_deadline(
    orders, database, monkeypatch, task_timeout, ours
):
    with psycopg.connect(database) as conn:
        if conn.info.server_version < 170_000:
            pytest.skip("PostgreSQL has transaction_timeout since 17")
    monkeypatch.setenv("WORKER_TASK_TIMEOUT", task_timeout)
    _database_setting(database, "transaction_timeout", "'20s'")
    assert ours in findings(orders("doctor", "--json"), "WARN")["transaction_timeout"]["message"]


def _database_setting(database, name, value):
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            sql.SQL("ALTER DATABASE {} SET {} = {}").format(
                sql.Identifier(conn.info.dbname), sql.SQL(name), sql.SQL(value)
            )
        )


@pytest.fixture
def plain_role(orders, bus, database, server_admin):
    """A role that may log in and nothing else, and the roles to be granted to it."""
    prefix = f"t{uuid.uuid4().hex[:8]}"
    names = bus.create_roles(prefix)
    user = f"{prefix}_user"
    server_admin(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(user)))
    yield user, names, database.replace("postgres@", f"{user}@")
    with psycopg.connect(database, autocommit=True) as conn:
        for name in (user, *names.values()):
            conn.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
            conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def test_a_role_without_rights_fails_and_the_grant_is_named(bare_cli, plain_role):
    user, _, address = plain_role
    answer = bare_cli("doctor", "--json", "--database", address)
    assert answer.code == ExitCode.NO
    failed = findings(answer, "FAIL")["privileges"]
    assert f"role {user} lacks USAGE ON SCHEMA commandbus" in failed["message"]
    assert f"GRANT commandbus_reader TO {user}" in failed["remedy"]
    refused = bare_cli("status", "--database", address)
    assert refused.code == ExitCode.REFUSED
    assert "commandbus doctor" in refused.err


@pytest.mark.parametrize(
    ("kind", "able"),
    [("reader", "may look"), ("producer", "may send"), ("limiter", "may use limits"),
     ("worker", "may look, send, use limits in an application, run handlers"),
     ("operator", "operate")],
)  # fmt: skip
def test_each_role_may_what_it_should(bare_cli, plain_role, server_admin, kind, able):
    user, names, address = plain_role
    server_admin(sql.SQL("GRANT {} TO {}").format(sql.Identifier(names[kind]), sql.Identifier(user)))
    answer = bare_cli("doctor", "--json", "--database", address)
    assert answer.code == 0
    told = [item for item in answer.document if item["check"] == "privileges"]
    assert told[0]["level"] == "OK"
    assert able in told[0]["message"]
    if kind == "producer":
        lacking = next(item for item in told if "may not run handlers" in item["message"])
        assert "SELECT ON TABLE commandbus.command" in lacking["message"]
        assert f"GRANT commandbus_worker TO {user}" in lacking["remedy"]


def test_the_doctor_counts_the_connections_for_messages_of_processes(orders, bus):
    bus.start_process("order", domain="orders")
    answer = orders("doctor", "--json")
    message = {item["check"]: item["message"] for item in answer.document}["connections"]
    assert "slots + 6) + 1), processes included" in message
