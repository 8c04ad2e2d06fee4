"""What a PGMQ queue and its messages are to `PgmqClient`. Columns and figures have PGMQ's own names."""

from __future__ import annotations

from datetime import datetime

from commandbus.model.json_values import Json
from commandbus.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """A message of a PGMQ queue.

    `read_ct` says how often it was read, `vt` when it can be read (again). `message` is the document; one that
    Python cannot parse (nested too deep, a number of too many digits) is its JSON text. `last_read_at` is None
    before the first read, and with an older PGMQ that does not know it.
    """

    msg_id: int
    read_ct: int
    enqueued_at: datetime
    vt: datetime
    message: Json
    headers: Json = None
    last_read_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A PGMQ queue; `domain` is the domain whose commands it holds, None if it holds none."""

    queue_name: str
    is_partitioned: bool
    is_unlogged: bool
    created_at: datetime
    domain: str | None = None


@dataclass(frozen=True, slots=True)
class QueueMetrics:
    """A PGMQ queue's figures; ages are None while it is empty.

    `queue_visible_length` counts what can be read now. `total_messages` is how many were ever sent, None if the
    role may not know.
    """

    queue_name: str
    queue_length: int
    queue_visible_length: int
    newest_msg_age_sec: float | None
    oldest_msg_age_sec: float | None
    total_messages: int | None
    scrape_time: datetime
