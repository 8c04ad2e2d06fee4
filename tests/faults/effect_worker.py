"""A worker process that charges, to be killed: `python effect_worker.py '{"database_url": …}'`.

Its handlers stop where their data says, in their first attempt only, and note it in a file: before the call, in it
(the provider's answer takes long), after it, or after the receipt.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from commandbus import NOT_DONE, HandlerRegistry, RetryPolicy, Settings, Worker

handlers = HandlerRegistry()


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)


def stop_at(point: str, command: Any, ctx: Any) -> None:
    if ctx.attempt_number == 1 and command.data["point"] == point:
        Path(command.data["folder"], point).touch()
        time.sleep(60)


@handlers.handler("orders", "pay")
def pay(command: Any, ctx: Any) -> Any:
    url = command.data["url"]

    def find_charge(effect: Any) -> Any:
        found = ask(f"{url}/find?key={effect.key}")
        return found["charge"] if found["charge"] is not None else NOT_DONE

    with ctx.effect("charge", key=command.data["point"], verify=find_charge) as effect:
        key = effect.key
        stop_at("before", command, ctx)
        slowly = "&slowly" if ctx.attempt_number == 1 and key == "during" else ""
        receipt = ask(f"{url}/charge?key={key}{slowly}")
        stop_at("after", command, ctx)
        effect.receipt = receipt
    ctx.checkpoint("paid")
    stop_at("stored", command, ctx)
    return {"receipt": effect.receipt, "checkpoint": ctx.last_checkpoint}


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    policy = RetryPolicy(max_attempts=settings.max_attempts, backoff_schedule=[0.05], jitter=0)
    Worker(handlers, settings=settings, retry_policy=policy).run()


if __name__ == "__main__":
    main()
