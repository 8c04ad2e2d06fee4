"""sd_notify: what systemd hears, through a real socket, and that nobody suffers when it is gone."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from commandbus.supervisor.systemd import SERVICE_VARIABLES, Notifier


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short name: a socket's path has room for 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="cb-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind("\0" + address[1:] if address.startswith("@") else address)
    listener.settimeout(5)
    return listener


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, place: Path) -> str:
    return str(place / "notify") if request.param == "path" else f"@commandbus-{uuid.uuid4().hex}"


def test_each_message_is_as_systemd_wants_it(address: str) -> None:
    with closing(listening(address)) as systemd:
        notifier = Notifier({"NOTIFY_SOCKET": address})

        def heard() -> list[str]:
            return systemd.recv(4096).decode().split("\n")

        assert notifier.is_on
        assert notifier.ready()
        assert heard() == ["READY=1"]
        assert notifier.ready("2 workers, 8 slots")
        assert heard() == ["READY=1", "STATUS=2 workers, 8 slots"]
        assert notifier.watchdog()
        assert heard() == ["WATCHDOG=1"]
        assert notifier.stopping("3 attempts run")
        assert heard() == ["STOPPING=1", "STATUS=3 attempts run"]
        assert notifier.status("two\nlines  \x0b and a READY=1")
        assert heard() == ["STATUS=two lines and a READY=1"], "a status cannot smuggle in another message"
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        assert notifier.reloading()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        first, second = heard()
        assert first == "RELOADING=1"
        assert second.startswith("MONOTONIC_USEC=")
        assert before <= int(second.partition("=")[2]) <= after


def test_without_a_service_manager_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    for environ in ({}, {"NOTIFY_SOCKET": ""}):
        notifier = Notifier(environ)
        said = [
            notifier.ready(),
            notifier.watchdog(),
            notifier.stopping(),
            notifier.reloading(),
            notifier.status("x"),
        ]
        assert (notifier.is_on, said) == (False, [False] * 5)
    assert caplog.records == []


def test_a_socket_that_is_gone_is_logged_once_until_it_is_back(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = str(place / "notify")
    notifier = Notifier({"NOTIFY_SOCKET": address})
    assert [notifier.watchdog() for _ in range(5)] == [False] * 5
    (said,) = caplog.records
    assert address in said.getMessage()
    assert said.levelno == logging.WARNING
    with closing(listening(address)) as systemd:
        assert notifier.watchdog()
        assert systemd.recv(100) == b"WATCHDOG=1"
    assert [notifier.watchdog() for _ in range(5)] == [False] * 5  # bound, but nobody reads
    assert len(caplog.records) == 2


@pytest.mark.parametrize("address", ["/" + "x" * 300, "relative/path", "vsock:2:1234", "/a\0b"])
def test_an_address_that_cannot_be_used_raises_nothing(address: str, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address})
    assert not notifier.ready()
    assert not notifier.ready()
    assert len(caplog.records) == 1


def test_a_service_manager_that_does_not_read_is_not_waited_for_long(address: str) -> None:
    with closing(listening(address)):
        notifier = Notifier({"NOTIFY_SOCKET": address})
        before = time.monotonic()
        while notifier.watchdog():
            assert time.monotonic() - before < 20
        assert time.monotonic() - before < 10


def test_a_status_of_broken_text_is_sent_all_the_same(address: str) -> None:
    with closing(listening(address)) as systemd:
        assert Notifier({"NOTIFY_SOCKET": address}).status("a\udc80b")
        assert systemd.recv(100) == b"STATUS=a\\udc80b"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}, 0.5),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "٣"}, None),
    ],
)
def test_how_long_systemd_waits(environ: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environ).watchdog_seconds() == seconds


def test_by_default_the_environment_is_this_processs(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    with closing(listening(address)) as systemd:
        notifier = Notifier()
        assert notifier.ready()
        assert systemd.recv(100) == b"READY=1"
        assert notifier.watchdog_seconds() == 1.0
    assert set(SERVICE_VARIABLES) == {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
