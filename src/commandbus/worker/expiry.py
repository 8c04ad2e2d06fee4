"""ExpirySweep: a worker's part in ending commands that were not started in time.

Every worker looks, every two seconds, for commands whose expiry has passed since its last look. A command that
is held or locked at that moment is remembered and looked at again until it has ended, because it may be retried or
parked afterwards. A worker that starts looks at everything once, in bites. So a command is missed only if no
worker runs; then the first one that starts ends it.

Called by the maintenance thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from itertools import islice

from commandbus.clock import monotonic
from commandbus.db.service_connection import LastingConnection
from commandbus.flow.commands.expire import BEGINNING, BITE, Due, due_to_expire, expire
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.worker")

LOOK_SECONDS = 2.0
OVERLAP = timedelta(seconds=60)  # a sender's commit may come so long after its command's expiry was computed
MOST_REMEMBERED = 10_000


class ExpirySweep:
    """Finds and ends commands of some domains that have expired."""

    def __init__(self, domains: Iterable[str]) -> None:
        self._domains = frozenset(domains)
        self._after, self._after_id = BEGINNING, 0
        self._held: dict[int, str] = {}  # the commands to look at again, and their domains
        self._look_at = 0.0

    def sweep(self, connection: LastingConnection) -> None:
        """Look, if it is time to."""
        now = monotonic()
        if now < self._look_at:
            return
        found = connection.run(due_to_expire(self._after, self._after_id))
        self._move_on(found)
        if len(found) < BITE:
            self._look_at = now + LOOK_SECONDS
        pending = self._held | {
            due.id: due.domain for due in found if due.is_pending and due.domain in self._domains
        }
        self._held = dict(islice(pending.items(), MOST_REMEMBERED))  # if the database refuses, they come next time
        for domain in sorted(set(pending.values())):
            ids = [id_ for id_, its in pending.items() if its == domain]
            left = connection.run(expire(domain, ids))
            for id_ in set(ids).difference(left):
                self._held.pop(id_, None)
            if ended := len(ids) - len(left):
                logger.info("%d commands of domain %s expired before they could start", ended, domain)

    def _move_on(self, found: list[Due]) -> None:
        """The next look begins after the last one found, or a minute back if there were no more."""
        if not found:
            return
        last = found[-1]
        if len(found) == BITE:
            self._after, self._after_id = last.expires_at, last.id
        elif (overlapped := last.expires_at - OVERLAP) > self._after:
            self._after, self._after_id = overlapped, 0
