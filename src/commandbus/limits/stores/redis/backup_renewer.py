"""The BackupRenewer renews permits in Redis while the limit client's thread waits for PostgreSQL.

It has its own thread and its own connection to Redis. It does nothing while the limit client renews in time, which
is after a third of a lease. If this program has sent no heartbeat to PostgreSQL for a while, Redis refuses the
renewal (`HeartbeatPace.leave`). Then the permit clock ends the held permits.
"""

from __future__ import annotations

import threading

from commandbus.clock import boottime
from commandbus.limits.held_permits import HeldPermits
from commandbus.limits.stores.choose import ExternalStore
from commandbus.logger import safe_logger

logger = safe_logger("commandbus.limits")

LATE = 0.45
"""The part of a lease after which the limit client is late."""
PARTS = 10
"""How often it looks during one lease."""
LONGEST_SECONDS = 1.0


class BackupRenewer:
    """Renews permits that the limit client of one program could not renew."""

    def __init__(self, name: str, held_permits: HeldPermits) -> None:
        self._held_permits = held_permits
        self._stopping = threading.Event()
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self, external: ExternalStore) -> None:
        """Start the thread, as soon as there is an external store."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, args=[external], name=f"{self._name}-backstop", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop renewing."""
        self._stopping.set()
        self._held_permits.has_held.set()

    def _serve(self, external: ExternalStore) -> None:
        while not self._stopping.wait(self._pause()):
            try:
                self._renew(external)
            except Exception:
                logger.exception("permits in Redis could not be renewed while the limit client waits")
        external.close_backstop()

    def _pause(self) -> float:
        """Seconds until the next look; waits first until a permit is held."""
        self._held_permits.has_held.clear()
        leases = self._held_permits.leases_external()
        if not leases:
            self._held_permits.has_held.wait()
        return min([LONGEST_SECONDS, *(lease / PARTS for lease in leases or self._held_permits.leases_external())])

    def _renew(self, external: ExternalStore) -> None:
        for row, permits in self._held_permits.late_external(LATE):
            sent_at = boottime()
            renewed = external.renew_beside(row, [permit.token for permit in permits])
            for permit in permits:
                if permit.token in renewed:
                    permit.lease, permit.renewed_at = row.lease, max(permit.renewed_at, sent_at)
