"""Start a worker process.

Call it on the supervisor's main thread, because a worker dies with the *thread* that spawned it (PDEATHSIG). The
worker is a fresh interpreter, not a fork: it has the code that is on disk now, and no state of the supervisor. It
gets its own Unix session, so that Ctrl-C reaches only the supervisor, and its descendants can be ended with it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from commandbus.settings import Settings
from commandbus.supervisor import start_message
from commandbus.supervisor.systemd import SERVICE_VARIABLES
from commandbus.supervisor.worker_process import LONGEST_DUMP, WorkerProcess
from commandbus.worker.board import Board, sealed_memory
from commandbus.worker.counts_page import CountsPage
from commandbus.worker.stop_report import ROUTER_SLOTS

CHILD = "commandbus.supervisor.child_main"


def spawn(settings: Settings, supervisor: str, *, turn: int, generation: int = 0) -> WorkerProcess:
    """Start a worker with these settings. `turn` is a file. A worker that holds its lock may run a command that
    was lost before: so these run one at a time."""
    board = Board.create(2 * settings.concurrency + ROUTER_SLOTS)
    counts = CountsPage.create()
    crash = sealed_memory("commandbus-crash", LONGEST_DUMP)
    ours, theirs = socket.socketpair()
    told = start_message.write(
        start_message.StartMessage(
            settings, supervisor, os.getpid(), board.fd, theirs.fileno(), crash, turn, counts.fd
        )
    )
    environment = {name: value for name, value in os.environ.items() if name not in SERVICE_VARIABLES}
    try:
        process = subprocess.Popen(  # noqa: S603 - our own program, no shell
            [sys.executable, "-m", CHILD, str(told)],
            stdin=subprocess.DEVNULL,
            pass_fds=(board.fd, theirs.fileno(), crash, turn, counts.fd, told),
            env=environment,
            start_new_session=True,
        )
    except BaseException:
        board.close()
        counts.close()
        ours.close()
        os.close(crash)
        raise
    finally:
        theirs.close()
        os.close(told)
    ours.setblocking(False)
    return WorkerProcess(process, board, counts, ours, crash, generation=generation, now=time.monotonic())
