"""tidy: what a handler leaves behind that the next one must not see, as far as it can be put back.

Thread-locals of a slot's thread: those that appeared during an attempt are forgotten after it. From Python 3.13 on
they are kept where nobody can reach them, and stay.

In a worker process of ours (`ProcessState.watch`) also the working directory, the umask and the locale: they
belong to the whole process, so handlers that run at the same moment do see them, but no later one does. Changes
through C code, environment variables and monkey patches are not noticed; a handler that needs such things belongs
into a process of its own (isolation="process"). Signal handlers cannot be changed by handlers at all: Python
allows that in the main thread only.
"""

from __future__ import annotations

import ctypes
import functools
import locale
import os
import threading
from collections.abc import Callable
from typing import Any

from commandbus.logger import safe_logger

logger = safe_logger("commandbus.worker")


def thread_locals() -> dict[Any, Any] | None:
    """The dictionary in which CPython up to 3.12 keeps this thread's locals; None on another Python."""
    try:
        get = ctypes.pythonapi.PyThreadState_GetDict
    except AttributeError:
        return None
    get.restype = ctypes.c_void_p  # borrowed: a py_object result would count as ours
    address = get()
    if address is None:
        return None
    found = ctypes.cast(address, ctypes.py_object).value  # a reference of its own
    if not isinstance(found, dict):
        return None
    before, probe = len(found), threading.local()
    probe.is_here = True
    return found if len(found) > before else None


def forget_new_locals(own: dict[Any, Any], kept: set[Any]) -> None:
    """Remove the locals that were not there when the slot began."""
    for key in [key for key in own if key not in kept]:
        own.pop(key, None)


class ProcessState:
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
