"""The same worker in a process of its own: `python worker.py`, until SIGTERM.

For production, `commandbus worker` (or `python -m commandbus.worker`) runs worker processes under a supervisor,
which also ends handlers that no thread can end. This is the worker as a library.
"""

from __future__ import annotations

import sys

from dependencies import get_pool, get_watchdog, get_worker


def main() -> int:
    """Run until a signal, or until the watchdog has stopped it."""
    get_watchdog().start()
    report = get_worker().run()
    get_watchdog().stop()
    get_pool().close()
    return 0 if report.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
