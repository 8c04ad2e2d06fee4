"""Several commands that belong together. If one fails, what was done before is undone in reverse."""

import time

from commandbus import BusinessRuleException, CommandBus, HandlerRegistry, Saga, Worker, step

handlers = HandlerRegistry()
trip = Saga(
    "example_trip",
    step("book_flight", "example_travel", undo="cancel_flight"),
    step("book_hotel", "example_travel", undo="cancel_hotel"),
    step("rent_car", "example_travel"),
)
handlers.register_process(trip)


def do(command, ctx):
    print(f"  {command.command_type} for {command.data['name']}")
    if command.command_type == "rent_car" and command.data["age"] < 18:
        raise BusinessRuleException("too young to rent a car")


for name in ("book_flight", "cancel_flight", "book_hotel", "cancel_hotel", "rent_car"):
    handlers.register("example_travel", name, do)

with CommandBus() as bus:
    bus.migrate(domains=["example_travel", "processes"])
    for name, age in (("Ann", 40), ("Bob", 17)):
        process_id = f"{name}-{time.time_ns()}"
        bus.start_process(trip, {"name": name, "age": age}, process_id=process_id)
        Worker(handlers).run(until_idle=True)
        print(f"{name}: {bus.get_process('processes', process_id).status}")
