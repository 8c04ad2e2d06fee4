"""`python -m commandbus.worker`: a worker from settings alone, for a service manager's unit.

It becomes `commandbus worker`, in place and under the same process id: WORKER_HANDLERS names the registry,
WORKER_DOMAINS the domains, COMMANDBUS_DATABASE_URL the database; options may follow, as there. It is that program
and no import of it, because the command line is the layer above this one. The class is `commandbus.Worker`.
"""

from __future__ import annotations

import os
import sys


def command_line() -> list[str]:
    """The same interpreter with the same options (`-X dev`, `-W error` …), running the other program."""
    options = sys.orig_argv[1 : sys.orig_argv.index("-m")] if "-m" in sys.orig_argv else []
    return [sys.executable, *options, "-m", "commandbus.cli", "worker", *sys.argv[1:]]


if __name__ == "__main__":
    os.execv(sys.executable, command_line())  # noqa: S606 - our own program, no shell
