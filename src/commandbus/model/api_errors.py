"""How an HTTP API failed, for any HTTP library: rate limited, broken, or no answer in time.

Nothing here imports an HTTP library. Exceptions and responses are recognized by their shape
(`.response.status_code`, `.status`, `.code`, `.headers`) and by the names of their classes: httpx, requests,
aiohttp, urllib, botocore and libraries built on them. They may be of any class, so reading an attribute may raise:
such an attribute counts as missing.

    429; 503 with Retry-After            rate_limited
    any other 5xx; no connection         broken
    no answer in time                    timeout
    all else, and what commandbus or     not a failure of the API (None)
    the handler itself has decided

What a 429, a failure or a success does to its limit: `model/limit_state.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC
from typing import Final, Literal, TypeVar, cast
from urllib.parse import urlsplit

from commandbus.clock import epoch
from commandbus.errors import (
    BusinessRuleException,
    CommandBusError,
    CommandFailure,
    DeadlineExceededError,
    LimitTimeoutError,
    PermanentCommandError,
    RateLimitError,
)
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.limit import check_limit_name
from commandbus.quick_dataclass import dataclass

T = TypeVar("T")
FailureKind = Literal["rate_limited", "broken", "timeout"]

LONGEST_RETRY_AFTER: Final = 86_400.0
_SECONDS = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)", re.ASCII)
_LONGEST_HEADER: Final = 200
_LONGEST_TEXT: Final = 200
_DEPTH: Final = 8
_WIDTH: Final = 16
# The more specific one comes first: URLError(TimeoutError()) is a timeout.
_ORDER: Final = "rate_limited", "timeout", "broken"

# Names that are clear, whatever library they come from.
_TIMEOUT_NAMES: Final = frozenset({"TimeoutException", "Timeout", "ConnectTimeout", "ReadTimeout", "WriteTimeout"})
_BROKEN_NAMES: Final = frozenset(
    {"ConnectError", "NetworkError", "RemoteProtocolError", "ClientConnectionError", "ServerDisconnectedError",
     "ClientPayloadError", "NewConnectionError", "EndpointConnectionError", "ConnectionClosedError", "URLError",
     "RemoteDisconnected", "IncompleteRead", "BadStatusLine", "gaierror"}
)  # fmt: skip
# Names that databases use too: those count only if they are of a library that speaks HTTP.
_HTTP_LIBRARIES: Final = frozenset({"aiohttp", "botocore", "http", "httpcore", "httpx", "requests", "urllib3"})
_HTTP_TIMEOUT_NAMES: Final = frozenset({"TimeoutError", "ConnectTimeoutError", "ReadTimeoutError", "PoolTimeout"})
_HTTP_BROKEN_NAMES: Final = frozenset({"ConnectionError", "ProtocolError", "MaxRetryError", "HTTPClientError"})
_THROTTLED: Final = frozenset(
    {"Throttling", "ThrottlingException", "TooManyRequestsException", "RequestLimitExceeded", "SlowDown"}
)


@dataclass(frozen=True, slots=True)
class ApiFailure:
    """How an API failed. `text` is for people ("429 from api.example.com", "HTTP 503", "timeout").

    `retry_after`: seconds, if the API said how long. `limit`: the limit's name, if a `RateLimitError` named it.
    """

    kind: FailureKind
    status: int | None
    retry_after: float | None
    text: str
    limit: str | None = None

    def at(self, limit: str) -> str:
        """The same text with the name of the limit: "429 from docai". A handler's own text stays as it is."""
        is_ours = self.text == "rate limited" or self.text.startswith((f"{self.status} from ", "HTTP "))
        return f"{self.status} from {limit}" if is_ours and self.status is not None else self.text


def parse_retry_after(value: object, *, now: float) -> float | None:
    """Seconds to wait, from the value of a `Retry-After` header: seconds, also with a fraction, or an HTTP date.

    `now` is in seconds since the epoch, for dates. A moment in the past is 0, and what cannot be read is None.
    More than a day is capped to a day: nobody meant it, and a limit would be shut until somebody notices.
    """
    if isinstance(value, bytes) and len(value) <= _LONGEST_HEADER:
        value = value.decode("latin-1")
    if isinstance(value, str) and len(value) <= _LONGEST_HEADER:
        text = value.strip()
        return _capped(float(text)) if _SECONDS.fullmatch(text) else _capped(_until(text, now))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _capped(value)
    return None


def api_failure(error: BaseException) -> ApiFailure | None:
    """What an exception says of the API that was called; None if it says nothing of it.

    It also looks at what the exception was raised `from`, and into exception groups. A `PermanentCommandError` or
    `BusinessRuleException` is the handler's own decision, whatever it was raised from. Never raises.
    """
    try:
        found = [failure for item in _related(error) if (failure := _judged(item)) is not None]
        if not found:
            return None
        first = min(found, key=lambda failure: _ORDER.index(failure.kind))
        if first.kind != "rate_limited" or first.retry_after is not None:
            return first
        seconds = next((failure.retry_after for failure in found if failure.retry_after is not None), None)
        return replace(first, retry_after=seconds)
    except BaseException as hostile:
        if isinstance(hostile, KeyboardInterrupt):
            raise
        return None


def raise_for_rate_limit(response: T, *, limit: str | None = None) -> T:
    """Raise `RateLimitError` if the API said "not now": 429, or 503 with `Retry-After`. Else return the response.

    For responses of httpx, requests, aiohttp and urllib. `limit`: the limit that it concerns; without it, the one
    whose `ctx.limit` block the error leaves, or the handler's own.
    """
    if limit is not None:
        check_limit_name(limit)
    status = _status_of(response)
    if status is None:
        raise TypeError(
            f"raise_for_rate_limit() needs a response with a status_code or status, not {type(response).__name__}"
        )
    failure = _judged_answer(status, _get(response, "headers"), _host_of(response))
    if failure is not None and failure.kind == "rate_limited":
        raise RateLimitError(
            failure.text, retry_after=failure.retry_after, limit=limit, details={"status": failure.status}
        )
    return response


# --- exceptions ----------------------------------------------------------------------------------------------


def _related(error: BaseException) -> Iterator[BaseException]:
    """The exception, those in it, and those it was raised from; not what else was under way (`__context__`)."""
    waiting, seen = [(error, 0)], 0
    while waiting and seen < _WIDTH:
        item, depth = waiting.pop(0)
        seen += 1
        if isinstance(item, PermanentCommandError | BusinessRuleException):
            continue
        yield item
        inner = [item.__cause__, _get(item, "reason")]
        if isinstance(item, BaseExceptionGroup):
            inner += item.exceptions[:_WIDTH]
        if depth < _DEPTH:
            waiting += [(found, depth + 1) for found in inner if isinstance(found, BaseException)]


def _judged(error: BaseException) -> ApiFailure | None:
    if isinstance(error, LimitTimeoutError):
        return None  # nobody was called; also where it is a RateLimitError, too (`commandbus.rate_limiter`)
    if isinstance(error, RateLimitError):
        return _told(error)
    if isinstance(error, DeadlineExceededError):
        return ApiFailure("timeout", None, None, "timeout")
    if isinstance(error, CommandBusError | CommandFailure):
        return None
    response = _get(error, "response")
    if isinstance(response, Mapping):
        return _judged_document(response)
    for source in (response, error):
        status = _status_of(source, is_error=source is error)
        if status is not None:  # there was an HTTP answer, so the class of the exception adds nothing
            headers = _get(source, "headers")
            if headers is None:
                headers = _get(error, "headers")
            return _judged_answer(status, headers, _host_of(source) or _host_of(error))
    return _unanswered(error)


def told_seconds(value: object) -> float | None:
    """What a handler said: a duration, or a header's value. What is neither is None: a 429 must not get lost."""
    try:
        return _capped(parse_seconds(cast(Duration, value), name="retry_after"))
    except ValueError:
        return parse_retry_after(value, now=epoch())


def _told(error: RateLimitError) -> ApiFailure:
    details, limit = _get(error, "details"), _get(error, "limit")
    return ApiFailure(
        "rate_limited",
        _whole(details.get("status") if isinstance(details, dict) else None) or 429,
        told_seconds(_get(error, "retry_after")),
        _text(error) or "rate limited",
        limit if isinstance(limit, str) else None,
    )


def _unanswered(error: BaseException) -> ApiFailure | None:
    classes = type(error).__mro__
    names = {found.__name__ for found in classes}
    theirs = {found.__name__ for found in classes if str(found.__module__).partition(".")[0] in _HTTP_LIBRARIES}
    if isinstance(error, TimeoutError) or names & _TIMEOUT_NAMES or theirs & _HTTP_TIMEOUT_NAMES:
        return ApiFailure("timeout", None, None, "timeout")
    if isinstance(error, ConnectionError) or names & _BROKEN_NAMES or theirs & _HTTP_BROKEN_NAMES:
        host = _host_of(error)
        name = _text(type(error).__name__)
        return ApiFailure("broken", None, None, f"no connection{f' to {host}' if host else ''} ({name})")
    return None


# --- answers -------------------------------------------------------------------------------------------------


def _judged_answer(status: int, headers: object, host: str) -> ApiFailure | None:
    retry_after = _retry_after_in(headers)
    text = f"{status} from {host}" if host else f"HTTP {status}"
    if status == 429 or (status == 503 and retry_after is not None):
        return ApiFailure("rate_limited", status, retry_after, text)
    return ApiFailure("broken", status, retry_after, text) if status >= 500 else None


def _judged_document(response: Mapping[object, object]) -> ApiFailure | None:
    """An answer as botocore keeps it. Some of its services throttle with a 400 and a name."""
    metadata, problem = response.get("ResponseMetadata"), response.get("Error")
    if not isinstance(metadata, Mapping):
        return None
    status = _whole(metadata.get("HTTPStatusCode"))
    failure = None if status is None else _judged_answer(status, metadata.get("HTTPHeaders"), "")
    code = problem.get("Code") if isinstance(problem, Mapping) else None
    if isinstance(code, str) and code in _THROTTLED:
        return ApiFailure("rate_limited", status, failure.retry_after if failure else None, code)
    return failure


def _status_of(source: object, *, is_error: bool = False) -> int | None:
    """The HTTP status of a response, or of an exception; `code` of an exception may well be something else."""
    names = ["status_code", "status"]
    if not is_error or _get(source, "headers") is not None or _is_of(source, "google", "urllib"):
        names.append("code")
    for name in names:
        status = _whole(_get(source, name))
        if status is not None and (status >= 400 or not is_error):
            return status
    return None


def _is_of(source: object, *packages: str) -> bool:
    return any(str(found.__module__).partition(".")[0] in packages for found in type(source).__mro__)


def _host_of(source: object) -> str:
    """Which API it came from: only the host, because the rest of a URL may hold a key."""
    for holder in (source, _get(source, "request"), _get(source, "request_info")):
        url = _get(holder, "url")
        try:
            host = urlsplit(str(url)[:2000]).hostname if url is not None else None
        except Exception:  # noqa: BLE001 - no URL, or a hostile one
            host = None
        if host:
            return _text(host)
    return ""


def _retry_after_in(headers: object) -> float | None:
    """A date is compared with the server's own clock, if it tells the time: ours may be another."""
    try:
        served_at = _header(headers, "Date")
        now = _moment(served_at) if isinstance(served_at, str) and len(served_at) <= _LONGEST_HEADER else None
        return parse_retry_after(_header(headers, "Retry-After"), now=epoch() if now is None else now)
    except Exception:  # noqa: BLE001 - headers that cannot be read say nothing
        return None


def _header(headers: object, name: str) -> object:
    """Those of most libraries are found in any case, those in a plain dict as they were written."""
    get = _get(headers, "get")
    if not callable(get):
        return None
    value = get(name)
    return get(name.lower()) if value is None else value


# --- values --------------------------------------------------------------------------------------------------


def _get(source: object, name: str) -> object:
    """An attribute, or None; also if the look at it raises."""
    try:
        return getattr(source, name, None)
    except Exception:  # noqa: BLE001 - a property may raise anything
        return None


def _whole(value: object) -> int | None:
    is_status = isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599
    return int(value) if is_status else None  # type: ignore[call-overload]


def _text(value: object) -> str:
    """One short line."""
    try:
        return " ".join(str(value)[:1000].split())[:_LONGEST_TEXT]
    except Exception:  # noqa: BLE001 - a broken __str__
        return ""


def _moment(text: str) -> float | None:
    """Seconds since the epoch of an HTTP date, in any of its three forms; they are all in GMT."""
    from email.utils import parsedate_to_datetime  # a megabyte, which most workers never need

    try:
        found = parsedate_to_datetime(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except Exception:  # noqa: BLE001 - the parser of dates raises several kinds
        return None


def _until(text: str, now: float) -> float | None:
    moment = _moment(text)
    return None if moment is None else moment - now


def _capped(seconds: float | None) -> float | None:
    if seconds is None or (isinstance(seconds, float) and math.isnan(seconds)):
        return None
    return float(max(0, min(seconds, LONGEST_RETRY_AFTER)))  # the smaller one first: a huge int has no float
