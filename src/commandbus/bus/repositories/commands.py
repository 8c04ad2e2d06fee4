"""CommandRepository and AsyncCommandRepository: send, find, cancel and retry commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Unpack

from commandbus.bus.base import CHUNK, whoami
from commandbus.bus.one_body import awaited
from commandbus.bus.repositories.base import AsyncRepository, Repository
from commandbus.bus.send_many import send_chunks, send_chunks_async
from commandbus.errors import InvalidCommandError
from commandbus.flow.operation import then
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
from commandbus.model.effect import CheckpointRecord, EffectRecord, EffectState
from commandbus.model.json_values import JsonValue, PayloadObject
from commandbus.model.ledger import Ledger
from commandbus.model.mask import Mask
from commandbus.model.page import Page
from commandbus.model.priority import Priority

if TYPE_CHECKING:
    from commandbus.flow.commands import (
        call,
        failures,
        history,
        inspect,
        ledger,
        lookup,
        operate,
        replay,
        stuck_groups,
        tsq,
    )
    from commandbus.flow.commands import query as queries
    from commandbus.flow.commands import why_waiting as waiting
    from commandbus.flow.commands.call import CommandOutcome
    from commandbus.flow.commands.failures import FailureGroup
    from commandbus.flow.commands.history import AttemptRecord, StuckAttempt
    from commandbus.flow.commands.inspect import RejectedMessage, UndeliveredReply
    from commandbus.flow.commands.query import CommandFilters, CommandQuery
    from commandbus.flow.commands.stuck_groups import StuckGroup
    from commandbus.flow.commands.why_waiting import WhyWaiting
    from commandbus.flow.effects import inspect as effects
    from commandbus.flow.effects import operate as effect_actions
else:
    call = lazy("commandbus.flow.commands.call")
    failures = lazy("commandbus.flow.commands.failures")
    history = lazy("commandbus.flow.commands.history")
    stuck_groups = lazy("commandbus.flow.commands.stuck_groups")
    inspect = lazy("commandbus.flow.commands.inspect")
    ledger = lazy("commandbus.flow.commands.ledger")
    lookup = lazy("commandbus.flow.commands.lookup")
    operate = lazy("commandbus.flow.commands.operate")
    replay = lazy("commandbus.flow.commands.replay")
    queries = lazy("commandbus.flow.commands.query")
    tsq = lazy("commandbus.flow.commands.tsq")
    waiting = lazy("commandbus.flow.commands.why_waiting")
    effects = lazy("commandbus.flow.effects.inspect")
    effect_actions = lazy("commandbus.flow.effects.operate")


class CommandRepository(Repository):
    """Commands: `bus.commands`, or `CommandRepository(pool)`."""

    # --- writing ----------------------------------------------------------------------------------------------

    def save(self, domain: str, command: NewCommand, *, conn: object = None) -> SentCommand:
        """Send a command. A second send of the same `command_id` with the same content changes nothing."""
        bus = self._bus
        if bus._chain is not None:
            return bus._send_one(domain, command, lambda new: bus.run(bus._send(domain, new), conn))
        return bus.run(bus._send(domain, command), conn)

    def save_many(
        self,
        domain: str,
        commands: Iterable[NewCommand | Mapping[str, object] | PayloadObject],
        *,
        chunk_size: int = CHUNK,
        conn: object = None,
    ) -> list[SentCommand]:
        """Send many commands: NewCommands, dicts, or objects whose classes are marked with `@command`.

        Each chunk is sent as a whole or not at all; with `conn`, all commands are.
        """
        if self._bus._chain is not None:
            commands = self._bus._through(domain, commands)
        return send_chunks(self._bus, domain, commands, chunk_size, conn)

    # --- by name ----------------------------------------------------------------------------------------------

    def get(self, domain: str, command_id: str, *, conn: object = None) -> CommandRecord | None:
        """Returns what is known about a command; None if there is no such command."""
        return self._bus.run(lookup.get_command(domain, command_id), conn)

    def get_many(
        self, domain: str, command_ids: Iterable[str], *, conn: object = None
    ) -> dict[str, CommandRecord]:
        """What is known about commands, by their command_ids; those that do not exist are left out."""
        return self._bus.run(lookup.get_commands(domain, command_ids), conn)

    def exists(self, domain: str, command_id: str, *, conn: object = None) -> bool:
        """Is there such a command?"""
        return self._bus.run(then(lookup.existing(domain, [command_id]), bool), conn)

    def exists_many(self, domain: str, command_ids: Iterable[str], *, conn: object = None) -> set[str]:
        """Which of these commands exist."""
        return self._bus.run(lookup.existing(domain, command_ids), conn)

    def get_outcome(self, domain: str, command_id: str, *, conn: object = None) -> CommandOutcome | None:
        """Returns a command's status, and its result or error; None if there is no such command.

        A role that only sends may call this for any command whose id it knows. `get` returns more, but needs a
        role that may read.
        """
        return self._bus.run(call.get_outcome(domain, command_id), conn)

    def get_attempts(self, domain: str, command_id: str, *, conn: object = None) -> Page[AttemptRecord]:
        """The attempts that did not simply complete, with error, code and traceback, in order."""
        return self._bus.run(then(history.list_attempts(domain, command_id), Page), conn)

    def get_ledger(self, domain: str, command_id: str, *, conn: object = None) -> Ledger | None:
        """Returns where the time of a command went, from its sending to its end or to now. The intervals have no
        gap and no overlap. None if there is no such command."""
        return self._bus.run(ledger.get_ledger(domain, command_id), conn)

    def why_waiting(self, domain: str, command_id: str, *, conn: object = None) -> WhyWaiting | None:
        """Returns why a command does not run now, its place in line, and how long that will take. None if there is
        no such command."""
        return self._bus.run(waiting.why_waiting(domain, command_id), conn)

    # --- effects and checkpoints ------------------------------------------------------------------------------

    def get_effects(self, domain: str, command_id: str, *, conn: object = None) -> Page[EffectRecord]:
        """The effects of a command (`ctx.effect`), in the order in which they began."""
        return self._bus.run(then(effects.effects_of(domain, command_id), Page), conn)

    def get_checkpoint(self, domain: str, command_id: str, *, conn: object = None) -> CheckpointRecord | None:
        """The last checkpoint of a command (`ctx.checkpoint`); None if it has none."""
        return self._bus.run(effects.checkpoint_of(domain, command_id), conn)

    def list_open_effects(
        self, domain: str | None = None, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[EffectRecord]:
        """A page of the effects of which nobody knows whether their calls were made. Those of running attempts are
        among them."""
        return self._bus.run(effects.list_open_effects(domain, limit=limit, cursor=cursor), conn)

    def resolve_effect(
        self,
        domain: str,
        command_id: str,
        name: str,
        *,
        done: bool,
        receipt: JsonValue = None,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> None:
        """Say how an open effect ended: its call was made (`done=True`, with its receipt), or was not.

        It does not retry the command. Its next attempt gets the receipt, or makes the call with the same key.
        """
        if not done and receipt is not None:
            raise InvalidCommandError(f"an effect that was not done has no receipt, but {receipt!r} was given")
        text = payload.dump(receipt, what="receipt", max_bytes=self._bus.settings.max_payload_bytes)
        state = EffectState.DONE if done else EffectState.NOT_DONE
        action = operate.operator_action(operator or whoami(), reason)
        return self._bus.run(effect_actions.resolve_effect(domain, command_id, name, state, text, action), conn)

    # --- pages ------------------------------------------------------------------------------------------------

    def query(
        self,
        query: CommandQuery | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
        **filters: Unpack[CommandFilters],
    ) -> Page[CommandRecord]:
        """A page of the commands that match `query`, or these filters, newest first; the next begins at
        `cursor=page.next_cursor`.

        One call looks at a bounded number of commands. If the page `is_partial`, there may be more that match: its
        cursor goes on from there."""
        wanted = query if query is not None else queries.CommandQuery(**filters)
        self._bus._check_search(wanted)
        return self._bus.run(queries.query_commands(wanted, limit=limit, cursor=cursor), conn)

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
        return self.query(domain=domain, status=status, limit=limit, cursor=cursor, conn=conn)

    def list_by_type(
        self, domain: str, command_type: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands of a type, newest first."""
        return self.query(domain=domain, command_type=command_type, limit=limit, cursor=cursor, conn=conn)

    def list_by_correlation(
        self, correlation_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands with this correlation_id, newest first."""
        return self.query(correlation_id=correlation_id, limit=limit, cursor=cursor, conn=conn)

    def list_by_batch(
        self, domain: str, batch_id: str, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[CommandRecord]:
        """A page of the commands of a batch, newest first."""
        return self.query(domain=domain, batch_id=batch_id, limit=limit, cursor=cursor, conn=conn)

    def count_by_status(
        self, domain: str, command_type: str | None = None, *, conn: object = None
    ) -> dict[CommandStatus, int]:
        """How many commands of a domain, or of a type in it, have each status. It reads all of them."""
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
        """Returns attempts that had to be stopped, newest first, with what was seen at that moment (`autopsy`)."""
        return self._bus.run(
            history.list_stuck(domain, command_type, since=since, limit=limit, cursor=cursor), conn
        )

    def list_stuck_groups(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        since: datetime | None = None,
        limit: int = 50,
        conn: object = None,
    ) -> Page[StuckGroup]:
        """Returns where in the application's own code attempts hung that had to be stopped, the place seen last
        first. It looks at the newest 5,000 of them; a page that has not seen all is partial."""
        return self._bus.run(stuck_groups.list_stuck_groups(domain, command_type, since=since, limit=limit), conn)

    def list_failures(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        since: datetime | None = None,
        in_troubleshooting: bool = False,
        limit: int = 50,
        conn: object = None,
    ) -> Page[FailureGroup]:
        """Returns failures that are alike, counted together, the one that was seen last first. With
        `in_troubleshooting`, only failures of commands that need a person."""
        found = failures.list_failures(
            domain, command_type, since=since, in_troubleshooting=in_troubleshooting, limit=limit
        )
        return self._bus.run(found, conn)

    def list_rejected(
        self,
        domain: str | None = None,
        *,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[RejectedMessage]:
        """Returns raw messages that were not commands and were set aside, newest first."""
        return self._bus.run(inspect.list_rejected(domain=domain, limit=limit, cursor=cursor), conn)

    def list_undelivered(
        self, *, limit: int = 50, cursor: str | None = None, conn: object = None
    ) -> Page[UndeliveredReply]:
        """Replies that could not be sent because their queue was gone, newest first, with the reason."""
        return self._bus.run(inspect.list_undelivered(limit=limit, cursor=cursor), conn)

    # --- the troubleshooting queue, and canceling -------------------------------------------------------------

    def list_in_tsq(
        self,
        domain: str | None = None,
        command_type: str | None = None,
        *,
        error_code: str | None = None,
        fingerprint: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        conn: object = None,
    ) -> Page[TsqEntry]:
        """Returns a page of the commands that need a person, the oldest first."""
        operation = tsq.list_tsq(
            domain=domain,
            command_type=command_type,
            error_code=error_code,
            fingerprint=fingerprint,
            limit=limit,
            cursor=cursor,
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
        """Cancel a command. If it runs, ask its worker to stop it. The result says which of the two was done.

        A running handler learns of the request from its context, and has its grace to clean up. The command ends
        CANCELED, unless it completes by then. A second request changes nothing and returns the same.
        """
        action = operate.operator_action(operator or whoami(), reason, "CANCEL")
        return self._bus.run(operate.cancel(names.check_domain(domain), command_id, action), conn)

    def replay(
        self,
        domain: str,
        command_id: str,
        data: JsonValue,
        *,
        new_id: str | None = None,
        cancel: bool = False,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> SentCommand:
        """Send a new command like this one, which has ended or needs a person, with other data.

        The audit trails of both name the other one. With `cancel`, the old one, which needs a person, is canceled
        in the same transaction. Where a field of `data` is masked (`***`), the new command gets the old value.
        """
        action = operate.operator_action(operator or whoami(), reason)
        replaying = replay.replay(
            domain, command_id, data, action, new_id=new_id, cancels=cancel, mask=Mask(self._bus.settings.mask),
            max_bytes=self._bus.settings.max_payload_bytes, bus=self._bus,
        )  # fmt: skip
        return self._bus.run(replaying, conn)

    def set_priority(
        self,
        domain: str,
        command_id: str,
        priority: Priority,
        *,
        operator: str | None = None,
        reason: str | None = None,
        conn: object = None,
    ) -> Priority:
        """Change the priority of a command that waits, however it waits. Returns the former one.

        If it runs, its retries have the new priority. A command that has ended, or is in the troubleshooting
        queue, is refused.
        """
        action = operate.operator_action(operator or whoami(), reason)
        return self._bus.run(operate.set_priority(names.check_domain(domain), command_id, priority, action), conn)

    def operator_retry(
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
        return self._bus.run(operate.act_on(domain, command_id, action), conn)

    def operator_cancel(
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
        return self._bus.run(operate.act_on(domain, command_id, action), conn)

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
        """Complete a command of the troubleshooting queue by hand: it ends COMPLETED, with this result."""
        text = payload.dump(result, what="result", max_bytes=self._bus.settings.max_payload_bytes)
        action = operate.operator_action(operator or whoami(), reason, "COMPLETE", text)
        return self._bus.run(operate.act_on(domain, command_id, action), conn)


class AsyncCommandRepository(AsyncRepository):
    """Commands for async code: `bus.commands`, or `AsyncCommandRepository(pool)`. The same methods, awaited."""

    save = awaited(CommandRepository.save)
    get = awaited(CommandRepository.get)
    get_many = awaited(CommandRepository.get_many)
    exists = awaited(CommandRepository.exists)
    exists_many = awaited(CommandRepository.exists_many)
    get_outcome = awaited(CommandRepository.get_outcome)
    get_attempts = awaited(CommandRepository.get_attempts)
    get_ledger = awaited(CommandRepository.get_ledger)
    why_waiting = awaited(CommandRepository.why_waiting)
    get_effects = awaited(CommandRepository.get_effects)
    get_checkpoint = awaited(CommandRepository.get_checkpoint)
    list_open_effects = awaited(CommandRepository.list_open_effects)
    resolve_effect = awaited(CommandRepository.resolve_effect)
    query = awaited(CommandRepository.query)
    list_by_status = awaited(CommandRepository.list_by_status)
    list_by_type = awaited(CommandRepository.list_by_type)
    list_by_correlation = awaited(CommandRepository.list_by_correlation)
    list_by_batch = awaited(CommandRepository.list_by_batch)
    count_by_status = awaited(CommandRepository.count_by_status)
    list_stuck = awaited(CommandRepository.list_stuck)
    list_stuck_groups = awaited(CommandRepository.list_stuck_groups)
    list_failures = awaited(CommandRepository.list_failures)
    list_rejected = awaited(CommandRepository.list_rejected)
    list_undelivered = awaited(CommandRepository.list_undelivered)
    list_in_tsq = awaited(CommandRepository.list_in_tsq)
    cancel = awaited(CommandRepository.cancel)
    replay = awaited(CommandRepository.replay)
    set_priority = awaited(CommandRepository.set_priority)
    operator_retry = awaited(CommandRepository.operator_retry)
    operator_cancel = awaited(CommandRepository.operator_cancel)
    operator_complete = awaited(CommandRepository.operator_complete)

    async def save_many(
        self,
        domain: str,
        commands: Iterable[NewCommand | Mapping[str, object] | PayloadObject],
        *,
        chunk_size: int = CHUNK,
        conn: object = None,
    ) -> list[SentCommand]:
        """Send many commands: NewCommands, dicts, or objects whose classes are marked with `@command`.

        Each chunk is sent as a whole or not at all; with `conn`, all commands are.
        """
        if self._bus._chain is not None:
            commands = await self._bus._through(domain, commands)
        return await send_chunks_async(self._bus, domain, commands, chunk_size, conn)
