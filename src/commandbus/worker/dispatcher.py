"""The Dispatcher: takes what the claimer brings to the slots, and gives back what will not start.

    claimer → room, spare        how many to claim now
            → deliver            rows become attempts, and go to a lane: threads, an event loop, or the slots for
                                 messages of processes; first to the limit client (permits) or to the quarantine
                                 (turns), if they have to; commands of chunk handlers are gathered before that
    lane    → run, run_async     the attempt begins, ends, and its outcome goes to the settler

Threads: `room`, `spare`, `deliver`, `return_unstarted`, `return_unheard` and `note_connected` are the claimer's.
`push_alone` is the lease keeper's, `push` the limit client's. `_run` and `_run_async` are called by slots. `tend`
is the ladder's. Any thread may call `give_back`.

An attempt that did not start is given back under its fence, with the reason, and is not charged.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from commandbus.clock import boottime, monotonic
from commandbus.flow.commands.claimed_row import COMMAND_TYPE, OPTIONS, QUARANTINE, SUSPECT, ClaimedRow
from commandbus.flow.commands.settle import Settlement
from commandbus.logger import safe_logger
from commandbus.settings import Settings
from commandbus.worker.attempt_registry import AttemptRegistry
from commandbus.worker.board import State
from commandbus.worker.board_writer import BoardWriter
from commandbus.worker.breakers import WorkerBreakers
from commandbus.worker.chunk_gathering import ChunkGathering
from commandbus.worker.chunk_runner import ChunkRunner
from commandbus.worker.claim_pause import ClaimPause
from commandbus.worker.deadlines.fencer import Fencer
from commandbus.worker.execution.async_slots import AsyncSlot, AsyncSlots
from commandbus.worker.execution.attempt import Attempt
from commandbus.worker.execution.chunk import Chunk
from commandbus.worker.execution.chunk_execute import ChunkExecutor
from commandbus.worker.execution.concurrency import ConcurrencyBudget
from commandbus.worker.execution.execute import Ended, Executor, LimitDecides, close_awaitable
from commandbus.worker.execution.fresh_thread import in_fresh_thread
from commandbus.worker.execution.slots import Slot, Slots
from commandbus.worker.execution.wrapped_handlers import WrappedHandlers
from commandbus.worker.exhaustion import ExhaustedError
from commandbus.worker.isolation.child_process import ChildProcess
from commandbus.worker.isolation.isolation import Isolation
from commandbus.worker.isolation.quarantine import Quarantine
from commandbus.worker.lifespans import RunningLifespans
from commandbus.worker.limits import LimitedWork
from commandbus.worker.lines import line_of
from commandbus.worker.settler import Settler
from commandbus.worker.stop_report import ROUTER_SLOTS
from commandbus.worker.unhandled_types import UnhandledTypes
from commandbus.worker.worker_options import WorkerSpec

logger = safe_logger("commandbus.worker")

STALE_SECONDS = 0.5
STALE_LOOKS = 3
LOOK_SECONDS = 0.2
CAUTIOUS_SECONDS = 2.0
PAUSED = "an operator has paused its worker"
MOST_UNWRITTEN = 2000  # a few batches of the settler's


class Dispatcher:
    """The lanes of one worker, and the way into them. `state` is the worker's; only its runtime sets it."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: Settings,
        attempts: AttemptRegistry,
        *,
        handlers: WrappedHandlers,
        lifespans: RunningLifespans,
        executor: Executor,
        chunk_executor: ChunkExecutor,
        fencer: Fencer,
        isolation: Isolation,
        quarantine: Quarantine,
        limited: LimitedWork,
        settler: Settler,
        breakers: WorkerBreakers,
        unhandled: UnhandledTypes,
        pause: ClaimPause,
        board_writer: BoardWriter | None,
    ) -> None:
        self.state = State.ACTIVE
        self.is_claimer_waiting = False  # for room: see `offer_room`
        self.on_room: Callable[[], None] = lambda: None  # set by the claimer
        self.given_back = 0
        self._handlers = handlers
        self._lifespans = lifespans
        self._attempts = attempts
        self._held = attempts.held
        self._executor = executor
        self._fencer = fencer
        self._isolation = isolation
        self._quarantine = quarantine
        self._limited = limited
        self._settler = settler
        self._breakers = breakers
        self._unhandled = unhandled
        self._pause = pause
        self._board_writer = board_writer
        self.chunks = ChunkGathering(handlers, concurrency=settings.concurrency, push=self.push, name=spec.id)
        self._chunk_runner = ChunkRunner(
            attempts, chunk_executor, fencer, limited, settler, breakers, may_start=self._may_start
        )
        self._late_seconds = settings.timeouts.late_seconds  # no attempt starts under an older lease
        self._low = 0  # the claimer is called when no more than so many wait for a slot
        self._cautious_until = 0.0  # until then nothing is prefetched
        self._stale_looks = 0  # how many looks in a row found an attempt that should have started long ago
        self._stale_looked_at = 0.0
        self._most_unwritten = MOST_UNWRITTEN + 2 * settings.concurrency
        self._from_before: dict[tuple[str, int], Attempt] = {}  # held when the claimer last connected
        self.routed = routed_domains(spec)
        self.budget = ConcurrencyBudget(settings.concurrency, self.offer_room)
        self._router_budget = ConcurrencyBudget(router_slots(spec))
        self._first_router_slot = 2 * settings.concurrency
        self._slots = Slots(self.budget, self._run, name=spec.id, on_thread=self._show_thread)
        self._router = Slots(
            self._router_budget,
            self._run,
            name=f"{spec.id}-router",
            on_thread=self._show_thread,
            first=self._first_router_slot,
        )
        self.loop: AsyncSlots | None = None
        self._making_loop = threading.Lock()
        self._spec = spec
        if any(handler.is_async for handler in spec.handlers) or spec.handlers.has_async_lifespans:
            self.loop = self._make_loop()
            self._slots.share_with_others()
            self.loop.share_with_others()

    def _make_loop(self) -> AsyncSlots:
        return AsyncSlots(
            self.budget,
            self._run_async,
            name=self._spec.id,
            first=self.budget.total,
            on_thread=self._show_thread,
            callers_loop=self._spec.callers_loop,
            renew=self._lifespans.renew if self._spec.handlers.has_async_lifespans else None,
            on_failed=self._spec.fail,
        )

    def start(self) -> None:
        """Start the slots."""
        self._slots.start()
        if self.routed:
            self._router.start()
        if self.loop is not None:
            self.loop.start()
        self.chunks.start()

    def tend(self) -> None:
        """Replaced slots that have no thread yet are tried again."""
        for lane in self._lanes():
            lane.tend()

    def stop(self, until: float) -> None:
        """Let idle slots end."""
        self.chunks.stop()
        self._slots.stop()
        self._router.stop()
        if self.loop is not None:
            self.loop.stop(max(0.1, until - monotonic()))

    def leave_to_parent(self) -> None:
        """This process was forked without exec: everything that waits here belongs to its parent."""
        self.chunks.leave_to_parent()
        self._slots.waiting.clear()
        self._router.waiting.clear()
        if self.loop is not None:
            self.loop.leave_to_parent()

    def _lanes(self) -> Iterator[Slots | AsyncSlots]:
        yield self._slots
        yield self._router
        if self.loop is not None:
            yield self.loop

    # --- room -------------------------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """How many slots commands can use now. Those for messages of processes are none of them."""
        return max(0, self.budget.total - self.budget.taken)

    def is_for_messages(self, slot: int) -> bool:
        """Is this one of the slots that only messages of processes use?"""
        return slot >= self._first_router_slot

    @property
    def waiting(self) -> int:
        """How many wait for a slot, or for permits before that."""
        waiting = len(self._slots.waiting) + (len(self.loop.waiting) if self.loop is not None else 0)
        return waiting + self._limited.waiting

    @property
    def finished(self) -> int:
        """How many attempts have ended in slots of the concurrency budget."""
        return self._slots.finished + (self.loop.finished if self.loop is not None else 0)

    @property
    def is_behind(self) -> bool:
        """Are so many outcomes unwritten that nothing more is claimed?"""
        return self._settler.backlog >= self._most_unwritten

    @property
    def _is_closed(self) -> bool:
        return self.state is not State.ACTIVE or self._pause.is_on or self.is_behind

    def room(self, prefetch: int) -> int:
        """How many attempts to claim now; nothing while more than half of what is prefetched still waits."""
        waiting = self.waiting
        if monotonic() < self._cautious_until:
            prefetch = 0
        self._low = prefetch // 2
        if waiting > self._low:
            self._return_stale()
            return 0
        self._stale_looks = 0
        if self._is_closed:
            return 0
        return self.budget.total - self.budget.taken + prefetch - waiting - self.chunks.reserved

    @property
    def wants_more(self) -> bool:
        """Is there an incomplete chunk that a claim may fill, though no slot is free for anything else?"""
        return self.chunks.is_used and not self._is_closed and self.chunks.wants_more

    def rows(self, domain: str, room: int) -> int:
        """How many rows of a domain to claim for so many free slots: with chunks a slot takes many."""
        if not self.chunks.is_used or self._is_closed:
            return room
        most = self.chunks.most_held - len(self._held)
        return max(room, min(self.chunks.rows(domain, max(0, room)), most))

    def spare(self) -> int:
        """How many messages of processes to claim beside that."""
        if self._is_closed:
            return 0
        return self._router_budget.total - self._router_budget.taken - len(self._router.waiting)

    def offer_room(self) -> None:
        """Wake a claimer that waits for room, if there is some now. Slots say so, and the settler when it has
        written outcomes: while too many are unwritten, there is no room, and the slots may all be idle."""
        if self.is_claimer_waiting and self.waiting <= self._low and not self.is_behind:
            self.is_claimer_waiting = False
            self.on_room()

    def _return_stale(self) -> None:
        """Give prefetched attempts back that should have started long ago: handlers became slow, and another
        worker may be idle. One look is not enough: after a moment without the processor the claimer may run
        first."""
        stale = [lane for lane in self._lanes() if _is_stale(lane)]
        now = monotonic()
        if not stale:
            self._stale_looks = 0
        elif now - self._stale_looked_at >= LOOK_SECONDS:
            self._stale_looks, self._stale_looked_at = self._stale_looks + 1, now
        if self._stale_looks >= STALE_LOOKS:
            self._stale_looks = 0
            self._cautious_until = now + CAUTIOUS_SECONDS
            for attempt in [attempt for lane in stale for attempt in lane.take_back()]:
                self.return_one(attempt, "the slots of its worker are busy")

    # --- deliver ----------------------------------------------------------------------------------------------

    def deliver(
        self, domain: str, rows: Sequence[tuple[Any, ...]], claimed_at: float, *, are_first: bool = False
    ) -> list[tuple[Any, ...]]:
        """Hand rows to the lanes, before what waits there if they are of high priority. Returns those of unknown
        types, which the claimer parks, and those that must join the line of their key first."""
        if self._from_before:
            self._lose_reused(domain, rows)
        unhandled: list[tuple[Any, ...]] = []
        sync: list[Attempt] = []
        asynchronous: list[Attempt] = []
        get = self._handlers.get
        spare = self.spare() if domain in self.routed else 0
        routed: list[Attempt] = []
        limited: list[Attempt] = []
        chunked: list[Attempt] = []
        hold, command_type, handler, is_ordinary, is_unknown = self._held.add, None, None, False, False
        has_key = False
        for row in rows:
            if row[COMMAND_TYPE] != command_type:
                command_type = row[COMMAND_TYPE]
                handler = get(domain, command_type)
                is_ordinary = not spare and (handler is None or handler.is_ordinary)
                is_unknown = handler is None and self._unhandled.parks
                has_key = handler is not None and handler.options.key is not None
            if is_unknown:  # before its charge is looked at: the policy is its handler's
                unhandled.append(row)
                continue
            if (has_key or row[OPTIONS] is not None) and line_of(handler, row) is not None:
                unhandled.append(row)
                continue
            attempt = Attempt(domain, row, handler, claimed_at)
            hold(attempt)
            # Nearly all commands: no earlier attempt is known, and nothing special was asked for.
            if (
                is_ordinary
                and attempt.read_ct == 1
                and not row[QUARANTINE]
                and row[SUSPECT] is None
                and row[OPTIONS] is None
            ):
                attempt.is_ordinary = True
                sync.append(attempt)
                continue
            if row[OPTIONS] is not None:
                attempt.note_expiry()
            if attempt.has_expired:
                self._settler.add(attempt, attempt.expire())
            elif attempt.charge > 1 and self._executor.is_exhausted(attempt):
                self._settler.add(attempt, self._executor.exhaust(attempt))
            elif (row[QUARANTINE] or row[SUSPECT] is not None) and not self._quarantine.enter(attempt):
                continue  # `push_alone`, when it is its turn
            elif handler is not None and handler.options.limits:
                limited.append(attempt)
            elif handler is not None and handler.many is not None and self.chunks.takes(attempt):
                chunked.append(attempt)
            elif handler is not None and handler.is_async and not self._isolation.wants(attempt):
                asynchronous.append(attempt)
            elif len(routed) < spare:
                routed.append(attempt)
            else:
                sync.append(attempt)
        if routed:
            self._router.push(routed, are_first=are_first)
        if sync:
            self._slots.push(sync, are_first=are_first)
        if asynchronous and self.loop is not None:
            self.loop.push(asynchronous, are_first=are_first)
        if limited:
            self._limited.permit_request(limited)
        if self.chunks.is_used:
            self.chunks.note(domain, len(rows), len(sync) + len(asynchronous) + len(limited), chunked)
            self.chunks.add(chunked)
        self._give_back_if_closed()
        return unhandled

    def push_alone(self, attempt: Attempt, is_held: bool) -> None:  # noqa: FBT001
        """It is its turn to run alone, if this worker still holds it."""
        if not is_held or attempt.stop is not None or attempt.is_lost:
            self.return_one(attempt, self._why_not(attempt))
        elif attempt.handler is not None and attempt.handler.options.limits:
            self._limited.permit_request([attempt])
            self._give_back_if_closed()
        else:
            self.push(attempt)

    def push(self, attempt: Attempt) -> None:
        """Nothing keeps it from its start any more: it has all its permits, or its chunk is complete."""
        handler = attempt.handler
        is_async = handler is not None and handler.is_async and not self._isolation.wants(attempt)
        if is_async and self.loop is not None:
            self.loop.push([attempt])
        else:
            self._slots.push([attempt])
        self._give_back_if_closed()

    # --- give back --------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Give back everything that has not started."""
        self._isolation.let_go()
        for waiting in (self._quarantine, self.chunks, *self._lanes(), self._limited):
            for attempt in waiting.take_back():
                self.return_one(attempt, f"its worker is {self.state.name.lower()}")

    def give_back_for_pause(self) -> None:
        """Give back what has not reached a slot. What waits in a slot for its child process counts as running."""
        for waiting in (self._quarantine, self.chunks, *self._lanes(), self._limited):
            for attempt in waiting.take_back():
                self.return_one(attempt, PAUSED)

    def _give_back_if_closed(self) -> None:
        if self.state is not State.ACTIVE:
            self.give_back()
        elif self._pause.is_by_operator:
            self.give_back_for_pause()

    def return_one(self, attempt: Attempt, why: str) -> None:
        """Give back one that has not started."""
        if attempt.members:
            for member in attempt.members:
                self.return_one(member, why)
            return
        if attempt.limit_use is not None:
            attempt.limit_use.returned()
        if attempt.is_lost:
            self._attempts.release(attempt)  # another worker has the row: there is nothing to give back
            return
        self.given_back += 1
        attempt.is_unfinished = True
        self._settler.add(attempt, attempt.give_back(why))

    def return_unstarted(self, domain: str, rows: Sequence[tuple[Any, ...]], claimed_at: float, why: str) -> None:
        """They were claimed, but must not start."""
        for row in rows:
            attempt = Attempt(domain, row, self._handlers.get(domain, row[COMMAND_TYPE]), claimed_at)
            self._held.add(attempt)
            self.return_one(attempt, why)

    def return_unheard(self, domain: str, rows: Sequence[ClaimedRow], claimed_at: float) -> None:
        """The database says that this worker holds these: give back those that it has not heard of."""
        known = {attempt.msg_id for attempt in self._held.copy() if attempt.domain == domain}
        unheard = [row for row in rows if row.msg_id not in known]
        self.return_unstarted(domain, unheard, claimed_at, "the answer to its claim was lost")

    def note_connected(self) -> None:
        """Everything held now was claimed on an earlier connection, perhaps from a server that is gone."""
        self._from_before = {(attempt.domain, attempt.msg_id): attempt for attempt in self._held.copy()}

    def _lose_reused(self, domain: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """After a failover that lost commits, the server goes on with earlier numbers: another command may get
        the msg_id, the number and the read_ct of a lost one. The fence of an attempt from before would
        fit it."""
        self._from_before = {key: attempt for key, attempt in self._from_before.items() if attempt in self._held}
        for row in (ClaimedRow(*row) for row in rows):
            before = self._from_before.get((domain, row.msg_id))
            if before is not None and before.read_ct >= row.read_ct:
                before.is_lost = True
                self._settler.void(before)
                text = "the database has lost command %s (a failover?): its message now belongs to another command"
                logger.error(text, before.command_id, extra=before.log_fields)

    def _never_start(self, attempt: Attempt) -> bool:
        """It was asked to stop before it began, or its lease is not certain. If somebody canceled it, the settler
        finds that; if another worker has it by now, the fence refuses."""
        self.return_one(attempt, self._why_not(attempt))
        return True

    def _expire(self, attempt: Attempt) -> bool:
        """It waited before its slot, or for a permit, until it was too late."""
        if attempt.limit_use is not None:
            attempt.limit_use.returned()
        self._settler.add(attempt, attempt.expire())
        return True

    def _why_not(self, attempt: Attempt) -> str:
        if attempt.stop is not None:
            return attempt.stop.text
        if self._pause.is_by_operator:
            return PAUSED
        if not attempt.is_surely_held(self._late_seconds):
            return "its lease may have ended"
        return "its worker had no child process for it" if self.state is State.ACTIVE else "its worker stops"

    # --- run, in a slot ---------------------------------------------------------------------------------------

    def _is_refused(self, attempt: Attempt) -> bool:
        """Must it not start? It was asked to stop, its lease is uncertain, or an operator paused the worker."""
        return (
            attempt.stop is not None
            or self._pause.is_by_operator
            or not attempt.is_surely_held(self._late_seconds)
        )

    def _may_start(self, attempt: Attempt) -> bool:
        """May a member of a chunk start? If not, it is given back, or has expired."""
        if self._is_refused(attempt):
            return not self._never_start(attempt)
        return not (attempt.has_expired and self._expire(attempt))

    def _run_chunk(self, chunk: Chunk, slot: Slot) -> bool:
        ready = self._chunk_runner.ready(chunk)
        is_ours = self._chunk_runner.run(chunk, slot) if len(ready) > 1 else True
        if len(ready) == 1:
            return self._run(ready[0], slot)
        self.offer_room()
        return is_ours

    async def _run_chunk_async(self, chunk: Chunk, slot: AsyncSlot) -> bool:
        ready = self._chunk_runner.ready(chunk)
        is_ours = await self._chunk_runner.run_async(chunk, slot) if len(ready) > 1 else True
        if len(ready) == 1:
            slot.current = ready[0]
            return await self._run_async(ready[0], slot)
        self.offer_room()
        return is_ours

    def _run(self, attempt: Attempt, slot: Slot) -> bool:
        if not attempt.is_ordinary or self._is_refused(attempt):
            return self._run_other(attempt, slot)
        self._executor.begin(attempt)
        self._attempts.begin(attempt, slot)
        return self._end(attempt, slot, self._executor.run(attempt))

    def _run_other(self, attempt: Attempt, slot: Slot) -> bool:
        """Run one of which more must be asked before it starts, or give it back."""
        if attempt.members:
            assert isinstance(attempt, Chunk)  # noqa: S101 - nothing else has members
            return self._run_chunk(attempt, slot)
        if self._is_refused(attempt):
            return self._never_start(attempt)
        if attempt.expires_at is not None and attempt.has_expired:
            return self._expire(attempt)
        if attempt.limit_use is not None and not attempt.limit_use.before_start():
            self.offer_room()
            return True
        process = None
        if self._isolation.wants(attempt):
            process = self._take_process(attempt)
            if process is None:
                return True
        self._executor.begin(attempt)
        self._attempts.begin(attempt, slot)
        if process is None:
            if attempt.handler is not None and attempt.handler.options.fresh_thread:
                return self._run_in_fresh_thread(attempt, slot)
            return self._end(attempt, slot, self._executor.run(attempt))
        self._attempts.starting.discard(attempt)
        return self._end(attempt, slot, self._isolation.run(attempt, process))

    async def _run_async(self, attempt: Attempt, slot: AsyncSlot) -> bool:
        if attempt.members:
            assert isinstance(attempt, Chunk)  # noqa: S101
            return await self._run_chunk_async(attempt, slot)
        if self._is_refused(attempt):
            return self._never_start(attempt)
        if attempt.expires_at is not None and attempt.has_expired:
            return self._expire(attempt)
        if attempt.limit_use is not None and not attempt.limit_use.before_start():
            self.offer_room()
            return True
        self._executor.begin(attempt)
        self._attempts.begin(attempt, slot)
        return self._end(attempt, slot, await self._executor.run_async(attempt))

    def await_on_loop(self, attempt: Attempt, awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
        """In a slot's thread: a sync handler returned an awaitable. Await it on the event loop; its slot waits."""
        slot = self._attempts.running.get(attempt)
        if not isinstance(slot, Slot):  # it was given up, and judged then
            close_awaitable(awaitable)
            return None, None
        try:
            return self._need_loop().run_guest(attempt, slot, awaitable)
        except ExhaustedError:
            close_awaitable(awaitable)  # no loop has begun it
            raise

    def _need_loop(self) -> AsyncSlots:
        """The slots of async handlers; a worker without such handlers gets them when it first needs their loop."""
        with self._making_loop:
            if self.loop is None:
                try:
                    made = self._make_loop()
                    made.start()
                except (RuntimeError, OSError) as error:
                    raise ExhaustedError(f"no event loop could be started: {error}") from error
                self.loop = made
            return self.loop

    def _run_in_fresh_thread(self, attempt: Attempt, slot: Slot) -> bool:
        """As `_run`, in a thread that stands in for the slot's own as long as the attempt runs."""

        def stand_in() -> None:
            slot.ident = threading.get_ident()
            self._show_thread(slot.index)

        try:
            ended = in_fresh_thread(lambda: self._executor.run(attempt), on_start=stand_in)
        except ExhaustedError as error:
            self._pause.begin(str(error))
            ended = self._executor.failed(attempt, error)
        if not self._end(attempt, slot, ended):
            return False  # the slot's number is another thread's by now
        stand_in()
        return True

    def _end(self, attempt: Attempt, slot: Slot | AsyncSlot, ended: Ended) -> bool:
        """Hand the outcome to the settler; False if the ladder has given the attempt up, and its slot away."""
        if not self._attempts.end(attempt, slot):
            return False
        if attempt.borrowed is not None:
            self._fencer.end_leftover(attempt, attempt.borrowed)
        if not isinstance(ended, Settlement) or ended.is_completion:
            self._breakers.completed(attempt)
        if attempt.limit_use is None and not isinstance(ended, LimitDecides):
            self._settler.add(attempt, ended)
        else:
            self._limited.finished(attempt, ended)
        if self.is_claimer_waiting:
            self.offer_room()
        return True

    def _take_process(self, attempt: Attempt) -> ChildProcess | None:
        """Wait for a child process that is ready. Until then the attempt has not begun. None if it will not
        begin."""
        self._attempts.starting.add(attempt)
        taken = self._isolation.take(attempt)
        if isinstance(taken, ChildProcess):
            return taken
        if taken is None:
            self._never_start(attempt)
        else:
            self._settler.add(attempt, taken)
        self._attempts.starting.discard(attempt)
        self.offer_room()
        return None

    def _show_thread(self, slot: int) -> None:
        if self._board_writer is not None:
            self._board_writer.thread(slot)


def _is_stale(lane: Slots | AsyncSlots) -> bool:
    """Has the oldest attempt waited long for a slot? Waiting for permits, or for a chunk, does not count."""
    oldest = next(iter(lane.waiting.copy()), None)  # a copy: slots take from it, too
    if oldest is None:
        return False
    granted_at = 0.0 if oldest.limit_use is None else oldest.limit_use.granted_at
    if isinstance(oldest, Chunk):
        granted_at = oldest.ready_at
    return min(boottime() - oldest.renewed_at, monotonic() - granted_at) > STALE_SECONDS


def routed_domains(spec: WorkerSpec) -> list[str]:
    """Domains with slots of their own: those in which processes are moved and nothing else happens, in a worker
    that has other work, too."""
    others = {item.domain for item in spec.handlers if not item.is_router or item.is_async}
    routed = {item.domain for item in spec.handlers if item.is_router}
    found = [domain for domain in spec.domains if domain in routed - others]
    return found if len(found) < len(spec.domains) else []


def router_slots(spec: WorkerSpec) -> int:
    """How many slots those have."""
    return ROUTER_SLOTS if routed_domains(spec) else 0
