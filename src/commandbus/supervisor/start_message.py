"""What the supervisor tells a new worker process, as JSON in an inherited memfd.

It is not on the command line or in the environment, because others can read both, and a database URL has a
password.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from commandbus.quick_dataclass import dataclass
from commandbus.settings import Settings

LONGEST_TEXT: Final = 10_000
"""How long a text may be that a worker process tells its supervisor."""


@dataclass(frozen=True, slots=True)
class StartMessage:
    """The settings, the supervisor's identity, and the file descriptors of the worker process."""

    settings: Settings
    supervisor: str
    parent: int
    board: int
    control: int
    crash: int
    turn: int
    counts: int


def write(start_message: StartMessage) -> int:
    """Returns a descriptor to inherit, from which `read` reads the message."""
    settings = start_message.settings
    document = {
        "settings": settings.plain(),
        "origins": dict(settings.origins),
        "config_file": None if settings.config_file is None else str(settings.config_file),
        "supervisor": start_message.supervisor,
        "parent": start_message.parent,
        "fds": [
            start_message.board,
            start_message.control,
            start_message.crash,
            start_message.turn,
            start_message.counts,
        ],
    }
    fd = os.memfd_create("commandbus-letter", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(json.dumps(document).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def read(fd: int) -> StartMessage:
    """Reads the message from an inherited descriptor, and closes it."""
    with os.fdopen(fd, "rb") as file:
        document: dict[str, Any] = json.load(file)
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in document["settings"].items()
    }
    config_file = document["config_file"]
    settings = Settings(
        **values,
        origins=document["origins"],
        config_file=None if config_file is None else Path(config_file),
    )
    return StartMessage(settings, document["supervisor"], document["parent"], *document["fds"])
