"""The pictures of the console: Chromium looks at a real fleet, in light and dark. `./dev screenshots` makes them.

A PostgreSQL, `commandbus worker`, `commandbus console` and the commands of `demo_fleet.py` run for some minutes.
What the pictures show has happened.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from demo_fleet import DOMAINS, send_a_day, send_on
from playwright.sync_api import Browser, Page, sync_playwright
from small_png import smaller

from commandbus import CommandBus, embedded

HERE = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
PATIENCE_SECONDS = 120.0
LARGEST_BYTES = 150_000
SIZE = {"width": 1280, "height": 860}
SETTINGS = {"CANCEL_GRACE_SECONDS": "1", "NO_COLOR": "1"}
WORKERS = ["--processes", "2", "--concurrency", "8"]
PICTURES = {
    "now": "/",
    "command": f"/command?{urlencode({'domain': 'documents', 'id': 'scan-floor-2'})}",
    "troubleshooting": f"/troubleshooting?{urlencode({'domain': 'orders', 'command_type': 'ship'})}",
    "limit": f"/limit?{urlencode({'name': 'docai'})}",
}


def main() -> None:
    """Run the fleet, and take the pictures."""
    parser = argparse.ArgumentParser(prog="./dev screenshots", description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="the folder for the pictures")
    parser.add_argument("--seconds", type=float, default=150.0, help="how long the fleet runs before")
    given = parser.parse_args()
    target, seconds = given.out, given.seconds
    if not Path(CHROMIUM).exists():
        raise SystemExit(f"there is no {CHROMIUM}: apt-get install --no-install-recommends chromium")
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="commandbus-pictures-") as name:
        Path(name).chmod(0o755)  # where root runs this, the server is another user's
        with embedded.start(Path(name) / "postgres") as server:
            prepare(server.dsn)
            with worker(server.dsn), customers(server.dsn), console(server.dsn) as address:
                wait_for_trouble(server.dsn)
                time.sleep(seconds)
                take(address, target)


def prepare(url: str) -> None:
    """The schema, and the commands."""
    with CommandBus(url) as bus:
        bus.migrate(domains=DOMAINS)
        send_a_day(bus)


@contextmanager
def program(url: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`commandbus` with these words, until the end of the block."""
    environment = {**os.environ, **SETTINGS, "COMMANDBUS_DATABASE_URL": url}
    running = subprocess.Popen(
        [sys.executable, "-m", "commandbus", *words],
        cwd=HERE,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


@contextmanager
def worker(url: str) -> Iterator[None]:
    """The fleet."""
    with program(url, "worker", "demo_fleet:handlers", *WORKERS):
        yield


@contextmanager
def customers(url: str) -> Iterator[None]:
    """Somebody who sends, so that the fleet has something to do."""
    is_over = threading.Event()
    with CommandBus(url) as bus:
        sender = threading.Thread(target=send_on, args=(bus, is_over))
        sender.start()
        try:
            yield
        finally:
            is_over.set()
            sender.join()


@contextmanager
def console(url: str) -> Iterator[str]:
    """The console's address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with program(url, "console", "--port", str(port)):
        until(lambda: answers(port))
        yield f"http://127.0.0.1:{port}"


def answers(port: int) -> bool:
    """Does somebody listen there?"""
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def wait_for_trouble(url: str) -> None:
    """Until everything has happened that the pictures show."""
    with CommandBus(url) as bus:
        until(lambda: is_troubled(bus))


def is_troubled(bus: CommandBus) -> bool:
    """The scanner's attempt was given up, docai backs off, and some orders cannot be shipped."""
    scan, limit = bus.get_command("documents", "scan-floor-2"), bus.get_limit("docai")
    orders = next(item for item in bus.status() if item.domain == "orders")
    return bool(
        (scan and scan.status == "IN_TROUBLESHOOTING_QUEUE")
        and (limit and limit.state == "BACKING_OFF")
        and orders.in_tsq
    )


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, but not for ever."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"the fleet was not ready after {PATIENCE_SECONDS:g} s")
        time.sleep(0.2)


def take(address: str, target: Path) -> None:
    """Each picture, in light and dark."""
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        for scheme in ("light", "dark"):
            take_all(browser, address, scheme, target)
        browser.close()


def take_all(browser: Browser, address: str, scheme: str, target: Path) -> None:
    """All pictures of one color scheme."""
    context = browser.new_context(
        base_url=address,
        color_scheme="dark" if scheme == "dark" else "light",
        viewport=SIZE,
        locale="en-GB",
        timezone_id="Europe/Berlin",
    )
    page = context.new_page()
    for name, path in PICTURES.items():
        page.goto(path)
        shoot(page, target / f"console-{name}-{scheme}.png")
    context.close()


def shoot(page: Page, file: Path) -> None:
    """One picture. The page has a moment for what it loads by itself."""
    page.wait_for_timeout(4000 if page.locator("#live").count() else 500)
    picture = smaller(page.screenshot())
    file.write_bytes(picture)
    size = len(picture)
    if size > LARGEST_BYTES:
        raise SystemExit(f"{file.name} has {size} bytes; at most {LARGEST_BYTES} are allowed")
    print(f"{file} ({size // 1000} KB)")


if __name__ == "__main__":
    main()
