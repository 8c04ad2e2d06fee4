"""Chunk handlers against single ones: a body of one INSERT per command, in ctx.transaction().

A single handler makes one transaction per command. A chunk handler makes one per chunk, with an INSERT per command
in it (executemany). The rounds alternate.
"""

from __future__ import annotations

import sys
from typing import Any

from commandbus import HandlerRegistry

SIZE = 100
INSERT = "INSERT INTO public.bare (command_type) VALUES (%s)"
KINDS = {"chunk_insert": SIZE, "async_chunk_insert": SIZE, "chunk_noop": SIZE}
ROUNDS = [  # figure, domain, kind of handler, share of the commands
    ("drain_sync_insert_per_s", "sync_insert", "sync_insert", 8),
    ("drain_chunk_insert_per_s", "chunk_insert", "chunk_insert", 2),
    ("drain_async_insert_per_s", "async_insert", "async_insert", 8),
    ("drain_async_chunk_insert_per_s", "async_chunk_insert", "async_chunk_insert", 2),
    ("drain_sync_per_s", "sync", "sync", 1),
    ("drain_chunk_noop_per_s", "chunk_noop", "chunk_noop", 1),
]


def register(handlers: HandlerRegistry, domain: str, kind: str) -> None:
    """The chunk handler of a kind."""

    def insert(commands: Any, ctx: Any) -> None:
        with ctx.transaction() as tx:
            tx.cursor().executemany(INSERT, [("work",)] * len(commands))

    async def async_insert(commands: Any, ctx: Any) -> None:
        async with ctx.transaction() as tx:
            await tx.cursor().executemany(INSERT, [("work",)] * len(commands))

    def noop(commands: Any, ctx: Any) -> None:
        pass

    functions = {"chunk_insert": insert, "async_chunk_insert": async_insert, "chunk_noop": noop}
    handlers.register(domain, "work", functions[kind], chunk=KINDS[kind], chunk_wait="50ms")


def measure(run: Any, rounds: int) -> None:
    """Drain each kind in turn; every other round in the opposite order."""
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for figure, domain, kind, share in ROUNDS if number % 2 == 0 else reversed(ROUNDS):
            run.drain(figure, domain, kind, count=run.count // share)
