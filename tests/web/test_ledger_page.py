"""The page of one command: where its time went."""

from __future__ import annotations

import pytest

from commandbus import CommandBus
from web.conftest import Serve
from web.test_console import HOSTILE_ID, settled


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


def test_the_page_of_a_command_says_everything_about_it(database: str, bus: CommandBus, serve: Serve) -> None:
    settled(database, bus)
    bus.key_limits.set("orders", "tenant", concurrency=1)
    bus.send("orders", "ship", {"n": 1}, command_id="keyed", key="a<b>", key_limit="tenant", priority="high")
    bus.send("orders", "ship", {"n": 1}, command_id="waits", timeout="90s", max_attempts=7)
    visit = serve()
    bad = visit.get("/command", domain="orders", id=HOSTILE_ID).text
    assert "Attempt 1, permanent: PermanentCommandError" in bad
    assert "<code>web/test_console.py: ship</code>" in bad or "test_console.py: ship</code>" in bad
    assert "raise PermanentCommandError" in bad
    assert "/troubleshooting?domain=orders&amp;command_type=ship&amp;fingerprint=" in bad
    assert "code version " in bad
    assert HOSTILE_ID not in bad
    waits = visit.get("/command", domain="orders", id="waits").text
    assert "It does not run now: no worker of domain orders runs; it is the next in the queue." in waits
    assert "commandbus send --max-attempts 7 --timeout 1m30s orders ship &#39;{&#34;n&#34;: 1}&#39;" in waits
    assert "bus.send(&#39;orders&#39;, &#39;ship&#39;, {&#39;n&#39;: 1}" in waits
    assert 'data-copy="copy-1" hidden' in waits, "without a script there is only the text"
    keyed = visit.get("/command", domain="orders", id="keyed").text
    assert "a&lt;b&gt; of key limit <a href=" in keyed
    assert "<dt>Priority</dt><dd>high</dd>" in keyed
    assert visit.get("/api/command", domain="orders", id="waits").json["why_waiting"]["waits"] is True
