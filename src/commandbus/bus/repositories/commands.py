"""CommandRepository and AsyncCommandRepository: commands by what is known of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from commandbus.bus.base import whoami
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.flow.commands import call, history, inspect, lookup, operate
from commandbus.flow.commands.call import CommandOutcome
from commandbus.flow.commands.history import AttemptRecord, StuckAttempt
from commandbus.flow.commands.inspect import CommandQuery, RejectedMessage, UndeliveredReply
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


class CommandRepository(Repository):
    """Commands: `bus.commands`, or `CommandRepository(pool)`."""

    # --- writing ----------------------------------------------------------------------------------------------

    def save(self, domain: str, command: NewCommand, *, conn: object = None) -> SentCommand:
        """Send a command; the same `command_id` with the same content is sent once."""
        return self._bus.run(self._bus._send(domain, command), conn)

    def save_many(
        self, domain: str, commands: Iterable[NewCommand | Mapping[str, object]], *, conn: object = None
    ) -> list[SentCommand]:
        """Send many commands, each thousand all or none (all of them all or none with `conn`)."""
        return self._bus.send_many(domain, commands, conn=conn)

    # --- by name ----------------------------------------------------------------------------------------------

    def get(self, domain: str, command_id: str, *, conn: object = None) -> CommandRecord | None:
        """What is known of a command; None if there is none."""
        return self._bus.run(lookup.get_command(domain, command_id), conn)

    def get_many(
        self, domain: str, command_ids: Iterable[str], *, conn: object = None
    ) -> dict[str, CommandRecord]:
        """What is known of commands, by their command_ids; those that do not exist are left out."""
        return self._bus.run(lookup.get_commands(domain, command_ids), conn)

    def exists(self, domain: str, command_id: str, *, conn: object = None) -> bool:
        """Is there such a command?"""
        return bool(self._bus.run(lookup.existing(domain, [command_id]), conn))

    def exists_many(self, domain: str, command_ids: Iterable[str], *, conn: object = None) -> set[str]:
        """Which of these commands exist."""
        return self._bus.run(lookup.existing(domain, command_ids), conn)

    def get_outcome(self, domain: str, command_id: str, *, conn: object = None) -> CommandOutcome | None:
        """What became of a command; None if there is none. A role that only sends may ask this, too."""
        return self._bus.run(call.get_outcome(domain, command_id), conn)

    def get_attempts(self, domain: str, command_id: str, *, conn: object = None) -> list[AttemptRecord]:
        """The attempts that did not simply complete, with error, code and traceback, in order."""
        return self._bus.run(history.list_attempts(domain, command_id), conn)

    # --- pages ------------------------------------------------------------------------------------------------

    def query(
        self, query: CommandQuery, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of commands that match, newest first; the next begins at `cursor=page.next_cursor`."""
        return self._bus.run(inspect.query_commands(query, limit=limit, cursor=cursor), conn)

    def list_by_status(
        self,
        domain: str | None,
        status: CommandStatus,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[CommandRecord]:
        """A page of the commands that have this status, newest first."""
        query = CommandQuery(domain=domain, status=status)
        return self.query(query, limit=limit, cursor=cursor, conn=conn)

    def list_by_type(
        self, domain: str, command_type: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands of a type, newest first."""
        query = CommandQuery(domain=domain, command_type=command_type)
        return self.query(query, limit=limit, cursor=cursor, conn=conn)

    def list_by_correlation(
        self, correlation_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands with this correlation_id, newest first."""
        query = CommandQuery(correlation_id=correlation_id)
        return self.query(query, limit=limit, cursor=cursor, conn=conn)

    def list_by_batch(
        self, domain: str, batch_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands of a batch, newest first."""
        query = CommandQuery(domain=domain, batch_id=batch_id)
        return self.query(query, limit=limit, cursor=cursor, conn=conn)

    def count_by_status(
        self, domain: str, command_type: str | None = None, *, conn: object = None
    ) -> dict[CommandStatus, int]:
        """How many commands of a domain, or of a type in it, have which status. It reads all of them."""
        return self._bus.run(lookup.count_by_status(domain, command_type), conn)

    def list_stuck(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        since: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[StuckAttempt]:
        """Attempts that had to be stopped, newest first, with what was seen then (`autopsy`)."""
        return self._bus.run(
            history.list_stuck(domain, command_type, since=since, limit=limit, cursor=cursor), conn
        )

    def list_rejected(
        self,
        domain: str | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[RejectedMessage]:
        """Raw messages that were no commands and were moved aside, newest first."""
        return self._bus.run(inspect.list_rejected(domain=domain, limit=limit, cursor=cursor), conn)

    def list_undelivered(
        self, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[UndeliveredReply]:
        """Replies whose queue was gone when they were to be sent, newest first, with the reason."""
        return self._bus.run(inspect.list_undelivered(limit=limit, cursor=cursor), conn)

    # --- the troubleshooting queue, and canceling -------------------------------------------------------------

    def list_in_tsq(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        error_code: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[TsqEntry]:
        """Returns a page of the commands in the troubleshooting queue, the oldest first."""
        operation = inspect.list_tsq(
            domain=domain, command_type=command_type, error_code=error_code, limit=limit, cursor=cursor
        )
        return self._bus.run(operation, conn)

    def cancel(
        self,
        domain: str,
        command_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> CancelResult:
        """Cancel a command that waits, or ask the worker that runs it to stop it. The result says which."""
        action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return self._bus.run(operate.cancel(names.check_domain(domain), command_id, action), conn)

    def operator_retry(
        self,
        domain: str,
        command_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Run a command of the troubleshooting queue again; its attempts start again."""
        action = operate.operator_action(operator or whoami(), reason, "RETRY")
        self._bus.run(operate.act_on(domain, command_id, action), conn)

    def operator_cancel(
        self,
        domain: str,
        command_id: str,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Give up a command of the troubleshooting queue: CANCELED."""
        action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        self._bus.run(operate.act_on(domain, command_id, action), conn)

    def operator_complete(
        self,
        domain: str,
        command_id: str,
        result: JsonValue = None,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """A command of the troubleshooting queue was done by hand: COMPLETED with this result."""
        text = payload.dump(result, what="result", max_bytes=self._bus.settings.max_payload_bytes)
        action = operate.operator_action(operator or whoami(), reason, "COMPLETE", text)
        self._bus.run(operate.act_on(domain, command_id, action), conn)


class AsyncCommandRepository(AsyncRepository):
    """Commands for async code: `bus.commands`, or `AsyncCommandRepository(pool)`. The same methods, awaited."""

    # --- writing ----------------------------------------------------------------------------------------------

    async def save(self, domain: str, command: NewCommand, *, conn: object = None) -> SentCommand:
        """Send a command; the same `command_id` with the same content is sent once."""
        return await self._bus.run(self._bus._send(domain, command), conn)

    async def save_many(
        self, domain: str, commands: Iterable[NewCommand | Mapping[str, object]], *, conn: object = None
    ) -> list[SentCommand]:
        """Send many commands, each thousand all or none (all of them all or none with `conn`)."""
        return await self._bus.send_many(domain, commands, conn=conn)

    # --- by name ----------------------------------------------------------------------------------------------

    async def get(self, domain: str, command_id: str, *, conn: object = None) -> CommandRecord | None:
        """What is known of a command; None if there is none."""
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
        """What became of a command; None if there is none. A role that only sends may ask this, too."""
        return await self._bus.run(call.get_outcome(domain, command_id), conn)

    async def get_attempts(self, domain: str, command_id: str, *, conn: object = None) -> list[AttemptRecord]:
        """The attempts that did not simply complete, with error, code and traceback, in order."""
        return await self._bus.run(history.list_attempts(domain, command_id), conn)

    # --- pages ------------------------------------------------------------------------------------------------

    async def query(
        self, query: CommandQuery, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of commands that match, newest first; the next begins at `cursor=page.next_cursor`."""
        return await self._bus.run(inspect.query_commands(query, limit=limit, cursor=cursor), conn)

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
        query = CommandQuery(domain=domain, status=status)
        return await self.query(query, limit=limit, cursor=cursor, conn=conn)

    async def list_by_type(
        self, domain: str, command_type: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands of a type, newest first."""
        query = CommandQuery(domain=domain, command_type=command_type)
        return await self.query(query, limit=limit, cursor=cursor, conn=conn)

    async def list_by_correlation(
        self, correlation_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands with this correlation_id, newest first."""
        query = CommandQuery(correlation_id=correlation_id)
        return await self.query(query, limit=limit, cursor=cursor, conn=conn)

    async def list_by_batch(
        self, domain: str, batch_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands of a batch, newest first."""
        query = CommandQuery(domain=domain, batch_id=batch_id)
        return await self.query(query, limit=limit, cursor=cursor, conn=conn)

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
        """Attempts that had to be stopped, newest first, with what was seen then (`autopsy`)."""
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
        """Raw messages that were no commands and were moved aside, newest first."""
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
        """Returns a page of the commands in the troubleshooting queue, the oldest first."""
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
        """Cancel a command that waits, or ask the worker that runs it to stop it. The result says which."""
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
        """Run a command of the troubleshooting queue again; its attempts start again."""
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
        """Give up a command of the troubleshooting queue: CANCELED."""
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
        """A command of the troubleshooting queue was done by hand: COMPLETED with this result."""
        text = payload.dump(result, what="result", max_bytes=self._bus.settings.max_payload_bytes)
        action = operate.operator_action(operator or whoami(), reason, "COMPLETE", text)
        await self._bus.run(operate.act_on(domain, command_id, action), conn)
