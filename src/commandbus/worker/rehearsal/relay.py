"""Relay: the only way from a rehearsal's child process to the database.

It listens on a Unix socket, which a process without a network can reach, and passes bytes to the server: by the
address that a connection of ours has just used, with TLS where the settings ask for it or the server offers it. It
reads what passes: the texts of statements, for the report.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
_PIECE: Final = 65536
MOST_STATEMENTS: Final = 100
LONGEST_STATEMENT: Final = 500
MARK: Final = "commandbus_rehearsal"
"""In the text of every statement that is the rehearsal's own."""
_LONGEST_READ: Final = 1 << 20


class Relay:
    """Passes bytes between a Unix socket in a folder and a server, until it is closed."""

    def __init__(self, folder: Path, parameters: Mapping[str, str]) -> None:
        self._parameters = parameters
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen(8)
        self._open: list[Any] = []
        self.statement_count = 0
        self.statements: list[str] = []
        self.trouble: str | None = None
        threading.Thread(target=self._accept, name="commandbus-relay", daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        for each in (self._listener, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="commandbus-relay", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = self._connect()
        except (OSError, ssl.SSLError) as error:
            self.trouble = f"the relay could not reach the database: {error}"
            client.close()
            return
        self._open += [client, server]
        reader = _Statements(self)
        threading.Thread(target=_pump, args=(server, client, None), name="commandbus-relay", daemon=True).start()
        _pump(client, server, reader)

    def _connect(self) -> Any:
        given = self._parameters
        host, port = given.get("hostaddr") or given.get("host") or "localhost", int(given.get("port") or 5432)
        if host.startswith(("/", "@")):
            plain = socket.socket(socket.AF_UNIX)
            plain.settimeout(10)
            plain.connect(f"{host}/.s.PGSQL.{port}")
            plain.settimeout(None)
            return plain
        connected = socket.create_connection((host, port), timeout=10)
        mode = given.get("sslmode", "prefer")
        if mode not in ("disable", "allow"):
            connected.sendall(_SSL_REQUEST)
            if connected.recv(1) == b"S":
                connected = _context(given, mode).wrap_socket(connected, server_hostname=given.get("host"))
            elif mode != "prefer":
                raise ssl.SSLError("the server does not speak TLS")
        connected.settimeout(None)
        return connected


def _context(given: Mapping[str, str], mode: str) -> ssl.SSLContext:
    root = given.get("sslrootcert")
    context = ssl.create_default_context(cafile=root if root and root != "system" else None)
    context.check_hostname = mode == "verify-full"
    if mode not in ("verify-full", "verify-ca"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if given.get("sslcert"):
        context.load_cert_chain(given["sslcert"], given.get("sslkey"))
    return context


def _pump(source: Any, target: Any, reader: _Statements | None) -> None:
    with suppress(OSError, ValueError):
        while piece := source.recv(_PIECE):
            if reader is not None:
                reader.read(piece)
            target.sendall(piece)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class _Statements:
    """Reads the texts of statements from what a client sends. What it does not understand, it passes over."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._bytes = bytearray()
        self._has_begun = False
        self._is_ours = False  # the last statement that was parsed is the rehearsal's own

    def read(self, piece: bytes) -> None:
        self._bytes += piece
        while len(self._bytes) >= 5:
            head = 0 if not self._has_begun else 1
            (length,) = struct.unpack_from("!i", self._bytes, head)
            if length < 4 or len(self._bytes) < head + length:
                if length > _LONGEST_READ or length < 4:
                    self._bytes.clear()
                return
            message = bytes(self._bytes[: head + length])
            del self._bytes[: head + length]
            if not self._has_begun:
                self._has_begun = True
            else:
                self._note(message[:1], message[5:])

    def _note(self, kind: bytes, body: bytes) -> None:
        if kind == b"Q":
            self._add(body.split(b"\0", 1)[0])
        elif kind == b"P":
            self._add(body.split(b"\0", 2)[1], is_parsed=True)
        elif kind == b"E":
            self._relay.statement_count += not self._is_ours

    def _add(self, text: bytes, *, is_parsed: bool = False) -> None:
        shown = " ".join(text.decode("utf-8", "replace").split())
        self._is_ours = MARK in shown or not shown
        if self._is_ours:
            return
        if len(self._relay.statements) < MOST_STATEMENTS:
            self._relay.statements.append(shown[:LONGEST_STATEMENT])
        self._relay.statement_count += not is_parsed
