"""list_failures: failures that are alike, counted together. Reads only, locks nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from commandbus import sql
from commandbus.errors import InvalidCommandError
from commandbus.flow.commands.inspect import WORKER_ALIVE_SECONDS
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.model.count import MOST_COUNTED, capped
from commandbus.model.page import Page
from commandbus.quick_dataclass import dataclass

MOST_FINGERPRINTS: Final = 500
NEWEST_COMMANDS: Final = 5_000
_EVER: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failures of one command type that are alike: the same error type, error code, and innermost frame of the
    application's own code (`own_frame`).

    `count` is how many attempts failed like this since the moment asked for, and `in_troubleshooting` how many
    commands with this failure need a person; both are counted up to 10,000. `first_seen` and `last_seen` are of
    all that is stored. `error` and `command_id` are of the last one. `share` is how much of the type's attempts
    failed like this, among the newest 5,000 commands; None if none of these has the type.

    `since_version` is the version of the code that failed like this first, if its worker is still known. `is_new`:
    a running worker has this version, and another version was there before it.
    """

    fingerprint: str
    domain: str
    command_type: str
    error_type: str | None
    error_code: str | None
    error: str | None
    own_frame: str | None
    command_id: str
    count: int
    first_seen: datetime
    last_seen: datetime
    since_version: str | None
    last_version: str | None
    in_troubleshooting: int
    share: float | None
    is_new: bool = False


@operation(atomic=False)
def list_failures(
    domain: str | None = None,
    command_type: str | None = None,
    *,
    since: datetime | None = None,
    in_troubleshooting: bool = False,
    limit: int = 50,
) -> Steps[Page[FailureGroup]]:
    """Failures that are alike, the one that was seen last first. `since` leaves out those that were not seen since
    then. With `in_troubleshooting`, only failures of commands that need a person."""
    if since is not None and (not isinstance(since, datetime) or since.tzinfo is None):
        raise InvalidCommandError(f"since must be a datetime with a time zone, not {names.shown(since)}")
    params = {
        "domain": None if domain is None else names.check_domain(domain),
        "command_type": None if command_type is None else names.check_type(command_type),
        "since": since or _EVER,
        "limit": names.check_count(limit, "limit"),
        "most": MOST_COUNTED + 1,
        "prints": MOST_FINGERPRINTS,
        "newest": NEWEST_COMMANDS,
    }
    table = "tsq" if in_troubleshooting else "attempt"
    rows = yield Statement(sql.text("commands/failures", failed_in=table), params)
    versions = yield Statement(sql.text("workers/code_versions"), {"alive": WORKER_ALIVE_SECONDS})
    began = {version: at for version, at, _ in versions}
    running = {version for version, _, is_running in versions if is_running}
    found = []
    for row in rows:
        group = FailureGroup(*(*row, _is_new(row[11], began, running)))
        waiting = capped(group.in_troubleshooting)
        found.append(replace(group, count=capped(group.count), in_troubleshooting=waiting))
    return Page(found)


def _is_new(version: str | None, began: dict[str, datetime], running: set[str]) -> bool:
    return version in running and any(at < began[version] for at in began.values())
