"""Send a command, wait for its outcome, and get what the handler returned."""

from commandbus import (
    BusinessRuleException,
    CallTimeoutError,
    CommandBus,
    CommandFailedError,
    HandlerRegistry,
    Worker,
)

handlers = HandlerRegistry()


@handlers.handler("example_math", "divide")
def divide(command, ctx):
    if command.data["by"] == 0:
        raise BusinessRuleException("cannot divide by zero", code="ZERO")
    ctx.sleep(command.data.get("pause", 0))
    return command.data["number"] / command.data["by"]


with CommandBus() as bus:
    bus.migrate(domains=["example_math"])
    with Worker(handlers):  # usually in another program: `commandbus worker app:handlers`
        print("12 / 3 =", bus.call("example_math", "divide", {"number": 12, "by": 3}))
        try:
            bus.call("example_math", "divide", {"number": 12, "by": 0})
        except CommandFailedError as error:
            print(f"12 / 0 failed: {error.error} [{error.error_code}]")

        slow = {"number": 12, "by": 4, "pause": 1}
        try:
            bus.call("example_math", "divide", slow, wait=0.2)
        except CallTimeoutError as error:  # the caller gave up waiting; the command goes on
            print("no result within 0.2 s; waiting again")
            print("12 / 4 =", bus.call("example_math", "divide", slow, command_id=error.command_id))
