"""AsyncCommandRepository: commands by what is known of them, for async code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Unpack

from commandbus.bus.base import CHUNK, whoami
from commandbus.bus.repositories.base import AsyncRepository
from commandbus.lazy import lazy
from commandbus.model import names, payload
from commandbus.model.command import (
    CancelResult,
    CommandRecord,
    CommandStatus,
    NewCommand,
    SentCommand,
    TsqEntry,
)
from commandbus.model.json_values import JsonValue
from commandbus.model.page import Page

if TYPE_CHECKING:
    from commandbus.flow.commands import call, history, inspect, lookup, operate
    from commandbus.flow.commands.call import CommandOutcome
    from commandbus.flow.commands.history import AttemptRecord, StuckAttempt
    from commandbus.flow.commands.inspect import CommandFilters, CommandQuery, RejectedMessage, UndeliveredReply
else:
    call = lazy("commandbus.flow.commands.call")
    history = lazy("commandbus.flow.commands.history")
    inspect = lazy("commandbus.flow.commands.inspect")
    lookup = lazy("commandbus.flow.commands.lookup")
    operate = lazy("commandbus.flow.commands.operate")


class AsyncCommandRepository(AsyncRepository):
    """Commands for async code: `bus.commands`, or `AsyncCommandRepository(pool)`. The same methods, awaited."""

    # --- writing ----------------------------------------------------------------------------------------------

    async def save(self, domain: str, command: NewCommand, *, conn: object = None) -> SentCommand:
        """Send a command; the same `command_id` with the same content is sent once."""
        return await self._bus.run(self._bus._send(domain, command), conn)

    async def save_many(
        self,
        domain: str,
        commands: Iterable[NewCommand | Mapping[str, object]],
        *,
        chunk_size: int = CHUNK,
        conn: object = None,
    ) -> list[SentCommand]:
        """Send many commands. Each chunk is sent as a whole or not at all; with `conn`, all commands are."""
        sent: list[SentCommand] = []
        chunks = self._bus._chunks(domain, commands, chunk_size)
        for chunk in chunks:
            receipts = await self._bus.run(chunk, conn)
            sent += receipts
        return sent

    # --- by name ----------------------------------------------------------------------------------------------

    async def get(self, domain: str, command_id: str, *, conn: object = None) -> CommandRecord | None:
        """Returns what is known about a command; None if there is no such command."""
        return await self._bus.run(lookup.get_command(domain, command_id), conn)

    async def get_many(
        self, domain: str, command_ids: Iterable[str], *, conn: object = None
    ) -> dict[str, CommandRecord]:
        """What is known of commands, by their command_ids; those that do not exist are left out."""
        return await self._bus.run(lookup.get_commands(domain, command_ids), conn)

    async def exists(self, domain: str, command_id: str, *, conn: object = None) -> bool:
        """Is there such a command?"""
        found = await self._bus.run(lookup.existing(domain, [command_id]), conn)
        return bool(found)

    async def exists_many(self, domain: str, command_ids: Iterable[str], *, conn: object = None) -> set[str]:
        """Which of these commands exist."""
        return await self._bus.run(lookup.existing(domain, command_ids), conn)

    async def get_outcome(self, domain: str, command_id: str, *, conn: object = None) -> CommandOutcome | None:
        """Returns a command's status, and its result or error; None if there is no such command.

        See CommandRepository.get_outcome.
        """
        return await self._bus.run(call.get_outcome(domain, command_id), conn)

    async def get_attempts(self, domain: str, command_id: str, *, conn: object = None) -> Page[AttemptRecord]:
        """The attempts that did not simply complete, with error, code and traceback, in order."""
        return Page(await self._bus.run(history.list_attempts(domain, command_id), conn))

    # --- pages ------------------------------------------------------------------------------------------------

    async def query(
        self,
        query: CommandQuery | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
        **filters: Unpack[CommandFilters],
    ) -> Page[CommandRecord]:
        """A page of the commands that match `query`, or these filters, newest first; the next begins at
        `cursor=page.next_cursor`."""
        wanted = query if query is not None else inspect.CommandQuery(**filters)
        return await self._bus.run(inspect.query_commands(wanted, limit=limit, cursor=cursor), conn)

    async def list_by_status(
        self,
        domain: str | None,
        status: CommandStatus,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[CommandRecord]:
        """A page of the commands that have this status, newest first."""
        return await self.query(domain=domain, status=status, limit=limit, cursor=cursor, conn=conn)

    async def list_by_type(
        self, domain: str, command_type: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands of a type, newest first."""
        return await self.query(domain=domain, command_type=command_type, limit=limit, cursor=cursor, conn=conn)

    async def list_by_correlation(
        self, correlation_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands with this correlation_id, newest first."""
        return await self.query(correlation_id=correlation_id, limit=limit, cursor=cursor, conn=conn)

    async def list_by_batch(
        self, domain: str, batch_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands of a batch, newest first."""
        return await self.query(domain=domain, batch_id=batch_id, limit=limit, cursor=cursor, conn=conn)

    async def count_by_status(
        self, domain: str, command_type: str | None = None, *, conn: object = None
    ) -> dict[CommandStatus, int]:
        """How many commands of a domain, or of a type in it, have which status. It reads all of them."""
        return await self._bus.run(lookup.count_by_status(domain, command_type), conn)

    async def list_stuck(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        since: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[StuckAttempt]:
        """Returns attempts that had to be stopped, newest first, with what was seen then (`autopsy`)."""
        return await self._bus.run(
            history.list_stuck(domain, command_type, since=since, limit=limit, cursor=cursor), conn
        )

    async def list_rejected(
        self,
        domain: str | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[RejectedMessage]:
        """Returns raw messages that were not commands and were set aside, newest first."""
        return await self._bus.run(inspect.list_rejected(domain=domain, limit=limit, cursor=cursor), conn)

    async def list_undelivered(
        self, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[UndeliveredReply]:
        """Replies whose queue was gone when they were to be sent, newest first, with the reason."""
        return await self._bus.run(inspect.list_undelivered(limit=limit, cursor=cursor), conn)

    # --- the troubleshooting queue, and canceling -------------------------------------------------------------

    async def list_in_tsq(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        error_code: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[TsqEntry]:
        """Returns a page of the commands that need a person, the oldest first."""
        operation = inspect.list_tsq(
            domain=domain, command_type=command_type, error_code=error_code, limit=limit, cursor=cursor
        )
        return await self._bus.run(operation, conn)

    async def cancel(
        self,
        domain: str,
        command_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> CancelResult:
        """Cancel a command. If it runs, ask its worker to stop it. The result says which.

        See CommandRepository.cancel.
        """
        action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return await self._bus.run(operate.cancel(names.check_domain(domain), command_id, action), conn)

    async def operator_retry(
        self,
        domain: str,
        command_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Retry a command of the troubleshooting queue; its attempts are counted from 1 again."""
        action = operate.operator_action(operator or whoami(), reason, "RETRY")
        await self._bus.run(operate.act_on(domain, command_id, action), conn)

    async def operator_cancel(
        self,
        domain: str,
        command_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Cancel a command of the troubleshooting queue: it ends CANCELED."""
        action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        await self._bus.run(operate.act_on(domain, command_id, action), conn)

    async def operator_complete(
        self,
        domain: str,
        command_id: str,
        result: JsonValue = None,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Complete a command of the troubleshooting queue by hand: it ends COMPLETED, with this result."""
        text = payload.dump(result, what="result", max_bytes=self._bus.settings.max_payload_bytes)
        action = operate.operator_action(operator or whoami(), reason, "COMPLETE", text)
        await self._bus.run(operate.act_on(domain, command_id, action), conn)
