"""Send objects and handle objects: a payload that does not fit its type never reaches the handler."""

from dataclasses import dataclass
from decimal import Decimal

import commandbus
from commandbus import CommandBus, HandlerRegistry, TroubleshootingQueue, Worker

handlers = HandlerRegistry()


@commandbus.command("example_shop", "pay")
@dataclass
class Pay:
    order_no: int
    total: Decimal


@handlers.handler(Pay, transaction=True)
def pay(order: Pay, ctx, tx):
    tx.execute("SELECT %s::numeric", (order.total,))  # commits together with the completion
    return {"paid": order.total}


with CommandBus() as bus:
    bus.migrate(domains=["example_shop"])
    good = bus.send(Pay(17, Decimal("9.90")))
    bad = bus.send("example_shop", "pay", {"order_no": "18", "total": "9.90"})  # no type checker saw this
    Worker(handlers).run(until_idle=True)

    print("the good one:", bus.wait(good))
    print("the bad one:", bus.get_command("example_shop", bad.command_id).error)
    TroubleshootingQueue(bus).operator_cancel("example_shop", bad.command_id, reason="it was a mistake")
