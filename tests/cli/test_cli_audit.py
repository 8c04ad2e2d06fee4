"""audit, database, and the searches of commands that say when they are not complete."""

from __future__ import annotations

import csv
import io
import re

import psycopg

from commandbus.cli.exit_codes import ExitCode
from commandbus.flow.commands import query_filters, query_sources


def test_who_did_what_and_why(orders, bus):
    bus.send("orders", "ship", command_id="one")
    orders("cancel", "orders", "one", "--operator", "ann", "--reason", "=cmd")
    orders("pause", "orders", "--operator", "bob", "--reason", "holiday")
    assert [line.split()[2:4] for line in orders("audit").out.splitlines()[1:]] == [
        ["bob", "PAUSE"],
        ["ann", "CANCEL"],
    ]
    assert [item["subject"] for item in orders("audit", "--by", "ann", "--json").document] == ["orders one"]
    (row,) = csv.DictReader(io.StringIO(orders("audit", "--action", "cancel", "--export", "csv").out))
    assert (row["command_id"], row["reason"]) == ("one", "'=cmd")
    assert orders("audit", "--before", "1h").out == "nobody did anything\n"
    assert "more: add --cursor" in orders("audit", "--limit", "1").out
    assert orders("audit", "--cursor", "x").code != 0
    assert orders("audit", "--domain", "nowhere").code == ExitCode.NOT_FOUND


def test_the_database(orders):
    text = orders("database").out
    assert "commandbus.command" in text
    assert "pg_stat_statements is not installed" in text
    document = orders("database", "--json").document
    assert document["used_connections"] >= 1


def test_a_search_says_that_it_has_not_seen_all(orders, bus, monkeypatch):
    for number in range(6):
        bus.send("orders", "ship", {"n": number}, command_id=f"ship-{number}")
    assert "ship-4" in orders("commands", "--data", "n=4").out
    assert "not PATH=VALUE" in orders("commands", "--data", "n").err
    monkeypatch.setattr(query_filters, "BUDGET_FOR_DATA", 2)
    monkeypatch.setattr(query_sources, "FEW", 1)
    assert "this is not all" in orders("commands", "--data", "n=0").out


def test_changes_of_key_limits_batches_and_limits_are_in_the_audit(orders, bus):
    by = ("--operator", "ann", "--reason", "tests")
    bus.create_batch("orders", [], batch_id="b", is_open=True)
    for words in (
        ("keys", "set", "orders", "tenant", "--concurrency", "3"),
        ("keys", "override", "orders", "tenant", "17", "--concurrency", "0", "--until", "1h"),
        ("keys", "end-override", "orders", "tenant", "17"),
        ("keys", "delete", "orders", "tenant"),
        ("batch", "close", "b"),
        ("limits", "set", "docai", "--rate", "5/s", "--concurrency", "3"),
        ("limits", "set", "docai", "--concurrency", "none", "--environment", "test"),
    ):
        assert orders(*words, *by).code == ExitCode.OK, words
    assert orders("keys", "end-override", "orders", "other", "17").code == ExitCode.REFUSED
    assert orders("keys", "set", "orders", "other").code == ExitCode.OK
    assert "had no override" in orders("keys", "end-override", "orders", "other", "17").out
    limit = orders("limits", "show", "docai", "--json").document
    assert (limit["concurrency"], limit["rate"], limit["environment"]) == (None, "5/s", "test")
    found = orders("audit", "--by", "ann", "--json").document
    assert [(item["subject"], item["action"], item["reason"]) for item in found] == [
        ("limit docai", "SET", "tests"),
        ("limit docai", "SET", "tests"),
        ("batch orders/b", "CLOSE", "tests"),
        ("key_limit orders/tenant", "DELETE", "tests"),
        ("key_limit orders/tenant", "END_OVERRIDE", "tests"),
        ("key_limit orders/tenant", "OVERRIDE", "tests"),
        ("key_limit orders/tenant", "SET", "tests"),
    ]


def test_a_search_keeps_looking(orders, bus, monkeypatch):
    bus.send("orders", "rare", command_id="needle")
    for number in range(9):
        bus.send("orders", "ship", {"n": number})
    monkeypatch.setattr(query_filters, "BUDGET", 2)
    monkeypatch.setattr(query_sources, "FEW", 1)
    short = orders("commands", "--type", "rare").out
    assert "looked at as many as it may at once, back to 20" in short
    assert "needle" not in short
    whole = orders("commands", "--type", "rare", "--keep-looking").out
    assert "needle" in whole
    assert "this is not all" not in whole


def test_database_names_the_program_of_a_transaction_and_what_it_holds_back(orders, database):
    with psycopg.connect(database, application_name="forgotten job") as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM commandbus.command")
        lines = orders("database").out.splitlines()
    held = lines[lines.index("Open transactions") + 2]
    assert "forgotten job" in held
    assert re.search(r"  \d+ transactions?  ", held), held
    assert "PROGRAM" in lines[lines.index("Open transactions") + 1]
