"""`python -m commandbus.cli.demo.tether PID WORDS...`: `commandbus WORDS...` that ends when its parent dies.

The demo starts its workers through it: the kernel sends the supervisor SIGTERM when the demo is gone, even by
kill -9, and the supervisor stops its workers in order. Handlers could not do it: the supervisor imports none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from commandbus.cli.entry import main

_SET_PARENT_DEATH_SIGNAL = 1


def tie_to(parent: int) -> None:
    """Ask the kernel for SIGTERM at the parent's death."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it was faster
        sys.exit("the demo is gone")


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    main(sys.argv[2:])
