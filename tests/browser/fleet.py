"""Something of everything that the console shows. What comes from outside is hostile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from commandbus import (
    BusinessRuleException,
    CommandBus,
    HandlerRegistry,
    Limit,
    NewCommand,
    PermanentCommandError,
    RateLimitError,
    RetryPolicy,
    Saga,
    Worker,
    step,
    wait_for,
)
from support.waiting import until
from support.workers import quick_settings

MARKUP = '"><img src=x data-zoo onerror="window.pwned=1"><script>window.pwned=1</script>'
UNSEEN = "\u202eevil\u2066"  # turns the reading direction around
CONTROL = "\x1b[31m\x07\u2028"
LONG = "long" * ((1 << 18) - 64)  # 1 MiB, which is as much as a payload may have
NOT_STORABLE_AS_JSON = "\x00 and \ud800"  # but an error's text may have them
HOSTILE = f"{MARKUP} {UNSEEN}{CONTROL} {{{{7*7}}}} javascript:window.pwned=1"
HOSTILE_ID = f"zoo {MARKUP} {UNSEEN}"
Hostile = type("<script>window.pwned=1</script>", (PermanentCommandError,), {})


@contextmanager
def live_fleet(database: str, bus: CommandBus) -> Iterator[None]:
    """A worker, and commands of every kind; they have got where they stay when the block begins."""
    gate = threading.Event()
    handlers = _handlers(gate)
    logging.getLogger("commandbus").setLevel(logging.CRITICAL)  # its log would have the long texts, too
    for domain in ("orders", "processes"):
        bus.create_domain(domain)
    _send(bus)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("SELECT pgmq.send('orders__commands', jsonb_build_object('no', %s::text))", [HOSTILE])
    settings = quick_settings(database, concurrency=6, cancel_grace=0.2)
    try:
        with Worker(handlers, settings=settings, name="browser"):
            _operate(bus)
            until(lambda: _has_arrived(bus), 60, what=lambda: bus.status())
            bus.plans.preview("orders", "complete", result={"by": HOSTILE}, operator="<b>ann", reason=HOSTILE)
            yield
            gate.set()
    finally:
        gate.set()
        logging.getLogger("commandbus").setLevel(logging.NOTSET)


def _handlers(gate: threading.Event) -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("orders", "ship")
    def ship(command: Any, ctx: Any) -> object:
        if "bad" in command.data:
            raise Hostile(f"{command.data['bad']}{NOT_STORABLE_AS_JSON}", code="BAD<b>")
        if "refused" in command.data:
            raise BusinessRuleException(command.data["refused"])
        return {"shipped": command.data}

    @handlers.handler("orders", "hold", timeout=600)
    def hold(command: Any, ctx: Any) -> None:
        gate.wait()

    @handlers.handler("orders", "hang", timeout=0.3, retry_policy=RetryPolicy(max_attempts=1))
    def hang(command: Any, ctx: Any) -> None:
        gate.wait()

    @handlers.handler("orders", "read", limits=[Limit("docai", concurrency=2, backoff=[3600])])
    def read(command: Any, ctx: Any) -> None:
        raise RateLimitError("429 from docai")

    @handlers.handler("orders", "pay")
    def pay(command: Any, ctx: Any) -> None:
        with ctx.effect(f"charge {MARKUP}"):
            raise PermanentCommandError(HOSTILE)

    for process in _sagas():
        handlers.register_process(process)
    return handlers


def _sagas() -> tuple[Saga, Saga]:
    ship = step("ship", "orders", data=lambda state: {"n": 1})
    refused = step("refuse", "orders", command_type="ship", data=lambda state: {"refused": HOSTILE})
    undone = Saga("order", step("first", "orders", command_type="ship", undo="ship"), refused)
    return undone, Saga("approved", ship, wait_for("approval"))


def _send(bus: CommandBus) -> None:
    bus.send("orders", "ship", {"n": HOSTILE}, command_id="good", correlation_id=HOSTILE_ID)
    bus.send("orders", "ship", {"bad": HOSTILE}, command_id=HOSTILE_ID, correlation_id=HOSTILE_ID)
    bus.send("orders", "ship", {"bad": LONG}, command_id="long")
    bus.send("orders", "ship", {"n": LONG}, command_id="long result")
    bus.send("orders", "hold", command_id="held")
    bus.send("orders", "hang", command_id="hanging")
    bus.send("orders", "pay", command_id="paid")
    bus.key_limits.set("orders", "tenant", concurrency=1)
    for number in range(2):
        bus.send("orders", "hold", command_id=f"keyed-{number}", key_limit="tenant", key=MARKUP)
    for number in range(3):
        bus.send("orders", "read", {"page": number}, command_id=f"page-{number}")
    members = [NewCommand("ship", {"refused": HOSTILE} if n == 2 else {"n": n}) for n in range(3)]
    bus.create_batch("orders", members, batch_id="three", name=MARKUP)
    undone, approved = _sagas()
    bus.start_process(undone, {"text": HOSTILE}, process_id="undone")
    bus.start_process(approved, {"text": HOSTILE}, process_id="waiting")


def _operate(bus: CommandBus) -> None:
    bus.schedules.create("orders", "nightly", cron="0 3 * * *", command_type="ship", data={"n": HOSTILE})
    bus.pause("orders", "later", operator="<b>ann", reason=HOSTILE)
    bus.open_breaker("orders", "refund", operator="<b>ann", reason=HOSTILE)


def _has_arrived(bus: CommandBus) -> bool:
    waiting, undone = bus.get_process("processes", "waiting"), bus.get_process("processes", "undone")
    hanging, limit = bus.get_command("orders", "hanging"), bus.get_limit("docai")
    return bool(
        (waiting and waiting.waits_for)
        and (undone and undone.status.is_final)
        and (hanging and hanging.status == "IN_TROUBLESHOOTING_QUEUE")
        and (limit and limit.state == "BACKING_OFF")
        and next(iter(bus.status())).rejected
        and bus.commands.list_open_effects("orders").items
        and any(line.waiting for line in bus.key_limits.lines("orders", "tenant"))
    )
