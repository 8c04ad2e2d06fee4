"""The pages Audit and Database, what the API gives of them, and the file that Audit exports."""

from __future__ import annotations

import csv
import io
import json

import psycopg
import pytest

from commandbus import CommandBus
from web.conftest import Serve


def test_audit_shows_filters_and_exports(bus: CommandBus, serve: Serve) -> None:
    for n in range(3):
        bus.send("orders", "ship", {}, command_id=f"ship-{n}")
        bus.cancel("orders", f"ship-{n}", operator="ann" if n else "bob", reason="=1+1 <script>")
    bus.pause("orders", "ship", operator="ann", reason="holiday")
    visit = serve()
    page = visit.get("/audit").text
    assert page.count(">cancel</td>") == 3
    assert "pause orders/ship" in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page.replace('<script src="', "")
    assert "bob" not in visit.get("/audit", operator="ann", action="cancel").text
    found = visit.get("/api/audit", operator="ann", domain="orders", since="1h", limit=2).json
    assert [(item["subject"], item["operator"]) for item in found["items"]] == [
        ("pause orders/ship", "ann"),
        ("orders ship-2", "ann"),
    ]
    rest = visit.get("/api/audit", operator="ann", domain="orders", cursor=found["next_cursor"]).json["items"]
    assert [item["command_id"] for item in rest] == ["ship-1"]
    assert visit.get("/api/audit", before="2020-01-01").json["items"] == []
    rows = list(csv.DictReader(io.StringIO(visit.get("/audit/export", action="cancel").text)))
    assert [row["reason"] for row in rows] == ["'=1+1 <script>"] * 3
    lines = visit.get("/audit/export", format="jsonl", operator="bob").text.splitlines()
    assert [json.loads(line)["command_id"] for line in lines] == ["ship-0"]
    for bad in ({"since": "soon"}, {"cursor": "x"}, {"domain": "No Domain"}):
        assert visit.get("/api/audit", **bad).status == 400
        assert visit.get("/audit", **bad).status == 400


def test_database_names_who_holds_a_transaction(database: str, bus: CommandBus, serve: Serve) -> None:
    bus.send("orders", "ship", {})
    visit = serve()
    with psycopg.connect(database, application_name="forgotten <b>") as other:
        other.execute("-- What it is for.\n-- Locks: none.\nSELECT count(*)\n  FROM commandbus.command")
        pid = other.info.backend_pid
        page = visit.get("/database").text
        report = visit.get("/api/database").json
    assert f"session {pid}" in page
    assert "forgotten &lt;b&gt;" in page
    assert "<code>SELECT count(*) FROM commandbus.command</code>" in page, "comments are no statements"
    assert "pg_stat_statements is not installed" in page
    mine = [item for item in report["holders"] if item["name"] == str(pid)]
    assert (mine[0]["state"], mine[0]["kind"]) == ("idle in transaction", "session")
    assert {"commandbus.command", "pgmq.q_orders__commands"} <= {item["name"] for item in report["tables"]}
    assert sum(item["total"] for item in report["connections"]) >= 1


@pytest.mark.parametrize(
    "instant",
    ["0001-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59Z", "9999-12-31T23:59:59-14:00"],
)
def test_audit_takes_the_first_and_the_last_instant_that_there_are(
    bus: CommandBus, serve: Serve, instant: str
) -> None:
    bus.pause("orders", operator="ann", reason="stock count")
    visit = serve()
    for path in ("/api/audit", "/audit", "/audit/export"):
        shown = [visit.get(path, **{bound: instant}) for bound in ("since", "before")]
        assert [answer.status for answer in shown] == [200, 200], path
        assert ["stock count" in answer.text for answer in shown] == [instant < "2", instant > "2"], path
