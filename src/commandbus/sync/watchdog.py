"""WorkerWatchdog(worker, check_interval=10.0, restart_callback=None)."""

from commandbus.worker.watchdog import WorkerWatchdog

__all__ = ["WorkerWatchdog"]
