"""Celery: `setup` (nothing), `fill COUNT`, `work`. BENCH_BROKER names the broker, BENCH_DATA is the payload."""

from __future__ import annotations

import json
import os
import sys

from celery import Celery

app = Celery("bench", broker=os.environ["BENCH_BROKER"])
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True


@app.task(name="work")
def handle(data: object) -> None:
    pass


def fill(count: int) -> None:
    data = json.loads(os.environ["BENCH_DATA"])
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(count):
            handle.apply_async((data,), producer=producer)


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(int(sys.argv[2]))
    elif sys.argv[1] == "work":
        options = ["--without-gossip", "--without-mingle", "--loglevel", "WARNING"]
        concurrency = ["--concurrency", os.environ["BENCH_CONCURRENCY"]]
        app.worker_main(["worker", "--hostname", f"bench-{os.getpid()}@%h", *concurrency, *options])
