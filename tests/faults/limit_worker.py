"""A worker process whose handlers call a limited API: `python limit_worker.py '{"database_url": …}'`.

`page` has the limit on the handler (it is parked when that is full), `block` inside it (it waits in its slot).
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

from commandbus import HandlerRegistry, RetryPolicy, Settings, Worker

handlers = HandlerRegistry()


def call(data: dict[str, Any]) -> Any:
    url = f"{data['url']}/call?n={data['n']}&who={os.getpid()}"
    if data["seconds"] is not None:
        url += f"&seconds={data['seconds']}"
    with urllib.request.urlopen(url, timeout=20) as response:
        return json.load(response)["n"]


@handlers.handler("orders", "page", limits=["docai"])
def page(command: Any, ctx: Any) -> Any:
    return call(command.data)


@handlers.handler("orders", "block")
def block(command: Any, ctx: Any) -> Any:
    with ctx.limit("docai", wait=60):
        return call(command.data)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    policy = RetryPolicy(max_attempts=50, backoff_schedule=[0.05], jitter=0)
    Worker(handlers, settings=settings, retry_policy=policy).run()


if __name__ == "__main__":
    main()
