"""A plan of single commands, selected with boxes: with a keyboard alone, with a mouse, and without the script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from browser.conftest import MARKS
from commandbus import CommandBus, HandlerRegistry, PermanentCommandError, PlanRecord, Settings, Worker
from commandbus.web.app import create_console
from support.consoles import served
from support.databases import Databases
from support.workers import quick_settings

pytestmark = MARKS


@dataclass(frozen=True)
class Shop:
    """A console, and five commands that need a person."""

    url: str
    bus: CommandBus

    def plan(self) -> PlanRecord:
        """The newest plan."""
        return self.bus.plans.list()[0]


@pytest.fixture
def shop(databases: Databases) -> Iterator[Shop]:
    handlers = HandlerRegistry()

    @handlers.handler("shop", "ship")
    def ship(command: Any, ctx: Any) -> None:
        raise PermanentCommandError("no paper")

    with databases.lend(used=False) as database, CommandBus(database) as bus:
        bus.create_domain("shop")
        for number in range(5):
            bus.send("shop", "ship", command_id=f"ship {number}")
        Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
        with served(create_console(Settings(database_url=database))) as port:
            yield Shop(f"http://127.0.0.1:{port}", bus)


def opened(browser: Browser, shop: Shop, **options: Any) -> Page:
    page = browser.new_context(base_url=shop.url, **options).new_page()
    page.goto("/troubleshooting")
    return page


def test_with_the_keyboard_alone(browser: Browser, shop: Shop) -> None:
    page = opened(browser, shop)
    page.get_by_label("Select ship 1").focus()
    page.keyboard.press("Space")
    expect(page.get_by_text("1 selected.")).to_be_visible()
    for _ in range(3):  # its link, the link of its error code, the next box
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_text("2 selected.")).to_be_visible()
    expect(page.get_by_label("Select ship 2")).to_be_checked()
    page.get_by_role("button", name="Preview the selection").press("Enter")
    expect(page.get_by_role("button", name="Retry 2")).to_be_visible()
    assert shop.plan().filter.command_ids == ("ship 1", "ship 2"), "an id may have spaces"
    page.get_by_role("button", name="Retry 2").press("Enter")
    expect(page.get_by_text("0 of 2 retried")).to_be_visible()
    assert shop.plan().state == "RUNNING"


def test_all_of_a_page_and_a_set_that_has_changed(browser: Browser, shop: Shop) -> None:
    page = opened(browser, shop)
    page.get_by_label("Select all on this page").check()
    expect(page.get_by_text("5 selected.")).to_be_visible()
    page.get_by_label("Select ship 3").uncheck()
    expect(page.get_by_text("4 selected.")).to_be_visible()
    page.locator("#selection select[name=action]").select_option("cancel")
    page.get_by_role("button", name="Preview the selection").click()
    button = page.get_by_role("button", name="Cancel 4")
    expect(button).to_be_visible()
    shop.bus.commands.operator_retry("shop", "ship 0")
    button.click()
    expect(page.get_by_text("0 came and 1 went of 4 commands")).to_be_visible()
    assert shop.plan().state == "PREVIEWED"


def test_without_the_script(browser: Browser, shop: Shop) -> None:
    page = opened(browser, shop, java_script_enabled=False)
    expect(page.get_by_label("Select all on this page")).to_be_hidden()
    page.get_by_label("Select ship 4").check()
    page.get_by_role("button", name="Preview the selection").click()
    expect(page.get_by_role("button", name="Retry 1")).to_be_visible()


def test_a_box_makes_its_row_no_higher(browser: Browser, shop: Shop) -> None:
    page = opened(browser, shop)
    row = page.locator("tbody tr", has=page.locator("[name=chosen]")).first
    text, box, whole = (
        row.locator("th a").bounding_box(),
        row.locator("[name=chosen]").bounding_box(),
        row.bounding_box(),
    )
    assert text
    assert box
    assert whole
    assert box["width"] >= 24, "a finger hits it"
    assert whole["height"] < 2.5 * text["height"]
    page.context.close()
