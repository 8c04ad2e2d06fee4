"""So many commands of one tenant at once, and the bookings of an account in the order of sending."""

import time

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, Worker

handlers = HandlerRegistry()
tenant = Limit("example_tenant", concurrency=2, key="data.tenant")
account = Limit("example_account", concurrency=1, ordered=True, key="data.account")
running: dict[str, int] = {}
most: dict[str, int] = {}
booked: list[int] = []


@handlers.handler("example_keys", "export", limits=[tenant])
def export(command, ctx):
    name = command.data["tenant"]
    running[name] = running.get(name, 0) + 1
    most[name] = max(most.get(name, 0), running[name])
    time.sleep(0.01)
    running[name] -= 1


@handlers.handler("example_keys", "book", limits=[account])
def book(command, ctx):
    booked.append(command.data["amount"])


with CommandBus() as bus:
    bus.migrate(domains=["example_keys"])
    with Worker(handlers, concurrency=8):  # it declares where the key is; senders need to know nothing of it
        sent = bus.send_many("example_keys", [NewCommand("export", {"tenant": name}) for name in "aaaaaaaaab"])
        sent += bus.send_many("example_keys", [NewCommand("book", {"account": 1, "amount": n}) for n in range(5)])
        bus.wait_all(sent, wait=30)
print(f"at most {most['a']} of tenant a at once; booked in order: {booked}")
