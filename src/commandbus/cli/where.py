"""where: in which domain is what has this id? Ids are unique within a domain; people name the domain only if they
must."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus.bus import CommandBus
from commandbus.errors import BatchNotFoundError, InvalidOperationError, ProcessNotFoundError
from commandbus.flow import batch_look

MOST_DOMAINS = 1000


def of_batch(bus: CommandBus, batch_id: str, domain: str | None) -> str:
    """The domain of a batch: the one that was said, or the only one that has it."""
    if domain is not None:
        return domain
    page = bus.run(
        batch_look.query(domain=None, batch_id=batch_id, status=None, limit=MOST_DOMAINS, before_id=None)
    )
    if not page.items:
        raise BatchNotFoundError(None, batch_id)
    return _only([item.domain for item in page.items], f"a batch {batch_id!r}")


def of_process(bus: CommandBus, process_id: str, domain: str | None) -> str:
    """The domain of a process: the one that was said, or the only one that has it."""
    if domain is not None:
        return domain
    found = bus.query_processes(process_id=process_id, limit=MOST_DOMAINS)
    if not found:
        raise ProcessNotFoundError(f"no process {process_id!r} in any domain")
    return _only([item.domain for item in found], f"a process {process_id!r}")


def _only(domains: Sequence[str], what: str) -> str:
    if len(domains) > 1:
        raise InvalidOperationError(
            f"{len(domains)} domains have {what}: {', '.join(sorted(domains))}; say which with --domain"
        )
    return domains[0]
