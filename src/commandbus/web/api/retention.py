"""What a prune would delete, as JSON. The action prune deletes it, a portion in each request."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from psycopg.errors import QueryCanceled

from commandbus.flow.commands.prune import PrunePreview
from commandbus.web.actions.retention import retention_of, too_many_to_count
from commandbus.web.console import Console


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""

    @router.get("/prune")
    async def prune(
        age: Annotated[str | None, Query(max_length=40, description="A duration, such as 30d.")] = None,
        count: Annotated[str | None, Query(max_length=18, pattern="^[0-9]*$")] = None,
    ) -> PrunePreview:
        """What a prune by age or by count would delete now. Give at least one of them."""
        seconds, keeps = retention_of(age, count)
        try:
            return await console.reading.preview_prune(age=seconds, count=keeps)
        except QueryCanceled:
            raise HTTPException(503, too_many_to_count(count)) from None
