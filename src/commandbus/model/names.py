"""Which names are allowed, and what is said about those that are not.

PGMQ lower-cases table names and allows 47 characters for a queue; a domain's queue is `{domain}__commands`, so
a domain has at most 37. A name that passes here can be put into SQL as an identifier without quoting; nothing
else may be.
"""

from __future__ import annotations

import re
from uuid import UUID

from commandbus.errors import InvalidCommandError

MAX_DOMAIN_LENGTH = 37
MAX_QUEUE_LENGTH = 47
MAX_TYPE_LENGTH = 200
MAX_ID_LENGTH = 255
ADDRESSES = "__commandbus_addresses__"
"""The attribute of a registered handler that lists the (domain, command_type)s it is for."""

_DOMAIN = re.compile(r"[a-z][a-z0-9_]{0,36}\Z")
_QUEUE = re.compile(r"[a-z][a-z0-9_]{0,46}\Z")
_NOT_IN_PGMQ = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff$;'\"%]|--")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_UNSTORABLE = re.compile(r"[\x00\ud800-\udfff]")


def check_domain(domain: object) -> str:
    """Return the domain, or say what is wrong with it."""
    if isinstance(domain, str) and _DOMAIN.match(domain):
        return domain
    raise InvalidCommandError(
        f"domain {shown(domain)} is not a domain name: use a lower-case letter followed by lower-case letters, "
        f"digits and underscores, at most {MAX_DOMAIN_LENGTH} characters{_hint(domain)}"
    )


def queue_of(domain: object) -> str:
    """The PGMQ queue of a domain (its table is `pgmq.q_<queue>`)."""
    return f"{check_domain(domain)}__commands"


def is_domain_queue(queue: str) -> bool:
    """Is this the queue of a domain's commands?"""
    return queue.lower().endswith("__commands")


def domain_of_queue(queue: str) -> str | None:
    """The domain whose commands are in this queue; None if it is no such queue."""
    return queue.lower().removesuffix("__commands") if is_domain_queue(queue) else None


def is_queue(queue: object) -> bool:
    """Is this a name that a PGMQ queue can have?"""
    return isinstance(queue, str) and _QUEUE.match(queue) is not None


def check_queue(queue: object, *, what: str = "reply_to") -> str:
    """Return the name of a PGMQ queue, such as a reply queue."""
    if isinstance(queue, str) and is_queue(queue):
        return queue
    raise InvalidCommandError(
        f"{what} {shown(queue)} is not a queue name: use a lower-case letter followed by lower-case letters, "
        f"digits and underscores, at most {MAX_QUEUE_LENGTH} characters{_hint(queue)}"
    )


def check_pgmq_queue(queue: object) -> str:
    """Return the name of any PGMQ queue, also of one that another client made ("my-queue"), by PGMQ's rules."""
    if isinstance(queue, str) and 0 < len(queue) <= MAX_QUEUE_LENGTH and not _NOT_IN_PGMQ.search(queue):
        return queue
    raise InvalidCommandError(
        f"queue {shown(queue)} is not a queue name: use 1 to {MAX_QUEUE_LENGTH} characters without quotes, "
        f"semicolons, dollar and percent signs and double hyphens"
    )


def pgmq_table(queue: str, *, kind: str = "q") -> str:
    """The quoted name of a queue's table (`kind="a"`: of its archive). PGMQ makes table names lower-case."""
    return f'"{kind}_{check_pgmq_queue(queue).lower()}"'


def check_type(command_type: object) -> str:
    """Return the command type: any printable text of 1 to 200 characters."""
    return _check_text(command_type, "command_type", MAX_TYPE_LENGTH)


def check_id(value: object, what: str = "command_id") -> str:
    """Return an identifier that a caller chose: any printable text of 1 to 255 characters."""
    return _check_text(value, what, MAX_ID_LENGTH)


def to_new_id(value: object, what: str = "command_id") -> str:
    """The same, and a UUID will do."""
    return check_id(str(value) if isinstance(value, UUID) else value, what)


def to_id(value: object, what: str = "command_id") -> str:
    """An identifier for a look-up: whatever text a row can have, because somebody may have written it with SQL."""
    text = str(value) if isinstance(value, UUID) else value
    if isinstance(text, str) and text and not _UNSTORABLE.search(text):
        return text
    raise InvalidCommandError(f"{what} {shown(value)} is not valid")


def check_count(value: object, what: str, *, least: int = 1, most: int = 10_000) -> int:
    """Return a whole number within bounds, such as the size of a page."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return value
    raise InvalidCommandError(f"{what} must be a whole number from {least} to {most}, not {shown(value)}")


def _check_text(value: object, what: str, longest: int) -> str:
    if isinstance(value, str) and 0 < len(value) <= longest and not _CONTROL.search(value):
        return value
    raise InvalidCommandError(
        f"{what} {shown(value)} is not valid: use text of 1 to {longest} characters without control characters"
    )


def shown(value: object) -> str:
    """A value for an error message: one short line, whatever it is."""
    try:
        text = ascii(value)
    except Exception:  # noqa: BLE001 - a broken repr, or an int of more digits than Python prints
        return f"of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}… ({len(text)} characters)"


def _hint(value: object) -> str:
    if isinstance(value, str) and value != value.lower() and _DOMAIN.match(value.lower()):
        return f" (did you mean {value.lower()!r}?)"
    return ""
