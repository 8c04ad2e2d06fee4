"""JSON messages over a socket pair, between a worker and its child process.

A message is its length (4 bytes) and its JSON text. It is JSON and bounded in size because the other side may run
faulty C code: no message is executed, unpickled, or trusted without a check.

The worker's end never blocks: what does not fit into the socket waits here, and `wake` tells the thread that reads
this channel to `flush` it. The child's end blocks, with a lock around each message.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Final

Message = dict[str, Any]

_LENGTH: Final = struct.Struct("!I")
_CHUNK: Final = 1 << 16
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class ChannelError(Exception):
    """The other side does not keep to the rules."""


def frame(message: Message) -> bytes:
    """A message as it goes over the socket; lone surrogates (in an error's text) pass as they are."""
    text = _encode(message).encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(text)) + text


class Inbox:
    """Bytes in, messages out."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    def add(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete."""
        self._bytes += data
        found = []
        at = 0
        while len(self._bytes) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, at)
            if length > self._max_bytes:
                raise ChannelError(f"a message of {length} bytes, more than {self._max_bytes}")
            end = at + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            found.append(_decode(bytes(self._bytes[at + _LENGTH.size : end])))
            at = end
        del self._bytes[:at]
        return found


def _decode(text: bytes) -> Message:
    try:
        message = json.loads(text.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ChannelError(f"a message that is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ChannelError(f"a message that is a {type(message).__name__}, not an object")
    return message


class WorkerEnd:
    """The worker's end: any thread may send, one thread receives and flushes; nothing blocks."""

    def __init__(self, sock: socket.socket, *, max_bytes: int, wake: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._wake = wake
        self._inbox = Inbox(max_bytes)
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._is_closed = False
        self.is_at_end = False  # the other side has closed its end, or is gone

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Does something wait for room in the socket?"""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send, or keep it until there is room. If the process is gone, nothing is sent."""
        data = frame(message)
        with self._lock:
            if self._is_closed:
                return
            self._unsent += data
            self._flush()
            left = bool(self._unsent)
        if left:
            self._wake()

    def flush(self) -> None:
        """Send what had no room."""
        with self._lock:
            if not self._is_closed:
                self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it is gone: the reader sees that, too
            self._unsent.clear()

    def receive(self) -> list[Message]:
        """What has arrived; ChannelError if it makes no sense."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_at_end = True
            return []
        return self._inbox.add(data)

    def close(self) -> None:
        """Close this end."""
        with self._lock:
            self._is_closed = True
            self._unsent.clear()
            self._socket.close()


class ChildEnd:
    """The child's end: any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket, *, max_bytes: int = 1 << 31) -> None:
        self._socket = sock
        self._inbox = Inbox(max_bytes)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send, and wait for room."""
        data = frame(message)
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> list[Message] | None:
        """Wait for bytes; the messages that they complete, or None at the end."""
        try:
            data = self._socket.recv(_CHUNK)
        except ConnectionError:
            return None
        return self._inbox.add(data) if data else None

    def close(self) -> None:
        """Close this end in this process only. Called after a fork, when nobody holds the lock."""
        self._lock = threading.Lock()
        self._socket.close()
