"""The values of a limit that a permit store needs. `flow.limits.LimitRow` has all of it."""

from __future__ import annotations

from typing import Protocol


class LimitValues(Protocol):
    """A limit's name, and what it allows."""

    @property
    def name(self) -> str: ...

    @property
    def environment(self) -> str: ...

    @property
    def concurrency(self) -> int | None: ...

    @property
    def per_second(self) -> float | None: ...

    @property
    def burst(self) -> int: ...

    @property
    def shared(self) -> bool: ...

    @property
    def lease(self) -> float: ...
