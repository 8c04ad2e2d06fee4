"""The command line has the words of the Python API: durations, pages, operators. It walks all commands."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from commandbus.cli.entry import COMMANDS, root
from commandbus.model.durations import ACCEPTED
from commandbus.settings import SETTINGS

DURATIONS = {
    "batch watch --wait",
    "cancel --wait",
    "limits set --backoff",
    "limits set --breaker-reset",
    "limits set --call-timeout",
    "limits set --lease",
    "limits set --max-wait",
    "migrate --wait",
    "process start --deadline",
    "prune --age",
    "pause-worker --wait",
    "recycle --wait",
    "resume-worker --wait",
    "roles --keep",
    "keys override --until",
    "schedules create --every",
    "schedules create --expires",
    "plan preview --over",
    "rehearse --timeout",
    "schedules create --timeout",
    "schedules next --within",
    "send --debounce",
    "send --delay",
    "send --expires",
    "send --max-delay",
    "send --timeout",
    "stack --wait",
    "status --interval",
    "top --interval",
    "wait --wait",
}
LISTS = {
    "audit",
    "batch list",
    "commands",
    "effect list",
    "plan list",
    "plan show",
    "process list",
    "process strays",
    "rejected",
    "schedules list",
    "stuck",
    "tsq list",
    "undelivered",
}
LOOKS_LIKE_A_DURATION = re.compile(
    r"--(?:wait|timeout|.*-timeout|deadline|delay|age|keep|lease|max-wait|backoff|.*-reset|interval|window|grace"
    r"|until|every|expires|debounce|max-delay|over|within)\Z"
)


def options() -> Iterator[tuple[str, str, click.Option]]:
    """Command, word and option of all but the settings, which are parsed with the file and the environment."""
    ctx = click.Context(root)
    todo = [(name, root.get_command(ctx, name)) for name in COMMANDS]
    while todo:
        path, command = todo.pop()
        assert command is not None
        if isinstance(command, click.Group):
            todo += [(f"{path} {name}", found) for name, found in command.commands.items()]
        for option in command.params:
            if isinstance(option, click.Option) and option.name not in SETTINGS:
                yield path, next(word for word in option.opts if word.startswith("--")), option


def test_every_duration_is_parsed_by_the_one_parser() -> None:
    found = {f"{path} {word}" for path, word, option in options() if "duration" in option.type.name}
    assert found == DURATIONS
    like = {
        f"{path} {word}"
        for path, word, option in options()
        if LOOKS_LIKE_A_DURATION.match(word) and not option.is_flag
    }
    assert like == DURATIONS


def test_bad_durations_are_refused_with_one_text() -> None:
    for path, word, option in options():
        if f"{path} {word}" not in DURATIONS:
            continue
        for good in ("2", "2s", "2000ms", "1m30s", "0.5"):
            option.type.convert(good, option, None)
        for bad in ("-1", "-5s", "nan", "inf", "5 parsecs", "", "soon", "true", "1" * 30):
            with pytest.raises(click.BadParameter, match=re.escape(ACCEPTED)) as refused:
                option.type.convert(bad, option, None)
            assert repr(bad) in str(refused.value)


def test_lists_have_pages() -> None:
    words: dict[str, set[str]] = {}
    for path, word, _ in options():
        words.setdefault(path, set()).add(word)
    assert {path for path, found in words.items() if "--cursor" in found} == LISTS
    assert all("--limit" in words[path] for path in LISTS)
    assert not [path for path, found in words.items() if {"--before-id", "--after-id"} & found]


def test_operators_are_asked_for_in_one_way() -> None:
    words: dict[str, set[str]] = {}
    for path, word, _ in options():
        words.setdefault(path, set()).add(word)
    acting = {path for path, found in words.items() if "--operator" in found}
    assert acting == {path for path, found in words.items() if "--reason" in found}
    assert len(acting) >= 12
