"""Every setting, declared once, and where its value came from.

A setting is a field of `Settings` together with its default, environment variable, TOML key, kind and help
text; `SETTINGS` is that table, and command line, documentation and tests are made from it. `load_settings`
takes each value from the first of

    arguments > environment > commandbus.toml > [tool.commandbus] in pyproject.toml > default

and `settings.origins[name]` says from which. Two invariants: what `load_settings` returns is valid, the
hierarchy of time limits included; and a password never gets into `masked()`, `displayed()`, `repr()` or an
error.

Nothing here connects, imports handlers, or configures logging. A relative folder in `embedded:FOLDER` is left
as it is; `config_file` tells which file it may be relative to.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from commandbus.errors import ConfigurationError
from commandbus.model.durations import Duration, format_seconds, parse_seconds
from commandbus.model.names import check_domain
from commandbus.model.payload import DEFAULT_MAX_BYTES
from commandbus.model.retry import DEFAULT_SCHEDULE, RetryPolicy
from commandbus.model.timeouts import TimeoutOrderError, Timeouts

T = TypeVar("T")

# --- secrets ---------------------------------------------------------------------------------------------

MASK: Final = "***"
_SECRET_CONNINFO: Final = frozenset(
    {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
)
_SECRET_WORD = re.compile(r"passw|passphrase|secret|token", re.IGNORECASE)
_SECRET_WITHIN = re.compile(rf"(?:{_SECRET_WORD.pattern})\w*\s*=|://", re.IGNORECASE)
_POSTGRES_URL = re.compile(r"postgres(?:ql)?://")


def mask_database_url(value: str) -> str:
    """The URL or conninfo string for people, written anew from its parts without what is secret.

    Never by replacing text: what libpq itself takes for the password is what is masked, whatever the quoting
    or encoding. What libpq cannot read is not shown at all.
    """
    if _is_embedded(value):
        return value
    parts = _conninfo_parts(value)
    if parts is None:
        return MASK
    shown = {key: _masked_part(key in _SECRET_CONNINFO, text) for key, text in parts.items()}
    return _as_url(shown) if _POSTGRES_URL.match(value) else make_conninfo("", **shown)


def mask_redis_url(value: str) -> str:
    """The URL for people; a single word before the @ is masked too, as it may be a token."""
    parts = _redis_parts(value)
    if parts is None:
        return MASK
    userinfo, at, host = parts.netloc.rpartition("@")
    user, colon, _ = userinfo.partition(":")
    netloc = f"{user}:{MASK}@{host}" if colon else f"{MASK if at else ''}{at}{host}"
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    shown = [(key, _masked_part(bool(_SECRET_WORD.search(key)), text)) for key, text in pairs]
    query = urlencode(shown, safe="*/")
    return f"{parts.scheme}://{netloc}{parts.path}" + (f"?{query}" if query else "")


def _masked_part(is_secret: bool, text: str) -> str:  # noqa: FBT001 - of two, and private
    """A part that is not secret by its name may carry one all the same: options, or a URL as dbname."""
    return MASK if is_secret or _SECRET_WITHIN.search(text) else text


def _conninfo_parts(value: str) -> dict[str, str] | None:
    """What libpq reads; None if it cannot, or if an unencoded character tore a password apart."""
    try:
        parts = {key: str(text) for key, text in conninfo_to_dict(value).items()}
    except (psycopg.Error, UnicodeError):
        return None
    if _POSTGRES_URL.match(value):
        # libpq ends the user's part at the first "@" or "/". A raw one of these within the password leaves
        # the rest of it in what is then the host, the port or the database name.
        after_scheme = value.partition("://")[2]
        end = re.search(r"[@/]", after_scheme)
        rest = after_scheme[end.end() :] if end and end.group() == "@" else after_scheme
        if "@" in rest.partition("?")[0]:
            return None
    if not re.fullmatch(r"[\d,]*", parts.get("port", ""), re.ASCII):
        return None
    return parts


def _as_url(parts: dict[str, str]) -> str:
    rest = dict(parts)
    user, password = rest.pop("user", ""), rest.pop("password", "")
    userinfo = quote(user, safe="") + (f":{password}" if password else "")
    netloc = f"{userinfo}@" if userinfo else ""
    if "/" not in rest.get("host", ""):  # the folder of a unix socket stays readable in the query
        hosts, ports = rest.pop("host", "").split(","), rest.pop("port", "").split(",")
        ports += [""] * (len(hosts) - len(ports))
        netloc += ",".join(map(_host_and_port, hosts, ports))
    dbname = quote(rest.pop("dbname", ""), safe="*")
    query = urlencode(rest, safe="*/,", quote_via=quote)
    return f"postgresql://{netloc}/{dbname}" + (f"?{query}" if query else "")


def _host_and_port(host: str, port: str) -> str:
    return (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")


def _redis_parts(value: str) -> SplitResult | None:
    """The URL as redis-py splits it; None if it is none, or an unencoded character tore a password apart."""
    try:
        parts = urlsplit(value)
        _ = parts.port, parse_qsl(parts.query, strict_parsing=True) if parts.query else None
    except ValueError:
        return None
    torn = parts.fragment or "@" in parts.path or "@" in parts.query
    known = parts.hostname if parts.scheme in {"redis", "rediss"} else parts.scheme == "unix" and parts.path
    return None if torn or not known else parts


def _is_embedded(value: str) -> bool:
    return value == "embedded" or (value.startswith("embedded:") and len(value) > len("embedded:"))


# --- kinds of values: what is accepted, and how it is shown ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """`parse(value, name)` raises a ValueError that names both (but no secret); `parse(show(v)) == v`."""

    parse: Callable[[object, str], Any]
    show: Callable[[Any], str] = str


def _or_word(kind: Kind, *words: str) -> Kind:
    """The same kind, where a word (in TOML also `false`, if the word is `off`) stands for None."""

    def parse(value: object, name: str) -> Any:
        if value is False and "off" in words:
            return None
        if isinstance(value, str) and value.strip().lower() in words:
            return None
        try:
            return kind.parse(value, name)
        except ValueError as error:
            raise ValueError(f"{error}, or {words[0]!r}") from None

    return Kind(parse, lambda value: words[0] if value is None else kind.show(value))


def _whole(lowest: int, highest: int = 10**12) -> Kind:
    def parse(value: object, name: str) -> int:
        if isinstance(value, str) and re.fullmatch(r"\d{1,18}", value.strip(), re.ASCII):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise ValueError(
                f"{name}: {_shown(value)} is not accepted; give a whole number from {lowest} to {highest}"
            )
        return value

    return Kind(parse)


def _fraction() -> Kind:
    def parse(value: object, name: str) -> float:
        if isinstance(value, str) and re.fullmatch(r"\d*\.?\d+", value.strip(), re.ASCII):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name}: {_shown(value)} is not accepted; give a number from 0 to 1")
        return float(value)

    return Kind(parse)


def _duration(*, zero: bool = True) -> Kind:
    def parse(value: object, name: str) -> float:
        seconds = parse_seconds(cast(Duration, value), name=name)  # it refuses what is no Duration
        if not zero and not seconds:
            raise ValueError(f"{name}: {_shown(value)} is not accepted; give a duration of more than 0")
        return seconds

    return Kind(parse, format_seconds)


def _durations() -> Kind:
    def parse(value: object, name: str) -> tuple[float, ...]:
        seconds = tuple(_duration().parse(item, name) for item in _items(value, name))
        if not seconds:
            raise ValueError(f"{name}: {_shown(value)} is empty; give durations such as 10s,60s,300s")
        return seconds

    return Kind(parse, lambda value: ",".join(map(format_seconds, value)))


def _domains() -> Kind:
    def parse(value: object, name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(check_domain(item) for item in _items(value, name)))

    return Kind(parse, ",".join)


_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})


def _truth() -> Kind:
    def parse(value: object, name: str) -> bool:
        word = str(value).strip().lower() if isinstance(value, str | bool) else ""
        if word not in _TRUE | _FALSE:
            raise ValueError(f"{name}: {_shown(value)} is not accepted; give true or false")
        return word in _TRUE

    return Kind(parse, lambda value: "true" if value else "false")


_BYTE_UNITS: Final = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1, "": 1}
_MAX_JSONB_BYTES: Final = 255 * 2**20  # PostgreSQL refuses a jsonb value whose parts exceed 2^28 - 1 bytes


def _bytes() -> Kind:
    def parse(value: object, name: str) -> int:
        text = value.strip() if isinstance(value, str) else _shown(value)
        matched = re.fullmatch(r"(\d{1,12})\s*([KMG]iB|B|)", text, re.ASCII)
        size = int(matched[1]) * _BYTE_UNITS[matched[2]] if matched else 0
        if not 1 <= size <= _MAX_JSONB_BYTES:
            raise ValueError(
                f"{name}: {_shown(value)} is not accepted; give bytes (1048576) or a size with a unit "
                f"(512KiB, 1MiB), at most {_MAX_JSONB_BYTES // 2**20}MiB"
            )
        return size

    def show(size: int) -> str:
        unit = next(unit for unit, factor in _BYTE_UNITS.items() if size % factor == 0)
        return f"{size // _BYTE_UNITS[unit]}{unit}"

    return Kind(parse, show)


def _choice(*choices: str) -> Kind:
    def parse(value: object, name: str) -> str:
        for choice in choices:
            if isinstance(value, str) and value.strip().lower() == choice.lower():
                return choice
        raise ValueError(f"{name}: {_shown(value)} is not accepted; give one of {', '.join(choices)}")

    return Kind(parse)


def _pattern(pattern: str, accepted: str) -> Kind:
    def parse(value: object, name: str) -> str:
        if isinstance(value, str) and re.fullmatch(pattern, value.strip()):
            return value.strip()
        raise ValueError(f"{name}: {_shown(value)} is not accepted; give {accepted}")

    return Kind(parse)


def _database_url() -> Kind:
    def parse(value: object, name: str) -> str:
        text = _clean_secret(value, name)
        if _is_embedded(text) or (text and _conninfo_parts(text) is not None):
            return text
        raise ValueError(
            f"{name} (not shown, as it may hold a password) is not a database{_database_hint(text)}; give "
            f"postgresql://user:password@host:5432/name, 'host=… dbname=…', 'embedded' or 'embedded:FOLDER'"
        )

    return Kind(parse, mask_database_url)


def _redis_url() -> Kind:
    def parse(value: object, name: str) -> str:
        text = _clean_secret(value, name)
        if _redis_parts(text):
            return text
        raise ValueError(
            f"{name} (not shown, as it may hold a password) is not a Redis URL: give redis://host:6379/0, "
            f"rediss://… or unix://…, with special characters in a password percent-encoded"
        )

    return Kind(parse, mask_redis_url)


def _database_hint(text: str) -> str:
    if difflib.get_close_matches(text.lower(), ["embedded"]):
        return ": did you mean 'embedded'?"
    if text.startswith(("postgresql+", "postgres+")):
        return ": leave out the driver's name, postgresql://… instead of postgresql+driver://…"
    if _POSTGRES_URL.match(text):
        return ": special characters in a URL must be percent-encoded (@ is %40, / is %2F)"
    return ""


def _clean_secret(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {type(value).__name__}")  # noqa: TRY004 - one kind of error
    if re.search(r"[\x00-\x1f\x7f]", value.strip()):
        raise ValueError(f"{name} (not shown, as it may hold a password) contains a control character")
    return value.strip()


def _items(value: object, name: str) -> Sequence[object]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    if isinstance(value, list | tuple):
        return value
    raise ValueError(
        f"{name}: {_shown(value)} is not accepted; give a list, or text with commas between its items"
    )


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**18:
        return "a number of more than 18 digits"  # repr() of a very large int is an error of its own
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


# --- the declaration -------------------------------------------------------------------------------------


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
    """The effective settings; make one with `load_settings`. All durations are seconds."""

    database_url: str | None = _setting(
        None, "COMMANDBUS_DATABASE_URL", "database_url", _or_word(_database_url(), "unset"),
        "PostgreSQL: a URL or conninfo string, or `embedded` / `embedded:FOLDER`", secret=True,
    )  # fmt: skip
    redis_url: str | None = _setting(
        None, "COMMANDBUS_REDIS_URL", "redis_url", _or_word(_redis_url(), "unset"),
        "Redis for limits shared by all workers", secret=True,
    )  # fmt: skip
    environment: str = _setting(
        "development", "COMMANDBUS_ENVIRONMENT", "environment",
        _pattern(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", "a name of up to 63 letters, digits and any of _ . -"),
        "Name of this deployment; part of the names of shared limits",
    )  # fmt: skip
    prepared_statements: bool = _setting(
        True, "COMMANDBUS_PREPARED_STATEMENTS", "prepared_statements", _truth(),
        "Prepare statements on the server; false behind PgBouncer in transaction mode",
    )  # fmt: skip
    max_payload_bytes: int = _setting(
        DEFAULT_MAX_BYTES, "COMMANDBUS_MAX_PAYLOAD_BYTES", "max_payload_bytes", _bytes(),
        "Largest JSON text of a command's data or result",
    )  # fmt: skip

    handlers: str | None = _setting(
        None, "WORKER_HANDLERS", "worker.handlers",
        _or_word(_pattern(r"[^\W\d][\w.]*:[^\W\d][\w.]*", "MODULE:REGISTRY (shop.tasks:handlers)"), "unset"),
        "The handler registry that a worker runs, as MODULE:REGISTRY",
    )  # fmt: skip
    domains: tuple[str, ...] = _setting(
        (), "WORKER_DOMAINS", "worker.domains", _domains(),
        "Domains that a worker serves, with commas between them; empty for all that have handlers",
    )  # fmt: skip
    concurrency: int = _setting(
        4, "WORKER_CONCURRENCY", "worker.concurrency", _whole(1, 10_000), "Slots of one worker process"
    )
    processes: int = _setting(1, "WORKER_PROCESSES", "worker.processes", _whole(1, 1_000), "Worker processes")
    poll_interval: float = _setting(
        1.0, "WORKER_POLL_INTERVAL", "worker.poll_interval", _duration(zero=False),
        "How often to look for commands that no notification announced",
    )  # fmt: skip
    max_messages: int | None = _setting(
        None, "WORKER_MAX_MESSAGES", "worker.max_messages", _or_word(_whole(1), "off", "none"),
        "End a worker for a fresh one after this many commands",
    )  # fmt: skip
    max_memory_mb: int | None = _setting(
        None, "WORKER_MAX_MEMORY_MB", "worker.max_memory_mb", _or_word(_whole(1), "off", "none"),
        "End a worker for a fresh one when its memory exceeds this many MB",
    )  # fmt: skip

    statement_timeout: float = _setting(
        _LIMITS.statement_timeout, "WORKER_STATEMENT_TIMEOUT", "worker.statement_timeout", _duration(),
        "Layer 1: longest statement of a handler, on the server; less than visibility_timeout",
    )  # fmt: skip
    pool_timeout: float = _setting(
        _LIMITS.pool_timeout, "WORKER_POOL_TIMEOUT", "worker.pool_timeout", _duration(),
        "Layer 2: longest wait for a connection from the pool",
    )  # fmt: skip
    visibility_timeout: float = _setting(
        _LIMITS.visibility_timeout, "WORKER_VISIBILITY_TIMEOUT", "worker.visibility_timeout", _duration(),
        "Layer 3: the lease of an attempt; renewed after every third of it",
    )  # fmt: skip
    task_timeout: float | None = _setting(
        _LIMITS.task_timeout, "WORKER_TASK_TIMEOUT", "worker.task_timeout", _or_word(_duration(), "default"),
        "Layer 4: the deadline of an attempt; default is visibility_timeout + 5s - cancel_grace, 0 is none",
    )  # fmt: skip
    cancel_grace: float = _setting(
        _LIMITS.cancel_grace, "CANCEL_GRACE_SECONDS", "worker.cancel_grace", _duration(),
        "Layer 4: how long an attempt may take to stop before it counts as stuck",
    )  # fmt: skip
    heartbeat_timeout: float = _setting(
        _LIMITS.heartbeat_timeout, "WORKER_HEARTBEAT_TIMEOUT", "worker.heartbeat_timeout", _duration(),
        "Layer 5: a worker silent for this long is killed and replaced",
    )  # fmt: skip
    shutdown_timeout: float = _setting(
        _LIMITS.shutdown_timeout, "WORKER_SHUTDOWN_TIMEOUT", "worker.shutdown_timeout", _duration(),
        "Layer 5: longest shutdown in all; less than the service manager's own stop timeout",
    )  # fmt: skip

    pool_min_size: int = _setting(
        0, "COMMANDBUS_POOL_MIN_SIZE", "pool.min_size", _whole(0, 10_000), "Connections kept open when idle"
    )
    pool_max_size: int | None = _setting(
        None, "COMMANDBUS_POOL_MAX_SIZE", "pool.max_size", _or_word(_whole(1, 10_000), "auto"),
        "Most connections of one process; auto follows from the concurrency",
    )  # fmt: skip
    pool_max_lifetime: float = _setting(
        3600.0, "COMMANDBUS_POOL_MAX_LIFETIME", "pool.max_lifetime", _duration(zero=False),
        "Age at which a connection is replaced",
    )  # fmt: skip
    pool_max_idle: float = _setting(
        600.0, "COMMANDBUS_POOL_MAX_IDLE", "pool.max_idle", _duration(zero=False),
        "How long an unused connection is kept",
    )  # fmt: skip
    pool_reconnect_timeout: float = _setting(
        300.0, "COMMANDBUS_POOL_RECONNECT_TIMEOUT", "pool.reconnect_timeout", _duration(zero=False),
        "How long to try to reconnect before health is critical",
    )  # fmt: skip

    retention_age: float | None = _setting(
        30 * 86_400.0, "COMMANDBUS_RETENTION_AGE", "retention.age",
        _or_word(_duration(zero=False), "off", "none"),
        "Finished commands older than this are pruned; off keeps them for ever",
    )  # fmt: skip
    retention_count: int | None = _setting(
        None, "COMMANDBUS_RETENTION_COUNT", "retention.count", _or_word(_whole(1), "off", "none"),
        "Most finished commands kept per domain",
    )  # fmt: skip

    max_attempts: int = _setting(
        _RETRY.max_attempts, "WORKER_MAX_ATTEMPTS", "retry.max_attempts", _whole(1, 10_000),
        "Attempts before a command goes to the troubleshooting queue",
    )  # fmt: skip
    backoff_schedule: tuple[float, ...] = _setting(
        DEFAULT_SCHEDULE, "WORKER_BACKOFF_SCHEDULE", "retry.backoff_schedule", _durations(),
        "Waits before the second attempt, the third and so on; the last one repeats",
    )  # fmt: skip
    backoff_jitter: float = _setting(
        _RETRY.jitter, "WORKER_BACKOFF_JITTER", "retry.backoff_jitter", _fraction(),
        "By how much of itself each wait is spread, 0 to 1",
    )  # fmt: skip

    log_level: str = _setting(
        "INFO", "COMMANDBUS_LOG_LEVEL", "log.level",
        _choice(*map(logging.getLevelName, (10, 20, 30, 40, 50))), "Least severe messages to log",
    )  # fmt: skip
    log_format: str = _setting(
        "text", "COMMANDBUS_LOG_FORMAT", "log.format", _choice("text", "json"),
        "Log lines for people or for machines",
    )  # fmt: skip

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    config_file: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        origins = {
            name: "default" if getattr(self, name) == setting.default else "argument"
            for name, setting in SETTINGS.items()
        }
        object.__setattr__(self, "origins", origins | dict(self.origins))
        _check_hierarchy(self)
        _check_pool(self)

    @cached_property
    def timeouts(self) -> Timeouts:
        return Timeouts(**{limit.name: getattr(self, limit.name) for limit in fields(Timeouts)})

    @cached_property
    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy(self.max_attempts, self.backoff_schedule, self.backoff_jitter)

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
        return f"Settings({', '.join(given)})"


def _row(declared: Field[Any]) -> Setting:
    return Setting(name=declared.name, default=declared.default, **declared.metadata)


SETTINGS: Final[Mapping[str, Setting]] = {
    declared.name: _row(declared)
    for declared in fields(Settings)
    if declared.metadata and declared.default is not MISSING
}
"""The table of all settings, by name, in the order of their declaration."""

_BY_TOML: Final = {setting.toml: setting for setting in SETTINGS.values()}
_BY_ENV: Final = {setting.env: setting for setting in SETTINGS.values()}
_SECTIONS: Final = frozenset(key.partition(".")[0] for key in _BY_TOML if "." in key)


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


# --- loading ---------------------------------------------------------------------------------------------

CONFIG_NAME: Final = "commandbus.toml"
PYPROJECT_NAME: Final = "pyproject.toml"


@dataclass(frozen=True, slots=True)
class _Given:
    value: object
    origin: str


_Source: TypeAlias = dict[str, _Given]
_Tables: TypeAlias = Mapping[Path, Mapping[str, object]]


def load_settings(
    overrides: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    directory: Path | None = None,
    config_file: Path | None = None,
) -> Settings:
    """The effective settings; `ConfigurationError` names origin, setting, value and what to do.

    `overrides` are the explicit arguments, where None means "not given". `directory` is where the search for
    configuration files begins (the working directory); a `config_file` is read instead of searching.
    """
    tables = _search(directory or Path.cwd()) if config_file is None else _named_file(config_file)
    sources = [_from_arguments(overrides or {}), _from_environment(environ)]
    sources += [_from_table(path, table) for path, table in tables.items()]
    given = {name: source[name] for source in reversed(sources) for name in source}
    settings = Settings(
        **{name: _parsed(SETTINGS[name], item) for name, item in given.items()},
        origins={name: given[name].origin if name in given else "default" for name in SETTINGS},
        config_file=next(iter(tables), None),
    )
    return replace(settings, warnings=(*_unknown_variables(environ), *settings.timeouts.doubts()))


def _parsed(setting: Setting, given: _Given) -> Any:
    try:
        return setting.kind.parse(given.value, setting.name)
    except ValueError as error:
        raise ConfigurationError(f"{given.origin}: {error}") from None


def _from_arguments(overrides: Mapping[str, object]) -> _Source:
    for name in overrides:
        if name not in SETTINGS:
            hint = _did_you_mean(name, SETTINGS)
            raise ConfigurationError(f"argument {name!r}: there is no such setting{hint}")
    return {name: _Given(value, "argument") for name, value in overrides.items() if value is not None}


def _from_environment(environ: Mapping[str, str]) -> _Source:
    """A variable that is set but empty counts as not given, as in a Compose file or a systemd unit."""
    return {
        name: _Given(environ[setting.env], f"environment {setting.env}")
        for name, setting in SETTINGS.items()
        if environ.get(setting.env, "").strip()
    }


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    for variable in sorted(environ):
        if variable.startswith(("WORKER_", "COMMANDBUS_")) and variable not in _BY_ENV:
            yield f"environment {variable}: not a setting, ignored{_did_you_mean(variable, _BY_ENV)}"


def _from_table(path: Path, table: Mapping[str, object]) -> _Source:
    source: _Source = {}
    for key, value in _flattened(path, table):
        if key not in _BY_TOML:
            hint = _did_you_mean(key, {key: _place(key) for key in _BY_TOML})
            raise ConfigurationError(f"{_origin(path, key)}: there is no such setting{hint}")
        source[_BY_TOML[key].name] = _Given(value, _origin(path, key))
    return source


def _flattened(path: Path, table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if key in _SECTIONS and not isinstance(value, dict):
            raise ConfigurationError(f"{path}: {key} must be a section, [{key}], not {type(value).__name__}")
        if isinstance(value, dict) and key not in _BY_TOML:
            if key not in _SECTIONS:
                hint = _did_you_mean(key, {section: f"[{section}]" for section in _SECTIONS})
                raise ConfigurationError(f"{path}: there is no section [{key}]{hint}")
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def _origin(path: Path, key: str) -> str:
    return f"{path} {_place(key, root='tool.commandbus' if path.name == PYPROJECT_NAME else '')}"


def _place(key: str, *, root: str = "") -> str:
    section, _, last = key.rpartition(".")
    header = ".".join(part for part in (root, section) if part)
    return f"[{header}] {last}" if header else last


def _did_you_mean(wrong: str, known: Mapping[str, object]) -> str:
    """A guess by spelling, or by the last part of a key that stands in the wrong section."""
    last = wrong.rpartition(".")[2]
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.75) or [
        key for key in known if key.rpartition(".")[2] == last
    ]
    if not close:
        return ""
    shown = known[close[0]]
    return f"; did you mean {shown if isinstance(shown, str) else close[0]}?"


def _named_file(path: Path) -> _Tables:
    table = _read(path)
    if table is None:
        raise ConfigurationError(f"{path}: has no section [tool.commandbus]")
    return {path: table}


def _search(directory: Path) -> _Tables:
    """The nearest commandbus.toml, then the nearest pyproject.toml that has [tool.commandbus]."""
    folders = list(_folders(directory.absolute()))
    tables: dict[Path, Mapping[str, object]] = {}
    for name in (CONFIG_NAME, PYPROJECT_NAME):
        for path in (folder / name for folder in folders):
            if path.is_file() and (table := _read(path)) is not None:
                tables[path] = table
                break
    return tables


def _folders(directory: Path) -> Iterator[Path]:
    """The folder and its parents, up to one that holds .git, or one that may not be looked into."""
    for folder in (directory, *directory.parents):
        if not os.access(folder, os.X_OK):
            return
        yield folder
        if (folder / ".git").exists():
            return


def _read(path: Path) -> Mapping[str, object] | None:
    """The settings in a file; None for a pyproject.toml that has none."""
    try:
        content = path.read_bytes()
        document = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{path}, line {line}: is not UTF-8 text") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path}: is not TOML: {error}") from error
    if path.name != PYPROJECT_NAME:
        return document
    tool = document.get("tool", {})
    table = tool.get("commandbus") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigurationError(f"{path}: tool.commandbus must be a section, [tool.commandbus]")
    return table
