"""What it costs to start: imports and the command line, in milliseconds, as medians of fresh processes."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

DRIVER = "import psycopg, psycopg_pool"
SENDER = "from commandbus import CommandBus"


def measure(times: int) -> dict[str, float]:
    """Figures by name. The driver and the bus alternate, so that both meet the same machine."""
    kinds = {
        "import_driver_ms": ["-c", DRIVER],
        "import_bus_ms": ["-c", SENDER],
        "import_worker_ms": ["-c", "from commandbus import Worker"],
        "cli_version_ms": ["-m", "commandbus", "--version"],
        "cli_help_ms": ["-m", "commandbus", "--help"],
    }
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(times + 1):
        for name, arguments in kinds.items():
            milliseconds = _milliseconds(arguments)
            if number:  # the first one compiles
                taken[name].append(milliseconds)
    figures = {name: statistics.median(values) for name, values in taken.items()}
    return figures | {"import_bus_above_driver_ms": figures["import_bus_ms"] - figures["import_driver_ms"]}


def _milliseconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return (time.perf_counter() - started) * 1000
