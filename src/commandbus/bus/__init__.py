"""CommandBus and AsyncCommandBus: what an application holds. Two thin shells over one set of operations.

Each method builds an operation (`flow/`) and runs it on a pooled connection, or on the one that the caller lends
with `conn=`, whose transaction it then is part of. There is no logic here that the two could disagree about.
"""

from commandbus.bus.asynchronous import AsyncCommandBus
from commandbus.bus.base import whoami
from commandbus.bus.sync import CommandBus

__all__ = ["AsyncCommandBus", "CommandBus", "whoami"]
