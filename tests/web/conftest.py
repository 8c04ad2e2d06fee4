"""A console that serves real HTTP on loopback, and a visitor who asks it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode

import pytest

from commandbus import CommandBus, Settings
from commandbus.web.access import Access
from commandbus.web.app import create_console
from support.consoles import served

MARK = re.compile(r'name="mark" value="([0-9a-f]+)"')


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Visit:
    """Asks a console, as a browser or a program would."""

    def __init__(self, port: int, **headers: str) -> None:
        self.port = port
        self.headers = headers

    def _ask(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {**self.headers, **headers})
            found = connection.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read().decode())
        finally:
            connection.close()

    def get(self, path: str, **query: object) -> Answer:
        return self._ask("GET", path + (f"?{urlencode(query)}" if query else ""), None, {})

    def post(self, path: str, fields: Mapping[str, str] | Sequence[tuple[str, str]], **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._ask(
            "POST", path, urlencode(fields), {"Content-Type": "application/x-www-form-urlencoded", **named}
        )

    def post_json(self, path: str, document: object, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._ask("POST", path, json.dumps(document), {"Content-Type": "application/json", **named})

    def act(self, name: str, page: str, /, **fields: str) -> Answer:
        """As a browser does it: the mark is that of a form on the page."""
        return self.post(f"/actions/{name}", {"mark": self.mark(page), "back": page, **fields})

    def mark(self, page: str) -> str:
        mark = MARK.search(self.get(page).text)
        assert mark is not None, f"no form on {page}"
        return mark[1]


Serve = Callable[..., Visit]


@pytest.fixture
def serve(database: str) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(access: Access | None = None, *, headers: dict[str, str] | None = None) -> Visit:
            app = create_console(Settings(database_url=database), access)
            return Visit(stack.enter_context(served(app)), **(headers or {}))

        yield start


@pytest.fixture
def has_orders() -> str:
    """`bus` has it."""
    return "bus"


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        yield bus
