"""What every process that commandbus starts does first.

It dies with its parent. It writes the stacks of all its threads into an inherited file when it crashes or gets
DUMP_SIGNAL. That is done in C, so code that holds the GIL cannot prevent it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
from typing import Final

DUMP_SIGNAL: Final = signal.SIGRTMIN + 7
_SET_PARENT_DEATH_SIGNAL: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_MOST_ARENAS: Final = -8


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends us this signal when the parent ends; if it has ended already, we end here."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def collect_garbage() -> None:
    """From now on the garbage collector runs, and never looks at what is there already: our own modules.

    It does not run during their import, where it would take a tenth of the time. It runs once at their end: what
    they have left, such as the first form of a class that gets slots, makes room for what comes now.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def spare_memory() -> None:
    """From now on all threads share two arenas of the C library; else each of them gets its own, with pages that
    are hardly used. What the imports have left of the first one goes back to the system.

    Only glibc has such arenas, and these functions.
    """
    library = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        library.mallopt(_MOST_ARENAS, 2)
        library.malloc_trim(0)


def adopt_orphans() -> None:
    """Whatever is below us and loses its parent becomes our child, and not that of process 1."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def write_stacks_to(file: int) -> None:
    """Crashes and the dump signal leave the stacks there."""
    faulthandler.enable(file, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, file, all_threads=True, chain=False)
