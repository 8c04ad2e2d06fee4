"""The Settler: writes outcomes, many in one statement, on a connection of its own.

Outcomes collect while a statement is under way, so batches grow with the load and a lone outcome goes at once.
Nothing is given up: while the database is away outcomes wait; a row that another transaction holds (`busy`) is
tried again; after an error that is not the connection's, rows are settled one by one, and one that cannot be
stored is settled as a failure that says so. A refused row was settled or claimed by somebody else: the fence did
its work, and that is logged. One that somebody asked to cancel, and that did not complete, is settled as CANCELED.

In between it folds the batches of what was settled (`runtime/folder.py`).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import psycopg

from commandbus import sql
from commandbus.db.link import Link, is_passing
from commandbus.errors import PermanentCommandError
from commandbus.flow.renew import pending_cancels
from commandbus.flow.settle import Answer, Settlement, cancellation, settle
from commandbus.flow.statement import Statement, Steps, operation
from commandbus.logger import safe_logger
from commandbus.model.outcome import Judgement, Verdict, describe
from commandbus.runtime.attempt import Attempt
from commandbus.runtime.execute import Note, Written
from commandbus.runtime.folder import Folder

logger = safe_logger("commandbus.worker")

BATCH = 500
BUSY_PAUSE_SECONDS = 0.05

Item = tuple[Attempt, Settlement | Note]


class Settler:
    """One thread that empties the queue of outcomes."""

    def __init__(
        self,
        link: Link,
        worker: str,
        *,
        on_settled: Callable[[Attempt], None],
        on_written: Callable[[int], None],
        on_again: Callable[[], None],
        on_error: Callable[[BaseException], None],
        name: str,
    ) -> None:
        self._link = link
        self._worker = worker
        self._on_settled = on_settled
        self._on_written = on_written
        self._on_again = on_again
        self._on_error = on_error
        self._queue: deque[Item] = deque()
        self._busy: list[Item] = []
        self._folder = Folder(link)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._abandoning = threading.Event()
        self.settled: Counter[str] = Counter()
        self.refused = 0
        self._thread = threading.Thread(target=self._serve, name=f"{name}-settler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_folding(self) -> bool:
        """Is there a batch that may be complete, and nobody has noticed yet?"""
        return self._folder.pause() is not None

    def add(self, attempt: Attempt, ended: Written) -> None:
        """An attempt has ended. Called by slots; never waits."""
        if ended is None:
            self.settled[attempt.domain] += 1
            self._on_settled(attempt)
            if attempt.batch is not None:
                self._folder.touch(attempt.batch)
                self._wake.set()
            return
        self._queue.append((attempt, ended))
        if not self._wake.is_set():
            self._wake.set()

    def close(self, timeout: float) -> None:
        """Write what is left, then end; what cannot be written in time stays held."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout)
        self._abandoning.set()

    def _serve(self) -> None:
        try:
            self._settle_all()
        except BaseException as error:  # noqa: BLE001 - handed to the worker, which ends with it
            self._on_error(error)
        finally:
            self._link.close()

    def _settle_all(self) -> None:
        while not self._abandoning.is_set():
            if not self._queue and not self._busy:
                if self._closing.is_set():
                    break
                self._wake.clear()
                if not self._queue and not self._wake.wait(self._folder.pause()):
                    self._folder.fold()  # it is quiet
                continue
            if not self._settle_some():
                return
            self._folder.fold_if_due()
        if not self._abandoning.is_set():
            self._folder.fold()

    def _settle_some(self) -> bool:
        """One round; False if the worker gave up waiting for the database."""
        batch: list[Item] = self._busy
        if batch and not self._queue:
            time.sleep(BUSY_PAUSE_SECONDS)  # somebody else's transaction must end first
        self._busy = []
        while self._queue and len(batch) < BATCH:
            batch.append(self._queue.popleft())
        by_domain: dict[str, list[Item]] = {}
        for item in batch:
            by_domain.setdefault(item[0].domain, []).append(item)
        written = [self._write(domain, items) for domain, items in by_domain.items()]
        return all(written)

    def _write(self, domain: str, items: Sequence[Item]) -> bool:
        """Write until it is written, however often the connection is lost on the way."""
        in_doubt = False
        while True:
            try:
                self._write_once(domain, items, in_doubt=in_doubt)
            except psycopg.Error as error:
                if is_passing(error):
                    in_doubt = in_doubt or self._link.conn_is_lost()
                    if not self._link.recover(self._abandoning, error):
                        self._busy += items
                        return False
                    continue
                if len(items) > 1:
                    return all([self._write(domain, [item]) for item in items])  # noqa: C419 - every one, always
                self._store_the_failure_instead(items[0], error)
            return True

    def _write_once(self, domain: str, items: Sequence[Item], *, in_doubt: bool) -> None:
        settlements = [ended for _, ended in items if isinstance(ended, Settlement)]
        answers: dict[tuple[int, int], Answer] = {}
        if settlements:
            answers = self._link.run(settle(domain, self._worker, settlements))
        for _, ended in items:
            if isinstance(ended, Note):
                self._link.run(_note(ended, self._worker))
        completed = sum(settlement.is_completion for settlement in settlements)
        if completed:
            self._on_written(completed)
        for item in items:
            attempt = item[0]
            answer = answers.get((attempt.msg_id, attempt.read_ct)) if answers else None
            if answer == "busy":
                self._busy.append(item)
                continue
            if answer == "canceled":
                self._cancel_instead(attempt)
                continue
            if answer == "refused":
                self._note_refusal(attempt, in_doubt=in_doubt)
            self._on_settled(attempt)
            self.settled[domain] += 1
            if attempt.batch is not None:
                self._folder.touch(attempt.batch)
        if any(not settlement.is_final for settlement in settlements):
            self._on_again()

    def _cancel_instead(self, attempt: Attempt) -> None:
        """Somebody asked to cancel it before this attempt, which did not complete it, was settled."""
        held = [(attempt.msg_id, attempt.read_ct)]
        for cancel in self._link.run(pending_cancels(attempt.domain, self._worker, held)):
            judgement = Judgement(Verdict.CANCELED, cancellation(cancel.by, cancel.reason))
            self._queue.append((attempt, attempt.fail(judgement)))
            return
        self._on_settled(attempt)  # somebody else has settled it since

    def _note_refusal(self, attempt: Attempt, *, in_doubt: bool) -> None:
        extra = attempt.log_fields
        if in_doubt:
            text = "attempt number %d of command %s was settled by the statement in which the connection was lost"
            logger.info(text, attempt.number, attempt.command_id, extra=extra)
            return
        self.refused += 1
        text = "attempt number %d of command %s was refused: it no longer held its lease"
        logger.warning(text, attempt.number, attempt.command_id, extra=extra)

    def _store_the_failure_instead(self, item: Item, error: psycopg.Error) -> None:
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


def _unstorable(attempt: Attempt, error: psycopg.Error) -> Settlement:
    reason = f"its outcome could not be stored: {error.diag.message_primary or error}"
    failure = describe(PermanentCommandError(reason, code="UNSTORABLE"))
    return attempt.fail(Judgement(Verdict.PERMANENT, failure))


@operation(atomic=False)
def _note(note: Note, worker: str) -> Steps[None]:
    attempt, failure = note.attempt, note.failure
    yield Statement(
        sql.text("note"),
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
