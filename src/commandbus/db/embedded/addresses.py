"""Port and socket of an embedded server.

Duty: a port on 127.0.0.1 that stays the same from start to start while nobody else takes it, and a folder for
the Unix socket whose path is short enough. A port found free can be taken before the server binds it: the
caller tries again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from pathlib import Path
from random import randrange
from urllib.parse import quote, urlencode

import psycopg

from commandbus.db.embedded.binaries import Account
from commandbus.errors import EmbeddedPostgresError

# Below the range from which the kernel picks local ports for outgoing connections. In that range, a client that
# redials a stopped server may get the port that it dials, connect to itself, and keep the server out.
_PORTS = (20_000, 32_000)
_FIRST_WITH_REQUIRE_AUTH = 160_000  # libpq 16; psycopg's own build is newer, a distribution's may not be
_LONGEST_SOCKET_FOLDER = 107 - len("/.s.PGSQL.65535")  # sun_path holds 108 bytes with its final NUL


def dsn(port: int, password_file: Path, database: str = "postgres") -> str:
    """The address names the password's file, not the password; `access.py` says why it demands scram."""
    parameters = {"passfile": str(password_file)}
    if psycopg.pq.version() >= _FIRST_WITH_REQUIRE_AUTH:
        parameters["require_auth"] = "scram-sha-256"
    query = urlencode(parameters, safe="/", quote_via=quote)
    return f"postgresql://postgres@127.0.0.1:{port}/{quote(database, safe='')}?{query}"


def remembered_port(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def remember_port(file: Path, port: int) -> None:
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    aside.write_text(f"{port}\n")
    aside.replace(file)


def free_port() -> int:
    for _ in range(100):
        port = randrange(*_PORTS)  # noqa: S311 - spreads, hides nothing
        if is_free(port):
            return port
    raise EmbeddedPostgresError(f"no free port on 127.0.0.1 between {_PORTS[0]} and {_PORTS[1]}")


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As PostgreSQL does. Otherwise connections of an earlier server in TIME_WAIT make its port look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except (OSError, OverflowError):
            return False
    return True


def make_socket_folder(data: Path, account: Account) -> str:
    """The data folder; if that path is too long, a short private one; at worst none ('': no socket)."""
    if len(os.fsencode(data)) <= _LONGEST_SOCKET_FOLDER:
        return str(data)
    short = _short_folder(data, account)
    with contextlib.suppress(FileExistsError):
        os.mkdir(short, 0o700)
        if account.is_other:
            os.chown(short, account.uid, account.gid)
    found = os.lstat(short)
    is_private = found.st_uid == account.uid and found.st_mode & 0o170077 == 0o040000
    return short if is_private else ""


def remove_socket_folder(data: Path, account: Account) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(_short_folder(data, account))


def _short_folder(data: Path, account: Account) -> str:
    mark = hashlib.sha256(os.fsencode(data)).hexdigest()[:12]
    return f"/tmp/commandbus-{account.uid}-{mark}"  # noqa: S108 - checked to be a folder of the account's own
