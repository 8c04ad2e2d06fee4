"""The actions of an operator, as JSON."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field

from commandbus.errors import CommandNotFoundError
from commandbus.web.access import Visitor
from commandbus.web.actions import ACTIONS, LONGEST_FIELD, Action, Portion, Step
from commandbus.web.console import Console


class ActionIn(BaseModel):
    """The fields of an action. Others than its own are refused."""

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
    async def act(request: Request, name: str, given: ActionIn) -> Done:
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


def describe_actions(app: FastAPI) -> None:
    """One route serves all actions. In the description of the API each has an address, and fields, of its own."""
    describe = app.openapi

    def with_actions() -> dict[str, Any]:
        described = describe()
        one = described["paths"].pop("/api/actions/{name}", None)
        if one is not None:
            described["paths"] |= {
                f"/api/actions/{name}": _described(name, one["post"]) for name in sorted(ACTIONS)
            }
        return described

    app.openapi = with_actions  # type: ignore[method-assign]


def _described(name: str, one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    own = {key: value for key, value in one.items() if key != "parameters"}
    body = {"required": True, "content": {"application/json": {"schema": _body(ACTIONS[name])}}}
    texts = {"summary": name, "operationId": f"act_{name.replace('-', '_')}"}
    return {"post": {**own, **texts, "requestBody": body}}


def _body(action: Action) -> dict[str, Any]:
    """What `ActionIn` says, and this action's fields."""
    needed = [field for field in action.fields if not field.endswith("?")]
    names = dict.fromkeys([*(field.rstrip("?") for field in action.fields), "reason"])
    text = {"type": "string", "maxLength": LONGEST_FIELD}
    fields = {"properties": dict.fromkeys(names, text), "required": needed, "additionalProperties": False}
    return {
        "$ref": "#/components/schemas/ActionIn",
        "properties": {"fields": fields},
        "required": ["fields"] if needed else [],
    }
