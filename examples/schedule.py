"""Send a command by the clock: a schedule that is declared in code, and one that is created at run time."""

import queue

from commandbus import CommandBus, HandlerRegistry, Worker

handlers = HandlerRegistry()
ran = queue.Queue()


@handlers.schedule("example_clock", "tick", every="1s", overlap="skip")
def tick(command, ctx):
    ran.put(command.headers["scheduled_for"])


@handlers.handler("example_clock", "report")
def report(command, ctx):
    ran.put(f"a report of {command.data['region']}")


with CommandBus() as bus:
    bus.migrate(domains=["example_clock"])
    with Worker(handlers, concurrency=2), Worker(handlers, concurrency=2):
        first, second = ran.get(timeout=20), ran.get(timeout=20)
        print("two workers, and each firing is made once:", first != second)

    bus.schedules.create("example_clock", "monday", cron="0 9 * * MON", timezone="Europe/Berlin",
                         command_type="report", data={"region": "eu"}, replace=True)  # fmt: skip
    print(f"next: {bus.schedules.get('example_clock', 'monday').next_at:%A}")
    sent = bus.schedules.run_now("example_clock", "monday", reason="to see it")
    with Worker(handlers, concurrency=2):
        while not (text := ran.get(timeout=20)).startswith("a report"):
            pass
        print("run now:", text)
    bus.schedules.delete("example_clock", "monday")
