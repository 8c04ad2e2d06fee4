"""Imports of psycopg that do without modules of the standard library which our processes do not need.

psycopg asks `importlib.metadata` for its own version, and that brings `email`, `zipfile` and `csv`: 2 MB. While
`light_imports()` lasts, a small module stands in for it, which reads versions from the names of folders, and
leaves everything else to the real one. psycopg imports `ctypes.util`, too, which brings `tempfile`, `shutil` and
the compressors (0.6 MB), and uses it only where it has no C code. And it imports `asyncio`, and that `ssl`:
another megabyte. A process that has no event loop can leave `ssl` out; libpq has its own.

It needs the standard library only, because the command line uses it before our other imports.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Final

REAL: Final = "importlib.metadata"
UTIL: Final = "ctypes.util"


def version_of(name: str) -> str | None:
    """The version of an installed distribution; None if there is none."""
    if (quickly := _version_in(_folder_of(name))) or not may_be_installed(name):
        return quickly
    real = importlib.import_module(REAL)
    try:
        found: str = real.version(name)
    except real.PackageNotFoundError:
        return None
    return found


def may_be_installed(name: str) -> bool:
    """Is it possible that there is such a distribution? Then only `importlib.metadata` knows for sure."""
    has_archives = any(os.path.isfile(place) for place in sys.path)
    return has_archives or _folder_of(name) is not None


def _folder_of(name: str) -> str | None:
    """The name of its metadata folder: the first on the path."""
    wanted = _plain(name)
    for place in sys.path:
        with suppress(OSError):
            for entry in os.listdir(place or "."):
                stem, _, kind = entry.rpartition(".")
                if kind in ("dist-info", "egg-info", "egg") and _plain(stem.partition("-")[0]) == wanted:
                    return entry
    return None


def _version_in(folder: str | None) -> str | None:
    """Only folders of the present kind say it for sure."""
    if folder is None or not folder.endswith(".dist-info"):
        return None
    return folder.removesuffix(".dist-info").partition("-")[2] or None


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


class _Later(ModuleType):
    """Stands in for a module that is imported when somebody uses it."""

    def __getattr__(self, name: str) -> object:
        found: object = getattr(self._real(), name)
        return found

    def _real(self) -> ModuleType:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)


class _Metadata(_Later):
    """Knows versions itself."""

    def version(self, name: str) -> str:
        found: str = _version_in(_folder_of(name)) or self._real().version(name)
        return found


@contextmanager
def light_imports(*, has_loop: bool = True) -> Iterator[None]:
    """For the imports of a process that we have started; no other thread imports anything meanwhile. Without a
    loop, `asyncio` knows no TLS in this process from now on; `import ssl` works again afterwards."""
    stand_ins: dict[str, Any] = {REAL: _Metadata(REAL), UTIL: _Later(UTIL)}
    if not has_loop:
        stand_ins["ssl"] = None  # its import fails
    added = {name: module for name, module in stand_ins.items() if name not in sys.modules}
    sys.modules.update(added)
    if UTIL in added:
        vars(importlib.import_module("ctypes"))["util"] = added[UTIL]  # until somebody imports the real one
    try:
        yield
    finally:
        for name, module in added.items():
            if sys.modules.get(name, REAL) is module:
                del sys.modules[name]
