"""The fleet and its work: dead workers, domains that nobody serves, and commands that need a person."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from commandbus.cli.doctor.findings import Conn, Findings, ok, warn
from commandbus.cli.render import age
from commandbus.cli.status import unhandled_text
from commandbus.db.drivers import run
from commandbus.flow.commands.inspect import DomainStatus, WorkerInfo, domain_status, list_workers
from commandbus.flow.commands.prune import ASIDES
from commandbus.model.counting import counted
from commandbus.settings import Settings
from commandbus.shell_words import quoted

TAKEN_WITHIN = timedelta(minutes=1)


def examine(conn: Conn, settings: Settings) -> Findings:
    """Workers first, then waiting commands."""
    workers = run(conn, list_workers())
    yield from _workers(workers)
    domains = run(conn, domain_status())
    yield from _unserved(domains, [worker for worker in workers if worker.is_alive])
    yield from _unhandled(domains)
    yield from _waiting(domains)
    yield from _undelivered(conn)
    yield from _full(conn, settings)


def _workers(workers: list[WorkerInfo]) -> Findings:
    alive = [worker for worker in workers if worker.is_alive]
    dead = [worker for worker in workers if not worker.is_alive and worker.state != "STOPPED"]
    for worker in dead:
        yield warn(
            "workers",
            f"worker {worker.id} on {worker.host} has been silent for {age(worker.heartbeat_age_seconds)}",
            "it died or lost the database; what it held is taken over when its leases run out, and its row is "
            "forgotten after a day",
        )
    if not dead:
        ages = [worker.heartbeat_age_seconds for worker in alive]
        heard = f", heard from within the last {age(max(ages))}" if ages else ""
        yield ok("workers", f"{counted(len(alive), 'worker')} alive{heard}")


def _unserved(domains: list[DomainStatus], alive: list[WorkerInfo]) -> Findings:
    served = {domain for worker in alive for domain in worker.domains}
    for item in domains:
        if item.ready and item.domain not in served and not item.is_paused:
            yield warn(
                "workers",
                f"{counted(item.ready, 'command')} of domain {item.domain} can run, but no worker serves it",
                f"`commandbus worker MODULE:REGISTRY --domain {quoted(item.domain)}` runs one",
            )


def _unhandled(domains: list[DomainStatus]) -> Findings:
    """Commands that are parked because the workers that claimed them have no handler for them."""
    for item in domains:
        for kind in item.unhandled:
            if not kind.workers:
                remedy = f"start workers whose registry has a handler for {kind.name}, or cancel these commands"
            elif datetime.now(UTC) - kind.since > TAKEN_WITHIN:
                remedy = (
                    "these workers have no free slot for it: start more, and end those that do not know the type"
                )
            else:
                continue  # one of these workers will take the commands soon
            yield warn("command types", unhandled_text(kind), remedy)


def _waiting(domains: list[DomainStatus]) -> Findings:
    in_tsq = {item.domain: item.in_tsq for item in domains if item.in_tsq}
    if in_tsq:
        total = sum(in_tsq.values())
        by_domain = ", ".join(f"{count} of {domain}" for domain, count in in_tsq.items())
        yield warn(
            "troubleshooting queue",
            f"{counted(total, 'command')} {'waits' if total == 1 else 'wait'}: {by_domain}",
            "`commandbus tsq list`",
        )
    else:
        yield ok("troubleshooting queue", "nobody needs a person")
    for item in domains:
        if item.rejected:
            yield warn(
                "rejected messages",
                f"{counted(item.rejected, 'message')} to domain {item.domain} "
                f"{'was no command' if item.rejected == 1 else 'were no commands'}",
                "`commandbus rejected` says why; a client sends messages that are not commands",
            )
        if item.is_paused or item.paused_types:
            yield warn("pauses", _paused(item), "`commandbus pauses` says who paused it and why")


def _paused(item: DomainStatus) -> str:
    if item.is_paused:
        return f"domain {item.domain} is paused"
    names = ", ".join(item.paused_types)
    if len(item.paused_types) == 1:
        return f"command type {names} of domain {item.domain} is paused"
    return f"command types {names} of domain {item.domain} are paused"


def _full(conn: Conn, settings: Settings) -> Findings:
    """Tables of things set aside that are full, so that their oldest rows are dropped."""
    for table, kind in ASIDES.items():
        row = conn.execute(
            f"SELECT pg_catalog.max(id) - pg_catalog.min(id) + 1::bigint, "
            f"pg_catalog.pg_table_size('commandbus.{table}') FROM commandbus.{table}".encode()
        ).fetchone()
        count, size = row or (None, 0)
        if count and (count >= settings.retention_asides_count or size >= settings.retention_asides_bytes):
            yield warn(
                kind,
                f"{count} are kept, {size >> 20} MiB: as many as retention.asides_count and asides_bytes allow; "
                f"the oldest are dropped",
                "find out who sends them; raise these settings if all are to be kept",
            )


def _undelivered(conn: Conn) -> Findings:
    row = conn.execute(
        b"SELECT pg_catalog.count(*), pg_catalog.min(queue) FROM commandbus.undelivered_reply"
    ).fetchone()
    if row is not None and row[0]:
        yield warn(
            "replies",
            f"not delivered: {row[0]}, the first to queue {row[1]}",
            "`commandbus queue create NAME` makes the queue; `commandbus undelivered` shows the replies",
        )  # fmt: skip
