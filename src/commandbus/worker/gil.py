"""How long a thread keeps the GIL while another thread waits for it.

With Python's 5 ms, the claimer and the settler would wait longer for the GIL than for the database. Only a process
that is a worker's alone is changed: one that a supervisor started, and one whose main thread is in `Worker.run()`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SWITCH_SECONDS: Final = 0.001


@contextmanager
def quick_switches() -> Iterator[None]:
    """While the main thread is in here, threads hand over the GIL sooner. In another thread it does nothing."""
    before = sys.getswitchinterval()
    if threading.current_thread() is not threading.main_thread() or before <= SWITCH_SECONDS:
        yield
        return
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
