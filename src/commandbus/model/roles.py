"""The four least-privilege roles, as SQL.

reader: looks. producer: sends, reads what became of it, and uses limits that a worker or an operator has made
known (it can neither change what they allow nor wake commands; workers do). worker: claims, settles, declares
limits, and all that a producer may, because handlers send. operator: the troubleshooting queue, cancel, pause,
prune, limits, breakers, batches and processes (to send again what failed is to send). None of them owns anything
or is a superuser; queues are created by the role that migrated.
"""

from __future__ import annotations

import re

from commandbus.errors import InvalidCommandError

KINDS = ("reader", "producer", "worker", "operator")

_TABLES: dict[str, list[tuple[str, str]]] = {
    "reader": [("SELECT", "ALL TABLES IN SCHEMA commandbus")],
    "producer": [
        ("SELECT", "ALL TABLES IN SCHEMA commandbus"),
        (
            "INSERT",
            "commandbus.command, commandbus.batch, commandbus.batch_delta, commandbus.process, "
            "commandbus.undelivered_reply",
        ),
        (  # it closes what it has opened, and folds; it cancels nothing
            "UPDATE (is_open, total, completed, failed, canceled, in_tsq, status, rate, rate_at, rate_count, "
            "started_at, finished_at, completion_sent_at, fingerprint)",
            "commandbus.batch",
        ),
        ("DELETE", "commandbus.batch_delta"),
        (  # the state of limits, not what they allow, and not what a person has decided
            "UPDATE (holders, tat, flow, flow_at, flow_since, step, until, reason, failures, is_open, opened_at, "
            "open_until, open_reason, probe, probe_until, granted, rate_limited, waits, waited_seconds)",
            "commandbus.limits",
        ),
        ("INSERT", "commandbus.control_action"),  # its call may open the breaker of a limit
        ("INSERT, DELETE", "commandbus.parked"),  # it waits in line
        ("UPDATE (woken_at, token)", "commandbus.parked"),
        ("INSERT, UPDATE, DELETE", "commandbus.limit_client"),
        ("INSERT, UPDATE", "commandbus.limit_mode"),
        ("USAGE", "ALL SEQUENCES IN SCHEMA commandbus"),
    ],
    "worker": [
        ("SELECT", "ALL TABLES IN SCHEMA commandbus"),
        (
            "INSERT, UPDATE, DELETE",
            "commandbus.command, commandbus.attempt, commandbus.tsq, commandbus.parked, "
            "commandbus.rejected_message, commandbus.undelivered_reply, commandbus.worker, commandbus.waiting, "
            "commandbus.batch, commandbus.batch_delta, commandbus.process, commandbus.process_step, "
            "commandbus.stray_reply, commandbus.limit_client",
        ),
        ("INSERT, UPDATE", "commandbus.limits, commandbus.limit_mode"),
        ("INSERT, DELETE", "commandbus.operator_action"),  # a process cancels its steps
        ("UPDATE", "commandbus.pause"),  # FOR KEY SHARE needs it
        ("INSERT, UPDATE", "commandbus.breaker"),
        ("INSERT, DELETE", "commandbus.control_action"),
        ("USAGE", "ALL SEQUENCES IN SCHEMA commandbus"),
    ],
    "operator": [
        ("SELECT", "ALL TABLES IN SCHEMA commandbus"),
        (
            "INSERT, UPDATE, DELETE",
            "commandbus.command, commandbus.batch, commandbus.batch_delta, commandbus.process, "
            "commandbus.process_step",
        ),
        ("UPDATE, DELETE", "commandbus.tsq"),
        ("UPDATE (give_up_at)", "commandbus.parked"),
        ("INSERT, UPDATE", "commandbus.breaker"),
        ("INSERT, UPDATE, DELETE", "commandbus.limits"),
        ("INSERT, DELETE", "commandbus.control_action"),
        ("INSERT, DELETE", "commandbus.pause, commandbus.operator_action, commandbus.undelivered_reply"),
        (
            "DELETE",
            "commandbus.attempt, commandbus.parked, commandbus.rejected_message, commandbus.worker, "
            "commandbus.stray_reply",
        ),
        ("USAGE", "ALL SEQUENCES IN SCHEMA commandbus"),
    ],
}
_QUEUE = {
    "reader": "SELECT",
    "producer": "SELECT, INSERT",
    "worker": "SELECT, INSERT, UPDATE, DELETE",
    "operator": "SELECT, INSERT, UPDATE, DELETE",
}
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,40}\Z")


def role_names(prefix: str) -> dict[str, str]:
    """Kind → role name, such as `commandbus_worker`."""
    if not isinstance(prefix, str) or not _NAME.match(prefix):
        raise InvalidCommandError(
            f"role prefix {prefix!r} is not valid: use lower-case letters, digits and underscores, at most 41"
        )
    return {kind: f"{prefix}_{kind}" for kind in KINDS}


def create_statements(prefix: str) -> list[str]:
    """CREATE ROLE for those that do not exist yet; they cannot log in: grant them to users that can."""
    return [
        f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') "
        f"THEN CREATE ROLE {name} NOLOGIN; END IF; END $$"
        for name in role_names(prefix).values()
    ]


def grant_statements(prefix: str) -> list[str]:
    """What each role may do with the tables, and a note of their names so that new queues are granted to them."""
    statements = []
    for kind, name in role_names(prefix).items():
        statements.append(f"GRANT USAGE ON SCHEMA commandbus, pgmq TO {name}")
        statements += [f"GRANT {what} ON {where} TO {name}" for what, where in _TABLES[kind]]
        statements.append(f"GRANT SELECT ON pgmq.meta TO {name}")
        statements.append(
            f"INSERT INTO commandbus.setting (name, value) VALUES ('role.{kind}', '{name}') "
            f"ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        )
    return statements


def queue_grants(kind: str, role: str, queue: str) -> list[str]:
    """What a role may do with one queue."""
    if kind not in _QUEUE or not _NAME.match(role.removesuffix(f"_{kind}")):
        raise InvalidCommandError(f"commandbus.setting names a strange role {role!r} for {kind!r}")
    grants = [f"GRANT {_QUEUE[kind]} ON pgmq.q_{queue} TO {role}"]
    if kind != "reader":
        grants.append(f"GRANT USAGE ON SEQUENCE pgmq.q_{queue}_msg_id_seq TO {role}")
    if kind in ("reader", "worker", "operator"):
        also = ", UPDATE, DELETE" if kind != "reader" else ""  # pruning locks what it removes
        grants.append(f"GRANT SELECT{also} ON pgmq.a_{queue} TO {role}")
    return grants
