"""How much memory a process uses."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_megabytes(pid: int | None = None) -> float:
    """Resident memory of this process, or of another; 0 if it is gone."""
    try:
        statm = Path(f"/proc/{'self' if pid is None else pid}/statm").read_text()
    except OSError:
        return 0.0
    return int(statm.split()[1]) * _PAGE / 1048576
