"""A console that serves real HTTP on loopback, and a visitor who asks it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn

from commandbus import CommandBus, Settings
from commandbus.web.access import Access
from commandbus.web.app import create_console
from support.waiting import until

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

    def post(self, path: str, fields: dict[str, str], **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._ask(
            "POST", path, urlencode(fields), {"Content-Type": "application/x-www-form-urlencoded", **named}
        )

    def post_json(self, path: str, document: object) -> Answer:
        return self._ask("POST", path, json.dumps(document), {"Content-Type": "application/json"})

    def act(self, name: str, page: str, **fields: str) -> Answer:
        """As a browser does it: the mark is that of a form on the page."""
        mark = MARK.search(self.get(page).text)
        assert mark is not None, f"no form on {page}"
        return self.post(f"/actions/{name}", {"mark": mark[1], "back": page, **fields})


Serve = Callable[..., Visit]


@pytest.fixture
def serve(database: str) -> Iterator[Serve]:
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(access: Access | None = None, *, headers: dict[str, str] | None = None) -> Visit:
        app = create_console(Settings(database_url=database), access)
        config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        servers.append((server, thread))
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        return Visit(port, **(headers or {}))

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def bus(database: str) -> Iterator[CommandBus]:
    with CommandBus(database) as bus:
        bus.create_domain("orders")
        yield bus
