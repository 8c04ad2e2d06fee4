"""PGQueuer: `setup`, `fill COUNT`, `work`. PGHOST and its sisters name the database, BENCH_DATA is the payload."""

from __future__ import annotations

import os
import sys

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, PgQueuer, Queries

BATCH = 500  # as many as Graphile Worker takes at once (the default is 10); all of a batch may run at once


async def setup() -> None:
    await Queries(AsyncpgDriver(await asyncpg.connect())).install()


async def fill(count: int) -> None:
    queries = Queries(AsyncpgDriver(await asyncpg.connect()))
    payload = os.environ["BENCH_DATA"].encode()
    await queries.enqueue(["work"] * count, [payload] * count, [0] * count)


async def work() -> None:
    queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect()))

    @queuer.entrypoint("work")
    async def handle(job: object) -> None:
        pass

    await queuer.run(batch_size=BATCH)


if __name__ == "__main__":
    step = {"setup": setup, "work": work, "fill": lambda: fill(int(sys.argv[2]))}[sys.argv[1]]
    uvloop.run(step())
