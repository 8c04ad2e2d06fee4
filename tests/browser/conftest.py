"""Debian's Chromium, and a console with something of everything in it, hostile texts too.

Both are made once for the whole folder. Playwright's event loop runs on the thread of the tests, so nothing here
may outlive the folder: the tests of other folders run loops of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from browser.fleet import live_fleet
from commandbus import CommandBus, Settings
from commandbus.web.app import create_console
from commandbus.web.pages import page_routes
from support.consoles import served
from support.databases import Databases

CHROMIUM = Path("/usr/bin/chromium")
BUSY_SECONDS = 60.0  # in which what a page awaits happens on a busy machine, too
# The loop that the bus warns of is Playwright's. It does nothing while a test asks the bus.
MARKS = [
    pytest.mark.slow,
    pytest.mark.shared_setup("browser"),
    pytest.mark.filterwarnings("ignore:CommandBus is used on a running event loop"),
]


@dataclass(frozen=True)
class Site:
    """A console that runs, the bus behind it, and its pages: by path, the parameters that each needs."""

    url: str
    database: str
    bus: CommandBus
    pages: dict[str, list[str]]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}: apt-get install --no-install-recommends chromium")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    expect.set_options(timeout=BUSY_SECONDS * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def site(browser: Browser, databases: Databases) -> Iterator[Site]:
    """`browser` comes first: without Chromium there is nothing to make."""
    with databases.lend(used=False) as database, CommandBus(database) as bus, live_fleet(database, bus):
        app = create_console(Settings(database_url=database))
        pages = {
            route.path: [item.name for item in route.dependant.query_params if item.field_info.is_required()]
            for route in page_routes(app.state.console).routes
        }
        with served(app) as port:
            yield Site(f"http://127.0.0.1:{port}", database, bus, pages)
