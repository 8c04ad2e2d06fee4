"""Audit: who did what, when and why; and the same as a file."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response

from commandbus.errors import InvalidCommandError
from commandbus.model.action_export import MOST_EXPORTED, as_csv, as_json_lines
from commandbus.model.durations import parse_seconds
from commandbus.web.console import Console
from commandbus.web.pages.page_route import PageRoutes

ACTIONS = (
    "RETRY", "CANCEL", "COMPLETE", "PRIORITY", "RESOLVE_EFFECT", "PAUSE", "RESUME", "OPEN", "CLOSE", "RESET",
    "SET", "UNSET", "OVERRIDE", "END_OVERRIDE", "DELETE", "START", "STOP", "RECYCLE",
    "PRUNE", "PRUNED", "CREATE", "REPLACE", "RUN_NOW",
)  # fmt: skip


def routes(console: Console) -> PageRoutes:
    """The pages of this module."""
    audit_log = console.reading.audit

    async def audit(
        request: Request,
        operator: str = "",
        action: str = "",
        domain: str = "",
        since: str = "",
        before: str = "",
        cursor: str | None = None,
    ) -> Response:
        """What people did, newest first."""
        wanted = filters(operator, action, domain, since, before)
        page = await audit_log.list_actions(**wanted, cursor=cursor)
        given = {"operator": operator, "action": action, "domain": domain, "since": since, "before": before}
        chosen = {name: value for name, value in given.items() if value}
        return console.page(request, "audit.html", page=page, wanted=given, chosen=chosen, actions=ACTIONS)

    async def export(
        operator: str = "",
        action: str = "",
        domain: str = "",
        since: str = "",
        before: str = "",
        format: Literal["csv", "jsonl"] = "csv",  # noqa: A002 - the link's own name
        cursor: str | None = None,
    ) -> Response:
        """The same as a file, up to 10,000 entries. The header X-Next-Cursor says where the next file begins."""
        wanted = filters(operator, action, domain, since, before)
        page = await audit_log.list_actions(**wanted, limit=MOST_EXPORTED, cursor=cursor)
        text = as_csv(page.items) if format == "csv" else as_json_lines(page.items)
        headers = {"Content-Disposition": f'attachment; filename="audit.{format}"'}
        if page.next_cursor is not None:
            headers["X-Next-Cursor"] = page.next_cursor
        kind = "text/csv" if format == "csv" else "application/x-ndjson"
        return Response(text, media_type=f"{kind}; charset=utf-8", headers=headers)

    return {"/audit": audit, "/audit/export": export}


def filters(operator: str, action: str, domain: str, since: str, before: str) -> dict[str, Any]:
    """The filters of a form, in which nothing is an empty text."""
    return {
        "operator": operator or None,
        "action": action or None,
        "domain": domain or None,
        "since": moment(since, "since"),
        "before": moment(before, "before"),
    }


def moment(text: str, what: str) -> datetime | None:
    """An instant of ISO 8601 (UTC if it has no zone), or how long ago: 2h."""
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return datetime.now(UTC) - timedelta(seconds=parse_seconds(text, name=what, error=InvalidCommandError))
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
