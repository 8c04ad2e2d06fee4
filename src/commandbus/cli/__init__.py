"""The `commandbus` command: one file per command or group of commands.

`entry.py` puts them together, `session.py` has the options that all commands share and connects, `render.py`
prints tables and JSON, and `exit_codes.py` is the table of exit codes. Nothing here decides anything about
commands: `flow/`, `bus/` and `troubleshooting.py` do.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NoReturn

from commandbus.cli.installation import say_clash
from commandbus.light_imports import light_imports

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit. Warns about a clash of packages first, before the other package can cause an
    error."""
    gc.disable()  # until the command's module is imported (`entry.Root`): there is no garbage yet
    say_clash()
    with light_imports():
        from commandbus.cli import entry

    entry.main(arguments)
