"""What a handler wants to be called with: (command, ctx), (ctx), and `tx` after them if it has transaction=True.

Instead of the command, a handler may take its payload, as a type that describes it (`payload_types.py`). Then it
may leave out the context.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

CONTEXT_NAMES = ("ctx", "context")


class CallForm(NamedTuple):
    """Which arguments a handler gets, in this order."""

    command: bool = True  # or its payload
    context: bool = True
    transaction: bool = False


def own_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The function's own parameters; None if nobody can say. With `functools.wraps`, a wrapper claims the
    parameters of the wrapped function; that counts only if the wrapper takes `*args`."""
    if not callable(function):
        raise TypeError(f"a handler must be callable, not {type(function).__name__}")
    try:
        return inspect.signature(who_says(function), follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def call_form(
    function: Callable[..., Any],
    signature: inspect.Signature | None,
    *,
    transaction: bool = False,
    has_payload: bool = False,
) -> CallForm:
    """How to call a handler. A parameter beyond what it gets must have a default."""
    if signature is None:
        return CallForm(transaction=transaction)
    return _Reading(function, signature, transaction=transaction, has_payload=has_payload).form()


class _Reading:
    def __init__(
        self, function: Callable[..., Any], signature: inspect.Signature, *, transaction: bool, has_payload: bool
    ) -> None:
        self._name = getattr(function, "__qualname__", repr(function))
        self._signature = signature
        self._transaction = transaction
        self._has_payload = has_payload
        parameters = signature.parameters.values()
        self._places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self._required = [
            p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]

    def form(self) -> CallForm:
        places, takes_any = self._places, self._takes_any
        first = places[0].name if places else None
        if first in CONTEXT_NAMES and not self._has_payload:
            return self._context_first()
        self._refuse_unfilled(3 if self._transaction else 2)
        if self._has_payload and len(places) == 1 and not takes_any and not self._transaction:
            return CallForm(context=False)
        if self._transaction:
            if not takes_any and len(places) < 3:
                raise self._error("")
            return CallForm(transaction=True)
        if not places and not takes_any:
            raise self._error("")
        if len(places) == 1 and first == "command" and not takes_any:
            raise TypeError(
                f"handler {self._name!r} takes (command) alone, but a lone parameter gets the context: write "
                f"(command, ctx), or (ctx) and use ctx.command"
            )
        if len(places) >= 2 and places[1].default is not inspect.Parameter.empty:
            self._refuse_other_default(places[1])
        return CallForm(command=takes_any or len(places) >= 2)

    def _context_first(self) -> CallForm:
        """Its first parameter is the context, so it takes no command: a second one is `tx`, or keeps its
        default."""
        places = self._places
        second = places[1] if len(places) > 1 else None
        is_tx = self._transaction and second is not None
        if second is not None and (
            second.name == "command" or (not is_tx and second.default is inspect.Parameter.empty)
        ):
            raise TypeError(
                f"handler {self._name!r} takes {self._signature}, but command comes first: write "
                f"{self._wanted}, and use ctx.command in the latter"
            )
        self._refuse_unfilled(2 if is_tx else 1)
        if self._transaction and second is None and not self._takes_any:
            raise self._error("")
        return CallForm(command=False, transaction=self._transaction)

    def _refuse_unfilled(self, most: int) -> None:
        if unfilled := [p.name for p in self._required if p not in self._places[:most]]:
            hint = " (transaction=True gives it a transaction)" if "tx" in unfilled else ""
            raise self._error(
                f": nobody gives it {', '.join(unfilled)}{hint}; give that a default, or bind it with "
                f"functools.partial"
            )

    def _refuse_other_default(self, second: inspect.Parameter) -> None:
        """(command, retries=3): the context would become the number of retries."""
        if second.name not in CONTEXT_NAMES:
            raise TypeError(
                f"handler {self._name!r} takes {self._signature}, but its second parameter gets the context: "
                f"write (command, ctx), and {second.name} after them"
            )

    @property
    def _wanted(self) -> str:
        return "(command, ctx, tx) or (ctx, tx)" if self._transaction else "(command, ctx) or (ctx)"

    def _error(self, more: str) -> TypeError:
        why = " has transaction=True, so it" if self._transaction else ""
        return TypeError(f"handler {self._name!r}{why} must take {self._wanted}, not {self._signature}{more}")


def who_says(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function whose parameters count: itself, or what it hands all of its arguments to."""
    if isinstance(function, functools.partial):
        return functools.partial(who_says(function.func), *function.args, **function.keywords)
    if inspect.ismethod(function):
        return MethodType(who_says(function.__func__), function.__self__)
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    inner = getattr(function, "__wrapped__", None)
    if inner is None or not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    return who_says(inner)
