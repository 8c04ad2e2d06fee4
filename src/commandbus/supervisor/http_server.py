"""A small HTTP/1.0 server. Silent, slow or hostile clients cannot keep others from an answer.

One thread serves all clients with a selector, so a silent client costs only a descriptor and a buffer.

    ASKING    until its request is complete: at most READ_SECONDS and LONGEST_REQUEST bytes
    WAITING   its answer is being made
    TAKING    it takes the answer: at most SEND_SECONDS without a byte, TAKE_SECONDS in all
    LEAVING   it has the answer; what it still sends is thrown away, so that the answer is not lost by a reset

There are at most CONNECTIONS clients. One more makes the server close another: first a client that is leaving,
then the asking client that has been silent for longest. The server's own thread makes `urgent` answers at once, so
the liveness check never waits. Every other path has its own thread, which makes one answer for all clients that
asked meanwhile. So slow answers delay neither each other nor the urgent ones.
"""

from __future__ import annotations

import contextlib
import errno
import re
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from functools import partial
from http import HTTPStatus
from typing import Final

from commandbus.clock import monotonic
from commandbus.logger import safe_logger
from commandbus.quick_dataclass import dataclass

logger = safe_logger("commandbus.supervisor")

CONNECTIONS: Final = 128
READ_SECONDS: Final = 2.0
SEND_SECONDS: Final = 2.0
TAKE_SECONDS: Final = 10.0
LEAVE_SECONDS: Final = 1.0
STOP_SECONDS: Final = 0.5
LONGEST_REQUEST: Final = 16_384
_MOST_IGNORED: Final = 1_048_576
_ACCEPTS_A_TURN: Final = 64
_PIECE: Final = 65_536
_PIECES_A_TURN: Final = 16
_LONGEST_TURN: Final = 0.5
_FULL_PAUSE: Final = 0.1
_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REQUEST_LINE: Final = re.compile(rb"([!-~]{1,40}) ([!-~]+) HTTP/(\d{1,3})\.(\d{1,3})[ \t]*\r?")
_END: Final = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What a client gets."""

    code: int
    body: bytes
    content_type: str


Route = Callable[[], HttpAnswer]


class _State(IntEnum):
    """The states of a client, in the order in which clients have to make room."""

    LEAVING = 0
    ASKING = 1
    TAKING = 2
    WAITING = 3


class _Client:
    """One connection. `heard_at`: when it last did something; `end_at`: when it is closed, whatever it does."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.socket = connection
        self.state = _State.ASKING
        self.heard_at = now
        self.end_at = now + READ_SECONDS
        self.asked = bytearray()
        self.path = ""
        self.is_head = False
        self.rest: list[memoryview] = []
        self.last_at = 0.0
        self.ignored = 0


class _Maker:
    """The thread that makes the answers of one path. Each answer is for all clients that had asked when it
    began."""

    def __init__(self, name: str, route: Route, done: Callable[[list[_Client], HttpAnswer], None]) -> None:
        self._route = route
        self._done = done
        self._change = threading.Condition()
        self._waiting: list[_Client] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name=f"probes {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self, client: _Client) -> None:
        with self._change:
            self._waiting.append(client)
            self._change.notify()

    def end(self) -> None:
        with self._change:
            self._is_over = True
            self._change.notify()

    def _serve(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._is_over:
                    self._change.wait()
                if self._is_over:
                    return
                clients, self._waiting = self._waiting, []
            self._done(clients, self._route())


class HttpServer:
    """Listens as soon as it is created, and answers after `start`. Routes must not raise; `refusal` makes the
    answers for errors."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        urgent: Mapping[str, Route],
        others: Mapping[str, Route],
        refusal: Callable[[HTTPStatus, str], HttpAnswer],
    ) -> None:
        self._urgent = urgent
        self._paths = ", ".join([*urgent, *others])
        self._refusal = refusal
        self._makers = {path: _Maker(path, route, self._made) for path, route in others.items()}
        self._made_answers: deque[tuple[list[_Client], HttpAnswer]] = deque()
        self._clients: dict[_Client, None] = {}  # in the order in which they came
        self._selector = selectors.DefaultSelector()
        self._listener = _listening(host, port)
        self.port = int(self._listener.getsockname()[1])
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._deaf_until: float | None = 0.0
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._serve, name="probes", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        for maker in self._makers.values():
            maker.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop listening. Clients that have asked get their answer, if they take it within STOP_SECONDS."""
        self._stop_at = monotonic() + STOP_SECONDS
        self._wake()
        self._thread.join()

    # -- the thread

    def _serve(self) -> None:
        try:
            while self._stop_at is None:
                self._turn_safely()
            self._stop_listening()
            while self._has_asked() and monotonic() < self._stop_at:
                self._turn_safely()
        finally:
            self._stop_listening()
            for client in list(self._clients):
                self._close(client)
            for maker in self._makers.values():
                maker.end()
            self._selector.close()
            self._waker.close()
            self._woken.close()

    def _has_asked(self) -> bool:
        return any(client.state in (_State.WAITING, _State.TAKING) for client in self._clients)

    def _turn_safely(self) -> None:
        """Run one turn of the loop. An error of ours may cost clients, but must not end the server."""
        try:
            self._turn()
        except Exception:
            logger.exception("the health checks failed, and go on without their %d clients", len(self._clients))
            for client in list(self._clients):
                self._close(client)
            time.sleep(_FULL_PAUSE)

    def _turn(self) -> None:
        self._listen_again(monotonic())
        events = self._selector.select(self._pause(monotonic()))
        now = monotonic()
        for key, _ in events:
            if isinstance(key.data, _Client):
                self._safely(self._serve_client, key.data, now)
        self._hand_out(now)
        if self._stop_at is None and any(key.fileobj is self._listener for key, _ in events):
            self._accept(now)
        for client in [client for client in self._clients if client.end_at <= now]:
            self._close(client)

    def _pause(self, now: float) -> float:
        """How long nothing has to be done."""
        ends = [client.end_at for client in self._clients]
        if self._deaf_until is not None:
            ends.append(self._deaf_until)
        return max(0.0, min([now + _LONGEST_TURN, *ends]) - now)

    def _safely(self, work: Callable[[_Client, float], None], client: _Client, now: float) -> None:
        """Do something for one client. An error must not affect the other clients."""
        try:
            work(client, now)
        except (BlockingIOError, InterruptedError):
            return
        except Exception:  # usually a connection that was closed
            logger.debug("the connection of a health check broke off", exc_info=True)
            self._close(client)

    # -- clients come and go

    def _listen_again(self, now: float) -> None:
        if self._deaf_until is not None and now >= self._deaf_until and self._stop_at is None:
            self._deaf_until = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self, now: float) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self._pause_listening(now)
                return
            self._welcome(connection, now)

    def _pause_listening(self, now: float) -> None:
        """No descriptor is left: close a connection, which may help."""
        self._make_room()
        self._deaf_until = now + _FULL_PAUSE
        self._selector.unregister(self._listener)

    def _stop_listening(self) -> None:
        self._deaf_until = None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()

    def _welcome(self, connection: socket.socket, now: float) -> None:
        if len(self._clients) >= CONNECTIONS:
            self._make_room()
        connection.setblocking(False)
        client = _Client(connection, now)
        self._clients[client] = None
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._safely(self._serve_client, client, now)  # usually its request is there already

    def _make_room(self) -> None:
        if self._clients:
            self._close(min(self._clients, key=lambda client: (client.state, client.heard_at)))

    def _close(self, client: _Client) -> None:
        self._clients.pop(client, None)
        self._watch(client, 0)
        client.rest = []
        client.socket.close()

    def _watch(self, client: _Client, events: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        if events:
            self._selector.register(client.socket, events, client)

    # -- one client

    def _serve_client(self, client: _Client, now: float) -> None:
        match client.state:
            case _State.ASKING:
                self._hear(client, now)
            case _State.TAKING:
                self._send(client, now)
            case _State.LEAVING:
                self._see_off(client)

    def _hear(self, client: _Client, now: float) -> None:
        data = client.socket.recv(LONGEST_REQUEST)
        if not data:
            self._close(client)
            return
        client.asked += data
        client.heard_at = now
        if _END.search(client.asked) is not None:
            self._answer(client, now)
        elif len(client.asked) >= LONGEST_REQUEST:
            self._refuse(client, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long", now)
        elif b"\n" in client.asked and _REQUEST_LINE.fullmatch(_first_line(client)) is None:
            self._refuse(client, HTTPStatus.BAD_REQUEST, "this is not HTTP", now)

    def _answer(self, client: _Client, now: float) -> None:
        found = _REQUEST_LINE.fullmatch(_first_line(client))
        if found is None:
            self._refuse(client, HTTPStatus.BAD_REQUEST, "this is not HTTP", now)
            return
        method, target, version = found[1], found[2].decode().partition("?")[0], found[3]
        client.is_head = method == b"HEAD"
        if version != b"1":
            self._refuse(client, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1", now)
        elif method not in (b"GET", b"HEAD"):
            self._refuse(client, HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", now)
        elif target in self._urgent:
            self._give(self._urgent[target](), client, now)
        elif target in self._makers:
            self._wait(client)
            self._makers[target].ask(client)
        else:
            self._refuse(client, HTTPStatus.NOT_FOUND, f"there is only {self._paths}", now)

    def _wait(self, client: _Client) -> None:
        client.state = _State.WAITING
        client.end_at = float("inf")
        self._watch(client, 0)

    def _refuse(self, client: _Client, code: HTTPStatus, reason: str, now: float) -> None:
        self._give(self._refusal(code, reason), client, now)

    def _give(self, answer: HttpAnswer, client: _Client, now: float) -> None:
        head = _head(answer)
        body = b"" if client.is_head else answer.body
        client.rest = [memoryview(part) for part in ([head, body] if len(body) > _PIECE else [head + body])]
        client.asked.clear()
        client.state = _State.TAKING
        client.last_at = now + TAKE_SECONDS
        client.end_at = now + SEND_SECONDS
        self._watch(client, selectors.EVENT_WRITE)
        self._send(client, now)

    def _send(self, client: _Client, now: float) -> None:
        for _ in range(_PIECES_A_TURN):
            if not client.rest:
                break
            sent = client.socket.send(client.rest[0][:_PIECE])
            client.heard_at = now
            client.end_at = min(client.last_at, now + SEND_SECONDS)
            client.rest[0] = client.rest[0][sent:]
            if not client.rest[0]:
                del client.rest[0]
        if client.rest:
            return
        client.socket.shutdown(socket.SHUT_WR)
        client.state = _State.LEAVING
        client.end_at = now + LEAVE_SECONDS
        self._watch(client, selectors.EVENT_READ)

    def _see_off(self, client: _Client) -> None:
        data = client.socket.recv(_PIECE)
        client.ignored += len(data)
        if not data or client.ignored > _MOST_IGNORED:
            self._close(client)

    # -- answers that other threads make

    def _made(self, clients: list[_Client], answer: HttpAnswer) -> None:
        """Called on the thread that has made an answer."""
        self._made_answers.append((clients, answer))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def _hand_out(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(_PIECE):
                pass
        while self._made_answers:
            clients, answer = self._made_answers.popleft()
            for client in clients:
                if client in self._clients:
                    self._safely(partial(self._give, answer), client, now)


def _listening(host: str, port: int) -> socket.socket:
    """Bind without asking the DNS for this machine's name, which can take seconds."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(CONNECTIONS)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _first_line(client: _Client) -> bytes:
    return bytes(client.asked.partition(b"\n")[0])


def _head(answer: HttpAnswer) -> bytes:
    lines: Iterable[str] = (
        f"HTTP/1.0 {int(answer.code)} {HTTPStatus(answer.code).phrase}",
        "Server: commandbus",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(["Allow: GET, HEAD"] if answer.code == HTTPStatus.METHOD_NOT_ALLOWED else []),
    )
    return "\r\n".join([*lines, "", ""]).encode()
