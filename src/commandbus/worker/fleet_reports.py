"""FleetReports: what a worker tells people, on the thread of its maintenance.

- the figures of each minute: added every ten seconds, if there is something to add
- what its slots run: once a second, only while somebody watches (flow/workers/slots.py)
- answers: where an attempt is now, and whether the worker recycles, pauses or goes on (flow/workers/requests.py)

A heartbeat says whether somebody watches or asks. A notification says so at once; it is only a hint. What fails
here is logged, and rests for a minute: a worker works without it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from commandbus.clock import epoch, monotonic
from commandbus.db.service_connection import LastingConnection
from commandbus.db.transient_errors import PassingError
from commandbus.flow.workers.figures import add_figures
from commandbus.flow.workers.registry import Watchers
from commandbus.flow.workers.requests import Request, answer, open_requests
from commandbus.flow.workers.slots import WATCH_SECONDS, publish
from commandbus.logger import safe_logger
from commandbus.worker.slot_views import SlotViews
from commandbus.worker.wait_times import WaitTimes

logger = safe_logger("commandbus.worker")

ADD_SECONDS: Final = 10.0
PUBLISH_SECONDS: Final = 1.0
REST_SECONDS: Final = 60.0


class FleetReports:
    """Used by one thread."""

    def __init__(
        self,
        worker: str,
        domains: Sequence[str],
        *,
        settled: Callable[[], Mapping[str, int]],
        waits: WaitTimes,
        views: SlotViews,
        obey: Callable[[str, str], Mapping[str, Any]],
    ) -> None:
        self._worker = worker
        self._domains = domains
        self._settled = settled
        self._waits = waits
        self._views = views
        self._obey = obey
        self._told: dict[str, int] = {}
        self._add_at = monotonic() + ADD_SECONDS
        self._counted_minute = int(epoch() // 60)
        self._watched_until = 0.0
        self._publish_at = 0.0
        self._is_asked = False
        self._rests_until = 0.0

    def heard(self, payload: str) -> None:
        """Somebody begins to watch (''), or asks a worker something."""
        if payload == "":
            self._watched_until = max(self._watched_until, monotonic() + WATCH_SECONDS)
        elif payload == self._worker:
            self._is_asked = True

    def note(self, watchers: Watchers) -> None:
        """What a heartbeat has learned."""
        self._watched_until = max(self._watched_until, monotonic() + watchers.seconds)
        self._is_asked = self._is_asked or watchers.has_requests

    @property
    def is_watched(self) -> bool:
        """Does somebody look at the slots?"""
        return monotonic() < self._watched_until

    def look(self, connection: LastingConnection) -> None:
        """Do what is due."""
        now = monotonic()
        if now < self._rests_until:
            return
        try:
            if self._is_asked:
                self._is_asked = False
                self._answer(connection)
            if now < self._watched_until and now >= self._publish_at:
                self._publish(connection, now)
            if now >= self._add_at:
                self._add_at = now + ADD_SECONDS
                self.add(connection)
        except PassingError:
            raise
        except Exception as error:  # noqa: BLE001 - everything else must have its turn
            self._rests_until = now + REST_SECONDS
            logger.warning("people cannot be shown what this worker does, trying again in a minute: %s", error)

    def finish(self, connection: LastingConnection) -> None:
        """The worker stops: add what is new."""
        try:
            self.add(connection)
        except PassingError:
            raise
        except Exception as error:  # noqa: BLE001 - the stop must be recorded all the same
            logger.warning("the figures of the last seconds could not be added: %s", error)

    def add(self, connection: LastingConnection) -> None:
        """Add to the figures of this minute what is new. Once a minute, what could run is counted, too."""
        minute, settled = int(epoch() // 60), dict(self._settled())
        is_new = minute != self._counted_minute
        self._counted_minute = minute
        for domain in self._domains:
            count = settled.get(domain, 0) - self._told.get(domain, 0)
            waits = self._waits.take(domain)
            if count or is_new or any(waits):
                connection.run(add_figures(domain, settled=count, waits=waits, counts_ready=is_new))
                self._told[domain] = settled.get(domain, 0)

    def _publish(self, connection: LastingConnection, now: float) -> None:
        self._publish_at = now + PUBLISH_SECONDS
        seconds = connection.run(publish(self._worker, self._domains, self._views.state()))
        self._watched_until = now + seconds

    def _answer(self, connection: LastingConnection) -> None:
        for request in connection.run(open_requests(self._worker)):
            connection.run(answer(request.id, self._answer_to(request)))

    def _answer_to(self, request: Request) -> dict[str, Any]:
        if request.kind != "STACK":
            return dict(self._obey(request.kind, request.reason or "somebody asked for it"))
        if request.domain is None or request.msg_id is None or request.read_ct is None:
            return {"problem": "the question names no attempt"}
        return self._views.stack_of(request.domain, request.msg_id, request.read_ct)
