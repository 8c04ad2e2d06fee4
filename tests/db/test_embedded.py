"""The embedded PostgreSQL, with real servers, real processes and real crashes.

A test's helper processes talk over pipes: a line means "I have come this far", end of input means "go on".
Signals and conditions are waited for; nothing is assumed to be done after some time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest

from commandbus import embedded
from commandbus.db.embedded import EmbeddedPostgres, binaries, postmaster, state_folder
from commandbus.db.embedded.access import password_file
from commandbus.db.embedded.binaries import Account
from commandbus.errors import EmbeddedPostgresError
from support.access import passfile_of, password_in
from support.waiting import until

IS_ROOT = os.geteuid() == 0
root_only = pytest.mark.skipif(not IS_ROOT, reason="root alone can change users")
plain_user_only = pytest.mark.skipif(IS_ROOT, reason="no permission stops root")
SOURCE = Path(embedded.__file__).resolve().parent.parent
LIBRARIES = f"{SOURCE}:{Path(psycopg.__file__).parent.parent}"
NOBODY = 65534
Make: TypeAlias = Callable[..., EmbeddedPostgres]


@pytest.fixture(autouse=True)
def _no_server_is_left(folder: Path) -> Iterator[None]:
    yield
    for data in folder.rglob("postgres-*"):
        if data.is_dir() and "." not in data.name:
            assert _processes_in(data) == []


@pytest.fixture(scope="session")
def initialised(session_folder: Path, postgres_binaries: Path | None) -> Path:
    """A data folder, fresh from initdb."""
    server = EmbeddedPostgres(session_folder / "initialised", binaries=postgres_binaries, fsync=False)
    server.start()
    server.stop()
    data = server.status().data
    assert data is not None
    return data


@pytest.fixture
def make(folder: Path, initialised: Path, postgres_binaries: Path | None) -> Iterator[Make]:
    """Makes embedded servers without fsync, and ends them after the test.

    Unless told where, in the test's folder, with a copy of the initialised data: initdb takes a second.
    """
    made: list[EmbeddedPostgres] = []

    def make(where: Path | None = None, **options: Any) -> EmbeddedPostgres:
        if where is None and not (folder / "state").exists():
            (folder / "state").mkdir()
            subprocess.run(["cp", "-a", initialised, password_file(initialised), folder / "state"], check=True)
        options = {"fsync": False, "binaries": postgres_binaries, **options}
        made.append(EmbeddedPostgres(where or folder / "state", **options))
        return made[-1]

    yield make
    for server in made:
        with contextlib.suppress(EmbeddedPostgresError):
            server.stop(force=True)


def _processes_in(data: Path) -> list[int]:
    """Asked as the owner of the data: root in a container may not look at others' processes."""
    owner = data.stat()
    return postmaster._processes_in(data, Account(owner.st_uid, owner.st_gid))


def _query(dsn: str, query: str) -> Any:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query).fetchone()  # type: ignore[arg-type]
        return row[0] if row else None


def _execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[arg-type]


def _python(program: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A Python process that prints lines to us and waits for the end of its input."""
    prelude = (
        "import sys, os, signal\n"
        "from pathlib import Path\n"
        "from commandbus.embedded import EmbeddedPostgres\n"
        "def server(**options):\n"
        "    programs = os.environ.get('COMMANDBUS_TEST_POSTGRES_BIN')\n"
        "    return EmbeddedPostgres(sys.argv[1], binaries=Path(programs) if programs else None, **options)\n"
        "def say(*words): print(*words, flush=True)\n"
        "def wait(): sys.stdin.read()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(program), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": LIBRARIES},
        **options,
    )


USER = """
    with server(fsync=False) as used:
        say(used.status().pid)
        wait()
"""


@contextlib.contextmanager
def _user(where: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that uses the server until its input ends; the pid of the server that it got."""
    with _python(USER, where) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield process, int(line)
        finally:
            process.kill()


def _end_input(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(30)


class TestStartAndStop:
    def test_a_server_runs_between_start_and_stop(self, make: Make) -> None:
        server = make()
        dsn = server.start()
        status = server.status()
        assert server.running
        assert dsn == server.dsn == status.dsn == server.dsn_of("postgres")
        assert dsn.startswith(f"postgresql://postgres@127.0.0.1:{status.port}/postgres?")
        assert _query(dsn, "SHOW server_encoding") == "UTF8"
        assert _query(dsn, "SHOW data_directory") == str(status.data)
        assert str(int(_query(dsn, "SHOW server_version_num")) // 10000) == status.version

        assert server.stop() is True

        assert not server.running
        assert status.data is not None
        assert _processes_in(status.data) == []
        with pytest.raises(EmbeddedPostgresError, match="call start"):
            _ = server.dsn

    def test_stop_and_start_keep_data_and_address(self, make: Make) -> None:
        server = make()
        before = server.start()
        _execute(before, "CREATE TABLE kept AS SELECT 42 AS answer")
        server.stop()
        assert server.start() == before
        assert _query(before, "SELECT answer FROM kept") == 42

    def test_a_second_start_joins_the_same_server(self, make: Make) -> None:
        one, two = make(), make()
        assert one.start() == one.start() == two.start()
        assert one.status().pid == two.status().pid
        assert one.stop() is False
        assert two.running
        assert two.stop() is True

    def test_stop_without_start_does_nothing(self, make: Make) -> None:
        one, two = make(), make()
        one.start()
        assert two.stop() is False
        assert one.running

    def test_force_stops_it_whoever_uses_it(self, make: Make) -> None:
        one, two = make(), make()
        one.start()
        assert two.stop(force=True) is True
        assert not one.running
        assert two.stop(force=True) is False

    def test_fsync_is_on_unless_given_up(self, make: Make, postgres_binaries: Path | None) -> None:
        careless = make()
        assert _query(careless.start(), "SHOW fsync") == "off"
        with pytest.raises(EmbeddedPostgresError, match="fsync=off and is in use"):
            make(fsync=True).start()
        assert careless.running

        careless.stop(keep=True)

        careful = EmbeddedPostgres(careless.asked_folder, binaries=postgres_binaries)
        assert _query(careful.start(), "SHOW fsync") == "on"
        assert _query(careful.dsn, "SHOW full_page_writes") == "on"
        careful.stop()

    def test_settings_reach_the_server(self, make: Make) -> None:
        server = make(settings={"max_connections": "17", "application_name": 'it\'s "$HOME" `x`'})
        assert _query(server.start(), "SHOW max_connections") == "17"
        assert _query(server.dsn, "SELECT reset_val FROM pg_settings WHERE name = 'application_name'") == (
            'it\'s "$HOME" `x`'
        )

    @pytest.mark.parametrize("name", ["port", "fsync", "listen_addresses", "x; y", "Name"])
    def test_settings_of_our_own_or_malformed_are_refused(self, folder: Path, name: str) -> None:
        with pytest.raises(EmbeddedPostgresError, match=name):
            EmbeddedPostgres(folder, settings={name: "1"})

    def test_the_environment_of_the_user_does_not_reach_it(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server takes its client_encoding from PGCLIENTENCODING, if it has one."""
        server = make()
        wrong = {"PGDATA": "/nowhere", "PGPORT": "1", "PGOPTIONS": "-c nonsense=1", "PGCLIENTENCODING": "LATIN1"}
        with monkeypatch.context() as shell:
            for name, value in wrong.items():
                shell.setenv(name, value)
            dsn = server.start()
        assert _query(dsn, "SHOW data_directory") == str(server.status().data)
        assert _query(dsn, "SHOW port") != "1"
        assert _query(dsn, "SHOW client_encoding") == "UTF8"

    def test_the_public_face_starts_one(self, folder: Path, postgres_binaries: Path | None) -> None:
        with embedded.start(folder / "state", binaries=postgres_binaries) as server:
            assert _query(server.dsn, "SHOW fsync") == "on"
        assert not server.running


class TestAddress:
    def test_a_taken_port_is_replaced(self, make: Make) -> None:
        server = make()
        server.start()
        port = server.status().port
        assert port is not None
        server.stop()
        with socket.create_server(("127.0.0.1", port)):
            server.start()
            assert server.status().port != port

    def test_a_long_path_gets_a_short_socket(self, folder: Path, make: Make) -> None:
        server = make(folder / ("long" * 20) / ("path" * 20))
        server.start()
        sockets = Path(_query(server.dsn, "SHOW unix_socket_directories"))
        assert len(str(sockets)) < 80
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        with psycopg.connect(server.dsn, host=str(sockets)) as connection:
            assert connection.info.host == str(sockets)
        server.stop()
        assert not sockets.exists()

    def test_spaces_and_quotes_in_the_path(self, folder: Path, make: Make) -> None:
        server = make(folder / "it's a folder; really")
        assert _query(server.start(), "SELECT 1") == 1

    @pytest.mark.parametrize("name", ['a"b', "a$b", "a`b", "a\\b", "a\nb"])
    def test_a_path_that_pg_ctl_cannot_pass_on_is_refused(self, folder: Path, name: str) -> None:
        with pytest.raises(EmbeddedPostgresError, match="choose another folder"):
            EmbeddedPostgres(folder / name)


class TestAccess:
    """Nobody connects without the password, and only the owner of the folder can read it."""

    @pytest.fixture(autouse=True)
    def _no_password_from_elsewhere(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setenv("PGPASSFILE", str(folder / "none"))
        monkeypatch.delenv("PGPASSWORD", raising=False)

    @pytest.mark.parametrize("way", ["tcp", "socket"])
    def test_nobody_connects_without_the_password(self, make: Make, way: str) -> None:
        server = make()
        server.start()
        status = server.status()
        host = "127.0.0.1" if way == "tcp" else _query(server.dsn, "SHOW unix_socket_directories")
        for user in ("postgres", "nobody", "root"):
            for database in ("postgres", "template1"):
                with pytest.raises(psycopg.OperationalError, match="no password supplied"):
                    psycopg.connect(host=host, port=status.port, user=user, dbname=database)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(host=host, port=status.port, user="postgres", password="guess")
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            psycopg.connect(f"host={host} port={status.port} user=postgres replication=true")

    def test_the_address_holds_no_secret_and_works_for_every_database(self, make: Make) -> None:
        server = make()
        server.start()
        password = password_in(passfile_of(server))
        assert len(password) >= 43
        assert password not in server.dsn
        _execute(server.dsn, 'CREATE DATABASE "a b/ü?"')
        assert _query(server.dsn_of("a b/ü?"), "SELECT current_database()") == "a b/ü?"

    def test_the_password_file_is_the_folder_owners_alone(self, folder: Path, make: Make) -> None:
        server = make(folder / "fresh")
        server.start()
        found = Path(passfile_of(server)).stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_uid == (folder / "fresh").stat().st_uid == os.geteuid()

    @root_only
    @pytest.mark.parametrize("uid", [12345, NOBODY])
    def test_another_user_of_the_machine(self, make: Make, uid: int) -> None:
        """Also `nobody`, whom root's server runs as."""
        server = make()
        server.start()
        port, passfile = server.status().port, passfile_of(server)
        sockets = _query(server.dsn, "SHOW unix_socket_directories")
        stranger = Account(uid, uid)
        assert stranger.run(["/bin/cat", passfile]).returncode != 0
        python = _python_for(stranger)
        if python is None:
            pytest.skip("a plain user cannot reach a Python with these libraries")
        program = f"""
            import sys
            sys.path[:0] = {LIBRARIES.split(":")}
            import psycopg
            for host in ("127.0.0.1", {sockets!r}):
                for options in ({{}}, {{"passfile": {passfile!r}}}):
                    try:
                        psycopg.connect(host=host, port={port}, user="postgres", dbname="postgres", **options)
                        print("in")
                    except psycopg.OperationalError as error:
                        print("out")
        """
        assert stranger.run([python, "-c", textwrap.dedent(program)]).stdout.split() == ["out"] * 4

    @pytest.mark.skipif(psycopg.pq.version() < 160000, reason="this libpq knows no require_auth")
    def test_a_stranger_on_the_port_does_not_get_the_password(self, make: Make) -> None:
        """A server of theirs, while ours is down, that asks for the password in clear text."""
        server = make()
        address = server.start()
        port = server.status().port
        server.stop()
        received: list[bytes] = []

        def lie(listener: socket.socket) -> None:
            client, _ = listener.accept()
            with client:
                received.append(client.recv(4096))
                client.sendall(b"R" + (8).to_bytes(4, "big") + (3).to_bytes(4, "big"))
                received.append(client.recv(4096))

        with socket.create_server(("127.0.0.1", port or 0)) as listener:
            liar = threading.Thread(target=lie, args=(listener,))
            liar.start()
            with pytest.raises(psycopg.OperationalError, match="cleartext"):
                psycopg.connect(address, sslmode="disable", gssencmode="disable")
            liar.join()
        assert b"user" in received[0]
        assert received[1] == b""

    def test_the_servers_environment_has_nothing_of_its_starter(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = make()
        secrets = {"AWS_SECRET_ACCESS_KEY": "s3cret-1", "COMMANDBUS_DATABASE_URL": "s3cret-2", "MY": "s3cret-3"}
        with monkeypatch.context() as shell:
            for name, value in secrets.items():
                shell.setenv(name, value)
            server.start()
        status = server.status()
        assert status.data is not None
        owner = status.data.stat()
        seen = Account(owner.st_uid, owner.st_gid).run(["/bin/cat", f"/proc/{status.pid}/environ"]).stdout
        variables = dict(entry.partition("=")[::2] for entry in seen.split("\0") if entry)
        own = {"PATH", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PWD", "OLDPWD", "SHLVL", "_"}
        assert variables["LC_ALL"] == "C"
        assert {name for name in variables if not name.startswith(("PG", "LC_"))} <= own
        _execute(server.dsn, "CREATE TABLE env (line text)", "COPY env FROM PROGRAM 'env'")
        assert _query(server.dsn, "SELECT count(*) FROM env WHERE line LIKE 'PATH=%'") == 1
        assert _query(server.dsn, "SELECT count(*) FROM env WHERE line LIKE '%s3cret%'") == 0

    def test_data_that_trusted_local_users_asks_for_a_password_from_now_on(self, make: Make) -> None:
        server = make()
        server.start()
        data = server.status().data
        assert data is not None
        _execute(server.dsn, "CREATE TABLE kept AS SELECT 42 AS answer", "ALTER ROLE postgres PASSWORD NULL")
        server.stop()
        (data / "pg_hba.conf").write_text("local all all trust\nhost all all 127.0.0.1/32 trust\n")
        Path(passfile_of(server)).unlink()

        assert _query(server.start(), "SELECT answer FROM kept") == 42
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            psycopg.connect(host="127.0.0.1", port=server.status().port, user="postgres")

    def test_a_running_server_without_a_password_file_is_replaced_unless_others_use_it(self, make: Make) -> None:
        other, server = make(), make()
        other.start()
        pid = other.status().pid
        Path(passfile_of(other)).unlink()
        with pytest.raises(
            EmbeddedPostgresError, match=r"no private password file .* and is in use: end its other"
        ):
            server.start()
        assert other.status().pid == pid
        other.stop(keep=True)
        assert _query(server.start(), "SELECT 1") == 1
        assert server.status().pid != pid

    def test_a_password_that_others_could_read_is_replaced(self, make: Make) -> None:
        server = make()
        server.start()
        before = password_in(passfile_of(server))
        server.stop()
        Path(passfile_of(server)).chmod(0o644)
        assert _query(server.start(), "SELECT 1") == 1
        assert password_in(passfile_of(server)) != before

    def test_the_password_of_earlier_data_is_replaced(self, make: Make) -> None:
        server = make()
        server.start()
        data = server.status().data
        before = password_in(passfile_of(server))
        server.stop()
        assert data is not None
        shutil.rmtree(data)
        assert _query(server.start(), "SELECT 1") == 1
        assert password_in(passfile_of(server)) != before

    def test_a_password_that_cannot_be_set_is_an_error(self, make: Make) -> None:
        server = make()
        _execute(
            server.start(),
            "CREATE ROLE boss SUPERUSER",
            "SET ROLE boss",
            "SET SESSION AUTHORIZATION boss",
            "ALTER ROLE postgres RENAME TO renamed",
        )
        server.stop()
        Path(passfile_of(server)).unlink()
        with pytest.raises(
            EmbeddedPostgresError, match=r'password of .* could not be set(.|\n)*"postgres" does not'
        ):
            server.start()
        assert not Path(passfile_of(server)).exists()


class TestUsers:
    @pytest.mark.slow
    def test_ten_processes_at_once_get_one_server(self, folder: Path, make: Make) -> None:
        processes = [_python(USER, folder / "state") for _ in range(10)]
        with contextlib.ExitStack() as stack:
            for process in processes:
                stack.enter_context(process)
            pids = {int(process.stdout.readline()) for process in processes if process.stdout}
            assert len(pids) == 1
            assert [_end_input(process) for process in processes] == [0] * 10
        assert not make().running

    def test_ten_threads_at_once_get_one_server(self, make: Make) -> None:
        servers = [make() for _ in range(10)]
        addresses: list[str] = []
        threads = [threading.Thread(target=lambda one=server: addresses.append(one.start())) for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(addresses) == 10
        assert len(set(addresses)) == 1
        assert [server.stop() for server in servers] == [False] * 9 + [True]

    def test_the_last_one_out_stops_it(self, folder: Path, make: Make) -> None:
        server = make()
        server.start()
        with _user(folder / "state") as (process, pid):
            assert pid == server.status().pid
            assert server.stop() is False
            assert server.running
            assert _end_input(process) == 0
        assert not server.running

    def test_a_killed_user_leaves_a_server_that_the_next_one_takes_over(self, folder: Path, make: Make) -> None:
        with _user(folder / "state") as (process, pid):
            server = make()
            _execute(server.dsn, "CREATE TABLE kept AS SELECT 42 AS answer")
            process.kill()
            process.wait(10)
        assert server.status().pid == pid
        assert _query(server.start(), "SELECT answer FROM kept") == 42
        assert server.status().pid == pid
        assert server.stop() is True

    def test_keep_outlives_its_user_and_later_ones(self, make: Make) -> None:
        keeper, visitor = make(keep=True), make()
        keeper.start()
        assert keeper.stop() is False
        visitor.start()
        assert visitor.stop() is False
        assert visitor.running
        assert visitor.stop(force=True) is True
        visitor.start()
        assert visitor.stop() is True, "a new server is not kept because an earlier one was"

    def test_the_end_of_the_process_is_enough(self, folder: Path, make: Make) -> None:
        program = """
            server().start()
        """
        with _python(program, folder / "state") as process:
            assert process.wait(30) == 0
        assert not make().running

    def test_a_forked_child_neither_ends_nor_prolongs_its_parents_use(self, folder: Path, make: Make) -> None:
        program = """
            used = server()
            used.start()
            inner, outer = os.pipe()
            if os.fork() == 0:
                used.stop()
                say("child", used.running)
                os.close(outer)
                os.read(inner, 1)      # lives until its parent is gone
                os._exit(0)
            wait()
            say("parent", used.running, used.stop())
        """
        with _python(program, folder / "state") as process:
            assert process.stdout is not None
            assert process.stdout.readline().split() == ["child", "True"]
            assert process.stdin is not None
            process.stdin.close()
            assert process.stdout.readline().split() == ["parent", "True", "True"]
        assert not make().running

    def test_ctrl_c_in_the_terminal_does_not_reach_the_server(self, folder: Path, make: Make) -> None:
        program = """
            used = server()
            used.start()
            pid = used.status().pid
            try:
                say(pid)
                wait()
            except KeyboardInterrupt:
                say(used.running)
                used.stop(keep=True)
        """
        with _python(program, folder / "state", start_new_session=True) as process:
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            os.killpg(process.pid, signal.SIGINT)
            assert process.stdout.readline().strip() == "True"
            assert process.wait(30) == 0
        assert make().status().pid == pid

    @pytest.mark.slow
    @pytest.mark.parametrize("delay_seconds", [0.02, 0.2, 0.5, 0.8, 1.1])
    def test_an_interrupted_start_leaves_no_server(self, folder: Path, make: Make, delay_seconds: float) -> None:
        program = """
            try:
                say("ready")
                server().start()
                wait()
            except KeyboardInterrupt:
                pass
        """
        with _python(program, folder / "state") as process:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(delay_seconds)  # any moment of a start will do: that is the point
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        assert not make().running
        make().start()

    def test_an_interrupt_wins_over_a_program_that_takes_its_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """That initdb needs longer than we wait for it is not what Ctrl-C raises."""
        monkeypatch.setattr("commandbus.db.embedded.binaries._INTERRUPTED_GRACE_SECONDS", 0.2)
        started = tmp_path / "started"

        def interrupt() -> None:
            until(lambda: started.exists() and started.read_text().strip())
            os.kill(os.getpid(), signal.SIGINT)

        asker = threading.Thread(target=interrupt)
        asker.start()
        with pytest.raises(KeyboardInterrupt):
            Account.current().run(["/bin/sh", "-c", f"echo $$ > {started}; exec sleep 60"])
        asker.join()
        with pytest.raises(ProcessLookupError):
            os.kill(int(started.read_text()), 0)


class TestCrashes:
    def test_a_killed_postmaster_recovers(self, make: Make) -> None:
        server = make(fsync=True)
        dsn = server.start()
        _execute(dsn, "CREATE TABLE kept AS SELECT 42 AS answer")
        pid = server.status().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: not server.running)
        assert _query(server.start(), "SELECT answer FROM kept") == 42
        assert server.status().pid != pid

    def test_backends_that_outlive_their_postmaster_are_ended(self, make: Make) -> None:
        server = make()
        dsn = server.start()
        data, pid = server.status().data, server.status().pid
        assert data is not None
        assert pid is not None
        with psycopg.connect(dsn, autocommit=True) as connection:
            backend = connection.info.backend_pid
            # Stopped, it cannot notice that its postmaster is gone, like one in a long computation.
            os.kill(backend, signal.SIGSTOP)
            os.kill(pid, signal.SIGKILL)
            until(lambda: not server.running)
            until(lambda: _processes_in(data) == [backend])
            assert _query(server.start(), "SELECT 1") == 1
            assert backend not in _processes_in(data)

    def test_a_pid_file_that_names_a_stranger(self, make: Make) -> None:
        server = make()
        server.start()
        data = server.status().data
        assert data is not None
        pid_file = data / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        server.stop()
        owner = data.stat()
        # After a reboot the pid may belong to anybody, here to a process of the server's own user.
        with subprocess.Popen(["sleep", "600"], user=owner.st_uid if IS_ROOT else None, cwd="/") as stranger:
            pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
            os.chown(pid_file, owner.st_uid, owner.st_gid)
            assert not server.running
            assert _query(server.start(), "SELECT 1") == 1
            assert stranger.poll() is None
            server.stop()
            stranger.kill()

    @pytest.mark.slow
    @pytest.mark.parametrize("delay_seconds", [0.1, 0.3, 0.6])
    def test_a_killed_initialisation_does_not_poison_the_folder(
        self, folder: Path, make: Make, delay_seconds: float
    ) -> None:
        state = folder / "state"
        with _python("server().start()", state) as process:
            until(lambda: any(state.glob("commandbus-unfinished-*")))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(delay_seconds)
            process.kill()
        assert _query(make().start(), "SELECT 1") == 1
        until(lambda: not any(_processes_in(path) for path in state.glob("commandbus-unfinished-*")))

    def test_a_failed_initialisation_leaves_nothing(
        self, folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = Account.run

        def run(self: Account, command: Any, **options: Any) -> Any:
            if Path(command[0]).name == "initdb" and "-D" in command:
                command = [*command, "--no-such-option"]
            return real(self, command, **options)

        monkeypatch.setattr(Account, "run", run)
        with pytest.raises(EmbeddedPostgresError, match="no-such-option"):
            make(folder / "state").start()
        assert not list((folder / "state").glob("postgres-*[0-9]"))
        assert not list((folder / "state").glob("commandbus-unfinished-*"))

    def test_a_server_that_does_not_start_says_why(self, make: Make) -> None:
        server = make(settings={"shared_buffers": "nonsense"})
        with pytest.raises(EmbeddedPostgresError, match=r"server\.log(.|\n)*shared_buffers.*nonsense"):
            server.start()
        assert not server.running

    def test_a_frozen_starter_is_not_waited_for_without_end(
        self, folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("commandbus.db.embedded.server._LIMIT_SECONDS", 0.3)
        (folder / "state").mkdir()
        program = """
            import fcntl
            fcntl.flock(os.open(sys.argv[1], os.O_RDONLY | os.O_CREAT), fcntl.LOCK_EX)
            say("held")
            wait()
        """
        with _python(program, folder / "state" / "start.lock") as process:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(EmbeddedPostgresError, match=r"another process has held .*start\.lock"):
                make().start()
            _end_input(process)


BUS = """
    from commandbus import CommandBus
    from psycopg import OperationalError
    with CommandBus(f"embedded:{sys.argv[1]}") as bus:
        bus.migrate()
        bus.create_domain("orders")
        say("ready")
        for line in sys.stdin:
            while True:
                try:
                    bus.send("orders", "say", line.strip(), command_id=line.strip())
                    break
                except OperationalError:
                    say("lost")
            say("sent")
"""

WORKER = """
    import logging
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    from commandbus import HandlerRegistry, Worker
    handlers = HandlerRegistry()
    handlers.register("orders", "say", lambda ctx: say("handled", ctx.command.data))
    with Worker(handlers, database_url=f"embedded:{sys.argv[1]}"):
        say("ready")
        wait()
"""


def _wait_for_line(process: subprocess.Popen[str], expected: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.strip() == expected:
            return
    raise AssertionError(f"it ended without {expected!r}: {seen}")


def _kill(server: EmbeddedPostgres) -> int:
    """kill -9 of the postmaster; its backends find out by themselves."""
    pid = server.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def _watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "commandbus-embedded-watcher"]


class TestRevival:
    """A server that dies under its users is started again by one of them, at the same address."""

    @pytest.mark.parametrize("whom", ["postmaster", "group"])
    def test_a_bus_and_a_worker_go_on_after_kill_9(self, folder: Path, make: Make, whom: str) -> None:
        server = make()
        with contextlib.ExitStack() as stack:
            bus = stack.enter_context(_python(BUS, folder / "state"))
            assert bus.stdin is not None
            _wait_for_line(bus, "ready")
            worker = stack.enter_context(_python(WORKER, folder / "state"))
            _wait_for_line(worker, "ready")
            address = server.dsn
            for name in ("one", "two", "three"):
                print(name, file=bus.stdin, flush=True)
                _wait_for_line(bus, "sent")
                _wait_for_line(worker, f"handled {name}")
                pid = server.status().pid
                assert pid is not None
                (os.killpg if whom == "group" else os.kill)(pid, signal.SIGKILL)
                # Sessions outlive the postmaster for a moment, and may do the next command even so.
                until(lambda killed=pid: server.status().pid not in (None, killed))
            print("four", file=bus.stdin, flush=True)
            _wait_for_line(worker, "handled four")
            assert server.dsn == address
            assert _end_input(bus) == 0
            assert server.running
            assert _end_input(worker) == 0
        assert not server.running

    def test_many_users_start_it_once(self, make: Make, caplog: pytest.LogCaptureFixture) -> None:
        servers = [make(revive=True) for _ in range(5)]
        for server in servers:
            server.start()
        address = servers[0].dsn
        for _ in range(3):
            caplog.clear()
            pid = _kill(servers[0])
            until(lambda killed=pid: servers[0].status().pid not in (None, killed))
            for server in servers:
                server.start()  # waits for the start lock, so whoever would start another has done so
            assert _query(address, "SELECT 1") == 1
            new = servers[0].status().pid
            assert {server.status().pid for server in servers} == {new}
            assert [message for message in caplog.messages if "started again" in message] == [
                "embedded PostgreSQL died and was started again"
            ]
        assert [server.stop() for server in servers] == [False] * 4 + [True]
        assert _watchers() == []

    def test_after_a_stop_nobody_revives_it(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("commandbus.db.embedded.watch._LOOK_SECONDS", 0.01)
        looks: list[None] = []
        real = EmbeddedPostgres._revive

        def revive(self: EmbeddedPostgres) -> None:
            real(self)
            looks.append(None)

        monkeypatch.setattr(EmbeddedPostgres, "_revive", revive)
        user, other = make(revive=True), make()
        user.start()
        assert other.stop(force=True) is True
        until(lambda: len(looks) > 5)
        assert not user.running

        other.start()
        pid = _kill(other)
        until(lambda: user.status().pid not in (None, pid))
        other.stop()
        assert user.stop() is True

    def test_a_stop_after_it_died_is_a_stop(self, make: Make) -> None:
        user, other = make(), make()
        user.start()
        _kill(user)
        until(lambda: not user.running)
        other.stop(force=True)
        user._revive()
        assert not user.running

    def test_a_start_that_fails_is_tried_again_at_the_same_address(self, make: Make) -> None:
        user, other = make(), make()
        address = user.start()
        port = user.status().port
        assert port is not None
        _kill(user)
        until(lambda: not user.running)
        with socket.create_server(("127.0.0.1", port)):
            for _ in range(2):
                with pytest.raises(EmbeddedPostgresError, match=f"port {port} .* taken by another program"):
                    user._revive()
        user._revive()
        assert user.dsn == address
        assert _query(address, "SELECT 1") == 1

        _kill(user)
        until(lambda: not user.running)
        with socket.create_server(("127.0.0.1", port)), pytest.raises(EmbeddedPostgresError):
            user._revive()
        other.stop(force=True)
        user._revive()
        assert not user.running, "a stop ends the attempts"

    def test_it_keeps_fsync_that_others_count_on(self, make: Make) -> None:
        careful, careless = make(fsync=True), make()
        careful.start()
        careless.start()
        _kill(careful)
        until(lambda: not careful.running)
        careless._revive()
        assert _query(careless.dsn, "SHOW fsync") == "on"

    def test_a_server_that_is_to_stay_up_is_still_to_stay_up(self, make: Make) -> None:
        keeper, user = make(keep=True), make(revive=True)
        keeper.start()
        keeper.stop()
        user.start()
        pid = _kill(user)
        until(lambda: user.status().pid not in (None, pid))
        assert user.stop() is False
        assert user.running


class TestStateFolder:
    def test_no_parent_changes_its_mode_or_owner(self, folder: Path, make: Make) -> None:
        inner = folder / "a" / "b"
        inner.mkdir(parents=True)
        (folder / "a").chmod(0o711)
        before = {path: _owner_and_mode(path) for path in (inner, *inner.parents)}
        server = make(inner / ".commandbus")
        server.start()
        server.stop()
        assert {path: _owner_and_mode(path) for path in before} == before

    def test_a_private_umask_does_no_harm(self, folder: Path, make: Make) -> None:
        previous = os.umask(0o077)
        try:
            server = make(folder / "fresh")
            server.start()
        finally:
            os.umask(previous)
        assert server.status().folder == folder / "fresh"
        assert server.status().note is None

    def test_a_file_in_the_way(self, folder: Path, make: Make) -> None:
        (folder / "file").write_text("")
        for where in (folder / "file", folder / "file" / "below"):
            with pytest.raises(EmbeddedPostgresError, match=r"file.*choose another folder"):
                make(where).start()

    @plain_user_only
    def test_a_folder_that_we_may_not_write_to(self, folder: Path, make: Make) -> None:
        (folder / "locked").mkdir(mode=0o555)
        with pytest.raises(EmbeddedPostgresError, match=r"locked.*choose a folder that"):
            make(folder / "locked" / "state").start()
        with pytest.raises(EmbeddedPostgresError, match=r"locked.*choose a folder that"):
            make(folder / "locked").start()

    def test_data_that_is_none(self, folder: Path, make: Make) -> None:
        server = make()
        server.start()
        data = server.status().data
        server.stop()
        assert data is not None
        shutil.rmtree(data)
        data.mkdir()
        with pytest.raises(EmbeddedPostgresError, match=r"not a PostgreSQL data folder.*move it away"):
            server.start()
        assert data.stat().st_uid == os.geteuid(), "what is not ours keeps its owner"

    def test_data_of_another_version_under_our_name(self, make: Make) -> None:
        server = make()
        server.start()
        data = server.status().data
        server.stop()
        assert data is not None
        (data / "PG_VERSION").write_text("9\n")
        with pytest.raises(EmbeddedPostgresError, match=r"data of PostgreSQL 9.*rename it to postgres-9"):
            server.start()

    def test_data_whose_programs_are_gone(self, folder: Path) -> None:
        (folder / "state" / "postgres-7").mkdir(parents=True)
        with pytest.raises(EmbeddedPostgresError, match="the data is of PostgreSQL 7, but only PostgreSQL"):
            EmbeddedPostgres(folder / "state").start()

    def test_no_programs_at_all(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(binaries, "_candidates", lambda: iter(()))
        with pytest.raises(EmbeddedPostgresError, match=r"pip install 'commandbus-pg\[embedded\]'"):
            EmbeddedPostgres(folder / "state").start()

    def test_given_programs_that_are_none(self, folder: Path) -> None:
        with pytest.raises(EmbeddedPostgresError, match="no usable PostgreSQL in"):
            EmbeddedPostgres(folder / "state", binaries=folder).start()

    def test_debians_client_package_alone_is_not_enough(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client_only = folder / "99" / "bin"
        client_only.mkdir(parents=True)
        for name in ("psql", "pg_ctl"):
            (client_only / name).write_text("#!/bin/sh\n")
            (client_only / name).chmod(0o755)
        monkeypatch.setattr(binaries, "_DEBIAN", folder)
        assert client_only not in list(binaries._candidates())

    @root_only
    def test_a_full_disk(self, folder: Path, make: Make) -> None:
        disk = folder / "disk"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "none", disk], check=False)
        if mounted.returncode != 0:
            pytest.skip("no right to mount a small disk here")
        try:
            with pytest.raises(EmbeddedPostgresError, match="the disk is full; free some space"):
                make(disk / "state").start()
            assert not list((disk / "state").glob("postgres-*[0-9]"))
        finally:
            subprocess.run(["umount", disk], check=True)


class TestFoldersOfOthers:
    def test_what_is_not_ours_is_left_alone(self, folder: Path, make: Make) -> None:
        state = folder / "state"
        theirs = ["data.new-2026", "postgres-15.new-abc", "commandbus-unfinished-notes"]
        for name in theirs:
            (state / name).mkdir(parents=True)
            (state / name / "precious").write_text("keep")
        left = state / "commandbus-unfinished-abc"
        left.mkdir()
        (left / ".commandbus-unfinished").touch()
        server = make(state)
        server.start()
        assert [name for name in theirs if not (state / name / "precious").exists()] == []
        assert not left.exists(), "what an interrupted start has left is removed"


@root_only
class TestAsRoot:
    def test_the_server_is_not_roots(self, make: Make) -> None:
        server = make()
        server.start()
        status = server.status()
        assert status.data is not None
        assert Path(f"/proc/{status.pid}").stat().st_uid == status.data.stat().st_uid != 0

    def test_an_unreachable_folder_is_replaced(
        self,
        folder: Path,
        make: Make,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(state_folder, "_FALLBACK", folder / "var")
        home = folder / "project"
        home.mkdir(mode=0o700)
        server = make(home / ".commandbus")
        assert _query(server.start(), "SELECT 1") == 1
        status = server.status()
        assert status.folder.parent == folder / "var"
        assert status.folder.name.startswith("project-")
        assert status.note is not None
        assert status.note in caplog.messages
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        server.stop()
        home.chmod(0o755)
        again = make(home / ".commandbus")
        assert again.start() == status.dsn, "data that was put elsewhere is found again"

    def test_unreachable_programs_are_copied_once(
        self, folder: Path, make: Make, postgres_binaries: Path | None
    ) -> None:
        source = next((path for path in [*binaries._wheel(), postgres_binaries] if path), None)
        if source is None or not source.is_dir():
            pytest.skip("no self-contained PostgreSQL here")
        private = folder / "private"
        package = source.parent.parent
        shutil.copytree(package, private / package.name, symlinks=True)
        if (libraries := package.with_name(f"{package.name}.libs")).is_dir():
            shutil.copytree(libraries, private / libraries.name)
        private.chmod(0o700)
        server = make(binaries=private / package.name / source.parent.name / "bin")
        server.start()
        server.stop()
        copies = {path: path.stat().st_mtime_ns for path in (folder / "state").glob("binaries-*")}
        server.start()
        assert len(copies) == 1
        assert {path: path.stat().st_mtime_ns for path in (folder / "state").glob("binaries-*")} == copies
        assert stat.S_IMODE(private.stat().st_mode) == 0o700

    def test_a_users_own_data_is_run_as_that_user(self, folder: Path, make: Make) -> None:
        state = folder / "state"
        state.mkdir()
        os.chown(state, 12345, 12345)
        server = make()
        server.start()
        data = server.status().data
        server.stop()
        assert data is not None
        for path in [data, *data.rglob("*")]:
            os.chown(path, 12345, 12345)
        again = make()
        again.start()
        assert Path(f"/proc/{again.status().pid}").stat().st_uid == 12345

    def test_data_restored_by_root_is_given_to_the_server(self, folder: Path, make: Make) -> None:
        server = make()
        server.start()
        data = server.status().data
        server.stop()
        assert data is not None
        for path in [data, *data.rglob("*")]:
            os.chown(path, 0, 0)
        assert _query(make().start(), "SELECT 1") == 1

    @pytest.mark.slow
    def test_servers_and_folders_for_a_plain_user(self, folder: Path) -> None:
        """What depends on whose files they are, again, as a user without rights."""
        python = _python_for(Account(NOBODY, NOBODY))
        if python is None:
            pytest.skip("a plain user cannot reach a Python with these libraries")
        home = folder / "home"
        home.mkdir()
        os.chown(home, NOBODY, NOBODY)
        done = subprocess.run(
            [
                python,
                "-m",
                "pytest",
                "-q",
                "-m",
                "not slow",
                "-k",
                "TestStartAndStop or TestPlace",
                "-p",
                "no:cacheprovider",
                str(Path(__file__).resolve()),
            ],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd=SOURCE.parent,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("COMMANDBUS_TEST_")},
                "HOME": str(home),
                "TMPDIR": str(home),
                "PYTHONPATH": LIBRARIES,
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout


def _python_for(account: Account) -> str | None:
    """Ours, or the system's of the same version with our libraries: ours may be in root's home."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/python{version}"):
        look = f"import sys; sys.path[:0] = {LIBRARIES.split(':')}; import psycopg, pytest, commandbus.embedded"
        with contextlib.suppress(OSError):
            if account.run([python, "-c", f"{look}; open({__file__!r})"]).returncode == 0:
                return python
    return None


def _owner_and_mode(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid, found.st_mode
