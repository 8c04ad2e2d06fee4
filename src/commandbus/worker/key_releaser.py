"""The KeyReleaser: makes the next commands of keys visible when their turn has come.

Every worker of a domain may release. It looks at the keys of what this worker has settled, at the keys of what was
sent meanwhile, and in turn at all commands in line, in bites: another worker may have vanished before it freed
a place. Nothing depends on when it looks: the database counts what is released (`flow/keys/release.py`).

It works on a thread and a connection of its own, so that no lease and no outcome waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from psycopg import Connection

from commandbus.clock import monotonic
from commandbus.db.service import DatabaseService
from commandbus.db.transient_errors import PassingError
from commandbus.flow.keys.exist import CHANNEL
from commandbus.flow.keys.release import (
    FIRST,
    KEYS,
    LineKey,
    Released,
    end_overrides,
    ended,
    find_new,
    forget,
    freed,
    note_seconds,
    release,
)
from commandbus.logger import safe_logger
from commandbus.settings import Settings

logger = safe_logger("commandbus.worker")

IDLE_SECONDS: Final = 0.25
AGAIN_SECONDS: Final = 0.02  # somebody else has locked a key or a command
SWEEP_SECONDS: Final = 0.5
TROUBLED_SECONDS: Final = 3.0
NOTE_SECONDS: Final = 2.0


class KeyReleaser(DatabaseService):
    """One thread for the lines of keys."""

    def __init__(
        self, settings: Settings, domains: Sequence[str], *, on_error: Callable[[BaseException], None], name: str
    ) -> None:
        super().__init__(settings, name=name, part="key releaser", on_end=on_error, goes_by_keys=True)
        self._domains = list(domains)
        self._settled: deque[tuple[str, LineKey]] = deque()
        self._pending: dict[str, set[LineKey]] = {domain: set() for domain in domains}
        self._new_after = dict.fromkeys(domains, FIRST)
        self._ended_after: dict[str, tuple[str, str, int] | None] = dict.fromkeys(domains)
        self._seconds: dict[tuple[str, str], float] = {}
        self._sweep_at = 0.0
        self._note_at = 0.0
        self._after = 0
        self._is_quiet = False  # the last round found nothing to release
        self._is_stirred = False  # since the last round began, somebody may have joined a line

    @property
    def is_busy(self) -> bool:
        """May it release something yet?"""
        return not self._is_quiet or self._is_stirred or bool(self._settled)

    def stir(self) -> None:
        """Somebody may have joined a line: it is busy until it has looked. Called by any thread; never waits."""
        self._is_stirred = True

    def look_at(self, domain: str, key: LineKey) -> None:
        """An attempt of a command with this key was settled. Called by any thread; never waits."""
        self._is_quiet = False
        self._settled.append((domain, key))
        self.wake()

    def connected(self, conn: Connection[Any]) -> None:
        self.listen(conn, CHANNEL)

    def round(self) -> None:
        self._is_stirred = False
        try:
            self._collect()
            self._sweep()
            is_more = sum(self._release(domain) for domain in self._domains) > 0
            self._is_quiet = not is_more and not self._settled and not any(self._pending.values())
        except PassingError:
            raise
        except Exception:
            logger.exception("a round of the key releaser failed")
            self.sleep(TROUBLED_SECONDS)
            return
        if not is_more and not self._settled:
            self.sleep(AGAIN_SECONDS if any(self._pending.values()) else IDLE_SECONDS)

    def _collect(self) -> None:
        while self._settled:
            domain, key = self._settled.popleft()
            self._pending[domain].add(key)

    def _release(self, domain: str) -> bool:
        """Release what can be released now. Returns whether there may be more."""
        new = self._connection.run(find_new(domain, self._new_after[domain]))
        started = self._new_after[domain]
        self._new_after[domain] = new[-1].key if len(new) == KEYS else FIRST
        pending = self._pending[domain]
        keys = [pending.pop() for _ in range(min(len(pending), KEYS))]
        if not new and not keys:
            return started != FIRST  # from the beginning again
        pending.update(keys)  # if the database fails, they are looked at again
        found = self._connection.run(release(domain, keys, new))
        pending.difference_update(keys)
        pending |= found.again
        self._note(domain, found)
        is_new = any(item.key not in found.again for item in new)
        return found.commands > 0 or is_new or len(keys) == KEYS

    def _note(self, domain: str, found: Released) -> None:
        """Note now and then how long commands of a key limit take: people are told when the next one begins."""
        self._seconds |= {(domain, name): seconds for name, seconds in found.seconds.items()}
        if self._seconds and (now := monotonic()) >= self._note_at:
            self._note_at = now + NOTE_SECONDS
            for (of_domain, name), seconds in self._seconds.items():
                self._connection.run(note_seconds(of_domain, name, seconds))
            self._seconds.clear()

    def _sweep(self) -> None:
        now = monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_SECONDS
        for domain in self._domains:
            left = self._connection.run(ended(domain, self._ended_after[domain]))
            self._ended_after[domain] = left.after
            self._pending[domain] |= left.keys
        self._connection.run(forget(self._domains, self._after))
        found = self._connection.run(freed(self._domains, self._after))
        self._after = found.after or 0
        for keys in (found.keys, self._connection.run(end_overrides(self._domains))):
            for domain, of_domain in keys.items():
                self._pending[domain] |= of_domain
