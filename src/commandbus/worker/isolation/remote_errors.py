"""An exception of a child process, described there and made again in the worker.

What crosses over is text. The worker's side makes an exception with the same name, text, code and details, of the
nearest class that it knows and that says something about a command's fate; it never imports what it is told.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg_pool import PoolTimeout

from commandbus import errors
from commandbus.clock import epoch
from commandbus.model import payload
from commandbus.model.api_errors import ApiFailure, api_failure, parse_retry_after
from commandbus.model.outcome import describe
from commandbus.model.retry import RetryPolicy, Ruling, rule_on
from commandbus.model.snooze import EffectWait, Snooze
from commandbus.worker.exhaustion import ExhaustedError

API: Final = "commandbus_api"
"""The attribute of a remade exception that says what the original one said of an API."""

RULING: Final = "commandbus_ruling"
"""The attribute of a remade exception that says what the retry policy said about the original one."""

_KNOWN: Final[dict[str, type[BaseException]]] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        ExhaustedError,
        errors.BusinessRuleException,
        errors.TransactionUsedError,
        errors.EffectUncertainError,
        errors.EffectMisuseError,
        errors.PermanentCommandError,
        EffectWait,
        Snooze,
        errors.TransientCommandError,
        errors.CommandFailure,
        errors.AttemptFencedError,
        errors.DeadlineExceededError,
        errors.LimitLostError,
        errors.AttemptCanceledError,
        errors.CommandBusError,
        asyncio.CancelledError,
        PoolTimeout,
        pg.QueryCanceled,
        pg.LockNotAvailable,
        pg.IdleInTransactionSessionTimeout,
        pg.AdminShutdown,
        psycopg.OperationalError,
        psycopg.Error,
        TimeoutError,
        ConnectionError,
        MemoryError,
        Exception,
    )
}


def describe_error(error: BaseException, trace: str, policy: RetryPolicy | None = None) -> dict[str, Any]:
    """What is told of an exception, and what its handler's own retry policy says about it."""
    failure = describe(error, trace)
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    return {
        "kind": next((kind for kind in kinds if kind in _KNOWN), "builtins.BaseException"),
        "name": failure.error_type,
        "code": failure.error_code,
        "text": failure.error,
        "details": failure.details,
        "trace": failure.traceback,
        "api": None if (api := api_failure(error)) is None else asdict(api),
        "snooze": error.delay_seconds if isinstance(error, Snooze) else None,
        "ruling": None if policy is None else list(rule_on(policy, error)),
    }


def remake_api(told: dict[str, Any]) -> ApiFailure | None:
    """What was said about an API, checked."""
    kind, status, limit = (told.get(key) for key in ("kind", "status", "limit"))
    if kind not in ("rate_limited", "broken", "timeout"):
        return None
    return ApiFailure(
        kind,
        status if isinstance(status, int) else None,
        parse_retry_after(told.get("retry_after"), now=epoch()),
        payload.clean_text(str(told.get("text")), longest=200),
        limit if isinstance(limit, str) else None,
    )


def remake_error(told: dict[str, Any]) -> tuple[BaseException, str | None]:
    """The exception, and its traceback in text."""
    base = _KNOWN.get(str(told.get("kind")), BaseException)
    name, text = (payload.clean_text(str(told.get(key)), longest=8192) for key in ("name", "text"))
    kind: type[BaseException] = type(
        name[:200] or "Error", (base,), {"__str__": lambda _: text, "__module__": "remote"}
    )
    trace = told.get("trace")
    if issubclass(kind, Snooze):
        error: BaseException = kind(told.get("snooze", 0), text)
    elif issubclass(kind, errors.CommandFailure):
        details = told.get("details")
        code = payload.clean_text(str(told.get("code")), longest=200)
        error = kind(text, code=code, details=payload.loads(details) if details else None)
    else:
        error = kind(text)
    if isinstance(api := told.get("api"), dict):
        setattr(error, API, remake_api(api))
    if isinstance(ruling := told.get("ruling"), list):
        setattr(error, RULING, Ruling(*ruling))
    return error, payload.clean_text(trace) if isinstance(trace, str) else None
