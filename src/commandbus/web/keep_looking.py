"""A search that goes on by itself: it looks at one bounded number of commands after the other, and tells its page
what it has found and how far it has come. It ends when the visitor stops it or leaves.

All such searches of a console together take one connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import psycopg
from psycopg_pool import PoolTimeout

from commandbus.errors import CommandBusError
from commandbus.flow.commands.query import CommandQuery
from commandbus.model.command import CommandRecord
from commandbus.model.page import Page
from commandbus.web.console import Console
from commandbus.web.rendering import environment

MOST_FOUND: Final = 100
MOST_LOOKS: Final = 1_000
"""Looks of one stream: twenty million commands. The page has a link to continue."""
PAUSE_SECONDS: Final = 0.02
"""Between two looks, so that a search leaves room for others."""


async def keep_looking(console: Console, query: CommandQuery, cursor: str, root: str) -> AsyncGenerator[str, None]:
    """Server-sent events: `rows` (table rows as HTML), `reached` (how far it is, as HTML; its id is the cursor),
    and `end`, or `trouble` with a sentence."""
    rows = environment().get_template("command_rows.html").module
    reached = environment().get_template("search_reached.html")
    found = 0
    try:
        for _ in range(MOST_LOOKS):
            async with console.looking:
                page = await console.reading.query_commands(query, cursor=cursor, limit=MOST_FOUND - found)
            if page.items:
                found += len(page)
                yield event("rows", rows.command_rows(root, page))  # type: ignore[attr-defined]
            yield event("reached", reached.render(page=page), id_=page.next_cursor or "")
            if not _goes_on(page, found):
                break
            cursor = page.next_cursor or ""
            await asyncio.sleep(PAUSE_SECONDS)
        yield event("end", "")
    except (CommandBusError, psycopg.Error, PoolTimeout):
        yield event("trouble", "The database did not answer in time.")
    except asyncio.CancelledError:
        return  # the page was closed


def _goes_on(page: Page[CommandRecord], found: int) -> bool:
    return page.is_partial and found < MOST_FOUND


def event(name: str, text: str, *, id_: str | None = None) -> str:
    """One server-sent event."""
    mark = "" if id_ is None else f"id: {id_}\n"
    data = "".join(f"data: {line}\n" for line in text.splitlines()) or "data: \n"
    return f"event: {name}\n{mark}{data}\n"
