"""`EmbeddedPostgres`: start, join, leave and stop the server of a folder. The package has the map.

Duty: the order of things. Everything that changes the server happens under the folder's start lock; a user's
shared lock is taken under it too, so that "am I the last one?" has an answer that stays true meanwhile.

It does not look at processes, files or ports itself: its neighbors in this package do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import shutil
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from commandbus.db.embedded import postmaster
from commandbus.db.embedded.access import guard, has_password, password_file
from commandbus.db.embedded.addresses import (
    dsn,
    free_port,
    is_free,
    make_socket_folder,
    remember_port,
    remembered_port,
    remove_socket_folder,
)
from commandbus.db.embedded.binaries import (
    Binaries,
    choose_binaries,
    make_unfinished,
    remove_unfinished,
    usable_by,
)
from commandbus.db.embedded.locks import exclusively, open_lock_file, share, try_exclusive
from commandbus.db.embedded.messages import explained, program_failed
from commandbus.db.embedded.state_folder import (
    StateFolder,
    beside,
    check_data,
    choose_state_folder,
    data_version,
    major_of,
    make_folder,
)
from commandbus.db.embedded.watch import Watcher
from commandbus.errors import EmbeddedPostgresError
from commandbus.logger import safe_logger

log = safe_logger(__name__)

_LIMIT_SECONDS = 120.0
_PORT_TRIES = 5
_LARGE_LOG_BYTES = 16 * 1024 * 1024
_OWN_SETTINGS = frozenset(
    {"port", "listen_addresses", "unix_socket_directories", "fsync", "data_directory", "hba_file"}
)


@dataclass(frozen=True)
class EmbeddedStatus:
    """What is known of an embedded server. Unless it runs, `pid`, `port` and `dsn` are None."""

    folder: Path
    """Where the state is: the folder asked for, or its replacement; then `note` says why."""
    data: Path | None = None
    version: str | None = None
    pid: int | None = None
    port: int | None = None
    dsn: str | None = None
    note: str | None = None

    @property
    def running(self) -> bool:
        return self.pid is not None


class EmbeddedPostgres:
    """A PostgreSQL server in a folder. Several threads, objects and processes may share one.

    `binaries` names a folder with PostgreSQL's programs; `settings` are server settings for this start (a
    server that others have started already keeps theirs); `keep` leaves it up when its last user goes;
    `revive` starts it again, at the same address, if it dies between `start()` and `stop()`.
    After a fork the child is no user of the server; its own `start()` makes it one.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = ".commandbus",
        *,
        binaries: Path | None = None,
        fsync: bool = True,
        settings: Mapping[str, str] | None = None,
        keep: bool = False,
        revive: bool = False,
    ) -> None:
        self.asked_folder = Path(folder).expanduser().resolve()
        self._explicit_binaries = binaries
        self._fsync = fsync
        self._settings = dict(settings or {})
        self._keep = keep
        self._revives = revive
        self._watcher: Watcher | None = None
        self._mutex = threading.RLock()
        self._user_lock: int | None = None
        self._state: StateFolder | None = None
        self._data: Path | None = None
        _check_settings(self._settings)
        _check_path(self.asked_folder)

    def __enter__(self) -> EmbeddedPostgres:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def dsn(self) -> str:
        """The address of the running server, for its superuser.

        It holds no secret: `passfile` names the file with the password, which libpq reads as it connects. So the
        address may be printed, logged, and given to programs of the same user, also in their command line.
        """
        return self.dsn_of("postgres")

    def dsn_of(self, database: str) -> str:
        """The address of one database of the running server."""
        status = self.status()
        if status.data is None or status.port is None:
            raise EmbeddedPostgresError(f"no PostgreSQL is running in {status.folder}: call start() first")
        return dsn(status.port, password_file(status.data), database)

    @property
    def running(self) -> bool:
        return self.status().running

    def status(self) -> EmbeddedStatus:
        """Look, without starting, stopping or waiting for anything."""
        with explained(self.asked_folder):
            state = self._find_state()
            found = EmbeddedStatus(state.folder, note=state.note)
            for data in [self._data] if self._data else state.data_folders:
                found = EmbeddedStatus(state.folder, data, data_version(data), note=state.note)
                server = postmaster.find(data, state.account)
                if server is not None:
                    address = dsn(server.port, password_file(data))
                    return EmbeddedStatus(
                        state.folder, data, found.version, server.pid, server.port, address, state.note
                    )
            return found

    def start(self) -> str:
        """Join the running server, or start it (making its data first if need be). Returns its address."""
        with self._mutex, explained(self.asked_folder):
            state = self._find_state()
            make_folder(state)
            with _start_lock(state):
                binaries = choose_binaries(self._explicit_binaries, state.majors)
                data = state.folder / f"postgres-{binaries.major}"
                self._join(data)
                try:
                    server = self._bring_up(state, binaries, data)
                except BaseException:
                    self._leave(state, data)
                    raise
            self._watch()
            return dsn(server.port, password_file(data))

    def stop(self, *, keep: bool | None = None, force: bool = False) -> bool:
        """Leave the server, and end it unless others use it or somebody asked to keep it. True if it ended.

        `keep` leaves it up for good; `force` ends it even if others use it or started it.
        """
        watcher = self._watcher
        try:
            return self._stop(keep=keep, force=force)
        finally:
            if watcher is not None and self._watcher is None:
                watcher.join()

    def _stop(self, *, keep: bool | None, force: bool) -> bool:
        with self._mutex, explained(self.asked_folder):
            if self._data is None and not force:
                return False
            state = self._find_state()
            if self._data is None and not state.data_folders:
                return False
            with _start_lock(state):
                if self._data is None:
                    ended = [_bring_down(state, data) for data in state.data_folders]
                    return any(ended)
                if keep if keep is not None else self._keep:
                    beside(self._data, "keep").touch()
                return self._leave(state, self._data, force=force)

    def _find_state(self) -> StateFolder:
        """The folder is chosen once. The owner of the data may change (`chown`), so it is looked up each time."""
        if self._state is None:
            self._state = choose_state_folder(self.asked_folder)
        return self._state.with_current_account()

    # One user among several.

    def _join(self, data: Path) -> None:
        if self._user_lock is None:
            self._user_lock = open_lock_file(beside(data, "users"))
            self._data = data
            _users.add(self)
            atexit.register(self._stop_at_exit)
        share(self._user_lock)

    def _leave(self, state: StateFolder, data: Path, *, force: bool = False) -> bool:
        """With the start lock held: give up our use, and end the server if that was the last one."""
        was_last = self._release()
        if not force and (not was_last or beside(data, "keep").exists()):
            return False
        return _bring_down(state, data)

    def _release(self) -> bool:
        """Returns whether nobody else uses the server; nobody can join while the start lock is held."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.end()
        descriptor, self._user_lock, self._data = self._user_lock, None, None
        if descriptor is None:
            return False
        atexit.unregister(self._stop_at_exit)
        _users.discard(self)
        try:
            return try_exclusive(descriptor)
        finally:
            os.close(descriptor)

    def _stop_at_exit(self) -> None:
        try:
            self.stop()
        except EmbeddedPostgresError:
            log.exception("embedded PostgreSQL was left running", extra={"folder": str(self.asked_folder)})

    def _forget_after_fork(self) -> None:
        """In the child: without its copy of the descriptor it neither prolongs nor ends its parent's use."""
        if self._user_lock is not None:
            os.close(self._user_lock)
        if self._watcher is not None:
            self._watcher.forget()
        self._user_lock = self._data = self._watcher = None
        self._mutex = threading.RLock()
        atexit.unregister(self._stop_at_exit)

    # A server that dies under its users.

    def _watch(self) -> None:
        if self._revives and self._watcher is None:
            self._watcher = Watcher(self._find_server, self._revive)

    def _find_server(self) -> postmaster.Postmaster | None:
        data = self._data
        with explained(self.asked_folder):
            return postmaster.find(data, self._find_state().account) if data is not None else None

    def _revive(self) -> None:
        """On the watcher's thread: start the server again, unless somebody did that already, or stopped it.

        The pid file outlives a server that was killed, and no other. The mark `died` replaces it before it is
        removed, for the case that the start fails.
        """
        if self._data is None or not _has_died(self._data):
            return
        with self._mutex, explained(self.asked_folder):
            state = self._find_state()
            with _start_lock(state):
                if self._data is not None and _has_died(self._data):
                    self._start_again(state, self._data)

    def _start_again(self, state: StateFolder, data: Path) -> None:
        if postmaster.find_settled(data, state.account, limit_seconds=_LIMIT_SECONDS) is not None:
            return
        beside(data, "died").touch()
        self._fsync = self._fsync or not _runs_without_fsync(data)  # others may use it
        found = choose_binaries(self._explicit_binaries, [major_of(data)])
        binaries = usable_by(state.account, found, state.folder)
        self._make_ready(state, binaries, data)
        server = self._launch(state, binaries, data, only_port=remembered_port(beside(data, "port")))
        details = {"data": str(data), "port": server.port, "pid": server.pid}
        log.warning("embedded PostgreSQL died and was started again", extra=details)

    # The server, with the start lock held.

    def _bring_up(self, state: StateFolder, binaries: Binaries, data: Path) -> postmaster.Postmaster:
        server = postmaster.find_settled(data, state.account, limit_seconds=_LIMIT_SECONDS)
        if server is not None and self._fsync and _runs_without_fsync(data):
            # A server without fsync (of a test) must not be given to a caller that relies on fsync.
            self._end_unfit_server(state, data, "runs with fsync=off")
            server = None
        if server is not None and not has_password(data):
            # The server may be from a release that trusted local users.
            self._end_unfit_server(state, data, f"has no private password file {password_file(data)}")
            server = None
        if server is not None:
            return server
        remove_unfinished(state.folder)
        binaries = usable_by(state.account, binaries, state.folder)
        if not data.exists():
            self._initialise(state, binaries, data)
        beside(data, "keep").unlink(missing_ok=True)
        self._make_ready(state, binaries, data)
        return self._launch(state, binaries, data)

    def _make_ready(self, state: StateFolder, binaries: Binaries, data: Path) -> None:
        check_data(data, binaries, state.account)
        postmaster.clear_remains(data, state.account)
        guard(state, binaries, data, fsync=self._fsync)

    def _end_unfit_server(self, state: StateFolder, data: Path, flaw: str) -> None:
        assert self._user_lock is not None  # noqa: S101 - _join came before
        if not try_exclusive(self._user_lock):
            raise EmbeddedPostgresError(
                f"the PostgreSQL in {state.folder} {flaw} and is in use: "
                "end its other users first, or choose another folder"
            )
        _bring_down(state, data)
        share(self._user_lock)

    def _initialise(self, state: StateFolder, binaries: Binaries, data: Path) -> None:
        unfinished = make_unfinished(state.folder)
        try:
            if state.account.is_other:
                os.chown(unfinished, state.account.uid, state.account.gid)
            # Nobody may connect until `guard` has set a password and said who may.
            arguments = ["-U", "postgres", "--auth=reject", "--encoding=UTF8", "--no-locale"]
            if not self._fsync:
                arguments.append("--no-sync")
            made = state.account.run(
                [binaries.program("initdb"), "-D", unfinished / "data", *arguments], limit_seconds=_LIMIT_SECONDS
            )
            if made.returncode != 0:
                raise program_failed(f"initdb could not make {data}", made.stdout)
            (unfinished / "data").rename(data)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        if self._fsync:
            _sync_folder(state.folder)
        log.info("embedded PostgreSQL initialized", extra={"data": str(data), "version": binaries.version})

    def _launch(
        self, state: StateFolder, binaries: Binaries, data: Path, *, only_port: int | None = None
    ) -> postmaster.Postmaster:
        server_log = data / postmaster.LOG_FILE
        _rotate(server_log)
        socket_folder = make_socket_folder(data, state.account)
        port = remembered_port(beside(data, "port"))
        for _ in range(_PORT_TRIES):
            if port is None or not is_free(port):
                port = free_port()
            if only_port not in {None, port}:
                raise EmbeddedPostgresError(
                    f"port {only_port} of the PostgreSQL in {data}, which its users know, was taken by another "
                    "program: end that program, or restart all users of the server"
                )
            log_start = server_log.stat().st_size if server_log.exists() else 0
            options = self._options(port, socket_folder)
            started = state.account.run(
                [
                    *(binaries.program("pg_ctl"), "start", "-D", data, "-l", server_log, "-o", options),
                    *("-s", "-w", "-t", str(int(_LIMIT_SECONDS))),
                ],
                limit_seconds=_LIMIT_SECONDS + 10,
            )
            server = postmaster.find(data, state.account)
            if server is not None and server.is_ready:
                remember_port(beside(data, "port"), server.port)
                beside(data, "died").unlink(missing_ok=True)
                details = {"data": str(data), "version": binaries.version, "port": port, "pid": server.pid}
                log.info("embedded PostgreSQL started", extra=details)
                return server
            if is_free(port):
                break  # the port is free, so the reason is another one
        raise program_failed(f"PostgreSQL could not start in {data}", started.stdout, server_log, log_start)

    def _options(self, port: int, socket_folder: str) -> str:
        settings = {
            **self._settings,
            **({} if self._fsync else {"fsync": "off"}),
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": socket_folder,
        }
        return " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in settings.items())


_users: weakref.WeakSet[EmbeddedPostgres] = weakref.WeakSet()


def _forget_users_after_fork() -> None:
    for user in list(_users):
        user._forget_after_fork()
    _users.clear()


os.register_at_fork(after_in_child=_forget_users_after_fork)


def _start_lock(state: StateFolder) -> contextlib.AbstractContextManager[None]:
    return exclusively(state.folder / "start.lock", limit_seconds=_LIMIT_SECONDS)


def _bring_down(state: StateFolder, data: Path) -> bool:
    was_running = postmaster.stop(data, state.account)
    postmaster.clear_remains(data, state.account)
    for mark in ("keep", "died"):
        beside(data, mark).unlink(missing_ok=True)
    remove_socket_folder(data, state.account)
    if was_running:
        log.info("embedded PostgreSQL stopped", extra={"data": str(data)})
    return was_running


def _has_died(data: Path) -> bool:
    """The server is not there: was it killed, not stopped?"""
    return (data / postmaster.PID_FILE).exists() or beside(data, "died").exists()


def _runs_without_fsync(data: Path) -> bool:
    return "fsync=off" in (data / "postmaster.opts").read_text()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rotate(server_log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if server_log.stat().st_size > _LARGE_LOG_BYTES:
            server_log.replace(server_log.with_name(f"{server_log.name}.1"))


def _check_settings(settings: Mapping[str, str]) -> None:
    for name in settings:
        if name in _OWN_SETTINGS:
            raise EmbeddedPostgresError(f"EmbeddedPostgres sets {name!r} itself; leave it out")
        if not re.fullmatch(r"[a-z_][a-z0-9_.]*", name):
            raise EmbeddedPostgresError(f"{name!r} is not the name of a PostgreSQL setting")


def _check_path(folder: Path) -> None:
    # pg_ctl puts the path into a shell command, between double quotes.
    forbidden = sorted(set(str(folder)) & set('"$`\\\n'))
    if forbidden:
        raise EmbeddedPostgresError(
            f"the folder {str(folder)!r} has {forbidden} in its path, which pg_ctl cannot pass on: "
            "choose another folder"
        )
