"""KeyReleaserOnDemand: the KeyReleaser of a worker, once a key limit exists. A worker without one pays nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from commandbus.flow.commands.claimed_row import OPTIONS
from commandbus.flow.keys.exist import exist
from commandbus.flow.operation import Operation
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.service_on_demand import ServiceOnDemand

if TYPE_CHECKING:
    from commandbus.worker.key_releaser import KeyReleaser


class KeyReleaserOnDemand(ServiceOnDemand["KeyReleaser"]):
    """The key releaser of one worker, if it needs one."""

    @property
    def is_busy(self) -> bool:
        """May a command become visible because its turn in its line comes?"""
        return not self.has_looked if self.service is None else self.service.is_busy

    def settled(self, attempts: Iterable[Attempt]) -> None:
        """Attempts were settled: their keys may have a free place. Called by any thread; never waits."""
        if self.service is None:
            return
        if self._spec.ends_idle:
            self.service.stir()  # a handler may have sent commands with keys
        from commandbus.flow.keys.release import LineKey

        for attempt in attempts:
            if attempt.row[OPTIONS] is None:
                continue
            options = attempt.options
            if options.key_limit is not None and options.key is not None:
                self.service.look_at(attempt.domain, LineKey(options.key_limit, options.key))

    def joined(self) -> None:
        """Claimed commands have joined lines. Called by the claimer. If the last look was before there was a key
        limit, they wait in their lines until the next one."""
        if self.service is None:
            self._asked += 1
            self.look_soon()
        else:
            self.service.stir()
            self.service.wake()

    def _is_needed(self) -> Operation[bool]:
        return exist(self._spec.domains)

    def _make(self) -> KeyReleaser:
        from commandbus.worker.key_releaser import KeyReleaser

        return KeyReleaser(self._settings, self._spec.domains, on_error=self._spec.fail, name=self._spec.id)
