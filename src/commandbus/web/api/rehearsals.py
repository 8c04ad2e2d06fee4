"""Rehearsals, as JSON."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from commandbus.model.rehearsal import Rehearsal
from commandbus.web.access import Visitor
from commandbus.web.console import Console
from commandbus.web.rehearsing import rehearse_here


class RehearsalIn(BaseModel):
    """Which command."""

    model_config = ConfigDict(extra="forbid")

    domain: str = Field(max_length=200)
    id: str = Field(max_length=255)


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""

    @router.post("/rehearse")
    async def rehearse(request: Request, given: RehearsalIn) -> Rehearsal:
        """Run today's handler on a command, roll everything back, and say what it would have done."""
        visitor: Visitor = request.state.visitor
        if not visitor.may_act or not console.access.is_ours(request, visitor, request.headers.get("x-mark", "")):
            raise HTTPException(403, "only an operator may do this, with a token or from a page of the console")
        return await rehearse_here(console, given.domain, given.id)
