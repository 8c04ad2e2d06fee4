"""A search for something rare, in a browser: it goes on by itself, says how far it is, and stops when told."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg
import pytest
from playwright.sync_api import Browser, expect

from browser.conftest import MARKS
from commandbus import CommandBus, Settings
from commandbus.flow.commands import query_filters, query_sources
from commandbus.web import keep_looking
from commandbus.web.app import create_console
from support.consoles import served
from support.databases import Databases

pytestmark = MARKS


@pytest.fixture
def url(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A console beside 2,000 commands, of which the oldest is rare; one look sees 100."""
    monkeypatch.setattr(query_filters, "BUDGET", 100)
    monkeypatch.setattr(query_sources, "FEW", 10)
    with databases.lend(used=False) as database, CommandBus(database) as bus:
        bus.create_domain("shop")
        bus.send("shop", "rare", command_id="needle")
        with psycopg.connect(database, autocommit=True) as db:
            db.execute(
                "INSERT INTO commandbus.command (domain, command_id, command_type, status, finished_at) "
                "SELECT 'shop', 'c' || n, 'ship', 'COMPLETED', now() FROM generate_series(1, 2000) n"
            )
        with served(create_console(Settings(database_url=database))) as port:
            yield f"http://127.0.0.1:{port}"


def test_it_goes_on_by_itself(browser: Browser, url: str) -> None:
    page = browser.new_context(base_url=url).new_page()
    page.goto("/commands?search=type:rare")
    expect(page.get_by_role("link", name="needle")).to_be_visible()
    expect(page.get_by_text("Looked at all commands.")).to_be_visible()
    expect(page.get_by_text("None among those that were looked at.")).to_have_count(0)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("link", name="Continue")).to_be_hidden()


def test_it_stops_when_told_and_goes_on_from_there(
    browser: Browser, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_looking, "PAUSE_SECONDS", 600.0)
    page = browser.new_context(base_url=url).new_page()
    page.goto("/commands?search=type:rare")
    link = page.get_by_role("link", name="Continue")
    expect(link).to_have_attribute("href", re.compile("cursor=1802$"))  # the page has seen 100, and the stream 100
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.")).to_be_visible()
    monkeypatch.setattr(keep_looking, "PAUSE_SECONDS", 0.0)
    link.click()
    expect(page.get_by_role("link", name="needle")).to_be_visible()


def test_without_the_script_there_is_a_link(browser: Browser, url: str) -> None:
    page = browser.new_context(base_url=url, java_script_enabled=False).new_page()
    page.goto("/commands?search=type:rare")
    expect(page.get_by_text("Looked at everything back to")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.get_by_role("link", name="Continue").click()
    expect(page.get_by_text("Looked at everything back to")).to_be_visible()
