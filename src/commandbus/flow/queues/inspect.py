"""inspect: which PGMQ queues there are, and their figures. Reads only, locks nothing."""

from __future__ import annotations

from psycopg import errors as pg

from commandbus import sql
from commandbus.errors import UnknownQueueError
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model import names
from commandbus.model.queue import QueueInfo, QueueMetrics


@operation(atomic=False)
def list_queues() -> Steps[list[QueueInfo]]:
    """All PGMQ queues by name, those of domains included."""
    rows = yield Statement(
        b"SELECT queue_name::text, is_partitioned, is_unlogged, created_at FROM pgmq.meta ORDER BY queue_name"
    )
    return [
        QueueInfo(name, is_partitioned, is_unlogged, created_at, names.domain_of_queue(name))
        for name, is_partitioned, is_unlogged, created_at in rows
    ]


@operation(atomic=False)
def metrics(queue: str) -> Steps[QueueMetrics]:
    """The figures of one queue."""
    return (yield from _metrics(names.check_pgmq_queue(queue)))


@operation(atomic=False)
def metrics_all() -> Steps[list[QueueMetrics]]:
    """The figures of all queues that this role may read, by name."""
    rows = yield Statement(
        b"SELECT queue_name::text FROM pgmq.meta "
        b"WHERE pg_catalog.has_table_privilege(pg_catalog.to_regclass("
        b"pg_catalog.format('pgmq.%%I'::text, 'q_' || pg_catalog.lower(queue_name::text))), 'SELECT'::text) "
        b"ORDER BY queue_name",
        {},
    )
    found: list[QueueMetrics] = []
    for (queue,) in rows:
        figures = yield from _metrics(queue)
        found.append(figures)
    return found


@operation(atomic=False)
def next_visible(queue: str) -> Steps[float | None]:
    """In how many seconds the first message can be read (0: now); None if the queue is empty."""
    try:
        ((seconds,),) = yield Statement(sql.text("queues/next_visible", pgmq=names.check_pgmq_queue(queue)))
    except pg.UndefinedTable:
        raise UnknownQueueError(queue) from None
    return None if seconds is None else max(0.0, seconds)


def _metrics(queue: str) -> Steps[QueueMetrics]:
    sequence = f'pgmq."q_{queue.lower()}_msg_id_seq"'
    try:
        (figures,) = yield Statement(
            sql.text("queues/metrics", pgmq=queue, due=_due_in(queue)), {"sequence": sequence}
        )
    except pg.UndefinedTable:
        raise UnknownQueueError(queue) from None
    return QueueMetrics(queue, *figures)


def _due_in(queue: str) -> str:
    """When a message is due: in the queue of a domain, its vt is in the band of its priority."""
    return "q.vt" if names.domain_of_queue(queue) is None else "{due_at q.vt}"
