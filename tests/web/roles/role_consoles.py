"""Consoles that connect as the least-privileged roles, on a fleet with something of everything: made once for all
tests that need them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from html import unescape
from typing import Any
from urllib.parse import urlencode

import psycopg
from psycopg import sql

from browser.fleet import live_fleet
from browser.test_browser_pages import ADDRESSES
from commandbus import CommandBus, Settings
from commandbus.model.roles import KINDS
from commandbus.web.app import create_console
from commandbus.web.pages import page_routes
from support.consoles import served
from support.databases import Databases
from web.conftest import Visit

PROBLEM = re.compile(r"<h1>(.*?)</h1>\s*<p[^>]*>(.*?)</p>", re.DOTALL)
GIVEN = {
    "/api/prune": {"age": "0s"},
    "/api/stack": {"domain": "orders", "id": "held", "wait": "0"},
    "/api/find": {"id": "good"},
    "/api/ledger": {"domain": "orders", "id": "good"},
}


class Consoles:
    """One console for each role, on the same data."""

    def __init__(self, database: str, prefix: str, stack: ExitStack) -> None:
        self.database, self.prefix = database, prefix
        self.visits: dict[str, Visit] = {}
        for kind in KINDS:
            app = create_console(Settings(database_url=self.url(kind)))
            self.visits[kind] = Visit(stack.enter_context(served(app)))
        self.reads = list(reads_of(app))
        self.parameters = parameters_of(app)

    def url(self, kind: str) -> str:
        return self.database.replace("//postgres@", f"//{self.prefix}_{kind}_user@", 1)


def reads_of(app: Any) -> Iterator[str]:
    """Every page, and every read of the API."""
    for route in page_routes(app.state.console).routes:
        if not route.path.endswith("/events"):
            needed = [item for item in route.dependant.query_params if item.field_info.is_required()]
            yield from _addresses(route.path, ADDRESSES[route.path] if needed else [{}])
    for path, operations in app.openapi()["paths"].items():
        if "get" in operations:
            needed = [item for item in operations["get"].get("parameters", []) if item["required"]]
            of_page = ADDRESSES.get("/" + path.split("/")[2], [])[:1]  # /api/batch/commands is about a batch, too
            given = [GIVEN[path]] if path in GIVEN else of_page
            yield from _addresses(path, given if needed or path in GIVEN else [{}])
    yield from ("/metrics", "/health/ready")


def parameters_of(app: Any) -> dict[str, list[str]]:
    """By path, the names of its parameters."""
    pages = page_routes(app.state.console).routes
    found = {route.path: [item.name for item in route.dependant.query_params] for route in pages}
    for path, operations in app.openapi()["paths"].items():
        if "get" in operations:
            found[path] = [item["name"] for item in operations["get"].get("parameters", [])]
    return found


def _addresses(path: str, given: list[dict[str, str]]) -> list[str]:
    assert given, f"give {path} an address in GIVEN"
    return [f"{path}?{urlencode(item)}" for item in given]


@contextmanager
def consoles_of_roles(databases: Databases) -> Iterator[Consoles]:
    with ExitStack() as stack:
        database = stack.enter_context(databases.lend(used=False))
        bus = stack.enter_context(CommandBus(database))
        stack.enter_context(live_fleet(database, bus))
        prefix = f"r_{database.rsplit('/', 1)[1]}"
        admin = stack.enter_context(psycopg.connect(database, autocommit=True))
        stack.callback(_drop_roles, admin, prefix)
        bus.create_roles(prefix)
        for kind in KINDS:
            admin.execute(f"CREATE ROLE {prefix}_{kind}_user LOGIN IN ROLE {prefix}_{kind}".encode())
        yield Consoles(database, prefix, stack)


def _drop_roles(admin: psycopg.Connection[Any], prefix: str) -> None:
    found = admin.execute("SELECT rolname FROM pg_roles WHERE rolname LIKE %s", [f"{prefix}%"]).fetchall()
    for (role,) in found:
        admin.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def problem(text: str) -> str:
    """What a page, or an answer of the API, says is wrong."""
    found = PROBLEM.search(text)
    return unescape(re.sub(r"<[^>]+>", "", found[2])).strip() if found else text
