"""A TCP proxy before a server (PostgreSQL, Redis): it can be cut, refuse, go deaf, or swallow one answer."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from support.polling import readable


class Proxy:
    """Forwards bytes both ways, one thread per connection.

    `swallow(marker)`: the first message of a client that contains the marker is forwarded, what the server
    answers to it is not, and then the connection is cut. With `forward=False` the server does not get it either;
    with `then_refuse` nobody can connect from then on, until `is_refusing` is taken back.
    """

    def __init__(self, port: int, *, listen: int = 0) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", listen), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: set[_Pair] = set()
        self._closed = False
        self.is_refusing = False
        self.refused = 0
        self.hearing = threading.Event()
        self.hearing.set()
        self._marker: bytes | None = None
        self._forward = True
        self._then_refuse = False
        self.swallowed = threading.Event()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def swallow(self, marker: bytes, *, forward: bool = True, then_refuse: bool = False) -> None:
        self._forward = forward
        self._then_refuse = then_refuse
        self._marker = marker

    def is_swallowed(self, before: bytes, data: bytes) -> bool:
        """Is this the message? The answer is yes once. `before` is the piece before: a long message comes in
        several, and the marker may be half in each."""
        with self._lock:
            if self._marker is None or self._marker not in before[1 - len(self._marker) :] + data:
                return False
            self._marker = None
            self.is_refusing = self._then_refuse
            return True

    @property
    def forwards_swallowed(self) -> bool:
        return self._forward

    def silence(self, name: bytes) -> int:
        """Connections that introduced themselves by this name hear nothing any more, and are not told: their bytes
        are taken, as a frozen pooler's kernel takes them. Returns how many; new ones are heard."""
        with self._lock:
            chosen = [pair for pair in self._pairs if name in pair.introduction]
        for pair in chosen:
            pair.is_silent = True
        return len(chosen)

    def lead_to(self, port: int) -> None:
        """Another server from now on, as a balancer or a moved address does; every connection is cut."""
        self._target = ("127.0.0.1", port)
        self.cut()

    @property
    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._pairs)

    def cut(self) -> None:
        """End every connection, without a good-bye; new ones are welcome unless `is_refusing`."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.cut()

    def close(self) -> None:
        self._closed = True
        self.hearing.set()
        self._listener.close()
        self.cut()

    def forget(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.discard(pair)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_refusing:
                self.refused += 1
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            pair = _Pair(self, client, server)
            with self._lock:  # whoever cuts it must find a thread to wait for
                pair.start()
                self._pairs.add(pair)


class _Pair:
    """One connection: the client's socket and the server's."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._wake, self._waker = socket.socketpair()
        self.introduction = b""  # the first bytes of the client: among them is its application_name
        self._asked = b""  # the last piece that the client has sent
        self.is_silent = False
        self._thread = threading.Thread(target=self._run, name="proxy-pair", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(5)

    def _run(self) -> None:
        try:
            self._forward()
        except OSError:
            pass
        finally:
            self._proxy.forget(self)
            _reset(self._client)
            _reset(self._server)
            self._wake.close()
            self._waker.close()

    def _forward(self) -> None:
        other = {self._client: self._server, self._server: self._client}
        while True:
            # While deaf only the order to end is heard.
            watched = [self._wake, *other] if self._proxy.hearing.is_set() else [self._wake]
            ready = readable(watched, 0.02)
            if self._wake in ready:
                return
            for source in ready:
                data = source.recv(65536)
                if not data:
                    return
                if source is self._client and len(self.introduction) < 300:
                    self.introduction += data
                if self.is_silent:
                    continue
                if source is self._client and self._proxy.is_swallowed(self._asked, data):
                    if self._proxy.forwards_swallowed:
                        self._server.sendall(data)
                        self._await_answer()
                    self._proxy.swallowed.set()
                    return
                if source is self._client:
                    self._asked = data
                other[source].sendall(data)

    def _await_answer(self) -> None:
        """It has happened, and nobody will know. The client may send the end of its message as another piece,
        without which the server does not answer."""
        while self._server not in (ready := readable([self._wake, self._client, self._server], 0.02)):
            if self._wake in ready:
                return
            if self._client in ready:
                if not (data := self._client.recv(65536)):
                    return
                self._server.sendall(data)


def _reset(sock: socket.socket) -> None:
    """Close with RST, as a cut network does."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
