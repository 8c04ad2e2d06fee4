"""The configuration, as far as it can be judged without a server."""

from __future__ import annotations

from commandbus.cli.doctor.findings import Findings, fail, ok, warn
from commandbus.cli.render import counted
from commandbus.cli.session import Session
from commandbus.errors import ConfigurationError
from commandbus.model.durations import format_seconds
from commandbus.settings import SETTINGS, Settings


def load(session: Session) -> tuple[Settings | None, Findings]:
    """The settings, if they can be loaded, and what is to be said about them."""
    try:
        settings = session.settings()
    except ConfigurationError as error:
        return None, iter(
            [fail("configuration", str(error), "correct it there; `commandbus config` shows the rest")]
        )
    return settings, _judge(settings)


def _judge(settings: Settings) -> Findings:
    changed = [name for name in SETTINGS if settings.origins[name] != "default"]
    source = f"from {settings.config_file}" if settings.config_file is not None else "no commandbus.toml"
    yield ok("configuration", f"readable; {counted(len(changed), 'setting')} set ({source})")
    for warning in settings.warnings:
        yield warn("configuration", warning)
    yield ok("timeouts", _hierarchy(settings))


def _hierarchy(settings: Settings) -> str:
    limits = settings.timeouts
    deadline = limits.deadline_seconds()
    parts = {
        "statement": limits.statement_timeout,
        "lease": limits.visibility_timeout,
        "deadline": deadline,
        "grace": limits.cancel_grace,
        "heartbeat": limits.heartbeat_timeout,
        "shutdown": limits.shutdown_timeout,
    }
    named = ", ".join(
        f"{name} {'none' if value is None else format_seconds(value)}" for name, value in parts.items()
    )
    return f"in order: {named}"
