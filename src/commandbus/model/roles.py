"""The least-privilege roles, as SQL. docs/roles.md says what each may do, and what roles do not separate.

reader: looks. producer: sends, starts and signals processes, makes batches, and asks what became of what it can
name; it lists and reads nothing of others. limiter: for applications that use `bus.limit`; a producer does not
have it, because who takes part in a limit can hold up the others. worker: claims, settles, declares limits and
schedules, and all that a producer may, because handlers send. operator: the troubleshooting queue, cancel, pause,
prune, limits, breakers, schedules, batches and processes (to send again what failed is to send). None of them owns
anything or is a superuser; queues are created by the role that migrated.

Hot statements run on plain grants, by column where a whole table would be too much. What needs more goes through
the functions of `sql/migrations/0001_schema.sql`: nobody but they can delete what happened.

A tenant's roles have some domains only. Their grants on queues are of those domains; on the tables that all
domains share, row security holds them to their rows. It is switched on when the first tenant's roles are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from commandbus.errors import InvalidCommandError
from commandbus.model.names import check_domain, check_queue, queue_of
from commandbus.quick_dataclass import dataclass

KINDS = ("reader", "producer", "limiter", "worker", "operator")
TENANT_KINDS = ("reader", "producer", "worker", "operator")

_SHARED = ("domain", "setting", "migration")
_TABLES = (
    "command", "attempt", "tsq", "operator_action", "parked", "pause", "rejected_message", "undelivered_reply",
    "worker", "waiting", "batch", "batch_delta", "process", "process_step", "stray_reply", "limits", "breaker",
    "control_action", "limit_backoff", "limit_client", "limit_mode", "audit_event", "schedule",
    "schedule_declaration",
    "unique_key", "key_limit", "key_override", "keyed", "type_rule", "effect",
    "checkpoint", "watch", "worker_slots", "worker_request", "minute_figure", "plan", "plan_command", *_SHARED,
)  # fmt: skip

_SENT = (
    "domain, command_id, command_type, msg_id, max_attempts, correlation_id, reply_to, headers, data, timeout, "
    "expires_at, on_exhausted, priority, due_at"
)
_SENDING = (
    "compare_commands(text, json)",
    "send_unique(text, text, text, double precision, text, double precision, text, json)",
    "send_keyed(text, json)",
    "outcomes(text[], text[])",
    "lock_batch(text, text, text)",
    "compare_batch(text, text, text)",
    "send_to_batch(text, bigint, json, boolean, boolean)",
    "fill_batch(bigint, bigint, text)",
    "close_batch(text, bigint, text, text)",
    "start_processes(text, text, bigint, json, boolean)",
    "compare_processes(text, text, bigint, json)",
    "signal_process(text, text, text, json)",
)
_NAMED = (
    "batch_named(text, text, bigint)",
    "running_in_batch(text, bigint)",
    "batch_waits(text, bigint, integer)",
)
_WATCHING = ("watch_slots(double precision)", "request_stack(text, text)")
_READING = (
    *_WATCHING,
    "key_places(text, text, text)",
    "audit_trail(text, text)",
    "unhandled_types(text[], integer)",
    "outcomes(text[], text[])",
    *_NAMED,
)
_PRUNING = (
    "prune_commands(bigint, integer, bigint, double precision)",
    "prune_batches(bigint, integer, double precision)",
    "prune_processes(bigint, integer, double precision)",
    "prune_set_aside(double precision, integer)",
    "prune_keys(text, text, integer)",
    "prune_plans(double precision, integer)",
)
_LOGGING = ("log_events(text, text[], text[], text[])",)

_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "reader": _READING,
    "producer": (*_SENDING, *_NAMED),
    "limiter": (),
    "worker": (*_SENDING, *_READING, *_PRUNING, *_LOGGING, "forget_timers(bigint[])", "key_of(text, json, json)"),
    "operator": (
        *_SENDING,
        *_READING,
        *_PRUNING,
        *_LOGGING,
        "forget_timers(bigint[])",
        "request_of_operator(text, text, double precision, text, text)",
    ),
}

_PRODUCER = [
    ("SELECT", _SHARED),
    (f"INSERT ({_SENT})", ("command",)),
    ("SELECT (id, msg_id)", ("command",)),  # what a send returns: numbers that give access to nothing else
    ("SELECT (domain, expires_at)", ("waiting",)),
    ("SELECT (domain, command_type)", ("type_rule",)),  # a send asks whether its type has a rule
    ("SELECT (domain, command_type, state, is_forced, until, reason)", ("breaker",)),  # a send may be refused
    (
        "INSERT (domain, batch_id, name, holds, is_open, custom_data, on_complete, completes_early, on_exhausted, "
        "priority)",
        ("batch",),
    ),
    ("SELECT (id)", ("batch",)),
]
_LIMITER = [
    ("SELECT", _SHARED),
    ("SELECT", ("limits", "parked", "pause", "worker", "limit_client", "limit_mode")),
    ("SELECT (id, domain, command_id, msg_id)", ("command",)),  # to name the command whose turn it is
    (  # the state of limits, not what they allow, and not what a person has decided
        "UPDATE (holders, tat, flow, flow_at, flow_since, step, until, reason, failures, breaker_open, opened_at, "
        "open_until, open_reason, probe, probe_until, granted, rate_limited, waits, waited_seconds, blamed, vain, "
        "good_at, tended_at, tended_since)",
        ("limits",),
    ),
    ("INSERT", ("control_action",)),  # its call may open the breaker of a limit
    ("SELECT, INSERT, DELETE", ("limit_backoff",)),
    ("INSERT, DELETE", ("parked",)),  # it waits in line
    ("UPDATE (woken_at, token)", ("parked",)),
    ("INSERT, UPDATE, DELETE", ("limit_client",)),
    ("INSERT, UPDATE", ("limit_mode",)),
]
_ASIDES = ("rejected_message", "undelivered_reply", "stray_reply")
_WORKER = [
    ("SELECT", _TABLES),
    ("INSERT, UPDATE", ("command", "batch", "process", "process_step", "worker", "breaker")),
    (  # history stays: only the prune functions remove it
        "INSERT",
        ("attempt", "operator_action", "control_action"),
    ),
    ("UPDATE (retry_at)", ("attempt",)),  # when a parked one was let go
    # What was set aside is dropped when there is too much of it (sql/commands/prune_excess.sql).
    ("INSERT, DELETE", ("batch_delta", *_ASIDES)),
    ("UPDATE (id)", _ASIDES),  # to lock a row before it is dropped; nobody can choose an id
    ("INSERT, UPDATE, DELETE", ("tsq", "parked", "waiting", "limit_client", "schedule", "schedule_declaration")),
    ("INSERT, UPDATE", ("limits", "limit_mode")),
    ("INSERT, DELETE", ("limit_backoff",)),
    ("INSERT, UPDATE, DELETE", ("keyed", "type_rule")),
    ("INSERT, UPDATE", ("key_limit",)),
    ("DELETE", ("key_override",)),  # those that are over
    ("INSERT, UPDATE", ("effect", "checkpoint", "worker_slots")),
    ("INSERT, UPDATE, DELETE", ("minute_figure",)),
    ("UPDATE (answered_at, answer)", ("worker_request",)),
    ("UPDATE", ("pause",)),  # FOR KEY SHARE needs it
    ("UPDATE", ("plan", "plan_command")),  # it carries plans out
]
_OPERATOR = [
    ("SELECT", _TABLES),
    ("INSERT, UPDATE", ("command", "batch", "process", "process_step", "breaker")),
    ("INSERT, DELETE", ("batch_delta", "pause")),
    ("INSERT", ("operator_action", "control_action", "undelivered_reply")),
    ("DELETE", _ASIDES),  # a prune by the settings drops what is too much
    ("UPDATE (id)", _ASIDES),
    ("UPDATE, DELETE", ("tsq",)),
    ("UPDATE (retry_at)", ("attempt",)),  # a resume lets parked commands go
    ("UPDATE (state, receipt, note, ended_at)", ("effect",)),
    ("DELETE", ("parked",)),
    ("UPDATE (since)", ("parked",)),  # another priority is another place in a limit's line
    ("INSERT, UPDATE, DELETE", ("schedule",)),
    ("UPDATE", ("keyed",)),
    ("INSERT, UPDATE, DELETE", ("key_limit", "key_override")),
    ("INSERT, UPDATE, DELETE", ("limits",)),
    ("INSERT, UPDATE", ("plan",)),
    ("INSERT", ("plan_command",)),
]
_GRANTS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "reader": [("SELECT", (*_TABLES, "audit"))],
    "producer": _PRODUCER,
    "limiter": _LIMITER,
    "worker": [*_WORKER, ("SELECT", ("audit",))],
    "operator": [*_OPERATOR, ("SELECT", ("audit",))],
}
# A view reads with its owner's rights and ignores row security, so tenants get none. Limits belong to all tenants.
_TENANT_GRANTS: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "reader": [("SELECT", _TABLES)],
    "producer": _PRODUCER,
    "worker": _WORKER,
    "operator": [grant for grant in _OPERATOR if grant[1] != ("limits",)],
}

_QUEUE = {
    "reader": ("SELECT",),
    "producer": ("INSERT (msg_id, vt, message, headers)", "SELECT (msg_id, vt)"),  # headers: pgmq.send names them
    "limiter": (),
    "worker": ("SELECT, INSERT, UPDATE, DELETE",),
    "operator": ("SELECT, INSERT, UPDATE, DELETE",),
}
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,40}\Z")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Roles that have these domains only, and may reply to these queues."""

    prefix: str
    domains: tuple[str, ...]
    queues: tuple[str, ...] = ()

    @classmethod
    def make(cls, prefix: str, domains: Sequence[str], queues: Sequence[str] = ()) -> Tenant:
        """A tenant whose names were checked."""
        role_names(prefix)
        if not domains:
            raise InvalidCommandError(f"the roles {prefix}_… of a tenant need at least one domain")
        return cls(
            prefix,
            tuple(sorted({check_domain(domain) for domain in domains})),
            tuple(sorted({check_queue(queue, what="queue") for queue in queues})),
        )

    @classmethod
    def from_setting(cls, name: str, value: str) -> Tenant:
        """A tenant as `commandbus.setting` has it."""
        found = json.loads(value)
        return cls.make(name.removeprefix("tenant."), found["domains"], found["queues"])

    def all_queues(self) -> list[str]:
        """The domains' queues, and those for replies."""
        return [*(queue_of(domain) for domain in self.domains), *self.queues]


def role_names(prefix: str, kinds: Sequence[str] = KINDS) -> dict[str, str]:
    """Kind → role name, such as `commandbus_worker`."""
    if not isinstance(prefix, str) or not _NAME.match(prefix):
        raise InvalidCommandError(
            f"role prefix {prefix!r} is not valid: use lower-case letters, digits and underscores, at most 41"
        )
    return {kind: f"{prefix}_{kind}" for kind in kinds}


def create_statements(prefix: str, kinds: Sequence[str] = KINDS) -> list[str]:
    """CREATE ROLE for those that do not exist yet; they cannot log in: grant them to users that can. Roles belong
    to the whole server, so somebody may make the same ones for another database at the same moment."""
    return [
        f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = '{name}') "
        f"THEN CREATE ROLE {name} NOLOGIN; END IF; EXCEPTION WHEN duplicate_object OR unique_violation THEN END $$"
        for name in role_names(prefix, kinds).values()
    ]


def grant_statements(prefix: str) -> list[str]:
    """What each role may do with the tables, and a note of their names so that new queues are granted to them."""
    statements = []
    for kind, name in role_names(prefix).items():
        statements += _grants(kind, name, _GRANTS[kind])
        statements.append(_note(f"role.{kind}", name))
    return statements


def tenant_statements(tenant: Tenant) -> list[str]:
    """What a tenant's roles may do, held to their domains by row security; and a note of it."""
    statements = ["SET LOCAL lock_timeout = '5s'"]  # a change of row security must not hold up the others
    for kind, name in role_names(tenant.prefix, TENANT_KINDS).items():
        statements += _grants(kind, name, _TENANT_GRANTS[kind])
        for queue in tenant.all_queues():
            statements += queue_grants(kind, name, queue)
    statements += _policies(tenant)
    known = json.dumps({"domains": tenant.domains, "queues": tenant.queues})
    statements.append(_note(f"tenant.{tenant.prefix}", known))
    return statements


def revoke_statements(tenant: Tenant, queue: str) -> list[str]:
    """A queue that is a tenant's no more."""
    names = ", ".join(role_names(tenant.prefix, TENANT_KINDS).values())
    return [
        f"REVOKE ALL ON pgmq.q_{queue}, pgmq.a_{queue} FROM {names}",
        f"REVOKE ALL ON SEQUENCE pgmq.q_{queue}_msg_id_seq FROM {names}",
    ]


def keep_statement(seconds: float) -> str:
    """For so long nothing that has finished can be pruned, by whomever."""
    return _note("keep_seconds", f"{seconds:g}")


def queue_grants(kind: str, role: str, queue: str) -> list[str]:
    """What a role may do with one queue."""
    if kind not in _QUEUE or not _NAME.match(role.removesuffix(f"_{kind}")):
        raise InvalidCommandError(f"commandbus.setting names a strange role {role!r} for {kind!r}")
    revoke = f"REVOKE ALL ON pgmq.q_{queue} FROM {role}"  # an earlier release may have granted more
    grants = [revoke] + [f"GRANT {what} ON pgmq.q_{queue} TO {role}" for what in _QUEUE[kind]]
    if kind not in ("reader", "limiter"):
        grants.append(f"GRANT USAGE ON SEQUENCE pgmq.q_{queue}_msg_id_seq TO {role}")
    if kind in ("reader", "worker", "operator"):
        also = ", UPDATE, DELETE" if kind != "reader" else ""  # pruning locks what it removes
        grants.append(f"GRANT SELECT{also} ON pgmq.a_{queue} TO {role}")
    return grants


def _grants(kind: str, role: str, grants: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
    statements = [
        f"GRANT USAGE ON SCHEMA commandbus, pgmq TO {role}",
        f"REVOKE ALL ON ALL TABLES IN SCHEMA commandbus FROM {role}",  # an earlier release may have granted more
    ]
    for what, tables in grants:
        statements.append(f"GRANT {what} ON {', '.join(f'commandbus.{table}' for table in tables)} TO {role}")
    statements += [f"GRANT EXECUTE ON FUNCTION commandbus.{name} TO {role}" for name in _FUNCTIONS[kind]]
    statements.append(f"GRANT SELECT ON pgmq.meta TO {role}")
    return statements


def _note(name: str, value: str) -> str:
    return (
        f"INSERT INTO commandbus.setting (name, value) VALUES ('{name}', '{value}') "
        f"ON CONFLICT (name) DO UPDATE SET value = excluded.value"
    )


# --- row security -----------------------------------------------------------------------------------------------

_BY_DOMAIN = (
    "command",
    "tsq",
    "rejected_message",
    "waiting",
    "batch",
    "process",
    "stray_reply",
    "breaker",
    "pause",
    "schedule",
    "schedule_declaration",
    "unique_key",
    "key_limit",
    "key_override",
    "keyed",
    "type_rule",
    "minute_figure",
    "worker_request",
    "plan",
)
_BY_COMMAND = ("attempt", "operator_action", "audit_event", "effect", "checkpoint")


def _policies(tenant: Tenant) -> list[str]:
    """One restrictive policy per table, for the tenant's roles; everybody else passes by a policy that is always
    true, which the planner leaves out. Of tables without a domain the row that they belong to decides."""
    roles = ", ".join(role_names(tenant.prefix, TENANT_KINDS).values())
    statements = []
    for table, condition in _conditions(tenant).items():
        action, check = ("SELECT", "") if table == "undelivered_reply" else ("ALL", f" WITH CHECK ({condition})")
        statements += [
            f"ALTER TABLE commandbus.{table} ENABLE ROW LEVEL SECURITY",
            f"DROP POLICY IF EXISTS everybody ON commandbus.{table}",
            f"CREATE POLICY everybody ON commandbus.{table} USING (true) WITH CHECK (true)",
            f"DROP POLICY IF EXISTS tenant_{tenant.prefix} ON commandbus.{table}",
            f"CREATE POLICY tenant_{tenant.prefix} ON commandbus.{table} AS RESTRICTIVE FOR {action} TO {roles} "
            f"USING ({condition}){check}",
        ]
    return statements


def _conditions(tenant: Tenant) -> dict[str, str]:
    mine = _any_of("domain", tenant.domains)
    listed = _array(tenant.domains)
    conditions = dict.fromkeys(_BY_DOMAIN, mine)
    for table in _BY_COMMAND:
        conditions[table] = "EXISTS (SELECT FROM commandbus.command c WHERE c.id = command)"
    conditions |= {
        "domain": _any_of("name", tenant.domains),
        "parked": f"{mine} OR domain = ''",  # '': callers inside programs; all tenants share a limit
        "worker": f"domains <@ {listed}",
        "worker_slots": f"domains <@ {listed}",
        "batch_delta": "EXISTS (SELECT FROM commandbus.batch b WHERE b.id = batch)",
        "process_step": "EXISTS (SELECT FROM commandbus.process p WHERE p.id = process)",
        "plan_command": "EXISTS (SELECT FROM commandbus.plan p WHERE p.id = plan)",
        "undelivered_reply": _any_of("queue", tenant.all_queues()),
        "control_action": f"pg_catalog.strpos(subject, '/') = 0 OR pg_catalog.split_part("
        f"pg_catalog.split_part(subject, ' ', 2), '/', 1) = ANY ({listed})",
    }
    return conditions


def _any_of(column: str, names: Sequence[str]) -> str:
    """The usual tenant has one domain: an equality is cheaper than a list."""
    if len(names) == 1:
        return f"{column} = '{names[0]}'"
    return f"{column} = ANY ({_array(names)})"


def _array(names: Sequence[str]) -> str:
    return "ARRAY[" + ", ".join(f"'{name}'" for name in names) + "]"
