"""Writes under the fence of an attempt that runs in a child process: checkpoints and effects.

    child: ChildWrites     write ──►     worker: WriteRelay ──► the fenced writer
                       ◄── written

The worker writes under the fence of the attempt that it has given to this child, whatever the child says. What
crosses over is JSON, which is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Any, Final

from commandbus.errors import AttemptFencedError, CommandBusError, TransientCommandError
from commandbus.flow.effects.write import Begin, Checkpoint, End, Fenced, Write, Written
from commandbus.model import payload
from commandbus.model.effect import EffectState, FoundEffect, check_effect_key, check_effect_name
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.effects import note_open_effect
from commandbus.worker.exhaustion import ExhaustedError
from commandbus.worker.isolation.channel import ChannelError, Message

_LONGEST_NOTE: Final = 8192


class ChildWrites:
    """The child's side: it asks the worker. Any thread of the handler may ask; one thread hears."""

    def __init__(self, send: Callable[[Message], None], number_of: Callable[[Attempt], int]) -> None:
        self._send = send
        self._number_of = number_of
        self._questions = itertools.count(1)
        self._asked: dict[int, Future[Written]] = {}

    def ask(self, attempt: Attempt, write: Write) -> Future[Written]:
        """Write this for an attempt."""
        question, answer = next(self._questions), Future[Written]()
        self._asked[question] = answer
        answer.add_done_callback(partial(self._forget, question, self._number_of(attempt)))
        if not isinstance(write, Checkpoint):
            answer.add_done_callback(partial(note_open_effect, attempt, write))
        told = {"n": self._number_of(attempt), "q": question, "what": type(write).__name__, **write._asdict()}
        try:
            self._send({"k": "write", **told})
        except OSError as error:
            del self._asked[question]
            raise CommandBusError(
                "effects and checkpoints are for the handler's own process: one that was forked off it has no "
                "worker to ask"
            ) from error
        return answer

    def hear(self, message: Message) -> None:
        """The worker's answer. On the reader's thread."""
        answer = self._asked.pop(message["q"], None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if message["error"] is not None:
            answer.set_exception(_remade(message["error"]))
        else:
            answer.set_result(_read_written(message["written"]))

    def _forget(self, question: int, run: int, answer: Future[Written]) -> None:
        """If the handler does not wait for an intent any more, the worker must know."""
        if answer.cancelled() and self._asked.pop(question, None) is not None:
            try:
                self._send({"k": "unwrite", "n": run, "q": question})
            except OSError:
                return


class WriteRelay:
    """The worker's side, for one attempt: the slot's thread hears, the fenced writer's answers."""

    def __init__(
        self,
        write: Callable[[Attempt, Write], Future[Written]],
        attempt: Attempt,
        *,
        run: int,
        send: Callable[[Message], None],
        max_bytes: int,
    ) -> None:
        self._write = write
        self._attempt = attempt
        self._run = run
        self._send = send
        self._max_bytes = max_bytes
        self._asked: dict[int, Future[Written]] = {}

    def hear(self, message: Message) -> None:
        """Do what the child asks for. What makes no sense is a ChannelError or the like."""
        question = int(message["q"])
        if message["k"] == "unwrite":
            if message["n"] == self._run and (asked := self._asked.pop(question, None)) is not None:
                asked.cancel()
            return
        if message["n"] != self._run:  # of a thread that an earlier attempt left behind
            self._refuse(question, AttemptFencedError("this attempt is over: it writes nothing any more"))
            return
        write = self._read(message)
        try:
            answer = self._write(self._attempt, write)
        except Exception as error:  # noqa: BLE001 - whatever it is, the handler is told
            self._refuse(question, error)
            return
        self._asked[question] = answer
        answer.add_done_callback(partial(self._answer, question))

    def _read(self, message: Message) -> Write:
        match message["what"]:
            case "Checkpoint":
                return Checkpoint(self._json(message["value"], "checkpoint"))
            case "Begin":
                instead_of = message["instead_of"]
                return Begin(
                    check_effect_name(message["name"]),
                    check_effect_key(message["key"]) or "",
                    _text(message["process"]),
                    None if instead_of is None else int(instead_of),
                )
            case "End":
                receipt = message["receipt"]
                return End(
                    check_effect_name(message["name"]),
                    int(message["attempt"]),
                    EffectState(message["state"]),
                    None if receipt is None else self._json(receipt, "receipt"),
                    _text(message["note"]),
                    is_own=message["is_own"] is True and int(message["attempt"]) == self._attempt.number,
                )
        raise ChannelError(f"a write of the kind {message['what']!r}")

    def _json(self, text: str, what: str) -> str:
        return payload.dump(payload.loads(text), what=what, max_bytes=self._max_bytes)

    def _answer(self, question: int, answer: Future[Written]) -> None:
        """Mostly on the fenced writer's thread."""
        self._asked.pop(question, None)
        if answer.cancelled():
            return
        if (error := answer.exception()) is not None:
            self._refuse(question, error)
            return
        self._send({"k": "written", "q": question, "error": None, "written": _told(answer.result())})

    def _refuse(self, question: int, error: BaseException) -> None:
        kinds = (AttemptFencedError, ExhaustedError, TimeoutError)
        kind = next((kind.__name__ for kind in kinds if isinstance(error, kind)), None)
        text = str(error) if kind is not None else f"{type(error).__name__}: {error}"
        told = {"kind": kind, "text": payload.clean_text(text)}
        self._send({"k": "written", "q": question, "error": told, "written": None})


def _text(value: object) -> str | None:
    return None if value is None else payload.clean_text(str(value), longest=_LONGEST_NOTE)


def _told(written: Written) -> dict[str, Any]:
    found = None
    if written.found is not None:
        found = written.found._asdict() | {"begun_at": written.found.begun_at.isoformat()}
    return {"fenced": written.fenced, "is_done": written.is_done, "found": found}


def _read_written(told: dict[str, Any]) -> Written:
    found = told["found"]
    if found is not None:
        found = FoundEffect(**found)._replace(
            state=EffectState(found["state"]), begun_at=datetime.fromisoformat(found["begun_at"])
        )
    return Written(Fenced(told["fenced"]), told["is_done"], found)


def _remade(told: dict[str, Any]) -> Exception:
    text = told["text"]
    match told["kind"]:
        case "AttemptFencedError":
            return AttemptFencedError(text)
        case "ExhaustedError":
            return ExhaustedError(text)
        case "TimeoutError":
            return TimeoutError(text)
    return TransientCommandError(text, code="WRITE_FAILED")
