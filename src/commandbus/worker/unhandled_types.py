"""What a worker does about commands that wait for a handler (flow/commands/unhandled_types.py).

The maintenance thread looks every two seconds which types wait. The claimer leases commands of types that this
worker knows, as it has free slots; a notification from the worker that parked them tells the claimer sooner. If no
running worker has known a type for `unknown_type_timeout`, the maintenance thread sends its commands to the
troubleshooting queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from commandbus.clock import monotonic
from commandbus.db.service_connection import LastingConnection
from commandbus.db.transient_errors import PassingError
from commandbus.flow.commands.claim import Claim
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.flow.commands.unhandled_types import UnhandledType, find_unhandled, give_up, note, take
from commandbus.logger import safe_logger
from commandbus.model.durations import format_seconds
from commandbus.settings import Settings
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.lines import line_of

logger = safe_logger("commandbus.worker")

SWEEP_SECONDS: Final = 2.0
TROUBLED_SECONDS: Final = 60.0
SLICE_SECONDS: Final = 0.5
BITE: Final = 200
MOST_NAMED: Final = 1000


class UnhandledTypes:
    """The types that wait, as one worker knows them. `add` is for any thread, `take` and `marked` are for the
    claimer's, `sweep` is for the maintenance's."""

    def __init__(self, settings: Settings, worker: str, domains: Sequence[str], handlers: HandlerRegistry) -> None:
        self._settings = settings
        self._worker = worker
        self._domains = list(domains)
        self._handlers = handlers
        self._due: dict[str, dict[str, None]] = {domain: {} for domain in domains}  # types by domain, in turn
        self._lock = threading.Lock()
        self._sweep_at = 0.0
        self._has_looked = False
        self._named: set[tuple[str, str]] = set()
        self.on_due: Callable[[], None] = lambda: None

    @property
    def parks(self) -> bool:
        """Are commands of unknown types parked? If not, they go to the troubleshooting queue at once."""
        return self._settings.unknown_type_timeout > 0

    @property
    def is_busy(self) -> bool:
        """May there be commands that this worker would take?"""
        return not self._has_looked or self.is_any_due

    @property
    def is_any_due(self) -> bool:
        """Do commands wait that this worker has a handler for?"""
        return any(self._due.values())

    def is_due(self, domain: str) -> bool:
        """Do commands of this domain wait that this worker has a handler for?"""
        return bool(self._due[domain])

    def add(self, domain: str, command_type: str) -> None:
        """Commands of this type wait for a handler."""
        if domain in self._due and self._handlers.get(domain, command_type) is not None:
            with self._lock:
                self._due[domain][command_type] = None

    def marked(self, domain: str, rows: Sequence[tuple[Any, ...]]) -> list[ClaimedRow]:
        """Those rows, marked to be parked if this worker has no handler for them, or to join the line of their
        key."""
        return [self._marked(domain, ClaimedRow(*row)) for row in rows]

    def _marked(self, domain: str, row: ClaimedRow) -> ClaimedRow:
        if row.id is None:
            return row
        handler = self._handlers.get(domain, row.command_type)
        if handler is not None or not self.parks:
            return row._replace(line=line_of(handler, row))
        self._say_parked(domain, row.command_type)
        return row._replace(unhandled=note(domain, row.command_type, self._settings.unknown_type_timeout))

    def _say_parked(self, domain: str, command_type: str) -> None:
        """Once per type."""
        if (domain, command_type) not in self._named and len(self._named) < MOST_NAMED:
            self._named.add((domain, command_type))
            logger.warning(
                "this worker has no handler for %s/%s: its commands are parked for workers that have one",
                domain,
                command_type,
                extra={"domain": domain, "command_type": command_type},
            )

    def take(self, connection: LastingConnection, domain: str, n: int) -> Claim:
        """Lease up to n commands of the next type that waits here."""
        with self._lock:
            command_type = next(iter(self._due[domain]))
            del self._due[domain][command_type]
        operation = take(
            domain=domain,
            command_type=command_type,
            worker=self._worker,
            n=n,
            lease_seconds=self._settings.visibility_timeout,
        )
        try:
            found = connection.run(operation)
        except BaseException:
            self.add(domain, command_type)
            raise
        if found.full:  # there may be more commands of this type; other types come first
            self.add(domain, command_type)
        return found

    def sweep(self, connection: LastingConnection) -> None:
        """Look which types wait: those that this worker knows are due, those that nobody knows are given up."""
        if monotonic() < self._sweep_at:
            return
        pause = SWEEP_SECONDS
        try:
            for item in connection.run(find_unhandled(self._domains)):
                self.add(item.domain, item.command_type)
                if self._is_given_up(item) and not self._give_up(connection, item):
                    pause = 0.0
        except PassingError:
            raise
        except Exception as error:  # noqa: BLE001 - the rest of the maintenance must not wait for this
            pause = TROUBLED_SECONDS
            logger.warning("commands without a handler cannot be checked now, trying again in a minute: %s", error)
        self._sweep_at = monotonic() + pause
        if self.is_any_due or not self._has_looked:
            self._has_looked = True
            self.on_due()

    def _is_given_up(self, item: UnhandledType) -> bool:
        is_known = item.workers > 0 or self._handlers.get(item.domain, item.command_type) is not None
        return not is_known and item.seconds >= self._settings.unknown_type_timeout

    def _give_up(self, connection: LastingConnection, item: UnhandledType) -> bool:
        """Whether that was all. What is left has its turn in the next round: the heartbeat comes in between."""
        timeout = self._settings.unknown_type_timeout
        until, count, given = monotonic() + SLICE_SECONDS, 0, BITE
        while given == BITE and monotonic() < until:
            operation = give_up(
                domain=item.domain,
                command_type=item.command_type,
                worker=self._worker,
                n=BITE,
                lease_seconds=self._settings.visibility_timeout,
                age_seconds=timeout,
            )
            given = connection.run(operation)
            count += given
        if count:
            logger.error(
                "%d commands of %s went to the troubleshooting queue: no running worker has had a handler for %s",
                count,
                item.name,
                format_seconds(timeout),
                extra={"domain": item.domain, "command_type": item.command_type},
            )
        return given < BITE
