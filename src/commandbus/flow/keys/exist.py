"""Whether there are key limits at all. A worker without them imports no more than this."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus.flow.operation import Statement, Steps, operation

CHANNEL = "commandbus_keys"
"""Senders of commands with keys, and who changes a key limit, notify this channel, with the domain."""


@operation(atomic=False)
def exist(domains: Sequence[str]) -> Steps[bool]:
    """Has any of these domains a key limit, or commands in line? Indexes: key_limit_pkey, keyed_line."""
    rows = yield Statement(
        b"SELECT EXISTS (SELECT FROM commandbus.key_limit WHERE domain = ANY (%(domains)s::text[])) OR EXISTS ("
        b"SELECT FROM commandbus.keyed WHERE domain = ANY (%(domains)s::text[]) AND state IN ('NEW', 'WAITING'))",
        {"domains": list(domains)},
    )
    found: bool = rows[0][0]
    return found
