"""Breakers: what a worker tells of its attempts, and how it looks after breakers that are open.

Slots and the ladder only leave word here, and only of attempts that count or that were a breaker's probe; the
keeper writes it on its own connection, many at once. While the database is away the word waits. Whatever the
settings say, a breaker that is open is looked after: somebody else may have opened it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import psycopg

from commandbus.clock import monotonic
from commandbus.db.link import Link
from commandbus.flow.breaker import Bad, Moved, advance, due, report
from commandbus.flow.settle import PROBE
from commandbus.logger import safe_logger
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.runtime.attempt import Attempt
from commandbus.settings import Settings

logger = safe_logger("commandbus.worker")

SWEEP_SECONDS: Final = 2.0
SOONEST_SECONDS: Final = 0.05
TROUBLED_SECONDS: Final = 60.0
_STUCK: Final = frozenset({"stuck", "kill", "crash"})
_TROUBLE: Final = (Verdict.RETRY, Verdict.EXHAUSTED, Verdict.TIMED_OUT)
_SAYS_NOTHING: Final = (Verdict.CANCELED, Verdict.UNKNOWN_TYPE)


class Word(NamedTuple):
    """What is to be told of one attempt; no `bad`: it was a probe, and went well."""

    domain: str
    command_type: str
    command: int
    bad: Bad | None


def word_of(
    settings: Settings, domain: str, command_type: str, command: int, judgement: Judgement, *, is_probe: bool
) -> Word | None:
    """What a judged attempt means for its breaker; None: nothing.

    Stuck is what had to be given up, and what took its process with it. A probe that was cancelled, or that could
    not even begin, says nothing: it, or another one, is tried again.
    """
    failure, rule = judgement.failure, settings.breaker_of(domain, command_type)
    if judgement.verdict in _SAYS_NOTHING or failure.error_code == "ISOLATION_FAILED":
        return None
    is_stuck = failure.rung in _STUCK
    if judgement.verdict in _TROUBLE and (rule.failures or (rule.stuck and is_stuck)):
        return Word(domain, command_type, command, Bad(command, is_stuck, _text(failure)))
    return Word(domain, command_type, command, None) if is_probe else None


def say(moved: Moved | None) -> None:
    """A line in the log for a breaker that has moved."""
    if moved is None:
        return
    extra = {"domain": moved.domain, "command_type": moved.command_type, "breaker": moved.state}
    name = f"{moved.domain}/{moved.command_type}"
    match moved.state:
        case "OPEN":
            logger.warning("the breaker of %s is open: %s", name, moved.reason, extra=extra)
        case "HALF_OPEN":
            logger.info("the breaker of %s is half open: %s", name, moved.reason, extra=extra)
        case _:
            text = "the breaker of %s is closed: %s; %d parked commands went back to the queue"
            logger.info(text, name, moved.reason, moved.released, extra=extra)


class Words:
    """Word on its way to the database. Left by any thread, written by one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._words: list[Word] = []
        self._lock = threading.Lock()

    def add(self, word: Word) -> None:
        """Leave word."""
        with self._lock:
            self._words.append(word)

    def write(self, link: Link) -> None:
        """Write what was left; what a lost connection interrupts is kept."""
        while self._words:
            with self._lock:
                domain, command_type, *_ = self._words[0]
                words = [word for word in self._words if word[:2] == (domain, command_type)]
            rule = self._settings.breaker_of(domain, command_type)
            bad = [word.bad for word in words if word.bad is not None]
            good = [word.command for word in words if word.bad is None]
            try:
                say(link.run(report(domain, command_type, rule, bad=bad, good=good)))
            except psycopg.OperationalError:
                raise
            except Exception:
                logger.exception("a breaker of domain %s could not be told of %d attempts", domain, len(words))
            with self._lock:
                self._words = [word for word in self._words if not any(word is told for told in words)]


class Breakers:
    """A worker's word of its attempts, and the times at which breakers are due."""

    def __init__(self, settings: Settings, domains: Sequence[str]) -> None:
        self._settings = settings
        self._domains = list(domains)
        self._words = Words(settings)
        self._sweep_at = 0.0
        self.on_word: Callable[[], None] = lambda: None

    def failed(self, attempt: Attempt, judgement: Judgement) -> None:
        """An attempt did not complete. Called by slots and the keeper; never waits."""
        if not attempt.is_lost:
            is_probe = bool(attempt.row[PROBE])
            where = (attempt.domain, attempt.command_type, attempt.id)
            self._leave(word_of(self._settings, *where, judgement, is_probe=is_probe))

    def completed(self, attempt: Attempt) -> None:
        """A probe completed."""
        if not attempt.is_lost:
            self._leave(Word(attempt.domain, attempt.command_type, attempt.id, None))

    def write(self, link: Link) -> None:
        """Write what was left; what a lost connection interrupts is kept."""
        self._words.write(link)

    def sweep(self, link: Link) -> None:
        """Move those that are due, and find out when the next one is."""
        if monotonic() < self._sweep_at:
            return
        pause = SWEEP_SECONDS
        try:
            for item in link.run(due(self._domains)):
                if item.seconds > 0:
                    pause = min(pause, item.seconds)
                elif not item.is_probing:
                    say(link.run(advance(item.domain, item.command_type)))
        except psycopg.OperationalError:
            raise
        except Exception as error:  # noqa: BLE001 - leases must not wait for breakers
            pause = TROUBLED_SECONDS
            logger.warning("breakers cannot be looked after now, trying again in a minute: %s", error)
        self._sweep_at = monotonic() + max(pause, SOONEST_SECONDS)

    def _leave(self, word: Word | None) -> None:
        if word is not None:
            self._words.add(word)
            self.on_word()


def _text(failure: Failure) -> str:
    return f"{failure.error_type}: {failure.error}"
