"""The child process of a rehearsal: it leaves the network, runs one handler in one transaction, rolls that back,
and says what happened.

The transaction cannot be committed, not even by SQL text: a temporary table has a deferred constraint that is
violated. Every later transaction of the session is read-only. Locks are waited for briefly.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

import psycopg

from commandbus import sql
from commandbus.bus import AsyncCommandBus, CommandBus
from commandbus.clock import epoch, monotonic
from commandbus.db.drivers import run, run_async
from commandbus.errors import CommandBusError
from commandbus.flow.commands.claimed_row import ClaimedRow
from commandbus.model import payload
from commandbus.settings import Settings
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.context import Services, dump_result
from commandbus.worker.execution.lifespan_declarations import WorkerState
from commandbus.worker.execution.wrapped_handlers import WrappedHandlers
from commandbus.worker.isolation.child_setup import die_with
from commandbus.worker.lifespans import RunningLifespans
from commandbus.worker.load_handlers import load_registry
from commandbus.worker.rehearsal.context import (
    AsyncRehearsalConnection,
    AsyncRehearsalContext,
    Record,
    RehearsalConnection,
    RehearsalContext,
    _Recording,
)
from commandbus.worker.rehearsal.namespace import leave_network

_BEGIN: Final = (
    # Apart from the next one: within the transaction, a rollback would undo it.
    "SET default_transaction_read_only = on /* commandbus_rehearsal */",
    "BEGIN READ WRITE; "
    "CREATE TEMPORARY TABLE pg_temp.commandbus_rehearsal (n integer UNIQUE DEFERRABLE INITIALLY DEFERRED) "
    "ON COMMIT DROP; INSERT INTO pg_temp.commandbus_rehearsal VALUES (1), (1)",
)
_CHANGES: Final = sql.text("commands/rehearsed_changes")
_LAST_ID: Final = sql.text("commands/last_command")


def main() -> None:
    """Run one rehearsal, as stdin asks, and write what happened into the descriptor that the first argument
    names."""
    job = json.loads(sys.stdin.readline())
    answer = int(sys.argv[1])
    die_with(job["parent"])
    try:
        told = _rehearse(job)
    except BaseException as error:  # noqa: BLE001 - importing runs anything
        is_ours = isinstance(error, CommandBusError)
        told = {"cannot": str(error) if is_ours else f"{type(error).__name__}: {error}"}
    text = json.dumps(told, default=str)
    with os.fdopen(answer, "w") as file:
        file.write(text)
        file.flush()
    os._exit(0)  # threads that the handler left behind end here


def _rehearse(job: dict[str, Any]) -> dict[str, Any]:
    why_not = leave_network() if job["isolate"] else "the rehearsal was asked to keep the network"
    sys.path[:] = job["sys_path"]
    handler = WrappedHandlers(load_registry(job["registry"])).get(job["domain"], job["row"]["command_type"])
    if handler is None:
        return {"cannot": f"{job['registry']} has no handler for {job['domain']}/{job['row']['command_type']}"}
    if why_not is not None and not handler.options.rehearsable:
        return {
            "cannot": f"{why_not}; without that, only a handler that is declared with rehearsable=True is "
            f"rehearsed, and {handler.name} is not"
        }
    return _Rehearsing(job, handler, is_isolated=why_not is None).run()


class _Rehearsing:
    """One rehearsal."""

    def __init__(self, job: dict[str, Any], handler: Any, *, is_isolated: bool) -> None:
        self._job = job
        self._handler = handler
        self._is_isolated = is_isolated
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in job["settings"].items()
        }
        self._settings = Settings(**values)
        self._loop = asyncio.new_event_loop()
        self._notes: list[str] = []
        self._attempt = self._make_attempt()

    def _make_attempt(self) -> Attempt:
        given = dict.fromkeys(ClaimedRow._fields) | self._job["row"]
        attempt = Attempt(self._job["domain"], ClaimedRow(**given), self._handler, 0.0)
        attempt.started, attempt.started_at = epoch(), monotonic()
        attempt.deadline_at = monotonic() + self._job["timeout"]
        return attempt

    def run(self) -> dict[str, Any]:
        """Run the handler, and say what happened."""
        for name in self._handler.options.limits:
            self._notes.append(f"a real attempt waits for a permit of the limit {name} before it starts")
        services = self._services()
        told = self._run_async(services) if self._handler.is_async else self._run_sync(services)
        return told | {
            "handler": self._handler.name, "isolated": self._is_isolated, "notes": self._notes,
            "seconds": monotonic() - self._attempt.started_at,
        }  # fmt: skip

    def _services(self) -> Services:
        none: Any = None
        settings = self._settings
        return Services(
            worker="rehearsal", connections=none, max_payload_bytes=settings.max_payload_bytes,
            default_max_attempts=settings.max_attempts, extend=_refused, hold=_refused, release=lambda _: None,
            extend_timeout=1.0, max_extension=settings.max_extension, progress=lambda *_: None, limits=none,
            state=self._start(), policy=settings.retry_policy, await_on_loop=_refused, write=_refused,
        )  # fmt: skip

    def _start(self) -> WorkerState:
        """What the registry's on_start functions make, if they can without a network."""
        registry = load_registry(self._job["registry"])
        lifespans = RunningLifespans(registry._lifespans, self._on_loop, is_child=True)
        try:
            lifespans.start()
        except Exception as error:  # noqa: BLE001 - user's code
            self._notes.append(f"on_start failed, so ctx.state is empty: {error}")
            return WorkerState(is_child=True)
        return lifespans.state

    def _on_loop(self, coroutine: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(self._loop.run_until_complete(coroutine))
        except BaseException as error:  # noqa: BLE001 - its caller asks for it
            done.set_exception(error)
        return done

    # --- sync --------------------------------------------------------------------------------------------------

    def _run_sync(self, services: Services) -> dict[str, Any]:
        job = self._job
        with RehearsalConnection.connect(job["conninfo"], autocommit=True) as conn:
            for statement in (*_BEGIN, *job["limits"]):
                conn.execute(statement)
            (last,) = conn.execute(_LAST_ID).fetchall()[0]
            conn._record = record = Record(conn, job["receipts"])
            _Recording.record = record
            patched: Any = CommandBus
            patched._run = lambda _bus, operation, _seconds=None: run(conn, operation)
            conn.execute("SAVEPOINT commandbus_rehearsal_begin")
            ctx = RehearsalContext(self._attempt, services)
            told = self._ended(ctx, lambda: self._called(ctx))
            with suppress(psycopg.Error):
                if conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.INERROR:
                    conn.execute("ROLLBACK TO SAVEPOINT commandbus_rehearsal_begin")
                told["tables"] = conn.execute(_CHANGES).fetchall()
                told["sends"] = conn.execute(sql.text("commands/rehearsed_sends"), {"after": last}).fetchall()
            self._note_end(conn, told)
            told["calls"] = record.calls
            conn._record = None
            with suppress(psycopg.Error):
                conn.execute("ROLLBACK /* commandbus_rehearsal */")
        return told

    def _called(self, ctx: RehearsalContext) -> Any:
        handler = self._handler
        result = handler.function(ctx.command, ctx) if handler.takes_command else handler.function(ctx)
        if inspect.isawaitable(result):
            raise RuntimeError("a def handler that returns an awaitable cannot be rehearsed: make it async def")
        return result

    # --- async -------------------------------------------------------------------------------------------------

    def _run_async(self, services: Services) -> dict[str, Any]:
        return self._loop.run_until_complete(self._awaited(services))

    async def _awaited(self, services: Services) -> dict[str, Any]:
        handler, job = self._handler, self._job
        async with await AsyncRehearsalConnection.connect(job["conninfo"], autocommit=True) as conn:
            for statement in (*_BEGIN, *job["limits"]):
                await conn.execute(statement)
            (last,) = (await (await conn.execute(_LAST_ID)).fetchall())[0]
            conn._record = record = Record(conn, job["receipts"])
            _Recording.record = record

            async def run_here(_bus: Any, operation: Any, _seconds: Any = None) -> Any:
                return await run_async(conn, operation)

            patched: Any = AsyncCommandBus
            patched._run = run_here
            await conn.execute("SAVEPOINT commandbus_rehearsal_begin")
            ctx = AsyncRehearsalContext(self._attempt, services)
            result = error = None
            try:
                call = handler.function(ctx.command, ctx) if handler.takes_command else handler.function(ctx)
                result = await asyncio.wait_for(call, job["timeout"])
            except BaseException as raised:  # noqa: BLE001 - whatever a handler raises
                error = raised
            told = self._told(ctx, result, error)
            with suppress(psycopg.Error):
                if conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.INERROR:
                    await conn.execute("ROLLBACK TO SAVEPOINT commandbus_rehearsal_begin")
                told["tables"] = await (await conn.execute(_CHANGES)).fetchall()
                sends = await conn.execute(sql.text("commands/rehearsed_sends"), {"after": last})
                told["sends"] = await sends.fetchall()
            self._note_end(conn, told)
            told["calls"] = record.calls
            conn._record = None
            with suppress(psycopg.Error):
                await conn.execute("ROLLBACK /* commandbus_rehearsal */")
        return told

    # --- what happened -----------------------------------------------------------------------------------------

    def _ended(self, ctx: Any, call: Any) -> dict[str, Any]:
        try:
            return self._told(ctx, call(), None)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises
            return self._told(ctx, None, error)

    def _told(self, ctx: Any, result: Any, error: BaseException | None) -> dict[str, Any]:
        if error is None:
            try:
                text = dump_result(result, self._settings.max_payload_bytes, self._handler)
                return {"outcome": "COMPLETED", "result": payload.loads(text)}
            except Exception as refused:  # noqa: BLE001 - a result that is no JSON
                error = refused
        outcome = ctx.outcome_of(error)
        return {
            "outcome": "FAILED",
            "verdict": f"{outcome.verdict}: the command would be {outcome.status}",
            "error_type": type(error).__name__,
            "error": payload.clean_text(str(error), longest=8192),
            "traceback": payload.clean_text("".join(traceback.format_exception(error))),
        }

    def _note_end(self, conn: Any, told: dict[str, Any]) -> None:
        if conn.closed or conn.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            self._notes.append(
                "the handler ended the transaction or closed the connection itself: nothing was committed"
            )
        if self._attempt.has_committed and told.get("outcome") == "COMPLETED" and told.get("result") is None:
            told["result"] = next(
                (details for kind, _, details in reversed(_Recording.record.calls) if kind == "complete"), None
            )


def _refused(*_: Any) -> Any:
    raise RuntimeError("this cannot be done in a rehearsal")


if __name__ == "__main__":
    main()
