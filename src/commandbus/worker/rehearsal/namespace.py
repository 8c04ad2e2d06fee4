"""Leaves the network: a new network namespace has no interface that is up, not even loopback.

Root may make one. Others make a user namespace with it, in which they keep their own ids. A container may forbid
both; then nothing has changed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

_NEWUSER: Final = 0x10000000
_NEWNET: Final = 0x40000000
_NETWORK: Final = "/proc/self/ns/net"


def leave_network() -> str | None:
    """Give this process, which must have one thread, a network of its own. Returns None, or why that failed."""
    before = os.readlink(_NETWORK)
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEWNET) != 0:
        if libc.unshare(_NEWUSER | _NEWNET) != 0:
            return f"this system does not allow a network namespace: {os.strerror(ctypes.get_errno())}"
        _keep_ids(user, group)
    return None if os.readlink(_NETWORK) != before else "the network namespace has not changed"


def _keep_ids(user: int, group: int) -> None:
    """In the new user namespace this process stays who it is, so that it can read its files."""
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    except OSError:
        return  # it may not be able to read its files then, and says so
