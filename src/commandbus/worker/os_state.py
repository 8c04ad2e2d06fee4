"""OsState: restores working directory, umask and locale of our worker processes after a handler changed them.

They belong to the whole process. So handlers that run at the same time see a change, but later ones do not.
Changes by C code, of environment variables, and monkey patches are not noticed; a handler that makes such changes
belongs in a child process (isolation="process"). Handlers cannot change signal handlers at all, because Python
allows that only in the main thread.

Thread-locals stay: libraries keep their connections there (ADR 10).
"""

from __future__ import annotations

import functools
import locale
import os
from collections.abc import Callable
from typing import Any

from commandbus.logger import safe_logger

logger = safe_logger("commandbus.worker")


class OsState:
    """Working directory, umask and locale of this process, and whether somebody changed them."""

    def __init__(self) -> None:
        self.is_touched = False
        self._folder = os.getcwd()
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._locale = locale.setlocale(locale.LC_ALL)

    def watch(self) -> None:
        """Notice changes from now on. For a process of ours only: it replaces standard functions."""
        for module, name in ((os, "chdir"), (os, "fchdir"), (os, "umask"), (locale, "setlocale")):
            setattr(module, name, self._noticing(getattr(module, name)))

    def restore(self) -> None:
        """Put back what was changed."""
        self.is_touched = False
        if _folder_now() != self._folder:
            logger.warning("a handler changed the working directory; it is %s again", self._folder)
            os.chdir(self._folder)
        os.umask(self._umask)
        if locale.setlocale(locale.LC_ALL) != self._locale:
            logger.warning("a handler changed the locale; it is %s again", self._locale)
            locale.setlocale(locale.LC_ALL, self._locale)
        self.is_touched = False

    def _noticing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            self.is_touched = True
            return function(*args, **kwargs)

        return noticed


def _folder_now() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None
