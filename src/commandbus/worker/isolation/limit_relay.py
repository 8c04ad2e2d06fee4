"""Permits of limits for a handler in a child process.

    child: ChildLimits    limit ──►    worker: LimitRelay ──► its own limits, and the limit client
                      ◄── permit
                      release, forget, deadline ──►
                      ◄── lost

The child asks by number; the token of a permit stays with the worker, so nothing that the child says can name a
another attempt's permit. When the attempt is over, for whatever reason, the worker gives up all that the child
still holds. The API may still be working on its call, so such a permit stays taken until its lease ends.

The child tells when a block moves the attempt's deadline, for the worker's ladder. It may bring that nearer, and
put it back; it never gets more than the worker has given it.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from commandbus.clock import monotonic
from commandbus.errors import (
    AttemptFencedError,
    CommandBusError,
    ConfigurationError,
    LimitTimeoutError,
    TransientCommandError,
    UnknownLimitError,
)
from commandbus.lazy import lazy
from commandbus.model import payload
from commandbus.model.api_errors import ApiFailure
from commandbus.model.durations import parse_seconds
from commandbus.model.limit import check_limit_name
from commandbus.model.limit_state import ApiAnswer
from commandbus.worker.execution.attempt import NEVER, Attempt, Why
from commandbus.worker.execution.handler_permits import PermitProvider
from commandbus.worker.isolation.channel import ChannelError, Message
from commandbus.worker.isolation.remote_errors import remake_api

if TYPE_CHECKING:
    from commandbus.limits import requests, with_block
    from commandbus.limits.requests import Permit, PermitCall
else:  # most workers have no limits
    requests = lazy("commandbus.limits.requests")
    with_block = lazy("commandbus.limits.with_block")

ASKED: Final = frozenset({"limit", "release", "forget", "deadline"})
"""The kinds of messages that a relay hears."""
LONGEST_TEXT: Final = 300
"""Of what a call's deadline is called."""


class ChildLimits:
    """The child's side: it asks the worker. Any thread of the handler may ask; one thread hears."""

    def __init__(self, send: Callable[[Message], None], number_of: Callable[[Attempt], int]) -> None:
        self._send = send
        self._number_of = number_of
        self._questions = itertools.count(1)
        self._asked: dict[int, tuple[int, PermitCall]] = {}  # with the number of the run that asks
        self._held: dict[int, tuple[int, Permit]] = {}

    def acquire(self, attempt: Attempt, name: str, wait: float) -> PermitCall:
        """Ask for a permit."""
        run = self._number_of(attempt)
        if run < 0 or attempt.is_fenced:
            raise _over(attempt.command_id)
        question = next(self._questions)
        call = requests.PermitCall(name, str(question), question, monotonic() + wait, wait, "", Future(), None)
        self._asked[question] = (run, call)
        try:
            self._send({"k": "limit", "n": run, "q": question, "name": name, "wait": wait})
        except OSError as error:
            del self._asked[question]
            raise CommandBusError(
                "ctx.limit() is for the handler's own process: one that was forked off it has no worker to ask"
            ) from error
        return call

    def forget(self, call: PermitCall) -> None:
        """The caller does not wait any more. The worker releases a permit that was given meanwhile."""
        found = self._asked.pop(call.number, None) or self._held.pop(call.number, None)
        if found is not None:
            self._tell({"k": "forget", "n": found[0], "q": call.number})

    def release(
        self,
        attempt: Attempt,  # noqa: ARG002 - the worker knows whose it is
        permit: Permit,
        answer: ApiAnswer,
        api: ApiFailure | None,
        *,
        keeps: bool = False,
    ) -> None:
        """The block is over."""
        question = int(permit.token)
        found = self._held.pop(question, None)
        if found is not None:
            told = {"answer": str(answer), "api": None if api is None else asdict(api), "keeps": keeps}
            self._tell({"k": "release", "n": found[0], "q": question, **told})

    def note_deadline(self, attempt: Attempt) -> None:
        """The worker's ladder looks after it."""
        at = None if attempt.deadline_at == NEVER else attempt.deadline_at
        late = attempt.extras.late_text
        self._tell({"k": "deadline", "n": self._number_of(attempt), "at": at, "late": late})

    def hear(self, message: Message) -> None:
        """The worker's answer, or that a permit is lost. On the reader's thread."""
        question, asked = message["q"], self._asked.get(message["q"])
        if message["k"] == "lost":
            if (held := self._held.get(question)) is not None:
                held[1].is_lost = True
        elif asked is not None and message["error"] is not None:
            if self._asked.pop(question, None) is not None:
                asked[1].answer.set_exception(_remade(message["error"]))
        elif asked is not None:
            call = asked[1]
            lease, call_timeout = message["lease"], message["call_timeout"]
            permit = requests.Permit(call.name, call.token, lease, holder="", call_timeout=call_timeout)
            self._held[question] = asked[0], permit  # now in both: `forget`, on another thread, finds it in one
            if self._asked.pop(question, None) is not None:
                call.answer.set_result(permit)
            else:
                self._held.pop(question, None)  # forgotten at this moment, and the worker is told

    def _tell(self, message: Message) -> None:
        try:
            self._send(message)
        except OSError:  # of a process that was forked off: the block is its parent's
            return


class LimitRelay:
    """The worker's side, for one attempt: the slot's thread hears, the limit client's answers."""

    def __init__(
        self, provider: PermitProvider, attempt: Attempt, *, run: int, send: Callable[[Message], None]
    ) -> None:
        self._provider = provider
        self._attempt = attempt
        self._run = run
        self._send = send
        self._lock = threading.Lock()
        self._calls: dict[int, PermitCall] = {}
        self._held: dict[int, Permit] = {}
        self._latest = attempt.deadline_at  # what the worker has given it
        self._is_over = False

    def hear(self, message: Message) -> None:
        """Do what the child asks for. What makes no sense is a ChannelError or the like."""
        if message["n"] != self._run:  # of a thread that an earlier attempt left behind
            if message["k"] == "limit":
                self._refuse(int(message["q"]), _over(None))
            return
        match message["k"]:
            case "limit":
                self._acquire(int(message["q"]), message)
            case "forget":
                self._forget(int(message["q"]))
            case "release":
                self._leave(int(message["q"]), message)
            case "deadline":
                self._note_deadline(message["at"], message["late"])

    def extend(self, end: float) -> None:
        """The worker has given the attempt more time."""
        with self._lock:
            self._latest = max(self._latest, end)
            self._attempt.deadline_at = max(self._attempt.deadline_at, end)

    def close(self) -> None:
        """The attempt is over: give up what the child waits for, and leave what it holds."""
        with self._lock:
            self._is_over = True
            held = list(self._held.values())
            waiting = [call for question, call in self._calls.items() if question not in self._held]
            self._held.clear()
            self._calls.clear()
        for call in waiting:
            self._provider.forget(call)
        answer, api = verdict_of_stop(self._attempt)
        for permit in held:
            self._provider.release(self._attempt, permit, answer, api, keeps=True)

    # --- what the child asks for -------------------------------------------------------------------------------

    def _acquire(self, question: int, message: Message) -> None:
        try:
            name = check_limit_name(message["name"])
        except ConfigurationError as error:
            raise ChannelError(str(error)) from None
        wait = parse_seconds(float(message["wait"]), name="wait")
        if question in self._calls:
            raise ChannelError(f"it asked for a permit twice with the number {question}")
        try:
            call = self._provider.acquire(self._attempt, name, wait)
        except Exception as error:  # noqa: BLE001 - whatever it is, the handler is told
            self._refuse(question, error)
            return
        with self._lock:
            self._calls[question] = call
        call.answer.add_done_callback(partial(self._answer, question))

    def _answer(self, question: int, answer: Future[Permit]) -> None:
        """Mostly on the limit client's thread."""
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            with self._lock:
                self._calls.pop(question, None)
            self._refuse(question, error)
            return
        permit = answer.result()
        with self._lock:
            if self._is_over or question not in self._calls:
                return  # the request was abandoned, and the limit client takes the permit back
            self._held[question] = permit
            self._watch(permit)
            terms = {"lease": permit.lease, "call_timeout": permit.call_timeout}
            self._send({"k": "permit", "n": self._run, "q": question, **terms, "error": None})

    def _refuse(self, question: int, error: BaseException) -> None:
        self._send({"k": "permit", "n": self._run, "q": question, "error": _described(error)})

    def _watch(self, permit: Permit) -> None:
        """Once: a permit of the handler's own may be lent to one block after the other."""
        then = permit.on_lost
        if not (isinstance(then, partial) and then.func == self._lose):
            permit.on_lost = partial(self._lose, then)

    def _lose(self, then: Callable[[Permit], None] | None, permit: Permit) -> None:
        with self._lock:
            for question in [question for question, held in self._held.items() if held is permit]:
                self._send({"k": "lost", "n": self._run, "q": question})
        if then is not None:
            then(permit)

    def _forget(self, question: int) -> None:
        with self._lock:
            call = self._calls.pop(question, None)
            self._held.pop(question, None)
        if call is not None:
            self._provider.forget(call)

    def _leave(self, question: int, message: Message) -> None:
        answer, api = ApiAnswer(message["answer"]), message["api"]
        failure = None if api is None else remake_api(dict(api))
        with self._lock:
            self._calls.pop(question, None)
            permit = self._held.pop(question, None)
        if permit is not None:
            self._provider.release(self._attempt, permit, answer, failure, keeps=message["keeps"] is True)

    def _note_deadline(self, at: Any, late: Any) -> None:
        wanted = NEVER if at is None else float(at)
        if math.isnan(wanted):
            raise ChannelError("a deadline that is not a number")
        if not (late is None or isinstance(late, str)):
            raise ChannelError("the name of a deadline that is not a text")
        if self._attempt.stop is not None:
            return  # it is being stopped, and that has an end of its own
        with self._lock:
            self._attempt.extras.late_text = late and payload.clean_text(late)[:LONGEST_TEXT]
            self._attempt.deadline_at = min(wanted, self._latest)


def verdict_of_stop(attempt: Attempt) -> tuple[ApiAnswer, ApiFailure | None]:
    """What to assume about the calls of an attempt whose process was ended."""
    if attempt.stop is not None and attempt.stop.why is Why.DEADLINE:
        return ApiAnswer.TIMEOUT, with_block.TIMED_OUT
    return ApiAnswer.UNKNOWN, None


def _over(command_id: str | None) -> AttemptFencedError:
    whose = "this attempt" if command_id is None else f"this attempt of command {command_id!r}"
    return AttemptFencedError(f"{whose} is over: it gets no more permits")


def _described(error: BaseException) -> dict[str, Any]:
    known = (LimitTimeoutError, UnknownLimitError, AttemptFencedError, ConfigurationError, CommandBusError)
    kind = next((kind.__name__ for kind in known if isinstance(error, kind)), None)
    text = str(error) if kind is not None else f"{type(error).__name__}: {error}"
    limit = getattr(error, "limit", None) or getattr(error, "name", None)
    return {"kind": kind, "text": payload.clean_text(text), "limit": limit if isinstance(limit, str) else None}


def _remade(told: dict[str, Any]) -> Exception:
    """The error as the worker had it, of the same class where that tells a handler something."""
    text, limit = told["text"], told["limit"]
    match told["kind"]:
        case "LimitTimeoutError":
            return LimitTimeoutError(text, limit=limit)
        case "UnknownLimitError":
            unknown = UnknownLimitError(limit or "?")
            unknown.args = (text,)  # it names the limits that are known
            return unknown
        case "AttemptFencedError":
            return AttemptFencedError(text)
        case "ConfigurationError":
            return ConfigurationError(text)
        case "CommandBusError":
            return CommandBusError(text)
    return TransientCommandError(text, code="LIMIT_FAILED")
