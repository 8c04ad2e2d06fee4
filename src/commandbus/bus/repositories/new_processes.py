"""Operations that start processes, made from a caller's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from commandbus.errors import InvalidCommandError
from commandbus.flow.operation import Operation
from commandbus.lazy import lazy
from commandbus.model import names
from commandbus.model.durations import Duration

if TYPE_CHECKING:
    from commandbus.bus.base import BusBase
    from commandbus.flow.batches import batches_of_processes as process_batch
    from commandbus.flow.batches import create as batch
    from commandbus.flow.processes import start as process_start
    from commandbus.flow.processes.start import Starting
    from commandbus.model import process as model
    from commandbus.model.batch import CreatedBatch
    from commandbus.model.process import NewProcess, StartedProcess
    from commandbus.processes import manager as managers
    from commandbus.processes.manager import BaseProcessManager
else:
    batch = lazy("commandbus.flow.batches.create")
    process_batch = lazy("commandbus.flow.batches.batches_of_processes")
    process_start = lazy("commandbus.flow.processes.start")
    model = lazy("commandbus.model.process")
    managers = lazy("commandbus.processes.manager")

Manager: TypeAlias = "BaseProcessManager[Any] | str"
"""A process manager, or only the name of its process_type."""


Items: TypeAlias = "Iterable[NewProcess | Mapping[str, object]]"


def start(bus: BusBase, manager: Manager, items: Items, domain: str | None) -> Operation[list[StartedProcess]]:
    """Start processes. They are checked one by one, as they are sent."""
    of_domain, process_type, starting = _prepare(bus, manager, items, domain)
    return process_start.start(of_domain, process_type, starting)


def create_batch(
    bus: BusBase, manager: Manager, items: Items, domain: str | None, **definition: Any
) -> Operation[CreatedBatch]:
    """Create a batch of processes."""
    of_domain, process_type, starting = _prepare(bus, manager, items, domain)
    made = batch.define(of_domain, holds="processes", max_bytes=bus.settings.max_payload_bytes, **definition)
    return process_batch.create(made, process_type, starting)


def add_to_batch(
    bus: BusBase, manager: Manager, batch_id: str, items: Items, domain: str | None
) -> Operation[int]:
    """Start processes in an open batch."""
    of_domain, process_type, starting = _prepare(bus, manager, items, domain)
    return process_batch.add(of_domain, batch_id, process_type, starting)


def _prepare(
    bus: BusBase, manager: Manager, items: Items, domain: str | None
) -> tuple[str, str, Iterator[Starting]]:
    of_domain, process_type, deadline = _address(manager, domain)
    limit = bus.settings.max_payload_bytes

    def prepare(item: NewProcess | Mapping[str, object]) -> Starting:
        new = bus._plain(process_start.to_new_process(item))
        if not isinstance(manager, str):
            new = managers.check_new(manager, new)
        return process_start.prepare_start(new, deadline=deadline, max_bytes=limit)

    return of_domain, process_type, _numbered(items, prepare)


def _numbered(items: Items, prepare: Callable[[Any], Starting]) -> Iterator[Starting]:
    """Prepare them one by one. An error says which of them is wrong, counted from 1."""
    is_one = isinstance(items, list) and len(items) == 1
    for number, item in enumerate(items, 1):
        try:
            prepared = prepare(item)
        except InvalidCommandError as error:
            if is_one:
                raise
            raise InvalidCommandError(f"process {number} of those to be started: {error}") from None
        yield prepared


def _address(manager: Manager, domain: str | None) -> tuple[str, str, Duration | None]:
    if isinstance(manager, str):
        return names.check_domain(domain or model.DEFAULT_DOMAIN), names.check_type(manager), None
    managers.check_manager(manager)
    return names.check_domain(domain or manager.domain), manager.process_type, manager.deadline
