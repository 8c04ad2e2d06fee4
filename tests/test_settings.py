"""Settings: where each value comes from, what is refused, and that no password gets out."""

from __future__ import annotations

import json
import os
import pickle
import re
import traceback
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from commandbus.errors import CommandBusError, ConfigurationError
from commandbus.model.retry import RetryPolicy
from commandbus.model.timeouts import Timeouts
from commandbus.settings import (
    SETTINGS,
    Setting,
    Settings,
    load_settings,
    mask_database_url,
    mask_redis_url,
)

# For every setting a text other than its default, and the value that it stands for.
SAMPLES: dict[str, tuple[str, object]] = {
    "database_url": ("postgresql://me@db/shop", "postgresql://me@db/shop"),
    "redis_url": ("redis://cache:6379/2", "redis://cache:6379/2"),
    "environment": ("production", "production"),
    "prepared_statements": ("false", False),
    "max_payload_bytes": ("512KiB", 524_288),
    "mask": ("*.password, data.card.number", ("*.password", "data.card.number")),
    "handlers": ("shop.tasks:handlers", "shop.tasks:handlers"),
    "domains": ("billing, mail", ("billing", "mail")),
    "concurrency": ("8", 8),
    "processes": ("2", 2),
    "poll_interval": ("500ms", 0.5),
    "max_extension": ("2h", 7200.0),
    "quarantine": ("false", False),
    "quarantine_processes": ("3", 3),
    "code_version": ("8f3a12b", "8f3a12b"),
    "unknown_type_timeout": ("10m", 600.0),
    "schedule_grace": ("1m", 60.0),
    "breakers_enabled": ("false", False),
    "wait_for_database": ("false", False),
    "max_messages": ("10000", 10_000),
    "max_memory_mb": ("512", 512),
    "health_port": ("8080", 8080),
    "health_host": ("0.0.0.0", "0.0.0.0"),
    "statement_timeout": ("20s", 20.0),
    "pool_timeout": ("5", 5.0),
    "visibility_timeout": ("1m", 60.0),
    "task_timeout": ("0s", 0.0),
    "cancel_grace": ("5s", 5.0),
    "heartbeat_timeout": ("10s", 10.0),
    "shutdown_timeout": ("1m30s", 90.0),
    "pool_min_size": ("2", 2),
    "pool_max_size": ("20", 20),
    "pool_max_lifetime": ("30m", 1800.0),
    "pool_max_idle": ("5m", 300.0),
    "pool_reconnect_timeout": ("1m", 60.0),
    "retention_age": ("7d", 604_800.0),
    "retention_count": ("1000", 1000),
    "retention_asides_count": ("500", 500),
    "retention_asides_bytes": ("64MiB", 64 << 20),
    "max_attempts": ("5", 5),
    "backoff_schedule": ("1s, 500ms, 2m", (1.0, 0.5, 120.0)),
    "backoff_jitter": ("0.25", 0.25),
    "log_level": ("debug", "DEBUG"),
    "log_format": ("json", "json"),
}

every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with .git, so that no configuration outside of it is found."""
    (tmp_path / ".git").mkdir()
    return tmp_path


def toml(setting: Setting, text: str, *, root: str = "") -> str:
    section, _, key = setting.toml.rpartition(".")
    header = ".".join(part for part in (root, section) if part)
    return (f"[{header}]\n" if header else "") + f"{key} = {json.dumps(text)}\n"


def refused(project: Path, **kwargs: object) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_settings(directory=project, **{"environ": {}, **kwargs})  # type: ignore[arg-type]
    assert isinstance(error.value, CommandBusError)
    assert isinstance(error.value, ValueError)
    return str(error.value)


# --- the table -------------------------------------------------------------------------------------------


def test_every_setting_has_a_sample_that_is_not_its_default() -> None:
    assert set(SAMPLES) == set(SETTINGS)
    assert all(SAMPLES[name][1] != setting.default for name, setting in SETTINGS.items())


def test_names_in_the_environment_and_in_toml_are_unique() -> None:
    assert len({setting.env for setting in SETTINGS.values()}) == len(SETTINGS)
    assert len({setting.toml for setting in SETTINGS.values()}) == len(SETTINGS)


def test_all_time_limits_are_settings_with_the_same_defaults() -> None:
    limits = Timeouts()
    for limit in fields(Timeouts):
        assert SETTINGS[limit.name].default == getattr(limits, limit.name)


def test_the_defaults_are_those_of_the_design(project: Path) -> None:
    settings = load_settings(environ={}, directory=project)
    assert (settings.concurrency, settings.processes, settings.poll_interval) == (4, 1, 1.0)
    assert (settings.max_messages, settings.max_memory_mb) == (None, None)
    assert (settings.quarantine, settings.quarantine_processes) == (True, 2)
    assert settings.unknown_type_timeout == 3600
    assert (settings.health_port, settings.health_host) == (None, "127.0.0.1")
    assert (settings.pool_min_size, settings.pool_max_size) == (0, None)
    assert (settings.pool_max_lifetime, settings.pool_max_idle) == (3600, 600)
    assert settings.pool_reconnect_timeout == 300
    assert settings.max_payload_bytes == 1024 * 1024
    assert settings.retention_age == timedelta(days=30).total_seconds()
    assert settings.environment == "development"
    assert settings.database_url is None
    assert settings.timeouts == Timeouts()
    assert settings.retry_policy == RetryPolicy(3, [10, 60, 300], 0.1)
    assert settings.warnings == ()
    assert set(settings.origins.values()) == {"default"}


@every_setting
def test_a_setting_can_be_given_in_the_environment(setting: Setting, project: Path) -> None:
    text, value = SAMPLES[setting.name]
    changed: dict[str, Any] = {setting.name: value}
    settings = load_settings(environ={setting.env: text}, directory=project)
    assert getattr(settings, setting.name) == value
    assert settings.origins[setting.name] == f"environment {setting.env}"
    assert settings == replace(load_settings(environ={}, directory=project), **changed)


@every_setting
def test_a_setting_can_be_given_in_commandbus_toml(setting: Setting, project: Path) -> None:
    text, value = SAMPLES[setting.name]
    (project / "commandbus.toml").write_text(toml(setting, text))
    settings = load_settings(environ={}, directory=project)
    assert getattr(settings, setting.name) == value
    section, _, key = setting.toml.rpartition(".")
    place = f"[{section}] {key}" if section else key
    assert settings.origins[setting.name] == f"{project / 'commandbus.toml'} {place}"


@every_setting
def test_a_setting_can_be_given_in_pyproject_toml(setting: Setting, project: Path) -> None:
    text, value = SAMPLES[setting.name]
    (project / "pyproject.toml").write_text(toml(setting, text, root="tool.commandbus"))
    settings = load_settings(environ={}, directory=project)
    assert getattr(settings, setting.name) == value
    assert settings.origins[setting.name].startswith(f"{project / 'pyproject.toml'} [tool.commandbus")


@every_setting
def test_a_setting_can_be_given_as_an_argument(setting: Setting, project: Path) -> None:
    for given_value in SAMPLES[setting.name]:
        settings = load_settings({setting.name: given_value}, environ={}, directory=project)
        assert getattr(settings, setting.name) == SAMPLES[setting.name][1]
        assert settings.origins[setting.name] == "argument"


@every_setting
def test_what_is_displayed_can_be_given_back(setting: Setting, project: Path) -> None:
    for value in (setting.default, SAMPLES[setting.name][1]):
        assert setting.kind.parse(setting.kind.show(value), setting.name) == value


@every_setting
def test_a_value_of_the_wrong_type_is_refused_with_origin_and_name(setting: Setting, project: Path) -> None:
    section, _, key = setting.toml.rpartition(".")
    header = f"[{section}]\n" if section else ""
    for literal in ("{ a = 1 }", "[[]]", "2020-01-01", "nan"):
        (project / "commandbus.toml").write_text(f"{header}{key} = {literal}\n")
        message = refused(project)
        assert message.startswith(f"{project / 'commandbus.toml'} ")
        assert key in message


@every_setting
def test_hostile_text_is_refused_with_an_error_of_our_own(setting: Setting, project: Path) -> None:
    for text in ("\x00", "a\x00b", "\ud800", "9" * 5000, "-1", "💥 x", "'", "://", "a:b:c", ",,;"):
        try:
            load_settings({setting.name: text}, environ={}, directory=project)
        except ConfigurationError as error:
            message = str(error)
            assert message.startswith("argument: ")
            assert len(message) < 500


# --- precedence ------------------------------------------------------------------------------------------

SOURCES = ("argument", "environment", "commandbus.toml", "pyproject.toml", "default")
VALUES = {"argument": 11, "environment": 12, "commandbus.toml": 13, "pyproject.toml": 14, "default": 4}


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [(stronger, weaker) for index, stronger in enumerate(SOURCES) for weaker in SOURCES[index + 1 :]],
)
def test_the_stronger_source_wins(stronger: str, weaker: str, project: Path) -> None:
    present = {stronger, weaker}
    if "commandbus.toml" in present:
        (project / "commandbus.toml").write_text("[worker]\nconcurrency = 13\n")
    if "pyproject.toml" in present:
        (project / "pyproject.toml").write_text("[tool.commandbus.worker]\nconcurrency = 14\n")
    settings = load_settings(
        {"concurrency": 11} if "argument" in present else None,
        environ={"WORKER_CONCURRENCY": "12"} if "environment" in present else {},
        directory=project,
    )
    assert settings.concurrency == VALUES[stronger]
    assert stronger in settings.origins["concurrency"]


def test_each_setting_is_taken_from_its_own_strongest_source(project: Path) -> None:
    (project / "commandbus.toml").write_text("[worker]\nprocesses = 3\nconcurrency = 3\n")
    (project / "pyproject.toml").write_text("[tool.commandbus.worker]\nprocesses = 4\nmax_messages = 4\n")
    settings = load_settings({"poll_interval": 1.5}, environ={"WORKER_CONCURRENCY": "2"}, directory=project)
    assert (settings.poll_interval, settings.concurrency, settings.processes, settings.max_messages) == (
        1.5, 2, 3, 4,
    )  # fmt: skip


def test_an_argument_of_none_and_an_empty_variable_count_as_not_given(project: Path) -> None:
    (project / "commandbus.toml").write_text("[worker]\nconcurrency = 13\n")
    settings = load_settings({"concurrency": None}, environ={"WORKER_CONCURRENCY": " "}, directory=project)
    assert settings.concurrency == 13


def test_a_bad_value_does_not_matter_where_a_stronger_source_decides(project: Path) -> None:
    (project / "commandbus.toml").write_text("[worker]\nconcurrency = 'many'\n")
    assert load_settings(environ={"WORKER_CONCURRENCY": "2"}, directory=project).concurrency == 2


@pytest.mark.parametrize(
    ("name", "word"),
    [("max_messages", "off"), ("retention_age", "OFF"), ("retention_age", False), ("pool_max_size", "auto"),
     ("task_timeout", "default"), ("database_url", "unset")],
)  # fmt: skip
def test_a_word_takes_back_what_a_weaker_source_has_set(name: str, word: object, project: Path) -> None:
    (project / "commandbus.toml").write_text(toml(SETTINGS[name], SAMPLES[name][0]))
    assert getattr(load_settings({name: word}, environ={}, directory=project), name) is None


# --- files -----------------------------------------------------------------------------------------------


def test_the_nearest_file_of_each_name_is_found_from_a_folder_below(project: Path) -> None:
    below = project / "src" / "shop"
    below.mkdir(parents=True)
    (project / "commandbus.toml").write_text("environment = 'outer'\n")
    (project / "src" / "commandbus.toml").write_text("environment = 'inner'\n")
    (project / "pyproject.toml").write_text("[tool.commandbus]\ndatabase_url = 'embedded'\n")
    (below / "pyproject.toml").write_text("[project]\nname = 'shop'\n")
    settings = load_settings(environ={}, directory=below)
    assert (settings.environment, settings.database_url) == ("inner", "embedded")
    assert settings.config_file == project / "src" / "commandbus.toml"


def test_the_search_ends_at_the_folder_with_git(project: Path) -> None:
    inner = project / "vendored"
    (inner / ".git").mkdir(parents=True)
    (project / "commandbus.toml").write_text("environment = 'outer'\n")
    settings = load_settings(environ={}, directory=inner)
    assert settings.environment == "development"
    assert settings.config_file is None


def test_a_relative_directory_is_searched_like_an_absolute_one(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "below").mkdir()
    (project / "commandbus.toml").write_text("environment = 'outer'\n")
    monkeypatch.chdir(project / "below")
    assert load_settings(environ={}).environment == "outer"
    assert load_settings(environ={}, directory=Path()).environment == "outer"


def test_a_named_file_is_read_instead_of_searching(project: Path) -> None:
    (project / "commandbus.toml").write_text("environment = 'found'\n[worker]\nconcurrency = 9\n")
    other = project / "staging.toml"
    other.write_text("environment = 'staging'\n")
    settings = load_settings(environ={}, directory=project, config_file=other)
    assert (settings.environment, settings.concurrency) == ("staging", 4)
    assert settings.config_file == other


def test_a_named_file_that_is_missing_or_has_no_section_is_refused(project: Path) -> None:
    missing = project / "missing.toml"
    assert refused(project, config_file=missing) == f"{missing}: cannot be read: No such file or directory"
    pyproject = project / "pyproject.toml"
    pyproject.write_text("[project]\nname = 'shop'\n")
    assert refused(project, config_file=pyproject) == f"{pyproject}: has no section [tool.commandbus]"


def test_malformed_toml_is_refused_with_file_and_line(project: Path) -> None:
    path = project / "commandbus.toml"
    path.write_text("environment = 'x'\n\n[worker\n")
    assert refused(project).startswith(f"{path}: is not TOML: ")
    assert "line 3" in refused(project)
    path.write_bytes(b"environment = 'x'\n# caf\xe9\n")
    assert refused(project) == f"{path}, line 2: is not UTF-8 text"
    path.write_text("environment = " + "[" * 100_000)
    assert refused(project).startswith(f"{path}: is not TOML: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "[worker]\nconcurency = 4\n",
            "[worker] concurency: unknown setting; did you mean [worker] concurrency?",
        ),
        ("concurrency = 4\n", "concurrency: unknown setting; did you mean [worker] concurrency?"),
        ("database-url = 'x'\n", "database-url: unknown setting; did you mean database_url?"),
        ("[worker]\nage = '1d'\n", "[worker] age: unknown setting; did you mean [retention] age?"),
        ("[worker]\nzzz = 4\n", "[worker] zzz: unknown setting"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_a_guess(content: str, message: str, project: Path) -> None:
    path = project / "commandbus.toml"
    path.write_text(content)
    assert refused(project) == f"{path} {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[workers]\nconcurrency = 4\n", "there is no section [workers]; did you mean [worker]?"),
        ("[web]\nport = 1\n", "there is no section [web]"),
        ("worker = 4\n", "worker must be a section, [worker], not int"),
    ],
)
def test_an_unknown_section_is_refused(content: str, message: str, project: Path) -> None:
    path = project / "commandbus.toml"
    path.write_text(content)
    assert refused(project) == f"{path}: {message}"


def test_lists_and_numbers_can_be_written_as_such_in_toml(project: Path) -> None:
    (project / "commandbus.toml").write_text(
        "prepared_statements = false\nmax_payload_bytes = 2048\n"
        "[worker]\ndomains = ['mail', 'billing', 'mail']\npoll_interval = 0.5\nmax_messages = 10\n"
        "[retry]\nbackoff_schedule = [1, '2s', 0.5]\nbackoff_jitter = 0\n[retention]\nage = false\n"
    )
    settings = load_settings(environ={}, directory=project)
    assert settings.domains == ("mail", "billing")
    assert (settings.poll_interval, settings.max_messages) == (0.5, 10)
    assert settings.backoff_schedule == (1.0, 2.0, 0.5)
    assert (settings.backoff_jitter, settings.retention_age) == (0.0, None)
    assert (settings.prepared_statements, settings.max_payload_bytes) == (False, 2048)


# --- errors and warnings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WORKER_PROCESSES", "two", "processes: 'two' is not accepted; give a whole number from 1 to 1000"),
        ("WORKER_CONCURRENCY", "0", "concurrency: 0 is not accepted; give a whole number from 1 to 10000"),
        ("WORKER_POLL_INTERVAL", "0", "poll_interval: '0' is not accepted; give a duration of more than 0"),
        (
            "WORKER_HEALTH_PORT", "tcp://10.0.0.1:8080",
            "health_port: 'tcp://10.0.0.1:8080' is not accepted; give a whole number from 0 to 65535, or 'off'",
        ),
        (
            "WORKER_HEALTH_HOST", "http://here",
            "health_host: 'http://here' is not accepted; give an address or a host name (127.0.0.1, 0.0.0.0, ::)",
        ),
        ("WORKER_BACKOFF_JITTER", "1.5", "backoff_jitter: 1.5 is not accepted; give a number from 0 to 1"),
        (
            "WORKER_BACKOFF_SCHEDULE", ",",
            "backoff_schedule: ',' is empty; give durations such as 10s,60s,300s",
        ),
        ("COMMANDBUS_LOG_FORMAT", "xml", "log_format: 'xml' is not accepted; give one of text, json"),
        (
            "COMMANDBUS_PREPARED_STATEMENTS", "maybe",
            "prepared_statements: 'maybe' is not accepted; give true or false",
        ),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_origin_name_value_and_remedy(
    variable: str, value: str, message: str, project: Path
) -> None:
    assert refused(project, environ={variable: value}) == f"environment {variable}: {message}"


def test_other_bad_values_say_what_is_accepted(project: Path) -> None:
    assert "give seconds (25, 0.5)" in refused(project, environ={"WORKER_TASK_TIMEOUT": "soon"})
    assert "or 'default'" in refused(project, environ={"WORKER_TASK_TIMEOUT": "off"})
    assert "or 'off'" in refused(project, environ={"WORKER_MAX_MESSAGES": "0"})
    assert "(512KiB, 1MiB), at most 255MiB" in refused(project, environ={"COMMANDBUS_MAX_PAYLOAD_BYTES": "1MB"})
    assert "MODULE:REGISTRY" in refused(project, environ={"WORKER_HANDLERS": "shop.tasks"})
    assert "did you mean 'billing'?" in refused(project, environ={"WORKER_DOMAINS": "mail,Billing"})


def test_an_unknown_argument_is_refused_with_a_guess(project: Path) -> None:
    message = refused(project, overrides={"concurency": 4})
    assert message == "argument 'concurency': unknown setting; did you mean concurrency?"


def test_unknown_variables_are_warned_of_without_their_values(project: Path) -> None:
    environ = {"WORKER_CONCURENCY": "s3cret", "COMMANDBUS_ZZZZZ": "s3cret", "PATH": "/bin", "CANCEL_GRACE": "1"}
    assert load_settings(environ=environ, directory=project).warnings == (
        "environment COMMANDBUS_ZZZZZ: not a setting, ignored",
        "environment WORKER_CONCURENCY: not a setting, ignored; did you mean WORKER_CONCURRENCY?",
    )


def test_a_misordered_hierarchy_is_refused_with_both_values_and_their_origins(project: Path) -> None:
    message = refused(project, environ={"WORKER_STATEMENT_TIMEOUT": "25000"})
    assert message == (
        "statement_timeout (25000s = 6h56m40s) must be less than visibility_timeout (30s); 25000 looks like "
        "milliseconds: did you mean 25s? (statement_timeout from environment WORKER_STATEMENT_TIMEOUT, "
        "visibility_timeout from default)"
    )


def test_settings_made_by_hand_are_checked_too() -> None:
    with pytest.raises(
        ConfigurationError, match="statement_timeout from argument, visibility_timeout from default"
    ):
        Settings(statement_timeout=40)
    settings = Settings(concurrency=8)
    assert (settings.origins["concurrency"], settings.origins["processes"]) == ("argument", "default")


def test_doubtful_time_limits_are_warned_of(project: Path) -> None:
    environ = {"WORKER_STATEMENT_TIMEOUT": "25000", "WORKER_VISIBILITY_TIMEOUT": "30000"}
    warnings = load_settings(environ=environ, directory=project).warnings
    assert len(warnings) == 2
    assert "did you mean 25s?" in warnings[0]


def test_a_pool_that_is_larger_at_least_than_at_most_is_refused(project: Path) -> None:
    message = refused(project, overrides={"pool_min_size": 5, "pool_max_size": 2})
    assert message == "pool_min_size (5, from argument) must not be more than pool_max_size (2, from argument)"


# --- secrets ---------------------------------------------------------------------------------------------

SECRET = "hunter2"

MASKED_DATABASES = {
    "postgresql://me:hunter2@db:5433/shop": "postgresql://me:***@db:5433/shop",
    "postgres://me:hunter2@db/shop": "postgresql://me:***@db/shop",
    "postgresql://:hunter2@db/shop": "postgresql://:***@db/shop",
    "postgresql://me:hunter2:x@db/shop": "postgresql://me:***@db/shop",
    "postgresql://me:a%40hunter2%2Fb@db/shop": "postgresql://me:***@db/shop",
    "postgresql://me:a?hunter2#b@db/shop": "postgresql://me:***@db/shop",
    "postgresql://me@db/shop?password=hunter2": "postgresql://me:***@db/shop",
    "postgresql://me@db/shop?pass%77ord=hunter2&sslmode=require": "postgresql://me:***@db/shop?sslmode=require",
    "postgresql://db/shop?user=me&password=hunter2@x": "postgresql://me:***@db/shop",
    "postgresql://me@db/shop?sslpassword=hunter2": "postgresql://me@db/shop?sslpassword=***",
    "postgresql://me:hunter2@a:1,b:2/shop?target_session_attrs=any": "postgresql://me:***@a:1,b:2/shop?target_session_attrs=any",
    "postgresql://me:hunter2@[::1]:5432/shop": "postgresql://me:***@[::1]:5432/shop",
    "postgresql://me:hunter2@/shop?host=/run/pg": "postgresql://me:***@/shop?host=/run/pg",
    "postgresql://me:hunter2@db/shop?options=-c%20app.password%3Dhunter2": "postgresql://me:***@db/shop?options=***",
    "postgresql://me@db/shop": "postgresql://me@db/shop",
    "host=db user=me password=hunter2 dbname=shop": "user=me password=*** dbname=shop host=db",
    "host=db password = 'hunter2 with \\' quote' dbname=shop": "password=*** dbname=shop host=db",
    "password=first password=hunter2 host=db": "password=*** host=db",
    "password=hunter2=x host=db": "password=*** host=db",
    "host=db password=hunter2\\ x": "password=*** host=db",
    "host=db dbname='postgresql://me:hunter2@db/shop'": "dbname=*** host=db",
    "host=db dbname='password=hunter2'": "dbname=*** host=db",
    "embedded": "embedded",
    "embedded:./data": "embedded:./data",
}  # fmt: skip

TORN_DATABASES = [
    "postgresql://me:a@hunter2@db/shop",
    "postgresql://me:a/hunter2@db/shop",
    "postgresql://me:12/hunter2@db/shop",
    "postgresql://me:hunter2/x",
    "postgresql://me:%zzhunter2@db/shop",
    "postgresql://me@db/shop?password=a&hunter2",
    "postgresql://me@db/shop?passwort=hunter2",
    "postgresql+psycopg://me:hunter2@db/shop",
    "POSTGRESQL://me:hunter2@db/shop",
    "mysql://me:hunter2@db/shop",
    "host=db password=a hunter2",
    "host=db password='hunter2",
    "host=db passwd=hunter2",
    "hunter2",
    "host=db\npassword=hunter2",
    "host=db\x00password=hunter2",
]

MASKED_REDIS = {
    "redis://:hunter2@cache:6379/0": "redis://:***@cache:6379/0",
    "redis://me:hunter2@cache": "redis://me:***@cache",
    "redis://hunter2@cache": "redis://***@cache",
    "redis://:a@hunter2@cache": "redis://:***@cache",
    "rediss://cache/0?password=hunter2&db=1": "rediss://cache/0?password=***&db=1",
    "redis://cache/0?ssl_pass%77ord=hunter2": "redis://cache/0?ssl_password=***",
    "redis://cache/0?db=1;password=hunter2": "redis://cache/0?db=***",
    "unix:///run/redis.sock?password=hunter2": "unix:///run/redis.sock?password=***",
    "unix://me:hunter2@/run/redis.sock": "unix://me:***@/run/redis.sock",
}

TORN_REDIS = [
    "redis://:a/hunter2@cache",
    "redis://:12/hunter2@cache",
    "redis://:12#hunter2@cache",
    "redis://:12?hunter2@cache",
    "redis://:12?x=hunter2@cache",
    "redis://:hunter2",
    "redis://[hunter2@cache",
    "http://:hunter2@cache",
    "hunter2",
    "redis://cache\n:hunter2@x",
]


def everything_shown(settings: Settings) -> str:
    return f"{settings!r} {settings!s} {settings.masked()} {settings.displayed()} {settings.origins}"


@pytest.mark.parametrize(("url", "shown"), MASKED_DATABASES.items(), ids=MASKED_DATABASES)
def test_the_password_of_a_database_is_masked(url: str, shown: str, project: Path) -> None:
    settings = load_settings(environ={"COMMANDBUS_DATABASE_URL": url}, directory=project)
    assert settings.database_url == url
    assert settings.masked()["database_url"] == settings.displayed()["database_url"] == shown
    assert SECRET not in everything_shown(settings)


@pytest.mark.parametrize(("url", "shown"), MASKED_REDIS.items(), ids=MASKED_REDIS)
def test_the_password_of_redis_is_masked(url: str, shown: str, project: Path) -> None:
    settings = load_settings({"redis_url": url}, environ={}, directory=project)
    assert settings.redis_url == url
    assert settings.masked()["redis_url"] == shown
    assert SECRET not in everything_shown(settings)


@pytest.mark.parametrize(
    ("name", "url"),
    [("database_url", url) for url in TORN_DATABASES] + [("redis_url", url) for url in TORN_REDIS],
)
def test_what_cannot_be_read_is_refused_without_being_shown(name: str, url: str, project: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_settings({name: url}, environ={}, directory=project)
    assert str(error.value).startswith(f"argument: {name} ")
    # Without the source lines of this test, which hold no secret but its variable.
    printed = "".join(traceback.TracebackException.from_exception(error.value, capture_locals=False).format())
    assert SECRET not in printed
    chained = error.value.__cause__ or error.value.__context__
    while chained is not None:
        assert SECRET not in str(chained)
        chained = chained.__cause__ or chained.__context__


@pytest.mark.parametrize("url", TORN_DATABASES)
def test_masking_what_cannot_be_read_shows_nothing_of_it(url: str) -> None:
    assert SECRET not in mask_database_url(url)


@pytest.mark.parametrize("url", TORN_REDIS)
def test_masking_a_torn_redis_url_shows_nothing_of_it(url: str) -> None:
    assert SECRET not in mask_redis_url(url)


def test_a_wrong_database_gets_a_hint(project: Path) -> None:
    assert "did you mean 'embedded'?" in refused(project, overrides={"database_url": "embeded"})
    assert "leave out the driver's name" in refused(project, overrides={"database_url": TORN_DATABASES[7]})
    assert "@ is %40" in refused(project, overrides={"database_url": TORN_DATABASES[0]})


def test_a_secret_of_the_wrong_type_is_not_shown(project: Path) -> None:
    assert SECRET not in refused(project, overrides={"database_url": [f"postgresql://me:{SECRET}@db"]})
    assert SECRET not in refused(project, overrides={"redis_url": {"password": SECRET}})


def test_other_errors_do_not_show_the_secrets_beside_them(project: Path) -> None:
    (project / "commandbus.toml").write_text(
        f"database_url = 'postgresql://me:{SECRET}@db/shop'\n[worker]\nconcurrency = 0\n"
    )
    assert SECRET not in refused(project)
    (project / "commandbus.toml").write_text(f"database_url = 'postgresql://me:{SECRET}@db/shop\n")
    assert SECRET not in refused(project)
    (project / "commandbus.toml").write_text(f"[database_url]\npassword = '{SECRET}'\n")
    assert SECRET not in refused(project)


words = st.text(alphabet="abcXYZ019 '\\@:/?#&=%,[]ß", max_size=12)


@given(password=words, user=words)
def test_masking_keeps_all_but_the_password_of_any_conninfo_string(password: str, user: str) -> None:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    secret = f"<{password}>"
    shown = mask_database_url(f"host=db user={quoted('u' + user)} password={quoted(secret)} dbname=shop")
    assert secret not in shown
    if shown != "***" and "://" not in user:
        assert conninfo_to_dict(shown) == {
            "host": "db",
            "user": "u" + user,
            "password": "***",
            "dbname": "shop",
        }


@given(prefix=words, suffix=words)
def test_no_url_however_badly_encoded_shows_its_password(prefix: str, suffix: str) -> None:
    """What stands between the first ":" and the last "@" was meant as a password, whatever it was read as."""
    for url in (
        f"postgresql://me:{prefix}{SECRET}{suffix}@db/shop",
        f"redis://:{prefix}{SECRET}{suffix}@db/0",
    ):
        assert SECRET not in (mask_database_url(url) + mask_redis_url(url))


# --- as an object ----------------------------------------------------------------------------------------


def test_masked_values_are_ready_for_json(project: Path) -> None:
    settings = load_settings({"domains": "a,b"}, environ={}, directory=project)
    shown = json.loads(json.dumps(settings.masked()))
    assert list(shown) == list(SETTINGS)
    assert (shown["domains"], shown["max_messages"], shown["statement_timeout"]) == (["a", "b"], None, 25.0)


def test_people_see_units_and_words(project: Path) -> None:
    shown = load_settings(environ={}, directory=project).displayed()
    assert shown["statement_timeout"] == "25s"
    assert shown["retention_age"] == "30d"
    assert shown["max_payload_bytes"] == "1MiB"
    assert shown["max_messages"] == "off"
    assert shown["pool_max_size"] == "auto"
    assert shown["backoff_schedule"] == "10s,1m,5m"
    assert shown["database_url"] == "unset"


def test_settings_can_be_sent_to_another_process(project: Path) -> None:
    settings = load_settings({"concurrency": 8}, environ={}, directory=project)
    copy: Settings = pickle.loads(pickle.dumps(settings))
    assert copy == settings
    assert copy.origins == settings.origins


def test_settings_are_compared_by_value_and_not_by_origin(project: Path) -> None:
    environ: Mapping[str, str] = {"WORKER_CONCURRENCY": "8"}
    assert load_settings(environ=environ, directory=project) == load_settings(
        {"concurrency": 8}, environ={}, directory=project
    )


# --- whose file it is -----------------------------------------------------------------------------------------

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")


@pytest.fixture
def below(project: Path) -> Path:
    folder = project / "shared" / "mine"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("commandbus.toml", 'environment = "theirs"\n'),
        ("pyproject.toml", '[tool.commandbus]\nenvironment = "theirs"\n'),
    ],
)
@as_root
def test_a_strangers_file_in_a_parent_folder_is_refused_by_name(below: Path, name: str, text: str) -> None:
    file = below.parent / name
    file.write_text(text)
    assert load_settings(environ={}, directory=below).environment == "theirs"
    os.chown(file, STRANGER, STRANGER)
    with pytest.raises(
        ConfigurationError, match=rf"{re.escape(str(file))}: belongs to user .*{STRANGER}.*--config"
    ):
        load_settings(environ={}, directory=below)
    named = load_settings(environ={}, directory=below, config_file=file)
    assert named.environment == "theirs"


@as_root
def test_a_strangers_pyproject_without_settings_is_none_of_our_business(below: Path) -> None:
    file = below.parent / "pyproject.toml"
    file.write_text("[tool.other]\n")
    os.chown(file, STRANGER, STRANGER)
    assert load_settings(environ={}, directory=below).warnings == ()


@as_root
def test_a_strangers_link_to_a_file_of_ours_is_refused(below: Path) -> None:
    (below.parent / "mine.toml").write_text('environment = "mine"\n')
    link = below.parent / "commandbus.toml"
    link.symlink_to("mine.toml")
    assert load_settings(environ={}, directory=below).environment == "mine"
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(ConfigurationError, match="belongs to user"):
        load_settings(environ={}, directory=below)


@as_root
def test_root_reads_the_file_of_the_user_who_called_sudo(below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = below.parent / "commandbus.toml"
    file.write_text('environment = "mine"\n')
    os.chown(file, STRANGER, STRANGER)
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    assert load_settings(environ={}, directory=below).environment == "mine"


def test_a_file_that_everybody_may_write_to_is_refused(below: Path) -> None:
    file = below.parent / "commandbus.toml"
    file.write_text('environment = "anybodys"\n')
    file.chmod(0o666)
    with pytest.raises(ConfigurationError, match=r"everybody may write to it.*chmod o-w"):
        load_settings(environ={}, directory=below)
    assert load_settings(environ={}, directory=below, config_file=file).environment == "anybodys"
