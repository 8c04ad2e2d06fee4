"""`create_console`: puts the console together.

app.mount("/console", create_console(Settings(database_url=…), Access(user_header="X-User", operators={"ann"})))
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl

import psycopg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from psycopg_pool import PoolTimeout
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from commandbus.errors import (
    CommandBusError,
    CommandNotFoundError,
    DatabaseUnavailableError,
    InvalidOperationError,
    MissingPrivilegeError,
    SchemaError,
)
from commandbus.logger import safe_logger
from commandbus.settings import Settings
from commandbus.web.access import COOKIE, MARK_FIELD, Access, Visitor, is_same_site
from commandbus.web.actions import ACTIONS, MANY, Portion, Step
from commandbus.web.api import api_routes
from commandbus.web.api.actions import describe_actions
from commandbus.web.console import CONNECTIONS, Console
from commandbus.web.metrics import add_metrics
from commandbus.web.pages import page_routes
from commandbus.web.rehearsing import rehearse_here

logger = safe_logger("commandbus.console")

LARGEST_FORM: Final = 2_000_000
MOST_FIELDS: Final = 300
LARGEST_ANSWER: Final = 8_000_000
_FREE: Final = ("/static/", "/health/", "/sign-in")  # no visitor needed
_SAFE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_Next = Callable[[Request], Awaitable[Response]]


def create_console(
    settings: Settings,
    access: Access | None = None,
    *,
    connections: int = CONNECTIONS,
    handlers: str | None = None,
) -> FastAPI:
    """The console as an ASGI application. Without `access`, only this machine gets in. With `handlers` (a registry
    as MODULE:REGISTRY), operators can rehearse commands."""
    console = Console(settings, access or Access(), connections=connections, handlers=handlers)
    app = FastAPI(
        title="commandbus console",
        description="Everything that the console shows, and every action that it offers, as JSON.",
        lifespan=console.running,
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    app.state.console = console
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"), name="static")
    # They are whole. `include_router` would make each of them a second time when the first request comes.
    app.router.routes += [*api_routes(console).routes, *page_routes(console).routes]
    _add_entrance(app, console)
    _add_actions(app, console)
    _add_health(app, console)
    add_metrics(app, console)
    _add_guard(app, console)
    _add_errors(app, console)
    describe_actions(app)
    return app


def _add_guard(app: FastAPI, console: Console) -> None:
    """Only visitors that `access` knows get in, and every answer has the headers that keep a browser safe."""

    @app.middleware("http")
    async def guard(request: Request, call_next: _Next) -> Response:
        path = request.url.path.removeprefix(str(request.scope.get("root_path", "")))
        visitor = console.access.visitor(request)
        request.state.visitor = visitor
        if visitor is None and not path.startswith(_FREE):
            response = _stranger(request, console, path)
        else:
            response = _bounded(path, await _answered(request, console, call_next))
        for name, value in _SAFE_HEADERS.items():
            response.headers.setdefault(name, value)
        return response


async def _answered(request: Request, console: Console, call_next: _Next) -> Response:
    """The answer. A fault of ours is one, too: outside of the guard it would have no headers, and no words."""
    try:
        return await call_next(request)
    except Exception:
        logger.exception("a fault of the console: %s %s", request.method, request.url.path)
        text = (
            "This is a fault of the console, and its log has the details. If you asked for a change, look whether "
            "it was made before you ask again: the page Audit has every change."
        )
        return _problem(request, console, 500, "The console has made a mistake", text)


def _problem(request: Request, console: Console, status_code: int, problem: str, text: str) -> Response:
    path = request.url.path.removeprefix(str(request.scope.get("root_path", "")))
    if path.startswith("/api/"):
        return JSONResponse({"error": text}, status_code=status_code)
    return console.page(request, "problem.html", status_code=status_code, problem=problem, text=text)


def _bounded(path: str, response: Response) -> Response:
    """No answer of the API is larger than a program expects."""
    size = int(response.headers.get("content-length", 0))
    if not path.startswith("/api/") or size <= LARGEST_ANSWER:
        return response
    text = f"the answer would have {size} bytes, and at most {LARGEST_ANSWER} are sent: ask for fewer (limit=10)"
    return JSONResponse({"error": text}, status_code=400)


def _stranger(request: Request, console: Console, path: str) -> Response:
    if path.startswith(("/api/", "/metrics")):
        return JSONResponse({"error": "send `Authorization: Bearer TOKEN`"}, status_code=401)
    if console.access.has_tokens:
        return RedirectResponse(f"{request.scope.get('root_path', '')}/sign-in", status_code=303)
    return console.page(
        request, "problem.html", status_code=403, problem="You cannot get in from here",
        text="This console answers only to its own machine (localhost), or to visitors that its proxy names.",
    )  # fmt: skip


def _add_entrance(app: FastAPI, console: Console) -> None:
    @app.get("/sign-in", include_in_schema=False)
    async def sign_in(request: Request) -> Response:
        return console.page(request, "sign_in.html", wrong=False)

    @app.post("/sign-in", include_in_schema=False)
    async def sign_in_with(request: Request) -> Response:
        if not is_same_site(request):  # else a page elsewhere could sign its visitor in under another name
            return _not_ours(request, console)
        cookie = console.access.cookie_for((await _form(request)).get("token", ""))
        if cookie is None:
            return console.page(request, "sign_in.html", status_code=403, wrong=True)
        root = str(request.scope.get("root_path", ""))
        response = RedirectResponse(f"{root}/", status_code=303)
        response.set_cookie(
            COOKIE, cookie, httponly=True, samesite="strict", path=f"{root}/", secure=request.url.scheme == "https"
        )
        return response

    @app.post("/sign-out", include_in_schema=False)
    async def sign_out(request: Request) -> Response:
        given = await _form(request)
        if not console.access.is_ours(request, request.state.visitor, given.get(MARK_FIELD, "")):
            return _not_ours(request, console)
        root = str(request.scope.get("root_path", ""))
        response = RedirectResponse(f"{root}/sign-in", status_code=303)
        response.delete_cookie(COOKIE, path=f"{root}/")
        return response


def _add_actions(app: FastAPI, console: Console) -> None:
    @app.post("/actions/{name}", include_in_schema=False)
    async def act(request: Request, name: str) -> Response:
        visitor: Visitor = request.state.visitor
        given = await _form(request)
        if not console.access.is_ours(request, visitor, given.get(MARK_FIELD, "")):
            return _not_ours(request, console)
        if not visitor.may_act:
            return console.page(
                request, "problem.html", status_code=403, problem="Nothing was done",
                text=f"{visitor.name} is a reader. An operator may do this.",
            )  # fmt: skip
        if name == "rehearse":
            found = await rehearse_here(console, given.get("domain", ""), given.get("id", ""))
            return console.page(request, "rehearsal.html", found=found, back=_local(given.get("back")))
        if name not in ACTIONS:
            raise CommandNotFoundError(f"there is no action {name!r}")
        sentence = await ACTIONS[name].run(console.acting, visitor.name, ACTIONS[name].check(given))
        logger.info("%s: %s", visitor.name, sentence)
        if isinstance(sentence, Step):
            return RedirectResponse(f"{request.scope.get('root_path', '')}{sentence.page}", status_code=303)
        if isinstance(sentence, Portion):
            return console.page(
                request, "portion.html", sentence=sentence, name=name, reason=given.get("reason", ""),
                back=_local(given.get("back")),
            )  # fmt: skip
        return console.page(request, "done.html", sentence=sentence, back=_local(given.get("back")))


def _not_ours(request: Request, console: Console) -> Response:
    return console.page(
        request, "problem.html", status_code=403, problem="Nothing was done",
        text="The form was not one of this console's own, or it was too old. Open the page again.",
    )  # fmt: skip


def _local(path: str | None) -> str:
    """Where to go back to: a page of this console, whatever the form says."""
    return path if path and path.startswith("/") and not path.startswith(("//", "/\\")) else "/"


async def _form(request: Request) -> dict[str, str]:
    """The fields of a form. A larger one than any of ours is not read."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > LARGEST_FORM:
            raise InvalidOperationError(f"the form has more than {LARGEST_FORM} bytes")
    text = body.decode("utf-8", "replace")
    if text.count("&") >= MOST_FIELDS:
        raise InvalidOperationError(f"the form has more than {MOST_FIELDS} fields")
    given: dict[str, str] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        given[name] = f"{given[name]}\n{value}" if name in MANY and name in given else value
    return given


def _add_health(app: FastAPI, console: Console) -> None:
    @app.get("/health/live", include_in_schema=False)
    async def live() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/health/ready", include_in_schema=False)
    async def ready() -> Response:
        try:
            await console.reading.list_domains()
        except SchemaError as error:
            return JSONResponse({"status": "unready", "reason": str(error)}, status_code=503)
        except (CommandBusError, psycopg.Error, PoolTimeout):
            return JSONResponse({"status": "unready", "reason": "the database does not answer"}, status_code=503)
        return JSONResponse({"status": "ready"})


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _add_errors(app: FastAPI, console: Console) -> None:
    """Every error is an answer: what is wrong, and what to do."""

    def answer(request: Request, status_code: int, problem: str, text: str) -> Response:
        return _problem(request, console, status_code, problem, text)

    @app.exception_handler(CommandBusError)
    async def refused(request: Request, error: CommandBusError) -> Response:
        code = 404 if isinstance(error, LookupError) else 409 if isinstance(error, InvalidOperationError) else 400
        looked = "Not found" if code == 404 else "This cannot be shown"
        return answer(request, code, "This cannot be done" if request.method == "POST" else looked, str(error))

    @app.exception_handler(SchemaError)
    async def unprepared(request: Request, error: SchemaError) -> Response:
        code = 403 if isinstance(error, MissingPrivilegeError) else 503
        return answer(request, code, "The database is not ready for this", str(error))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        text = "This console has no such page." if error.detail == "Not Found" else f"{error.detail}."
        response = answer(request, error.status_code, error.detail, text)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        wrong = "; ".join(f"{_place(item['loc'])}: {item['msg']}" for item in error.errors()[:5])
        return answer(request, 422, "This address is not complete", wrong)

    @app.exception_handler(psycopg.errors.InsufficientPrivilege)
    async def forbidden(request: Request, error: psycopg.errors.InsufficientPrivilege) -> Response:
        text = (
            f"The console's database role {console.role} may not do this: {_first_line(error)}. "
            "To look, it needs what a reader has; to act, what an operator has: see `commandbus roles`."
        )
        return answer(request, 403, "The console may not do this", text)

    @app.exception_handler(psycopg.errors.LockNotAvailable)
    async def locked(request: Request, _error: psycopg.errors.LockNotAvailable) -> Response:
        text = (
            "Another session has locked what this needs, so nothing was done. Try again in a moment. "
            "The page Database names the open transactions and who holds them."
        )
        return answer(request, 503, "Somebody else is at it", text)

    @app.exception_handler(psycopg.errors.QueryCanceled)
    async def slow(request: Request, _error: psycopg.errors.QueryCanceled) -> Response:
        text = "The database needed more than two seconds. Narrow the search: a domain, a type, a time (since:2h)."
        return answer(request, 503, "That took too long", text)

    @app.exception_handler(psycopg.Error)
    async def refused_by_database(request: Request, error: psycopg.Error) -> Response:
        logger.error("the database refused what the console asked", exc_info=error)
        code, what = (400, "cannot take this") if isinstance(error, psycopg.DataError) else (503, "refused this")
        return answer(request, code, "The database refused this", f"The database {what}: {_first_line(error)}.")

    @app.exception_handler(DatabaseUnavailableError)
    @app.exception_handler(psycopg.OperationalError)
    @app.exception_handler(PoolTimeout)
    async def away(request: Request, error: Exception) -> Response:
        logger.warning("the console cannot reach the database: %s", error)
        text = "The database does not answer. This page works again as soon as it does."
        return answer(request, 503, "The database does not answer", text)


def _place(names: Iterable[object]) -> str:
    """Where in a request something is wrong. The names come from the visitor: they may be long, or no text."""
    return ".".join(map(str, names))[:200].encode("utf-8", "backslashreplace").decode()
