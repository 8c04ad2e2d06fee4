"""Claimed commands join the line of their key.

Nearly all commands with keys join when they are sent. A worker finds the others when it claims them: those of
schedules, process steps, unique sends and other PGMQ clients, those that were sent for later, and those that were
sent before their type had a rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from commandbus import sql
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.flow.commands.settle import cancellation, of_row, settle
from commandbus.flow.operation import Statement, Steps
from commandbus.model import payload
from commandbus.model.outcome import Failure, Judgement, Verdict

INVALID_KEY = "INVALID_KEY"


def join(domain: str, worker: str, rows: Sequence[ClaimedRow]) -> Steps[dict[int, Failure]]:
    """Put them into their lines, not charged. Those whose key is not usable go to the troubleshooting queue.
    Returns, by msg_id, those that somebody asked to cancel meanwhile: they are still held."""
    answers = yield Statement(
        sql.text("keys/join", domain=domain), {"domain": domain, "worker": worker, "rows": _dump(rows)}
    )
    wrong = {msg_id for msg_id, _, _, is_wrong, _ in answers if is_wrong}
    settlements = [
        of_row(domain, row, Judgement(Verdict.PERMANENT, _invalid(row)), started=None)
        for row in rows
        if row.msg_id in wrong
    ]
    if settlements:
        yield from settle(domain, worker, settlements, waiting=True).steps
    return {msg_id: cancellation(by, reason) for msg_id, by, reason, is_wrong, _ in answers if not is_wrong}


def _invalid(row: ClaimedRow) -> Failure:
    assert row.line is not None  # noqa: S101
    return Failure(
        "InvalidKeyError",
        INVALID_KEY,
        f"the key of limit {row.line.key_limit} is at {row.line.key_path}, and this command has an object, a list "
        f"or a text of more than 255 characters there",
    )


def _dump(rows: Sequence[ClaimedRow]) -> str:
    found = []
    for row in rows:
        assert row.line is not None  # noqa: S101
        found.append(
            {
                "m": row.msg_id,
                "r": row.read_ct,
                "c": row.id,
                "n": row.attempt_base + row.read_ct,
                "l": row.line.key_limit,
                "k": row.line.key,
                "p": row.line.key_path,
            }
        )
    return payload.dump(found, what="rows", max_bytes=1 << 30)
