"""An API is down. After three bad answers nobody calls it; after a while one command finds out that it is back."""

import time

from commandbus import CommandBus, HandlerRegistry, Limit, NewCommand, RetryPolicy, Worker

handlers = HandlerRegistry()
api = Limit("example_bank_api", concurrency=3, breaker_failures=3, breaker_reset="1s")
is_up, calls_while_down = False, 0


@handlers.handler("example_pay", "pay", limits=[api], retry_policy=RetryPolicy(backoff_schedule=[0.1]))
def pay(command, ctx):
    global calls_while_down
    if not is_up:
        calls_while_down += 1
        raise ConnectionRefusedError("nobody answers at the bank")


def state(bus):
    return next(one.state for one in bus.breakers() if one.name == api.name)


with CommandBus() as bus:
    bus.migrate(domains=["example_pay"])
    bus.declare_limit(api)
    batch_id = f"payments-{time.time_ns()}"
    bus.create_batch("example_pay", [NewCommand("pay", {"order": n}) for n in range(20)], batch_id=batch_id)
    with Worker(handlers):
        while state(bus) != "OPEN":
            time.sleep(0.02)
        print(f"the breaker opened after {calls_while_down} calls, with 20 commands to run")
        is_up = True
        batch = bus.wait_for_batch("example_pay", batch_id, wait="20s")
    print(f"{batch.completed} payments were made; the breaker is {state(bus)}")
