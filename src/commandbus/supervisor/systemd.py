"""Tell systemd how the supervisor is doing (sd_notify), with nothing but a socket.

Without NOTIFY_SOCKET in the environment, every call does nothing. If the socket is gone or does not take a
message, that is logged once, and again only if it has worked in between. No call raises. A worker must not speak
for its supervisor, so its environment does not contain the `SERVICE_VARIABLES`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Final

from commandbus.logger import safe_logger

logger = safe_logger("commandbus.supervisor")

SERVICE_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
SEND_SECONDS: Final = 1.0


class Notifier:
    """Speaks to the service manager that the environment names, if it names one."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self._address = self._environ.get("NOTIFY_SOCKET", "")
        self._is_failing = False

    @property
    def is_on(self) -> bool:
        """Is there a service manager?"""
        return bool(self._address)

    def ready(self, text: str | None = None) -> bool:
        """Report that the supervisor is up, or that the reload is done; `text` is its status."""
        return self._send("READY=1", text)

    def still_starting(self, seconds: float, text: str) -> bool:
        """Report that the start goes on: systemd's TimeoutStartSec must not end it for so many seconds from
        now."""
        return self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1_000_000)}", text)

    def watchdog(self) -> bool:
        """Report that the supervisor is alive. Call it at least every half of `watchdog_seconds()`."""
        return self._send("WATCHDOG=1")

    def stopping(self, text: str | None = None) -> bool:
        """Report that the supervisor has begun to stop."""
        return self._send("STOPPING=1", text)

    def reloading(self, text: str | None = None) -> bool:
        """Report that the supervisor has begun to reload; `ready()` ends that."""
        return self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", text)

    def status(self, text: str) -> bool:
        """Set the line that `systemctl status` shows."""
        return self._send("", text)

    def watchdog_seconds(self) -> float | None:
        """After how many seconds of silence systemd considers this process dead; None if systemd does not watch
        it."""
        limit, pid = self._environ.get("WATCHDOG_USEC"), self._environ.get("WATCHDOG_PID")
        if not limit or (pid and pid != str(os.getpid())):
            return None
        if not (limit.isascii() and limit.isdigit()):
            logger.warning("WATCHDOG_USEC is %r, not a number of microseconds; systemd gets no heartbeat", limit)
            return None
        return int(limit) / 1_000_000 or None

    def _send(self, message: str, text: str | None = None) -> bool:
        """Send a message. Returns whether it was sent. Waits for a full queue for SEND_SECONDS at most."""
        if not self._address:
            return False
        if text is not None:
            message = f"{message}\nSTATUS={' '.join(text.split())}".lstrip("\n")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_SECONDS)
                sender.sendto(message.encode(errors="backslashreplace"), _path(self._address))
        except (OSError, ValueError) as error:
            if not self._is_failing:
                logger.warning("the service manager cannot be told (NOTIFY_SOCKET %s): %s", self._address, error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True


def _path(address: str) -> str:
    """`@name` is a name in the abstract namespace, which begins with a NUL; otherwise it is a path."""
    if address.startswith("@"):
        return "\0" + address[1:]
    if not address.startswith("/"):
        raise ValueError("only paths and abstract names (@…) can be used")
    return address
