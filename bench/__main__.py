"""The run: rounds in which floors and bus alternate, medians, ratios of each round, and the count at the end."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import psycopg
from psycopg.rows import dict_row

from bench import (
    burst,
    chunks,
    console,
    console_drain,
    cpu,
    fleet,
    floors,
    installed,
    keys,
    limits,
    peers,
    plot,
    sends,
    startup,
    unpark,
)
from bench.fleet import Member, drain
from bench.ground import DATA, Ground, ground
from commandbus import CommandBus, Worker

WANTED = [  # figure, floor, least ratio
    ("installed_one_per_s", "floor_overlapped_per_s", 0.75),
    ("installed_two_per_s", "installed_one_per_s", 1.10),
    ("drain_sync_per_s", "floor_overlapped_per_s", 0.75),
    ("drain_sync_per_s", "floor_serial_per_s", 1.20),
    ("drain_sync_per_s", "drain_no_deadline_per_s", 0.95),
    ("drain_supervised_per_s", "drain_no_deadline_per_s", 0.95),
    ("drain_batch_per_s", "drain_no_batch_per_s", 0.90),
    ("drain_beside_parked_per_s", "drain_sync_per_s", 0.95),
    ("drain_beside_console_per_s", "drain_without_console_per_s", 0.97),
    ("drain_chunk_insert_per_s", "drain_sync_insert_per_s", 2.0),
    ("drain_async_chunk_insert_per_s", "drain_async_insert_per_s", 2.0),
    ("limit_postgres_pairs_per_s", "floor_postgres_pairs_per_s", 0.70),
    ("limit_redis_pairs_per_s", "floor_redis_pairs_per_s", 0.70),
    ("drain_long_transaction_per_s", "drain_sync_per_s", 0.95),
    ("drain_delayed_per_s", "drain_without_delayed_per_s", 0.95),
    ("drain_history_per_s", "drain_without_history_per_s", 0.95),
    ("burst_after_idle_fresh_per_s", "burst_filled_fresh_per_s", 0.80),
    ("burst_after_idle_steady_per_s", "burst_filled_steady_per_s", 0.80),
    ("send_one_per_s", "floor_insert_per_s", 0.85),
    ("send_one_8_per_s", "floor_insert_8_per_s", 0.85),
]
PARITY = [  # kind of handler, sync figure, async figure: each within 10% of the other
    ("no-op", "drain_sync_per_s", "drain_async_per_s"),
    ("waits 1 ms", "drain_sync_1ms_per_s", "drain_async_1ms_per_s"),
    ("one INSERT in ctx.transaction()", "drain_sync_insert_per_s", "drain_async_insert_per_s"),
]
BOUNDS = [  # figure, least or most, which of the two
    ("send_many_per_s", 45_000.0, "at least"),
    ("pickup_p50_ms", 3.0, "at most"),
    ("pickup_p99_ms", 10.0, "at most"),
    ("import_bus_above_driver_ms", 80.0, "at most"),
    ("cli_version_ms", 200.0, "at most"),
    ("cli_help_ms", 200.0, "at most"),
    ("supervisor_and_worker_mb", 75.0, "at most"),
    ("idle_percent_of_two", 1.0, "at most"),
]


class Run:
    """One benchmark run."""

    def __init__(self, base: Ground, *, quick: bool) -> None:
        self.base = base
        self.quick = quick
        self.count = 10_000 if quick else 40_000
        self.rounds = 3 if quick else 5
        self.figures: dict[str, list[float]] = defaultdict(list)
        self.members: dict[str, list[Member]] = {}
        self.domains: set[str] = set()  # those of the members, of the ended ones, too

    def note(self, name: str, value: float) -> None:
        self.figures[name].append(value)
        print(f"  {name:32s} {value:12.2f}", file=sys.stderr, flush=True)

    def worker_processes(self, domain: str, kind: str, size: int = 1) -> list[Member]:
        """The worker processes of a domain; started once, idle between rounds."""
        if domain not in self.members:
            if domain not in self.domains:
                self.domains.add(self.base.domain(domain))
            self.members[domain] = [Member(self.base, domain, kind) for _ in range(size)]
        return self.members[domain]

    def drain(
        self,
        figure: str,
        domain: str,
        kind: str,
        *,
        size: int = 1,
        count: int | None = None,
        in_batch: bool = False,
    ) -> None:
        count = count or self.count
        worker_processes = self.worker_processes(domain, kind, size)
        self.base.fill(domain, count, in_batch=in_batch)
        self.note(figure, drain(self.base, domain, worker_processes, count))

    def floor(self, figure: str, measure: Callable[[Ground, str, int], float]) -> None:
        if "floor" not in self.base.sent:
            self.base.bus.create_domain("floor")
        self.base.fill("floor", self.count)
        self.note(figure, measure(self.base, "floor", self.count))

    def everything(self) -> None:
        for number in range(self.rounds):
            print(f"round {number + 1} of {self.rounds}", file=sys.stderr)
            began = time.perf_counter()
            self.round()
            self.clear()
            print(f"round {number + 1} took {time.perf_counter() - began:.0f} s", file=sys.stderr)
        self.bursts(1 if self.quick else 3)
        self.once()
        if not self.quick:
            self.heavy()

    def parity(self, rounds: int) -> None:
        """Sync and async handlers of each kind, in turn."""
        few = self.count // 4
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for kind, count in (("", self.count), ("_1ms", few), ("_insert", few // 2)):
                for lane in ("sync", "async") if number % 2 else ("async", "sync"):
                    self.drain(f"drain_{lane}{kind}_per_s", f"{lane}{kind}", f"{lane}{kind}", count=count)

    def round(self) -> None:
        few = self.count // 4
        self.floor("floor_serial_per_s", floors.serial)
        self.drain("drain_sync_per_s", "sync", "sync")
        self.drain("drain_no_deadline_per_s", "no_deadline", "no_deadline")
        self.drain("drain_supervised_per_s", "supervised", "supervised")
        self.drain("drain_async_per_s", "async", "async")
        self.drain("drain_no_batch_per_s", "one_batch", "sync")
        self.drain("drain_batch_per_s", "one_batch", "sync", in_batch=True)
        self.drain("drain_two_workers_per_s", "two", "sync", size=2)
        self.beside_parked()
        with psycopg.connect(self.base.url) as holder:
            holder.execute("SELECT txid_current()")  # an open transaction with a snapshot that keeps the dead
            self.drain("drain_long_transaction_per_s", "long", "sync")
        self.drain("drain_sync_1ms_per_s", "sync_1ms", "sync_1ms", count=few)
        self.drain("drain_async_1ms_per_s", "async_1ms", "async_1ms", count=few)
        self.drain("drain_sync_insert_per_s", "sync_insert", "sync_insert", count=few // 2)
        self.drain("drain_async_insert_per_s", "async_insert", "async_insert", count=few // 2)
        self.floor("floor_overlapped_per_s", floors.overlapped)
        self.as_installed()
        self.sends()

    def as_installed(self) -> None:
        """`commandbus worker`, once and twice, after a warm-up as in the comparison with peers."""
        for domain, size, figure in (("one", 1, "installed_one_per_s"), ("twice", 2, "installed_two_per_s")):
            if domain not in self.base.sent:
                self.base.domain(domain)
            with installed.fleet(self.base, domain, size) as processes:
                installed.drain(self.base, domain, installed.WARM_UP * size)
                self.note(figure, installed.drain(self.base, domain, self.count))
                if size == 1:
                    self.note("supervisor_and_worker_mb", installed.needed(processes[0]))
                    self.note("supervisor_and_worker_rss_mb", installed.resident(processes[0]))
                elif "idle_percent_of_two" not in self.figures:
                    seconds = 10.0 if self.quick else 30.0
                    self.note("idle_percent_of_two", 100 * installed.idle_share(processes, seconds))

    def beside_parked(self) -> None:
        """Work of a domain in which 10,000 commands wait for a limit."""
        if "parked" not in self.members:
            limits.fill_limit(self.base)
            self.worker_processes("parked", "parked")
            limits.park(self.base, "parked")
        self.drain("drain_beside_parked_per_s", "parked", "parked")
        for name, value in limits.measure(self.base, 500 if self.quick else 2000).items():
            self.note(name, value)

    def sends(self) -> None:
        """The bulk first: after the checkpoint of the last fill it takes the full-page images of the pages that
        have room, and what follows is the state between checkpoints, as the bare table always is."""
        base = self.base
        if "send" not in base.sent:
            base.domain("send")
        started = time.perf_counter()
        base.bus.send_many("send", ({"command_type": "work", "data": DATA} for _ in range(self.count)))
        self.note("send_many_per_s", self.count / (time.perf_counter() - started))
        base.sent["send"] = base.sent.get("send", 0) + self.count
        count = 1000 if self.quick else 4000
        self.note("floor_insert_per_s", floors.insert(base, 1, count))
        self.note("send_one_per_s", floors.send(base, "send", 1, count))
        self.note("floor_insert_8_per_s", floors.insert(base, 8, count * 2))
        self.note("send_one_8_per_s", floors.send(base, "send", 8, count * 2))

    def bursts(self, rounds: int) -> None:
        """A burst on an idle worker, with new tables and with many finished commands."""
        count = 20_000 if self.quick else 50_000
        for _ in range(rounds):
            for kind, history in (("fresh", 0), ("steady", burst.HISTORY)):
                idle, filled = burst.measure(self.base, count, history=history)
                self.note(f"burst_after_idle_{kind}_per_s", idle)
                self.note(f"burst_filled_{kind}_per_s", filled)

    def once(self) -> None:
        """Figures that one look gives."""
        self.note("worker_rss_mb", self.members["sync"][0].read()[2])
        self.end_members()
        times = sorted(fleet.pickup(self.base, self.base_domain("pickup", "stamp"), self.members["pickup"][0],
                                    50 if self.quick else 200))  # fmt: skip
        self.note("pickup_p50_ms", statistics.median(times))
        self.note("pickup_p99_ms", times[min(len(times) - 1, int(len(times) * 0.99))])
        self.note("connections_busy", self.connections())
        updates, hot = self.base.admin.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = 'commandbus' "
            "AND relname = 'command'"
        ).fetchone() or (0, 0)
        self.note("hot_update_share", hot / max(updates, 1))
        for name, value in self.costs().items():
            self.note(name, value)
        for name, value in startup.measure(5 if self.quick else 15).items():
            self.note(name, value)

    def end_members(self) -> None:
        """End the worker processes of all domains. Idle ones use a processor, too."""
        for members in self.members.values():
            for member in members:
                member.close()
        self.members.clear()

    def base_domain(self, domain: str, kind: str) -> str:
        self.worker_processes(domain, kind)
        return domain

    def connections(self) -> float:
        """The most connections that one worker of 8 slots holds while every handler uses one."""
        worker_processes = self.worker_processes("query", "query")
        self.base.fill("query", 2000)
        before = worker_processes[0].read()[0]
        self.base.bus.resume("query")
        most = 0
        while worker_processes[0].read()[0] - before < 2000:
            held = self.base.one(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s",
                f"commandbus %-{worker_processes[0].pid}-%",
            )
            most = max(most, held)
            time.sleep(0.01)
        self.base.bus.pause("query", operator="bench")
        return most

    def costs(self) -> dict[str, float]:
        """What one command costs the server from its send to its settlement: rows written, row versions left dead,
        commits, and bytes of WAL, of which some are images of pages after a checkpoint.

        In a database of its own, counted after all its sessions have ended: a session reports late, but then.
        """
        count = 10_000
        self.base.admin.execute("CREATE DATABASE writes")
        parts = psycopg.conninfo.conninfo_to_dict(self.base.url)
        url = psycopg.conninfo.make_conninfo(**{**parts, "dbname": "writes"})
        with CommandBus(url) as bus:
            bus.migrate(domains=["writes"])
        before = _counted(url)
        with CommandBus(url) as bus:
            bus.send_many("writes", ({"command_type": "work", "data": DATA} for _ in range(count)))
        Worker(fleet.handlers_of("sync", "writes", None), database_url=url).run(until_idle=True)
        after = _counted(url)
        return {f"{name}_per_command": (after[name] - before[name]) / count for name in after}

    def heavy(self) -> None:
        """With 100,000 delayed messages, and with a million finished commands."""
        self.end_members()  # so that no worker is warmer than the one that it is compared with
        self.worker_processes("delayed", "sync")
        self.base.fill("delayed", 100_000, delay_seconds=86400)
        for _ in range(3):
            self.drain("drain_without_delayed_per_s", "sync", "sync")
            self.drain("drain_delayed_per_s", "delayed", "sync")
        self.base.admin.execute(
            "INSERT INTO commandbus.command (domain, command_id, command_type, status, data, finished_at) "
            "SELECT 'history', 'old-' || n, 'work', 'COMPLETED', %s, now() FROM generate_series(1, 1000000) n",
            (json.dumps(DATA),),
        )
        self.base.sent["history"] = 1_000_000
        for _ in range(3):
            self.drain("drain_without_history_per_s", "sync", "sync")
            self.drain("drain_history_per_s", "history", "sync")

    def clear(self) -> None:
        """Count what was sent, and delete it. So every round finds tables of the same size: otherwise the floors
        fell by half from the first round to the last, and ratios depended on what was measured first."""
        self.count_all()
        with psycopg.connect(self.base.url, autocommit=True) as conn:
            conn.execute("SET session_replication_role = replica")  # nothing refers to these: no look for each
            conn.execute("TRUNCATE pgmq.q_send__commands")
            conn.execute("DELETE FROM commandbus.command WHERE status = 'COMPLETED' OR domain = 'send'")
            conn.execute("DROP TABLE floor_command, floor_queue")
            conn.execute("VACUUM ANALYZE commandbus.command")
        self.base.sent = dict.fromkeys(self.base.sent, 0)

    def count_all(self) -> None:
        """Nothing was lost: every command that was sent is completed or still waits where nobody works."""
        for domain, sent in self.base.sent.items():
            state = dict(self.base.admin.execute(
                "SELECT status, count(*) FROM commandbus.command WHERE domain = %s GROUP BY status", (domain,)
            ).fetchall())  # fmt: skip
            waiting = self.base.one(f"SELECT count(*) FROM pgmq.q_{domain}__commands WHERE vt <= now()")
            status, left = ("PENDING", sent) if domain == "send" else ("COMPLETED", 0)  # nobody works on "send"
            if (state.get(status, 0), waiting) != (sent, left):
                raise SystemExit(f"LOST in {domain}: sent {sent}, now {state}, {waiting} waiting")
        print(f"nothing was lost: {sum(self.base.sent.values())} commands counted", file=sys.stderr)


COUNTED = """
SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint AS row_writes,
       sum(n_tup_upd + n_tup_del)::bigint AS dead_tuples,
       (SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()) AS commits,
       pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint AS wal_bytes
  FROM pg_stat_user_tables
 WHERE relname IN ('command', 'attempt', 'tsq', 'parked', 'q_writes__commands')
"""


def _counted(url: str) -> dict[str, int]:
    with psycopg.connect(url, row_factory=dict_row) as conn:
        return conn.execute(COUNTED).fetchone() or {}


def ratio(figures: dict[str, list[float]], figure: str, other: str) -> float:
    """The median of the rounds' ratios, because the machine's speed changes between rounds. Of figures that were
    not measured in the same rounds, the ratio of their medians."""
    ours, theirs = figures[figure], figures[other]
    if len(ours) == len(theirs):
        return statistics.median(one / two for one, two in zip(ours, theirs, strict=True))
    return statistics.median(ours) / statistics.median(theirs)


def report(figures: dict[str, list[float]]) -> None:
    """The figures, and the ratios that are wanted."""
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, value in medians.items():
        print(f"{name:32s} {value:12.2f}")
    print()
    for figure, floor, least in WANTED:
        if figure in medians and floor in medians:
            found = ratio(figures, figure, floor)
            mark = "ok  " if found >= least else "LOW "
            print(f"{mark} {figure} / {floor} = {found:.2f} (wanted: {least:.2f})")
    for what, sync, asynchronous in PARITY:
        if sync in medians and asynchronous in medians:
            found = ratio(figures, sync, asynchronous)
            mark = "ok  " if 0.9 <= found <= 1 / 0.9 else "MISS"
            print(f"{mark} parity, {what}: sync / async = {found:.2f} (wanted: 0.90 to 1.11)")
    for figure, bound, kind in BOUNDS:
        if figure in medians:
            value = medians[figure]
            is_met = value >= bound if kind == "at least" else value <= bound
            print(f"{'ok  ' if is_met else 'MISS'} {figure} = {value:.2f} (wanted: {kind} {bound:g})")


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer commands and rounds: about a minute")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the medians there")
    parser.add_argument("--database", metavar="URL", help="measure on this empty database, not on an embedded one")
    parser.add_argument(
        "--binaries", metavar="FOLDER", type=Path, help="PostgreSQL's programs for the embedded one"
    )
    parser.add_argument("--bursts", action="store_true", help="only the bursts after idleness")
    parser.add_argument("--parity", action="store_true", help="only sync handlers against async ones")
    parser.add_argument("--chunks", action="store_true", help="only chunk handlers against single ones")
    parser.add_argument(
        "--console",
        metavar="N",
        type=int,
        nargs="?",
        const=0,
        help="only: each page of the console beside N commands (10000000; with --quick 300000)",
    )
    parser.add_argument("--console-drain", action="store_true", help="only: a worker beside an open console")
    parser.add_argument("--peers", metavar="NAME", nargs="*", help="compare with other job queues (these, or all)")
    parser.add_argument(
        "--unpark", metavar="N", type=int, help="only: so many parked commands go back, beside a lease of 1.5 s"
    )
    parser.add_argument(
        "--keys",
        metavar="N",
        type=int,
        nargs="?",
        const=100_000,
        help="only: limits with keys, N commands (100000)",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="only: CPU of `commandbus worker`: one and two that drain, one that is idle",
    )
    parser.add_argument("--sends", action="store_true", help="only: CPU of the client and the server for sends")
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=3,
        help="of --peers, --parity, --chunks, --bursts, --keys, --console-drain, --cpu (3), --sends (at least 7)",
    )
    parser.add_argument(
        "--plot", metavar="FILE.svg", type=Path, help="draw the figures of --from, measure nothing"
    )
    parser.add_argument("--from", metavar="FILE.json", type=Path, nargs="+", dest="source", help="files of --json")
    args = parser.parse_args()
    if args.plot is not None:
        plot.run(args.plot, args.source or parser.error("--plot needs --from FILE.json"))
        return
    if args.peers is not None:
        with ground(args.database, args.binaries) as base:
            peers.run(base, args.peers, args.rounds, args.json)
        return
    if args.unpark is not None:
        with ground(args.database, args.binaries) as base:
            unpark.run(base, args.unpark)
        return
    if args.console is not None:
        with ground(args.database, args.binaries) as base:
            console.run(base, args.console or (console.QUICK if args.quick else console.COUNT))
        return
    if args.cpu:
        with ground(args.database, args.binaries) as base:
            cpu.run(base, args.rounds)
        return
    if args.sends:
        with ground(args.database, args.binaries) as base:
            sends.run(base, max(args.rounds, 7))
        return
    if args.keys is not None:
        with ground(args.database, args.binaries) as base:
            keys.run(base, args.keys, args.rounds)
        return
    with ground(args.database, args.binaries) as base:
        run = Run(base, quick=args.quick)
        try:
            if args.bursts:
                run.bursts(args.rounds)
            elif args.parity:
                run.parity(args.rounds)
            elif args.chunks:
                chunks.measure(run, args.rounds)
            elif args.console_drain:
                console_drain.measure(run, args.rounds)
            else:
                run.everything()
        finally:
            run.end_members()
        run.count_all()
    report(run.figures)
    if args.json is not None:
        medians = {name: statistics.median(values) for name, values in run.figures.items()}
        args.json.write_text(
            json.dumps({name: round(value, 3) for name, value in medians.items()}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
