"""Pruning in a browser: previewed, then a portion in each request. It goes on by itself, and stops when told."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect

from browser.conftest import MARKS
from commandbus import CommandBus, Settings
from commandbus.web.actions import retention
from commandbus.web.app import create_console
from support.consoles import served
from support.databases import Databases

pytestmark = MARKS


@pytest.fixture
def shop(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, CommandBus]]:
    """A console beside 4,500 commands that finished long ago; one request looks at 2,000 rows."""
    monkeypatch.setattr(retention, "PORTION", 2000)
    with databases.lend(used=False) as database, CommandBus(database) as bus:
        bus.create_domain("shop")
        with psycopg.connect(database, autocommit=True) as db:
            db.execute(
                "INSERT INTO commandbus.command "
                "(domain, command_id, command_type, status, created_at, finished_at) "
                "SELECT 'shop', 'c' || n, 'ship', 'COMPLETED', now() - interval '9 d', now() - interval '9 d' "
                "FROM generate_series(1, 4500) n"
            )
        with served(create_console(Settings(database_url=database))) as port:
            yield f"http://127.0.0.1:{port}", bus


def begin(page: Page) -> None:
    page.goto("/database")
    page.get_by_role("link", name="Delete finished commands").click()
    page.get_by_label("Older than").fill("7d")
    page.get_by_role("button", name="Preview").click()
    expect(page.get_by_text("4500 commands that finished before")).to_be_visible()
    page.get_by_label("Reason").fill("disk full")
    page.get_by_role("button", name="Delete").click()


def left(bus: CommandBus) -> int:
    found = bus.preview_prune(age="7d")
    return found.commands


def test_it_goes_on_by_itself_until_nothing_is_left(browser: Browser, shop: tuple[str, CommandBus]) -> None:
    url, bus = shop
    page = browser.new_context(base_url=url).new_page()
    begin(page)
    expect(page.get_by_text("nothing more is left to delete")).to_be_visible()
    assert left(bus) == 0
    done = [item for item in bus.audit.list_actions() if item.subject == "retention"]
    assert {item.reason for item in done} == {"disk full"}
    assert sum(item.action == "PRUNED" for item in done) >= 3


def test_it_stops_when_told_and_goes_on_from_there(browser: Browser, shop: tuple[str, CommandBus]) -> None:
    url, bus = shop
    page = browser.new_context(base_url=url).new_page()
    page.add_init_script("window.setTimeout = () => 0")  # the page waits for ever: the press comes before
    begin(page)
    stop = page.get_by_role("button", name="Stop")
    stop.click()
    expect(stop).to_be_hidden()
    before = left(bus)
    assert 0 < before < 4500
    page.get_by_role("button", name="Go on").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    assert left(bus) < before


def test_without_the_script_there_is_a_button(browser: Browser, shop: tuple[str, CommandBus]) -> None:
    url, bus = shop
    page = browser.new_context(base_url=url, java_script_enabled=False).new_page()
    begin(page)
    for _ in range(20):
        if page.get_by_role("button", name="Go on").count() == 0:
            break
        page.get_by_role("button", name="Go on").click()
    expect(page.get_by_text("nothing more is left to delete")).to_be_visible()
    assert left(bus) == 0
