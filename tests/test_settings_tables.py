"""Limits and breakers in the settings: where they come from, what is refused, and what follows from them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commandbus.errors import ConfigurationError
from commandbus.model.breaker import Breaker
from commandbus.model.limit import Limit, Rate
from commandbus.settings import Settings, load_settings

LIMITS = """
[limits.docai]
concurrency = 5
rate = "120/m"
lease = "90s"
backoff = [1, "2s"]

[limits.mail]
rate = "10/s"

[breakers."*"]
stuck = 10

[breakers."orders/*"]
failures = 20
window = "10m"

[breakers."orders/ship"]
stuck = 3
on_open = "refuse"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with .git, so that no configuration outside of it is found."""
    (tmp_path / ".git").mkdir()
    return tmp_path


def load(project: Path, text: str = "", overrides: dict[str, Any] | None = None, **environ: str) -> Settings:
    (project / "commandbus.toml").write_text(text)
    return load_settings(overrides, environ=environ, directory=project)


def refused(project: Path, text: str = "", overrides: dict[str, Any] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        load(project, text, overrides, **environ)
    return str(error.value)


# --- where they come from --------------------------------------------------------------------------------------


def test_limits_and_breakers_are_read_from_commandbus_toml(project: Path) -> None:
    settings = load(project, LIMITS)
    docai, mail = settings.limits
    assert docai == Limit("docai", concurrency=5, rate="120/m", lease=90, backoff=(1.0, 2.0))
    assert (mail.name, mail.rate, mail.concurrency) == ("mail", Rate(10, 1), None)
    assert settings.breakers == {
        "*": Breaker(stuck=10),
        "orders/*": Breaker(failures=20, window="10m"),
        "orders/ship": Breaker(stuck=3, on_open="refuse"),
    }
    file = project / "commandbus.toml"
    assert settings.origins["limits.docai"] == f"{file} [limits.docai]"
    assert settings.origins["breakers.orders/ship"] == f'{file} [breakers."orders/ship"]'


def test_limits_and_breakers_are_read_from_pyproject_toml(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        "[tool.commandbus.limits.docai]\nconcurrency = 5\n[tool.commandbus.breakers.'orders/ship']\nstuck = 3\n"
    )
    settings = load_settings(environ={}, directory=project)
    assert settings.limits == (Limit("docai", concurrency=5),)
    assert settings.breakers == {"orders/ship": Breaker(stuck=3)}
    assert settings.origins["limits.docai"] == f"{project / 'pyproject.toml'} [tool.commandbus.limits.docai]"


def test_there_are_none_by_default(project: Path) -> None:
    settings = load(project)
    assert (settings.limits, settings.breakers, settings.breakers_enabled) == ((), {}, True)
    assert settings.tables() == {}


def test_they_can_be_given_as_arguments(project: Path) -> None:
    docai = Limit("docai", concurrency=5)
    given: list[dict[str, Any]] = [
        {"limits": [docai], "breakers": {"*": Breaker.off()}},
        {"limits": (docai,), "breakers": {"*": {"stuck": 0}}},
        {"limits": {"docai": {"concurrency": 5}}, "breakers": {"*": Breaker(stuck=0)}},
        {"limits": {"docai": docai}, "breakers": {"*": Breaker.off()}},
    ]
    for overrides in given:
        settings = load(project, overrides=overrides)
        assert settings == Settings(**overrides)
        assert (settings.limits, settings.breakers) == ((docai,), {"*": Breaker.off()})
        assert settings.origins["limits.docai"] == settings.origins["breakers.*"] == "argument"


def test_sources_add_up_and_each_limit_is_taken_whole_from_the_strongest(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        "[tool.commandbus.limits.docai]\nconcurrency = 1\nburst = 9\n[tool.commandbus.limits.sms]\nrate = '1/s'\n"
        "[tool.commandbus.breakers.'*']\nstuck = 1\n"
    )
    text = "[limits.docai]\nconcurrency = 2\n[limits.mail]\nconcurrency = 2\n[breakers.'orders/*']\nstuck = 2\n"
    settings = load(project, text, {"limits": [Limit("mail", concurrency=3)], "breakers": None})
    assert {limit.name: limit for limit in settings.limits} == {
        "docai": Limit("docai", concurrency=2),
        "mail": Limit("mail", concurrency=3),
        "sms": Limit("sms", rate="1/s"),
    }
    assert settings.breakers == {"*": Breaker(stuck=1), "orders/*": Breaker(stuck=2)}
    assert settings.origins["limits.mail"] == "argument"
    assert settings.origins["limits.sms"].endswith("[tool.commandbus.limits.sms]")


def test_a_bad_value_does_not_matter_where_a_stronger_source_decides(project: Path) -> None:
    settings = load(project, "[limits.docai]\nconcurrency = 'many'\n", {"limits": [Limit("docai", 3)]})
    assert settings.limits == (Limit("docai", 3),)


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[limits.docai]\nconcurency = 5\n",
            " [limits.docai] concurency: unknown option; did you mean concurrency?",
        ),
        (
            "[breakers.'orders/ship']\nstick = 5\n",
            ' [breakers."orders/ship"] stick: unknown option; did you mean stuck?',
        ),
        (
            "[breakers.'*']\nzzz = 5\n",
            ' [breakers."*"] zzz: unknown option; there are stuck, failures, window, reset, on_open',
        ),
        (
            "[limits.docai]\nconcurrency = 'many'\n",
            " [limits.docai]: limit 'docai': concurrency must be a whole number from 1 to 1000000, not 'many'",
        ),
        (
            "[breakers.'orders/ship']\nstuck = -1\n",
            " [breakers.\"orders/ship\"]: breaker 'orders/ship': stuck must be a whole number from 1 to 1000, or "
            "0 for not counted, not -1",
        ),
        (
            "[limits.docai]\n",
            " [limits.docai]: limit 'docai' limits nothing: give concurrency=5, rate='120/m', or both",
        ),
        ("[limits]\ndocai = 5\n", " [limits] docai: must be a section, [limits.docai], not int"),
        ("limits = 5\n", ": limits must be sections, [limits.NAME]"),
        ("breakers = false\n", ': breakers must be sections, [breakers."DOMAIN/COMMAND_TYPE"]'),
        ("[limit.docai]\nconcurrency = 5\n", ": there is no section [limit]; did you mean [limits]?"),
        ("[breaker.'*']\nstuck = 5\n", ": there is no section [breaker]; did you mean [breakers]?"),
        (
            "[breakers.orders.ship]\nstuck = 5\n",
            " [breakers.orders]: breakers: 'orders' names no command type; write \"DOMAIN/COMMAND_TYPE\" "
            '("orders/ship"), "DOMAIN/*" or "*"',
        ),
        (
            "[breakers.orders]\nstuck = 5\n",
            " [breakers.orders]: breakers: 'orders' names no command type; write \"DOMAIN/COMMAND_TYPE\" "
            '("orders/ship"), "DOMAIN/*" or "*"',
        ),
    ],
)
def test_what_is_wrong_is_refused_with_file_section_key_and_remedy(text: str, message: str, project: Path) -> None:
    assert refused(project, text) == f"{project / 'commandbus.toml'}{message}"


@pytest.mark.parametrize(
    "text", ["[limits.Docai]\nconcurrency = 5\n", "[limits.'a b']\nrate = '1/s'\n", "[limits.'']\nrate = '1/s'\n",
             f"[limits.'{'x' * 5000}']\nrate = '1/s'\n", f"[limits.docai]\n'{'x' * 5000}' = 5\n",
             "[breakers.'Orders/ship']\nstuck = 5\n", "[breakers.'orders/']\nstuck = 5\n", "[breakers.'/ship']\n",
             "[breakers.'']\n", "[limits.docai]\nrate = [5]\n", "[[limits.docai]]\nconcurrency = 5\n"],
)  # fmt: skip
def test_bad_names_and_shapes_are_refused_in_a_few_words(text: str, project: Path) -> None:
    message = refused(project, text)
    assert message.startswith(str(project / "commandbus.toml"))
    assert len(message) < len(str(project)) + 500


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"limits": Limit("docai", 5)}, "argument: limits must be a list such as [Limit('docai', concurrency=5)]"),
        ({"limits": "docai"}, "argument: limits must be a list"),
        ({"limits": 5}, "argument: limits must be a list"),
        ({"limits": ["docai"]}, "argument: limits: 'docai' is not a Limit; give Limit('docai', concurrency=5)"),
        ({"limits": [Limit("a", 1), Limit("a", 2)]}, "argument: limits: 'a' is listed twice; list each one once"),
        ({"limits": {"docai": 5}}, "argument: limits: 'docai' must be a Limit, or options by name, not 5"),
        ({"limits": {"docai": Limit("mail", 5)}}, "argument: limits: 'mail' stands under the name 'docai'"),
        ({"limits": {"docai": {"speed": 5}}}, "argument: limit 'docai': there is no option 'speed'"),
        (
            {"breakers": [Breaker()]},
            "argument: breakers must be a mapping such as {'orders/ship': Breaker(stuck=3)}",
        ),
        (
            {"breakers": {"orders/ship": 5}},
            "argument: breakers: 'orders/ship' must be a Breaker, or options by name",
        ),
        ({"breakers": {5: Breaker()}}, "argument: breakers: 5 names no command type"),
        ({"limit": []}, "argument 'limit': unknown setting; did you mean limits?"),
    ],
)
def test_bad_arguments_are_refused(overrides: dict[str, Any], message: str, project: Path) -> None:
    assert refused(project, overrides=overrides).startswith(message)


# --- what follows from them ------------------------------------------------------------------------------------


def test_a_limit_is_kept_in_redis_if_there_is_one(project: Path) -> None:
    free, pinned = Limit("docai", 5), Limit("docai", 5, store="postgres")
    without = load(project)
    with_redis = load(project, COMMANDBUS_REDIS_URL="redis://cache:6379/0")
    assert (without.backend_of(free), with_redis.backend_of(free)) == ("postgres", "redis")
    assert (without.backend_of(pinned), with_redis.backend_of(pinned)) == ("postgres", "postgres")
    assert with_redis.backend_of(Limit("docai", 5, store="redis")) == "redis"


def test_a_limit_that_needs_redis_without_redis_is_refused(project: Path) -> None:
    message = refused(project, "[limits.docai]\nconcurrency = 5\nstore = 'redis'\n")
    assert message == (
        f"limit 'docai' has store \"redis\" (from {project / 'commandbus.toml'} [limits.docai]), but redis_url "
        'is not set; set redis_url (COMMANDBUS_REDIS_URL), or give the limit store "postgres"'
    )
    with pytest.raises(ConfigurationError, match=r'store "redis" \(from argument\), but redis_url is not set'):
        load(project).backend_of(Limit("docai", 5, store="redis"))


def test_a_limit_is_declared_as_it_is_written_and_leaves_open_where_it_lives(project: Path) -> None:
    settings = load(project, "environment = 'production'\n")
    assert settings.declared(Limit("docai", 5)) == Limit("docai", 5)
    with pytest.raises(ConfigurationError, match="redis_url is not set"):
        settings.declared(Limit("docai", 5, store="redis"))


def test_the_breaker_of_a_command_type_is_its_own_else_its_domains_else_that_of_all(project: Path) -> None:
    settings = load(project, LIMITS)
    assert settings.breaker_of("orders", "ship") == Breaker(stuck=3, on_open="refuse")
    assert settings.breaker_of("orders", "bill") == Breaker(failures=20, window="10m")
    assert settings.breaker_of("mail", "ship") == Breaker(stuck=10)
    assert load(project).breaker_of("mail", "ship") == Breaker()


def test_all_breakers_can_be_switched_off(project: Path) -> None:
    for settings in (
        load(project, LIMITS, WORKER_BREAKERS="false"),
        load(project, f"[worker]\nbreakers = false\n{LIMITS}"),
        load(project, LIMITS, {"breakers_enabled": False}),
    ):
        assert settings.breaker_of("orders", "ship").is_off
        assert settings.declared(settings.limits[0]).breaker_failures == 0
        assert load(project, LIMITS).declared(settings.limits[0]).breaker_failures == 3


# --- as an object ----------------------------------------------------------------------------------------------


def test_settings_with_tables_can_be_written_as_json_and_read_again(project: Path) -> None:
    settings = load(project, LIMITS, {"redis_url": "redis://:s3cret@cache/0", "domains": "a,b"})
    values = json.loads(json.dumps(settings.plain()))
    again = Settings(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
    assert again == settings
    assert hash(again) == hash(settings)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert replace(settings, concurrency=9).limits == settings.limits


def test_settings_with_other_tables_are_other_settings(project: Path) -> None:
    assert load(project, LIMITS) != load(project)
    assert load(project, overrides={"breakers": {"*": Breaker()}}) != load(project)


def test_people_see_the_tables(project: Path) -> None:
    settings = load(project, LIMITS)
    assert settings.tables()["limits.mail"] == {"rate": "10/s"}
    assert settings.tables()["breakers.orders/ship"] == {"stuck": 3, "on_open": "refuse"}
    assert "limits.docai={'concurrency': 5, 'rate': '120/m'" in repr(settings)
