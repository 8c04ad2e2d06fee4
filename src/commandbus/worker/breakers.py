"""Breakers of command types in a worker: what it counts and reports, and how it moves breakers.

Slots and the ladder count ended attempts in memory. They report those that count against their type, or were a
breaker's probe. The maintenance thread writes these reports on its own connection, many at once; while the
database is unreachable, the reports wait. The heartbeat carries the counts, but only while a type has a bad
attempt in its window. Whatever its own settings say, a worker tells its counts and moves breakers that are open,
because another program may have opened them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from commandbus.clock import monotonic
from commandbus.db.service_connection import LastingConnection
from commandbus.db.transient_errors import PassingError
from commandbus.flow.breakers.breaker import Bad, Moved, Watch, advance, judge, report, watch
from commandbus.flow.commands.claimed_row import IS_PROBE
from commandbus.logger import safe_logger
from commandbus.model.breaker_rule import AttemptCounts, BadAttempt, find_trouble, moments
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.settings import Settings

if TYPE_CHECKING:
    from commandbus.worker.execution.attempt import Attempt  # a supervisor imports this module, and no worker

logger = safe_logger("commandbus.worker")

SWEEP_SECONDS: Final = 2.0
SOONEST_SECONDS: Final = 0.05
UNDECIDED_SECONDS: Final = 0.5
TROUBLED_SECONDS: Final = 60.0
REMEMBERED: Final = 512
_STUCK: Final = frozenset({"stuck", "kill", "crash"})
_TROUBLE: Final = (Verdict.RETRY, Verdict.EXHAUSTED, Verdict.FAILED, Verdict.TIMED_OUT)
_SAYS_NOTHING: Final = (Verdict.CANCELED, Verdict.UNKNOWN_TYPE)


Key = tuple[str, str]
"""Domain and command type."""


class BreakerReport(NamedTuple):
    """What to report about one attempt, and when it began, by `monotonic`. Without `bad`, it was a probe that went
    well."""

    domain: str
    command_type: str
    command: int
    bad: Bad | None
    began: float = 0.0


def report_of(
    settings: Settings,
    domain: str,
    command_type: str,
    command: int,
    judgement: Judgement,
    *,
    is_probe: bool,
    ran_for: float = 0.0,
) -> BreakerReport | None:
    """What an ended attempt, which ran for so many seconds, means for its breaker; None: nothing.

    An attempt counts as stuck if it had to be given up, or its process died. A probe that was canceled, or could
    not begin, proves nothing: it, or another command, becomes the probe again.
    """
    failure, rule = judgement.failure, settings.breaker_of(domain, command_type)
    if says_nothing(judgement):
        return None
    if judgement.verdict in _TROUBLE and (rule.failures or (rule.stuck and is_stuck(failure))):
        bad = Bad(command, is_stuck(failure), _text(failure))
        return BreakerReport(domain, command_type, command, bad, monotonic() - ran_for)
    return BreakerReport(domain, command_type, command, None) if is_probe else None


def is_stuck(failure: Failure) -> bool:
    """Was the attempt given up, or did it take its process with it?"""
    return failure.rung in _STUCK


def says_nothing(judgement: Judgement) -> bool:
    """Somebody canceled the attempt, or it could not even begin."""
    return judgement.verdict in _SAYS_NOTHING or judgement.failure.error_code == "ISOLATION_FAILED"


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
            more = "" if moved.rest_after is None else ", the others follow"
            text = "the breaker of %s is closed: %s; %d parked commands went back to the queue%s"
            logger.info(text, name, moved.reason, moved.released, more, extra=extra)


class BreakerReports:
    """Reports on their way to the database. Any thread adds them, one thread writes them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reports: list[BreakerReport] = []
        self._lock = threading.Lock()

    def add(self, one: BreakerReport) -> None:
        """Add a report."""
        with self._lock:
            self._reports.append(one)

    def write(self, connection: LastingConnection) -> None:
        """Write the reports. Those that a lost connection interrupts are kept."""
        while self._reports:
            with self._lock:
                domain, command_type, *_ = self._reports[0]
                reports = [one for one in self._reports if one[:2] == (domain, command_type)]
            rule = self._settings.breaker_of(domain, command_type)
            now = monotonic()
            bad = [one.bad._replace(began_ago=now - one.began) for one in reports if one.bad is not None]
            good = [one.command for one in reports if one.bad is None]
            try:
                say(connection.run(report(domain, command_type, rule, bad=bad, good=good)))
            except PassingError:
                raise
            except Exception:
                logger.exception("a breaker of domain %s was not told of %d attempts", domain, len(reports))
            with self._lock:
                self._reports = [one for one in self._reports if not any(one is told for told in reports)]


class Judge:
    """Opens breakers whose type is in trouble. It judges again until no worker's counts are missing, and then not
    before the next bad attempt, because the number of good attempts only grows."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._judged: dict[Key, float] = {}

    def undecided(self, seen: Watch) -> list[Key]:
        """The types that may be in trouble."""
        self._judged = {key: at for key, at in self._judged.items() if key in seen.recent}
        return [
            key
            for key, recent in seen.recent.items()
            if self._judged.get(key) != recent[-1].ended
            and find_trouble(self._settings.breaker_of(*key), recent) is not None
        ]

    def judge(self, connection: LastingConnection, seen: Watch) -> bool:
        """True if something is to be judged again soon."""
        is_open = False
        for key in self.undecided(seen):
            judged = connection.run(judge(*key, self._settings.breaker_of(*key)))
            say(judged.moved)
            if judged.is_final:
                self._judged[key] = seen.recent[key][-1].ended
            is_open = is_open or not judged.is_final
        return is_open


class _Ended(dict[Key, deque[float]]):
    """When the last attempts of each type ended, by `monotonic`: more of them than could be half of the
    bad ones."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings

    def __missing__(self, key: Key) -> deque[float]:
        rule = self._settings.breaker_of(*key)
        return self.setdefault(key, deque(maxlen=max(REMEMBERED, 8 * rule.stuck, 8 * rule.failures)))


class WorkerBreakers:
    """What a worker counts, its reports about its attempts, and the times at which breakers are due."""

    def __init__(self, settings: Settings, domains: Sequence[str]) -> None:
        self._settings = settings
        self._domains = list(domains)
        self._reports = BreakerReports(settings)
        self._judge = Judge(settings)
        self._ended = _Ended(settings)
        self._recent: Mapping[Key, Sequence[BadAttempt]] = {}
        self._told: dict[Key, float] = {}
        self._clock = 0.0  # the server's clock minus `monotonic`
        self.sweep_at = 0.0
        self.on_report: Callable[[], None] = lambda: None

    # --- called by slots, the ladder and the lease keeper; never wait --------------------------------------------

    def failed(self, attempt: Attempt, judgement: Judgement) -> None:
        """An attempt did not complete."""
        if attempt.is_lost or says_nothing(judgement):
            return
        key = (attempt.domain, attempt.command_type)
        if not is_stuck(judgement.failure):
            self._ended[key].append(monotonic())
        is_probe, ran_for = attempt.is_probe, attempt.elapsed_ms() / 1000
        self._hand_in(report_of(self._settings, *key, attempt.id, judgement, is_probe=is_probe, ran_for=ran_for))

    def completed(self, attempt: Attempt) -> None:
        """An attempt completed."""
        self._ended[attempt.domain, attempt.command_type].append(monotonic())
        if attempt.row[IS_PROBE] and not attempt.is_lost:
            self._hand_in(BreakerReport(attempt.domain, attempt.command_type, attempt.id, None))

    # --- called by the maintenance -----------------------------------------------------------------------------

    def write(self, connection: LastingConnection) -> None:
        """Write the reports. Those that a lost connection interrupts are kept."""
        self._reports.write(connection)
        self.sweep_at = 0.0

    @property
    def is_counting(self) -> bool:
        """Do others need what is counted here?"""
        return bool(self._recent)

    def counts(self) -> dict[str, Any] | None:
        """What the heartbeat is to tell: of each type with a bad attempt in its window, how many ended since."""
        if not self._recent:
            return None
        self._told = {key: recent[-1].ended for key, recent in self._recent.items()}
        return {f"{domain}/{kind}": self._counts_of((domain, kind)).to_json() for domain, kind in self._recent}

    def _counts_of(self, key: Key) -> AttemptCounts:
        ended = self._ended[key].copy() if key in self._ended else deque[float]()
        since = moments(self._recent[key])
        others = [sum(at + self._clock >= moment for at in ended) for moment in since]
        most = ended.maxlen
        return AttemptCounts(
            self._recent[key][-1].ended, since, [None if count == most else count for count in others]
        )

    def sweep(self, connection: LastingConnection, tell: Callable[[], None]) -> None:
        """Look after breakers: move those that are due, `tell` what others need to know, judge, and find out when
        to look again."""
        if monotonic() >= self.sweep_at:
            self.sweep_now(connection, tell)

    def sweep_now(self, connection: LastingConnection, tell: Callable[[], None]) -> None:
        """The same, whether it is time or not."""
        pause = SWEEP_SECONDS
        try:
            seen = self._watch(connection)
            if any(self._told.get(key) != recent[-1].ended for key, recent in seen.recent.items()):
                tell()
            for item in seen.due:
                if item.seconds > 0:
                    pause = min(pause, item.seconds)
                elif not item.is_probing:
                    say(connection.run(advance(item.domain, item.command_type)))
            if self._judge.judge(connection, seen):
                pause = min(pause, UNDECIDED_SECONDS)
        except PassingError:
            raise
        except Exception as error:  # noqa: BLE001 - leases must not wait for breakers
            pause = TROUBLED_SECONDS
            logger.warning("breakers cannot be checked now, trying again in a minute: %s", error)
        self.sweep_at = monotonic() + max(pause, SOONEST_SECONDS)

    def _watch(self, connection: LastingConnection) -> Watch:
        asked_at = monotonic()
        seen = connection.run(watch(self._domains))
        if seen.now is not None:
            self._clock = seen.now - (asked_at + monotonic()) / 2
        self._recent = seen.recent
        return seen

    def _hand_in(self, one: BreakerReport | None) -> None:
        if one is not None:
            self._reports.add(one)
            self.on_report()


def _text(failure: Failure) -> str:
    return f"{failure.error_type}: {failure.error}"
