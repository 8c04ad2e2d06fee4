"""How a limit client is made from settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from commandbus.errors import ConfigurationError
from commandbus.model.limit import Limit
from commandbus.settings import Settings

if TYPE_CHECKING:
    from commandbus.limits.client import LimitClient
    from commandbus.limits.stores.choose import ExternalStore


def make_limit_client(
    settings: Settings, owner: str, *, on_error: Callable[[BaseException], None] | None = None
) -> LimitClient:
    """Makes a limit client. If Redis is configured, it can keep the permits of limits there."""
    from commandbus.limits.client import LimitClient  # most programs have no limits

    external = None
    if settings.redis_url is not None:

        def external() -> ExternalStore:
            from commandbus.limits.stores.redis.store import (
                RedisPermitStore,  # only users of Redis need its library
            )

            return RedisPermitStore(settings, owner)

    return LimitClient(settings, owner, external=external, on_error=on_error)


def settle_limits(declared: Iterable[Limit], settings: Settings) -> list[Limit]:
    """Each limit once, without its breaker if breakers are off. Two different limits with one name are an
    error."""
    found: dict[str, Limit] = {}
    for limit in declared:
        if found.setdefault(limit.name, limit) != limit:
            raise ConfigurationError(
                f"limit {limit.name!r} is declared twice, differently: {found[limit.name]} and {limit}"
            )
    return [settings.declared(limit) for limit in found.values()]
