"""How much memory a process uses."""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_megabytes(pid: int | None = None) -> float:
    """Resident memory of this process, or of another; 0 if it is gone."""
    try:
        file = os.open(f"/proc/{'self' if pid is None else pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        pages = int(os.read(file, 200).split()[1])
    except (OSError, IndexError):  # it has ended meanwhile
        return 0.0
    finally:
        os.close(file)
    return pages * _PAGE / 1048576
