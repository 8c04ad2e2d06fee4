"""Isolated handlers whose import takes long in a child process: for a time, or until a file is there. Another file
beside it says that the import has come so far."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from commandbus import HandlerRegistry
from support import slow_registry

handlers = HandlerRegistry()

time.sleep(float(os.environ.get("SLOW_IMPORT_SECONDS", "0")))
if go_on := os.environ.get("SLOW_IMPORT_GATE"):
    Path(f"{go_on}.reached").touch()
    while not Path(go_on).exists():
        time.sleep(0.01)


@handlers.handler("orders", "slow", isolation="process")
def slow(ctx: Any) -> Any:
    return {"pid": os.getpid(), "attempt": ctx.attempt}


slow_registry.far.register("orders", "far", slow, isolation="process")
