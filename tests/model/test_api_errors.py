"""What is recognised of HTTP APIs: with real urllib, and with objects of the shapes of other libraries."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandbus.errors import (
    ApiTimeoutError,
    BusinessRuleException,
    ConfigurationError,
    LimitTimeoutError,
    PermanentCommandError,
    RateLimitError,
    TransientCommandError,
)
from commandbus.model.api_errors import (
    LONGEST_RETRY_AFTER,
    ApiFailure,
    api_failure,
    parse_retry_after,
    raise_for_rate_limit,
)

NOW = 1_784_116_800.0  # Wed, 15 Jul 2026 12:00:00 GMT


# --- Retry-After -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("14", 14.0),
        (" 14 ", 14.0),
        ("0", 0.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-3", 0.0),
        (7, 7.0),
        (0.25, 0.25),
        (-1, 0.0),
        (b"14", 14.0),
        ("86401", LONGEST_RETRY_AFTER),
        ("9" * 150, LONGEST_RETRY_AFTER),
        (float("inf"), LONGEST_RETRY_AFTER),
        ("Wed, 15 Jul 2026 12:00:14 GMT", 14.0),
        ("Wednesday, 15-Jul-26 12:00:14 GMT", 14.0),
        ("Wed Jul 15 12:00:14 2026", 14.0),
        ("Wed, 15 Jul 2026 11:59:00 GMT", 0.0),
        ("Wed, 15 Jul 2026 14:00:14 +0200", 14.0),
        ("Wed, 15 Jul 2099 12:00:00 GMT", LONGEST_RETRY_AFTER),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: object, seconds: float) -> None:
    assert parse_retry_after(value, now=NOW) == seconds


@pytest.mark.parametrize(
    "value",
    ["", " ", "soon", "1e3", "nan", "inf", "5 s", "5;", "٣", "1,5", "Wed, 99 Jul 2026 99:00:00 GMT", "9" * 10_000,
     "Wed, 15 Jul 99999 12:00:00 GMT", "\x00", None, True, [], {}, object(), float("nan"), b"9" * 10_000],
)  # fmt: skip
def test_what_cannot_be_read_is_no_retry_after(value: object) -> None:
    assert parse_retry_after(value, now=NOW) is None


@given(st.one_of(st.text(), st.binary(), st.integers(), st.floats(), st.none()))
def test_whatever_it_is_it_is_a_wait_of_at_most_a_day_or_nothing(value: object) -> None:
    assert parse_retry_after(10**5000, now=NOW) == LONGEST_RETRY_AFTER
    seconds = parse_retry_after(value, now=NOW)
    assert seconds is None or 0 <= seconds <= LONGEST_RETRY_AFTER


@given(st.integers(0, 80_000))
def test_any_date_of_the_next_day_is_read(ahead: int) -> None:
    assert parse_retry_after(formatdate(NOW + ahead, usegmt=True), now=NOW) == ahead


# --- the shapes of libraries -----------------------------------------------------------------------------------


class Headers(dict[str, str]):
    """Found in any case, as those of httpx, requests and aiohttp are."""

    def get(self, key: str, default: Any = None) -> Any:
        return next((value for name, value in self.items() if name.lower() == key.lower()), default)


class Response:
    """httpx and requests."""

    def __init__(self, status: int, headers: dict[str, str] | None = None, url: str = "") -> None:
        self.status_code = status
        self.headers = Headers(headers or {})
        self.url = url

    def __bool__(self) -> bool:
        return self.status_code < 400  # as requests has it


class AioResponse:
    """aiohttp."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.status = status
        self.headers = Headers(headers or {})


def shaped(module: str, name: str, *bases: type[BaseException], **attributes: object) -> BaseException:
    """An exception of a class of this name, in this module."""
    kind = type(name, bases or (Exception,), {"__module__": module})
    error: BaseException = kind(f"{name} happened")
    for key, value in attributes.items():
        setattr(error, key, value)
    return error


def httpx_error(status: int, headers: dict[str, str] | None = None, url: str = "") -> BaseException:
    return shaped("httpx", "HTTPStatusError", response=Response(status, headers, url))


def aiohttp_error(status: int, headers: dict[str, str] | None = None, url: str = "") -> BaseException:
    return shaped("aiohttp", "ClientResponseError", status=status, headers=Headers(headers or {}))


def urllib_error(status: int, headers: dict[str, str] | None = None, url: str = "") -> BaseException:
    message = http.client.HTTPMessage()
    for key, value in (headers or {}).items():
        message[key] = value
    return urllib.error.HTTPError(url or "http://h/", status, "no", message, None)


def botocore_error(status: int, headers: dict[str, str] | None = None, url: str = "") -> BaseException:
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": {k.lower(): v for k, v in (headers or {}).items()}}
    return shaped("botocore.exceptions", "ClientError", response={"ResponseMetadata": metadata, "Error": {}})


def google_error(status: int, headers: dict[str, str] | None = None, url: str = "") -> BaseException:
    return shaped("google.api_core.exceptions", "TooManyRequests", code=http.HTTPStatus(status), response=None)


def sdk_error(status: int, headers: dict[str, str] | None = None, url: str = "") -> BaseException:
    return shaped("sdk", "APIStatusError", status_code=status, headers=headers)


Make = Callable[..., BaseException]
with_headers = pytest.mark.parametrize(
    "make", [httpx_error, aiohttp_error, urllib_error, botocore_error, sdk_error], ids=lambda make: make.__name__
)
every_shape = pytest.mark.parametrize(
    "make",
    [httpx_error, aiohttp_error, urllib_error, botocore_error, sdk_error, google_error],
    ids=lambda make: make.__name__,
)


def failure_of(error: BaseException) -> ApiFailure:
    failure = api_failure(error)
    assert failure is not None
    return failure


@every_shape
def test_429_is_a_rate_limit(make: Make) -> None:
    failure = failure_of(make(429))
    assert (failure.kind, failure.status, failure.retry_after) == ("rate_limited", 429, None)
    assert "429" in failure.text


@with_headers
def test_retry_after_is_found_in_the_headers(make: Make) -> None:
    assert failure_of(make(429, {"Retry-After": "14"})).retry_after == 14.0
    assert failure_of(make(429, {"retry-after": "1.5"})).retry_after == 1.5
    assert failure_of(make(429, {"Retry-After": "soon"})).retry_after is None


@with_headers
def test_503_with_retry_after_is_a_rate_limit_and_without_it_is_broken(make: Make) -> None:
    assert failure_of(make(503, {"Retry-After": "0"})).kind == "rate_limited"
    assert failure_of(make(503, {"Retry-After": "soon"})).kind == "broken"
    assert failure_of(make(503)).kind == "broken"


@every_shape
@pytest.mark.parametrize("status", [500, 501, 502, 504, 511])
def test_any_other_5xx_is_broken(make: Make, status: int) -> None:
    failure = failure_of(make(status, {"Retry-After": "5"}))
    assert (failure.kind, failure.status) == ("broken", status)


@every_shape
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422])
def test_an_answer_that_is_our_own_fault_says_nothing_against_the_api(make: Make, status: int) -> None:
    assert api_failure(make(status, {"Retry-After": "5"})) is None


def test_a_date_is_compared_with_the_servers_own_clock() -> None:
    """The API's clock is a year ahead of ours, or behind it."""
    for skew in (365 * 86_400, -365 * 86_400):
        there = time.time() + skew
        headers = {"Date": formatdate(there, usegmt=True), "Retry-After": formatdate(there + 14, usegmt=True)}
        assert failure_of(httpx_error(429, headers)).retry_after == 14.0
    headers = {"Date": "now", "Retry-After": formatdate(time.time() + 500, usegmt=True)}
    assert failure_of(httpx_error(429, headers)).retry_after == pytest.approx(490, abs=20)


def test_the_text_names_the_host_and_no_more_of_the_url() -> None:
    failure = failure_of(httpx_error(429, url="https://me:s3cret@api.example.com/v1?key=s3cret"))
    assert failure.text == "429 from api.example.com"
    assert failure_of(httpx_error(503)).text == "HTTP 503"


def test_throttling_that_comes_as_a_400_is_a_rate_limit() -> None:
    response = {"ResponseMetadata": {"HTTPStatusCode": 400}, "Error": {"Code": "ThrottlingException"}}
    failure = failure_of(shaped("botocore.exceptions", "ClientError", response=response))
    assert (failure.kind, failure.status, failure.text) == ("rate_limited", 400, "ThrottlingException")


# --- no answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        getattr(socket, "timeout")(),  # noqa: B009 - an old name of TimeoutError, as another is in asyncio
        getattr(asyncio, "TimeoutError")(),  # noqa: B009
        urllib.error.URLError(TimeoutError("timed out")),
        shaped("httpx", "ReadTimeout", type("TimeoutException", (Exception,), {"__module__": "httpx"})),
        shaped("requests.exceptions", "Timeout"),
        shaped("requests.exceptions", "ConnectTimeout", ConnectionError),
        shaped("urllib3.exceptions", "TimeoutError"),
        shaped("botocore.exceptions", "ReadTimeoutError"),
        ApiTimeoutError(),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_no_answer_in_time_is_a_timeout(error: BaseException) -> None:
    assert failure_of(error) == ApiFailure("timeout", None, None, "timeout")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(),
        ConnectionResetError(),
        http.client.RemoteDisconnected(),
        http.client.IncompleteRead(b""),
        socket.gaierror(-2, "unknown"),
        urllib.error.URLError(ConnectionRefusedError()),
        urllib.error.URLError("no host given"),
        shaped("httpx", "ConnectError"),
        shaped("requests.exceptions", "ConnectionError"),
        shaped("aiohttp.client_exceptions", "ClientConnectorError",
               type("ClientConnectionError", (Exception,), {"__module__": "aiohttp"})),
        shaped("urllib3.exceptions", "ProtocolError"),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)  # fmt: skip
def test_no_connection_is_broken(error: BaseException) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.status, failure.retry_after) == ("broken", None, None)
    assert failure.text.startswith("no connection (")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("429"),
        Exception(),
        OSError(28, "no space left on device"),
        KeyboardInterrupt(),
        SystemExit(429),
        asyncio.CancelledError(),
        shaped("redis.exceptions", "ConnectionError"),
        shaped("sqlalchemy.exc", "TimeoutError"),
        shaped("shop", "NotFound", code=500),
        shaped("shop", "Odd", status="429", response=object()),
        LimitTimeoutError("no place of docai within 30s", limit="docai"),
        ConfigurationError("no"),
        TransientCommandError("try again", code="429"),
    ],
    ids=lambda error: f"{type(error).__module__}.{type(error).__name__}",
)
def test_what_has_nothing_to_do_with_an_api_is_not_blamed_on_it(error: BaseException) -> None:
    assert api_failure(error) is None


# --- what handlers raise ---------------------------------------------------------------------------------------


def raised(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_our_own_error_is_recognised_with_all_that_it_says() -> None:
    failure = failure_of(RateLimitError("docai\nsays\tno", retry_after=14, limit="docai"))
    assert failure == ApiFailure("rate_limited", 429, 14.0, "docai says no", "docai")
    assert failure_of(RateLimitError(retry_after=10**9)).retry_after == LONGEST_RETRY_AFTER
    assert failure_of(RateLimitError(retry_after="14")).retry_after == 14.0  # type: ignore[arg-type]
    assert failure_of(RateLimitError("")).text == "rate limited"


def test_the_cause_is_looked_at() -> None:
    assert failure_of(raised(ValueError(), httpx_error(429, {"Retry-After": "3"}))).retry_after == 3.0
    assert failure_of(raised(TransientCommandError(), httpx_error(500))).kind == "broken"
    chain: BaseException = httpx_error(429)
    for _ in range(5):
        chain = raised(RuntimeError(), chain)
    assert failure_of(chain).kind == "rate_limited"


def test_what_the_api_said_is_taken_from_the_cause_of_our_own_error() -> None:
    failure = failure_of(raised(RateLimitError("busy", limit="docai"), httpx_error(429, {"Retry-After": "3"})))
    assert failure == ApiFailure("rate_limited", 429, 3.0, "busy", "docai")


def test_what_else_was_under_way_is_not_looked_at() -> None:
    error = ValueError()
    error.__context__ = httpx_error(429)
    assert api_failure(error) is None


@pytest.mark.parametrize("kind", [PermanentCommandError, BusinessRuleException])
def test_what_the_handler_has_decided_is_not_overruled(kind: type[Exception]) -> None:
    assert api_failure(raised(kind("no"), httpx_error(429))) is None
    assert api_failure(raised(ValueError(), raised(kind("no"), httpx_error(429)))) is None


def test_a_group_is_looked_into_and_a_rate_limit_counts_most() -> None:
    group = ExceptionGroup("calls", [ValueError(), httpx_error(500), ExceptionGroup("more", [httpx_error(429)])])  # type: ignore[list-item]
    assert failure_of(group).kind == "rate_limited"
    assert api_failure(ExceptionGroup("calls", [ValueError()])) is None


def test_chains_without_end_come_to_an_end() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert api_failure(first) is None


# --- hostile objects -------------------------------------------------------------------------------------------


class Landmine:
    """Whatever is asked of it, it raises."""

    def __init__(self, error: BaseException) -> None:
        object.__setattr__(self, "_error", error)

    def __getattribute__(self, name: str) -> Any:
        raise object.__getattribute__(self, "_error")

    def __bool__(self) -> bool:
        raise object.__getattribute__(self, "_error")

    __str__ = __len__ = __iter__ = __eq__ = __bool__  # type: ignore[assignment]


def mined(error: BaseException) -> type[Exception]:
    """An exception all of whose attributes raise."""

    def fail(_: object) -> Any:
        raise error

    names = ("response", "status", "status_code", "code", "headers", "request", "url", "reason", "__class__")
    return type(
        "Mined", (Exception,), {name: property(fail) for name in names} | {"__str__": fail, "__repr__": fail}
    )


@pytest.mark.parametrize(
    "error", [RuntimeError(), AttributeError(), RecursionError(), SystemExit(), GeneratorExit()], ids=repr
)
def test_hostile_objects_do_no_harm(error: BaseException) -> None:
    mine = Landmine(error)
    kind = mined(error)
    for bad in (
        kind(),
        kind("x" * 10**7),
        raised(ValueError(), kind()),
        shaped("httpx", "HTTPStatusError", response=mine),
        shaped("httpx", "HTTPStatusError", status=mine, headers=mine, code=mine, request=mine, reason=mine),
        shaped("httpx", "ConnectError", request=mine),
        shaped("b", "ClientError", response={"ResponseMetadata": mine, "Error": mine}),
    ):
        failure = api_failure(bad)
        assert failure is None or failure.kind == "broken"


@pytest.mark.parametrize("error", [RuntimeError(), AttributeError(), RecursionError()], ids=repr)
def test_a_429_with_hostile_headers_is_a_429_all_the_same(error: BaseException) -> None:
    mine = Landmine(error)
    response = Response(429)
    response.headers = response.url = mine  # type: ignore[assignment]
    assert failure_of(shaped("httpx", "HTTPStatusError", response=response)).kind == "rate_limited"
    response.headers = {"Retry-After": mine}  # type: ignore[assignment]
    assert failure_of(shaped("httpx", "HTTPStatusError", response=response)).retry_after is None


def test_huge_values_do_no_harm() -> None:
    assert api_failure(shaped("x", "E", status=10**5000, headers={})) is None
    failure = failure_of(httpx_error(429, {"Retry-After": "9" * 10**6}, url="http://" + "h" * 10**6))
    assert failure.retry_after is None
    assert len(failure_of(RateLimitError("x" * 10**7)).text) <= 200
    assert len(failure.text) <= 250


# --- responses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Response, AioResponse])
def test_a_response_that_says_not_now_raises(make: Callable[..., Any]) -> None:
    for status in (429, 503):
        with pytest.raises(RateLimitError, match=f"HTTP {status}") as error:
            raise_for_rate_limit(make(status, {"Retry-After": "14"}), limit="docai")
        assert (error.value.retry_after, error.value.limit, error.value.code) == (14.0, "docai", "RATE_LIMITED")
        assert failure_of(error.value) == ApiFailure("rate_limited", status, 14.0, f"HTTP {status}", "docai")
    with pytest.raises(RateLimitError) as error:
        raise_for_rate_limit(make(429))
    assert (error.value.retry_after, error.value.limit) == (None, None)


@pytest.mark.parametrize("make", [Response, AioResponse])
@pytest.mark.parametrize("status", [200, 204, 304, 400, 404, 500, 502, 503])
def test_any_other_response_is_returned(make: Callable[..., Any], status: int) -> None:
    response = make(status)
    assert raise_for_rate_limit(response) is response


def _class_name(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("wrong", [None, "429", 429, object(), {"status": 429}, Exception()], ids=_class_name)
def test_what_is_no_response_is_refused(wrong: object) -> None:
    with pytest.raises(
        TypeError, match=f"needs a response with a status_code or status, not {type(wrong).__name__}"
    ):
        raise_for_rate_limit(wrong)


def test_a_bad_name_of_a_limit_is_refused_before_the_first_429() -> None:
    with pytest.raises(ConfigurationError, match="is not the name of a limit"):
        raise_for_rate_limit(Response(200), limit="Doc AI")


# --- urllib, over a real connection ----------------------------------------------------------------------------


class Api(BaseHTTPRequestHandler):
    """Answers /503?14 with 503 and Retry-After: 14, and /drop not at all."""

    def do_GET(self) -> None:
        path, _, wait = self.path.partition("?")
        if path == "/drop":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(int(path.strip("/")))
        if wait == "date":
            self.send_header("Retry-After", formatdate(time.time() + 500, usegmt=True))
        elif wait:
            self.send_header("Retry-After", wait)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def get(url: str, timeout: float = 30) -> int:
    with raise_for_rate_limit(urllib.request.urlopen(url, timeout=timeout)) as response:
        status: int = response.status
        return status


def error_of(url: str, timeout: float = 30) -> BaseException:
    with pytest.raises((urllib.error.URLError, ConnectionError, TimeoutError)) as error:
        get(url, timeout)
    if isinstance(error.value, urllib.error.HTTPError):
        error.value.close()
    return error.value


def test_urllib_is_understood(api: str) -> None:
    assert get(f"{api}/200?14") == 200
    text = "429 from 127.0.0.1"
    assert failure_of(error_of(f"{api}/429?14")) == ApiFailure("rate_limited", 429, 14.0, text)
    assert failure_of(error_of(f"{api}/429?date")).retry_after == pytest.approx(499.5, abs=1.5)
    assert failure_of(error_of(f"{api}/503?1")).kind == "rate_limited"
    assert failure_of(error_of(f"{api}/503")) == ApiFailure("broken", 503, None, "503 from 127.0.0.1")
    assert api_failure(error_of(f"{api}/404")) is None
    assert failure_of(error_of(f"{api}/drop")).kind == "broken"


def test_an_error_of_urllib_is_a_response_too(api: str) -> None:
    error = error_of(f"{api}/429?14")
    with pytest.raises(RateLimitError, match=r"429 from 127\.0\.0\.1"):
        raise_for_rate_limit(error)


def test_http_client_is_understood(api: str) -> None:
    connection = http.client.HTTPConnection(api.removeprefix("http://"), timeout=30)
    connection.request("GET", "/429?2")
    with pytest.raises(RateLimitError) as error, connection.getresponse() as response:
        raise_for_rate_limit(response)
    connection.close()
    assert error.value.retry_after == 2.0


def test_an_api_that_is_not_there_is_broken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert failure_of(error_of(f"http://127.0.0.1:{port}/")).kind == "broken"


def test_an_api_that_hangs_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # it takes connections, and never answers
        assert failure_of(error_of(f"http://127.0.0.1:{deaf.getsockname()[1]}/", timeout=0.2)).kind == "timeout"
