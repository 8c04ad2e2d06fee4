"""Which database sessions a process opened itself: identified for certain by its sockets, or not at all.

A session that a handler opened itself, past its context, goes on when its worker is killed, until the server
notices. It can be ended only where nobody else can be meant. All of this must hold:

- it is a session over TCP, whose client's address and port are those of a socket that the process had open;
- the other end of that socket is this very server;
- it began while the process lived, and before its sockets were read;
- no other session has the same client's address and port;
- the process's sessions that we know by name are found by their sockets, too, so that no pooler and no translation
  of addresses is in between.

Nothing here reads a clock, a process or a database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Socket(NamedTuple):
    """An open TCP connection of a process, as its own kernel lists it."""

    address: str
    port: int
    server_address: str
    server_port: int


class ClientSession(NamedTuple):
    """A session of our role, as the server lists it. `is_named`: one of the worker's own, by its name."""

    pid: int
    started: int
    address: str
    port: int
    age_seconds: float
    is_named: bool


class Times(NamedTuple):
    """When the process was started, when its sockets were read, when the server was asked and when it answered, by
    one clock."""

    spawned_at: float
    read_at: float
    asked_at: float
    answered_at: float

    def include(self, session: ClientSession) -> bool:
        """Did it begin in between, at whichever moment the server looked?"""
        earliest, latest = self.asked_at - session.age_seconds, self.answered_at - session.age_seconds
        return self.spawned_at <= earliest and latest <= self.read_at


def opened_by_handlers(
    sockets: Sequence[Socket],
    sessions: Sequence[ClientSession],
    server: tuple[str, int] | None,
    times: Times,
) -> list[ClientSession]:
    """The sessions that are certainly the process's own, and not known by their name."""
    clients = {socket[:2] for socket in sockets if socket[2:] == server}
    in_time = [session for session in sessions if times.include(session)]
    named = [session for session in in_time if session.is_named]
    if not named or any(session[2:4] not in clients for session in named):
        return []
    owners = Counter(session[2:4] for session in sessions)
    return [
        session
        for session in in_time
        if not session.is_named and session[2:4] in clients and owners[session[2:4]] == 1
    ]
