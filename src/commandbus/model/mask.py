"""Masking rules: which fields of payloads and results people do not get to see.

A rule is a path: `data.card.number`, `result.token`, `*.password`. Its first part is the field that is shown
(`data`, `result`, `headers`, `progress`, `state` …), or `*`: at any depth of anything. A later `*` stands for any
one field. Lists are looked through, so `data.cards.number` hides the number of every card. Case does not
matter. The state of a process holds copies: rules for `data` hold in it, too, and those for `result` below the
name of each step. What a rule names is shown as `***`, with everything in it.

The hidden values are looked for in texts, too (errors, tracebacks, autopsies): there, any text of at least four
characters that a rule hides becomes `***`. Pure functions; no clock, no database.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from commandbus.errors import InvalidCommandError
from commandbus.model.names import shown
from commandbus.model.safe_text import escaped

HIDDEN: Final = "***"
MOST_RULES: Final = 100
_LONGEST_RULE: Final = 200
_SHORTEST_SECRET: Final = 4
_SHORTEST_LINE: Final = 8
_LONGEST_TAIL: Final = 200
_PART: Final = re.compile(r"[^\s.*\x00-\x1f\x7f]+\Z")
_VALUE: Final = r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;)}\]]+)"""

_Path = tuple[str, ...]


class Mask:
    """Some rules. Without rules it changes nothing."""

    def __init__(self, rules: Sequence[str] = ()) -> None:
        paths = [_parse(rule) for rule in rules]
        self.rules = tuple(rules)
        self._rooted = [path for path in (*paths, *_in_state(paths)) if path[0] != "*"]
        self._anywhere = [path[1:] for path in paths if path[0] == "*"]
        names = {path[-1] for path in self._anywhere} - {"*"}
        known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._named = (
            re.compile(rf"""(?i)(?<!\w)(["']?)({known})\1(\s*[:=]\s*){_VALUE}""", re.DOTALL) if names else None
        )

    def __bool__(self) -> bool:
        return bool(self.rules)

    def hide(self, root: str, value: Any) -> Any:
        """A field that is shown, without what is hidden in it."""
        return self._walk(value, self._at(root), None)

    def hides(self, root: str, path: Sequence[str]) -> bool:
        """Whether what is at this path, such as `["cards", "0", "number"]`, is hidden."""
        active = self._at(root)
        for part in path:
            if any(not rule for rule in active):
                return True
            active = self._below(active, part) + (self._inside(active) if part.isdigit() else [])
        return any(not rule for rule in active)

    def check_search(self, root: str, wanted: Mapping[str, str]) -> None:
        """A search for hidden values would tell them to anybody who guesses: it is refused."""
        for path, value in wanted.items() if self.rules else ():
            if self.hides(root, path.split(".")):
                raise InvalidCommandError(f"{root}.{path} is masked: nobody can search for what it is")
            if value.lstrip().startswith(("{", "[")):
                raise InvalidCommandError(
                    f"{root}.{path}: with masking rules, search for single values, not for objects or lists"
                )

    def secrets(self, fields: Mapping[str, Any]) -> frozenset[str]:
        """The texts that are hidden in these fields, in all forms in which an error may quote them."""
        found: set[str] = set()
        for root, value in fields.items():
            self._walk(value, self._at(root), found)
        return frozenset(found)

    def text(self, text: str, secrets: Iterable[str]) -> str:
        """A text without these secrets, and without values beside a name that a rule hides everywhere."""
        ordered = sorted(secrets, key=len, reverse=True)
        for secret in ordered:
            text = text.replace(secret, HIDDEN)
        text = _without_tail(text, ordered)
        if self._named is not None:
            text = self._named.sub(rf"\1\2\1\3{HIDDEN}", text)
        return text

    def texts(self, value: Any, secrets: Iterable[str]) -> Any:
        """JSON whose texts are without these secrets."""
        if isinstance(value, str):
            return self.text(value, secrets)
        if isinstance(value, Mapping):
            return {key: self.texts(item, secrets) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.texts(item, secrets) for item in value]
        return value

    def restore(self, root: str, edited: Any, original: Any) -> Any:
        """What an operator has edited, with the hidden values of the original where they left `***`."""
        return self._restore(edited, original, self._at(root), root)

    # --- matching ------------------------------------------------------------------------------------------

    def _at(self, root: str) -> list[_Path]:
        name = root.lower()
        return [path[1:] for path in (*self._rooted, *self._anywhere) if path[0] in (name, "*")]

    def _below(self, active: Sequence[_Path], key: object) -> list[_Path]:
        name = str(key).lower()
        found = [path[1:] for path in active if path and path[0] in (name, "*")]
        return found + [path[1:] for path in self._anywhere if path[0] == name]

    def _inside(self, active: Sequence[_Path]) -> list[_Path]:
        """In a list: its items are looked at as if they were in its place."""
        return [*active, *(path[1:] for path in active if path and path[0] == "*")]

    def _walk(self, value: Any, active: Sequence[_Path], found: set[str] | None) -> Any:
        if any(not path for path in active):
            if found is not None:
                found.update(form for leaf in _leaves(value) for form in _forms(leaf))
            return None if value is None else HIDDEN
        if isinstance(value, Mapping):
            return {key: self._walk(item, self._below(active, key), found) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._walk(item, self._inside(active), found) for item in value]
        return value

    # --- restoring -----------------------------------------------------------------------------------------

    def _restore(self, edited: Any, original: Any, active: Sequence[_Path], where: str) -> Any:
        if any(not path for path in active):
            return original if edited == HIDDEN and original is not None else self._checked(edited, active, where)
        if isinstance(edited, Mapping) and isinstance(original, Mapping):
            return {
                key: self._restore(item, original.get(key), self._below(active, key), f"{where}.{key}")
                for key, item in edited.items()
            }
        if isinstance(edited, list) and isinstance(original, list):
            inside = self._inside(active)
            return [
                old if new == self._walk(old, inside, None) else self._checked(new, inside, f"{where}.{number}")
                for number, (new, old) in enumerate(_paired(edited, original))
            ]
        return self._checked(edited, active, where)

    def _checked(self, edited: Any, active: Sequence[_Path], where: str) -> Any:
        """A value that has nothing to be restored from: it must not be masked."""
        if any(not path for path in active):
            if HIDDEN in _leaves(edited):
                raise InvalidCommandError(
                    f"{where} is {HIDDEN}, which hides a value, and nobody can tell which one is meant here: "
                    "give the value itself, or leave the field out"
                )
        elif isinstance(edited, Mapping):
            for key, item in edited.items():
                self._checked(item, self._below(active, key), f"{where}.{key}")
        elif isinstance(edited, list):
            for number, item in enumerate(edited):
                self._checked(item, self._inside(active), f"{where}.{number}")
        return edited


def _paired(edited: Sequence[Any], original: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Each edited item, and the original one at the same place."""
    missing = object()
    return [(item, original[number] if number < len(original) else missing) for number, item in enumerate(edited)]


def _parse(rule: object) -> _Path:
    text = rule if isinstance(rule, str) else ""
    parts = tuple(text.strip().lower().split("."))
    is_valid = all(part == "*" or _PART.match(part) for part in parts) and len(text) <= _LONGEST_RULE
    if not is_valid or parts[0] == "" or (parts[0] == "*" and set(parts) == {"*"}):
        raise ValueError(
            f"{shown(rule)} is not a masking rule; give a path such as data.card.number, result.token or "
            "*.password"
        )
    return parts


def _in_state(paths: Iterable[_Path]) -> Iterable[_Path]:
    """The same for the state of a process: the data that it began with, and each step's result under its name."""
    for first, *rest in paths:
        if first == "data":
            yield "state", *(rest or ("*",))
        elif first == "result":
            yield "state", "*", *rest


def parse_rules(rules: Iterable[object]) -> tuple[str, ...]:
    """Rules that were checked. A ValueError names the first that is not valid."""
    given = list(rules)
    for rule in given:
        _parse(rule)
    found = tuple(dict.fromkeys(str(rule).strip() for rule in given))
    if len(found) > MOST_RULES:
        raise ValueError(f"there are {len(found)} masking rules; at most {MOST_RULES} are allowed")
    return found


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _forms(leaf: Any) -> set[str]:
    """A hidden value in all forms in which a text may have it."""
    if leaf is None or isinstance(leaf, bool):
        return set()
    text = str(leaf)
    forms = {text, escaped(text), repr(text)[1:-1], ascii(text)[1:-1]}
    forms |= {json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}
    forms |= {line for line in text.splitlines() if len(line) >= _SHORTEST_LINE}
    return {form for form in forms if len(form) >= _SHORTEST_SECRET}


def _without_tail(text: str, secrets: Sequence[str]) -> str:
    """A text that was cut may end with the beginning of a secret."""
    end = text.rstrip("….")
    for secret in secrets:
        for length in range(min(len(secret) - 1, _LONGEST_TAIL), _SHORTEST_SECRET - 1, -1):
            if end.endswith(secret[:length]):
                return f"{end[: len(end) - length]}{HIDDEN}"
    return text
