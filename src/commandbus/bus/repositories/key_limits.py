"""KeyLimitRepository and AsyncKeyLimitRepository: how many commands of one key run at once, and in which order."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from commandbus.bus.base import whoami
from commandbus.bus.one_body import awaited
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.operate import operator_action
from commandbus.flow.keys import operate
from commandbus.model import names
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.key_limit import MOST_PLACES, KeyLimit, KeyLine, KeyOverride, OnFailure


class KeyLimitRepository(Repository):
    """Key limits: `bus.key_limits`, or `KeyLimitRepository(pool)`."""

    def set(
        self,
        domain: str,
        name: str,
        *,
        concurrency: int = 1,
        ordered: bool = False,
        on_failure: OnFailure | None = None,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> KeyLimit:
        """Create a key limit, or change it: so many commands of one key run at once in the fleet.

        `ordered=True` (with concurrency 1): strictly one after the other, in the order of sending, also across
        retries. `on_failure`: a command in the troubleshooting queue keeps its place until a person has decided
        ("block", the default if ordered), or gives it up ("step_aside"). `operator` and `reason` are recorded in
        the audit, as for all changes of key limits.
        """
        limit = KeyLimit.make(domain, name, concurrency=concurrency, ordered=ordered, on_failure=on_failure)
        return self._bus.run(operate.set_key_limit(limit, operator_action(operator or whoami(), reason)), conn)

    def override(
        self,
        domain: str,
        name: str,
        key: str | None,
        *,
        concurrency: int,
        until: Duration,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Give one key another concurrency for some time; 0 stops it for that time. The key None means all keys
        that have no override of their own."""
        names.check_domain(domain)
        names.check_count(concurrency, "concurrency", least=0, most=MOST_PLACES)
        seconds = parse_seconds(until, name="until", error=InvalidCommandError)
        of_key = None if key is None else names.check_id(key, "key")
        action = operator_action(operator or whoami(), reason)
        return self._bus.run(operate.override(domain, name, of_key, concurrency, seconds, action), conn)

    def end_override(
        self,
        domain: str,
        name: str,
        key: str | None,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> bool:
        """End the override of one key, or of all (None), before its time. Returns False if there is none."""
        names.check_domain(domain)
        of_key = None if key is None else names.check_id(key, "key")
        action = operator_action(operator or whoami(), reason)
        return self._bus.run(operate.end_override(domain, name, of_key, action), conn)

    def overrides(
        self, domain: str, name: str, *, limit: int = 100, conn: object = None
    ) -> builtins.list[KeyOverride]:
        """The keys that have another concurrency now, by key."""
        return self._bus.run(operate.list_overrides(domain, name, limit=limit), conn)

    def delete(
        self,
        domain: str,
        name: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Delete a key limit. InvalidOperationError if unfinished commands use it."""
        action = operator_action(operator or whoami(), reason)
        return self._bus.run(operate.delete_key_limit(domain, name, action), conn)

    def list(self, domain: str | None = None, *, conn: object = None) -> Sequence[KeyLimit]:
        """The key limits of a domain, or of all, by name."""
        return self._bus.run(operate.list_key_limits(domain), conn)

    def lines(
        self,
        domain: str,
        name: str,
        *,
        keys: Sequence[str] | None = None,
        limit: int = 100,
        conn: object = None,
    ) -> builtins.list[KeyLine]:
        """The keys that have unfinished commands, those with the most waiting first; or these `keys` only.

        It looks at the first 2,000 keys, and counts up to 100,000 commands of a key."""
        return self._bus.run(operate.list_lines(domain, name, keys=keys, limit=limit), conn)


class AsyncKeyLimitRepository(AsyncRepository):
    """Key limits for async code: `bus.key_limits`. The same methods, awaited."""

    set = awaited(KeyLimitRepository.set)
    override = awaited(KeyLimitRepository.override)
    end_override = awaited(KeyLimitRepository.end_override)
    overrides = awaited(KeyLimitRepository.overrides)
    delete = awaited(KeyLimitRepository.delete)
    list = awaited(KeyLimitRepository.list)
    lines = awaited(KeyLimitRepository.lines)
