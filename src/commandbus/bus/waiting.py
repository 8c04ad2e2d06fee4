"""Waiting for commands that were sent before: `bus.wait` for one, `bus.wait_all` for many.

    one look ──► each has an outcome: the end
            └──► the bus's listener looks again for the others, until the time is up ──► one last look

Nothing is written, and a worker that settles such a command does nothing more than for any other. So the listener
looks again by itself (`call_listener.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors as pg

from commandbus.bus.base import BusBase
from commandbus.bus.call_listener import LAST_LOOK_SECONDS, Heard, Listening, address_of
from commandbus.clock import monotonic
from commandbus.errors import (
    CallTimeoutError,
    CommandNotFoundError,
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidCommandError,
)
from commandbus.flow.operation import Operation, explain_absence
from commandbus.lazy import lazy
from commandbus.model import names
from commandbus.model.command import CommandStatus, SentCommand
from commandbus.model.durations import Duration, parse_seconds
from commandbus.model.json_values import Json
from commandbus.settings import Settings

if TYPE_CHECKING:
    from commandbus.flow.commands import call as calls
    from commandbus.flow.commands.call import CommandOutcome
else:
    calls = lazy("commandbus.flow.commands.call")

Name = tuple[str, str]
AWAY = (psycopg.OperationalError, DatabaseUnavailableError)


class Wait:
    """One wait: for which commands, until when, and what was seen of them last."""

    def __init__(self, commands: Iterable[SentCommand | Name], wait: Duration) -> None:
        given = list(commands)
        self.names = [_name_of(command) for command in given]
        self._sent = {command[:2] for command in given if isinstance(command, SentCommand)}
        self.seconds = parse_seconds(wait, name="wait", error=InvalidCommandError)
        self.trouble: BaseException | None = None  # why the last look failed
        self._until = monotonic() + self.seconds
        self._seen: dict[Name, CommandOutcome] = {}
        self._unheard: set[Name] = set()  # the listener's database has no such command

    def remaining(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._until - monotonic())

    def seconds_to_look(self) -> float:
        """How long the first look may take. A very short wait looks, too."""
        return max(self.remaining(), LAST_LOOK_SECONDS)

    @property
    def is_open(self) -> bool:
        """Is there anything to wait for?"""
        return any(self._is_open(name) for name in self.names)

    def look(self) -> Operation[dict[int, CommandOutcome]]:
        """Look at all that have no outcome yet."""
        return calls.outcomes(list(dict.fromkeys(name for name in self.names if self._is_open(name))))

    def note(self, found: dict[int, CommandOutcome]) -> None:
        """Take in what a look has found."""
        seen = {(outcome.domain, outcome.command_id): outcome for outcome in found.values()}
        for name in self.names:
            if self._is_open(name) and name not in seen:
                raise _not_found(name, was_there=name in self._seen, was_sent=name in self._sent)
        self._seen |= seen

    @contextmanager
    def listening(self, listening: Listening, where: Callable[[], Settings]) -> Iterator[list[Heard]]:
        """Let the listener of the bus tell the outcomes that are missing; what it told is taken in at the end."""
        heard: dict[Name, Heard] = {}
        with ExitStack() as stack:
            listener = listening.get(where)
            for name, seen in self._seen.items():
                if self._is_open(name):
                    sent = SentCommand(*name, seen.id, created=False)
                    heard[name] = stack.enter_context(listener.awaiting(sent))
            yield list(heard.values())
            for name, told in heard.items():
                if told.done():
                    self._take_in(name, told.result())

    def conclude(self) -> list[CommandOutcome]:
        """Returns the outcomes, in the order of the commands."""
        for name in self._unheard:
            if self._is_open(name):
                raise ConfigurationError(
                    f"command {name[1]!r} is in the database of the pool that was lent to this bus, but "
                    f"database_url, where the bus listens for outcomes, names another one; it must be the same"
                )
        return [self._seen[name] for name in self.names]

    def _take_in(self, name: Name, outcome: CommandOutcome | None) -> None:
        if outcome is None:
            self._unheard.add(name)  # it is gone, or the listener has another database: the last look says which
        else:
            self._seen[name] = outcome

    def _is_open(self, name: Name) -> bool:
        return name not in self._seen or self._seen[name].status is CommandStatus.PENDING


class WaitMethods(BusBase):
    """What CommandBus has of it."""

    def _run(self, operation: Operation[Any], seconds: float | None = None) -> Any:
        raise NotImplementedError

    def wait(self, domain: str | SentCommand, command_id: str | None = None, *, wait: Duration = 30.0) -> Json:
        """Wait for a command that was sent before, and return its result; any other outcome raises CallError.

        Name it by its domain and command_id, or give what `send` returned. `wait` is how long the caller waits
        (then CallTimeoutError: the command goes on). A command that does not exist is CommandNotFoundError.
        """
        waiting = Wait([_named(domain, command_id)], wait)
        return _result(waiting, self._wait_for(waiting))

    def wait_all(self, commands: Iterable[SentCommand | Name], *, wait: Duration = 30.0) -> list[CommandOutcome]:
        """Wait for many commands, and return their outcomes in the same order; PENDING: not in time.

        `commands` are what `send` or `send_many` returned, or pairs (domain, command_id). `wait` is for all of
        them together. No outcome raises an error; a command that does not exist is CommandNotFoundError.
        """
        return self._wait_for(Wait(commands, wait))

    def _wait_for(self, wait: Wait) -> list[CommandOutcome]:
        try:
            found = self._run(wait.look(), wait.seconds_to_look())
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_absence(error) from None
        wait.note(found)
        if wait.is_open:
            with wait.listening(self._listening, _where(self)) as heard:
                futures.wait(heard, wait.remaining())
        if wait.is_open:
            try:
                wait.note(self._run(wait.look(), LAST_LOOK_SECONDS))
            except AWAY as error:
                wait.trouble = error
        return wait.conclude()


class AsyncWaitMethods(BusBase):
    """What AsyncCommandBus has of it."""

    async def _run_within(self, seconds: float, operation: Operation[Any]) -> Any:
        raise NotImplementedError

    async def wait(
        self, domain: str | SentCommand, command_id: str | None = None, *, wait: Duration = 30.0
    ) -> Json:
        """Wait for a command that was sent before, and return its result; see CommandBus.wait."""
        waiting = Wait([_named(domain, command_id)], wait)
        return _result(waiting, await self._wait_for(waiting))

    async def wait_all(
        self, commands: Iterable[SentCommand | Name], *, wait: Duration = 30.0
    ) -> list[CommandOutcome]:
        """Wait for many commands, and return their outcomes in the same order; see CommandBus.wait_all."""
        return await self._wait_for(Wait(commands, wait))

    async def _wait_for(self, wait: Wait) -> list[CommandOutcome]:
        try:
            found = await self._run_within(wait.seconds_to_look(), wait.look())
        except (pg.UndefinedTable, pg.InvalidSchemaName) as error:
            raise explain_absence(error) from None
        wait.note(found)
        if wait.is_open:
            with wait.listening(self._listening, _where(self)) as heard:
                await _until_done(heard, wait.remaining())
        if wait.is_open:
            try:
                wait.note(await self._run_within(LAST_LOOK_SECONDS, wait.look()))
            except AWAY as error:
                wait.trouble = error
        return wait.conclude()


async def _until_done(heard: list[Heard], seconds: float) -> None:
    done, _ = await asyncio.wait([asyncio.wrap_future(each) for each in heard], timeout=seconds)
    for each in done:
        each.exception()  # looked at: `heard` has it, too


def _where(bus: BusBase) -> Callable[[], Settings]:
    return partial(address_of, bus._database, bus.settings, bus._lent_pool)


def _named(domain: str | SentCommand, command_id: str | None) -> SentCommand | Name:
    if isinstance(domain, SentCommand) and command_id is None:
        return domain
    if isinstance(domain, str) and command_id is not None:
        return domain, command_id
    raise TypeError("wait takes a domain and a command_id, or what send returned")


def _name_of(command: SentCommand | Name) -> Name:
    try:
        domain, command_id = command[:2]
    except (TypeError, ValueError):
        raise TypeError(
            f"{names.shown(command)} names no command; give what send returned, or (domain, command_id)"
        ) from None
    return names.check_domain(domain), names.to_id(command_id)


def _result(wait: Wait, outcomes: list[CommandOutcome]) -> Json:
    (outcome,) = outcomes
    if outcome.status is CommandStatus.PENDING:
        raise CallTimeoutError(outcome.domain, outcome.command_id, wait.seconds) from wait.trouble
    return calls.conclude(outcome)


def _not_found(name: Name, *, was_there: bool, was_sent: bool) -> CommandNotFoundError:
    domain, command_id = name
    why = "does not exist, or the transaction that sends it is not committed yet"
    if was_there:
        why = "is gone: it was removed (by the retention, perhaps) before its outcome could be read"
    elif was_sent:
        why = (
            "was sent, but is not in the database: the transaction that sent it (conn=) is not committed yet, or "
            "was rolled back, or the command was removed meanwhile; wait after the commit"
        )
    return CommandNotFoundError(f"command {command_id!r} of domain {domain!r} {why}")
