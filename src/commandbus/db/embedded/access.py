"""Who may connect to an embedded server: only those who can read its password file.

Duty: `pg_hba.conf`, which asks everybody for a password (scram-sha-256), over TCP and through the socket; and
the generated password of `postgres`, in a file beside the data that only its owner (and root) can read. The
address names that file (`passfile=`) and carries no secret, so it may be shown, logged and passed on. Other
logins that somebody creates need passwords of their own.

The address also demands scram of the server (`require_auth`). While the server is down, any user of the machine
can listen on its port, ask for the password in clear text, and use it later. Scram hands nothing over, and only
the server that knows the password can answer it.

Invariant: data without a password file that fits it gets a new password before its server starts, whether it is
fresh, copied here, or of a time when local users were trusted. The file names the data (its system identifier).

Not protected against: root; the user who owns the data, as which the server runs.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Final

from commandbus.db.embedded.binaries import Binaries
from commandbus.db.embedded.messages import program_failed
from commandbus.db.embedded.state_folder import StateFolder, beside, write_private

# PostgreSQL's default. 256 random bits need no stretching, which costs each connection 2.5 ms. But
# drivers of other languages refuse fewer iterations.
_ITERATIONS: Final = 4096
_HBA: Final = """\
# Written by commandbus at every start of the server: changes are lost.
# The password of "postgres" is in the file *.pgpass beside the data folder.
local   all          all                scram-sha-256
local   replication  all                scram-sha-256
host    all          all  127.0.0.1/32  scram-sha-256
host    replication  all  127.0.0.1/32  scram-sha-256
"""


def password_file(data: Path) -> Path:
    return beside(data, "pgpass")


def has_password(data: Path) -> bool:
    """Whether the password file is there, fits this data, and is closed to others."""
    try:
        with password_file(data).open() as file:
            is_private = os.fstat(file.fileno()).st_mode & 0o077 == 0
            return is_private and file.readline() == _first_line(data)
    except FileNotFoundError:
        return False


def guard(state: StateFolder, binaries: Binaries, data: Path, *, fsync: bool) -> None:
    """Before a start: let nobody connect without the password, and make one if there is none.

    The password file is put in place last: a crash in between is repaired by the next start.
    """
    hba = data / "pg_hba.conf"
    if not hba.is_file() or hba.read_text(errors="replace") != _HBA:
        write_private(hba, _HBA, state.account.uid, state.account.gid)
    if has_password(data):
        return
    password = secrets.token_urlsafe(32)
    _set_password(state, binaries, data, password, fsync=fsync)
    owner = state.folder.stat()
    write_private(
        password_file(data), f"{_first_line(data)}*:*:*:postgres:{password}\n", owner.st_uid, owner.st_gid
    )


def _set_password(state: StateFolder, binaries: Binaries, data: Path, password: str, *, fsync: bool) -> None:
    """In single-user mode, which asks for no password. Only the verifier of the password goes there."""
    answer = state.account.run(
        [binaries.program("postgres"), "--single", "-D", data, "-c", f"fsync={fsync:d}", "postgres"],
        text=f"ALTER ROLE postgres PASSWORD '{verifier(password)}'\n",
    )
    if answer.returncode != 0 or "ERROR:" in answer.stdout:
        raise program_failed(f"the password of the PostgreSQL in {data} could not be set", answer.stdout)


def _first_line(data: Path) -> str:
    """A comment, for libpq. The control file of PostgreSQL begins with the system identifier."""
    with (data / "global" / "pg_control").open("rb") as file:
        return f"# the password of the embedded PostgreSQL {file.read(8).hex()}\n"


def verifier(password: str, iterations: int = _ITERATIONS) -> str:
    """What PostgreSQL stores of a password for scram-sha-256 (RFC 5803)."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
    stored_key = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    salt_text, stored_text, server_text = (
        base64.b64encode(part).decode() for part in (salt, stored_key, server_key)
    )
    return f"SCRAM-SHA-256${iterations}:{salt_text}${stored_text}:{server_text}"
