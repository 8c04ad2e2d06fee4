"""An operator's whole case on a million commands, with a stopwatch and a count of clicks: the alarm, the cause, a
rehearsal, the repair."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from browser.conftest import MARKS
from commandbus import CommandBus, Settings, TroubleshootingQueue, Worker
from commandbus.web.app import create_console
from support.consoles import served
from support.databases import Databases
from support.running import examples
from support.shop_handlers import TABLES, handlers
from support.waiting import until
from support.workers import quick_settings

pytestmark = MARKS

A_MILLION = 1_000_000
TROUBLED = examples(12, thorough=2_000)
MOST_CLICKS = 12
MOST_SECONDS = 60.0
HISTORY = """
INSERT INTO commandbus.command (domain, command_id, command_type, status, data, finished_at)
SELECT 'shop', 'old-' || n, 'ship', 'COMPLETED', '{"order": 1}', now() FROM generate_series(1, %s) n
"""


@dataclass(frozen=True)
class Shop:
    """A domain whose handler fails until it is repaired."""

    url: str
    bus: CommandBus
    db: psycopg.Connection[tuple[object, ...]]

    def repair(self) -> None:
        self.db.execute("INSERT INTO paper VALUES (500)")

    def shipped(self) -> int:
        return len(self.db.execute("SELECT FROM shipment").fetchall())


@pytest.fixture
def finished() -> int:
    """How many commands there are that need nobody."""
    return 2_000


@pytest.fixture
def shop(databases: Databases, finished: int) -> Iterator[Shop]:
    with (
        databases.lend(used=False) as database,
        CommandBus(database) as bus,
        psycopg.connect(database, autocommit=True) as db,
    ):
        bus.create_domain("shop")
        db.execute(TABLES)
        db.execute(HISTORY, [finished])
        db.execute("ANALYZE commandbus.command")
        for number in range(TROUBLED):
            bus.send("shop", "ship", {"order": number}, command_id=f"ship-{number}")
        app = create_console(Settings(database_url=database), handlers="support.shop_handlers:handlers")
        with served(app) as port, Worker(handlers, settings=quick_settings(database), name="shop"):
            until(lambda: TroubleshootingQueue(bus).count() == TROUBLED, 120)
            yield Shop(f"http://127.0.0.1:{port}", bus, db)


class Operator:
    """Somebody with a mouse. Every click counts."""

    def __init__(self, browser: Browser, shop: Shop) -> None:
        self.page: Page = browser.new_context(base_url=shop.url).new_page()
        self.main = self.page.locator("main")
        self.clicks = 0

    def click(self, target: Locator) -> None:
        self.clicks += 1
        target.click()

    def link(self, text: str) -> Locator:
        return self.page.get_by_role("link", name=text)

    def button(self, text: str) -> Locator:
        return self.page.get_by_role("button", name=text, exact=True)

    def back(self) -> None:
        self.clicks += 1
        self.page.go_back()


@pytest.mark.parametrize("finished", [A_MILLION])
def test_alarm_find_understand_rehearse_and_retry(browser: Browser, shop: Shop, finished: int) -> None:
    ann = Operator(browser, shop)
    page, began = ann.page, time.monotonic()
    # The alarm: one sentence, and a link.
    page.goto("/")
    expect(page.locator(".headline")).to_contain_text("1 thing needs you")
    ann.click(ann.link(f"{TROUBLED} commands of shop/ship"))
    # Find: what they have in common. Understand: one of them, with its traceback.
    expect(ann.main).to_contain_text("the label printer has no paper")
    ann.click(ann.link("ship-0").first)
    expect(ann.main).to_contain_text("raise PermanentCommandError")
    # Repair, and rehearse: does the handler work now? Nothing is shipped by that.
    shop.repair()
    ann.click(page.get_by_text("Rehearse it", exact=True))
    ann.click(ann.button("Rehearse"))
    expect(ann.main).to_contain_text("would complete")
    expect(ann.main).to_contain_text("public.shipment")
    assert shop.shipped() == 0
    # Retry all of them: preview the plan, and start it.
    ann.back()
    ann.back()
    all_of_them = page.locator("section", has_text="Do something about all")
    all_of_them.get_by_label("Reason").fill("the printer has paper")
    ann.click(all_of_them.get_by_role("button", name="Preview"))
    expect(ann.main).to_contain_text("Nothing has happened yet")
    ann.click(ann.button(f"Retry {TROUBLED}"))
    expect(page.locator("[role=status]")).to_contain_text("done")
    ann.click(page.locator(".menu").get_by_role("link", name="Now"))
    expect(page.locator(".headline")).to_contain_text("Nothing needs you")
    took = time.monotonic() - began
    page.context.close()
    until(lambda: shop.shipped() == TROUBLED, 60)
    assert ann.clicks <= MOST_CLICKS
    assert took < MOST_SECONDS, f"{took:.1f} s"
    print(f"{finished} commands: {took:.1f} s, {ann.clicks} clicks")


def test_of_two_operators_on_one_plan_one_starts_it(browser: Browser, shop: Shop) -> None:
    shop.repair()
    ann, bob = Operator(browser, shop), Operator(browser, shop)
    plan = shop.bus.plans.preview("shop", "retry", operator="ann")
    for one in (ann, bob):
        one.page.goto(f"/plan?id={plan.id}")
        expect(one.button(f"Retry {TROUBLED}")).to_be_visible()
    # Both press the button at the same moment: neither click waits for what the other one brings.
    for one in (ann, bob):
        one.button(f"Retry {TROUBLED}").click(no_wait_after=True)
    for one in (ann, bob):
        expect(one.main).not_to_contain_text("Nothing has happened yet")
    said = [one.main.inner_text() for one in (ann, bob)]
    assert sum("This cannot be done" in text for text in said) == 1, said
    until(lambda: shop.shipped() == TROUBLED, 60)  # a second shipment of one would violate the key
    for one in (ann, bob):
        one.page.context.close()
