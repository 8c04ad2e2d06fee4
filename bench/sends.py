"""`./dev bench --sends`: CPU of the client and of the server for each send, beside two bare rows.

CPU, because wall time says nothing on a busy machine. There CPU grows, too, because others use the caches. So the
turns of the cases are short, and the smallest figure says most.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench import floors
from bench.ground import DATA, Ground
from commandbus import AsyncCommandBus, CommandBus

DOMAIN = "send"
TURNS = 10
CALLS = 50
MANY = 2_000
PLAIN = {"command_type": "work", "data": DATA}


class Case(NamedTuple):
    """What is measured: a call, how often a turn makes it, commands per call, and the pool that it uses."""

    call: Callable[[], object]
    calls: int
    commands: int
    pool: Any


def run(base: Ground, rounds: int) -> None:
    """Measure and print."""
    base.domain(DOMAIN)
    base.bus.send_many(DOMAIN, (PLAIN for _ in range(MANY)))
    floors.make_tables(base)
    with (
        floors.floor_pool(base, 1) as pool,
        floors.floor_pool(base, 8) as eight,
        CommandBus(base.url) as one,
        CommandBus(base.url) as several,
        asyncio.Runner() as runner,
    ):
        bus = runner.run(_opened(base.url))
        one.send(DOMAIN, "work", DATA)
        floors.at_once([lambda: several.send(DOMAIN, "work", DATA)] * 8, 800)
        cases = {
            "two bare rows": Case(lambda: floors.insert_one(pool), CALLS, 1, pool),
            "two bare rows, pool of 8": Case(lambda: floors.insert_one(eight), CALLS, 1, eight),
            "send": Case(lambda: one.send(DOMAIN, "work", DATA), CALLS, 1, one._own_pool),
            "send, pool of 8": Case(lambda: several.send(DOMAIN, "work", DATA), CALLS, 1, several._own_pool),
            "await send": Case(lambda: runner.run(_send(bus)), 1, CALLS, bus._own_pool),
            "send_many": Case(lambda: one.send_many(DOMAIN, [PLAIN] * MANY), 1, MANY, one._own_pool),
            "await send_many": Case(
                lambda: runner.run(bus.send_many(DOMAIN, [PLAIN] * MANY)), 1, MANY, bus._own_pool
            ),
        }
        _report(_measure(cases, rounds * TURNS))
        runner.run(bus.close())


async def _opened(url: str) -> AsyncCommandBus:
    bus = AsyncCommandBus(url)
    await bus.send(DOMAIN, "work", DATA)
    return bus


async def _send(bus: AsyncCommandBus) -> None:
    for _ in range(CALLS):
        await bus.send(DOMAIN, "work", DATA)


def _measure(cases: dict[str, Case], turns: int) -> dict[str, list[tuple[float, float]]]:
    """CPU of client and server, by case and turn, in µs a command. The first turn warms up."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for number in range(turns + 1):
        for name in list(cases) if number % 2 else reversed(list(cases)):
            case = cases[name]
            processes = [conn.info.backend_pid for conn in case.pool._pool]
            began = time.process_time(), _cpu_seconds(processes)
            for _ in range(case.calls):
                case.call()
            ended = time.process_time(), _cpu_seconds(processes)
            if number:
                each = 1e6 / case.calls / case.commands
                found[name].append(((ended[0] - began[0]) * each, (ended[1] - began[1]) * each))
    return found


def _cpu_seconds(processes: Iterable[int]) -> float:
    """What the server's processes have used."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in processes) / 1e9


def _report(found: dict[str, list[tuple[float, float]]]) -> None:
    print(f"{'µs of CPU a command':28s} {'smallest':>17s} {'median':>17s}")
    print(f"{'':28s} {'client':>8s} {'server':>8s} {'client':>8s} {'server':>8s}")
    for name, turns in found.items():
        client, server = zip(*turns, strict=True)
        figures = min(client), min(server), statistics.median(client), statistics.median(server)
        print(f"{name:28s} " + " ".join(f"{each:8.1f}" for each in figures))
