"""A burst after idleness: statements that were planned while the tables were empty, run when they are full.

psycopg prepares the statements of a session. PostgreSQL may then keep one generic plan per statement, and makes it
anew only after an ANALYZE or a change of the schema. `Idler` is such a session: it prepares every statement on the
path of a command and runs each of them often enough that the server would keep a plan. `burst` then fills all
tables, without an ANALYZE and without autovacuum.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import psycopg
from plan_reading import EXPLAIN, Plan, execution, explain, first_statement, numbered
from psycopg import sql

from commandbus import sql as texts
from commandbus.db.drivers import OwnConnection, run
from commandbus.flow.batches.fold_and_complete import fold
from commandbus.flow.batches.leftovers import leftovers
from commandbus.flow.commands import call, rescue, send
from commandbus.flow.commands.claim import claim, next_due, put_right, run_alone
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.flow.commands.renew import pending_cancels, renew
from commandbus.flow.commands.reply import Reply, deliver
from commandbus.flow.commands.settle import Settlement, parked, settle, settle_done, settle_one
from commandbus.flow.limits import permits
from commandbus.flow.limits.declare import select_limits
from commandbus.flow.operation import Operation, Statement, Steps
from commandbus.model.command import NewCommand
from commandbus.model.outcome import Failure, Judgement, Verdict
from commandbus.worker.execution.attempt import Attempt

Conn = psycopg.Connection[Any]
DOMAIN = "orders"
WORKER = "w"
BATCH = 100
RUNS = 8  # the server decides for or against a generic plan at the sixth

OF_KEEPERS = {
    *(
        "claim",
        "claim from a cursor",
        "claim one",
        "next_due",
        "breaker_hold",
        "park",
        "record_lost",
        "adopt",
        "reject",
    ),
    *(
        "settle_done",
        "settle_done in batches",
        "settle_final",
        "settle_final of one, waiting",
        "settle_final with groups",
    ),
    *("settle_final of the same commands", "settle_again of the same commands"),
    *("settle_again", "settle_park", "pending_cancels", "fold", "reply", "reply_to_process"),
}
"""What the claimer, the adopter and the settler run: their sessions keep their plans."""
# These have a row for each type, limit or worker, not for each command: they are small everywhere.
SMALL = {
    "pause", "breaker", "waiting", "worker", "limits", "limit_client", "limit_mode", "meta", "domain", "type_rule",
}  # fmt: skip
# No command of these tests has a key. A session that keeps its plans looks for keys by the index all the same.
EMPTY = {"keyed"}


@dataclass
class Sample:
    """The rows that the statements are about; as long as there are none, made up."""

    attempts: list[Attempt] = field(default_factory=lambda: [_made_up(n) for n in range(1, BATCH + 1)])
    lost: list[ClaimedRow] = field(default_factory=lambda: [_claimed(n, before=True) for n in range(1, BATCH + 1)])
    raw: list[ClaimedRow] = field(default_factory=lambda: [_claimed(n, id_=None) for n in range(1, BATCH + 1)])
    parked: list[tuple[int, int, datetime]] = field(
        default_factory=lambda: [(n, n, datetime.now(UTC)) for n in range(1, BATCH + 1)]
    )
    batches: list[int] = field(default_factory=lambda: list(range(1, BATCH + 1)))
    cursor: datetime | None = None

    @property
    def ids(self) -> list[int]:
        return [each.row[2] for each in self.attempts]


def _claimed(n: int, *, id_: int | None = 1, before: bool = False) -> ClaimedRow:
    now = datetime.now(UTC)
    holder = json.dumps({"held_by": "gone", "since": now.isoformat()}) if before else None
    message = None if id_ is not None else json.dumps({"command_type": "work", "command_id": f"raw-{n}"})
    return ClaimedRow(n, 1, None if id_ is None else n, f"c{n}", "work", "{}", 0, 0, None, None, None, None, 1.5,
                      False, holder, message, now, now)  # fmt: skip


def _made_up(n: int) -> Attempt:
    return _started(Attempt(DOMAIN, tuple(_claimed(n)), None, 0.0))


def _started(attempt: Attempt) -> Attempt:
    attempt.started = 1.0
    return attempt


def _of_batch(attempt: Attempt) -> Attempt:
    row = ClaimedRow(*attempt.row)._replace(batch=1)
    return _started(Attempt(DOMAIN, tuple(row), None, 0.0))


def path(sample: Sample) -> dict[str, Statement]:
    """Every statement on the path of a command, by name."""
    return (
        dict(_work(sample)) | dict(_odd(sample)) | dict(_limits(sample)) | dict(_groups(sample)) | dict(_sends())
    )


Named = Iterator[tuple[str, Statement]]


def _work(sample: Sample) -> Named:
    def claiming(n: int, cursor: datetime | None) -> Statement:
        return first_statement(claim(domain=DOMAIN, worker=WORKER, n=n, lease_seconds=30, cursor=cursor))

    def settling(outcomes: list[Any], waiting: bool = False) -> Statement:
        return first_statement(settle(DOMAIN, WORKER, outcomes, waiting=waiting))

    def surely(outcomes: list[Settlement]) -> list[Settlement]:
        """As after a lost connection: each names when its command was sent."""
        sent = {each.msg_id: each.sent for each in attempts}
        return [outcome.only_of(sent[outcome.msg_id]) for outcome in outcomes]

    attempts = sample.attempts
    retry = Judgement(Verdict.RETRY, Failure("Error", "ERROR", "x"), 60.0)
    failed = Judgement(Verdict.PERMANENT, Failure("Error", "ERROR", "x"))
    again = [each.fail(retry) if number % 2 else each.give_back() for number, each in enumerate(attempts)]
    done = [each.complete(None) for each in attempts]
    grouped = [each.complete(None) for each in attempts[1:]] + [attempts[0].fail(failed)]
    for outcome in grouped:
        outcome.is_grouped = True
    yield "claim", claiming(BATCH, None)
    yield "claim from a cursor", claiming(BATCH, sample.cursor)
    yield "claim one", claiming(1, None)
    yield "next_due", first_statement(next_due(DOMAIN, within_seconds=1.0))
    yield "settle_done", first_statement(settle_done(DOMAIN, WORKER, attempts))
    yield (
        "settle_done in batches",
        first_statement(settle_done(DOMAIN, WORKER, [_of_batch(attempts[0]), *attempts])),
    )
    yield (
        "settle_one",
        first_statement(settle_one(DOMAIN, WORKER, attempts[0], read_ct=1, number=1, result='{"n": 1}')),
    )
    yield "settle_final", settling(done)
    yield "settle_final of one, waiting", settling(done[:1], waiting=True)
    yield "settle_final with groups", settling(grouped)
    yield "settle_again", settling(again)
    yield "settle_final of the same commands", settling(surely(done))
    yield "settle_again of the same commands", settling(surely(again))
    yield "renew", first_statement(renew(DOMAIN, WORKER, attempts, lease_seconds=60))
    yield (
        "renew with progress",
        first_statement(renew(DOMAIN, WORKER, attempts, lease_seconds=60, progress={attempts[0].msg_id: "1"})),
    )
    alone = run_alone(DOMAIN, WORKER, attempts[0])
    yield "run_alone", first_statement(alone)
    yield "pending_cancels", first_statement(pending_cancels(DOMAIN, WORKER, attempts))
    yield (
        "held_by",
        first_statement(
            rescue.held_by(DOMAIN, WORKER, running=[attempts[0].msg_id], past_seconds=10, lease_seconds=40)
        ),
    )
    yield "call_outcomes", first_statement(call.outcomes([(DOMAIN, "x")]))


def _odd(sample: Sample) -> Named:
    def putting_right(odd: list[ClaimedRow]) -> Operation[Any]:
        return put_right(domain=DOMAIN, worker=WORKER, odd=odd, max_bytes=1 << 20)

    paused = [ClaimedRow(*each.row)._replace(is_paused=True) for each in sample.attempts]
    parking = putting_right(paused)
    yield "breaker_hold", first_statement(parking)
    yield "park", parking.steps.send([])
    yield "record_lost", first_statement(putting_right(sample.lost))
    raw = putting_right(sample.raw)
    yield "adopt", first_statement(raw)
    yield "reject", raw.steps.send([])


def _limits(sample: Sample) -> Named:
    yield "settle_park", first_statement(settle(DOMAIN, WORKER, [_park(each) for each in sample.attempts]))
    taking = permits.take("free", ["token"])
    yield "limit_take_one", first_statement(taking)
    yield "limit_take", taking.steps.send([])
    yield "limit_give", first_statement(permits.release("free", ["token"], good=True))
    yield "limit_renew", first_statement(permits.renew("free", ["token"]))
    yield "limit_rows", select_limits("free", locking=True)
    claimable = texts.part("limits/claimable")
    vain = "%(vain)s::jsonb ? p.command::text"
    order = "p.since, p.command, p.seq"
    yield (
        "limit_next",
        Statement(
            texts.text("limits/next", claimable=claimable, chosen=f"NOT ({vain})", order=order),
            {"name": "full", "most": 10, "vain": '{"1": 1}'},
        ),
    )
    yield (
        "limit_calling",
        Statement(texts.text("limits/calling", claimable=claimable), {"name": "full", "most": 3}),
    )
    msg_ids = [msg_id for _, msg_id, _ in sample.parked]
    seqs = [seq for seq, _, _ in sample.parked]
    yield "limit_lock_waiting", Statement(texts.text("limits/lock_waiting", domain=DOMAIN), {"msg_ids": msg_ids})
    yield (
        "limit_orphans",
        Statement(texts.text("limits/orphans", domain=DOMAIN), {"domain": DOMAIN, "msg_ids": msg_ids}),
    )
    yield (
        "limit_woken",
        Statement(
            texts.text("limits/woken"), {"name": "full", "seqs": seqs, "tokens": [f"t{seq}" for seq in seqs]}
        ),
    )
    yield (
        "limit_wake",
        Statement(
            texts.text("limits/wake", domain=DOMAIN),
            {"domain": DOMAIN, "msg_ids": msg_ids, "since": [since for _, _, since in sample.parked]},
        ),
    )
    visitors = [(msg_id, each.row[2], 0) for msg_id, each in zip(msg_ids, sample.attempts, strict=True)]
    yield "limit_turns", first_statement(permits.turns(DOMAIN, visitors))
    yield "limit_sweep", first_statement(permits.sweep())
    yield "limit_overdue", first_statement(permits.wake_overdue(DOMAIN))


def _park(attempt: Attempt) -> Settlement:
    failure = Failure("LimitReached", "LIMIT_REACHED", "x")
    return parked(DOMAIN, attempt.claimed, started=None, limit="full", failure=failure, note="x", until=None)


def _groups(sample: Sample) -> Named:
    yield "fold", first_statement(fold(sample.batches))
    yield "batch_sweep", first_statement(leftovers(BATCH))
    replies = [Reply(f"{DOMAIN}__commands", '{"outcome": "SUCCESS"}', id_) for id_ in sample.ids]
    delivering = deliver(replies)
    next(delivering)
    yield "reply_to_process", delivering.send([(f"{DOMAIN}__commands",)])


def _sends() -> Named:
    """Last: what these insert while the tables are empty is rolled back, but leaves pages behind."""
    plain, chosen = (send.prepare(NewCommand("work", {}, command_id)) for command_id in (None, "chosen"))
    full = send.prepare(NewCommand("work", {}, correlation_id="x"))
    yield "send_plain", first_statement(send.send(DOMAIN, plain))
    yield "send_plain with an id", first_statement(send.send(DOMAIN, chosen))
    yield "send", first_statement(send.send(DOMAIN, full))
    yield "send_many", first_statement(send.send_chunk(DOMAIN, [plain, chosen]))
    yield "send_many_plain", first_statement(send.send_chunk(DOMAIN, [plain]))
    sending = send.send(DOMAIN, chosen)
    first_statement(sending)
    yield "find_existing", sending.steps.send([])
    delivering = deliver([Reply("replies", '{"outcome": "SUCCESS"}', 1)])
    next(delivering)
    yield "reply", delivering.send([("replies",)])


class Idler:
    """A session of ours that prepares statements of the path, and runs them on the tables as they are now."""

    def __init__(self, conn: OwnConnection, names: Collection[str]) -> None:
        self._conn = conn
        self._prepared: dict[str, str] = {}  # by the text: some have several names here
        run(conn, next_due(DOMAIN))  # the driver knows from when on the session's plans are
        conn.rollback()
        for name, statement in path(Sample()).items():
            text, values = numbered(statement)
            if name in names and text not in self._prepared:
                self._prepare(text, values)

    def _prepare(self, text: str, values: list[Any]) -> None:
        name = self._prepared[text] = f"s{len(self._prepared)}"
        self._conn.execute(f"PREPARE {name} AS\n{text}".encode())
        for _ in range(RUNS):
            self._conn.execute(execution(name, values))
            self._conn.rollback()

    def explain(self, name: str, sample: Sample, *, prepared: bool) -> Plan:
        """Run one of them through the driver, as the server plans it now, and undo it."""
        statement = path(sample)[name]
        if not prepared:
            return self.explain_text(statement)
        text, values = numbered(statement)
        explaining = sql.SQL(EXPLAIN.decode()) + execution(self._prepared[text], values)

        def steps() -> Steps[Any]:
            rows = yield Statement(
                explaining.as_bytes(self._conn), None, statement.only_inserts, statement.by_keys
            )
            return rows[0][0][0]

        try:
            return Plan(run(self._conn, Operation(steps(), atomic=False)))
        finally:
            self._conn.rollback()

    def explain_text(self, statement: Statement) -> Plan:
        """Run a statement that was not prepared, and undo it."""
        try:
            return explain(self._conn, statement, generic=False)
        finally:
            self._conn.rollback()


def pause_autovacuum(conn: Conn) -> None:
    """No ANALYZE comes to the rescue."""
    tables = conn.execute(
        "SELECT relnamespace::regnamespace || '.' || relname FROM pg_class "
        "WHERE relkind = 'r' AND relnamespace::regnamespace::text IN ('commandbus', 'pgmq')"
    ).fetchall()
    for (table,) in tables:
        conn.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)".encode())


FILL = """
WITH sent AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, data, batch, process, step)
    SELECT 'orders', concat_ws('-', %(kind)s::text, %(count)s::integer, n), 'work',
           nextval('pgmq.q_orders__commands_msg_id_seq'), '{"n": 1}', m.batch, m.batch, sign(m.batch)
      FROM generate_series(1, %(count)s) n
      LEFT JOIN LATERAL (SELECT n AS batch WHERE %(kind)s::text = 'member') m ON true
    RETURNING id, msg_id, created_at
), queued AS (
    INSERT INTO pgmq.q_orders__commands (msg_id, vt, message) OVERRIDING SYSTEM VALUE
    SELECT msg_id, now() + make_interval(secs => %(due)s), jsonb_build_object('command', id) FROM sent
)
INSERT INTO commandbus.parked (domain, command_type, msg_id, command, reason, limit_name, since, first_parked_at)
SELECT 'orders', 'work', msg_id, id, 'limit', 'full', created_at, now() FROM sent
 WHERE %(kind)s::text = 'parked'
"""
HISTORY = """
WITH old AS (
    INSERT INTO commandbus.command (domain, command_id, command_type, msg_id, data, status, attempt)
    SELECT 'orders', concat_ws('-', 'old', %(count)s::integer, n), 'work', -n, '{}', 'COMPLETED', 1
      FROM generate_series(1, %(count)s) n
    RETURNING id, domain, command_type
), attempts AS (
    INSERT INTO commandbus.attempt (command, number, verdict) SELECT id, 1, 'RETRY' FROM old
), actions AS (
    INSERT INTO commandbus.operator_action (command, action, operator) SELECT id, 'CANCEL', 'ann' FROM old
), tsq AS (
    INSERT INTO commandbus.tsq (command, domain, command_type, attempt) SELECT id, domain, command_type, 1 FROM old
), batches AS (
    INSERT INTO commandbus.batch (domain, batch_id) SELECT domain, id::text FROM old RETURNING id
), deltas AS (
    INSERT INTO commandbus.batch_delta (batch, completed) SELECT id, 1 FROM batches
)
INSERT INTO commandbus.process (domain, process_id, process_type) SELECT domain, id::text, 'saga' FROM old
"""


def burst(conn: Conn, count: int) -> None:
    """Many rows in every table, at once: so many commands wait, are members of batches, are parked, and have a
    checkpoint."""
    for kind, due in (("ready", -3600), ("member", -3600), ("parked", 86400 * 3650)):
        conn.execute(FILL, {"kind": kind, "count": count, "due": due})
    conn.execute(HISTORY, {"count": count})
    conn.execute(
        "INSERT INTO commandbus.checkpoint (command, attempt, value) "
        "SELECT id, 1, '{}' FROM commandbus.command ON CONFLICT DO NOTHING"
    )
    conn.execute(
        "INSERT INTO commandbus.worker (id, host, pid, domains, concurrency, version, state) "
        "VALUES (%s, 'host', 1, ARRAY[%s], 8, '1', 'ACTIVE') ON CONFLICT (id) DO UPDATE SET heartbeat_at = now()",
        (WORKER, DOMAIN),
    )


def take_sample(conn: Conn) -> Sample:
    """Rows of the burst, claimed as a worker would."""

    def claimed() -> list[tuple[Any, ...]]:
        found = run(conn, claim(domain=DOMAIN, worker=WORKER, n=BATCH, lease_seconds=30, cursor=None))
        assert len(found.ready) == BATCH
        return found.ready

    attempts = [_started(Attempt(DOMAIN, row, None, 0.0)) for row in claimed()]
    lost = [ClaimedRow(*row)._replace(before='{"held_by": "gone"}') for row in claimed()]
    conn.execute(
        """UPDATE pgmq.q_orders__commands SET headers = headers || '{"before": {"held_by": "gone"}}'
            WHERE msg_id = ANY (%s)""",
        ([row.msg_id for row in lost],),
    )
    raw = conn.execute(
        """INSERT INTO pgmq.q_orders__commands (vt, read_ct, message, headers)
           SELECT now() + interval '30 s', 1, '{}', jsonb_build_object('held_by', %s::text)
             FROM generate_series(1, %s) RETURNING msg_id""",
        (WORKER, BATCH),
    ).fetchall()
    parked = conn.execute("SELECT seq, msg_id, since FROM commandbus.parked ORDER BY seq LIMIT %s", (BATCH,))
    row = conn.execute("SELECT min(vt) FROM pgmq.q_orders__commands WHERE vt < now()").fetchone()
    assert row is not None
    return Sample(
        attempts=attempts,
        lost=lost,
        raw=[_claimed(msg_id, id_=None) for (msg_id,) in raw],
        parked=parked.fetchall(),
        cursor=row[0],
    )
