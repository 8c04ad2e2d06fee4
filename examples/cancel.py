"""Cancel a command: at once if it waits, and through its context if it runs."""

import threading

from commandbus import AttemptCanceledError, CommandBus, HandlerRegistry, Worker

handlers = HandlerRegistry()
has_begun = threading.Event()


@handlers.handler("example_reports", "build")
def build(command, ctx):
    has_begun.set()
    try:
        ctx.sleep(20)
    except AttemptCanceledError:
        print("the handler was asked to stop, and cleans up")
        raise


with CommandBus() as bus:
    bus.migrate(domains=["example_reports"])
    waiting = bus.send("example_reports", "build", delay=60)
    print("one that waits:", bus.cancel("example_reports", waiting.command_id, operator="Ann"))

    running = bus.send("example_reports", "build")
    with Worker(handlers):
        has_begun.wait(10)
        print("one that runs:", bus.cancel("example_reports", running.command_id, reason="not needed any more"))
    record = bus.get_command("example_reports", running.command_id)
    print(f"its outcome: {record.status}, {record.error}")
