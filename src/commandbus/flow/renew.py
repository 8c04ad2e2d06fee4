"""renew: extend the leases of attempts that are alive, and learn which were lost."""

from __future__ import annotations

from collections.abc import Sequence

from commandbus import sql
from commandbus.flow.statement import Statement, Steps, operation


@operation(atomic=False)
def renew(
    domain: str, worker: str, held: Sequence[tuple[int, int]], *, lease_seconds: float
) -> Steps[list[tuple[int, int]]]:
    """Extend the leases of these (msg_id, read_ct); answers those whose fence is gone."""
    rows = yield Statement(
        sql.text("renew", domain=domain),
        {
            "worker": worker,
            "msg_ids": [msg_id for msg_id, _ in held],
            "read_cts": [read_ct for _, read_ct in held],
            "lease": lease_seconds,
        },
    )
    return [(msg_id, read_ct) for msg_id, read_ct in rows]
