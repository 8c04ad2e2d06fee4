"""A handler run wild writes over the board and into the control socket: its worker alone pays for that."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import CommandBus
from support.supervised import Supervised
from support.waiting import one, until, verdicts

Db = psycopg.Connection[Any]
Supervise = Callable[..., Supervised]
Wild = Callable[..., Supervised]

HOSTILE = '''

import mmap, random, socket, struct, threading

def board_fd():
    """The board that the supervisor reads."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "commandbus-board" in os.readlink(f"/proc/self/fd/{fd}"):
                return int(fd)
        except OSError:
            continue

def board():
    fd = board_fd()
    return mmap.mmap(fd, os.fstat(fd).st_size)

def control():
    """Our end of the control socket: the supervisor made it."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(fd)))
            made_by = struct.unpack("@iII", found.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        except OSError:
            continue
        if made_by == os.getppid():
            return found

@handlers.handler("orders", "truncate")
def truncate(command, ctx):
    os.ftruncate(board_fd(), 0)

@handlers.handler("orders", "grow")
def grow(command, ctx):
    os.ftruncate(board_fd(), 1 << 40)

@handlers.handler("orders", "fill_crash_file")
def fill_crash_file(command, ctx):
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "commandbus-crash" in os.readlink(f"/proc/self/fd/{fd}"):
                os.pwrite(int(fd), b"x" * 100_000_000, 0)
                os.ftruncate(int(fd), 0)
        except FileNotFoundError:
            continue

@handlers.handler("orders", "garbage", timeout=60)
def garbage(command, ctx):
    memory = board()
    memory[:] = random.Random(1).randbytes(len(memory))
    time.sleep(60)

@handlers.handler("orders", "zeros", timeout=60)
def zeros(command, ctx):
    memory = board()
    memory[:] = bytes(len(memory))
    time.sleep(60)

@handlers.handler("orders", "eternal_beat", timeout=60)
def eternal_beat(command, ctx):
    """A heartbeat that never ends, then one thread that lets no other one run."""
    memory = board()
    memory[8:16] = struct.pack("@d", float("inf"))
    re.match(r"(a+)+$", "a" * 40 + "b")

@handlers.handler("orders", "odd_limits", timeout=60)
def odd_limits(command, ctx):
    """Limits of attempts that are no instants: this worker is as good as any."""
    memory = board()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        for value in (float("nan"), float("-inf"), -1.0, 1e300, 0.0):
            memory[1664 + 16 : 1664 + 24] = struct.pack("@d", value)
            time.sleep(0.01)

@handlers.handler("orders", "erased_beat", timeout=60)
def erased_beat(command, ctx):
    """As a reader may see it while the heartbeat is written. The next one puts it right."""
    memory = board()
    for _ in range(6):
        memory[8:72] = bytes(64)
        time.sleep(0.4)

@handlers.handler("orders", "flood", timeout=60)
def flood(command, ctx):
    ours = control()
    for _ in range(100):
        ours.sendall(b"x" * 1_000_000)

@handlers.handler("orders", "flood_of_words", timeout=60)
def flood_of_words(command, ctx):
    ours = control()
    while True:
        ours.sendall(b'{"say": "doing", "doing": "much"}\\n' * 1000)

@handlers.handler("orders", "nonsense", timeout=60)
def nonsense(command, ctx):
    control().sendall(bytes.fromhex(command.data["bytes"]))
    time.sleep(60)

@handlers.handler("orders", "odd_names", timeout=2)
def odd_names(command, ctx):
    """The kernel takes any bytes as a thread's name."""
    ctypes.CDLL(None).prctl(15, b"\\xff\\xfe) Z 1", 0, 0, 0)
    re.match(r"(a+)+$", "a" * 40 + "b")
'''


@pytest.fixture
def hostile(tasks: Path) -> Path:
    (tasks / "tasks.py").write_text((tasks / "tasks.py").read_text() + HOSTILE)
    return tasks


@pytest.fixture
def wild(supervise: Supervise, hostile: Path, bus: CommandBus, db: Db) -> Wild:
    """Two workers; one is busy with a neighbor's command when the other one gets something hostile."""

    def run(command_type: str, data: dict[str, Any] | None = None, **options: Any) -> Supervised:
        chosen = {"processes": 2, "concurrency": 1, "max_attempts": 1, "task_timeout": "60s", **options}
        supervised = supervise(**chosen).until_ready(2)
        bus.send("orders", "hold", command_id="neighbor")
        until(lambda: (hostile / "neighbor.started").exists())
        bus.send("orders", command_type, data or {}, command_id="wild")
        return supervised

    return run


def all_is_well(supervised: Supervised, tasks: Path, bus: CommandBus, db: Db) -> None:
    """The supervisor lives, the neighbor's attempt was not disturbed, and new work is done."""
    assert supervised.process.poll() is None, supervised.log
    pid = int((tasks / "neighbor.started").read_text())
    assert pid in supervised.workers(), supervised.log
    (tasks / "go").touch()
    bus.send("orders", "quick", command_id="after")
    for name in ("neighbor", "after"):
        until(lambda name=name: status(db, name) == "COMPLETED", what=lambda: supervised.log)
    assert one(db, "SELECT result FROM commandbus.command WHERE command_id = 'neighbor'") == 1
    code, document = supervised.ask("/health/ready")
    assert code == 200, document
    assert supervised.ask("/metrics")[0] == 200
    assert supervised.stop()[0] == 0


def status(db: Db, command_id: str) -> str:
    found = one(db, "SELECT status::text FROM commandbus.command WHERE command_id = %s", command_id)
    return str(found)


@pytest.mark.parametrize("command_type", ["truncate", "grow", "fill_crash_file"])
def test_shared_memory_cannot_be_cut_off_or_grown(
    wild: Wild, hostile: Path, bus: CommandBus, db: Db, command_type: str
) -> None:
    supervised = wild(command_type)
    until(lambda: status(db, "wild") == "IN_TROUBLESHOOTING_QUEUE", what=lambda: supervised.log)
    assert one(db, "SELECT error_type FROM commandbus.attempt") == "PermissionError"
    assert len(supervised.workers()) == 2
    all_is_well(supervised, hostile, bus, db)


@pytest.mark.parametrize("command_type", ["garbage", "zeros"])
def test_garbage_on_the_board_costs_one_worker_and_charges_who_wrote_it(
    wild: Wild, hostile: Path, bus: CommandBus, db: Db, command_type: str
) -> None:
    supervised = wild(command_type)
    supervised.until_said("was killed: its board makes no sense")
    supervised.until_ready(3)
    until(lambda: status(db, "wild") == "IN_TROUBLESHOOTING_QUEUE", what=lambda: supervised.log)
    assert "post-mortem of worker" in supervised.log
    assert "1 culprit (wild)" in supervised.log
    all_is_well(supervised, hostile, bus, db)


def test_a_heartbeat_of_another_time_keeps_no_frozen_worker_alive(
    wild: Wild, hostile: Path, bus: CommandBus, db: Db
) -> None:
    supervised = wild("eternal_beat")
    supervised.until_said("was killed")
    supervised.until_ready(3)
    until(lambda: status(db, "wild") == "IN_TROUBLESHOOTING_QUEUE", what=lambda: supervised.log)
    all_is_well(supervised, hostile, bus, db)


@pytest.mark.parametrize("command_type", ["odd_limits", "erased_beat"])
def test_limits_that_are_no_instants_and_an_erased_heartbeat_get_no_worker_killed(
    wild: Wild, hostile: Path, bus: CommandBus, db: Db, command_type: str
) -> None:
    supervised = wild(command_type)
    until(lambda: status(db, "wild") == "COMPLETED", what=lambda: supervised.log)
    assert "was killed" not in supervised.log
    all_is_well(supervised, hostile, bus, db)


@pytest.mark.parametrize(
    ("command_type", "sent", "said"),
    [
        ("flood", b"", "wrote a line of more than 262144 bytes into its control socket"),
        ("flood_of_words", b"", "sent more than 20 messages a second over its control socket"),
        ("nonsense", b"\xff\x00\n", r"wrote nonsense into its control socket: b'\xff\x00'"),
        ("nonsense", b'{"say": "report", "settled": "all"}\n', "wrote nonsense into its control socket"),
    ],
)  # fmt: skip
def test_nonsense_in_the_control_socket_costs_one_worker_and_charges_who_talked(
    wild: Wild, hostile: Path, bus: CommandBus, db: Db, command_type: str, sent: bytes, said: str
) -> None:
    supervised = wild(command_type, {"bytes": sent.hex()})
    supervised.until_said(f"was killed: it {said}")
    supervised.until_ready(3)
    until(lambda: status(db, "wild") == "IN_TROUBLESHOOTING_QUEUE", what=lambda: supervised.log)
    assert "1 culprit (wild)" in supervised.log
    all_is_well(supervised, hostile, bus, db)


def test_among_neighbors_of_the_same_worker_nobody_is_charged_before_it_is_sure(
    supervise: Supervise, hostile: Path, bus: CommandBus, db: Db
) -> None:
    supervised = supervise(concurrency=2, max_attempts=2, task_timeout="60s", quarantine="true").until_ready()
    bus.send("orders", "hold", command_id="bystander")
    until(lambda: (hostile / "bystander.started").exists())
    bus.send("orders", "garbage", command_id="wild")
    supervised.until_said("was killed: its board makes no sense")
    (hostile / "go").touch()
    until(lambda: status(db, "bystander") == "COMPLETED", what=lambda: supervised.log)
    assert verdicts(db, "bystander")[0][1] == verdicts(db, "wild")[0][1]
    supervised.signal(signal.SIGTERM)
    supervised.end()


def test_a_thread_with_an_odd_name_can_be_looked_at(wild: Wild, hostile: Path, bus: CommandBus, db: Db) -> None:
    supervised = wild("odd_names")
    supervised.until_said("froze: no heartbeat")
    supervised.until_ready(3)
    all_is_well(supervised, hostile, bus, db)
