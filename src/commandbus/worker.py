"""`python -m commandbus.worker`: a worker from settings alone, for a service manager's unit.

The same as `commandbus worker` without arguments: WORKER_HANDLERS names the registry, WORKER_DOMAINS the domains,
COMMANDBUS_DATABASE_URL the database. Options may follow, as there. The class is `commandbus.Worker`.
"""

from __future__ import annotations

import sys

from commandbus.cli import main

if __name__ == "__main__":
    main(["worker", *sys.argv[1:]])
