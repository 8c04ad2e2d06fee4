"""A handler that ignores every request to stop. Its slot comes back, and you can read what it was doing."""

import time

from commandbus import CommandBus, CommandFailedError, HandlerRegistry, Worker, load_settings

handlers = HandlerRegistry()


@handlers.handler("example_stuck", "loop", timeout="0.5s", on_timeout="fail")
def loop(command, ctx):
    end = time.monotonic() + 4  # for ever, as far as its worker can tell
    while time.monotonic() < end:
        time.sleep(0.01)


@handlers.handler("example_stuck", "greet")
def greet(command, ctx):
    return "hello"


with CommandBus() as bus:
    bus.migrate(domains=["example_stuck"])
    settings = load_settings({"concurrency": 1, "cancel_grace": 0.5})  # one slot, and the loop has it
    with Worker(handlers, settings=settings):
        try:
            bus.call("example_stuck", "loop")
        except CommandFailedError as error:
            print("ended:", error.error)
        print("the slot is back:", bus.call("example_stuck", "greet"))

        stuck = bus.list_stuck("example_stuck", limit=1)[0]
        print(f"{stuck.command_type}: {stuck.error_type} after {stuck.duration_ms / 1000:.1f} s")
        print("it was here:", stuck.autopsy["stacks"][0]["frames"][-1])
