"""What a type checker says to users of commandbus: right code passes `mypy --strict`, wrong code does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import commandbus

PROGRAM = """
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import uuid4

import msgspec
import pydantic

from commandbus import (
    AsyncTransaction, Transaction, command,
    AsyncCommandBus, AsyncHandlerContext, Command, CommandBus, CommandRecord, HandlerContext, HandlerRegistry,
    NewCommand, Page, RetryPolicy, Saga, TroubleshootingQueue, step,
)

handlers = HandlerRegistry(json_default=str)


@command("orders", "ship_order")
@dataclass
class ShipOrder:
    order_no: int


class PydanticOrder(pydantic.BaseModel):
    order_no: int


class StructOrder(msgspec.Struct):
    order_no: int


@handlers.handler(ShipOrder, transaction=True, timeout="5s")
def ship_order(order: ShipOrder, ctx: HandlerContext, tx: Transaction) -> ShipOrder:
    tx.execute("SELECT %s", (order.order_no,)).fetchone()
    return order


@handlers.handler("orders", "bill_order", transaction="serializable")
async def bill_order(order: PydanticOrder, ctx: AsyncHandlerContext, tx: AsyncTransaction) -> None:
    await tx.execute("SELECT 1")


handlers.handler("orders")  # wrong
handlers.handler("orders", "x", transaction="no level")  # wrong


@handlers.handler("orders", "ship", timeout="5s", retry_policy=RetryPolicy(3, ["1s", 2, timedelta(minutes=1)]))
def ship(command: Command, ctx: HandlerContext) -> dict[str, object]:
    ctx.heartbeat({"pages": 1})
    ctx.sleep("10ms")
    with ctx.limit("docai", wait=timedelta(seconds=5), timeout="1m"), ctx.transaction() as tx:
        tx.complete({"order": command.data["order_no"]})
    return {"a": 1}


@handlers.handler("orders", "bill")
async def bill(command: Command, ctx: AsyncHandlerContext) -> None:
    await ctx.sleep(0.1)


def use(bus: CommandBus, numbers: dict[str, int], rows: list[dict[str, str]]) -> None:
    bus.send("orders", "ship", numbers, delay="5m", timeout=30, headers={"trace": "x"})
    bus.send("orders", "ship", rows)
    bus.send("orders", "ship", {"nested": {"a": [1, 2.5, None, "x"]}, "pair": (1, True)})
    bus.send("orders", "ship", object())  # wrong
    bus.send("orders", "ship", {"at": datetime.now(UTC), "id": uuid4(), "total": Decimal(1), "o": ShipOrder(1)})
    bus.send(ShipOrder(1), delay="5m", timeout=3)
    bus.send(PydanticOrder(order_no=1))
    bus.send(StructOrder(order_no=1), unique="x")
    bus.send("orders")  # wrong
    bus.send(5)  # wrong
    bus.send(ShipOrder(1), colour="red")  # wrong
    bus.send_many("orders", [ShipOrder(1), NewCommand("ship", ShipOrder(2))])
    print(bus.call(ShipOrder(1), wait=3)["order"])
    bus.send("orders", "ship", delay=b"5m")  # wrong
    bus.send_many("orders", [{"command_type": "ship", "data": numbers}, NewCommand("ship", numbers)])
    bus.send_many("orders", ({"command_type": "ship", "data": {"n": n}} for n in range(3)))
    print(bus.call("orders", "ship", numbers, wait="2s", timeout=3)["order"])
    bus.call("orders", "ship", deadline=3)  # wrong
    page: Page[CommandRecord] = bus.query_commands(domain="orders", status="PENDING", limit=3)
    print([record.data["x"] for record in page], page.has_more, page.next_cursor)
    bus.query_commands(colour="red")  # wrong
    bus.query_commands(cursor=5)  # wrong
    bus.set_limit("docai", concurrency=3, lease="2m", operator="ann", reason="busy")
    bus.set_limit("docai", speed=3)  # wrong
    print(bus.get_limit("docai").name)  # wrong
    found = bus.get_command("orders", "x")
    print(None if found is None else found.status)
    TroubleshootingQueue(bus).operator_cancel("orders", "x", "because")  # wrong
    saga = Saga("order", step("pay", "bank", delay="5s", data=lambda state: {"order": state["no"]}))
    print(saga.start(bus, {"no": 1}, deadline="1h").process_id)
    saga.start(bus, {"no": 1}, timeout="1h")  # wrong
    bus.create_batch("orders", [NewCommand("ship")], custom_data={"a": numbers}, on_complete=ship)
    bus.wait_for_batch("orders", "b", wait="1m", on_progress=lambda batch: print(batch.progress))
    print([stray.reason for stray in bus.stray_replies()], bus.status().items[0].ready)


async def use_async(bus: AsyncCommandBus, saga: Saga) -> None:
    print((await saga.start(bus, {"no": 1})).created, await bus.limits())
    async with bus.limit("docai", wait="2s") as hold:
        print(hold.remaining())
"""


@pytest.mark.slow
def test_right_code_passes_and_wrong_code_does_not(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    options = ["--strict", "--no-error-summary", "--cache-dir", str(tmp_path / "cache"), "--config-file="]
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)],
        cwd=tmp_path,
        env={"MYPYPATH": str(Path(commandbus.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    found = {int(line) for line in re.findall(r"^program\.py:(\d+): error", answer.stdout, re.MULTILINE)}
    assert found == wrong, answer.stdout + answer.stderr
