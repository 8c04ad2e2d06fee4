"""audit, database, and the searches of commands that say when they are not complete."""

from __future__ import annotations

import csv
import io

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
