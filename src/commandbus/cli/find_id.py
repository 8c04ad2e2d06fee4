"""Finds the command, batch or process that a person means by the id that they typed.

Ids are unique within a domain; people name the domain only if they must. An id may be typed as the command line
has printed it, with escapes such as `\\x1b` (`model/safe_text.py`). This module looks for it as it was typed, and
with its escapes decoded. If both exist, nothing is done: the error says how to name each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from commandbus.bus import CommandBus
from commandbus.errors import BatchNotFoundError, InvalidOperationError, ProcessNotFoundError
from commandbus.flow.batches import inspect as batch_look
from commandbus.model.command import CommandRecord
from commandbus.model.safe_text import unescaped

MOST_DOMAINS = 1000


def of_command(bus: CommandBus, domain: str, typed: str) -> str:
    """The command_id of a command of this domain. If there is no such command, returns the id as typed."""
    record = find_command(bus, domain, typed) if _is_special(typed) else None
    return typed if record is None else record.command_id


def find_command(bus: CommandBus, domain: str, typed: str) -> CommandRecord | None:
    """A command by its id, or else by its internal id (`#123`)."""
    found = _candidates(typed, lambda command_id: bus.get_command(domain, command_id))
    if len(found) > 1:
        numbers = " or ".join(f"'#{record.id}'" for record in found)
        raise InvalidOperationError(
            f"domain {domain} has a command with the id {typed!a} and one whose id is shown in the same way; "
            f"give the internal id: {numbers}"
        )
    if found:
        return found[0]
    record = numbered_command(bus, typed)
    return record if record is not None and record.domain == domain else None


def numbered_command(bus: CommandBus, typed: str) -> CommandRecord | None:
    """The command with this internal id; None if there is none, or if `#123` was not typed."""
    number = re.fullmatch(r"#(\d{1,18})", typed, re.ASCII)
    if number is None:
        return None
    page = bus.query_commands(limit=1, cursor=str(int(number[1]) + 1))
    return page.items[0] if page.items and page.items[0].id == int(number[1]) else None


def of_batch(bus: CommandBus, typed: str, domain: str | None) -> tuple[str, str]:
    """The domain and the id of a batch: the given domain, or the only one that has such a batch."""

    def look(batch_id: str) -> list[str] | None:
        page = bus.run(batch_look.query(domain=domain, batch_id=batch_id, status=None, limit=MOST_DOMAINS))
        return [item.domain for item in page.items] or None

    if domain is not None and not _is_special(typed):
        return domain, typed
    found = _only_id(typed, look, "batch")
    if found is None and domain is not None:
        return domain, typed
    if found is None:
        raise BatchNotFoundError(None, typed)
    batch_id, domains = found
    return _only(domains, f"a batch {batch_id!a}"), batch_id


def of_process(bus: CommandBus, typed: str, domain: str | None) -> tuple[str, str]:
    """The domain and the id of a process: the given domain, or the only one that has such a process."""

    def look(process_id: str) -> list[str] | None:
        found = bus.query_processes(domain=domain, process_id=process_id, limit=MOST_DOMAINS)
        return [item.domain for item in found] or None

    if domain is not None and not _is_special(typed):
        return domain, typed
    found = _only_id(typed, look, "process")
    if found is None and domain is not None:
        return domain, typed
    if found is None:
        raise ProcessNotFoundError(f"no process {typed!a} in any domain")
    process_id, domains = found
    return _only(domains, f"a process {process_id!a}"), process_id


def _is_special(typed: str) -> bool:
    return typed.startswith("#") or unescaped(typed) != typed


def _candidates(typed: str, look: Callable[[str], CommandRecord | None]) -> list[CommandRecord]:
    return [record for command_id in dict.fromkeys((typed, unescaped(typed))) if (record := look(command_id))]


def _only_id(typed: str, look: Callable[[str], list[str] | None], what: str) -> tuple[str, list[str]] | None:
    found = [(id_, domains) for id_ in dict.fromkeys((typed, unescaped(typed))) if (domains := look(id_))]
    if len(found) > 1:
        raise InvalidOperationError(
            f"there is a {what} with the id {typed!a} and one whose id is shown in the same way; use the Python "
            f"API, which takes ids as they are"
        )
    return found[0] if found else None


def _only(domains: Sequence[str], what: str) -> str:
    if len(domains) > 1:
        raise InvalidOperationError(
            f"{len(domains)} domains have {what}: {', '.join(sorted(domains))}; choose one with --domain"
        )
    return domains[0]
