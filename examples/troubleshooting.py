"""Look at what needs a person, repair the cause, and retry the command."""

from commandbus import CommandBus, HandlerRegistry, PermanentCommandError, TroubleshootingQueue, Worker

handlers = HandlerRegistry()
addresses = {}


@handlers.handler("example_post", "deliver")
def deliver(command, ctx):
    name = command.data["to"]
    if name not in addresses:
        raise PermanentCommandError(f"nobody knows the address of {name}", code="NO_ADDRESS")
    return f"delivered to {addresses[name]}"


with CommandBus() as bus:
    bus.migrate(domains=["example_post"])
    sent = bus.send("example_post", "deliver", {"to": "Ann"})
    Worker(handlers).run(until_idle=True)

    queue = TroubleshootingQueue(bus)
    for entry in queue.list("example_post"):
        print(f"needs a person: {entry.command_type} [{entry.error_code}] {entry.error}")

    addresses["Ann"] = "Main St 1"
    queue.operator_retry("example_post", sent.command_id, operator="Bob", reason="address added")
    Worker(handlers).run(until_idle=True)

    print("result:", bus.get_command("example_post", sent.command_id).result)
    print("history:", ", ".join(entry.event for entry in bus.get_audit_trail("example_post", sent.command_id)))
