"""Handlers with `async def`, which share one event loop, and a bus to await."""

import asyncio

from commandbus import AsyncCommandBus, HandlerRegistry, Worker

handlers = HandlerRegistry()
barrier = asyncio.Barrier(10)


@handlers.handler("example_web", "fetch", timeout="10s")
async def fetch(command, ctx):
    async with asyncio.timeout(ctx.remaining()):
        await barrier.wait()  # stands for a call that waits: all ten attempts wait here together
    async with ctx.transaction() as tx:  # committed together with the command's completion
        cursor = await tx.execute("SELECT upper(%s)", [command.data["url"]])
        row = await cursor.fetchone()
        tx.complete(row[0])


async def main():
    async with AsyncCommandBus() as bus:
        await bus.migrate(domains=["example_web"])
        worker = Worker(handlers, concurrency=10)
        await asyncio.to_thread(worker.start)
        calls = [bus.call("example_web", "fetch", {"url": f"page {number}"}) for number in range(10)]
        print("ten attempts ran at once:", sorted(await asyncio.gather(*calls))[:3], "…")
        await asyncio.to_thread(worker.stop)


asyncio.run(main())
