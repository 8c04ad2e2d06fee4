"""`python -m commandbus.worker`: a worker from settings alone, for a service manager's unit.

It is `commandbus worker` under another name: WORKER_HANDLERS names the registry, WORKER_DOMAINS the domains,
COMMANDBUS_DATABASE_URL the database; options may follow, as there. The class is `commandbus.Worker`.
"""

import sys

from commandbus.cli import main

if __name__ == "__main__":
    main(["worker", *sys.argv[1:]])
