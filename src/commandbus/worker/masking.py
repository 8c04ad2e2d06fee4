"""Masking in a worker: what hidden fields of a command contain does not get into its history, nor into the log.

Rules are those of all workers of this process together. Without rules nothing is looked at; with rules, only
attempts that fail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from commandbus.flow.commands.claimed_row import DATA, HEADERS
from commandbus.model.mask import Mask
from commandbus.model.outcome import Failure
from commandbus.model.payload import dump, loads


class _Rules:
    mask = Mask()


def use(rules: tuple[str, ...]) -> None:
    """A worker of this process has these rules."""
    if set(rules) - set(_Rules.mask.rules):
        _Rules.mask = Mask(tuple(dict.fromkeys((*_Rules.mask.rules, *rules))))


def is_on() -> bool:
    """Are there rules?"""
    return bool(_Rules.mask)


def hidden(row: tuple[Any, ...], failure: Failure) -> Failure:
    """A failure as it may be stored and logged."""
    mask = _Rules.mask
    if not mask:
        return failure
    secrets = _secrets(mask, row)
    return replace(
        failure,
        error=mask.text(failure.error, secrets),
        traceback=None if failure.traceback is None else mask.text(failure.traceback, secrets),
        details=_document(mask, failure.details, secrets, "details"),
        autopsy=_document(mask, failure.autopsy, secrets, "autopsy"),
    )


def hidden_text(row: tuple[Any, ...], text: str) -> str:
    """A text about a command as it may be logged."""
    mask = _Rules.mask
    return mask.text(text, _secrets(mask, row)) if mask else text


def _secrets(mask: Mask, row: tuple[Any, ...]) -> frozenset[str]:
    fields = {}
    for name, text in (("data", row[DATA]), ("headers", row[HEADERS])):
        try:
            fields[name] = loads(text) if isinstance(text, str) else text
        except ValueError:  # what cannot be read was not shown to a handler
            continue
    return mask.secrets(fields)


def _document(mask: Mask, text: str | None, secrets: frozenset[str], what: str) -> str | None:
    if text is None:
        return None
    found = loads(text)
    if isinstance(found, dict):
        found = {key: mask.hide(key, item) for key, item in found.items()}
    return dump(mask.texts(mask.hide(what, found), secrets), what=what)
