"""Send a command that must not start before a given time."""

import threading
import time
from datetime import UTC, datetime, timedelta

from commandbus import CommandBus, HandlerRegistry, Worker

handlers = HandlerRegistry()
both_ran = threading.Semaphore(0)
sent_at = time.monotonic()


@handlers.handler("example_mail", "remind")
def remind(command, ctx):
    print(f"{command.data['text']}: due after 1 s, started after {time.monotonic() - sent_at:.0f} s")
    both_ran.release()


with CommandBus() as bus:
    bus.migrate(domains=["example_mail"])
    sent_at = time.monotonic()
    bus.send("example_mail", "remind", {"text": "sent with delay="}, delay=1)
    bus.send("example_mail", "remind", {"text": "sent with at="}, at=datetime.now(UTC) + timedelta(seconds=1))
    print("waiting in the queue:", bus.status("example_mail")[0].delayed)

    with Worker(handlers, concurrency=1):  # it looks at the queue again at the moment when something is due
        for _ in range(2):
            both_ran.acquire(timeout=10)
