"""The actions of an operator, as JSON."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from commandbus.errors import CommandNotFoundError
from commandbus.web.access import Visitor
from commandbus.web.actions import ACTIONS, LONGEST_FIELD, Portion, Step
from commandbus.web.console import Console

ActionName = Annotated[str, Path(json_schema_extra={"enum": sorted(ACTIONS)})]


class ActionIn(BaseModel):
    """The fields of an action. Which of them it needs, the list of actions says. Others are refused."""

    model_config = ConfigDict(extra="forbid")

    fields: dict[str, str] = Field(default_factory=dict, max_length=20)
    reason: str | None = Field(default=None, max_length=LONGEST_FIELD)


class Done(BaseModel):
    """What was done. `page`: the page of the console that shows it, if it has one. `again`: this was a portion,
    and the same action with these fields goes on."""

    done: str
    page: str | None = None
    again: dict[str, str] | None = None


def add_routes(router: APIRouter, console: Console) -> None:
    """The routes of this module."""

    @router.get("/actions")
    async def actions() -> dict[str, list[str]]:
        """Every action, and its fields. A field that ends with `?` may be left out."""
        return {name: list(action.fields) for name, action in ACTIONS.items()}

    @router.post("/actions/{name}", response_model_exclude_none=True)
    async def act(request: Request, name: ActionName, given: ActionIn) -> Done:
        """Do something, as an operator. The audit trail names the visitor."""
        visitor: Visitor = request.state.visitor
        if not visitor.may_act or not console.access.is_ours(request, visitor, request.headers.get("x-mark", "")):
            raise HTTPException(403, "only an operator may do this, with a token or from a page of the console")
        if name not in ACTIONS:
            raise CommandNotFoundError(f"there is no action {name!r}")
        ACTIONS[name].refuse_unknown(given.fields)
        fields = ACTIONS[name].check({**given.fields, "reason": given.reason or given.fields.get("reason", "")})
        sentence = await ACTIONS[name].run(console.acting, visitor.name, fields)
        page = sentence.page if isinstance(sentence, Step) else None
        return Done(done=sentence, page=page, again=sentence.again if isinstance(sentence, Portion) else None)
