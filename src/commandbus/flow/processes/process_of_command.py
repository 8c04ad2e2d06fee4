"""Which process a command belongs to, and as which step. Reads only, locks nothing."""

from __future__ import annotations

from commandbus import sql
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.flow.processes.inspect import WHOLE, Bounds, get_process
from commandbus.model import names
from commandbus.model.process import ProcessRecord
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class PartOfProcess:
    """`step` is the number of the step in the process's trail; 0 is a message to the process itself."""

    domain: str
    process_id: str
    step: int
    name: str | None
    is_compensation: bool


@operation(atomic=False)
def process_of(command: int) -> Steps[PartOfProcess | None]:
    """The part of a command (by its internal id) in a process; None if it has none, or the process was deleted."""
    rows = yield Statement(sql.text("processes/process_of"), {"id": command})
    if not rows:
        return None
    domain, process_id, step, name = rows[0]
    return PartOfProcess(domain, process_id, abs(step or 0), name, (step or 0) < 0)


@operation(atomic=True)
def get_process_of(domain: str, command_id: str, *, bounds: Bounds = WHOLE) -> Steps[ProcessRecord | None]:
    """The process that a command, given by its name, belongs to; None if it belongs to none."""
    rows = yield Statement(
        b"SELECT id FROM commandbus.command WHERE domain = %(domain)s AND command_id = %(command_id)s",
        {"domain": names.check_domain(domain), "command_id": names.to_id(command_id)},
    )
    for (id_,) in rows:
        part = yield from process_of(id_).steps
        if part is not None:
            return (yield from get_process(part.domain, part.process_id, bounds=bounds).steps)
    return None
