"""How long a statement of the console's pages and of its actions may take, as the server says it."""

from __future__ import annotations

import asyncio

from commandbus import Settings
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.web.app import create_console


@operation(atomic=False)
def _timeouts() -> Steps[tuple[str, str]]:
    rows = yield Statement(b"SELECT current_setting('statement_timeout'), current_setting('lock_timeout')")
    statement, lock = rows[0]
    return str(statement), str(lock)


def page_timeouts(settings: Settings) -> list[tuple[str, str]]:
    """For a statement and for a lock; of pages, and of actions."""

    async def ask() -> list[tuple[str, str]]:
        console = create_console(settings).state.console
        try:
            return [await bus.run(_timeouts()) for bus in (console.reading, console.acting)]
        finally:
            await console.close()

    return asyncio.run(ask())
