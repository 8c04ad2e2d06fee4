"""Handle: a receipt that knows the bus that gave it, so that its owner can wait for what was sent.

The bus is no part of the value: two receipts of one command are equal whichever bus gave them, and it is neither
shown nor pickled. A receipt keeps its bus alive; a bus keeps no receipt.
"""

from __future__ import annotations

from typing import Any, TypeVar

from commandbus.errors import InvalidOperationError


class Handle:
    """A part of SentCommand and CreatedBatch, which are tuples."""

    _bus: Any = None

    def _waiting_bus(self) -> Any:
        if self._bus is None:
            raise InvalidOperationError(
                f"this {type(self).__name__} does not know its bus, because it was copied, unpickled or made by "
                f"hand; wait with a method of a bus: bus.wait(sent), bus.wait_for_batch(domain, batch_id)"
            )
        return self._bus

    def __getstate__(self) -> None:
        """Nothing but the tuple is pickled."""


H = TypeVar("H", bound=Handle)


def given_by(bus: object, receipt: H) -> H:
    """Returns the same receipt, which waits with this bus from now on."""
    receipt._bus = bus
    return receipt
