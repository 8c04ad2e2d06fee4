"""One attempt in a child process, as seen by the slot's thread that waits for it, and by the ladder.

    begin → run is sent → messages (begun, lent, returned, progress, extend, hold, release, limits, writes, log)
                        → ended
                        ↘ kill: dump signal, 1 s for the stacks, SIGKILL → dead
                        ↘ it dies by itself → dead

The slot's thread calls `attend`: it does what the handler's context asks for, and returns how the attempt ended.
The ladder's thread calls `cancel`, `kill` and `check_memory`, which never wait. Once `is_over`, they do nothing,
because the child process may be running another attempt by then.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any, Final

from commandbus.clock import boottime, monotonic
from commandbus.logger import safe_logger
from commandbus.model import payload
from commandbus.model.durations import format_seconds
from commandbus.model.safe_text import block
from commandbus.quick_dataclass import dataclass
from commandbus.worker.execution.attempt import NEVER, Attempt, Stop
from commandbus.worker.execution.connections import Borrowed, advisory_key
from commandbus.worker.execution.context import MAX_PROGRESS_BYTES, Services
from commandbus.worker.isolation.channel import ChannelError, Message
from commandbus.worker.isolation.child_process import ChildProcess
from commandbus.worker.isolation.child_setup import DUMP_SIGNAL
from commandbus.worker.isolation.limit_relay import ASKED, LimitRelay
from commandbus.worker.isolation.write_relay import WriteRelay

logger = safe_logger("commandbus.worker")

DUMP_SECONDS: Final = 1.0
HELD_UP_SECONDS: Final = 1.0  # the slot's thread also ends what the process has started, if it gets that far
DYING_SECONDS: Final = 2.0
_HANG_UP_SECONDS: Final = 0.5
_LONGEST_NAME: Final = 200
_DEEPEST_NAME: Final = 20  # each part of a name is a logger, too
_MOST_NAMES: Final = 500
_MOST_EXTRAS: Final = 50
_HIGHEST_LEVEL: Final = 100
_OTHER_NAMES: Final = "commandbus.isolated"
_names: set[str] = set()
_RESERVED: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class ChildFate(StrEnum):
    """Why a child process is dead, or as good as dead."""

    KILLED = "killed"  # by the ladder, or at the worker's end
    MEMORY = "memory"  # over max_memory_mb
    CONFUSED = "confused"  # it said something that makes no sense, or hung up
    DIED = "died"


@dataclass(frozen=True, slots=True)
class Dead:
    """How a child process ended in the middle of its attempt. `exit_code` is None if it does not even die."""

    cause: ChildFate
    reason: str
    exit_code: int | None
    dump: str


class Child:
    """An attempt's hold on the process that it runs in."""

    def __init__(
        self,
        process: ChildProcess,
        attempt: Attempt,
        services: Services,
        *,
        cancel_query: Callable[[Attempt], None],
        max_memory_mb: int | None,
    ) -> None:
        self.pid = process.pid
        self.has_begun = False
        self.is_over = False
        self._process = process
        self._attempt = attempt
        self._services = services
        self._cancel_query = cancel_query
        self._max_memory_mb = max_memory_mb
        process.runs += 1
        self._number = process.runs
        self._mark = self._asked_at = (
            process.mark()
        )  # from where on its stacks are this attempt's, and the last ones
        self._since = boottime()  # its database session is younger than that
        self._limit_relay = LimitRelay(services.limits, attempt, run=self._number, send=process.channel.send)
        self._write_relay = WriteRelay(
            services.write,
            attempt,
            run=self._number,
            send=process.channel.send,
            max_bytes=services.max_payload_bytes,
        )
        self._lock = threading.Lock()
        self._is_canceled = False
        self._cause = ChildFate.DIED
        self._reason = ""
        self._killed_at: float | None = None
        self._shot_at: float | None = None
        self._dump = ""

    @property
    def is_doomed(self) -> bool:
        """Is it being killed? The process runs nothing else then."""
        return self._killed_at is not None or self._shot_at is not None

    # --- the ladder's thread ----------------------------------------------------------------------------------

    def cancel(self, stop: Stop) -> None:
        """Ask the handler to stop; once."""
        with self._lock:
            if not self.is_over and not self._is_canceled:
                self._is_canceled = True
                told = {
                    "why": stop.why,
                    "text": stop.text,
                    "asked_at": stop.asked_at,
                    "until": _finite(stop.until),
                }
                self._process.channel.send({"k": "cancel", "n": self._number, **told})

    def kill(self, reason: str = "") -> None:
        """Take its stacks, then kill it. Call it again until the attempt has ended: a second after the time
        for the stacks it kills at once, if the slot's thread is delayed."""
        self._kill(ChildFate.KILLED, reason)

    def end_now(self, reason: str) -> None:
        """Kill it at once: nobody will look at its stacks."""
        with self._lock:
            if not self.is_over:
                if self._killed_at is None:
                    self._cause, self._reason = ChildFate.KILLED, reason
                self._killed_at = -math.inf
                self._process.kill()

    def sample(self, seconds: float) -> str:
        """Where it is, as faulthandler writes it; empty if it has ended or does not answer. Called by the
        maintenance, which may wait. What was written for this does not count as an autopsy later."""
        with self._lock:
            if self.is_over or self.is_doomed:
                return ""
        dump = self._process.dump_now(DUMP_SIGNAL, seconds)
        with self._lock:
            if dump and not self.is_over and not self.is_doomed:
                self._mark = self._process.mark()
        return dump

    def check_memory(self) -> bool:
        """Is it over max_memory_mb? Then it is killed."""
        if self._max_memory_mb is None or self.is_over:
            return False
        if self._cause is not ChildFate.MEMORY:
            used = self._process.memory_mb()
            if used <= self._max_memory_mb:
                return False
            self._kill(
                ChildFate.MEMORY,
                f"its process used {used:.0f} MB, more than max_memory_mb ({self._max_memory_mb})",
            )
        else:
            self._kill(self._cause, self._reason)
        return True

    def _kill(self, cause: ChildFate, reason: str) -> None:
        with self._lock:
            if self.is_over:
                return
            if self._killed_at is None:
                self._killed_at = monotonic()
                self._cause, self._reason = cause, reason
                self._asked_at = self._process.mark()
                self._process.signal(DUMP_SIGNAL)
                self._process.wake()
            elif monotonic() >= self._killed_at + DUMP_SECONDS + HELD_UP_SECONDS:
                self._process.kill()

    # --- the slot's thread ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Send the attempt."""
        attempt = self._attempt
        function = None if attempt.handler is None else attempt.handler.function
        self._process.channel.send(
            {
                "k": "run",
                "n": self._number,
                "domain": attempt.domain,
                "row": attempt.row,
                "module": getattr(function, "__module__", None),
                "renewed_at": attempt.renewed_at,
                "started": attempt.started,
                "started_at": attempt.started_at,
                "deadline_at": _finite(attempt.deadline_at),
            }
        )
        attempt.extras.child = self
        if attempt.stop is not None:  # it was asked before it could be told
            self.cancel(attempt.stop)

    def attend(self) -> Message | Dead:
        """Wait for its end: what it told of it, or how it died."""
        hung_up_at = None
        while True:
            is_dead = self._process.wait(self._patience(hung_up_at))
            if (ended := self._listen(to_the_end=is_dead)) is not None:
                return ended
            if is_dead:
                return self._dead()
            if self._killed_at is not None and self._shot_at is None:
                self._process.wait_for_dump(self._asked_at, self._killed_at + DUMP_SECONDS)
                self._shoot()
            if self._process.channel.is_at_end:
                self._process.leave_channel()
                hung_up_at = hung_up_at or monotonic()
                if self._shot_at is None and monotonic() >= hung_up_at + _HANG_UP_SECONDS:
                    self._give_up_on("it closed its connection to the worker")
            if self._shot_at is not None and monotonic() >= self._shot_at + DYING_SECONDS:
                return self._dead()

    def finish(self) -> None:
        """From now on the ladder's calls do nothing, and its permits are given up."""
        with self._lock:
            self.is_over = True
        self._limit_relay.close()

    def _patience(self, hung_up_at: float | None) -> float | None:
        if self._shot_at is not None:
            return DYING_SECONDS / 4
        return None if hung_up_at is None else _HANG_UP_SECONDS / 2

    def _listen(self, *, to_the_end: bool) -> Message | None:
        """Act on what has arrived. Returns the message that it ended, if that has come."""
        while True:
            try:
                messages = self._process.channel.receive()
                for message in messages:
                    if self._hear(message):
                        return message
            except (ChannelError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
                self._give_up_on(f"it sent a message that makes no sense: {type(error).__name__}: {error}")
                return None
            if not to_the_end or self._process.channel.is_at_end or not messages:
                return None

    def _give_up_on(self, reason: str) -> None:
        with self._lock:
            if self._killed_at is None:
                self._cause, self._reason = ChildFate.CONFUSED, reason
        self._shoot()

    def _shoot(self) -> None:
        self._shot_at = self._shot_at or monotonic()
        self._process.kill_with_descendants()

    def _dead(self) -> Dead:
        exit_code = None
        dump = self._process.dump_since(self._mark)
        if self._process.is_dead():
            exit_code = self._process.reap(in_attempt=True)
        return Dead(self._cause, self._reason, exit_code, dump)

    # --- what it says -----------------------------------------------------------------------------------------

    def _hear(self, message: Message) -> bool:
        """Act on a message; True for the one that says that the attempt has ended."""
        kind = message["k"]
        if kind == "log":
            log_record(message, self.pid)
        elif kind == "extend":
            self._extend(message)
        elif kind == "hold":
            self._hold(message)
        elif kind in ASKED:
            self._limit_relay.hear(message)
        elif kind in ("write", "unwrite"):
            self._write_relay.hear(message)
        elif message["n"] == self._number:  # else from a thread that an earlier attempt left behind
            if kind == "ended":
                return True
            self._note(kind, message)
        return False

    def _note(self, kind: str, message: Message) -> None:
        extras = self._attempt.extras
        if kind == "begun":
            self.has_begun = True
        elif kind == "lent":
            key = message["key"]
            pid, started = int(message["pid"]), int(message["started"])
            if key is not None and key != advisory_key(self._attempt):
                raise ChannelError("the lock of a database session that is not its own")
            if extras.borrowed is not None and extras.borrowed.pid == pid:
                extras.borrowed.started = started  # sent again, now that the session is known
            else:
                extras.borrowed = Borrowed(pid, key, started=started, told_since=self._since)
            if self._attempt.stop is not None:  # the ladder came before this was known
                self._cancel_query(self._attempt)
        elif kind == "returned":
            if extras.borrowed is not None:
                with extras.borrowed.lock:
                    extras.borrowed.is_returned = True
                extras.borrowed = None
        elif kind == "release":
            self._attempt.release_row()
        elif kind == "progress":
            progress = payload.loads(message["text"])
            self._services.progress(
                self._attempt, payload.dump(progress, what="progress", max_bytes=MAX_PROGRESS_BYTES)
            )
        else:
            raise ChannelError(f"a message of the kind {kind!r}")

    def _extend(self, message: Message) -> None:
        """The child has checked this, but the worker checks it again."""
        question, seconds, attempt = int(message["q"]), float(message["seconds"]), self._attempt
        end = monotonic() + seconds
        most = self._services.max_extension
        if message["n"] != self._number or attempt.stop is not None:
            self._answer(question, is_held=False)
        elif not math.isfinite(seconds) or seconds < 0 or end - attempt.started_at > most:
            self._answer(question, error=f"extend({seconds}) is more than max_extension ({format_seconds(most)})")
        else:
            self._services.extend(attempt, seconds).add_done_callback(partial(self._extended, question, end))

    def _hold(self, message: Message) -> None:
        question, attempt = int(message["q"]), self._attempt
        if message["n"] != self._number or attempt.stop is not None or attempt.deadline_at == NEVER:
            self._answer(question, is_held=False)
        else:
            self._services.hold(attempt).add_done_callback(partial(self._extended, question, 0.0))

    def _extended(self, question: int, end: float, asked: Future[bool]) -> None:
        error = asked.exception() if not asked.cancelled() else TimeoutError("the worker is stopping")
        if error is not None:
            is_timeout = isinstance(error, TimeoutError)
            text = str(error) if is_timeout else f"{type(error).__name__}: {error}"
            self._answer(question, error=text, is_timeout=is_timeout)
            return
        if asked.result() and not self.is_over:
            self._limit_relay.extend(end)
        self._answer(question, is_held=asked.result())

    def _answer(
        self, question: int, *, is_held: bool = False, error: str | None = None, is_timeout: bool = False
    ) -> None:
        told = {"is_held": is_held, "error": error, "is_timeout": is_timeout}
        self._process.channel.send({"k": "answer", "q": question, **told})


def _finite(moment: float) -> float | None:
    return None if moment == NEVER else moment


def log_record(message: Message, pid: int) -> None:
    """A record of the child, as one of ours.

    Python keeps every logger, and every level that it was asked about, for ever: what a child may name is bounded.
    """
    name, text = _logger_name(str(message["name"])), payload.clean_text(str(message["text"]))
    level = max(0, min(int(message["level"]), _HIGHEST_LEVEL))
    where: dict[str, Any] = dict(message["where"])
    told = itertools.islice(dict(message["extra"]).items(), _MOST_EXTRAS)
    extra = {str(key)[:100]: value for key, value in told if key not in _RESERVED}
    log = logging.getLogger(name)
    if log.isEnabledFor(level):
        with suppress(Exception):  # an error in logging must not change the outcome
            path, line, function = str(where.get("path")), int(where.get("line") or 0), str(where.get("function"))
            record = log.makeRecord(name, level, path, line, text, (), None, function, extra)
            record.process = pid
            if trace := message.get("trace"):
                record.exc_text = block(payload.clean_text(str(trace)))
            log.handle(record)


def _logger_name(name: str) -> str:
    """The name that a child gave, if the worker has that logger or there are not too many; else one for all."""
    if name in _names or name in logging.root.manager.loggerDict:
        return name
    if len(_names) >= _MOST_NAMES or len(name) > _LONGEST_NAME or name.count(".") >= _DEEPEST_NAME:
        return _OTHER_NAMES
    _names.add(name)
    return name
