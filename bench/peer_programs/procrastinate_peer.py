"""Procrastinate: `setup`, `fill COUNT`, `work`. PGHOST and its sisters name the database, BENCH_DATA the data."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from procrastinate import App, PsycopgConnector

CONCURRENCY = int(os.environ["BENCH_CONCURRENCY"])
app = App(connector=PsycopgConnector(max_size=CONCURRENCY + 2))


@app.task(name="work")
async def handle(**data: object) -> None:
    pass


async def main() -> None:
    async with app.open_async():
        if sys.argv[1] == "setup":
            await app.schema_manager.apply_schema_async()
        elif sys.argv[1] == "fill":
            data = json.loads(os.environ["BENCH_DATA"])
            await handle.batch_defer_async(*[data] * int(sys.argv[2]))
        else:
            await app.run_worker_async(concurrency=CONCURRENCY)


if __name__ == "__main__":
    asyncio.run(main())
