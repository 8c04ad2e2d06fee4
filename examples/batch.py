"""Send many commands as one batch, watch it, and have a command sent when the last one has ended."""

import time

from commandbus import BusinessRuleException, CommandBus, HandlerRegistry, NewCommand, Worker

handlers = HandlerRegistry()
BATCH = f"letters-{time.time_ns()}"


@handlers.handler("example_print", "letter")
def start_message(command, ctx):
    if command.data["number"] % 100 == 0:
        raise BusinessRuleException("the address is empty")


@handlers.handler("example_print", "all_printed")
def all_printed(command, ctx):  # sent exactly once, in the transaction that ends the batch
    print(f"the batch sent: {command.data['status']}, {command.data['custom_data']['file']}")
    return "seen"


with CommandBus() as bus:
    bus.migrate(domains=["example_print"])
    created = bus.create_batch(
        "example_print",
        (NewCommand("letter", {"number": number}) for number in range(1, 501)),  # all of them, or none
        batch_id=BATCH,
        custom_data={"file": "letters.csv"},
        on_complete=all_printed,
    )
    print("sent:", created.total)
    Worker(handlers).run(until_idle=True)
    batch = bus.wait_for_batch("example_print", BATCH, wait="10s")
    print(f"{batch.status}: {batch.completed} printed, {batch.failed} failed")
