"""find_id: what an id names, among commands, batches, processes, workers and correlation ids, in one statement."""

from __future__ import annotations

from itertools import starmap
from typing import Literal

from commandbus import sql
from commandbus.flow.commands.domains import all_domains
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class FoundId:
    """One thing that has an id. Workers belong to no domain (`domain` is ""). For a correlation id, `domain` is
    that of the newest command with it."""

    kind: Literal["command", "batch", "process", "worker", "correlation"]
    domain: str
    id: str


@operation(atomic=False)
def find_id(id_: str, domain: str | None = None) -> Steps[list[FoundId]]:
    """All that have this id, in this domain or in any."""
    text = names.to_id(id_, "id")
    domains = [names.check_domain(domain)] if domain is not None else (yield from all_domains())
    rows = yield Statement(sql.text("commands/find_id"), {"id": text, "domains": domains})
    return list(starmap(FoundId, rows))
