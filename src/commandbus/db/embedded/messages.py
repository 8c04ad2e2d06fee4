"""What the embedded server says when something is in the way: the path, the cause, and what to do.

Duty: turn failures of the operating system and of PostgreSQL's programs into `EmbeddedPostgresError`.
It decides nothing and catches nothing that is not about files or programs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from commandbus.db.embedded.binaries import Account
from commandbus.errors import EmbeddedPostgresError

_LAST_LINES = 12

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space and try again",
    errno.EDQUOT: "the disk quota is used up; free some space and try again",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.ENOTDIR: "a part of that path is a file; choose another folder",
    errno.EEXIST: "it is a file; choose another folder",
}


def program_failed(
    what: str, output: str, server_log: Path | None = None, log_start: int = 0
) -> EmbeddedPostgresError:
    """The error for a program that ended badly, with the last lines that it and the server wrote."""
    lines = output.strip().splitlines()
    where = ""
    if server_log is not None and server_log.exists():
        with server_log.open("rb") as file:
            file.seek(log_start)
            lines += file.read().decode(errors="replace").splitlines()
        where = f" (from {server_log})"
    last = "\n  ".join(lines[-_LAST_LINES:]) or "it said nothing"
    cause = f": {_REMEDIES[errno.ENOSPC]}" if _tells_of_a_full_disk(output + last) else ""
    return EmbeddedPostgresError(f"{what}{cause}. Its last words{where}:\n  {last}")


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Errors of the operating system inside the block become ours."""
    try:
        yield
    except subprocess.TimeoutExpired as error:
        raise EmbeddedPostgresError(
            f"{Path(error.cmd[0]).name} did not end within {error.timeout:g} s on {folder}: "
            "is the disk slow or stuck?"
        ) from error
    except shutil.Error as error:
        # A list of (from, to, why) for every file of a tree that could not be copied; the first says enough.
        source, target, why = error.args[0][0]
        remedy = _REMEDIES[errno.ENOSPC] if _tells_of_a_full_disk(why) else why
        raise EmbeddedPostgresError(f"{source} could not be copied to {target}: {remedy}") from error
    except PermissionError as error:
        user = Account.current().name
        raise EmbeddedPostgresError(
            f"user {user} may not use {error.filename or folder}: choose a folder that {user} can write to"
        ) from error
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
        raise EmbeddedPostgresError(f"{error.filename or folder}: {remedy}") from error


def _tells_of_a_full_disk(text: str) -> bool:
    return os.strerror(errno.ENOSPC) in text
