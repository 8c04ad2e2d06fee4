"""How another process finds a worker's handlers again.

A registry is found as a module-level variable: MODULE:NAME, as the settings name it, or as this process's modules
contain it. The script that was started (`__main__`) is loaded by its file or its module name, under another name,
so the code below `if __name__ == "__main__":` does not run again. A registry that is local to a function has no
address.
"""

from __future__ import annotations

import os
import runpy
import sys
from dataclasses import asdict
from types import ModuleType
from typing import Any, Final

from commandbus.errors import ConfigurationError
from commandbus.quick_dataclass import dataclass
from commandbus.worker.execution.handlers import Handler, HandlerRegistry
from commandbus.worker.execution.lifespan_declarations import Lifespan
from commandbus.worker.execution.wrapped_handlers import wrap
from commandbus.worker.load_handlers import load_registry

MAIN_NAME: Final = "__commandbus_main__"
_MAIN: Final = "__main__"

_is_child = False


@dataclass(frozen=True, slots=True)
class Address:
    """`module` is `__main__` for the script that was started: `main_module` (`python -m`) or `main_file`."""

    module: str
    name: str
    main_module: str | None = None
    main_file: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        """For a message."""
        return asdict(self)


def find_address(
    registry: HandlerRegistry, reference: str | None, main: tuple[str | None, str | None] | None = None
) -> Address | None:
    """Where this registry can be found; None if only this process can reach it. With `main`, which `main_address`
    has returned before, this reads memory only."""
    main_module, main_file = main or main_address()
    found = _named(registry, reference) or _searched(registry, has_main=bool(main_module or main_file))
    return None if found is None else Address(*found, main_module, main_file)


def _named(registry: HandlerRegistry, reference: str | None) -> tuple[str, str] | None:
    """What the settings name, if it is this one."""
    module_name, _, path = (reference or "").partition(":")
    found: Any = sys.modules.get(module_name)
    for name in path.split("."):
        found = getattr(found, name, None)
    return (module_name, path) if found is registry else None


def _searched(registry: HandlerRegistry, *, has_main: bool) -> tuple[str, str] | None:
    """Modules that define its handlers come first: importing them also registers. The script itself comes last."""
    modules = {_module_of(handler) for handler in registry}
    places = [
        (module_name == _MAIN, module_name not in modules, module_name, name)
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (has_main if module_name == _MAIN else _is_importable(module))
        for name, value in list(vars(module).items())
        if value is registry
    ]
    return min(places)[2:] if places else None


def _is_importable(module: ModuleType) -> bool:
    return getattr(module, "__spec__", None) is not None


def _module_of(handler: Handler) -> str | None:
    found = getattr(handler.function, "__module__", None)
    return found if isinstance(found, str) else None


def main_address() -> tuple[str | None, str | None]:
    """The module, or else the file, of the script that was started."""
    main = sys.modules.get(_MAIN)
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    if spec is not None and isinstance(spec.name, str):
        return spec.name, None
    return None, os.path.abspath(file) if isinstance(file, str) and os.path.isfile(file) else None


class Handlers:
    """In the child: the registry at an address, loaded when it is first asked for."""

    def __init__(self, address: Address) -> None:
        global _is_child
        _is_child = True
        self._address = address
        self._main: dict[str, Any] | None = None
        self._registry = self._load()

    @property
    def lifespans(self) -> tuple[Lifespan, ...]:
        """What a process that runs these handlers does at its start and its end."""
        return self._registry._lifespans

    def get(self, domain: str, command_type: str, module: str | None) -> Handler:
        """The handler, with its middleware. `module` is where the worker found it, which the registry's own module
        may not import."""
        found = self._registry.get(domain, command_type)
        if found is None and module is not None:
            self._import(module)
            found = self._registry.get(domain, command_type)
        if found is None:
            raise ConfigurationError(
                f"a child process does not find the handler of command_type {command_type!r} of domain "
                f"{domain!r}: importing {self._address.module} and {module} does not register it; "
                f'register it at module level, not below `if __name__ == "__main__":` or in a function'
            )
        return wrap(found, self._registry._middleware)

    def _load(self) -> HandlerRegistry:
        if self._address.module != _MAIN:
            return load_registry(f"{self._address.module}:{self._address.name}")
        found = self._run_main().get(self._address.name)
        if not isinstance(found, HandlerRegistry):
            raise ConfigurationError(
                f"{self._main_name()} has no registry {self._address.name!r} when a child process loads it; "
                f'make it a module-level variable, not below `if __name__ == "__main__":`'
            )
        return found

    def _import(self, module: str) -> None:
        if module == _MAIN:
            self._run_main()
        elif module not in sys.modules:
            __import__(module)

    def _run_main(self) -> dict[str, Any]:
        """Load the script once, under another name; what it defines passes for `__main__`, too."""
        if self._main is None:
            address = self._address
            try:
                if address.main_module is not None:
                    self._main = runpy.run_module(address.main_module, run_name=MAIN_NAME, alter_sys=True)
                else:
                    self._main = runpy.run_path(address.main_file or "", run_name=MAIN_NAME)
            except (Exception, SystemExit) as error:
                raise ConfigurationError(
                    f"loading {self._main_name()} in a child process failed: {type(error).__name__}: {error}"
                ) from error
            module = ModuleType(MAIN_NAME)
            module.__dict__.update(self._main)
            sys.modules[_MAIN] = sys.modules[MAIN_NAME] = module
        return self._main

    def _main_name(self) -> str:
        return self._address.main_module or self._address.main_file or _MAIN


def refuse_in_child() -> None:
    """A script that starts its worker while it is being loaded would start workers without end."""
    if _is_child:
        raise ConfigurationError(
            "this child process runs one handler of another worker, but loading its module starts a worker: put "
            'that below `if __name__ == "__main__":`'
        )
