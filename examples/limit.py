"""Share what an external API allows among all workers. Commands that must wait hold no slot."""

import threading
import time

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, Worker

handlers = HandlerRegistry()
api = Limit("example_api", concurrency=2)  # two calls at once in the whole fleet; rate="120/m" is for the rate
lock, at_once, most_at_once = threading.Lock(), 0, 0


@handlers.handler("example_ocr", "read", limits=[api])
def read(command, ctx):
    global at_once, most_at_once
    with lock:
        at_once += 1
        most_at_once = max(most_at_once, at_once)
    time.sleep(0.1)  # the call
    with lock:
        at_once -= 1


with CommandBus() as bus:
    bus.migrate(domains=["example_ocr"])
    batch_id = f"pages-{time.time_ns()}"
    bus.create_batch("example_ocr", [NewCommand("read", {"page": n}) for n in range(12)], batch_id=batch_id)
    with Worker(handlers, concurrency=8):
        batch = bus.wait_for_batch("example_ocr", batch_id, wait="20s")
    print(f"{batch.completed} pages were read with 8 slots, at most {most_at_once} at once")
    print(
        "charged attempts:",
        {one.charged_attempts for one in bus.query_commands(domain="example_ocr", batch_id=batch_id)},
    )
