"""Permits of limits in Redis: one script per operation, so that each operation happens completely or not at all.

A limit is a sorted set `{name}_semaphore:{environment}` (token → when its lease ends), a hash
`{name}_rate:{environment}` (how far its rate is used up) and a text `{name}_use:{environment}` (whether the fleet
shares it with stand-alone semaphores). The clock is Redis' own, so the callers' clocks do not
matter. `commandbus_epoch:{environment}` names the current epoch of this Redis. A script that expects another epoch
does nothing (EpochError), because a Redis that has lost its data no longer knows who holds a permit. An epoch also
names the server's process: a restarted server may have lost its last writes, and a replica that was promoted may
never have had them. Each connection learns once which process it talks to.

One connection, one thread, short timeouts, and no retries: the caller decides what to do without an answer. Not
for Redis Cluster, where the keys of one limit would be on several servers.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import math
import secrets
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

from commandbus.clock import monotonic
from commandbus.errors import ConfigurationError
from commandbus.logger import safe_logger
from commandbus.model.limit import FLOW_SECONDS, PermitUsage
from commandbus.model.limit_values import LimitValues

logger = safe_logger("commandbus.limits")

TIMEOUT_SECONDS: Final = 1.0
WARN_SECONDS: Final = 60.0
_MICRO: Final = 1_000_000

RedisAddress: TypeAlias = Any
"""A URL, or a client of redis-py (sync or async) that an application has anyway."""


class RedisLostError(Exception):
    """Redis gave no usable answer: it is cut off, too slow, loading, read-only, or out of memory."""


class EpochError(Exception):
    """Redis has another epoch (`found`): it has lost its data, or another program has begun an epoch."""

    def __init__(self, found: str | None) -> None:
        super().__init__(f"another epoch: {found}")
        self.found = found


class ExclusiveError(ConfigurationError):
    """A stand-alone semaphore has the name of a limit that the workers do not share."""

    def __init__(self, limit: LimitValues) -> None:
        super().__init__(
            f"limit {limit.name!r} of environment {limit.environment!r} is used by workers that do not share it: "
            f"a semaphore may hold no permit of it. Declare it as Limit({limit.name!r}, …, shared=True), or give "
            f"the semaphore another name"
        )


class StaleError(Exception):
    """The caller's permission to ask has expired: it must first say that it is alive."""


class Probe(NamedTuple):
    """Redis' clock in microseconds, and the epoch; None if this process of the server has none."""

    now: int
    epoch: str | None


def make_pool(address: RedisAddress, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
    """A pool of connections to the Redis of this URL, or to the one that this client of the application uses."""
    try:
        import redis
    except ImportError:
        raise ConfigurationError(
            "limits are to be kept in Redis, but its client is missing: pip install 'commandbus-pg[redis]'"
        ) from None
    usual = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "client_name": "commandbus",
    }
    ours = {"protocol": 2, "decode_responses": True}  # protocol 3 begins with a command that Redis 5 does not know
    if not isinstance(address, str):
        theirs = address.connection_pool
        kind = getattr(redis, theirs.connection_class.__name__, redis.Connection)
        given = {name: value for name, value in theirs.connection_kwargs.items() if _says_where(name)}
        return redis.ConnectionPool(connection_class=kind, **given | usual | ours)
    try:
        pool = redis.ConnectionPool.from_url(address, **usual)
        pool.connection_kwargs.update(ours)
        pool.make_connection()
    except (ValueError, TypeError, redis.RedisError):
        raise ConfigurationError(
            "redis_url (not shown, as it may hold a password) is not a Redis URL: give redis://host:6379/0, "
            "rediss://… for TLS, or unix://…"
        ) from None
    return pool


def _says_where(name: str) -> bool:
    """Does this option of a client say where Redis is, or who asks? Only these options are taken over."""
    return name.startswith("ssl_") or name in {
        "host",
        "port",
        "path",
        "db",
        "username",
        "password",
        "credential_provider",
    }


class RedisScripts:
    """Takes, renews and gives back permits in one Redis. Every method may raise RedisLostError."""

    def __init__(
        self,
        address: RedisAddress,
        environment: str,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        is_alone: bool = False,
    ) -> None:
        """`is_alone`: for a stand-alone semaphore, in a program outside the fleet."""
        self._is_alone = is_alone
        self._warned: dict[str, float] = {}  # limit → when (monotonic)
        pool = make_pool(address, timeout_seconds=timeout_seconds)
        import redis

        self._failure = redis.RedisError
        self._unknown_script = redis.exceptions.NoScriptError
        # Not from the pool, because we must know when a connection is new.
        self._conn: Any = pool.make_connection()
        self._epoch_key = f"commandbus_epoch:{environment}"
        self._server: str | None = None  # which process the connection leads to; None: not connected

    def probe(self) -> Probe:
        """Is Redis there?"""
        now, epoch = self._run("probe", [self._epoch_key], [])
        return Probe(int(now), epoch if epoch and self._is_current(epoch) else None)

    def begin_epoch(self, known: str | None, lease: float) -> str:
        """Leave the epoch that is known (None: there never was one). Returns the epoch that counts from now on. It
        is a new one, in which newcomers get no permit before so many seconds have passed, or one that another
        program has begun."""
        self._connect()
        new = [known or "", secrets.token_hex(8), round(lease * _MICRO), self._server]
        epoch: str = self._run("begin", [self._epoch_key], new)
        return epoch

    def take(
        self,
        limit: LimitValues,
        tokens: Sequence[str],
        seconds: float,
        *,
        epoch: str,
        leave: int = 0,
        admits_newcomers: bool = False,
    ) -> list[str]:
        """Take permits for some seconds. Returns the tokens that have one, which are the first of those given.
        `admits_newcomers`: it is known that nobody holds a permit from before this epoch."""
        began, opens = _moments(epoch, admits_newcomers=admits_newcomers)
        allowance = (-1 if limit.concurrency is None else limit.concurrency, limit.per_second or 0, limit.burst)
        lease = round(seconds * _MICRO)
        values = (epoch, leave, began, opens, FLOW_SECONDS, *allowance, lease, self._use(limit), *tokens)
        granted, *outsiders = self._ask("take", limit, epoch, values)
        if outsiders:
            self._warn_of_outsiders(limit)
        return list(tokens[:granted])

    def renew(
        self,
        limit: LimitValues,
        tokens: Sequence[str],
        *,
        epoch: str,
        leave: int = 0,
        register: bool = False,
        seconds: float | None = None,
        admits_newcomers: bool = False,
    ) -> list[str]:
        """Renew leases, for the limit's own time unless told otherwise. Returns the tokens that hold no permit.
        `register`: add permits that Redis has forgotten. With
        `admits_newcomers` it adds them only if there is room."""
        _, opens = _moments(epoch, admits_newcomers=admits_newcomers)
        lease = round((limit.lease if seconds is None else seconds) * _MICRO)
        concurrency = -1 if limit.concurrency is None else limit.concurrency
        return self._ask("renew", limit, epoch, (epoch, leave, opens, int(register), concurrency, lease, *tokens))

    def release(self, limit: LimitValues, tokens: Sequence[str], *, epoch: str) -> None:
        """Give permits back."""
        self._ask("release", limit, epoch, (epoch, *tokens))

    def usage(self, limit: LimitValues, *, epoch: str, is_blocked: bool = False) -> PermitUsage:
        """Who holds a permit, and how fast permits are given, or were given before the limit was blocked."""
        flow, holders, now = self._ask("usage", limit, epoch, (epoch, 0, FLOW_SECONDS, int(is_blocked)))
        pairs = zip(holders[::2], holders[1::2], strict=True)
        opens_in = (int(_moments(epoch)[1]) - int(now)) / _MICRO
        return PermitUsage(
            {token: int(left) / _MICRO for token, left in pairs},
            float(flow) if flow else None,
            "redis",
            blocked_seconds=opens_in if opens_in > 0 else None,
        )

    def _use(self, limit: LimitValues) -> str:
        if self._is_alone:
            return "semaphore"
        return "shared" if limit.shared else "fleet"

    def _warn_of_outsiders(self, limit: LimitValues) -> None:
        now = monotonic()
        if now - self._warned.get(limit.name, -math.inf) > WARN_SECONDS:
            self._warned[limit.name] = now
            logger.error(
                "stand-alone semaphores hold permits of limit %s, which is not declared with shared=True: workers "
                "get no permit until those are given back, and the semaphores get no more",
                limit.name,
            )

    def close(self) -> None:
        """Close the connection. The next use opens it again."""
        self._server = None
        self._conn.disconnect()

    def _ask(self, script: str, limit: LimitValues, epoch: str, values: Sequence[object]) -> list[Any]:
        """Run one of the scripts that serve a limit."""
        self._connect()
        if not self._is_current(epoch):
            raise EpochError(None)
        keys = (
            self._epoch_key,
            f"{limit.name}_semaphore:{limit.environment}",
            f"{limit.name}_rate:{limit.environment}",
            f"{limit.name}_use:{limit.environment}",
        )
        reply: list[Any] = self._run(script, keys, values)
        outcome, *answer = reply
        if outcome == "epoch":
            raise EpochError(answer[0] or None)
        if outcome == "stale":
            raise StaleError
        if outcome == "exclusive":
            raise ExclusiveError(limit)
        return answer

    def _run(self, script: str, keys: Sequence[str], values: Sequence[object]) -> Any:
        text, digest = _script(script)
        rest = (len(keys), *keys, *values)
        self._connect()
        try:
            try:
                return self._command("EVALSHA", digest, *rest)
            except self._unknown_script:
                return self._command("EVAL", text, *rest)
        except (self._failure, OSError) as error:
            # The reply may still come later, so this connection must not be used any more.
            self.close()
            raise RedisLostError(f"{type(error).__name__}: {error}") from error

    def _connect(self) -> None:
        if self._server is not None:
            return
        try:
            self._conn.connect()
            text = self._command("INFO")
        except (self._failure, OSError) as error:
            self.close()
            raise RedisLostError(f"{type(error).__name__}: {error}") from error
        facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        self._server = facts.get("run_id", "").replace(":", "")
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
            logger.warning(
                "this Redis drops keys when its memory is full (maxmemory-policy %s), and with them permits: set "
                "it to noeviction, or limits may be exceeded",
                policy,
            )

    def _command(self, *values: object) -> Any:
        self._conn.send_command(*values)
        return self._conn.read_response()

    def _is_current(self, epoch: str) -> bool:
        return epoch.rpartition(":")[2] == self._server


@lru_cache(maxsize=8)
def _moments(epoch: str, *, admits_newcomers: bool = False) -> tuple[str, str]:
    """When an epoch began and when it opens to newcomers (`admits_newcomers`: it has), in microseconds."""
    parts = epoch.split(":")
    began, opens = (parts[1], parts[2]) if len(parts) == 4 else ("0", "0")
    return began, "0" if admits_newcomers else opens


@cache
def _script(name: str) -> tuple[str, str]:
    """Its text, and the name by which Redis knows it."""
    folder = importlib.resources.files(__package__).joinpath("lua")
    text = folder.joinpath(f"{name}.lua").read_text("utf-8")
    if name in ("take", "renew", "usage"):
        text = folder.joinpath("head.lua").read_text("utf-8") + text
    return text, hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - Redis' own choice
