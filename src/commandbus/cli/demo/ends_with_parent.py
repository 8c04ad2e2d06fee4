"""Runs `commandbus WORDS...` so that it ends when its parent dies: `python -m … PID WORDS...`.

The demo starts its workers through this module. When the demo is gone, even by kill -9, the kernel sends SIGTERM
to the supervisor, and the supervisor stops its workers cleanly.
"""

from __future__ import annotations

import signal
import sys

from commandbus.cli.entry import main
from commandbus.worker.isolation.child_setup import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]), signal.SIGTERM)
    main(sys.argv[2:])
