"""CommandBus and AsyncCommandBus, which applications use: two thin shells over one set of operations.

A method builds an operation (`flow/`) and runs it on a pooled connection, or on the connection that the caller
lends with `conn=`. Then the operation is part of the caller's transaction. The two shells contain no logic of
their own. Their methods for commands, batches, processes and queues are short names for methods of their parts
(`data_access.py`).
"""

from commandbus.bus.asynchronous import AsyncCommandBus
from commandbus.bus.base import whoami
from commandbus.bus.sync import CommandBus

__all__ = ["AsyncCommandBus", "CommandBus", "whoami"]
