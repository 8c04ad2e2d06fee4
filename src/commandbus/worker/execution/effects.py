"""`ctx.effect(…)`: a call to the outside world that no attempt repeats blindly.

    enter   Begin ──► begun: the call is due
              └─────► found DONE: not due, here is the receipt
                      found open: verify, or wait for settle_after, or park for a person (model/effect.py decides)
    body    effect.key, effect.is_due: is the call due? If it is not, `effect.key` leaves the block
    leave   a receipt ──► DONE;  "it did not happen" ──► NOT_DONE;  any other error: the effect stays open

A `with` statement cannot skip its body. So `effect.key`, which the call needs as its idempotency key, raises
`EffectIsDone` if the call is not due, and the block itself catches that. A body that never asks is an error at its
first run, before an attempt can repeat it.

`EffectBlock` has the steps, as generators that yield what they need: a write, or the answer of `verify`. The sync
and the async block only differ in how they wait for these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from concurrent.futures import Future
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

from commandbus.clock import epoch, monotonic
from commandbus.errors import (
    ConnectionInUseError,
    EffectMisuseError,
    EffectUncertainError,
    InvalidCommandError,
    PermanentCommandError,
    RateLimitError,
    TransientCommandError,
)
from commandbus.flow.effects.write import Begin, End, Fenced, Write, Written
from commandbus.logger import safe_logger
from commandbus.model import payload
from commandbus.model.effect import (
    NOT_DONE,
    UNKNOWN,
    EffectState,
    FoundEffect,
    OpenEffect,
    Step,
    check_effect_key,
    check_effect_name,
    check_settle_after,
    check_verify,
    decide,
    default_key,
)
from commandbus.model.snooze import EffectWait
from commandbus.quick_dataclass import dataclass
from commandbus.shell_words import arguments
from commandbus.worker import process_identity

if TYPE_CHECKING:
    from commandbus.model.durations import Duration
    from commandbus.model.json_values import Json, JsonValue
    from commandbus.worker.execution.attempt import Attempt

logger = safe_logger("commandbus.worker")

_MOST_LOOKS: Final = 5  # how often an effect may change under an attempt that looks at it
_TOO_MANY_REQUESTS: Final = 429

Verify: TypeAlias = Callable[[OpenEffect], Any]


class EffectIsDone(BaseException):
    """Leaves the block of an effect whose call is not due. Only the block itself catches it."""

    def __init__(self, effect: Effect) -> None:
        super().__init__(f"the call of effect {effect.name!r} is not due")
        self.effect = effect


class EffectPort(Protocol):
    """What a block needs of its context."""

    @property
    def effect_attempt(self) -> Attempt: ...
    @property
    def max_payload_bytes(self) -> int: ...
    def check_may_write(self) -> None: ...
    def lose(self, what: str) -> Exception: ...


class AskWrite(NamedTuple):
    """Write this, and wait for the answer. `is_patient`: also if the attempt is asked to stop meanwhile."""

    write: Write
    is_patient: bool = False


class AskVerify(NamedTuple):
    """Ask the handler's `verify`."""

    effect: OpenEffect


Asks: TypeAlias = Generator[AskWrite | AskVerify, Any, Any]


@dataclass(frozen=True, slots=True)
class EffectOptions:
    """What a handler says about an effect, checked."""

    name: str
    key: str | None
    verify: Verify | None
    settle_after: float | None
    not_done_on: tuple[type[BaseException], ...]

    @classmethod
    def check(
        cls, name: str, key: object, verify: Any, settle_after: Duration | None, not_done_on: Any
    ) -> EffectOptions:
        """Checks them; the errors name the value."""
        kinds = not_done_on if isinstance(not_done_on, tuple) else (not_done_on,)
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"not_done_on must be an exception class, or a tuple of them, not {kind!r}")
        return cls(
            check_effect_name(name),
            check_effect_key(key),
            check_verify(verify),
            check_settle_after(settle_after),
            kinds,
        )


class Effect:
    """What a block of `ctx.effect` is given: is the call due, with which key, and what is its receipt."""

    __slots__ = (
        *("_has_asked", "_has_receipt", "_is_due", "_is_left", "_is_not_done", "_is_refused"),
        *("_key", "_port", "_receipt", "_text", "name"),
    )

    def __init__(self, name: str, key: str, port: EffectPort) -> None:
        self.name = name
        self._key = key
        self._port = port
        self._is_due = False
        self._has_asked = False  # has the body asked whether the call is due?
        self._is_refused = False  # was it told that it may not call any more?
        self._is_left = False
        self._is_not_done = False
        self._has_receipt = False
        self._receipt: Any = None
        self._text: str | None = None  # the receipt as JSON

    @property
    def is_due(self) -> bool:
        """Must the call be made? Raises if the attempt has been asked to stop, or has lost its command."""
        self._has_asked = True
        if self._is_due and not self._is_left:
            self._check()
        return self._is_due

    @property
    def key(self) -> str:
        """The idempotency key for the provider: the same in all attempts of the command. In a block whose call is
        not due this leaves the block."""
        if not self._is_left and not self.is_due:
            raise EffectIsDone(self)
        return self._key

    @property
    def receipt(self) -> Json:
        """What the call returned, in this attempt or in an earlier one."""
        return self._receipt

    @receipt.setter
    def receipt(self, value: JsonValue) -> None:
        self.done(value)

    def done(self, receipt: JsonValue = None) -> None:
        """The call was made, and this is its receipt (any JSON value). It is stored at the end of the block."""
        if not self._is_due:
            raise EffectMisuseError(
                f"effect {self.name!r} has a receipt already, so its call was not due; if the block has made the "
                f"call all the same, it was made twice: make it only if effect.is_due"
            )
        self._has_receipt, self._is_not_done = True, False
        self._receipt = receipt
        try:
            self._text = payload.dump(receipt, what="receipt", max_bytes=self._port.max_payload_bytes)
        except InvalidCommandError as error:
            self._receipt = self._text = None  # that the call was made is stored all the same
            raise PermanentCommandError(str(error), code="INVALID_RECEIPT") from error

    def not_done(self) -> None:
        """The call was not made, or was certainly refused: the next attempt makes it, without asking `verify`."""
        if self._is_due:
            self._is_not_done, self._has_receipt = True, False

    def _check(self) -> None:
        try:
            self._port.check_may_write()
        except BaseException:
            self._is_refused = True
            raise


class EffectBlock:
    """The steps of one block."""

    def __init__(self, port: EffectPort, options: EffectOptions) -> None:
        attempt = port.effect_attempt
        self._port = port
        self._attempt = attempt
        self._options = options
        self._number = attempt.number
        key = options.key or default_key(attempt.domain, attempt.command_id, attempt.id, options.name)
        self.effect = Effect(options.name, key, port)

    @property
    def name(self) -> str:
        """The effect's name."""
        return self._options.name

    # --- enter --------------------------------------------------------------------------------------------------

    def enter(self) -> Asks:
        """Find out whether the call is due. Raises if the command must wait, or needs a person."""
        self._refuse_in_transaction()
        self._port.check_may_write()
        own = self._attempt.extras.effects
        before = own.get(self.name, monotonic())
        if before is None:
            raise EffectMisuseError(f"effect {self.name!r} is in use by another block of this attempt")
        was_left = self.name in own
        own[self.name] = None
        try:
            yield from self._look_again(before) if was_left else self._look()
        except BaseException:
            own.pop(self.name)
            if was_left:
                own[self.name] = before
            raise
        if not self.effect._is_due:
            own.pop(self.name)

    def _look(self) -> Asks:
        written = yield from self._write(self._intent())
        for _ in range(_MOST_LOOKS):
            if written.is_done:
                self.effect._is_due = True
                return
            found = self._check_found(written.found)
            if found.state is EffectState.DONE:
                self._take(found.receipt)
                return
            if found.attempt == self._number:  # written by this attempt; the answer was lost with a connection
                self.effect._is_due = True
                return
            written = yield from self._clear_up(found, is_dead=self._is_dead(found))
            if written is None:
                return
        raise TransientCommandError(f"effect {self.name!r} changed again and again while it was looked at")

    def _look_again(self, left_at: float) -> Asks:
        """A block of this very attempt has left the effect open."""
        ago = monotonic() - left_at
        at = datetime.fromtimestamp(epoch() - ago, UTC)
        found = FoundEffect(EffectState.INTENT, self.effect._key, None, self._number, "", None, at, False, ago)
        written = yield from self._clear_up(found, is_dead=False)
        self.effect._is_due = written is not None and written.is_done

    def _clear_up(self, found: FoundEffect, *, is_dead: bool) -> Asks:
        """An open effect. Returns None if `verify` has found its receipt, else the answer to a new intent."""
        decision = decide(
            found,
            can_verify=self._options.verify is not None,
            settle_after=self._options.settle_after,
            is_dead=is_dead,
        )
        what = f"effect {self.name!r} of attempt number {found.attempt} is open"
        if decision.step is Step.WAIT:
            raise EffectWait(decision.seconds, f"{what}: {decision.why}")
        if decision.step is Step.PARK:
            yield from self._park(found, decision.why)
        answer = yield AskVerify(OpenEffect(self.name, found.key, found.attempt, found.begun_at))
        if answer is NOT_DONE:
            return (yield from self._write(self._intent(instead_of=found.attempt)))
        if answer is UNKNOWN or answer is None:
            said = "UNKNOWN" if answer is UNKNOWN else "None; it must return the receipt, NOT_DONE or UNKNOWN"
            yield from self._park(found, f"verify returned {said}")
        return (yield from self._accept(found, answer, decision.why))

    def _accept(self, found: FoundEffect, receipt: Any, why: str) -> Asks:
        """`verify` has found the receipt."""
        text = payload.dump(receipt, what="the receipt of verify", max_bytes=self._port.max_payload_bytes)
        note = f"attempt number {self._number} asked verify, because {why}"
        end = End(self.name, found.attempt, EffectState.DONE, text, note, is_own=False)
        written = yield from self._write(end)
        if not written.is_done:  # it has changed meanwhile
            return (yield from self._write(self._intent()))
        self._take(text)
        return None

    def _park(self, found: FoundEffect, why: str) -> Asks:
        end = End(self.name, found.attempt, EffectState.UNCERTAIN, note=payload.clean_text(why), is_own=False)
        written = yield from self._write(end)
        if written.is_done or found.attempt == self._number:
            words = arguments(self._attempt.domain, self._attempt.command_id, self.name)
            raise EffectUncertainError(
                f"attempt number {found.attempt} may have made the call of effect {self.name!r}, with the key "
                f"{found.key!r}: {why}. Find out, and say it with `commandbus effect resolve --done {words}` or "
                f"with `--not-done`"
            )
        raise TransientCommandError(f"effect {self.name!r} changed while it was looked at", code="EFFECT_CHANGED")

    def _intent(self, instead_of: int | None = None) -> Begin:
        return Begin(self.name, self.effect._key, process_identity.identity(), instead_of)

    def _check_found(self, found: FoundEffect | None) -> FoundEffect:
        if found is None:
            raise TransientCommandError(f"the row of effect {self.name!r} is gone", code="EFFECT_CHANGED")
        if found.key != self.effect._key:
            raise EffectMisuseError(
                f"effect {self.name!r} of command {self._attempt.command_id!r} was begun with the key "
                f"{found.key!r}, and now with {self.effect._key!r}: give the same key in all attempts, and each "
                f"call of a command a name of its own",
                code="EFFECT_KEY_CHANGED",
            )
        return found

    @staticmethod
    def _is_dead(found: FoundEffect) -> bool:
        """What this machine sees counts more than what others have recorded."""
        seen = process_identity.is_dead(found.process)
        return found.is_dead if seen is None else seen

    def _take(self, text: str | None) -> None:
        self.effect._receipt = payload.loads_or_none(text)

    def _refuse_in_transaction(self) -> None:
        if self._attempt.extras.is_completing:
            raise ConnectionInUseError(
                f"effect {self.name!r} inside ctx.transaction(): the transaction, with its locks, would wait for "
                f"the call. Make the call first, then open the transaction"
            )

    # --- leave --------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> Asks:
        """Write how the call ended. Returns whether the error ends here."""
        effect = self.effect
        effect._is_left = True
        if not effect._is_due:
            return isinstance(error, EffectIsDone) and error.effect is effect
        own = self._attempt.extras.effects
        own[self.name] = monotonic()  # open, unless the following says more
        if self._was_not_made(error):
            yield from self._end(End(self.name, self._number, EffectState.NOT_DONE, note=_note(error)), error)
        elif error is None or effect._has_receipt:
            yield from self._end(End(self.name, self._number, EffectState.DONE, effect._text), error)
            if error is None and not effect._has_asked:
                raise EffectMisuseError(
                    f"the block of effect {self.name!r} asked neither effect.key nor effect.is_due, so another "
                    f"attempt would repeat its call; its receipt is stored. Repair the handler before a retry",
                    code="EFFECT_UNGUARDED",
                )
        return False

    def _was_not_made(self, error: BaseException | None) -> bool:
        effect = self.effect
        if effect._is_not_done:
            return True
        if error is None or effect._has_receipt:
            return False
        return effect._is_refused or isinstance(error, self._options.not_done_on) or _is_429(error)

    def _end(self, end: End, error: BaseException | None) -> Asks:
        """Write an end. If the block ends with an error, that error is more important than one of the write."""
        try:
            yield from self._write(end, is_patient=True)
            self._attempt.extras.effects.pop(self.name, None)
        except Exception:
            if error is None:
                raise
            logger.exception(
                "the end of effect %s could not be written", self.name, extra=self._attempt.log_fields
            )

    def _write(self, write: Begin | End, *, is_patient: bool = False) -> Asks:
        written: Written = yield AskWrite(write, is_patient)
        if written.fenced is Fenced.HELD:
            return written
        saved = isinstance(write, End) and written.is_done
        if isinstance(write, End) and write.is_own and not saved:
            logger.error(
                "another attempt has taken over effect %s of command %s: its call may have been made twice",
                self.name,
                self._attempt.command_id,
                extra=self._attempt.log_fields,
            )
        told = "saved" if saved else "not saved"
        raise self._port.lose(f"the state of effect {self.name!r} was {told}")


def note_open_effect(attempt: Attempt, write: Write, answer: Future[Written]) -> None:
    """Remember which effects of an attempt are open, as the database has answered."""
    if answer.cancelled() or answer.exception() is not None:
        return
    written, effects = answer.result(), attempt.extras.open_effects
    if isinstance(write, Begin) and (written.is_done or (written.found is not None and written.found.is_open)):
        effects.add(write.name)
    elif isinstance(write, End) and written.is_done and write.state is not EffectState.UNCERTAIN:
        effects.discard(write.name)


def _note(error: BaseException | None) -> str:
    why = "" if error is None else f": {type(error).__name__}"
    return f"its block says that the call was not made{why}"


def _is_429(error: BaseException) -> bool:
    """The API has refused the call because there were too many: it was not made. (A 503 does not prove that.)"""
    if not isinstance(error, RateLimitError):
        return False
    details = error.details
    return not isinstance(details, dict) or details.get("status", _TOO_MANY_REQUESTS) == _TOO_MANY_REQUESTS


# --- the two kinds of blocks ------------------------------------------------------------------------------------


class SyncEffectBlock:
    """`with ctx.effect(…) as effect:`"""

    __slots__ = ("_block", "_verify", "_write")

    def __init__(self, block: EffectBlock, verify: Verify | None, write: Callable[[AskWrite], Written]) -> None:
        self._block = block
        self._verify = verify
        self._write = write

    def __enter__(self) -> Effect:
        self._drive(self._block.enter())
        return self._block.effect

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return bool(self._drive(self._block.leave(error)))

    def _drive(self, steps: Asks) -> Any:
        try:
            ask = next(steps)
            while True:
                try:
                    answer = self._answer(ask)
                except BaseException as error:  # noqa: BLE001 - the steps put things right, and raise it again
                    ask = steps.throw(error)
                else:
                    ask = steps.send(answer)
        except StopIteration as end:
            return end.value

    def _answer(self, ask: AskWrite | AskVerify) -> Any:
        if isinstance(ask, AskWrite):
            return self._write(ask)
        assert self._verify is not None  # noqa: S101 - otherwise nothing is asked
        answer = self._verify(ask.effect)
        if inspect.isawaitable(answer):
            getattr(answer, "close", lambda: None)()
            raise TypeError("verify of a `def` handler must be a `def` function")
        return answer


class AsyncEffectBlock:
    """`async with ctx.effect(…) as effect:`"""

    __slots__ = ("_block", "_verify", "_write")

    def __init__(self, block: EffectBlock, verify: Verify | None, write: Callable[[AskWrite], Any]) -> None:
        self._block = block
        self._verify = verify
        self._write = write

    async def __aenter__(self) -> Effect:
        await self._drive(self._block.enter())
        return self._block.effect

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return bool(await self._drive(self._block.leave(error)))

    async def _drive(self, steps: Asks) -> Any:
        try:
            ask = next(steps)
            while True:
                try:
                    answer = await self._answer(ask)
                except BaseException as error:  # noqa: BLE001 - the steps put things right, and raise it again
                    ask = steps.throw(error)
                else:
                    ask = steps.send(answer)
        except StopIteration as end:
            return end.value

    async def _answer(self, ask: AskWrite | AskVerify) -> Any:
        if isinstance(ask, AskWrite):
            return await self._write(ask)
        assert self._verify is not None  # noqa: S101 - otherwise nothing is asked
        answer = self._verify(ask.effect)
        return await answer if inspect.isawaitable(answer) else answer
