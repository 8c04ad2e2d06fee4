"""The kit as a user meets it: registering animals, and what they say of themselves."""

from __future__ import annotations

import inspect

import pytest

from commandbus import HandlerRegistry
from commandbus.testing import hang

RUNGS = {"deadline", "stuck", "kill", "crash", None}


def test_all_are_registered_under_a_prefix() -> None:
    handlers = HandlerRegistry()
    types = hang.register(handlers, "staging")
    assert types == [f"hang.{name}" for name in hang.ANIMALS]
    assert {handler.command_type for handler in handlers} == set(types)
    assert handlers.domains == ["staging"]


def test_some_are_registered_with_options() -> None:
    handlers = HandlerRegistry()
    assert hang.register(
        handlers, "staging", prefix="x-", only=["spin", "exit"], timeout=3, isolation="process"
    ) == [
        "x-spin",
        "x-exit",
    ]
    found = handlers.get("staging", "x-spin")
    assert found is not None
    assert (found.options.timeout, found.options.isolation) == (3, "process")


def test_an_unknown_one_is_refused_and_changes_nothing() -> None:
    handlers = HandlerRegistry()
    with pytest.raises(ValueError, match="no such animal: unicorn; there are spin, "):
        hang.register(handlers, "staging", only=["spin", "unicorn"])
    assert len(handlers) == 0


def test_the_animals_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        hang.ANIMALS["mine"] = hang.ANIMALS["spin"]  # type: ignore[index]


@pytest.mark.parametrize("name", hang.ANIMALS)
def test_each_says_what_it_does_and_what_stops_it(name: str) -> None:
    animal = hang.ANIMALS[name]
    assert animal.name == name
    assert animal.stopped_by in RUNGS
    assert "Seen: " in " ".join(animal.summary.split())
    assert list(inspect.signature(animal.handler).parameters) == ["command", "ctx"]
