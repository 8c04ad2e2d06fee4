"""The Settler: writes outcomes, many in one statement, on its own connection.

Outcomes collect while a statement is under way. So more are written at once under load, and a single outcome is
written at once. No outcome is dropped: while the database is unreachable or read-only, outcomes wait. A row that
another transaction holds (`busy`) is tried again. After an error that is not the database's state, the rows are
halved until the one that cannot be stored is found; it is settled as a failure that says so. A refused row was
settled or claimed by another worker: the fence has worked, and that is logged. If somebody asked to cancel a
command, and it did not complete, it is settled as CANCELED.

The usual outcome needs no text (`Done`): such attempts have their own queue and statement. What that statement
does not settle, for whatever reason, is settled like the others.

If another transaction holds a lock, only the outcomes that need it wait. The settler waits for a lock once. Then
it finds the outcomes that met the lock, by their reply queue and by halving, in statements that hardly wait
(HURRIED_MS). It sets them aside for a growing time (`_Aside`), and tries them again separately. `backlog` says how
many outcomes are unwritten; if there are too many, the worker claims nothing more.

In between it folds the batches of what was settled (`worker/batch_folding.py`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import Connection

from commandbus import sql
from commandbus.clock import monotonic
from commandbus.db.drivers import UnreplicatedError
from commandbus.db.service import DatabaseService
from commandbus.db.transient_errors import is_locked, is_of_the_database, is_passing
from commandbus.errors import PermanentCommandError
from commandbus.flow.commands.renew import pending_cancels
from commandbus.flow.commands.settle import Answer, Done, Settlement, cancellation, is_dense, settle, settle_done
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.logger import safe_logger
from commandbus.model.counting import counted
from commandbus.model.outcome import Judgement, Verdict, describe
from commandbus.model.reconnect_backoff import Backoff
from commandbus.settings import Settings
from commandbus.worker.batch_folding import BatchFolding
from commandbus.worker.counts_page import CountsPage
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.execute import Note, Written

logger = safe_logger("commandbus.worker")

BATCH = 500
DONE_BATCH = 1000
FEW = 100
LINGER_SECONDS = 0.002
"""How long a few outcomes wait for others while work waits before the slots. Otherwise the first outcome after a
pause would be written alone, with a commit of its own."""
LOCK_SECONDS = 0.2
"""How long a statement of the settler waits for a lock: other outcomes wait meanwhile."""
BUSY_PAUSE_SECONDS = 0.05
LONGEST_SLEEP = 1.0
FIRST_ASIDE_SECONDS = 0.5
LONGEST_ASIDE_SECONDS = 10.0
ASIDE_SLICE_SECONDS = 0.25  # the time of a round for outcomes that were set aside
HURRIED_MS = 20

Item = tuple[Attempt, Settlement | Note]


class Settler(DatabaseService):
    """One thread that empties the queue of outcomes."""

    def __init__(
        self,
        settings: Settings,
        worker: str,
        *,
        on_settled: Callable[[Attempt], None],
        on_done: Callable[[Sequence[Attempt]], None],
        on_written: Callable[[int], None],
        on_progress: Callable[[], None],
        on_again: Callable[[], None],
        is_more_coming: Callable[[], bool],
        on_error: Callable[[BaseException], None],
        held: Callable[[], set[Attempt]],
        counts: CountsPage,
        name: str,
    ) -> None:
        super().__init__(
            settings, name=name, part="settler", on_end=on_error, lock_seconds=LOCK_SECONDS, goes_by_keys=True
        )
        self._worker = worker
        self._on_settled = on_settled
        self._on_done = on_done
        self._on_written = on_written
        self._on_progress = on_progress
        self._on_again = on_again
        self._is_more_coming = is_more_coming
        self._done: deque[Attempt] = deque()  # attempts that completed in the usual way
        self._writing: list[Attempt] = []  # those that are being written now
        self._queue: deque[Item] = deque()
        self._busy: list[Item] = []
        self._unwritten: dict[int, Item] = {}  # the outcomes that are being written now
        self._aside = _Aside()
        self._void: set[Attempt] = set()
        self._held = held
        self._counts = counts
        self._from_before: set[Attempt] = set()  # claimed before this connection, perhaps from another server
        self._folder = BatchFolding(self._connection)
        self._closing = False
        self._sleeps = False  # a thread that adds an outcome must wake it
        self._in_doubt = False  # a statement was not acknowledged, and may have settled something
        self.settled: Counter[str] = Counter()
        self.refused = 0
        self.unfinished = 0  # of the settled: given back, or cut off when the worker stopped

    @property
    def is_folding(self) -> bool:
        """Is there a batch that may be complete, but is not folded yet?"""
        return self._folder.pause() is not None

    @property
    def backlog(self) -> int:
        """How many outcomes are not written yet."""
        done = len(self._done) + len(self._writing)
        return done + len(self._queue) + len(self._busy) + len(self._unwritten) + len(self._aside)

    def add(self, attempt: Attempt, ended: Written) -> None:
        """An attempt has ended. Called by slots; never waits."""
        if isinstance(ended, Done):
            self._done.append(attempt)
            if self._sleeps:
                self._sleeps = False
                self.wake()
            return
        if ended is None:
            self.settled[attempt.domain] += 1
            self._counts.ended(attempt, None)
            self._on_settled(attempt)
            if attempt.batch is not None:
                self._folder.touch(attempt.batch)
                self.wake()
            return
        self._queue.append((attempt, ended))
        if self._sleeps:
            self._sleeps = False
            self.wake()

    def void(self, attempt: Attempt) -> None:
        """Never write an outcome of this attempt: its row belongs to another command now, but its fence would
        fit."""
        self._void.add(attempt)

    def close(self, timeout: float) -> None:
        """Write what is left, then end; what cannot be written in time stays held."""
        self._closing = True
        self.join(timeout)
        self._stopping.set()

    @property
    def is_done(self) -> bool:
        return self._stopping.is_set() or (self._closing and not self.backlog)

    def connected(self, conn: Connection[Any]) -> None:  # noqa: ARG002 - the base says what for
        self._from_before = self._held()

    def round(self) -> None:
        self._try_aside()
        self._on_progress()
        if not self._queue and not self._busy and not self._done:
            self._sleeps = True
            pause = self._folder.pause()
            # What was added before `_sleeps` was set woke nobody.
            longest = self._aside.pause(LONGEST_SLEEP if pause is None else pause)
            if not self._queue and not self._done and not self.sleep(longest) and pause is not None:
                self._folder.fold()  # it is quiet
            self._sleeps = False
            return
        if len(self._done) + len(self._queue) < FEW and self._is_more_coming():
            time.sleep(LINGER_SECONDS)
        if self._done:
            self._settle_done()
        if self._queue or self._busy:
            self._settle_some()
        self._folder.fold_if_due()

    def finish(self) -> None:
        if not self._stopping.is_set():
            self._folder.fold()

    def lost(self, error: psycopg.Error) -> None:
        self._in_doubt = self._in_doubt or self._connection.conn_is_lost() or isinstance(error, UnreplicatedError)

    def _settle_done(self) -> None:
        """Write completions. If the database fails, they are written later."""
        done, by_domain = self._done, dict[str, list[Attempt]]()
        for _ in range(min(len(done), DONE_BATCH)):
            attempt = done.popleft()
            if self._void and attempt in self._void:
                self._drop(attempt)
            elif self._from_before and attempt in self._from_before:
                self._queue.append((attempt, attempt.complete(None)))
            else:
                by_domain.setdefault(attempt.domain, []).append(attempt)
        self._writing = [attempt for attempts in by_domain.values() for attempt in attempts]
        try:
            for domain, attempts in by_domain.items():
                self._write_done(domain, attempts)
                del self._writing[: len(attempts)]
        finally:
            done.extendleft(self._writing)
            self._writing = []

    def _write_done(self, domain: str, attempts: Sequence[Attempt]) -> None:
        written: list[int] | None = []
        if self.can_listen and is_dense(attempts):  # otherwise the server would wait for a lock without end
            try:
                written = self._connection.run(settle_done(domain, self._worker, attempts))
            except Exception as error:
                if not is_locked(error) and is_of_the_database(error, is_lost=self._connection.conn_is_lost()):
                    raise
        if written is not None:
            commands = set(written)
            self._queue.extend((item, item.complete(None)) for item in attempts if item.id not in commands)
            attempts = [item for item in attempts if item.id in commands]
        elif not self._queue and not self._busy:
            self._in_doubt = False
        if attempts:
            self._on_written(len(attempts))
            self._counts.completed(attempts)
            self._on_done(attempts)
            self.settled[domain] += len(attempts)
            for batch in {item.batch for item in attempts}:
                if batch is not None:
                    self._folder.touch(batch)

    def _settle_some(self) -> None:
        batch: list[Item] = self._busy
        if batch and not self._queue:
            time.sleep(BUSY_PAUSE_SECONDS)  # somebody else's transaction must end first
        self._busy = []
        while self._queue and len(batch) < BATCH:
            batch.append(self._queue.popleft())
        # While a row is known to be locked, the settler does not wait for it again.
        self._settle(batch, is_hurried=len(self._aside) > 0)

    def _try_aside(self) -> None:
        """Try those whose time has come, each kind separately, so that they do not delay the others again."""
        until = monotonic() + ASIDE_SLICE_SECONDS
        while monotonic() < until and (items := self._aside.take_due()):
            self._settle(items, is_hurried=True)

    def _settle(self, batch: Sequence[Item], *, is_hurried: bool) -> None:
        by_domain: dict[str, list[Item]] = {}
        for item in batch:
            if self._void and item[0] in self._void:
                self._drop(item[0])
                continue
            by_domain.setdefault(item[0].domain, []).append(item)
        self._unwritten = {id(item): item for items in by_domain.values() for item in items}
        try:
            for domain, items in by_domain.items():
                self._write(domain, items, is_hurried=is_hurried)
        finally:
            self._busy += self._unwritten.values()  # again, when the database is back
            self._unwritten = {}

    def _write(self, domain: str, items: Sequence[Item], *, is_hurried: bool) -> None:
        """Write these, together if that is possible; raises while the database is unreachable."""
        if (error := self._try(domain, items, is_hurried=is_hurried)) is not None:
            self._write_around_locks(domain, items, error)

    def _try(self, domain: str, items: Sequence[Item], *, is_hurried: bool) -> Exception | None:
        """Write these. Returns the error if somebody holds a lock that one of them needs."""
        try:
            self._write_once(domain, items, in_doubt=self._in_doubt, is_hurried=is_hurried)
        except Exception as error:
            if is_locked(error):
                return error
            if is_of_the_database(error, is_lost=self._connection.conn_is_lost()):
                raise
            if len(items) > 1:
                for half in _halves(items):
                    self._write(domain, half, is_hurried=is_hurried)
            elif is_passing(error):
                self._put_aside(domain, "", items, error)
            else:
                self._store_the_failure_instead(items[0], error)
        else:
            self._in_doubt = False
        return None

    def _write_around_locks(self, domain: str, items: Sequence[Item], error: Exception) -> None:
        """One of them needs what somebody has locked: a row of its own, or the queue of its reply."""
        apart: dict[str, list[Item]] = {}
        for item in items:
            apart.setdefault(_needs(item), []).append(item)
        if len(apart) == 1:
            self._find_locked(domain, items, error)
            return
        for some in apart.values():
            self._write(domain, some, is_hurried=True)

    def _find_locked(self, domain: str, items: Sequence[Item], error: Exception) -> None:
        """These reply to one queue, or to none, and could not be written together."""
        needs = _needs(items[0])
        if len(items) == 1:
            self._put_aside(domain, needs, items, error)
            return
        halves = _halves(items)
        errors = [self._try(domain, half, is_hurried=True) for half in halves]
        if needs and all(errors):
            self._put_aside(domain, needs, items, error)  # almost certainly the queue is missing
            return
        for half, again in zip(halves, errors, strict=True):
            if again is not None:
                self._find_locked(domain, half, again)

    def _put_aside(self, domain: str, needs: str, items: Sequence[Item], error: Exception) -> None:
        pause = self._aside.add(needs, items)
        for item in items:
            self._unwritten.pop(id(item), None)
        text = "%s of domain %s cannot be written now%s, trying again in %.1f s: %s"
        where = f" to {needs}" if needs else ""
        reason = str(error).strip().partition("\n")[0]
        logger.warning(text, counted(len(items), "outcome"), domain, where, pause, reason)

    def _write_once(self, domain: str, items: Sequence[Item], *, in_doubt: bool, is_hurried: bool) -> None:
        settlements = [self._surely(item, ended) for item, ended in items if isinstance(ended, Settlement)]
        answers: dict[tuple[int, int], Answer] = {}
        if settlements:
            limit = HURRIED_MS if is_hurried else None
            answers = self._connection.run(settle(domain, self._worker, settlements, lock_timeout_ms=limit))
        for _, ended in items:
            if isinstance(ended, Note):
                self._connection.run(_note(ended, self._worker))
        completed = sum(settlement.is_completion for settlement in settlements)
        if completed:
            self._on_written(completed)
        for item in items:
            attempt = item[0]
            answer = answers.get((attempt.msg_id, attempt.read_ct)) if answers else None
            if answer == "busy":
                continue  # it stays unwritten
            if answer == "canceled":
                self._cancel_instead(attempt)
            del self._unwritten[id(item)]
            if answer == "canceled":
                continue
            if answer == "refused":
                self._note_refusal(attempt, in_doubt=in_doubt)
            if not attempt.is_lost:
                self._counts.ended(attempt, getattr(item[1], "verdict", None))
            self._on_settled(attempt)
            self.settled[domain] += 1
            self.unfinished += attempt.is_unfinished
            if attempt.batch is not None:
                self._folder.touch(attempt.batch)
        if any(not settlement.is_final for settlement in settlements):
            self._on_again()

    def _surely(self, attempt: Attempt, settlement: Settlement) -> Settlement:
        """A failover that lost commits may have given its message, and its number, to another command."""
        return settlement.only_of(attempt.sent) if attempt in self._from_before else settlement

    def _cancel_instead(self, attempt: Attempt) -> None:
        """Somebody asked to cancel it before this attempt, which did not complete it, was settled."""
        for cancel in self._connection.run(pending_cancels(attempt.domain, self._worker, [attempt])):
            judgement = Judgement(Verdict.CANCELED, cancellation(cancel.by, cancel.reason))
            self._queue.append((attempt, attempt.fail(judgement)))
            return
        self._on_settled(attempt)  # somebody else has settled it since

    def _note_refusal(self, attempt: Attempt, *, in_doubt: bool) -> None:
        extra = attempt.log_fields
        if in_doubt:
            text = "attempt number %d of command %s was settled by a statement that was not acknowledged"
            logger.info(text, attempt.number, attempt.command_id, extra=extra)
            return
        self.refused += 1
        attempt.is_lost = True
        text = "attempt number %d of command %s was refused: it no longer held its lease"
        logger.warning(text, attempt.number, attempt.command_id, extra=extra)

    def _drop(self, attempt: Attempt) -> None:
        self._void.discard(attempt)
        self._note_refusal(attempt, in_doubt=False)
        self._on_settled(attempt)

    def _store_the_failure_instead(self, item: Item, error: Exception) -> None:
        self._unwritten.pop(id(item), None)
        attempt, ended = item
        logger.error(
            "the outcome of command %s cannot be stored: %s",
            attempt.command_id,
            error,
            extra={"domain": attempt.domain, "command_id": attempt.command_id},
        )
        instead = _unstorable(attempt, error) if isinstance(ended, Settlement) else None
        if instead is not None and instead.row != ended.row:  # type: ignore[union-attr]
            self._queue.append((attempt, instead))
            return
        logger.error("command %s stays leased and will be tried again", attempt.command_id)
        self._on_settled(attempt)


def _needs(item: Item) -> str:
    """What an outcome needs beside its own rows: the queue of its reply."""
    ended = item[1]
    reply = ended.reply if isinstance(ended, Settlement) else None
    return "" if reply is None else f"reply queue {reply.queue}"


def _halves(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    half = len(items) // 2
    return items[:half], items[half:]


class _Aside:
    """Outcomes that met a lock, until they are tried again. Those that need the same thing wait together."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[float, Backoff, list[Item]]] = {}  # until when

    def __len__(self) -> int:
        return sum(len(items) for _, _, items in self._waiting.values())

    def add(self, needs: str, items: Sequence[Item]) -> float:
        """Returns after how many seconds they are tried again."""
        key = needs or f"row {items[0][0].msg_id} of {items[0][0].domain}"
        _, backoff, before = self._waiting.get(key) or (
            0.0,
            Backoff(FIRST_ASIDE_SECONDS, LONGEST_ASIDE_SECONDS),
            [],
        )
        self._waiting[key] = (monotonic() + backoff.next(), backoff, [*before, *items])
        return backoff.seconds

    def take_due(self) -> list[Item]:
        """Some whose time has come. Their pause is remembered until they are written."""
        now = monotonic()
        for key, (until, backoff, items) in list(self._waiting.items()):
            if items and until <= now:
                self._waiting[key] = (now, backoff, [])
                return items
            if not items and now - until > LONGEST_ASIDE_SECONDS:
                del self._waiting[key]
        return []

    def pause(self, longest: float) -> float:
        """How long until the next of them is due."""
        soonest = min((until for until, _, items in self._waiting.values() if items), default=None)
        return longest if soonest is None else max(0.0, min(longest, soonest - monotonic()))


def _unstorable(attempt: Attempt, error: Exception) -> Settlement:
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    reason = f"its outcome could not be stored: {primary or error}"
    failure = describe(PermanentCommandError(reason, code="UNSTORABLE"))
    return attempt.fail(Judgement(Verdict.PERMANENT, failure))


@operation(atomic=False)
def _note(note: Note, worker: str) -> Steps[None]:
    attempt, failure = note.attempt, note.failure
    yield Statement(
        sql.text("commands/note"),
        {
            "command": attempt.id,
            "number": attempt.number,
            "worker": worker,
            "started": attempt.started,
            "error_type": failure.error_type,
            "error_code": failure.error_code,
            "error": failure.error,
            "details": failure.details,
            "traceback": failure.traceback,
        },
    )
