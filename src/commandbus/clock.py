"""The clocks that this package reads, bound once at import.

    monotonic()    for deadlines, waits and rates; it stands still while the machine is suspended
    boottime()     for the ages of leases; it goes on while the machine is suspended, as the server's clock does
    epoch()        for records

A handler, or a library such as freezegun, may replace `time.monotonic` and `time.time` for the whole process.
These functions ask the system directly, so such a handler cannot make the worker stop its neighbors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

monotonic: Final[Callable[[], float]] = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
"""Seconds since some moment. Also compared between processes of one machine."""

boottime: Final[Callable[[], float]] = partial(
    time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
)
"""Seconds since some moment, with those that the machine was suspended where the system counts them (Linux)."""

epoch: Final[Callable[[], float]] = partial(time.clock_gettime, time.CLOCK_REALTIME)
"""Seconds since 1970."""
