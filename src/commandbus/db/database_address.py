"""Which database: a server by its URL, or the embedded one.

The embedded one is started, counted as in use until `close`, and started again if it dies meanwhile.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from commandbus.settings import Settings

if TYPE_CHECKING:
    from commandbus.db.embedded import EmbeddedPostgres

DEFAULT_FOLDER = ".commandbus"


class Database:
    """The database of some settings. `resolve` may start a server; `close` lets go (the last one stops it)."""

    def __init__(self, settings: Settings) -> None:
        self.lock = threading.RLock()
        self._settings = settings
        self._embedded: EmbeddedPostgres | None = None

    def resolve(self) -> Settings:
        """The settings with a URL that can be connected to."""
        folder = embedded_folder(self._settings)
        if folder is None:
            return self._settings
        with self.lock:
            if self._embedded is None:
                from commandbus.db.embedded import EmbeddedPostgres

                server = EmbeddedPostgres(folder, revive=True)
                server.start()
                self._embedded = server
            return replace(self._settings, database_url=self._embedded.dsn)

    @property
    def revives(self) -> bool:
        """Is the server started again if it dies? Only the embedded one is."""
        return embedded_folder(self._settings) is not None

    def leave_to_parent(self) -> None:
        """In a forked copy: its parent uses the embedded server; `resolve` makes this process a user, too."""
        self.lock = threading.RLock()
        self._embedded = None

    def close(self) -> None:
        """Let go of the embedded server."""
        with self.lock:
            if self._embedded is not None:
                self._embedded.stop()
                self._embedded = None


def embedded_folder(settings: Settings) -> Path | None:
    """The folder of `embedded` or `embedded:FOLDER`; a relative one in a file is relative to that file."""
    url = settings.database_url
    if url is None or not (url == "embedded" or url.startswith("embedded:")):
        return None
    folder = Path(url.partition(":")[2] or DEFAULT_FOLDER).expanduser()
    origin = settings.origins.get("database_url", "")
    if settings.config_file is not None and not origin.startswith(("argument", "environment")):
        folder = settings.config_file.parent / folder
    return folder.absolute()
