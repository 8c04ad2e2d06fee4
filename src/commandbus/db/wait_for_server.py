"""Wait for an unreachable server when a worker or a supervisor starts.

A refused connection, a server that starts or shuts down, too many connections, or an unreachable host are
transient: the start waits. A wrong password, a database that does not exist, or a bad certificate must be repaired
by a person: they are raised at once. Where there is a SQLSTATE, the table of `db/transient_errors.py` decides. For
a failed connect, libpq gives no SQLSTATE but only a text, which may be in the server's own language. For an
unknown text the start waits: the log says so, and a person can end it.

The attempts run on a separate thread, because a signal cannot interrupt a connect to a silent host. The caller
watches `over` and the signals.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Final

import psycopg

from commandbus.clock import monotonic
from commandbus.db.transient_errors import OtherPassingError, is_passing
from commandbus.logger import SafeLogger
from commandbus.model.durations import format_seconds
from commandbus.model.reconnect_backoff import Backoff

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 2.0
SAY_AGAIN_SECONDS: Final = 10.0
LONGEST_SILENCE_SECONDS: Final = 300.0
LOOK_SECONDS: Final = 0.05

_A_PERSON_MUST_REPAIR: Final = re.compile(
    r"authentication failed|no password supplied|server login failed: wrong password|no pg_hba\.conf entry"
    r"|\"[^\"]*\" does not exist|no such (database|user)|permission denied for database|not permitted to log in"
    r"|does not support SSL|certificate verify failed|certificate is not|does not match host name"
    r"|invalid [^:]*\bvalue|invalid (connection option|port number)|unrecognized configuration parameter"
    r"|unsupported frontend protocol",
    re.IGNORECASE,
)
_HINT: Final = re.compile(r"\s*Is the server running.*", re.DOTALL)


def passes_by_itself(error: BaseException) -> bool:
    """May the server be usable later, without anybody's help?"""
    if isinstance(error, psycopg.Error) and error.sqlstate is not None:
        return is_passing(error)
    return isinstance(error, psycopg.OperationalError) and _A_PERSON_MUST_REPAIR.search(str(error)) is None


def reason_of(error: BaseException) -> str:
    """The server's or libpq's own text, in one line. It never contains a password."""
    return " ".join(_HINT.sub("", str(error)).split()).removeprefix("connection failed: ")


class ServerWait:
    """Calls `attempt` until it succeeds, fails for good, or nobody waits any more.

    `over` is set when it has succeeded or failed. Then `check` raises the failure. `reason` is what it waits for,
    empty before the first failure. `on_reason` is called with each new reason, on this object's thread.
    """

    def __init__(
        self,
        attempt: Callable[[], None],
        *,
        is_patient: bool,
        log: logging.Logger | SafeLogger,
        on_reason: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._attempt = attempt
        self._is_patient = is_patient
        self._log = log
        self._on_reason = on_reason
        self._given_up = threading.Event()
        self._error: BaseException | None = None
        self._began_at = monotonic()
        self._say_at = 0.0
        self._silence = Backoff(SAY_AGAIN_SECONDS, LONGEST_SILENCE_SECONDS)
        self.reason = ""
        self.tried = threading.Event()  # at least once
        self.over = threading.Event()

    def start(self) -> None:
        """Begin to try."""
        self._began_at = monotonic()
        threading.Thread(target=self._serve, name="wait-for-server", daemon=True).start()

    def give_up(self) -> None:
        """Stop trying, because nobody waits. An attempt that is under way goes on, and changes nothing."""
        self._given_up.set()

    def wait(self, stopping: threading.Event) -> bool:
        """Wait until it is over, and raise what it failed with; False if `stopping` was set first."""
        try:
            while not self.over.wait(LOOK_SECONDS):
                if stopping.is_set():
                    return False
        finally:
            self.give_up()
        self.check()
        return True

    def check(self) -> None:
        """Raise what it failed with, if it did."""
        if self._error is not None:
            raise self._error

    def described(self) -> str:
        """What is waited for, and for how long already."""
        lasted = format_seconds(round(monotonic() - self._began_at))
        return f"waiting for the database for {lasted}: {self.reason}"

    def _serve(self) -> None:
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while not self._given_up.is_set():
            try:
                self._attempt()
            except BaseException as error:  # noqa: BLE001 - raised by `check`, where somebody waits for it
                if not (self._is_patient and passes_by_itself(error)):
                    self._error = error.original if isinstance(error, OtherPassingError) else error
                    break
                self._note(error)
                self.tried.set()
                self._given_up.wait(backoff.next())
            else:
                if self.reason and not self._given_up.is_set():
                    self._log.info("the database is reachable after %.1f s", monotonic() - self._began_at)
                break
        self.over.set()
        self.tried.set()

    def _note(self, error: BaseException) -> None:
        """Tell at once what is waited for, and then at growing intervals."""
        if self._given_up.is_set():
            return
        now, reason = monotonic(), reason_of(error)
        if reason != self.reason:
            self._on_reason(reason)
        if not self.reason:
            self._log.warning("the database cannot be used yet, so this start waits for it: %s", reason)
            self._say_at = now + self._silence.next()
        elif now >= self._say_at:
            self._log.warning("still waiting for the database after %.0f s: %s", now - self._began_at, reason)
            self._say_at = now + self._silence.next()
        self.reason = reason
