"""What a module of pages gives the console: by path, the function that makes the page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi.responses import Response

PageRoutes = dict[str, Callable[..., Awaitable[Response]]]
