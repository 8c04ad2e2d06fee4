"""ctx.effect: a call to the outside world is never repeated blindly, whatever becomes of its attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from commandbus import (
    NOT_DONE,
    UNKNOWN,
    BusinessRuleException,
    CommandBus,
    EffectState,
    HandlerRegistry,
    InvalidOperationError,
    OpenEffect,
    RateLimitError,
    TroubleshootingQueue,
    Worker,
)
from support.waiting import one, until, verdicts
from support.workers import AT_ONCE, add, done, either

Db = psycopg.Connection[Any]
StartWorker = Callable[..., Worker]


class Provider:
    """Charges, and forgets the idempotency keys that it is given: every call is a charge."""

    def __init__(self) -> None:
        self.charges: list[str] = []

    def charge(self, key: str) -> dict[str, Any]:
        self.charges.append(key)
        return {"charge": len(self.charges)}


@pytest.fixture
def provider() -> Provider:
    return Provider()


def status(bus: CommandBus, command_id: str = "c") -> str:
    command = bus.get_command("orders", command_id)
    assert command is not None
    return str(command.status)


def ended(bus: CommandBus, command_id: str = "c") -> str:
    until(lambda: status(bus, command_id) not in ("PENDING", "IN_PROGRESS"))
    return status(bus, command_id)


def effect(bus: CommandBus, command_id: str = "c") -> Any:
    (found,) = bus.commands.get_effects("orders", command_id)
    return found


def test_a_call_is_made_once_and_later_attempts_get_its_receipt(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry, lane: str, provider: Provider
) -> None:
    keys, receipts, seen = set(), [], []

    async def pay(command: Any, ctx: Any) -> Any:
        async with either(ctx.effect("charge")) as effect:
            seen.append(one(db, "SELECT state FROM commandbus.effect"))  # committed before the call
            effect.receipt = provider.charge(effect.key)
            keys.add(effect.key)
        receipts.append(effect.receipt)
        keys.add(effect.key)
        if ctx.attempt < 3:
            raise RuntimeError("after the receipt")
        return effect.receipt

    add(handlers, lane, "pay", pay)
    start_worker(handlers, retry_policy=AT_ONCE)
    bus.send("orders", "pay", command_id="c")
    assert ended(bus) == "COMPLETED"
    assert seen == ["INTENT", "DONE", "DONE"]  # the body begins each time, and is left at effect.key
    assert provider.charges == [*keys]
    assert receipts == [{"charge": 1}] * 3
    found = effect(bus)
    assert (found.state, found.attempt, found.calls, found.receipt) == (EffectState.DONE, 1, 1, {"charge": 1})


def test_effect_once_is_the_short_form(
    bus: CommandBus, start_worker: StartWorker, handlers: HandlerRegistry, lane: str, provider: Provider
) -> None:
    async def pay(command: Any, ctx: Any) -> Any:
        async def charge(key: str) -> Any:
            return provider.charge(key)

        call = charge if lane == "async" else provider.charge
        receipt = await done(ctx.effect_once("charge", call, key="order-7"))
        if ctx.attempt == 1:
            raise RuntimeError("once more")
        return receipt

    add(handlers, lane, "pay", pay)
    start_worker(handlers, retry_policy=AT_ONCE)
    bus.send("orders", "pay", command_id="c")
    assert ended(bus) == "COMPLETED"
    assert provider.charges == ["order-7"]


def test_a_failed_call_is_uncertain_until_a_person_says_what_became_of_it(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry, lane: str, provider: Provider
) -> None:
    async def pay(command: Any, ctx: Any) -> Any:
        async with either(ctx.effect("charge")) as effect:
            provider.charge(effect.key)
            if len(provider.charges) < 2:
                raise ConnectionResetError("no answer")
            effect.done({"id": "second"})
        return effect.receipt

    add(handlers, lane, "pay", pay)
    start_worker(handlers, retry_policy=AT_ONCE)
    bus.send("orders", "pay", command_id="c")
    assert ended(bus) == "IN_TROUBLESHOOTING_QUEUE"
    assert [verdict for _, verdict in verdicts(db, "c")] == ["RETRY", "PERMANENT"]
    tsq = TroubleshootingQueue(bus)
    (entry,) = tsq.list("orders", error_code="EFFECT_UNCERTAIN")
    key = effect(bus).key
    assert f"with the key '{key}': there is no verify to ask" in str(entry.error)
    assert [item.name for item in bus.commands.list_open_effects("orders")] == ["charge"]
    # A plain retry does not repeat the call.
    tsq.operator_retry("orders", "c")
    until(lambda: len(verdicts(db, "c")) == 3)
    assert (ended(bus), effect(bus).state, effect(bus).attempt) == ("IN_TROUBLESHOOTING_QUEUE", "UNCERTAIN", 1)
    assert len(provider.charges) == 1
    # A person says what the provider says.
    with pytest.raises(LookupError, match=r"no effect 'refund' \(it has: 'charge'"):
        bus.commands.resolve_effect("orders", "c", "refund", done=True)
    if lane == "sync":
        bus.commands.resolve_effect("orders", "c", "charge", done=True, receipt={"id": "seen"}, reason="looked")
        receipt, charges = {"id": "seen"}, [key]
    else:
        bus.commands.resolve_effect("orders", "c", "charge", done=False, operator="ann")
        receipt, charges = {"id": "second"}, [key, key]
    with pytest.raises(InvalidOperationError, match=r"is (DONE|NOT_DONE) already: .* says that it was"):
        bus.commands.resolve_effect("orders", "c", "charge", done=False)
    tsq.operator_retry("orders", "c")
    assert ended(bus) == "COMPLETED"
    assert bus.get_command("orders", "c").result == receipt  # type: ignore[union-attr]
    assert provider.charges == charges
    events = [entry.event for entry in bus.get_audit_trail("orders", "c")]
    assert events.count("OPERATOR_RESOLVE_EFFECT") == 1
    assert bus.commands.list_open_effects().items == []


def test_verify_is_asked_only_after_settle_after_and_the_wait_is_not_charged(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry, lane: str, provider: Provider
) -> None:
    asked: list[tuple[OpenEffect, float]] = []

    async def pay(command: Any, ctx: Any) -> Any:
        def verify(effect: OpenEffect) -> Any:
            age = one(
                db, "SELECT extract(epoch FROM clock_timestamp() - min(finished_at)) FROM commandbus.attempt"
            )
            asked.append((effect, float(age)))
            return {"found": effect.key}

        async with either(ctx.effect("charge", verify=verify, settle_after="1s")) as effect:
            provider.charge(effect.key)
            raise TimeoutError("given up")
        return effect.receipt

    add(handlers, lane, "pay", pay)
    start_worker(handlers, retry_policy=AT_ONCE)
    bus.send("orders", "pay", command_id="c", max_attempts=2)
    assert ended(bus) == "COMPLETED"
    (effect_asked, age) = asked[0]
    assert (len(asked), effect_asked.name, effect_asked.attempt_number) == (1, "charge", 1)
    assert age >= 1
    assert [verdict for _, verdict in verdicts(db, "c")] == ["RETRY", "SNOOZED"]
    assert provider.charges == [effect_asked.key]
    assert bus.get_command("orders", "c").result == {"found": effect_asked.key}  # type: ignore[union-attr]
    assert "asked verify, because settle_after (1s) has passed" in str(effect(bus).note)


@pytest.mark.parametrize("answer", ["NOT_DONE", "UNKNOWN", "None", "raises"])
def test_what_verify_answers_decides(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry, provider: Provider, answer: str
) -> None:
    asked = []

    def verify(effect: OpenEffect) -> Any:
        asked.append(effect)
        if answer == "raises" and len(asked) == 1:
            raise ConnectionError("the provider is down")
        return {"NOT_DONE": NOT_DONE, "UNKNOWN": UNKNOWN, "None": None, "raises": {"seen": True}}[answer]

    def pay(command: Any, ctx: Any) -> Any:
        with ctx.effect("charge", verify=verify, settle_after=0) as effect:
            if effect.is_due:
                receipt = provider.charge(effect.key)
                if len(provider.charges) == 1:
                    raise ConnectionResetError("no answer")
                effect.receipt = receipt
        return effect.receipt

    handlers.register("orders", "pay", pay)
    start_worker(handlers, retry_policy=AT_ONCE)
    bus.send("orders", "pay", command_id="c")
    if answer in ("NOT_DONE", "raises"):
        assert ended(bus) == "COMPLETED"
        assert len(set(provider.charges)) == 1
        assert (len(provider.charges), effect(bus).calls, len(asked)) == (
            (2, 2, 1) if answer == "NOT_DONE" else (1, 1, 2)
        )
    else:
        assert ended(bus) == "IN_TROUBLESHOOTING_QUEUE"
        assert (len(provider.charges), effect(bus).state) == (1, "UNCERTAIN")
        assert f"verify returned {answer}" in str(effect(bus).note)


def test_a_call_that_was_certainly_not_made_is_made_by_the_next_attempt(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry, lane: str, provider: Provider
) -> None:
    notes = []

    async def pay(command: Any, ctx: Any) -> Any:
        async with either(ctx.effect("charge", not_done_on=ConnectionRefusedError)) as effect:
            assert effect.is_due
            notes.append(one(db, "SELECT calls FROM commandbus.effect"))
            if ctx.attempt_number == 1:
                raise ConnectionRefusedError("nobody is there")
            if ctx.attempt_number == 2:
                raise RateLimitError(retry_after=0)
            if ctx.attempt_number == 3:
                effect.not_done()
                raise RuntimeError("the card has expired")
            effect.receipt = provider.charge(effect.key)

    add(handlers, lane, "pay", pay)
    start_worker(handlers)
    bus.send("orders", "pay", command_id="c", max_attempts=5)
    assert ended(bus) == "COMPLETED"
    assert (notes, len(provider.charges), effect(bus).state) == ([1, 2, 3, 4], 1, "DONE")


def test_a_receipt_that_was_set_is_kept_although_the_block_fails_after_it(
    bus: CommandBus, start_worker: StartWorker, handlers: HandlerRegistry, provider: Provider
) -> None:
    def pay(command: Any, ctx: Any) -> Any:
        with ctx.effect("charge") as effect:
            effect.receipt = provider.charge(effect.key)
            raise RuntimeError("after the call")
        return effect.receipt

    handlers.register("orders", "pay", pay)
    start_worker(handlers, retry_policy=AT_ONCE)
    bus.send("orders", "pay", command_id="c")
    assert ended(bus) == "COMPLETED"
    assert len(provider.charges) == 1


def test_a_command_that_would_fail_for_good_with_an_open_effect_needs_a_person(
    bus: CommandBus, start_worker: StartWorker, handlers: HandlerRegistry, lane: str, provider: Provider
) -> None:
    async def pay(command: Any, ctx: Any) -> Any:
        async with either(ctx.effect("charge")) as effect:
            provider.charge(effect.key)
            if command.data == "declined":
                effect.not_done()
            raise BusinessRuleException("no")

    add(handlers, lane, "pay", pay)
    start_worker(handlers)
    bus.send("orders", "pay", command_id="c")
    bus.send("orders", "pay", "declined", command_id="d")
    assert ended(bus) == "IN_TROUBLESHOOTING_QUEUE"
    assert ended(bus, "d") == "FAILED"
    assert effect(bus, "d").state == "NOT_DONE"


def test_a_stuck_call_that_lands_after_the_next_attempt_began_is_not_repeated(
    bus: CommandBus,
    db: Db,
    start_worker: StartWorker,
    handlers: HandlerRegistry,
    provider: Provider,
    go_on: threading.Event,
) -> None:
    asked = []

    def verify(effect: OpenEffect) -> Any:
        asked.append(effect)
        return NOT_DONE

    def pay(command: Any, ctx: Any) -> Any:
        with ctx.effect("charge", verify=verify, settle_after="1h") as effect:
            key = effect.key
            go_on.wait(30)  # deaf to the request to stop
            effect.receipt = provider.charge(key)
        return effect.receipt

    handlers.register("orders", "pay", pay, timeout=0.3)
    start_worker(handlers, retry_policy=AT_ONCE, cancel_grace=0.2)
    bus.send("orders", "pay", command_id="c")
    until(lambda: verdicts(db, "c")[-1:] == [(2, "SNOOZED")])  # the next attempt waits: the call may still land
    assert (effect(bus).state, provider.charges) == ("INTENT", [])
    go_on.set()  # it lands now, in a thread that was given up long ago, and its receipt is kept
    until(lambda: effect(bus).state == "DONE")
    db.execute("UPDATE pgmq.q_orders__commands SET vt = now()")
    assert ended(bus) == "COMPLETED"
    assert (len(provider.charges), asked) == (1, [])
    assert bus.get_command("orders", "c").result == {"charge": 1}  # type: ignore[union-attr]


def test_an_attempt_that_lost_its_command_in_the_block_is_told_and_its_receipt_is_kept(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry, lane: str, provider: Provider
) -> None:
    errors = []

    async def pay(command: Any, ctx: Any) -> Any:
        try:
            async with either(ctx.effect("charge")) as effect:
                if effect.is_due:
                    db.execute("""UPDATE pgmq.q_orders__commands SET headers = '{"held_by": "other"}'""")
                    effect.receipt = provider.charge(effect.key)
        except Exception as error:
            errors.append(error)
            db.execute("UPDATE pgmq.q_orders__commands SET vt = now(), headers = NULL")
            raise
        return effect.receipt

    add(handlers, lane, "pay", pay)
    start_worker(handlers, retry_policy=AT_ONCE)
    bus.send("orders", "pay", command_id="c")
    assert ended(bus) == "COMPLETED"
    assert [type(error).__name__ for error in errors] == ["AttemptFencedError"]
    assert "no longer holds its lease; the state of effect 'charge' was saved" in str(errors[0])
    assert len(provider.charges) == 1


def test_an_intent_waits_for_its_locked_queue_row_and_no_other_attempt_waits_with_it(
    bus: CommandBus, database: str, start_worker: StartWorker, handlers: HandlerRegistry, provider: Provider
) -> None:
    started, locked = threading.Event(), threading.Event()

    def pay(command: Any, ctx: Any) -> Any:
        started.set()
        assert locked.wait(60)
        with ctx.effect("charge", key=command.command_id) as effect:
            effect.receipt = provider.charge(effect.key)

    handlers.register("orders", "pay", pay)
    start_worker(handlers)
    bus.send("orders", "pay", command_id="c")
    assert started.wait(60)
    with psycopg.connect(database) as locker:
        locker.execute("SELECT * FROM pgmq.q_orders__commands FOR UPDATE")
        locked.set()
        bus.send("orders", "pay", command_id="d")
        assert ended(bus, "d") == "COMPLETED"
        assert provider.charges == ["d"]
    assert ended(bus) == "COMPLETED"
    assert provider.charges == ["d", "c"]


def test_an_intent_that_is_written_after_its_attempt_gave_up_is_taken_back(
    bus: CommandBus,
    database: str,
    start_worker: StartWorker,
    handlers: HandlerRegistry,
    lane: str,
    provider: Provider,
) -> None:
    waiting, gave_up = threading.Event(), threading.Event()

    async def pay(command: Any, ctx: Any) -> Any:
        waiting.set()
        try:
            async with either(ctx.effect("charge")) as effect:
                effect.receipt = provider.charge(effect.key)
        except BaseException:
            gave_up.set()
            raise

    add(handlers, lane, "pay", pay, timeout=0.5)
    sent = bus.send("orders", "pay", command_id="c")
    with psycopg.connect(database) as other:  # the intent waits for a row that is not committed
        other.execute(
            "INSERT INTO commandbus.effect (command, name, key, attempt, worker) "
            "VALUES (%s, 'charge', 'k', 0, 'w')",
            (sent.id,),
        )
        start_worker(handlers, retry_policy=AT_ONCE)
        assert gave_up.wait(60)
        other.rollback()
    assert ended(bus) == "COMPLETED"
    assert (len(provider.charges), effect(bus).calls, effect(bus).state) == (1, 2, "DONE")


def test_misuse_is_an_error_that_says_what_to_do(
    bus: CommandBus, start_worker: StartWorker, handlers: HandlerRegistry, lane: str, provider: Provider
) -> None:
    async def pay(command: Any, ctx: Any) -> Any:
        match command.data:
            case "unguarded":
                async with either(ctx.effect("charge")) as effect:
                    effect.receipt = provider.charge("my own key")
            case "key":
                async with either(ctx.effect("charge", key="a")) as effect:
                    effect.receipt = provider.charge(effect.key)
                async with either(ctx.effect("charge", key="b")) as effect:
                    effect.receipt = provider.charge(effect.key)
            case "nested":
                async with either(ctx.effect("charge")), either(ctx.effect("charge")):
                    raise AssertionError
            case "transaction":
                async with either(ctx.transaction()), either(ctx.effect("charge")):
                    raise AssertionError
            case "receipt":
                async with either(ctx.effect("charge")) as effect:
                    effect.receipt = {provider.charge(effect.key)["charge"]: object()}
            case "name":
                ctx.effect("")
            case "settle_after":
                ctx.effect("charge", settle_after="soon")
            case "verify":
                ctx.effect("charge", verify="find")
            case "not_done_on":
                ctx.effect("charge", not_done_on="ValueError")

    add(handlers, lane, "pay", pay)
    start_worker(handlers)
    expected = {
        "unguarded": ("EFFECT_UNGUARDED", "asked neither effect.key nor effect.is_due"),
        "key": ("EFFECT_KEY_CHANGED", "was begun with the key 'a', and now with 'b': give the same key"),
        "nested": ("EFFECT_MISUSE", "effect 'charge' is in use by another block of this attempt"),
        "transaction": ("ERROR", "inside ctx.transaction()"),
        "receipt": ("INVALID_RECEIPT", "receipt"),
        "name": ("ERROR", "the name of an effect '' is not valid"),
        "settle_after": ("ERROR", "settle_after: 'soon' is not a duration"),
        "verify": ("ERROR", "verify must be a function"),
        "not_done_on": ("ERROR", "not_done_on must be an exception class"),
    }
    for name in expected:
        bus.send("orders", "pay", name, command_id=name, max_attempts=1)
    for name, (code, text) in expected.items():
        assert ended(bus, name) == "IN_TROUBLESHOOTING_QUEUE"
        record = bus.get_command("orders", name)
        assert record is not None
        assert (name, record.error_code) == (name, code)
        assert text in str(record.error), name
    assert effect(bus, "unguarded").state == effect(bus, "receipt").state == "DONE"  # the calls were made
    assert sorted(provider.charges) == sorted(["my own key", "a", effect(bus, "receipt").key])


def test_an_operator_cannot_resolve_an_effect_while_its_attempt_runs(
    bus: CommandBus,
    start_worker: StartWorker,
    handlers: HandlerRegistry,
    provider: Provider,
    go_on: threading.Event,
) -> None:
    inside = threading.Event()

    def pay(command: Any, ctx: Any) -> Any:
        with ctx.effect("charge") as effect:
            inside.set()
            go_on.wait(20)
            effect.receipt = provider.charge(effect.key)

    handlers.register("orders", "pay", pay)
    start_worker(handlers)
    bus.send("orders", "pay", command_id="c")
    assert inside.wait(60)
    with pytest.raises(InvalidOperationError, match="a worker holds command 'c'"):
        bus.commands.resolve_effect("orders", "c", "charge", done=False)
    go_on.set()
    assert ended(bus) == "COMPLETED"


def test_the_connection_for_effects_is_the_workers_own_and_opens_with_the_first_use(
    bus: CommandBus, db: Db, start_worker: StartWorker, handlers: HandlerRegistry, provider: Provider
) -> None:
    def pay(command: Any, ctx: Any) -> Any:
        with ctx.effect("charge") as effect:
            effect.receipt = provider.charge(effect.key)

    def sessions() -> int:
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s"
        )
        return int(one(db, query, "commandbus test%"))

    handlers.register("orders", "plain", lambda ctx: None)
    handlers.register("orders", "pay", pay)
    start_worker(handlers)
    bus.send("orders", "plain", command_id="p")
    ended(bus, "p")
    before = until(lambda: sessions() if sessions() >= 4 else 0)
    for number in range(5):
        bus.send("orders", "pay", command_id=f"c{number}")
    for number in range(5):
        assert ended(bus, f"c{number}") == "COMPLETED"
    assert sessions() == before + 1


def test_chunks_have_no_effects_and_no_checkpoints(
    bus: CommandBus, start_worker: StartWorker, handlers: HandlerRegistry
) -> None:
    errors: list[str] = []

    def pay(commands: Any, ctx: Any) -> None:
        for ask in (
            lambda: ctx.effect("charge"),
            lambda: ctx.effect_once("charge", len),
            lambda: ctx.checkpoint(1),
            lambda: ctx.last_checkpoint,
        ):
            try:
                ask()
            except (TypeError, AttributeError) as error:
                errors.append(str(error))

    handlers.register("orders", "pay", pay, chunk=2)
    start_worker(handlers)
    bus.send("orders", "pay", command_id="c")
    assert ended(bus) == "COMPLETED"
    assert len(errors) == 4
    assert all("not for chunks" in error for error in errors)
