"""A small company's commands, for the pictures of the console: some of them in trouble, as on a bad day.

commandbus worker demo_fleet:handlers
"""

from __future__ import annotations

import itertools
import random
import threading
import time

from commandbus import (
    CommandBus,
    HandlerRegistry,
    Limit,
    NewCommand,
    PermanentCommandError,
    RateLimitError,
    RetryPolicy,
    Saga,
    TransientCommandError,
    step,
    wait_for,
)

DOMAINS = ["orders", "documents", "billing", "processes"]
handlers = HandlerRegistry()
ONCE = RetryPolicy(max_attempts=1)
order = Saga(
    "order",
    step("reserve", "orders", undo="release"),
    step("charge", "billing", undo="refund"),
    wait_for("approval"),
    step("ship", "orders"),
)
handlers.register_process(order)


@handlers.handler("orders", "ship")
def ship(command, ctx):
    _work(0.05, 0.3)
    return {"parcel": f"PX-{label_for(command.data)}"}


def label_for(data):
    """The line that the fingerprint of its failures names."""
    if data["order_no"] % 23 == 0:
        raise PermanentCommandError(f"order {data['order_no']} has no postal code", code="BAD_ADDRESS")
    return data["order_no"] * 7


@handlers.handler("billing", "charge", retry_policy=RetryPolicy(max_attempts=2, backoff_schedule=[1.0]))
def charge(command, ctx):
    _work(0.05, 0.2)
    if command.data["order_no"] % 37 == 0:
        raise TransientCommandError("the bank answered 500", code="BANK_DOWN")
    return {"paid": command.data.get("amount", 0)}


@handlers.handler("documents", "read_page", limits=[Limit("docai", concurrency=3, rate="600/m", backoff=[900])])
def read_page(command, ctx):
    _work(0.3, 0.6)
    if command.data["page"] == 24:
        raise RateLimitError("429 Too Many Requests")
    return {"words": 412}


@handlers.handler("documents", "import_scan", timeout="2s", retry_policy=ONCE)
def import_scan(command, ctx):
    wait_for_scanner(command.data["scanner"])


def wait_for_scanner(name):
    """Hangs, and ignores every request to stop."""
    time.sleep(3600)


@handlers.handler("billing", "invoice", timeout="5m")
def invoice(command, ctx):
    _work(2.0, 9.0)


@handlers.handler("billing", "month_end", timeout="10m")
def month_end(command, ctx):
    time.sleep(300)


@handlers.schedule("billing", "night_report", cron="0 3 * * *", timezone="Europe/Berlin")
def night_report(command, ctx):
    _work(0.1, 0.2)


for name in ("reserve", "release"):
    handlers.register("orders", name, lambda command, ctx: _work(0.02, 0.1))
handlers.register("billing", "refund", lambda command, ctx: _work(0.02, 0.1))


def send_on(bus: CommandBus, is_over: threading.Event) -> None:
    """Orders come in, a few each second."""
    for number in itertools.count(2001):
        if is_over.wait(random.uniform(0.1, 0.4)):  # noqa: S311 - customers
            return
        bus.send("orders", "ship", {"order_no": number}, command_id=f"ship-{number}")
        bus.send("billing", "charge", {"order_no": number, "amount": 20}, command_id=f"charge-{number}")


def _work(least: float, most: float) -> None:
    time.sleep(random.uniform(least, most))  # noqa: S311 - a pretence of work


def send_a_day(bus: CommandBus) -> None:
    """Everything that the pictures show."""
    for number in range(1001, 1241):
        data = {"order_no": number, "customer": f"C-{number % 90}", "lines": [{"sku": "A-1", "quantity": 2}]}
        bus.send("orders", "ship", data, command_id=f"ship-{number}", correlation_id=f"order-{number}")
        if number % 4 == 0:
            data = {"order_no": number, "amount": 100 + number % 50}
            bus.send("billing", "charge", data, command_id=f"charge-{number}", correlation_id=f"order-{number}")
    pages = [NewCommand("read_page", {"scan": "contract.pdf", "page": page}) for page in range(1, 61)]
    bus.create_batch("documents", pages, batch_id="contract-88", name="contract.pdf")
    invoices = [NewCommand("invoice", {"customer": f"C-{number}"}) for number in range(400)]
    bus.create_batch("billing", invoices, batch_id="invoices-2026-11", name="Invoices of November")
    bus.send("documents", "import_scan", {"scanner": "floor-2"}, command_id="scan-floor-2")
    bus.send("billing", "month_end", {"month": "2026-10"}, command_id="month-end-2026-10")
    for number in (1210, 1211, 1212):
        state = {"order_no": number, "amount": 4200}
        bus.start_process(order, state, process_id=f"order-{number}")
    bus.pause("orders", "return", operator="ann", reason="the returns desk moves house")
