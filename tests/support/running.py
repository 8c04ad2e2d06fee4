"""How the tests of one run share a machine: which folder they share, in which order they start, which run alone.

A run has one controller, and test workers that it starts (pytest-xdist); without `-n` the one process is both. The
hooks in `tests/conftest.py` call these functions.
"""

from __future__ import annotations

import faulthandler
import fcntl
import functools
import gc
import itertools
import json
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy
from xdist.scheduler import LoadScopeScheduling

T = TypeVar("T")

# A busy machine may stop a test for a while between two lines: that is not the fault of what it tests.
settings.register_profile("commandbus", deadline=None)
settings.load_profile("commandbus")

FAILURES_VARIABLE = "COMMANDBUS_TEST_FAILURES"
THOROUGH_VARIABLE = "COMMANDBUS_TEST_THOROUGH"
LONGEST_TEST_SECONDS = 240.0
MOST_COMPUTING = 6  # test workers that begin a test whenever they have one
IDLE_LOOK_SECONDS = 0.25
IDLE_SHARE = 0.2  # of all processors together: two fifths of one, where there are two
IDLE_LASTS_SECONDS = 2.0  # after a look, a test worker goes on for so long: many tests take less than a look
MOST_IDLE_LOOKS = 40  # then a test begins anyway: others may use the machine for as long as they like
MEMORY = Path("/dev/shm")  # a file system in memory, on every Linux
MEMORY_BYTES = 6 << 30
_GROUPS_FILE = "groups.json"
_FOLDER_KEY = "commandbus_run_folder"


def examples(usual: T, *, thorough: T) -> T:
    """What a test plays, or how often: more with `./dev test --thorough`."""
    return thorough if os.environ.get(THOROUGH_VARIABLE) else usual


def drawn(strategy: SearchStrategy[T], usual: int, *, thorough: int) -> list[T]:
    """Examples for a test beside which a worker's threads run: those use `random`, and hypothesis would take that
    for the strategy's doing. So they are drawn before."""
    found: list[T] = []

    @settings(max_examples=examples(usual, thorough=thorough), deadline=None, database=None)
    @given(strategy)
    def draw(value: T) -> None:
        found.append(value)

    draw()
    return found


def list_failures(reporter: Any) -> None:
    """Where `.ci/run` asks for it: what failed and why, a line each."""
    path = os.environ.get(FAILURES_VARIABLE)
    if path:
        reports = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
        found = {report.nodeid: _reason(report) for report in reports}
        Path(path).write_text("".join(f"{name}\t{reason}\n" for name, reason in found.items()))


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return text.strip().partition("\n")[0][:300]


# The folder that all test workers of one run share.


def is_controller(config: pytest.Config) -> bool:
    """Whether this process is not a test worker that another one started."""
    return not hasattr(config, "workerinput")


def work_in_memory(config: pytest.Config) -> None:
    """Whatever this run writes to a temporary folder, its servers' data too, goes to memory if there is enough.

    Making and copying a thousand small files, of which a new database consists, is ten times as fast there.
    """
    if not is_controller(config) or "TMPDIR" in os.environ:
        return
    try:
        if shutil.disk_usage(MEMORY).free < MEMORY_BYTES:
            return
        folder = Path(tempfile.mkdtemp(prefix="cb-", dir=MEMORY))
    except OSError:
        return
    folder.chmod(0o1777)
    config.stash[_memory] = folder
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # look again


def leave_memory(config: pytest.Config) -> None:
    """Nothing is left in it."""
    folder = config.stash.get(_memory, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


_memory = pytest.StashKey[Path]()


def make_temporary_folder() -> Path:
    """Unlike pytest's own, one that the server's user can enter when the tests run as root."""
    folder = Path(tempfile.mkdtemp(prefix="commandbus-test-"))
    folder.chmod(0o755)
    return folder.resolve()


def make_run_folder(config: pytest.Config) -> None:
    """The controller makes the folder; its test workers are told where it is."""
    told = getattr(config, "workerinput", {}).get(_FOLDER_KEY)
    config.stash[_folder] = Path(told) if told else make_temporary_folder()


def tell_test_worker(config: pytest.Config, workerinput: dict[str, object]) -> None:
    """The controller hands this to a test worker that it starts."""
    workerinput[_FOLDER_KEY] = str(run_folder(config))


def run_folder(config: pytest.Config) -> Path:
    return config.stash[_folder]


def remove_run_folder(config: pytest.Config) -> None:
    """Ends the run's PostgreSQL, which every test worker leaves running for the others."""
    from commandbus.db.embedded import EmbeddedPostgres

    folder = config.stash.get(_folder, None)
    if folder is not None and is_controller(config):
        if (folder / "server").exists():
            EmbeddedPostgres(folder / "server").stop(force=True)
        shutil.rmtree(folder, ignore_errors=True)


_folder = pytest.StashKey[Path]()


# Order.


# Tests of the first folders start processes and wait for them, those of the last ones keep a processor busy.
_FOLDERS = (
    *("browser", "zoo", "faults", "supervisor", "worker", "limits", "processes", "cli", "db", "docs", "testing"),
    *("lifecycle", "plans", "sql", "flow", "model"),
)


def put_in_order(items: list[pytest.Item]) -> None:
    """The longest tests first, so that no test worker is left alone with one at the end; `alone` tests last."""
    items.sort(key=_turn)


def list_groups(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test worker tells the controller which tests share an expensive fixture (a module, or all that name it),
    which run alone, and which hardly use a processor."""
    groups = {}
    for item in items:
        if marker := item.get_closest_marker("shared_setup"):
            groups[item.nodeid] = marker.args[0] if marker.args else item.path.stem
    alone = [item.nodeid for item in items if item.get_closest_marker("alone")]
    waits = [groups.get(item.nodeid, item.nodeid) for item in items if item.get_closest_marker("waits")]
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":  # they have all collected the same
        told = {"groups": groups, "alone": alone, "waits": waits}
        (run_folder(config) / _GROUPS_FILE).write_text(json.dumps(told))


def keep_what_was_collected() -> None:
    """Thousands of tests are a few hundred thousand objects, which live to the end. The garbage collector need not
    walk through them again and again: that takes a tenth of a second, in which no thread of a test runs."""
    gc.collect()
    gc.freeze()


class OneByOne(LoadScopeScheduling):  # type: ignore[misc]
    """The controller hands out one test at a time; tests of a group go to one test worker.

    The first test worker begins with the last tests, and the others with the first. So there is always somebody
    who computes while the others wait, and never everybody at once. Test workers beyond `MOST_COMPUTING` take the
    tests that wait first: these use next to no processor time, and would hold up the other tests. After that they
    take any test, but begin it only while a processor is idle (`idle_processor`).
    """

    def _split_scope(self, nodeid: str) -> str:
        groups: dict[str, str] = self._told["groups"]
        return groups.get(nodeid, nodeid)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        assigned = self.assigned_work[node]
        unit = self._split_scope(self.registered_collections[node][item_index])
        if all(assigned[unit].values()):
            del assigned[unit]  # or the base class counts everything that was ever done, again for each test

    def _assign_work_unit(self, node: Any) -> None:
        unit = self._next_unit(self.nodes.index(node))
        if unit is None:
            node.shutdown()
            return
        tests = self.assigned_work[node][unit] = self.workqueue.pop(unit)
        node.send_runtest_some([self._numbers[test] for test, is_done in tests.items() if not is_done])

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        """Of the tests, which all test workers have collected alike."""
        return {test: number for number, test in enumerate(self.collection)}

    def _next_unit(self, rank: int) -> str | None:
        """The test, or group of tests, that the test worker of this rank takes next."""
        in_turn: Iterable[str] = reversed(self.workqueue) if rank == 0 else self.workqueue
        computing = (unit for unit in in_turn if unit not in self._waits and unit not in self._alone)
        waiting = (unit for unit in self._waits if unit in self.workqueue)
        choices = (waiting, computing) if rank >= MOST_COMPUTING else (computing, waiting)
        return next(itertools.chain(*choices, self.workqueue), None)

    @functools.cached_property
    def _waits(self) -> dict[str, None]:
        """In their order."""
        return dict.fromkeys(unit for unit in self._told["waits"] if unit not in self._alone)

    @functools.cached_property
    def _alone(self) -> set[str]:
        return set(self._told["alone"])

    @functools.cached_property
    def _told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((run_folder(self.config) / _GROUPS_FILE).read_text())
        return found


def _turn(item: pytest.Item) -> tuple[int, int]:
    folder = item.nodeid.removeprefix("tests/").partition("/")[0]
    place = _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS)
    if item.get_closest_marker("alone"):
        return 2, place
    return 0 if any(item.get_closest_marker(name) for name in ("slow", "long", "shared_setup")) else 1, place


@contextmanager
def in_company(item: pytest.Item) -> Iterator[None]:
    """An `alone` test begins when no other test runs, and keeps others from beginning. Only an `alone` test that
    `waits` runs beside another one: it takes no processor time from that."""
    folder = run_folder(item.config)
    is_alone, waits = item.get_closest_marker("alone"), item.get_closest_marker("waits")
    with (
        (folder / "others.lock").open("a") as others,  # shared by tests that are not alone
        (folder / "alone.lock").open("a") as alone,  # shared by tests that are
        (folder / "computing.lock").open("a") as computing,  # exclusive, among those
    ):
        if is_alone:
            fcntl.flock(others, fcntl.LOCK_EX)
            fcntl.flock(alone, fcntl.LOCK_SH)
            fcntl.flock(others, fcntl.LOCK_UN)
            if not waits:
                fcntl.flock(computing, fcntl.LOCK_EX)
        else:
            fcntl.flock(others, fcntl.LOCK_SH)
            while not _is_free(alone):
                fcntl.flock(others, fcntl.LOCK_UN)
                fcntl.flock(alone, fcntl.LOCK_EX)
                fcntl.flock(alone, fcntl.LOCK_UN)
                fcntl.flock(others, fcntl.LOCK_SH)
        yield


@contextmanager
def idle_processor(item: pytest.Item) -> Iterator[None]:
    """A test worker beyond `MOST_COMPUTING` begins a test that computes when a processor is idle, or after ten
    seconds.

    One of them looks at a time, so that the next one sees what this one's test uses.
    """
    rank = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    looked_at = item.config.stash.get(_looked_at, -math.inf)
    is_due = time.monotonic() > looked_at + IDLE_LASTS_SECONDS
    if rank >= MOST_COMPUTING and is_due and not item.get_closest_marker("waits"):
        with (run_folder(item.config) / "idle.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for _ in range(MOST_IDLE_LOOKS):
                if _idle_share(IDLE_LOOK_SECONDS) >= IDLE_SHARE:
                    break
        item.config.stash[_looked_at] = time.monotonic()
    yield


_looked_at = pytest.StashKey[float]()


def _idle_share(seconds: float) -> float:
    """Which share of their time the processors had nothing to do, from now on for so long."""
    idle, total = _processor_ticks()
    time.sleep(seconds)
    idle_now, total_now = _processor_ticks()
    return (idle_now - idle) / max(1, total_now - total)


def _processor_ticks() -> tuple[int, int]:
    """Of all processors since the machine started: idle (also if a disk is waited for), and in all."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _is_free(lock: TextIO) -> bool:
    """Whether nobody holds it, not even shared."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


@contextmanager
def no_longer_than(item: pytest.Item, seconds: float = LONGEST_TEST_SECONDS) -> Iterator[None]:
    """A test that hangs must not hold up all others: where it hangs is printed, and it fails."""

    def alarm(number: int, frame: object) -> None:
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail(f"{item.nodeid} has not ended after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
