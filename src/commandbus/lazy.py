"""Modules that are imported when they are first used: a program that only sends loads nothing but that.

    if TYPE_CHECKING:
        from commandbus.flow.commands import history
    else:
        history = lazy("commandbus.flow.commands.history")

Type checkers and the import contract see the first line; at run time `history.list_attempts` imports the module.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> object:
        found: object = getattr(importlib.import_module(self.__name__), name)
        return found


def lazy(name: str) -> ModuleType:
    """The module of that name, which is imported whenever something of it is asked for."""
    return _Lazy(name)
