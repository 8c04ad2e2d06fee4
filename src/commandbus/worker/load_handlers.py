"""Loads the handler registry that a setting names as MODULE:REGISTRY.

Importing it runs the user's code, which may do anything; whatever goes wrong becomes one `ConfigurationError`
that says where. The folder that the process was started in is importable, as with `python -m`.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from commandbus.errors import ConfigurationError
from commandbus.worker.execution.handlers import HandlerRegistry

EXAMPLE = "MODULE:REGISTRY, such as shop.tasks:handlers"


def load_registry(reference: str | None) -> HandlerRegistry:
    """Import the module and take the registry out of it."""
    if not reference:
        raise ConfigurationError(
            f"no registry of handlers is named: give {EXAMPLE}, set WORKER_HANDLERS, or `handlers` in [worker] of "
            f"commandbus.toml"
        )
    module_name, colon, path = reference.partition(":")
    if not colon or not module_name or not path:
        raise ConfigurationError(f"handlers {reference!r} is not {EXAMPLE}")
    found: Any = import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigurationError(f"handlers {reference!r}: {_described(found)} has no {name!r}{_hint(found)}")
        found = getattr(found, name)
    if not isinstance(found, HandlerRegistry):
        raise ConfigurationError(f"handlers {reference!r} is a {type(found).__name__}, not a HandlerRegistry")
    return found


def import_module(module_name: str) -> ModuleType:
    """Import a module of handlers; ConfigurationError says what went wrong, and where."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigurationError(
                f"handlers: there is no module {error.name!r} in {here} nor among the installed packages"
            ) from error
        raise _broken(module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(module_name, error) from error


def _broken(module_name: str, error: BaseException) -> ConfigurationError:
    return ConfigurationError(
        f"handlers: importing {module_name!r} failed at {_place(error)}: {type(error).__name__}: {error}"
    )


def _place(error: BaseException) -> str:
    """The line of the user's code that failed: the last one outside the import system."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and frame.filename not in (__file__, importlib.__file__)
    ]
    return f"{_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else "its first line"


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def _described(found: object) -> str:
    return f"module {found.__name__!r}" if isinstance(found, ModuleType) else type(found).__name__


def _hint(found: object) -> str:
    registries = sorted(name for name, value in vars(found).items() if isinstance(value, HandlerRegistry)) \
        if isinstance(found, ModuleType) else []  # fmt: skip
    return f"; did you mean {registries[0]!r}?" if registries else ""
