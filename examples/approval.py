"""A process that waits for a person, sleeps, and starts another process. Without an answer it is undone."""

import time

from commandbus import CommandBus, HandlerRegistry, Saga, Worker, nested, sleep, step, wait_for

handlers = HandlerRegistry()
delivery = Saga("example_delivery", step("pack", "example_office"), step("send_parcel", "example_office"))
order = Saga(
    "example_order",
    step("reserve", "example_office", undo="release"),
    wait_for("approval", deadline="2s"),  # bus.signal("processes", process_id, "approval", {...})
    nested("delivery", delivery),  # a process of its own, and one step of this one
    sleep("100ms"),  # or "3d": it is a row in the database, not a thread
    step("ask_for_a_review", "example_office"),
)
handlers.register_process(delivery)
handlers.register_process(order)


def do(command, ctx):
    print(f"  {command.command_type}")


for name in ("reserve", "release", "pack", "send_parcel", "ask_for_a_review"):
    handlers.register("example_office", name, do)

with CommandBus() as bus:
    bus.migrate(domains=["example_office", "processes"])
    for customer in ("Ann", "Bob"):
        process_id = f"{customer}-{time.time_ns()}"
        bus.start_process(order, process_id=process_id)
        if customer == "Ann":  # nobody approves the order of Bob
            bus.signal("processes", process_id, "approval", {"by": "the boss"})
        while not (process := bus.get_process("processes", process_id)).status.is_final:
            Worker(handlers).run(until_idle=True)
        print(f"{customer}: {process.status}, {process.failure and process.failure['message']}")
