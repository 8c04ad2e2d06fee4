"""`with bus.limit(…)`: a permit of a limit for plain programs: over both drivers, in threads, processes, forks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from commandbus import (
    ApiTimeoutError,
    AsyncCommandBus,
    CommandBus,
    CommandBusError,
    Limit,
    LimitTimeoutError,
    RateLimitError,
    Settings,
    UnknownLimitError,
)
from commandbus.limits import client as client_module
from support.api_stub import ApiStub, Reply, too_many
from support.waiting import Stopwatch, one, until

Db = psycopg.Connection[Any]
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture
def plain(database: str) -> Iterator[CommandBus]:
    """A bus with a limit `docai` of one permit, whose lease is short."""
    with CommandBus(database) as bus:
        bus.declare_limit(Limit("docai", concurrency=1, lease=2))
        yield bus


@pytest.fixture
def api() -> Iterator[ApiStub]:
    """A real HTTP API that counts who is inside."""
    with ApiStub() as api:
        yield api


def holders(db: Db) -> dict[str, float]:
    found = one(
        db,
        "SELECT COALESCE(jsonb_object_agg(key, value), '{}') FROM commandbus.limits, jsonb_each(holders) "
        "WHERE value::float8 > extract(epoch FROM clock_timestamp())",
    )
    assert isinstance(found, dict)
    return found


def in_line(db: Db) -> int:
    return int(one(db, "SELECT count(*) FROM commandbus.parked WHERE domain = '' AND woken_at IS NULL"))


@contextmanager
def thread(body: Callable[[], None]) -> Iterator[threading.Thread]:
    """Runs beside the block, and is over after it."""
    running = threading.Thread(target=body)
    running.start()
    try:
        yield running
    finally:
        running.join(20)
        assert not running.is_alive()


def program(code: str, *args: str) -> subprocess.Popen[bytes]:
    """Another program that uses limits. It says what it does on standard output, line by line."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def says(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


HOLDER = """
import sys
from commandbus import CommandBus
with CommandBus(sys.argv[1]) as bus, bus.limit("docai", wait=float(sys.argv[2])):
    print("inside", flush=True)
    sys.stdin.readline()
print("left", flush=True)
"""


# --- one program -----------------------------------------------------------------------------------------------


def test_a_permit_is_taken_and_given_back(plain: CommandBus, db: Db) -> None:
    with plain.limit("docai", timeout=60) as call:
        assert call.limit == "docai"
        assert not call.is_lost
        assert 50 < (call.remaining() or 0) <= 60
        assert len(holders(db)) == 1
    until(lambda: holders(db) == {})
    with plain.limit("docai") as call:
        assert 59 < call.remaining() <= 60


def test_over_the_other_driver_too(database: str, db: Db) -> None:
    async def main() -> None:
        async with AsyncCommandBus(database) as bus:
            await bus.declare_limit(Limit("docai", concurrency=3))
            inside = most = 0
            all_three_were_in = asyncio.Event()

            async def one_call() -> None:
                nonlocal inside, most
                async with bus.limit("docai") as call:
                    assert call.limit == "docai"
                    inside += 1
                    most = max(most, inside)
                    if inside == 3:
                        all_three_were_in.set()
                    await all_three_were_in.wait()
                    inside -= 1

            await asyncio.gather(*[one_call() for _ in range(40)])
            assert most == 3

    asyncio.run(main())
    assert holders(db) == {}


def test_an_async_call_that_takes_too_long_is_canceled_alone(database: str, db: Db) -> None:
    async def main() -> list[Any]:
        async with AsyncCommandBus(database) as bus:
            await bus.declare_limit(Limit("docai", concurrency=3, lease=30))

            async def call(seconds: float) -> str:
                async with bus.limit("docai", timeout=0.3):
                    await asyncio.sleep(seconds)
                return "done"

            return await asyncio.gather(call(0.01), call(60), call(0.05), return_exceptions=True)

    first, second, third = asyncio.run(main())
    assert (first, third) == ("done", "done")
    assert isinstance(second, ApiTimeoutError)
    assert str(second) == "no answer from docai within 0.3 s (timeout of the block)"
    assert len(holders(db)) == 1  # until its lease ends: it may go on over there


def test_a_client_that_was_given_the_rest_of_the_time_is_a_timeout(
    plain: CommandBus, db: Db, api: ApiStub
) -> None:
    api.usual = Reply(hangs=True)
    late = r"^no answer from docai within 0.3 s \(timeout of the block\)$"
    with pytest.raises(ApiTimeoutError, match=late), plain.limit("docai", timeout=0.3) as call:
        urllib.request.urlopen(api.url, timeout=call.remaining())
    assert len(holders(db)) == 1
    until(lambda: one(db, "SELECT failures FROM commandbus.limits") == 1)
    with plain.limit("docai", wait=20):  # after the lease
        assert len(holders(db)) == 1


def test_a_429_of_a_real_api_is_heard_by_the_fleet(plain: CommandBus, db: Db, api: ApiStub) -> None:
    api.plan(too_many("20"))
    with pytest.raises(urllib.request.HTTPError), plain.limit("docai"):
        urllib.request.urlopen(api.url, timeout=5)
    until(lambda: plain.get_limit("docai").state == "BACKING_OFF")
    assert 15 < (plain.get_limit("docai").seconds_left or 0) <= 20
    assert holders(db) == {}
    with pytest.raises(LimitTimeoutError), plain.limit("docai", wait=0):
        raise AssertionError("nobody calls before it is over")


def test_a_bad_answer_without_a_back_off_is_logged_as_that(
    plain: CommandBus, api: ApiStub, caplog: pytest.LogCaptureFixture
) -> None:
    api.plan(Reply(500), too_many("20"))
    for _ in range(2):
        with pytest.raises(urllib.request.HTTPError), plain.limit("docai", wait=20):
            urllib.request.urlopen(api.url, timeout=5)
    until(lambda: sum(", holder " in line for line in caplog.messages) == 2)
    first, second = [line for line in caplog.messages if ", holder " in line]
    assert "(no back-off, breaker closed)" in first
    assert "(step 1 of the back-off, breaker closed)" in second


def test_wait_0_asks_once(plain: CommandBus) -> None:
    with plain.limit("docai"):
        stopwatch = Stopwatch()
        with pytest.raises(LimitTimeoutError, match="docai") as caught, plain.limit("docai", wait=0):
            raise AssertionError("there was no permit")
        assert stopwatch.seconds() < 0.9
        assert caught.value.limit == "docai"
        assert not isinstance(caught.value, RateLimitError)
    until(lambda: plain.get_limit("docai").in_use == 0)
    with plain.limit("docai", wait=0):
        pass


def test_a_short_wait_is_as_short_as_it_says(plain: CommandBus, database: str) -> None:
    async def main() -> float:
        async with AsyncCommandBus(database) as bus:
            stopwatch = Stopwatch()
            with pytest.raises(LimitTimeoutError, match="docai"):
                async with bus.limit("docai", wait=0.2):
                    raise AssertionError("there was no permit")
            return stopwatch.seconds(waits=0.2)

    with plain.limit("docai"):
        stopwatch = Stopwatch()
        with pytest.raises(LimitTimeoutError, match="docai"), plain.limit("docai", wait=0.2):
            raise AssertionError("there was no permit")
        assert 0.2 <= stopwatch.seconds(waits=0.2) < 0.9
        assert 0.2 <= asyncio.run(main()) < 0.9


def test_who_waits_is_told_and_nobody_polls(
    plain: CommandBus, database: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SWEEP_SECONDS", 1e9)
    got = threading.Event()

    def wait() -> None:
        with CommandBus(database) as other, other.limit("docai", wait=20):
            got.set()

    plain.set_limit("docai", lease=60)  # nothing is to be renewed either
    quiet = (
        "SELECT bool_and(state = 'idle' AND clock_timestamp() - query_start > interval '1.2 s') "
        "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '% limit client'"
    )
    with ExitStack() as stack:
        stack.enter_context(plain.limit("docai"))
        with thread(wait):
            until(lambda: in_line(db) == 1)
            until(lambda: one(db, quiet))
            assert not got.is_set()
            stack.close()
            assert got.wait(60)


def test_an_unknown_limit_names_those_that_there_are(plain: CommandBus, database: str) -> None:
    with pytest.raises(UnknownLimitError, match=r"unknown limit 'docia'.*known: docai"), plain.limit("docia"):
        raise AssertionError("there is no such limit")

    async def main() -> None:
        async with AsyncCommandBus(database) as bus:
            with pytest.raises(UnknownLimitError, match="docia"):
                async with bus.limit("docia"):
                    raise AssertionError("there is no such limit")

    asyncio.run(main())
    with plain.limit("docai", wait=1):  # the limit client is as well as before
        pass


@pytest.mark.parametrize("name", ["", "Docai", "a b", "x" * 49, "docai\n", "d\x00", None, 5, "';--"])
def test_hostile_names_are_refused(plain: CommandBus, name: Any) -> None:
    with pytest.raises(ValueError, match="is not the name of a limit"), plain.limit(name):
        raise AssertionError("was let in")


@pytest.mark.parametrize(
    "terms", [{"wait": -1}, {"wait": float("nan")}, {"timeout": -1}, {"timeout": "later"}, {"wait": "1 fortnight"}]
)
def test_hostile_terms_are_refused(plain: CommandBus, terms: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(terms))), plain.limit("docai", **terms):
        raise AssertionError("was let in")


def test_closing_the_bus_ends_the_wait(plain: CommandBus, database: str, db: Db) -> None:
    other = CommandBus(database)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            with other.limit("docai", wait=60):
                raise AssertionError("there was no permit")
        except CommandBusError as error:
            errors.append(error)

    with plain.limit("docai"), thread(wait) as waiting:
        until(lambda: in_line(db) == 1)
        other.close()
        waiting.join(10)
        assert not waiting.is_alive()
        assert "closed" in str(errors[0])
        assert in_line(db) == 0
    until(lambda: holders(db) == {})


def test_closing_an_async_bus_ends_the_wait(plain: CommandBus, database: str, db: Db) -> None:
    async def main() -> BaseException:
        bus = AsyncCommandBus(database)

        async def wait() -> None:
            async with bus.limit("docai", wait=60):
                raise AssertionError("there was no permit")

        waiting = asyncio.create_task(wait())
        await asyncio.to_thread(until, lambda: in_line(db) == 1)
        await bus.close()
        (error,) = await asyncio.gather(waiting, return_exceptions=True)
        assert error is not None
        return error

    with plain.limit("docai"):
        assert isinstance(asyncio.run(main()), CommandBusError)
        assert in_line(db) == 0


def test_a_cancelled_task_leaves_the_line_and_gives_its_permit_back(
    plain: CommandBus, database: str, db: Db
) -> None:
    async def main() -> None:
        async with AsyncCommandBus(database) as bus:

            async def wait() -> None:
                async with bus.limit("docai", wait=60):
                    await asyncio.sleep(60)

            waiting = asyncio.create_task(wait())
            await asyncio.to_thread(until, lambda: in_line(db) == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(until, lambda: in_line(db) == 0)

    with plain.limit("docai"):
        asyncio.run(main())
    with plain.limit("docai", wait=10):
        pass


def test_a_bus_can_be_used_after_its_limit_client_was_cut_off(plain: CommandBus, db: Db) -> None:
    """The limit client's connection is lost while a permit is held and somebody waits: both are as before."""
    got = threading.Event()

    def wait() -> None:
        with plain.limit("docai", wait=30):
            got.set()

    with ExitStack() as stack:
        call = stack.enter_context(plain.limit("docai"))
        with thread(wait):
            until(lambda: in_line(db) == 1)
            (first_end,) = holders(db).values()
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE '% limit client'"
            )
            # Longer than the lease: it is renewed on the new connection.
            until(lambda: next(iter(holders(db).values()), 0.0) > first_end + 2, 20)
            assert len(holders(db)) == 1
            assert not call.is_lost
            assert not got.is_set()
            stack.close()
            assert got.wait(60)


# --- several programs ------------------------------------------------------------------------------------------


def test_two_programs_share_the_permit(plain: CommandBus, database: str, db: Db) -> None:
    first = program(HOLDER, database, "20")
    try:
        assert says(first) == "inside"
        second = program(HOLDER, database, "20")
        try:
            until(lambda: in_line(db) == 1)
            with pytest.raises(LimitTimeoutError), plain.limit("docai", wait=0):
                raise AssertionError("there was no permit")
            assert first.stdin is not None
            first.stdin.write(b"\n")
            first.stdin.flush()
            assert says(first) == "left"
            assert says(second) == "inside"
            assert len(holders(db)) == 1
        finally:
            second.communicate(b"\n", timeout=20)
    finally:
        first.communicate(timeout=20)
    assert (first.returncode, second.returncode) == (0, 0)
    assert holders(db) == {}


def test_a_killed_holders_permit_is_free_after_its_lease_and_not_before(
    plain: CommandBus, database: str, db: Db
) -> None:
    holder = program(HOLDER, database, "20")
    assert says(holder) == "inside"
    holder.kill()
    holder.communicate(timeout=20)
    ((_, lease_end),) = holders(db).items()
    with plain.limit("docai", wait=20):
        taken_at = one(db, "SELECT extract(epoch FROM clock_timestamp())::float8")
        assert taken_at >= lease_end
        assert len(holders(db)) == 1


def test_a_permit_is_kept_for_as_long_as_its_holder_lives(plain: CommandBus, database: str, db: Db) -> None:
    """Longer than its lease, which is renewed; a stopped program loses it, and learns that when it goes on."""
    holder = program(HOLDER, database, "20")
    assert says(holder) == "inside"
    (first_end,) = holders(db).values()
    until(lambda: (next(iter(holders(db).values()), 0.0)) > first_end + 1.5, 20)
    with pytest.raises(LimitTimeoutError), plain.limit("docai", wait=0):
        raise AssertionError("there was no permit")
    holder.send_signal(signal.SIGSTOP)
    try:
        with plain.limit("docai", wait=20):
            assert len(holders(db)) == 1
    finally:
        holder.send_signal(signal.SIGCONT)
    holder.communicate(b"\n", timeout=20)
    assert holder.returncode == 0


LOSER = """
import os, signal, sys, time
from commandbus import CommandBus
with CommandBus(sys.argv[1]) as bus, bus.limit("docai") as call:
    print("inside", flush=True)
    sys.stdin.readline()
    deadline = time.monotonic() + 20
    while not call.is_lost and time.monotonic() < deadline:
        time.sleep(0.01)
    print("lost" if call.is_lost else "kept", flush=True)
"""


def test_who_was_stopped_for_longer_than_the_lease_learns_that_the_permit_is_lost(
    plain: CommandBus, database: str, db: Db
) -> None:
    holder = program(LOSER, database)
    assert says(holder) == "inside"
    holder.send_signal(signal.SIGSTOP)
    try:
        with plain.limit("docai", wait=20):
            holder.send_signal(signal.SIGCONT)
            assert holder.stdin is not None
            holder.stdin.write(b"\n")
            holder.stdin.flush()
            assert says(holder) == "lost"
            assert len(holders(db)) == 1
            assert "bus" in next(iter(holders(db)))
    finally:
        holder.send_signal(signal.SIGCONT)
        holder.communicate(timeout=20)
    until(lambda: holders(db) == {})


CARELESS = """
import sys
from commandbus import CommandBus
bus = CommandBus(sys.argv[1])
with bus.limit("docai", wait=10):
    print("inside", flush=True)
"""


def test_a_program_that_does_not_close_its_bus_leaves_its_permit_free(
    plain: CommandBus, database: str, db: Db
) -> None:
    """The block is over: nobody has to wait for a lease of two minutes after every run of a script."""
    plain.set_limit("docai", lease=120)
    for _ in range(3):
        process = program(CARELESS, database)
        out, _ = process.communicate(timeout=40)
        assert (process.returncode, out) == (0, b"inside\n")
        assert holders(db) == {}


FORKED = """
import json, os, sys
from commandbus import CommandBus
bus = CommandBus(sys.argv[1])
with bus.limit("docai", wait=20):
    pid = os.fork()
    if pid == 0:
        from commandbus import LimitTimeoutError
        try:
            with bus.limit("docai", wait=0):
                print("let in", flush=True)
        except LimitTimeoutError:
            print("refused", flush=True)
        with bus.limit("gpu", wait=10):
            print("own client", flush=True)
        bus.close()
        os._exit(0)
    os.waitpid(pid, 0)
    info = bus.get_limit("docai")
    print("still", info.in_use, flush=True)
with bus.limit("docai", wait=10):
    print("again", flush=True)
bus.close()
"""


def test_a_forked_child_has_a_limit_client_of_its_own_and_leaves_its_parents_permit_alone(
    plain: CommandBus, database: str, db: Db
) -> None:
    plain.declare_limit(Limit("gpu", concurrency=1))
    process = program(FORKED, database)
    out, _ = process.communicate(timeout=40)
    assert process.returncode == 0
    assert out.decode().split("\n")[:4] == ["refused", "own client", "still 1", "again"]
    until(lambda: holders(db) == {})


MANY = """
import json, os, random, sys, urllib.request
from commandbus import CommandBus
url, count = sys.argv[2], int(sys.argv[3])
with CommandBus(sys.argv[1]) as bus:
    for n in range(count):
        with bus.limit("docai", wait=60):
            with urllib.request.urlopen(f"{url}/call?n={os.getpid()}-{n}&seconds=0.01", timeout=20) as response:
                json.load(response)
print("done", flush=True)
"""


def test_several_programs_never_make_more_calls_than_there_are_permits(
    plain: CommandBus, database: str, db: Db, api: ApiStub
) -> None:
    plain.set_limit("docai", concurrency=2)
    api.gathers = 2
    programs = [program(MANY, database, api.url, "15") for _ in range(4)]
    for process in programs:
        out, _ = process.communicate(timeout=60)
        assert out == b"done\n"
    assert api.peak == 2
    assert len(api.visits) == 60
    assert json.loads(json.dumps(holders(db))) == {}


# --- the tests that the requirements name, with a real Redis instead of a mock ------------------------------


@pytest.fixture
def redis_bus(database: str, redis_url: str) -> Iterator[CommandBus]:
    """A bus whose limits are kept in Redis: docai, five at once."""
    settings = Settings(database_url=database, redis_url=redis_url, environment="test")
    with CommandBus(settings=settings) as bus:
        bus.declare_limit(Limit("docai", concurrency=5))
        yield bus


def test_a_redis_that_is_first_used_later_is_looked_after_at_once(redis_bus: CommandBus) -> None:
    redis_bus.declare_limit(Limit("local", concurrency=1, store="postgres"))
    with redis_bus.limit("local"):
        pass  # a round of the limit client in which there was no Redis to look after
    redis_bus.declare_limit(Limit("later", concurrency=2, lease=600))
    with redis_bus.limit("later"):
        until(lambda: redis_bus.get_limit("later").granted == 1, 8)


class TestRedisSemaphore:
    def test_limits_concurrent_calls(self, redis_bus: CommandBus) -> None:
        with ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(redis_bus.limit("docai", wait=5))
            assert redis_bus.get_limit("docai").in_use == 5
            assert redis_bus.get_limit("docai").mode == "redis"
            began = time.monotonic()
            with pytest.raises(LimitTimeoutError, match="docai"), redis_bus.limit("docai", wait=1.0):
                raise AssertionError("there was no permit")
            assert time.monotonic() - began >= 1.0

    def test_acquires_when_slots_available(self, redis_bus: CommandBus) -> None:
        with redis_bus.limit("docai"), redis_bus.limit("docai"):  # 2 of 5 used
            stopwatch = Stopwatch()
            with redis_bus.limit("docai") as call:
                assert call.limit == "docai"
                assert redis_bus.get_limit("docai").in_use == 3
            assert stopwatch.seconds() < 5
        until(lambda: redis_bus.get_limit("docai").in_use == 0)

    def test_who_waits_is_woken_when_a_permit_is_free(
        self, redis_bus: CommandBus, db: Db, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_module, "SWEEP_SECONDS", 1e9)
        redis_bus.set_limit("docai", concurrency=1)
        got = threading.Event()

        def wait() -> None:
            with redis_bus.limit("docai", wait=20):
                got.set()

        with ExitStack() as stack:
            stack.enter_context(redis_bus.limit("docai"))
            with thread(wait):
                until(lambda: in_line(db) == 1)
                assert not got.is_set()
                stack.close()
                assert got.wait(60)

    def test_a_killed_holders_permit_is_free_after_its_lease(self, redis_bus: CommandBus, database: str) -> None:
        redis_bus.set_limit("docai", concurrency=1, lease=2)
        holder = program(REDIS_HOLDER, database, redis_bus.settings.redis_url or "")
        assert says(holder) == "inside"
        holder.kill()
        holder.communicate(timeout=20)
        killed_at = time.monotonic()
        with redis_bus.limit("docai", wait=20):
            # It was renewed at a third of its lease at the latest.
            assert time.monotonic() - killed_at >= 1.0


REDIS_HOLDER = """
import sys
from commandbus import CommandBus, Settings
settings = Settings(database_url=sys.argv[1], redis_url=sys.argv[2], environment="test")
with CommandBus(settings=settings) as bus, bus.limit("docai", wait=10):
    print("inside", flush=True)
    sys.stdin.readline()
"""


class TestChunkTimeout:
    def test_timeout_raises_error(self, plain: CommandBus, database: str) -> None:
        async def slow_processor() -> None:
            await asyncio.sleep(5)

        async def main() -> None:
            async with AsyncCommandBus(database) as bus, bus.limit("docai", timeout=1):
                await slow_processor()

        stopwatch = Stopwatch()
        with pytest.raises(TimeoutError, match=r"^no answer from docai within 1 s \(timeout of the block\)$"):
            asyncio.run(main())
        assert stopwatch.seconds(waits=1.0) < 4
