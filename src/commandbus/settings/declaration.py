"""Every setting, once: a field of `Settings` with its default, environment variable, TOML key, kind and help text.

Command line, documentation and tests are made from the table `SETTINGS`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

from commandbus.errors import ConfigurationError
from commandbus.model.breaker import Breaker
from commandbus.model.json_values import Json
from commandbus.model.limit import Limit, StoreName
from commandbus.model.payload import DEFAULT_MAX_BYTES
from commandbus.model.retry import DEFAULT_SCHEDULE, RetryPolicy
from commandbus.model.timeouts import TimeoutOrderError, Timeouts
from commandbus.quick_dataclass import dataclass
from commandbus.settings.kinds import (
    Kind,
    byte_size,
    choice,
    database_url,
    domain_names,
    duration,
    durations,
    fraction,
    mask_rules,
    or_word,
    pattern,
    redis_url,
    truth,
    whole,
)
from commandbus.settings.limits_and_breakers import declared_breakers, declared_limits

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `toml` is the dotted key: `worker.concurrency` is `concurrency` in `[worker]`."""

    name: str
    default: Any
    env: str
    toml: str
    kind: Kind
    help: str
    secret: bool


def _setting(default: T, env: str, toml: str, kind: Kind, help_text: str, *, secret: bool = False) -> T:
    declared = {"env": env, "toml": toml, "kind": kind, "help": help_text, "secret": secret}
    return field(default=default, metadata=declared)


_LIMITS: Final = Timeouts()
_RETRY: Final = RetryPolicy()


@dataclass(frozen=True, repr=False, kw_only=True)
class Settings:
    """The effective settings; make one with `load_settings`. All durations are seconds; the constructor also takes
    text ("5m") and timedeltas.

    Two fields are separate tables, and not in `SETTINGS`: `limits`, and `breakers` by "DOMAIN/COMMAND_TYPE",
    "DOMAIN/*" or "*". You may give both in the same form as in TOML, with options by name.
    """

    database_url: str | None = _setting(
        None, "COMMANDBUS_DATABASE_URL", "database_url", or_word(database_url(), "unset"),
        "PostgreSQL: a URL or conninfo string, or `embedded` / `embedded:FOLDER`", secret=True,
    )  # fmt: skip
    redis_url: str | None = _setting(
        None, "COMMANDBUS_REDIS_URL", "redis_url", or_word(redis_url(), "unset"),
        "Redis that keeps the permits of shared limits; without it PostgreSQL does", secret=True,
    )  # fmt: skip
    environment: str = _setting(
        "development", "COMMANDBUS_ENVIRONMENT", "environment",
        pattern(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", "a name of up to 63 letters, digits and any of _ . -"),
        "Name of this deployment; part of the names of shared limits",
    )  # fmt: skip
    prepared_statements: bool = _setting(
        True, "COMMANDBUS_PREPARED_STATEMENTS", "prepared_statements", truth(),
        "Prepare statements on the server; false behind PgBouncer in transaction mode",
    )  # fmt: skip
    max_payload_bytes: int = _setting(
        DEFAULT_MAX_BYTES, "COMMANDBUS_MAX_PAYLOAD_BYTES", "max_payload_bytes", byte_size(),
        "Largest JSON text of a command's data or result",
    )  # fmt: skip
    mask: tuple[str, ...] = _setting(
        (), "COMMANDBUS_MASK", "mask", mask_rules(),
        "Fields that nobody sees, such as *.password,data.card.number,result.token",
    )  # fmt: skip

    handlers: str | None = _setting(
        None, "WORKER_HANDLERS", "worker.handlers",
        or_word(pattern(r"[^\W\d][\w.]*:[^\W\d][\w.]*", "MODULE:REGISTRY (shop.tasks:handlers)"), "unset"),
        "The handler registry that a worker runs, as MODULE:REGISTRY",
    )  # fmt: skip
    domains: tuple[str, ...] = _setting(
        (), "WORKER_DOMAINS", "worker.domains", domain_names(),
        "Domains that a worker serves, separated by commas; empty for all that have handlers",
    )  # fmt: skip
    concurrency: int = _setting(
        4, "WORKER_CONCURRENCY", "worker.concurrency", whole(1, 10_000), "Slots of one worker process"
    )
    processes: int = _setting(1, "WORKER_PROCESSES", "worker.processes", whole(1, 1_000), "Worker processes")
    poll_interval: float = _setting(
        1.0, "WORKER_POLL_INTERVAL", "worker.poll_interval", duration(zero=False),
        "How often to look for commands that no notification announced",
    )  # fmt: skip
    wait_for_database: bool = _setting(
        True, "WORKER_WAIT_FOR_DATABASE", "worker.wait_for_database", truth(),
        "Wait if the database is unreachable at the start; false ends the start with an error",
    )  # fmt: skip
    max_messages: int | None = _setting(
        None, "WORKER_MAX_MESSAGES", "worker.max_messages", or_word(whole(1), "off", "none"),
        "Replace a worker after this many commands",
    )  # fmt: skip
    max_memory_mb: int | None = _setting(
        None, "WORKER_MAX_MEMORY_MB", "worker.max_memory_mb", or_word(whole(1), "off", "none"),
        "Replace a worker when it uses more than this many MB of memory",
    )  # fmt: skip
    health_port: int | None = _setting(
        None, "WORKER_HEALTH_PORT", "worker.health_port", or_word(whole(0, 65_535), "off", "none"),
        "Port for /health/live, /health/ready and /metrics; 0 takes any free one",
    )  # fmt: skip
    health_host: str = _setting(
        "127.0.0.1", "WORKER_HEALTH_HOST", "worker.health_host",
        pattern(r"[0-9A-Za-z_.:%-]{1,255}", "an address or a host name (127.0.0.1, 0.0.0.0, ::)"),
        "Address that health_port listens on; 0.0.0.0 for health checks from other machines",
    )  # fmt: skip

    statement_timeout: float = _setting(
        _LIMITS.statement_timeout, "WORKER_STATEMENT_TIMEOUT", "worker.statement_timeout", duration(),
        "Layer 1: longest statement of a handler, on the server; less than visibility_timeout",
    )  # fmt: skip
    pool_timeout: float = _setting(
        _LIMITS.pool_timeout, "WORKER_POOL_TIMEOUT", "worker.pool_timeout", duration(),
        "Layer 2: longest wait for a connection from the pool",
    )  # fmt: skip
    visibility_timeout: float = _setting(
        _LIMITS.visibility_timeout, "WORKER_VISIBILITY_TIMEOUT", "worker.visibility_timeout", duration(),
        "Layer 3: the lease of an attempt; renewed after every third of it",
    )  # fmt: skip
    task_timeout: float | None = _setting(
        _LIMITS.task_timeout, "WORKER_TASK_TIMEOUT", "worker.task_timeout", or_word(duration(), "default"),
        "Layer 4: the deadline of an attempt; default is visibility_timeout + 5s - cancel_grace, 0 is none",
    )  # fmt: skip
    cancel_grace: float = _setting(
        _LIMITS.cancel_grace, "CANCEL_GRACE_SECONDS", "worker.cancel_grace", duration(),
        "Layer 4: how long an attempt may take to stop before it counts as stuck",
    )  # fmt: skip
    heartbeat_timeout: float = _setting(
        _LIMITS.heartbeat_timeout, "WORKER_HEARTBEAT_TIMEOUT", "worker.heartbeat_timeout", duration(),
        "Layer 5: a worker silent for this long is killed and replaced",
    )  # fmt: skip
    shutdown_timeout: float = _setting(
        _LIMITS.shutdown_timeout, "WORKER_SHUTDOWN_TIMEOUT", "worker.shutdown_timeout", duration(),
        "Layer 5: longest shutdown in all; less than the service manager's own stop timeout",
    )  # fmt: skip

    max_extension: float = _setting(
        3600.0, "WORKER_MAX_EXTENSION", "worker.max_extension", duration(zero=False),
        "Longest run of one attempt that its handler may ask for with ctx.extend()",
    )  # fmt: skip
    quarantine: bool = _setting(
        True, "WORKER_QUARANTINE", "worker.quarantine", truth(),
        "After an attempt got stuck or crashed its worker, run the command's next attempts in a child process",
    )  # fmt: skip
    quarantine_processes: int = _setting(
        2, "WORKER_QUARANTINE_PROCESSES", "worker.quarantine_processes", whole(1, 10_000),
        "Most child processes of one worker that run commands in quarantine at once; one slot stays free of them",
    )  # fmt: skip
    code_version: str | None = _setting(
        None, "COMMANDBUS_CODE_VERSION", "code_version",
        or_word(pattern(r"[!-~]{1,64}", "at most 64 visible ASCII characters, such as a git commit"), "auto"),
        "Version of the handlers' code, which failures are compared by; `auto`: a hash of the code",
    )  # fmt: skip
    unknown_type_timeout: float = _setting(
        3600.0, "WORKER_UNKNOWN_TYPE_TIMEOUT", "worker.unknown_type_timeout", duration(),
        "How long commands of a type that no running worker handles stay parked; 0: not at all",
    )  # fmt: skip
    schedule_grace: float = _setting(
        600.0, "WORKER_SCHEDULE_GRACE", "worker.schedule_grace", duration(zero=False),
        "How long a schedule goes on after the last worker that declares it in code has ended",
    )  # fmt: skip
    breakers_enabled: bool = _setting(
        True, "WORKER_BREAKERS", "worker.breakers", truth(),
        "Stop command types and API calls for a while after trouble; false switches all breakers off",
    )  # fmt: skip

    pool_min_size: int = _setting(
        0, "COMMANDBUS_POOL_MIN_SIZE", "pool.min_size", whole(0, 10_000), "Connections kept open when idle"
    )
    pool_max_size: int | None = _setting(
        None, "COMMANDBUS_POOL_MAX_SIZE", "pool.max_size", or_word(whole(1, 10_000), "auto"),
        "Most connections of one process; auto follows from the concurrency",
    )  # fmt: skip
    pool_max_lifetime: float = _setting(
        3600.0, "COMMANDBUS_POOL_MAX_LIFETIME", "pool.max_lifetime", duration(zero=False),
        "Age at which a connection is replaced",
    )  # fmt: skip
    pool_max_idle: float = _setting(
        600.0, "COMMANDBUS_POOL_MAX_IDLE", "pool.max_idle", duration(zero=False),
        "How long an unused connection is kept",
    )  # fmt: skip
    pool_reconnect_timeout: float = _setting(
        300.0, "COMMANDBUS_POOL_RECONNECT_TIMEOUT", "pool.reconnect_timeout", duration(zero=False),
        "How long to try to reconnect before health is critical",
    )  # fmt: skip

    retention_age: float | None = _setting(
        30 * 86_400.0, "COMMANDBUS_RETENTION_AGE", "retention.age",
        or_word(duration(zero=False), "off", "none"),
        "Finished commands older than this are pruned; off keeps them for ever",
    )  # fmt: skip
    retention_count: int | None = _setting(
        None, "COMMANDBUS_RETENTION_COUNT", "retention.count", or_word(whole(1), "off", "none"),
        "Most finished commands kept, of all domains together",
    )  # fmt: skip
    retention_asides_count: int = _setting(
        100_000, "COMMANDBUS_RETENTION_ASIDES_COUNT", "retention.asides_count", whole(1),
        "Most rejected messages kept, and undelivered replies, and stray replies; the oldest are dropped",
    )  # fmt: skip
    retention_asides_bytes: int = _setting(
        1 << 30, "COMMANDBUS_RETENTION_ASIDES_BYTES", "retention.asides_bytes", byte_size(1 << 50),
        "Most bytes of each of these kept; the oldest are dropped",
    )  # fmt: skip

    max_attempts: int = _setting(
        _RETRY.max_attempts, "WORKER_MAX_ATTEMPTS", "retry.max_attempts", whole(1, 10_000),
        "Attempts before a command goes to the troubleshooting queue",
    )  # fmt: skip
    backoff_schedule: tuple[float, ...] = _setting(
        DEFAULT_SCHEDULE, "WORKER_BACKOFF_SCHEDULE", "retry.backoff_schedule", durations(),
        "Waits before the second attempt, the third and so on; the last one repeats",
    )  # fmt: skip
    backoff_jitter: float = _setting(
        _RETRY.jitter, "WORKER_BACKOFF_JITTER", "retry.backoff_jitter", fraction(),
        "How much each wait varies at random, as a share of it, 0 to 1",
    )  # fmt: skip

    log_level: str = _setting(
        "INFO", "COMMANDBUS_LOG_LEVEL", "log.level",
        choice(*map(logging.getLevelName, (10, 20, 30, 40, 50))), "Lowest level that is logged",
    )  # fmt: skip
    log_format: str = _setting(
        "text", "COMMANDBUS_LOG_FORMAT", "log.format", choice("text", "json"),
        "Format of log lines: for people or for machines",
    )  # fmt: skip

    limits: tuple[Limit, ...] = ()
    breakers: Mapping[str, Breaker] = field(default_factory=dict, hash=False)

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    config_file: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            if setting.kind.is_duration and (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _parsed(setting, value))
        origins = {
            name: "default" if getattr(self, name) == setting.default else "argument"
            for name, setting in SETTINGS.items()
        }
        object.__setattr__(self, "limits", declared_limits(self.limits))
        object.__setattr__(self, "breakers", declared_breakers(self.breakers))
        origins |= dict.fromkeys(self.tables(), "argument")
        object.__setattr__(self, "origins", origins | dict(self.origins))
        _check_hierarchy(self)
        _check_pool(self)
        for limit in self.limits:
            self.backend_of(limit)

    @cached_property
    def timeouts(self) -> Timeouts:
        return Timeouts(**{limit.name: getattr(self, limit.name) for limit in fields(Timeouts)})

    @cached_property
    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy(self.max_attempts, self.backoff_schedule, self.backoff_jitter)

    def breaker_of(self, domain: str, command_type: str) -> Breaker:
        """The breaker of a command type: its own, or else its domain's, or else the one for all."""
        if not self.breakers_enabled:
            return Breaker.off()
        keys = (f"{domain}/{command_type}", f"{domain}/*", "*")
        return next((self.breakers[key] for key in keys if key in self.breakers), Breaker())

    def backend_of(self, limit: Limit) -> StoreName:
        """Returns the permit store of a limit."""
        if limit.store == "redis" and not self.redis_url:
            origin = self.origins.get(f"limits.{limit.name}", "argument")
            raise ConfigurationError(
                f'limit {limit.name!r} has store "redis" (from {origin}), but redis_url is not set; set '
                f'redis_url ({SETTINGS["redis_url"].env}), or give the limit store "postgres"'
            )
        return limit.store or ("redis" if self.redis_url else "postgres")

    @property
    def permit_limits(self) -> list[Limit]:
        """The given limits that have permits. Those with a key are for the lines of handlers' commands."""
        return [limit for limit in self.limits if limit.key is None]

    def declared(self, limit: Limit) -> Limit:
        """The limit as these settings declare it. Raises if it needs Redis and there is none. If breakers are
        off, its breaker is off, too."""
        self.backend_of(limit)
        has_breaker = limit.key is None and not self.breakers_enabled
        return limit.changed(breaker_failures=0) if has_breaker else limit

    def tables(self) -> dict[str, dict[str, Json]]:
        """The given limits and breakers: `limits.docai` to its options, ready for JSON."""
        limits = {f"limits.{limit.name}": limit.to_json() for limit in self.limits}
        return limits | {f"breakers.{key}": breaker.to_json() for key, breaker in self.breakers.items()}

    def plain(self) -> dict[str, Json]:
        """Everything that `Settings(**values)` needs to make the same settings again, ready for JSON. Includes
        secrets."""
        values: dict[str, Any] = {name: getattr(self, name) for name in SETTINGS}
        values["limits"] = {limit.name: limit.to_json() for limit in self.limits}
        values["breakers"] = {key: breaker.to_json() for key, breaker in self.breakers.items()}
        return values

    def masked(self) -> dict[str, object]:
        """Name to value, ready for JSON, secrets masked."""
        return {name: self._masked_value(setting) for name, setting in SETTINGS.items()}

    def displayed(self) -> dict[str, str]:
        """Name to text as a person would write it (`25s`, `1MiB`, `off`), secrets masked."""
        return {name: setting.kind.show(getattr(self, name)) for name, setting in SETTINGS.items()}

    def _masked_value(self, setting: Setting) -> object:
        value = getattr(self, setting.name)
        if setting.secret and value is not None:
            return setting.kind.show(value)
        return list(value) if isinstance(value, tuple) else value

    def __repr__(self) -> str:
        shown = self.displayed().items()
        given = [f"{name}={text!r}" for name, text in shown if self.origins[name] != "default"]
        given += [f"{key}={options}" for key, options in self.tables().items()]
        return f"Settings({', '.join(given)})"


def _row(declared: Field[Any]) -> Setting:
    return Setting(name=declared.name, default=declared.default, **declared.metadata)


SETTINGS: Final[Mapping[str, Setting]] = {
    declared.name: _row(declared)
    for declared in fields(Settings)
    if declared.metadata and declared.default is not MISSING
}
"""The table of all settings, by name, in the order of their declaration."""

BY_TOML: Final = {setting.toml: setting for setting in SETTINGS.values()}
BY_ENV: Final = {setting.env: setting for setting in SETTINGS.values()}
SECTIONS: Final = frozenset(key.partition(".")[0] for key in BY_TOML if "." in key)


def _parsed(setting: Setting, value: object) -> object:
    try:
        parsed: object = setting.kind.parse(value, setting.name)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    return parsed


def _check_hierarchy(settings: Settings) -> None:
    try:
        _ = settings.timeouts
    except TimeoutOrderError as error:
        sources = ", ".join(f"{name} from {settings.origins[name]}" for name in error.settings)
        raise ConfigurationError(f"{error} ({sources})") from error
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def _check_pool(settings: Settings) -> None:
    lowest, highest = settings.pool_min_size, settings.pool_max_size
    if highest is not None and lowest > highest:
        raise ConfigurationError(
            f"pool_min_size ({lowest}, from {settings.origins['pool_min_size']}) must not be more than "
            f"pool_max_size ({highest}, from {settings.origins['pool_max_size']})"
        )
