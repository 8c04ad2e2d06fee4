"""The page of one command: where its time went."""

from __future__ import annotations

import pytest

from commandbus import CommandBus
from web.conftest import Serve
from web.test_console import settled


def test_the_ledger_of_a_command_is_on_its_page_and_in_the_api(
    database: str, bus: CommandBus, serve: Serve
) -> None:
    settled(database, bus)
    bus.send("orders", "ship", {"n": 1}, command_id="later", delay=3600)
    visit = serve()
    page = visit.get("/command", domain="orders", id="bad").text
    assert '<svg class="ledger"' in page
    assert "with a person (troubleshooting)" in page
    assert "<title>attempt 1: permanent," in page
    assert "style=" not in page
    assert "delayed by its sender" in visit.get("/command", domain="orders", id="later").text
    ledger = visit.get("/api/ledger", domain="orders", id="good").json
    assert [item["state"] for item in ledger["intervals"]][-1] == "running"
    assert sum(item["seconds"] for item in ledger["intervals"]) == pytest.approx(ledger["seconds"])
    assert visit.get("/api/command", domain="orders", id="good").json["ledger"] == ledger
    assert visit.get("/api/ledger", domain="orders", id="nobody").status == 404


def test_troubleshooting_is_grouped_by_failure(database: str, bus: CommandBus, serve: Serve) -> None:
    settled(database, bus)
    visit = serve()
    page = visit.get("/troubleshooting").text
    assert "By failure" in page
    assert "test_console.py: ship" in page
    found = visit.get("/api/failures", in_troubleshooting="true").json["items"]
    assert sum(item["in_troubleshooting"] for item in found) == 2
    one = found[0]["fingerprint"]
    chosen = visit.get("/troubleshooting", domain="orders", fingerprint=one).text
    assert f'name="fingerprint" value="{one}"' in chosen, "the plan is for what is shown"
    assert 'aria-current="true"' in chosen
    assert visit.get("/api/troubleshooting", fingerprint=one).status == 200
    assert visit.get("/troubleshooting", fingerprint="no").status == 400
