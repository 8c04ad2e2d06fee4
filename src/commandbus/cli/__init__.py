"""The `commandbus` command: one file per command or group of commands.

`entry.py` puts them together, `session.py` holds the options that stand everywhere and connects, `render.py`
prints tables and JSON, `exits.py` is the table of exit codes. Nothing here decides anything about commands: that
is `flow/`, `bus/` and `troubleshooting.py`.
"""

from commandbus.cli.entry import main

__all__ = ["main"]
