"""Whether there are key limits at all. A worker without them imports no more than this."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus.flow.operation import Statement, Steps, operation

CHANNEL = "commandbus_keys"
"""Senders of commands with keys, and who changes a key limit, notify this channel, with the domain."""


@operation(atomic=False)
def exist(domains: Sequence[str]) -> Steps[bool]:
    """Has any of these domains a key limit? Index: key_limit_pkey."""
    rows = yield Statement(
        b"SELECT EXISTS (SELECT FROM commandbus.key_limit WHERE domain = ANY (%(domains)s::text[]))",
        {"domains": list(domains)},
    )
    found: bool = rows[0][0]
    return found
