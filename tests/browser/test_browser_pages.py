"""Every page in a real browser: light and dark, wide and narrow, with and without its script."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import psycopg
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from browser.conftest import MARKS, Site
from browser.fleet import HOSTILE_ID
from support.waiting import until

pytestmark = MARKS

PHONE = {"width": 360, "height": 740}
LARGEST_PAGE = 400_000
# A page that needs parameters: one address for each of them.
ADDRESSES = {
    "/command": [
        {"domain": "orders", "id": id_}
        for id_ in ("good", HOSTILE_ID, "long", "long result", "held", "hanging", "paid", "keyed-0", "page-0")
    ],
    "/stack": [{"domain": "orders", "id": "held"}],
    "/plan": [{"id": "1"}],
    "/limit": [{"name": "docai"}],
    "/key": [{"domain": "orders", "name": "tenant"}],
    "/breaker": [{"name": "orders/refund"}],
    "/schedule": [{"domain": "orders", "name": "nightly"}],
    "/batch": [{"domain": "orders", "id": "three"}],
    "/process": [{"domain": "processes", "id": "undone"}, {"domain": "processes", "id": "waiting"}],
}
MORE = [
    "/prune?age=0s",
    "/commands?search=nobody",
    f"/commands?search={quote('status:tsq since:2h')}",
    "/troubleshooting?domain=orders&command_type=ship",
    "/sign-in",
    "/nowhere",
]
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
CONTRAST = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
AXE = """options => axe.run(options).then(
    found => found.violations.map(one => [one.id, one.nodes.map(node => node.html)]))"""
WATCH = "addEventListener('securitypolicyviolation', e => console.error('CSP refused ' + e.blockedURI))"
OVERFLOWING = """() => [...document.querySelectorAll('body *')].filter(one =>
    one.getBoundingClientRect().right > innerWidth + 1 && !one.parentElement.closest('.menu, .scroll, pre, svg'))
    .map(one => one.outerHTML.slice(0, 120))"""


def addresses(site: Site) -> list[str]:
    """Every page of the console. A new one that needs parameters must be given an address here."""
    found = [*MORE]
    for path, needed in site.pages.items():
        if path.endswith(("/events", "/export")):
            continue  # a stream, a file
        if not needed:
            found.append(path)
            continue
        assert path in ADDRESSES, f"no test opens {path}: give it an address in ADDRESSES ({', '.join(needed)})"
        found += [f"{path}?{urlencode(given)}" for given in ADDRESSES[path]]
    return found


class Watched:
    """A page of the browser that notes what must not happen."""

    def __init__(self, browser: Browser, site: Site, **options: Any) -> None:
        self.page = browser.new_context(base_url=site.url, reduced_motion="reduce", **options).new_page()
        self.page.add_init_script(WATCH)
        self.problems: list[str] = []
        self._host = urlsplit(site.url).netloc
        self.page.on("console", self._note_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"script error: {error}"))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message[:80]}"))
        self.page.on("request", self._note_request)

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "status of 404" not in message.text:
            self.problems.append(f"{message.type}: {message.text[:200]}")

    def _note_request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != self._host:
            self.problems.append(f"asks {request.url[:200]}")


def test_every_page_is_whole_accessible_and_fits_a_phone(browser: Browser, site: Site) -> None:
    watched = Watched(browser, site)
    found: list[str] = []
    try:
        for address in addresses(site):
            watched.problems = []
            _look(watched.page, address, watched.problems)
            found += [f"{address[:60]} {problem[:500]}" for problem in watched.problems]
    finally:
        watched.page.context.close()
    assert not found, "\n".join(found)


def _look(page: Page, address: str, problems: list[str]) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    page.emulate_media(color_scheme="light")
    answer = page.goto(address, wait_until="load")
    assert answer is not None
    if not answer.headers["content-type"].startswith("text/html"):
        return  # a file to keep
    if answer.status != (404 if address == "/nowhere" else 200):
        problems.append(f"status {answer.status}")
    if (size := len(answer.body())) > LARGEST_PAGE:
        problems.append(f"has {size} bytes")
    if page.locator("h1").count() < 1:
        problems.append("has no h1")
    if page.evaluate("window.pwned || document.querySelectorAll('script, [data-zoo]').length !== 1"):
        problems.append("runs what is data")
    page.evaluate(AXE_SCRIPT)
    problems += [f"axe, light: {one}" for one in page.evaluate(AXE, RULES)]
    page.emulate_media(color_scheme="dark")
    problems += [f"axe, dark: {one}" for one in page.evaluate(AXE, CONTRAST)]
    page.set_viewport_size(PHONE)
    until(lambda: page.evaluate("innerWidth") == PHONE["width"])  # a busy browser takes its time
    if page.evaluate("document.documentElement.scrollWidth") > PHONE["width"]:
        problems.append(f"is wider than a phone: {page.evaluate(OVERFLOWING)[:3]}")


def test_hostile_text_is_seen_as_text(browser: Browser, site: Site) -> None:
    watched = Watched(browser, site)
    page = watched.page
    for address in (
        "/commands",
        "/troubleshooting",
        f"/command?{urlencode({'domain': 'orders', 'id': HOSTILE_ID})}",
    ):
        page.goto(address)
        text = page.locator("main").inner_text()
        assert "<script>window.pwned=1</script>" in text, address
        assert "\\u202eevil\\u2066\\x1b[31m" in text, address
        assert not set("\u202e\u2066\x1b\x07\u2028") & set(text), address
    assert "\\x00 and" in text
    page.goto("/command?domain=orders&id=long")
    assert "more characters" in page.locator("main").inner_text()
    page.context.close()
    assert watched.problems == []


def test_now_changes_by_itself_and_leaves_alone_what_somebody_uses(browser: Browser, site: Site) -> None:
    watched = Watched(browser, site)
    page = watched.page
    page.goto("/")
    live = page.locator("#live")
    expect(live).to_contain_text("docai")
    expect(live).not_to_contain_text("processes is paused")
    site.bus.pause("processes", operator="ann")
    expect(live).to_contain_text("processes is paused")
    site.bus.resume("processes", operator="ann")
    expect(live).not_to_contain_text("processes is paused")
    page.context.close()
    assert watched.problems == []


def test_a_page_that_cannot_be_read_opens_by_itself_later(browser: Browser, site: Site) -> None:
    page = Watched(browser, site).page
    with psycopg.connect(site.database) as other:
        other.execute("LOCK TABLE commandbus.rejected_message IN ACCESS EXCLUSIVE MODE")
        answer = page.goto("/rejected")
        assert answer is not None
        assert answer.status == 503
        expect(page.get_by_role("alert")).to_contain_text("database")
    expect(page.locator("h1")).to_have_text("Messages that were no commands")
    page.context.close()


def test_the_keyboard_leads_everywhere(browser: Browser, site: Site) -> None:
    page = Watched(browser, site).page
    page.goto("/limits")
    page.keyboard.press("g")
    page.keyboard.press("n")
    page.wait_for_url(f"{site.url}/")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).not_to_be_visible()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("good g n ?")  # in a field these are letters
    expect(page.locator("#search")).to_have_value("good g n ?")
    page.locator("#search").fill("good")
    page.keyboard.press("Enter")
    page.wait_for_url("**/command?domain=orders&id=good")
    expect(page.locator(".menu [aria-current]")).to_have_text("Commands")
    page.context.close()


def test_times_are_in_the_viewers_zone_and_in_utc_on_hover(browser: Browser, site: Site) -> None:
    page = Watched(browser, site, timezone_id="Asia/Tokyo", locale="en-GB").page
    page.goto("/command?domain=orders&id=good")
    sent = page.locator("dd time").first
    utc, shown = sent.get_attribute("title"), sent.inner_text()
    assert utc is not None
    assert utc.endswith("UTC")
    hour = int(utc.split()[1][:2])
    assert f"{(hour + 9) % 24:02}:{utc.split()[1][3:]}" in shown
    page.goto("/")
    expect(page.locator(".concerns time").first).to_have_attribute("title", re.compile(r"\d\d:\d\d UTC$"))
    page.goto("/schedules")
    tick = page.locator("svg.timeline text[data-at]").first
    utc = tick.locator("title").text_content()
    assert utc is not None
    assert utc.endswith(" UTC")
    shown = tick.evaluate("one => one.firstChild.textContent")
    assert shown == f"{(int(utc[:2]) + 9) % 24:02}:{utc[3:5]}"
    page.context.close()


def test_without_its_script_the_console_finds_and_acts(browser: Browser, site: Site) -> None:
    page = Watched(browser, site, java_script_enabled=False).page
    page.goto("/")
    links = page.locator(".menu a").evaluate_all("found => found.map(one => one.getAttribute('href'))")
    assert len(links) >= 10
    for link in links:
        answer = page.goto(link)
        assert answer is not None
        assert answer.status == 200, link
    page.locator("#search").fill("long")
    page.locator("#search").press("Enter")
    page.wait_for_url("**/command?domain=orders&id=long")
    form = page.locator("form[action$='/actions/cancel-troubled']")
    page.get_by_text("Cancel it, or complete it by hand").click()
    form.get_by_label("Reason").fill("<b>too long</b>")
    form.get_by_role("button").click()
    expect(page.locator("main")).to_contain_text("orders long is canceled")
    record = site.bus.get_command("orders", "long")
    assert record is not None
    assert record.status == "CANCELED"
    page.context.close()
