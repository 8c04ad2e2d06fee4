"""What workers declare when they start: key limits, and which command types use them.

The last worker to start wins, and what changes is logged. A person's change of a key limit holds until a worker
declares something else than the last one did.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from commandbus import sql
from commandbus.flow.keys.exist import CHANNEL
from commandbus.flow.operation import Statement, Steps, operation
from commandbus.model.key_limit import KeyLimit, KeyRule


@operation(atomic=True)
def declare_keys(limits: Sequence[KeyLimit], rules: Mapping[tuple[str, str], KeyRule | None]) -> Steps[list[str]]:
    """Store key limits, and the rules of command types (None: it has none). Returns lines for the log."""
    notes = []
    for limit in sorted(limits, key=lambda item: (item.domain, item.name)):
        notes += yield from _declare(limit)
    changed = yield from _store_rules(rules)
    for domain in sorted({limit.domain for limit in limits}):
        yield tell(domain)
    return notes + changed


def _declare(limit: KeyLimit) -> Steps[list[str]]:
    declared = _text(limit)
    rows = yield Statement(
        b"SELECT declared FROM commandbus.key_limit WHERE domain = %(domain)s AND name = %(name)s FOR UPDATE",
        {"domain": limit.domain, "name": limit.name},
    )
    before = rows[0][0] if rows else None
    if before == declared:
        return []
    yield set_statement(limit, declared=declared)
    if before is None:
        return []
    return [
        f"limit {limit.name} of domain {limit.domain} was declared differently before: {before}, now {declared}"
    ]


def _store_rules(rules: Mapping[tuple[str, str], KeyRule | None]) -> Steps[list[str]]:
    """Types without a rule usually have no row, and nothing is written for them."""
    rows = yield Statement(sql.text("keys/rules"), _addresses(rules))
    stored = {(domain, command_type): KeyRule(*rest) for domain, command_type, *rest in rows}
    changed = {address: rule for address, rule in rules.items() if stored.get(address) != rule}
    if not changed:
        return []
    yield Statement(
        sql.text("keys/store_rules"),
        _addresses(changed)
        | {
            "limits": [None if rule is None else rule.key_limit for rule in changed.values()],
            "paths": [None if rule is None else rule.key_path for rule in changed.values()],
        },
    )
    return [
        f"command type {domain}/{command_type} was declared differently before: "
        f"{_shown(stored[domain, command_type])}, now {_shown(rule)}"
        for (domain, command_type), rule in changed.items()
        if (domain, command_type) in stored
    ]


def _addresses(rules: Mapping[tuple[str, str], KeyRule | None]) -> dict[str, list[str]]:
    return {"domains": [domain for domain, _ in rules], "types": [command_type for _, command_type in rules]}


def _shown(rule: KeyRule | None) -> str:
    return "no limit with a key" if rule is None else f"limit {rule.key_limit} of {rule.key_path}"


def _text(limit: KeyLimit) -> str:
    return json.dumps({"concurrency": limit.concurrency, "ordered": limit.ordered, "on_failure": limit.on_failure})


def set_statement(limit: KeyLimit, *, declared: str | None = None) -> Statement:
    """Store a key limit; `declared` is what a worker declares, and stays as it was if a person sets it."""
    values = {
        "domain": limit.domain,
        "name": limit.name,
        "concurrency": limit.concurrency,
        "ordered": limit.ordered,
        "aside": limit.on_failure == "step_aside",
        "declared": declared,
    }
    return Statement(sql.text("keys/set"), values)


def tell(domain: str) -> Statement:
    """Let workers look whether this domain has key limits."""
    return Statement(
        b"SELECT pg_catalog.pg_notify(%(channel)s, %(domain)s)", {"channel": CHANNEL, "domain": domain}
    )
