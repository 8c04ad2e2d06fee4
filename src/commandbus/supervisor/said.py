"""said: what a worker process says over its control socket, in our terms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from commandbus import errors
from commandbus.flow.rescue import Rule


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a worker is: its id, its domains in the board's order, and how failures of its handlers are judged."""

    id: str
    domains: list[str]
    rules: Mapping[tuple[str, str], Rule]
    default: Rule

    def rule(self, domain: str, command_type: str) -> Rule:
        """The rule of a command type."""
        return self.rules.get((domain, command_type), self.default)


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker ended with an error of ours or its user's: its class, and what it says."""

    module: str
    kind: str
    message: str

    def rebuilt(self) -> Exception:
        """The error, as if it had been raised here."""
        home: Any = errors if self.module == errors.__name__ else psycopg.errors
        kind = getattr(home, self.kind, None) if self.module.startswith(("commandbus", "psycopg")) else None
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            return RuntimeError(f"{self.kind}: {self.message}")
        error: Exception = kind.__new__(kind)
        error.args = (self.message,)
        return error


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line of the control socket; None if it makes no sense."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def hello(message: Mapping[str, Any]) -> Hello:
    """What a `hello` says."""
    policies = message["policies"]
    rules = {
        (domain, command_type): Rule.read(document)
        for domain, types in policies.items()
        if domain
        for command_type, document in types.items()
    }
    return Hello(message["id"], message["domains"], rules, Rule.read(policies[""]))
