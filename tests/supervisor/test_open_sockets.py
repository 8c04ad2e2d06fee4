"""The sockets of a process, as the kernel lists them."""

from __future__ import annotations

import os
import socket

import pytest

from commandbus.model.client_sockets import Socket
from commandbus.supervisor.open_sockets import open_sockets


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_sockets_of_a_process(family: int, address: str) -> None:
    with socket.socket(family) as listener, socket.socket(family) as client:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip("this machine has no such addresses")
        listener.listen()
        client.connect(listener.getsockname())
        mine = Socket(*client.getsockname()[:2], *listener.getsockname()[:2])
        assert mine in open_sockets(os.getpid())
    assert mine not in open_sockets(os.getpid())


def test_a_mapped_address_is_the_plain_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as client:
        try:
            client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        except OSError:
            pytest.skip("this machine has no such addresses")
        port = client.getsockname()[1]
        assert Socket("127.0.0.1", port, *listener.getsockname()) in open_sockets(os.getpid())


def test_a_process_that_is_gone_has_none() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert open_sockets(pid) == []
