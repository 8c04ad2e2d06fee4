"""What is the application's own code: everything but Python's library, commandbus and installed packages. A
package that has handlers is the application's own, even if it is installed."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

import commandbus
from commandbus.worker.execution.handlers import Handler, HandlerRegistry

_OURS: Final = f"{Path(commandbus.__file__).parent}/"
_INSTALLED: Final = ("/site-packages/", "/dist-packages/")
_LONGEST_FILE: Final = 10 << 20


class OwnCode:
    """Knows which files are the application's own, and what to call them."""

    def __init__(self, handlers: Iterable[Handler]) -> None:
        modules = (getattr(_function(handler), "__module__", None) or "" for handler in handlers)
        self._packages = frozenset(module.partition(".")[0] for module in modules)
        self.name_of = lru_cache(maxsize=1000)(self._name_of)

    def _name_of(self, file: str) -> str | None:
        """The name of an own file, relative to where Python finds it; None if it is not own."""
        if file.startswith((_OURS, "<")):
            return None
        for mark in _INSTALLED:
            if mark in file:
                rest = file.rpartition(mark)[2]
                return rest if rest.partition("/")[0].removesuffix(".py") in self._packages else None
        if file.startswith(_library()):
            return None
        roots = [f"{root.rstrip('/')}/" for root in (*sys.path, str(Path.cwd())) if root.startswith("/")]
        found = max((root for root in roots if file.startswith(root)), key=len, default="")
        return file[len(found) :] if found else "/".join(Path(file).parts[-2:])


def hash_of_code(registry: HandlerRegistry) -> str:
    """A version of the handlers' code: eight hexadecimal digits, made of what is registered, and of the files that
    the handlers are in."""
    digest = blake2b(digest_size=4)
    files: set[str] = set()
    for handler in sorted(registry, key=lambda item: (item.domain, item.command_type)):
        function = _function(handler)
        digest.update(f"{handler.domain}/{handler.command_type} {handler.name}\n".encode("utf-8", "replace"))
        if (file := _file_of(function)) is None:
            digest.update(getattr(getattr(function, "__code__", None), "co_code", b""))
        else:
            files.add(file)
    for content in sorted(_content(file) for file in files):
        digest.update(blake2b(content, digest_size=16).digest())
    return digest.hexdigest()


def _function(handler: Handler) -> Callable[..., object]:
    found: Callable[..., object] = inspect.unwrap(handler.written or handler.function)
    return found


def _file_of(function: Callable[..., object]) -> str | None:
    try:
        return inspect.getsourcefile(function)
    except (TypeError, ValueError):
        return None


def _content(file: str) -> bytes:
    try:
        with Path(file).open("rb") as opened:
            return opened.read(_LONGEST_FILE)
    except OSError:
        return file.encode("utf-8", "replace")


@lru_cache(maxsize=1)
def _library() -> tuple[str, ...]:
    """The folders of Python's own library."""
    paths = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    return tuple({f"{path}/" for path in paths if path} | {f"{sys.base_prefix}/lib/python"})
