"""ClaimedRow: a row as the claim returned it, with names for its columns; and the Fence of its attempt.

Nearly all rows are never read by name: a claim returns plain tuples, and `Attempt` wraps each tuple as it is.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from commandbus.model.outcome import Failure
from commandbus.model.retry import OnExhausted
from commandbus.model.suspects import Marks


class Fence(NamedTuple):
    """The identity under which an attempt is settled: the queue row (`msg_id`), claimed for the `read_ct`-th time,
    of a command (`id`). `number` is the attempt's running number in the command's history."""

    domain: str
    msg_id: int
    read_ct: int
    id: int
    number: int


class Line(NamedTuple):
    """The line that a claimed command joins before it runs: its key limit, and its key or the path of it."""

    key_limit: str
    key: str | None
    key_path: str | None


class RareOptions(NamedTuple):
    """Options that few commands have: seconds until it expires, its own `on_exhausted`, how often it was snoozed,
    how many seconds ago the first snooze was, its key with the limit of that key, whether it must not run in a
    chunk, and its state in the line of its key. Seconds count from the claim, by the server's clock."""

    expires_in: float | None = None
    on_exhausted: OnExhausted | None = None
    snoozes: int | None = None
    snoozed_ago: float | None = None
    key_limit: str | None = None
    key: str | None = None
    is_single: bool | None = None
    key_state: str | None = None

    @classmethod
    def read(cls, text: str | None) -> RareOptions:
        """Reads the options from a claimed row."""
        return _NO_OPTIONS if text is None else cls(*json.loads(text))


_NO_OPTIONS = RareOptions()


class ClaimedRow(NamedTuple):
    """A row of commands/claim.sql, in its order. `is_paused` is also True if the breaker of its type is not
    closed.

    `before` is True if a worker held the row when its lease ran out. `created_at` is an epoch second; `last_vt`
    and `claimed_at` are microseconds, the same in every row. So is `others`: what is due in other priorities (1 is
    high, 2 is low, 3 is both). `options` is the JSON text of RareOptions, `checkpoint` the JSON text that an
    earlier attempt stored. `unhandled` is not a column: if this worker has no handler for the command, it is the
    note with which the command is parked.
    """

    msg_id: int
    read_ct: int
    id: int | None
    command_id: str
    command_type: str
    data: str | None
    attempt_base: int
    waived: int
    max_attempts: int | None
    correlation_id: str | None
    reply_to: str | None
    headers: str | None
    created_at: float | None
    is_paused: bool | None
    before: bool | None
    others: int | None
    last_vt: int
    claimed_at: int
    timeout: float | None = None
    suspect: int | None = None
    step: int | None = None
    batch: int | None = None
    is_probe: bool | None = None
    quarantine: bool | None = None
    alone: bool | None = None
    options: str | None = None
    checkpoint: str | None = None
    unhandled: str | None = None
    line: Line | None = None

    def fence(self, domain: str) -> Fence:
        """Returns the fence of its attempt. A raw message has none: it is not a command."""
        assert self.id is not None  # noqa: S101
        return Fence(domain, self.msg_id, self.read_ct, self.id, self.attempt_base + self.read_ct)

    @property
    def is_odd(self) -> bool:
        """Must something be put right before it runs?"""
        is_known = self.before is None and self.id is not None
        return not is_known or self.suspect is not None or bool(self.is_paused or self.quarantine)

    @property
    def is_grouped(self) -> bool:
        """Does it belong to a batch or a process?"""
        return self.step is not None or self.batch is not None

    @property
    def marks(self) -> Marks:
        """The marks that earlier trouble has left on the command."""
        return Marks(self.waived, self.suspect, bool(self.quarantine), bool(self.alone))

    def charge_after(self, failure: Failure) -> int:
        """How many attempts count against max_attempts after this failure. If the failure convicts a suspect,
        earlier crashes count, too."""
        return self.read_ct - self.marks.after_failure(failure).waived


(
    MSG_ID,
    READ_CT,
    ID,
    COMMAND_ID,
    COMMAND_TYPE,
    DATA,
    ATTEMPT_BASE,
    WAIVED,
    MAX_ATTEMPTS,
    CORRELATION_ID,
    REPLY_TO,
    HEADERS,
    CREATED_AT,
    IS_PAUSED,
    BEFORE,
    _OTHERS,
    _LAST_VT,
    _CLAIMED_AT,
    TIMEOUT,
    SUSPECT,
    STEP,
    BATCH,
    IS_PROBE,
    QUARANTINE,
    ALONE,
    OPTIONS,
    CHECKPOINT,
    _UNHANDLED,
    _LINE,
) = range(len(ClaimedRow._fields))
"""The positions of the columns, for readers of plain tuples: the claim, the dispatcher and `Attempt`."""
