"""The Gate: one thread through which everything goes that concerns limits, on a connection of its own.

    commands ──visit──► granted ──► a slot            calls inside programs ──acquire──► a future
                  └───► refused ──► parked                                        └────► in line, woken by name
    ends ─────leave───► the place is free ──► kept for the first in line, who is woken

One thread, because it then asks for many at once: ten commands that need a place of one limit are one statement.
It waits for nobody but the database and Redis; whoever waits for a place waits outside, in line, in the database.

The line of a limit is in the database, as is everything that the fleet must agree on: back-off, breaker, whose
turn it is. Who frees a place keeps it for the first in line, under a lease of a few seconds, and wakes that one;
so nobody can overtake. What was lost on the way (a worker killed between two statements) is found by the sweep.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, Protocol

import psycopg
from psycopg import Connection

from commandbus.db.link import Link
from commandbus.errors import CommandBusError, UnknownLimitError
from commandbus.flow import places
from commandbus.flow.limits import CHANGED, CHANNEL, CLOSED, TOKEN, WAKE, LimitRow, get_limit
from commandbus.flow.places import Turn
from commandbus.flow.statement import explain_absence
from commandbus.gate.postgres_backend import PostgresBackend
from commandbus.gate.requests import Call, Leave, Limited, Place, Refusal, Visit, no_such, refuse, waited_in_vain
from commandbus.logger import safe_logger
from commandbus.model.durations import format_seconds
from commandbus.model.limit import Look
from commandbus.model.standing import Answer, Standing
from commandbus.settings import Settings

logger = safe_logger("commandbus.limits")

RESERVE_SECONDS = 15.0
SWEEP_SECONDS = 2.0
MOST_AT_ONCE = 20
LONGEST_SLEEP = 1.0
PARKING_SECONDS = 5.0


class Backend(Protocol):
    """Where the places of some limits are kept."""

    @property
    def mode(self) -> str:
        """postgres, redis, degraded, joining or lost."""

    def take(self, limit: LimitRow, tokens: Sequence[str], seconds: float) -> list[str]:
        """Take places for some seconds; answers the tokens that have one."""

    def renew(self, limit: LimitRow, tokens: Sequence[str]) -> list[str]:
        """Renew leases; answers the tokens that hold no place any more."""

    def give(self, limit: LimitRow, tokens: Sequence[str]) -> None:
        """Give places back."""

    def look(self, limit: LimitRow) -> Look:
        """Who holds a place, and how fast they are given."""


class Elsewhere(Backend, Protocol):
    """A back end outside PostgreSQL, which must be looked after."""

    def tick(self) -> None:
        """Called every second or so."""

    def close(self) -> None:
        """Sign off."""


class Gate:
    """Places of limits, for one worker or one bus."""

    def __init__(
        self,
        settings: Settings,
        owner: str,
        *,
        elsewhere: Callable[[], Elsewhere] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._owner = owner
        self._on_error = on_error
        self._link = Link(settings, name=f"{owner} gate", on_connect=self._listen)
        self._postgres = PostgresBackend(self._link)
        self._make_elsewhere = elsewhere
        self._elsewhere: Elsewhere | None = None
        self._rows: dict[str, LimitRow] = {}  # as last seen; what must be right is asked for
        self._visits: deque[Visit] = deque()
        self._calls: deque[Call] = deque()
        self._leaves: deque[Leave] = deque()
        self._orders: deque[Callable[[], None]] = deque()
        self._line: dict[str, Call] = {}
        self._held: dict[str, dict[str, Place]] = {}
        self._parking: dict[str, tuple[int, float]] = {}  # refused and not parked yet: how many, and since when
        self._due: dict[str, float] = {}
        self._shut: dict[str, float] = {}  # when (monotonic) an API was last heard to say no
        self._sweep_at = time.monotonic() + random.random() * SWEEP_SECONDS  # noqa: S311 - they spread out
        self._renew_at = 0.0
        self._numbers = itertools.count(secrets.randbits(40) << 20)
        self._must_ask_line = False
        self._is_at_work = True
        self._is_barred = False  # from queues, as a role that only sends: others wake commands then
        self._closing = False
        self._stopping = threading.Event()
        self._over: BaseException | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake_fd).atexit = False  # then it still gives back what it has
        self._thread = threading.Thread(target=self._serve, name=f"{owner}-gate", daemon=True)

    # --- asked from other threads; none of these waits ---------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        """Can one ask? Not after the end, and not in a forked process, which has no such thread."""
        return self._over is None and not self._closing and self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """How many commands are at the gate."""
        return len(self._visits)

    @property
    def modes(self) -> dict[str, str]:
        """Where the places of each limit that is used here are kept now."""
        mode = "unknown" if self._elsewhere is None else self._elsewhere.mode  # not made here: threads would race
        return {name: "postgres" if row.backend == "postgres" else mode for name, row in list(self._rows.items())}

    @property
    def held(self) -> dict[str, int]:
        """How many places of each limit are held here."""
        return {name: len(own) for name, own in list(self._held.items()) if own}

    def visit(self, visits: Sequence[Visit]) -> None:
        """Commands ask for their places."""
        self._visits.extend(visits)
        self._wake()

    def take_back(self) -> list[Visit]:
        """Everything that was not answered yet."""
        back = []
        while True:
            try:
                back.append(self._visits.popleft())
            except IndexError:
                return back

    def leave(self, leaves: Sequence[Leave]) -> None:
        """Places are needed no more."""
        self._leaves.extend(leaves)
        self._wake()

    def note_parked(self, name: str) -> None:
        """A command that was refused is parked now: it is in line."""

        def look() -> None:
            count, since = self._parking.get(name, (0, 0.0))
            if count > 1:
                self._parking[name] = (count - 1, since)
            else:
                self._parking.pop(name, None)
            self._look_at(name)

        self._order(look)

    def acquire(
        self,
        name: str,
        *,
        wait: float,
        holder: str,
        on_lost: Callable[[Place], None] | None = None,
        command: tuple[str, int, int, int] | None = None,
        since: datetime | None = None,
    ) -> Call:
        """Ask for a place inside a program; `call.answer` is resolved with it, or with an error.

        `command` (domain, msg_id, id, attempt_base): for whom a place may be kept, because it was parked.
        `since`: from when on its turn counts; None is now.
        """
        number = next(self._numbers)
        token = f"{self._owner}/{holder}/{number:x}"[:200]
        call = Call(name, token, number, time.monotonic() + wait, wait, holder, Future(), on_lost, command, since)
        if not self.is_serving:
            call.answer.set_exception(self._over or CommandBusError("the gate of this program is closed"))
            return call
        self._calls.append(call)
        self._wake()
        return call

    def tell(self, name: str, holder: str, reason: str, retry_after: float | None) -> None:
        """An API has refused a call that held no place of its limit."""
        self._order(lambda: self._tell(name, holder, reason, retry_after))

    def is_stale(self, place: Place) -> bool:
        """Was the place given before the API said no? Then nothing may begin with it."""
        return place.taken_at < self._shut.get(place.limit, 0.0)

    def judge(self, limited: Limited) -> None:
        """Find out what becomes of a command that its API has refused; after what it left was heard."""
        self._order(lambda: self._judge(limited))

    def forget(self, call: Call) -> None:
        """Who asked waits no more; a place that was given meanwhile is given back."""
        call.answer.cancel()  # orders come before calls: one that has not been looked at yet must not be answered
        self._order(lambda: self._forget(call))

    def flush(self, timeout: float) -> bool:
        """Wait until all that was told before this is heard."""
        heard = threading.Event()
        self._order(heard.set)
        return heard.wait(timeout)

    def stop(self, timeout: float) -> None:
        """Give back what was left here, then end."""
        self._closing = True
        self._wake()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        self._stopping.set()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # --- the thread --------------------------------------------------------------------------------------------

    def _listen(self, conn: Connection[Any]) -> None:
        conn.execute(f"LISTEN {CHANNEL}".encode())
        self._must_ask_line = True  # whose turn came before this was not heard

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._sleep()
                    self._round()
                except psycopg.OperationalError as error:
                    if self._closing or not self._link.recover(self._stopping, error):
                        break
                    continue
                if self._closing and not self._leaves and not self._orders:
                    break
            self._sign_off()
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            self._end_with(explain_absence(error))
        except BaseException as error:  # noqa: BLE001 - handed to who asked, and to the worker
            self._end_with(error)
        finally:
            self._over = self._over or CommandBusError("the gate of this program is closed")
            for call in [*self._calls, *self._line.values()]:
                self._fail(call, self._over)
            self._link.close()

    def _end_with(self, error: BaseException) -> None:
        self._over = error
        if self._on_error is not None:
            self._on_error(error)
        elif not isinstance(error, CommandBusError):  # else those who asked are told, and that is enough
            logger.exception("the gate has ended")

    def _round(self) -> None:
        self._let_out()
        while self._orders:
            self._orders[0]()
            self._orders.popleft()
        self._let_in()
        self._answer_calls()
        now = time.monotonic()
        for call in [call for call in self._line.values() if call.until <= now]:
            self._give_up(call)
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            self._wake_next(name)
        if now >= self._renew_at:
            self._renew()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_SECONDS * (0.75 + random.random() / 2)  # noqa: S311
            self._sweep()

    def _sleep(self) -> None:
        self._hear()  # what came during our own statements does not wake the poll
        if self._orders or self._visits or self._calls or self._leaves:
            return
        ends = (call.until for call in self._line.values())
        soonest = min([*self._due.values(), *ends, self._sweep_at, self._renew_at])
        self._is_at_work = False
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(self._link.conn.fileno(), select.POLLIN)
        poll.poll(max(0.0, min(soonest - time.monotonic(), LONGEST_SLEEP)) * 1000 + 1)
        self._is_at_work = True
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _hear(self) -> None:
        heard = [notification.payload for notification in self._link.conn.notifies(timeout=0)]
        for text in heard:
            if text.startswith(TOKEN) and (call := self._line.get(text.removeprefix(TOKEN))) is not None:
                self._take_turn(call)
            elif text.startswith(CLOSED):
                self._shut[text.removeprefix(CLOSED)] = time.monotonic()
            elif text.startswith(CHANGED):
                name = text.removeprefix(CHANGED)
                self._rows.pop(name, None)
                self._look_at(name)
            elif text.startswith(WAKE) and not self._is_barred:
                self._look_at(text.removeprefix(WAKE))
        if self._must_ask_line:
            self._must_ask_line = False
            for call in list(self._line.values()):
                self._take_turn(call)

    def _sign_off(self) -> None:
        try:
            for call in list(self._line.values()):
                self._link.run(places.step_out(call.number))
            if self._elsewhere is not None:
                self._elsewhere.close()
        except (psycopg.Error, CommandBusError) as error:
            logger.info("the gate was left without a word: %s", error)

    # --- limits and where they are kept ------------------------------------------------------------------------

    def _row(self, name: str) -> LimitRow:
        row = self._rows[name] = self._link.run(get_limit(name))
        return row

    def _known(self, name: str) -> LimitRow:
        return self._rows.get(name) or self._row(name)

    def _backend(self, row: LimitRow) -> Backend:
        if row.backend == "postgres":
            return self._postgres
        if self._elsewhere is None:
            if self._make_elsewhere is None:
                raise CommandBusError(
                    f"limit {row.name!r} is kept in Redis, and this program has no redis_url: set "
                    f'COMMANDBUS_REDIS_URL, or declare one under another name with backend="postgres"'
                )
            self._elsewhere = self._make_elsewhere()
        return self._elsewhere

    def _take(self, name: str, tokens: Sequence[str]) -> tuple[list[str], LimitRow | None]:
        """Take places for newcomers. If some get none: the limit's row, which says why."""
        if self._known(name).backend == "postgres":
            taken = self._link.run(places.take(name, tokens))
            if len(taken.tokens) == len(tokens):
                return taken.tokens, None
            row = self._row(name)
            if row.backend == "postgres":
                return taken.tokens, row
        else:
            row = self._row(name)
        standing = row.standing
        if row.is_awaited or standing.closed_until(row.now) is not None:
            return [], row
        if not standing.is_probing:
            granted = self._backend(row).take(row, tokens, row.lease)
            return granted, None if len(granted) == len(tokens) else row
        if standing.is_probed(row.now):
            return [], row
        granted = self._backend(row).take(row, tokens[:1], row.lease)
        if granted and not self._link.run(places.take_probe(name, granted[0])):
            self._backend(row).give(row, granted)
            granted = []
        return granted, row

    def _renew_places(self, row: LimitRow, own: Sequence[Place]) -> list[Place]:
        """Renew leases; answers what is lost."""
        sent_at = time.monotonic()
        gone = set(self._backend(row).renew(row, [place.token for place in own]))
        for place in own:
            if place.token not in gone:
                place.renewed_at, place.lease = sent_at, row.lease
        return [place for place in own if place.token in gone]

    def _adopt(self, name: str, token: str) -> bool:
        """Is the place that was kept under this token still there? Then it is held from now on."""
        row = self._row(name)
        standing = row.standing
        if standing.closed_until(row.now) is not None or (standing.is_probing and standing.probe != token):
            self._backend(row).give(row, [token])  # it was kept before the API said no
            return False
        is_held = not self._backend(row).renew(row, [token])
        if is_held and row.backend != "postgres" and row.standing.probe == token:
            self._link.run(places.renew(name, [token]))  # that it is the probe is kept there
        return is_held

    def _hold(self, place: Place) -> Place:
        self._held.setdefault(place.limit, {})[place.token] = place
        self._renew_at = min(self._renew_at, time.monotonic() + place.lease / 3)
        return place

    # --- commands ----------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        batch = list(self._visits)
        if not batch:
            return
        got: dict[Visit, list[Place]] = {visit: [] for visit in batch}
        try:
            refused = self._ask_for(batch, got)
        except BaseException:
            # All of it is asked again later, under other tokens.
            self._leaves.extend(Leave(place, Answer.UNKNOWN) for own in got.values() for place in own)
            raise
        for visit in batch:
            try:
                self._visits.remove(visit)
            except ValueError:  # taken back meanwhile: the worker stops
                self._leaves.extend(Leave(place, Answer.UNKNOWN) for place in got[visit])
                continue
            if visit in refused:
                self._leaves.extend(Leave(place, Answer.UNKNOWN) for place in got[visit])
                if not refused[visit].gives_up:
                    self._park(refused[visit].limit)
                visit.on_refused(refused[visit])
            else:
                visit.on_granted(got[visit])

    def _ask_for(self, batch: Sequence[Visit], got: dict[Visit, list[Place]]) -> dict[Visit, Refusal]:
        """Limit by limit, all visits at once; answers who does not get all that it needs."""
        turns = self._turns_of(batch)
        refused: dict[Visit, Refusal] = {}
        for stage in range(max(len(visit.names) for visit in batch)):
            by_name: dict[str, list[Visit]] = {}
            for visit in batch:
                if visit not in refused and stage < len(visit.names):
                    by_name.setdefault(visit.names[stage], []).append(visit)
            for name, group in by_name.items():
                self._let_in_to(name, group, turns, got, refused)
        return refused

    def _turns_of(self, batch: Sequence[Visit]) -> dict[Visit, Turn]:
        by_domain: dict[str, list[Visit]] = {}
        for visit in batch:
            if visit.is_known:
                by_domain.setdefault(visit.domain, []).append(visit)
        found: dict[Visit, Turn] = {}
        for domain, visits in by_domain.items():
            answer = self._link.run(
                places.turns(domain, [(visit.msg_id, visit.id, visit.attempt_base) for visit in visits])
            )
            found |= {visit: answer[visit.msg_id] for visit in visits if visit.msg_id in answer}
        return found

    def _let_in_to(
        self,
        name: str,
        group: Sequence[Visit],
        turns: dict[Visit, Turn],
        got: dict[Visit, list[Place]],
        refused: dict[Visit, Refusal],
    ) -> None:
        """One limit: first those for whom a place is kept, then newcomers, unless others wait."""
        try:
            self._ask_at(name, group, turns, got, refused)
        except CommandBusError as error:  # it is gone, or cannot be used from here
            self._rows.pop(name, None)
            for visit in group:
                if all(place.limit != name for place in got[visit]):
                    refused[visit] = no_such(name, error)

    def _ask_at(
        self,
        name: str,
        group: Sequence[Visit],
        turns: dict[Visit, Turn],
        got: dict[Visit, list[Place]],
        refused: dict[Visit, Refusal],
    ) -> None:
        newcomers = []
        for visit in group:
            turn = turns.get(visit)
            token = turn.token if turn is not None and turn.limit == name else None
            if token is not None and self._adopt(name, token):
                got[visit].append(self._place(name, token, visit))
            else:
                newcomers.append(visit)
        if not newcomers:
            return
        tokens = {f"{self._owner}/{visit.holder}/{next(self._numbers):x}"[-200:]: visit for visit in newcomers}
        granted: list[str] = []
        row: LimitRow | None = None
        if not self._is_parking(name):
            granted, row = self._take(name, list(tokens))
        for token in granted:
            visit = tokens.pop(token)
            got[visit].append(self._place(name, token, visit))
        if tokens:
            row = row or self._row(name)
            for visit in tokens.values():
                turn = turns.get(visit)
                refused[visit] = refuse(row, waited_seconds=turn.waited_seconds if turn is not None else None)

    def _park(self, name: str) -> None:
        self._parking[name] = (self._parking.get(name, (0, 0.0))[0] + 1, time.monotonic())

    def _is_parking(self, name: str) -> bool:
        """Is somebody on the way into the line? Then newcomers come after that one."""
        count, since = self._parking.get(name, (0, 0.0))
        return count > 0 and time.monotonic() - since < PARKING_SECONDS

    def _place(self, name: str, token: str, visit: Visit) -> Place:
        lease = self._known(name).lease
        return self._hold(Place(name, token, lease, holder=visit.holder, on_lost=visit.on_lost))

    # --- calls inside programs ---------------------------------------------------------------------------------

    def _answer_calls(self) -> None:
        while self._calls:
            call = self._calls[0]
            if not call.answer.done():
                self._begin(call)
            self._calls.popleft()

    def _begin(self, call: Call) -> None:
        try:
            if call.command is not None and self._has_turn(call, call.command):
                return
            granted, _ = self._take(call.name, [call.token])
        except CommandBusError as error:
            self._rows.pop(call.name, None)
            self._fail(call, error)
            return
        if granted:
            self._resolve(call)
            return
        left = call.until - time.monotonic()
        if left <= 0:
            self._fail(call, waited_in_vain(call.name, call.wait))
            return
        self._link.run(
            places.line_up(
                call.name, call.token, number=call.number, seconds=left, who=call.holder, since=call.since
            )
        )
        call.is_in_line = True
        self._line[call.token] = call
        self._look_at(call.name)

    def _has_turn(self, call: Call, command: tuple[str, int, int, int]) -> bool:
        """Was a place kept for the command that calls? Its handler names no limits, so it did not pass by here."""
        domain, *who = command
        turn = self._link.run(places.turns(domain, [(who[0], who[1], who[2])])).get(who[0])
        if turn is None or turn.token is None or turn.limit != call.name or not self._adopt(call.name, turn.token):
            return False
        call.token = turn.token
        self._resolve(call)
        return True

    def _take_turn(self, call: Call) -> None:
        """It was told that its turn has come, or may have missed that."""
        if self._adopt(call.name, call.token):
            self._link.run(places.step_out(call.number))
            self._line.pop(call.token, None)
            self._resolve(call)

    def _give_up(self, call: Call) -> None:
        """Its time is up; but if its turn has come at this moment, it has its place."""
        self._line.pop(call.token, None)
        if self._link.run(places.step_out(call.number)) and self._adopt(call.name, call.token):
            self._resolve(call)
        else:
            self._fail(call, waited_in_vain(call.name, call.wait))

    def _resolve(self, call: Call) -> None:
        lease = self._known(call.name).lease
        place = self._hold(Place(call.name, call.token, lease, holder=call.holder, on_lost=call.on_lost))
        if not call.answer.set_running_or_notify_cancel():
            self._leaves.append(Leave(place, Answer.UNKNOWN))
        else:
            call.answer.set_result(place)

    def _fail(self, call: Call, error: BaseException) -> None:
        if not call.answer.done() and call.answer.set_running_or_notify_cancel():
            call.answer.set_exception(error)

    def _forget(self, call: Call) -> None:
        if call.answer.done() and not call.answer.cancelled():
            if call.answer.exception() is None:
                self._leaves.append(Leave(call.answer.result(), Answer.UNKNOWN))
            return
        self._line.pop(call.token, None)
        if call.is_in_line and self._link.run(places.step_out(call.number)):
            row = self._known(call.name)
            self._backend(row).give(row, [call.token])
            self._look_at(call.name)

    # --- places that are given back ----------------------------------------------------------------------------

    def _let_out(self) -> None:
        plain: dict[str, list[Leave]] = {}
        taken = 0
        for leave in list(self._leaves):
            taken += 1
            if leave.answer.is_bad or leave.keeps:
                self._answer(leave)
            else:
                plain.setdefault(leave.place.limit, []).append(leave)
        for name, leaves in plain.items():
            self._give(name, leaves)
        for _ in range(taken):
            leave = self._leaves.popleft()
            if not leave.stays:
                self._held.get(leave.place.limit, {}).pop(leave.place.token, None)
            if leave.then is not None:
                leave.then()

    def _give(self, name: str, leaves: Sequence[Leave]) -> None:
        tokens = [leave.place.token for leave in leaves]
        good = any(leave.answer is Answer.GOOD for leave in leaves)
        try:
            row = self._known(name)
            if row.backend != "postgres":
                self._backend(row).give(row, tokens)
        except CommandBusError as error:
            logger.warning("places of limit %s cannot be given back, and their leases end: %s", name, error)
            return
        is_awaited, probe = self._link.run(places.give(name, tokens, good=good))
        for leave in leaves:
            if leave.place.token == probe:
                self._link.run(places.answer(name, probe, leave.answer, gives=True))
                is_awaited = True
        if is_awaited:
            self._look_at(name)

    def _answer(self, leave: Leave) -> None:
        """A bad answer, or a call that may go on on the other side."""
        place = leave.place
        try:
            row, standing, was_probe = self._link.run(
                places.answer(
                    place.limit,
                    place.token,
                    leave.answer,
                    gives=not leave.keeps,
                    reason=leave.reason,
                    retry_after=leave.retry_after,
                    spread=random.random(),  # noqa: S311 - jitter
                )
            )
        except UnknownLimitError:
            logger.warning("limit %s is gone: nobody hears of %s", place.limit, leave.reason)
            return
        self._rows[place.limit] = row
        if row.backend != "postgres" and not leave.keeps:
            self._give_elsewhere(row, place.token)
        if leave.answer.is_bad:
            self._log(place.limit, place.holder, leave.reason or str(leave.answer), row, standing)
        if leave.keeps and not leave.stays:
            self._look_at(place.limit, place.renewed_at + place.lease - time.monotonic())
        closed = standing.closed_until(row.now)
        self._look_at(place.limit, 0.0 if closed is None or standing.is_forced else closed - row.now)
        leave.was_probe = was_probe

    def _give_elsewhere(self, row: LimitRow, token: str) -> None:
        try:
            self._backend(row).give(row, [token])
        except CommandBusError as error:
            logger.warning("a place of limit %s cannot be given back, and its lease ends: %s", row.name, error)

    def _tell(self, name: str, holder: str, reason: str, retry_after: float | None) -> None:
        try:
            row, standing, _ = self._link.run(
                places.answer(
                    name,
                    None,
                    Answer.RATE_LIMITED,
                    gives=False,
                    reason=reason,
                    retry_after=retry_after,
                    spread=random.random(),  # noqa: S311 - jitter
                )
            )
        except UnknownLimitError:
            logger.warning("limit %s is not known: nobody hears of %s", name, reason)
            return
        self._log(name, holder, reason, row, standing)

    def _judge(self, limited: Limited) -> None:
        try:
            row = self._row(limited.limit)
        except UnknownLimitError:
            limited.then(None, None)
            return
        turn = None
        if limited.is_known:
            who = [(limited.msg_id, limited.id, limited.attempt_base)]
            turn = self._link.run(places.turns(limited.domain, who)).get(limited.msg_id)
        if limited.then(row, turn):
            self._park(limited.limit)

    def _log(self, name: str, holder: str, reason: str, row: LimitRow, standing: Standing) -> None:
        closed = standing.closed_until(row.now)
        left = None if closed is None or standing.is_forced else format_seconds(round(closed - row.now, 1))
        extra = {
            "limit": name,
            "holder": holder,
            "backoff_step": standing.step,
            "breaker": "open" if standing.is_open else "closed",
        }
        text = "limit %s: %s, told to %s (attempt %d of the back-off, breaker %s)%s"
        wait = "" if left is None else f"; nobody begins for {left}"
        logger.warning(text, name, reason, holder, standing.step, extra["breaker"], wait, extra=extra)

    # --- whose turn it is --------------------------------------------------------------------------------------

    def _look_at(self, name: str, seconds: float = 0.0) -> None:
        """See, in so many seconds, who is first in line."""
        at = time.monotonic() + max(0.0, seconds)
        self._due[name] = min(self._due.get(name, at), at)

    def _wake_next(self, name: str) -> None:
        try:
            row = self._known(name)
            backend = self._backend(row)
        except CommandBusError as error:
            logger.warning("nobody of this program can be woken at limit %s: %s", name, error)
            return
        grant = None
        if row.backend != "postgres":
            grant = backend.take
        mark, barred = f"turn/{secrets.token_hex(4)}/", self._is_barred
        waking = places.wake(
            name, most=MOST_AT_ONCE, seconds=RESERVE_SECONDS, grant=grant, mark=mark, is_barred=barred
        )
        try:
            woken = self._link.run(waking)
        except psycopg.errors.InsufficientPrivilege:
            if barred:
                raise
            self._is_barred = True
            self._look_at(name)
            return
        except psycopg.errors.UndefinedTable as error:
            logger.warning("nobody can be woken at limit %s, a domain of who waits is gone: %s", name, error)
            return
        if woken.again_seconds is not None:
            self._look_at(name, woken.again_seconds)
        elif woken.count == MOST_AT_ONCE:
            self._look_at(name)

    def _renew(self) -> None:
        now = time.monotonic()
        self._renew_at = now + LONGEST_SLEEP * 30
        if self._elsewhere is not None:
            self._elsewhere.tick()
            self._renew_at = now + LONGEST_SLEEP
        for name, held in list(self._held.items()):
            own = list(held.values())
            if not own:
                continue
            lost: list[Place] = []
            due = [place for place in own if now - place.renewed_at >= place.lease / 3]
            if due:
                lost = self._renew_places(self._row(name), due)
            lost += [place for place in own if now - place.renewed_at >= place.lease and place not in lost]
            for place in lost:
                self._lose(place)
            soonest = min((place.renewed_at + place.lease / 3 for place in held.values()), default=self._renew_at)
            self._renew_at = max(min(self._renew_at, soonest), now + 0.05)

    def _lose(self, place: Place) -> None:
        place.is_lost = True
        self._held.get(place.limit, {}).pop(place.token, None)
        logger.warning("%s has lost its place of limit %s", place.holder, place.limit)
        if place.on_lost is not None:
            place.on_lost(place)

    def _sweep(self) -> None:
        found = self._link.run(places.sweep())
        for name in found.limits:
            if name not in self._due:
                self._wake_next(name)
        for domain in [] if self._is_barred else found.domains:
            try:
                self._link.run(places.wake_overdue(domain))
            except psycopg.errors.InsufficientPrivilege:
                self._is_barred = True
                break
            except psycopg.errors.UndefinedTable:
                logger.warning("domain %s is gone, and commands of it are parked", domain)
        for call in list(self._line.values()):
            self._take_turn(call)

    @property
    def is_busy(self) -> bool:
        """Is there something that may let a command begin soon?"""
        if self._is_at_work or self._visits or self._leaves or self._orders or self._parking:
            return True
        return any(at < time.monotonic() + LONGEST_SLEEP for at in list(self._due.values()))

    def look(self, name: str) -> Future[tuple[LimitRow, Look]]:
        """How a limit stands, and who holds its places."""
        answer: Future[tuple[LimitRow, Look]] = Future()

        def find() -> None:
            try:
                row = self._row(name)
                answer.set_result((row, self._backend(row).look(row)))
            except CommandBusError as error:
                answer.set_exception(error)

        self._order(find)
        return answer
