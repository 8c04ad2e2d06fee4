"""The options of a worker (WorkerSpec)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from psycopg_pool import ConnectionPool

from commandbus.flow.workers.registry import WorkerIdentity
from commandbus.light_imports import version_of
from commandbus.model.retry import RetryPolicy
from commandbus.quick_dataclass import dataclass
from commandbus.settings import Settings
from commandbus.worker.board import Board
from commandbus.worker.counts_page import CountsPage
from commandbus.worker.execution.handlers import HandlerRegistry
from commandbus.worker.health import HealthStatus
from commandbus.worker.own_code import hash_of_code


@dataclass(frozen=True, slots=True)
class Supervision:
    """What connects a worker to its supervisor: the board, its id, a callback for a new state and its reason, and
    callbacks for what its start waits for, and for what it does.

    `turn` is the descriptor of a file that all its workers share: the one that has locked it may run a command
    that was lost before. In `counts` it counts its attempts, so that its supervisor can read them.
    """

    board: Board
    supervisor: str
    on_state: Callable[[str, str], None]
    on_waiting: Callable[[str], None] = lambda _: None
    on_doing: Callable[[str], None] = lambda _: None
    turn: int | None = None
    counts: CountsPage | None = None


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker must do, and a callback for when it must end."""

    id: str
    domains: Sequence[str]
    handlers: HandlerRegistry
    policy: RetryPolicy
    pool: ConnectionPool[Any] | None
    ends_idle: bool
    has_limits: bool
    supervision: Supervision | None
    health: HealthStatus
    counts: CountsPage
    fail: Callable[[BaseException], None]
    request_stop: Callable[[str], None]
    is_stopping: Callable[[], bool] = lambda: False  # was it asked to stop?
    callers_loop: asyncio.AbstractEventLoop | None = None  # where async handlers run, if not on a loop of ours


def identity(spec: WorkerSpec, settings: Settings) -> WorkerIdentity:
    """What the registry is told of a worker."""
    return WorkerIdentity(
        spec.id,
        socket.gethostname(),
        os.getpid(),
        spec.domains,
        settings.concurrency,
        version_of("commandbus-pg") or "unknown",
        None if spec.supervision is None else spec.supervision.supervisor,
        types=lambda: spec.handlers.types(spec.domains),
        code_version=settings.code_version or hash_of_code(spec.handlers),
    )
