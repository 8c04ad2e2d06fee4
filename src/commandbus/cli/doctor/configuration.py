"""The configuration, as far as it can be judged without a server."""

from __future__ import annotations

from commandbus.cli.doctor.findings import Findings, fail, ok, warn
from commandbus.cli.session import CliSession
from commandbus.errors import ConfigurationError
from commandbus.model.counting import counted
from commandbus.model.durations import format_seconds
from commandbus.settings import SETTINGS, Settings


def load(session: CliSession) -> tuple[Settings | None, Findings]:
    """The settings, if they can be loaded, and the findings about them."""
    try:
        settings = session.settings()
    except ConfigurationError as error:
        return None, iter([fail("configuration", str(error), "correct it there")])
    return settings, _judge(settings)


def _judge(settings: Settings) -> Findings:
    changed = [name for name in SETTINGS if settings.origins[name] != "default"]
    source = f"from {settings.config_file}" if settings.config_file is not None else "no commandbus.toml"
    yield ok("configuration", f"readable; {counted(len(changed), 'setting')} set ({source})")
    for warning in settings.warnings:
        yield warn("configuration", warning)
    yield ok("timeouts", _hierarchy(settings))


def _hierarchy(settings: Settings) -> str:
    """The time limits in the order of their hierarchy, each with its value."""
    limits = settings.timeouts
    shown = {name: SETTINGS[name].kind.show(getattr(settings, name)) for name in SETTINGS}
    deadline, stuck = limits.deadline_seconds(), limits.stuck_seconds()
    if deadline is None or stuck is None:
        attempt = "no deadline"
    else:
        grace = shown["cancel_grace"]
        attempt = f"deadline {format_seconds(deadline)} + grace {grace} = stuck at {format_seconds(stuck)}"
    return (
        f"statement {shown['statement_timeout']} < lease {shown['visibility_timeout']}; {attempt}; "
        f"heartbeat {shown['heartbeat_timeout']}; shutdown {shown['shutdown_timeout']}"
    )
