"""The open TCP connections of a process, from /proc. None if the process is gone or not ours."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from commandbus.model.client_sockets import Socket

_ESTABLISHED: Final = "01"
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")


def open_sockets(pid: int) -> list[Socket]:
    """The connections that are established now. Both tables belong to the process's own network namespace."""
    folder = Path(f"/proc/{pid}")
    inodes = _inodes(folder / "fd")
    if not inodes:
        return []
    return [socket for table in ("tcp", "tcp6") for socket in _listed(folder / "net" / table, inodes)]


def _inodes(files: Path) -> set[str]:
    found = set()
    try:
        for entry in files.iterdir():
            try:
                target = str(entry.readlink())
            except OSError:
                continue  # closed in the meantime
            if socket := _SOCKET.fullmatch(target):
                found.add(socket[1])
    except OSError:
        return set()
    return found


def _listed(table: Path, inodes: set[str]) -> Iterator[Socket]:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _ESTABLISHED and fields[9] in inodes:
            yield Socket(*_end(fields[1]), *_end(fields[2]))


def _end(text: str) -> tuple[str, int]:
    """`0100007F:1F90` is 127.0.0.1 and 8080: words of four bytes in the machine's order, the port as a number."""
    address, _, port = text.partition(":")
    raw = bytes.fromhex(address)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    found = ipaddress.ip_address(raw)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), int(port, 16)
