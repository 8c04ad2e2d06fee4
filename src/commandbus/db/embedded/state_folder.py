"""Where an embedded server keeps its state, and whether the data there can be used.

Duty: choose and make the state folder, name the files in it, check data before a server may use it.

Invariant: nothing outside the state folder changes owner or mode. Inside it, only data that root owns (it was
copied or restored by root) is given to the server's account.

It does not run PostgreSQL's programs.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from commandbus.db.embedded.binaries import Account, Binaries
from commandbus.errors import EmbeddedPostgresError
from commandbus.logger import safe_logger

log = safe_logger(__name__)

_FALLBACK = Path("/var/lib/commandbus")


@dataclass(frozen=True)
class StateFolder:
    """The state folder, the account of the server, and why the folder is not the one asked for."""

    folder: Path
    account: Account
    note: str | None = None

    @property
    def data_folders(self) -> list[Path]:
        return _data_folders(self.folder)

    @property
    def majors(self) -> list[int]:
        """The major versions whose data is here."""
        return [major_of(path) for path in self.data_folders]

    def with_current_account(self) -> StateFolder:
        return replace(self, account=Account.for_data(self.data_folders))


def choose_state_folder(asked: Path) -> StateFolder:
    here = StateFolder(asked, Account.for_data(_data_folders(asked)))
    if not here.account.is_other:
        return here
    elsewhere = _fallback_for(asked)
    # Once the data is there it stays there, even if the folder becomes reachable later.
    moved_before = bool(_data_folders(elsewhere)) and not here.data_folders
    existing = _nearest_existing(asked)
    is_file = not existing.is_dir()  # the caller that makes the folder will report it
    if not moved_before and (is_file or here.account.can_enter(existing)):
        return here
    account = Account.for_data(_data_folders(elsewhere))
    note = (
        f"PostgreSQL cannot run as root, and user {account.name} cannot enter {asked}: "
        f"the state of the embedded server is in {elsewhere}"
    )
    return StateFolder(elsewhere, account, note)


def make_folder(state: StateFolder) -> None:
    if state.folder.is_dir():
        return
    if state.account.is_other:
        _make_for_other(state.folder)
    else:
        state.folder.mkdir(parents=True, exist_ok=True)
    (state.folder / ".gitignore").write_text("*\n")
    if state.note is not None:
        log.warning("%s", state.note)


def beside(data: Path, what: str) -> Path:
    """A file about a data folder: `postgres-15.port`."""
    return data.with_name(f"{data.name}.{what}")


def write_private(file: Path, text: str, uid: int, gid: int) -> None:
    """Put a file in place, whole, that only this user can read. Safe in a folder that another user controls."""
    aside = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as opened:
            if os.geteuid() == 0:
                os.fchown(descriptor, uid, gid)
            opened.write(text)
            opened.flush()
            os.fsync(descriptor)
        aside.replace(file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def data_version(data: Path) -> str | None:
    try:
        return (data / "PG_VERSION").read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def check_data(data: Path, binaries: Binaries, account: Account) -> None:
    """Raise unless the server that we are about to start can use this data."""
    owner = data.stat().st_uid
    is_roots = account.is_other and owner == 0
    if not is_roots and owner != account.uid:
        raise EmbeddedPostgresError(
            f"{data} belongs to {Account(owner, 0).name}, but the server would run as {account.name}: "
            "use it as that user, or choose another folder"
        )
    version = data_version(data)
    if version is None:
        raise EmbeddedPostgresError(
            f"{data} is not a PostgreSQL data folder (no PG_VERSION): move it away, or choose another folder"
        )
    if version != str(binaries.major):
        raise EmbeddedPostgresError(
            f"{data} holds data of PostgreSQL {version}, which PostgreSQL {binaries.version} cannot read: "
            f"rename it to postgres-{version} and use PostgreSQL {version}, or choose another folder"
        )
    if is_roots:
        _give_to(account, data)


def _data_folders(folder: Path) -> list[Path]:
    try:
        found = [path for path in folder.iterdir() if re.fullmatch(r"postgres-\d+", path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=major_of)


def major_of(data: Path) -> int:
    return int(data.name.removeprefix("postgres-"))


def _fallback_for(asked: Path) -> Path:
    named = asked.parent.name if asked.name.startswith(".") else asked.name
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", named).strip("-") or "project"
    return _FALLBACK / f"{readable}-{hashlib.sha256(os.fsencode(asked)).hexdigest()[:8]}"


def _nearest_existing(path: Path) -> Path:
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _make_for_other(folder: Path) -> None:
    # With a umask of its own, so that the server's user can enter from the first moment on: a chmod
    # afterwards would come too late for processes that start just now, os.umask() would hit other threads.
    made = subprocess.run(  # noqa: S603 - no shell, no options from outside
        ["/bin/mkdir", "-p", "--", str(folder)], umask=0o022, capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise EmbeddedPostgresError(f"{made.stderr.strip()}: choose another folder")


def _give_to(account: Account, tree: Path) -> None:
    for path in [tree, *tree.rglob("*")]:
        os.chown(path, account.uid, account.gid, follow_symlinks=False)
