"""RedisPlaces by itself: what is an answer and what is none, epochs, and what it needs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from limits_harness import tokens

from commandbus import ConfigurationError
from commandbus.limits.stores.redis.scripts import EpochError, RedisLostError, RedisScripts, StaleError
from support.redis_server import RedisServer
from support.waiting import until


@dataclass(frozen=True)
class Terms:
    name: str = "docai"
    environment: str = "test"
    concurrency: int | None = 2
    per_second: float | None = None
    burst: int = 1
    lease: float = 60.0
    shared: bool = False


LIMIT = Terms()


@pytest.fixture
def permits(own_redis: RedisServer) -> Iterator[RedisScripts]:
    permits = RedisScripts(own_redis.url, "test", timeout_seconds=0.5)
    yield permits
    permits.close()


def test_without_an_epoch_nothing_is_done(permits: RedisScripts, own_redis: RedisServer) -> None:
    permits.probe()
    for epoch in ("", "abc:0:0:elsewhere"):
        with pytest.raises(EpochError):
            permits.take(LIMIT, tokens(1), 60, epoch=epoch)
        with pytest.raises(EpochError):
            permits.renew(LIMIT, tokens(1), epoch=epoch, register=True)
        with pytest.raises(EpochError):
            permits.release(LIMIT, tokens(1), epoch=epoch)
        with pytest.raises(EpochError):
            permits.usage(LIMIT, epoch=epoch)
    assert own_redis.client.keys() == []


def test_the_flow_stands_still_while_the_limit_is_blocked(permits: RedisScripts, own_redis: RedisServer) -> None:
    """Nobody gets a permit then: that says nothing about how fast the API is."""
    epoch = permits.begin_epoch(None, 60)
    permits.take(LIMIT, tokens(2), 60, epoch=epoch)
    (key,) = [
        each for each in own_redis.client.scan_iter(_type="HASH") if own_redis.client.hexists(each, "flow_at")
    ]
    for field, seconds in (("flow_at", 40), ("flow_since", 640)):
        own_redis.client.hincrbyfloat(key, field, -seconds)
    now = permits.usage(LIMIT, epoch=epoch).flow
    blocked = permits.usage(LIMIT, epoch=epoch, is_blocked=True).flow
    assert blocked == pytest.approx(2 / 60, rel=0.01)
    assert now == pytest.approx(blocked * 0.51, rel=0.1)


def test_the_first_epoch_is_open_at_once_and_everybody_gets_the_same(
    permits: RedisScripts, own_redis: RedisServer
) -> None:
    epoch = permits.begin_epoch(None, 60)
    other = RedisScripts(own_redis.url, "test")
    assert other.begin_epoch(None, 60) == epoch == permits.probe().epoch
    other.close()
    assert len(permits.take(LIMIT, tokens(3), 60, epoch=epoch)) == 2


def test_a_later_epoch_lets_holders_in_and_newcomers_only_when_it_opens(permits: RedisScripts) -> None:
    first = permits.begin_epoch(None, 60)
    second = permits.begin_epoch(first, 1.0)
    assert second != first
    with pytest.raises(EpochError) as caught:
        permits.take(LIMIT, tokens(1), 60, epoch=first)
    assert caught.value.found == second
    assert permits.take(LIMIT, tokens(1), 60, epoch=second) == []
    holder = tokens(1)
    assert permits.renew(LIMIT, holder, epoch=second) == holder
    assert permits.renew(LIMIT, holder, epoch=second, register=True) == []
    assert len(until(lambda: permits.take(LIMIT, tokens(2), 60, epoch=second))) == 1


def test_who_registers_late_gets_a_permit_only_if_there_is_one(permits: RedisScripts) -> None:
    epoch = permits.begin_epoch(None, 60)
    permits.take(LIMIT, tokens(1), 60, epoch=epoch)
    early, late = tokens(1), tokens(1)
    assert permits.renew(LIMIT, [*early, *late], epoch=epoch, register=True) == late


def test_an_epoch_of_a_former_process_of_the_server_is_none(lasting_redis: RedisServer) -> None:
    permits = RedisScripts(lasting_redis.url, "test")
    epoch = permits.begin_epoch(None, 60)
    lasting_redis.restart()
    assert lasting_redis.client.get("commandbus_epoch:test") == epoch
    with pytest.raises(RedisLostError):
        permits.probe()
    assert permits.probe().epoch is None
    with pytest.raises(EpochError):
        permits.take(LIMIT, tokens(1), 60, epoch=epoch)
    assert permits.begin_epoch(None, 60) != epoch
    permits.close()


def test_a_leave_that_has_run_out_is_good_for_nothing(permits: RedisScripts) -> None:
    epoch = permits.begin_epoch(None, 60)
    now = permits.probe().now
    assert permits.take(LIMIT, tokens(1), 60, epoch=epoch, leave=now + 60_000_000)
    with pytest.raises(StaleError):
        permits.take(LIMIT, tokens(1), 60, epoch=epoch, leave=now - 1)
    with pytest.raises(StaleError):
        permits.renew(LIMIT, tokens(1), epoch=epoch, leave=now - 1)


def test_killed_and_stopped_servers_give_no_answer(permits: RedisScripts, own_redis: RedisServer) -> None:
    epoch = permits.begin_epoch(None, 60)
    permits.release(
        LIMIT, permits.take(LIMIT, tokens(1), 60, epoch=epoch), epoch=epoch
    )  # now the scripts are known
    own_redis.pause()
    with pytest.raises(RedisLostError, match="Timeout"):
        permits.take(LIMIT, tokens(1), 60, epoch=epoch)
    own_redis.resume()
    held = until(lambda: permits.usage(LIMIT, epoch=epoch).holders)  # it was done after all, and nobody was told
    assert len(held) == 1
    own_redis.kill()
    with pytest.raises(RedisLostError):
        permits.usage(LIMIT, epoch=epoch)
    with pytest.raises(RedisLostError, match="refused"):
        permits.usage(LIMIT, epoch=epoch)


def test_an_answer_that_comes_late_is_nobodys(permits: RedisScripts, own_redis: RedisServer) -> None:
    epoch = permits.begin_epoch(None, 60)
    own_redis.pause()
    with pytest.raises(RedisLostError):
        permits.take(LIMIT, tokens(1), 60, epoch=epoch)
    own_redis.resume()
    assert permits.probe().epoch == epoch


def test_a_read_only_server_is_none(permits: RedisScripts, own_redis: RedisServer) -> None:
    epoch = permits.begin_epoch(None, 60)
    own_redis.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(RedisLostError, match=r"(?i)read.?only|writ"):
        permits.take(LIMIT, tokens(1), 60, epoch=epoch)
    own_redis.client.execute_command("REPLICAOF", "NO", "ONE")
    assert permits.take(LIMIT, tokens(1), 60, epoch=epoch)


def test_a_full_server_is_none_and_one_that_drops_keys_is_warned_of(
    permits: RedisScripts, own_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    epoch = permits.begin_epoch(None, 60)
    own_redis.client.config_set("maxmemory", "1")
    with pytest.raises(RedisLostError, match="OutOfMemory"):
        permits.begin_epoch(epoch, 60)
    own_redis.client.config_set("maxmemory", "100mb")
    own_redis.client.config_set("maxmemory-policy", "allkeys-lru")
    with caplog.at_level(logging.WARNING, "commandbus.limits"):
        assert permits.take(LIMIT, tokens(1), 60, epoch=epoch)
    assert "set it to noeviction" in caplog.text


def test_a_server_that_forgot_its_scripts_learns_them_again(permits: RedisScripts, own_redis: RedisServer) -> None:
    epoch = permits.begin_epoch(None, 60)
    own_redis.client.script_flush()
    assert permits.take(LIMIT, tokens(1), 60, epoch=epoch)


def test_permits_of_a_short_lease_do_not_shorten_the_life_of_the_key(
    permits: RedisScripts, own_redis: RedisServer
) -> None:
    epoch = permits.begin_epoch(None, 60)
    permits.take(LIMIT, tokens(1), 600, epoch=epoch)
    permits.take(LIMIT, tokens(1), 1, epoch=epoch)
    assert own_redis.client.pttl("docai_semaphore:test") > 600_000
    assert 0 < own_redis.client.pttl("docai_rate:test") <= 660_000


@pytest.mark.parametrize("url", ["http://host", "redis://host:port", "nonsense"])
def test_what_is_no_address_is_said_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigurationError, match="redis://host:6379/0") as caught:
        RedisScripts(url, "test")
    assert url not in str(caught.value)


def test_without_the_client_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'commandbus-pg\[redis\]'"):
        RedisScripts("redis://127.0.0.1:1/0", "test")


def test_nothing_of_commandbus_needs_the_client_library_until_redis_is_used() -> None:
    import subprocess

    script = "import commandbus, sys; print('redis' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
