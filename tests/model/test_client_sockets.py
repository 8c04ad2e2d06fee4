"""Whose session is it? Only what is certain counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from commandbus.model.client_sockets import ClientSession, Socket, Times, opened_by_handlers

SERVER = ("10.0.0.9", 5432)
TIMES = Times(spawned_at=100.0, read_at=200.0, asked_at=200.01, answered_at=200.02)


@dataclass(frozen=True)
class Scene:
    """A worker with one session of ours (port 1000) and one that a handler opened (port 2000)."""

    sockets: tuple[Socket, ...] = (Socket("10.0.0.1", 1000, *SERVER), Socket("10.0.0.1", 2000, *SERVER))
    sessions: tuple[ClientSession, ...] = (
        ClientSession(11, 111, "10.0.0.1", 1000, 90.0, is_named=True),
        ClientSession(22, 222, "10.0.0.1", 2000, 5.0, is_named=False),
    )
    server: tuple[str, int] | None = SERVER

    @property
    def found(self) -> list[int]:
        return [found.pid for found in opened_by_handlers(self.sockets, self.sessions, self.server, TIMES)]

    def having(self, index: int, **changes: Any) -> Scene:
        sessions = list(self.sessions)
        sessions[index] = sessions[index]._replace(**changes)
        return replace(self, sessions=tuple(sessions))


def test_a_session_that_a_handler_opened_is_found() -> None:
    assert Scene().found == [22]


def test_other_sessions_of_the_role_are_not() -> None:
    other = ClientSession(33, 333, "10.0.0.1", 3000, 5.0, is_named=False)
    namesake = ClientSession(44, 444, "10.0.0.2", 2000, 5.0, is_named=False)
    assert replace(Scene(), sessions=(*Scene().sessions, other, namesake)).found == [22]


@pytest.mark.parametrize(
    "scene",
    [
        Scene(server=None),  # a Unix socket
        Scene(server=("10.0.0.9", 6432)),  # another server than the one that was asked
        Scene(sockets=Scene().sockets[:1]),  # a port of somebody else
        Scene(sockets=Scene().sockets[1:]),  # ours comes from elsewhere: a pooler is in between
        Scene().having(0, address="192.168.0.1"),  # addresses are translated
        Scene().having(0, is_named=False),  # ours has ended: nothing proves that sockets and sessions match
        Scene().having(0, age_seconds=150.0),  # it began before the process
        Scene().having(1, age_seconds=150.0),
        Scene().having(1, age_seconds=100.015),  # perhaps before the process
        Scene().having(1, age_seconds=0.015),  # perhaps after the sockets were read
        Scene(sessions=(*Scene().sessions, ClientSession(55, 555, "10.0.0.1", 2000, 50.0, is_named=False))),
    ],
)
def test_in_doubt_nothing_is_found(scene: Scene) -> None:
    assert not [pid for pid in scene.found if pid != 11]
