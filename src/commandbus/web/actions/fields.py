"""What actions of operators are made of: the checked fields of a form, and a sentence that says what was done."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from commandbus.bus import AsyncCommandBus
from commandbus.errors import InvalidCommandError
from commandbus.model.json_values import Json

Fields = Mapping[str, str]
T = TypeVar("T")
LONGEST_FIELD: Final = 1_000_000
LONGEST_NUMBER: Final = 18
MANY: Final = frozenset(
    {"ids", "chosen", "options"}
)  # a form may have these more than once: one value in each line


class Step(str):
    """The sentence of an action that has a page of its own, which shows what was done."""

    page: str

    def __new__(cls, sentence: str, page: str) -> Step:
        """The sentence, and the page."""
        made = super().__new__(cls, sentence)
        made.page = page
        return made


class Portion(str):
    """The sentence of an action that has done a part of its work. `again`: the fields with which it goes on."""

    again: dict[str, str]

    def __new__(cls, sentence: str, again: Mapping[str, str]) -> Portion:
        """The sentence, and the fields."""
        made = super().__new__(cls, sentence)
        made.again = dict(again)
        return made


@dataclass(frozen=True, slots=True)
class Action:
    """An action: its fields (those that end with `?` may be left out), and what it does."""

    fields: tuple[str, ...]
    run: Callable[[AsyncCommandBus, str, Fields], Awaitable[str]]

    def check(self, given: Mapping[str, str]) -> dict[str, str]:
        """The fields of this action among those given. An error names the one that is missing."""
        known = {field.rstrip("?") for field in self.fields} | {"reason"}
        found = {name: value for name, value in given.items() if name in known and value != ""}
        for field in self.fields:
            if not field.endswith("?") and field not in found:
                raise InvalidCommandError(f"{field} is missing")
        for name, value in found.items():
            if len(value) > LONGEST_FIELD:
                raise InvalidCommandError(
                    f"{name} has {len(value)} characters; at most {LONGEST_FIELD} are allowed"
                )
            if not _is_whole_text(value):
                raise InvalidCommandError(f"{name} has half of a character (a lone surrogate)")
        return found

    def refuse_unknown(self, given: Iterable[str]) -> None:
        """Raise an error if a name among these is no field of this action. What a program misspells would else be
        left out, and a pause of one command type would be one of its whole domain."""
        known = [*(field.rstrip("?") for field in self.fields), "reason"]
        for name in given:
            if name not in known:
                raise InvalidCommandError(f"there is no field {name!r:.80}; there are {', '.join(known)}")


def _is_whole_text(value: str) -> bool:
    """Can it be written as UTF-8? JSON can name halves of characters, which no answer and no row can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_json(text: str | None, name: str) -> Json:
    """The value that a text of JSON stands for; None without a text."""
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise InvalidCommandError(f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise InvalidCommandError(f"{name} is not JSON that can be read: it is nested too deeply") from None


def as_whole(text: str, name: str) -> int:
    """The whole number that a text is."""
    if not (text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER):
        raise InvalidCommandError(
            f"{name} must be a whole number from 0 to {10**LONGEST_NUMBER - 1}, not {text!r:.80}"
        )
    return int(text)


def one_of(known: Sequence[T], text: str, name: str) -> T:
    """The one of these values that the text names."""
    for value in known:
        if value == text:
            return value
    raise InvalidCommandError(f"{name} must be {' or '.join(map(str, known))}, not {text!r:.80}")


def lines_of(given: Fields, name: str) -> list[str]:
    """The values of a field that may be given more than once."""
    return [line for line in given.get(name, "").split("\n") if line]
