"""Reads what a worker process sends over its control socket, and trusts none of it.

A worker runs user code, which may write anything into that socket. `ControlReader` turns bytes into messages of
known shape and bounded size. Anything else raises `NonsenseError`, and never another exception. The supervisor
then kills that worker and no other. It also does so if a worker sends too much.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg

from commandbus import errors
from commandbus.flow.commands.rescue import Rule
from commandbus.model.names import check_domain
from commandbus.quick_dataclass import dataclass
from commandbus.supervisor.start_message import LONGEST_TEXT
from commandbus.worker.stop_report import StopReport

LONGEST_HELLO: Final = 4_194_304
LONGEST_LINE: Final = 262_144
"""After its hello, which lists all of its handlers, a worker sends only short messages."""
MOST_DOMAINS: Final = 1_000
MOST_COUNTED: Final = 2**53
BURST_MESSAGES: Final = 100
MESSAGES_A_SECOND: Final = 20
_SHOWN_BYTES: Final = 60
_LONGEST_ID: Final = 63
_OF_PERSONS: Final = ("MissingPrivilegeError", "SchemaError", "UnknownDomainError")
_ISOLATIONS: Final = ("thread", "process")
_COUNTED: Final = ("settled", "given_back", "abandoned", "unwritten")


class NonsenseError(Exception):
    """A message makes no sense, or is too long. The text continues a sentence that begins with "it"."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What a starting worker is doing."""

    what: str


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
class StateMessage:
    """A worker has changed its state."""

    state: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker ended with an error, of ours or of its user: the class of the error, and its text."""

    module: str
    kind: str
    message: str

    @property
    def needs_a_person(self) -> bool:
        """Is a schema, a privilege or a domain missing? A restart cannot repair that."""
        return self.module == errors.__name__ and self.kind in _OF_PERSONS

    def rebuilt(self) -> Exception:
        """The error, as if it had been raised here."""
        home: Any = errors if self.module == errors.__name__ else psycopg.errors
        kind = getattr(home, self.kind, None) if self.module.startswith(("commandbus", "psycopg")) else None
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            return RuntimeError(f"{self.kind}: {self.message}")
        if issubclass(kind, psycopg.Error):
            return kind(self.message)
        error: Exception = kind.__new__(kind)  # some of our errors cannot be made from their text
        error.args = (self.message,)
        return error


Said = Doing | Hello | StateMessage | StopReport | Failed


class ControlReader:
    """Takes bytes of one worker's control socket, and returns messages. Instants are of the caller's clock."""

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._rest = bytearray()
        self._has_greeted = False
        self._room = float(BURST_MESSAGES)
        self._counted_at = now

    def take(self, data: bytes, now: float) -> list[Said]:
        """Returns the messages that these bytes complete. After a `NonsenseError`, read nothing more."""
        self._rest += data
        found: list[Said] = []
        start = 0
        while (end := self._rest.find(b"\n", start)) >= 0:
            line, start = bytes(self._rest[start:end]), end + 1
            self._count(line, now)
            if (message := self._read(line)) is not None:
                found.append(message)
        del self._rest[:start]
        self._check_length(self._rest)
        return found

    def _count(self, line: bytes, now: float) -> None:
        self._check_length(line)
        passed = max(0.0, now - self._counted_at)
        self._room = min(float(BURST_MESSAGES), self._room + passed * MESSAGES_A_SECOND)
        self._counted_at = now
        self._room -= 1.0
        if self._room < 0.0:
            raise NonsenseError(f"sent more than {MESSAGES_A_SECOND} messages a second over its control socket")

    def _check_length(self, line: bytes | bytearray) -> None:
        longest = LONGEST_LINE if self._has_greeted else LONGEST_HELLO
        if len(line) > longest:
            raise NonsenseError(f"wrote a line of more than {longest} bytes into its control socket")

    def _read(self, line: bytes) -> Said | None:
        try:
            message = _message(json.loads(line), self._pid)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError,
                errors.CommandBusError) as error:  # fmt: skip
            raise NonsenseError(f"wrote nonsense into its control socket: {shown(line)}") from error
        if isinstance(message, Hello):
            if self._has_greeted:
                raise NonsenseError("introduced itself twice")
            self._has_greeted = True
        return message


def shown(line: bytes) -> str:
    """The beginning of a message, for the log."""
    more = f" … ({len(line)} bytes)" if len(line) > _SHOWN_BYTES else ""
    return f"{line[:_SHOWN_BYTES]!r}{more}"


def plain(text: object) -> str:
    """A worker's text, safe to store and log: bounded, and with unusual characters except line ends escaped."""
    if not isinstance(text, str):
        raise TypeError(f"{type(text).__name__} is no text")
    cut = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} …"
    if cut.isprintable():
        return cut
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in cut
    )


def _message(document: Any, pid: int) -> Said | None:
    """A message. None for an unknown kind, because after an upgrade workers may be newer than the supervisor."""
    word = document["say"]
    if not isinstance(word, str):
        raise TypeError("no word")
    match word:
        case "doing":
            return Doing(plain(document["doing"]))
        case "hello":
            return _hello(document, pid)
        case "state":
            return StateMessage(plain(document["state"]))
        case "report":
            return StopReport(plain(document["reason"]), *(_count_of(document[name]) for name in _COUNTED))
        case "failed":
            return Failed(plain(document["module"]), plain(document["kind"]), plain(document["message"]))
    return None


def _hello(document: Mapping[str, Any], pid: int) -> Hello:
    policies = document["policies"]
    rules = {
        (domain, command_type): _rule(rule)
        for domain, types in policies.items()
        if domain
        for command_type, rule in types.items()
    }
    return Hello(_id(document["id"], pid), _domains(document["domains"]), rules, _rule(policies[""]))


def _id(text: object, pid: int) -> str:
    """The id ends in the worker's own process id and a few digits, so no worker can pretend to be another."""
    found = plain(text)
    rest, _, digits = found.rpartition("-")
    if not rest.endswith(f"-{pid}") or not digits.isalnum() or len(found) > _LONGEST_ID:
        raise ValueError("not its id")
    return found


def _domains(names: object) -> list[str]:
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) > MOST_DOMAINS:
        raise TypeError("no domains")
    return [check_domain(name) for name in names]


def _rule(document: Mapping[str, Any]) -> Rule:
    rule = Rule.read(document)
    if rule.policy.max_attempts > MOST_COUNTED or rule.isolation not in _ISOLATIONS:
        raise ValueError("no rule")
    plain(rule.on_timeout)
    return rule


def _count_of(number: object) -> int:
    if not isinstance(number, int) or not 0 <= number <= MOST_COUNTED:
        raise ValueError("no count")
    return number
