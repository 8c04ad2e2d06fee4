"""`commandbus limits`: the list, one of them, and changes; what `show` says of who waits; doctor and health."""

from __future__ import annotations

import re

import psycopg
import pytest

from commandbus import CommandBus, HandlerRegistry, Limit, Settings, Worker
from commandbus.cli.exit_codes import ExitCode
from commandbus.flow.limits.permits import answer as tell_answer
from commandbus.model.command import NewCommand
from commandbus.model.limit_state import ApiAnswer
from support.redis_server import RedisServer
from support.waiting import until
from support.workers import quick_settings

LINE = ["NAME", "MODE", "IN", "USE", "RATE", "PARKED", "CALLERS", "STARTS/S", "STATE"]


def findings(answer, level):
    return {item["check"]: item for item in answer.document if item["level"] == level}


@pytest.fixture
def docai(bus):
    bus.declare_limit(Limit("docai", concurrency=5, rate="120/m", burst=5))
    return bus


@pytest.fixture
def full(orders, bus, database):
    """A limit with one permit, which is held; four pages wait for it."""
    registry = HandlerRegistry()

    @registry.handler("orders", "page", limits=["docai"])
    def page(command: object, ctx: object) -> None:
        return None

    bus.declare_limit(Limit("docai", concurrency=1, rate="120/m", burst=5))
    with bus.limit("docai"), Worker(registry, settings=quick_settings(database)):
        bus.send_many("orders", [NewCommand("page", command_id=f"p{n}") for n in range(4)])
        until(lambda: bus.get_limit("docai").parked == 4)
        yield orders


def refused(bus, **more):
    """The API has answered 429."""
    return bus.run(
        tell_answer("docai", None, ApiAnswer.RATE_LIMITED, gives=False, reason="429 from docai", **more)
    )


# --- looking ----------------------------------------------------------------------------------------------------


def test_without_limits_it_says_how_to_declare_one(orders):
    answer = orders("limits")
    assert answer.code == ExitCode.OK
    for hint in ("[limits.docai] concurrency = 5", 'Limit("docai"', "commandbus limits set docai"):
        assert hint in answer.out
    assert orders("limits", "--json").document == []


def test_what_the_settings_declare_and_nobody_has_made_known_is_named(cli, tmp_path):
    (tmp_path / "commandbus.toml").write_text("[limits.vision]\nconcurrency = 2\n")
    assert cli("limits", "--config", str(tmp_path / "commandbus.toml")).out.splitlines()[-1].endswith(": vision")


def test_the_list(orders, docai, bus):
    with bus.limit("docai"):
        answer = orders("limits")
        head, line = answer.out.splitlines()
        (document,) = orders("limits", "--json").document
    assert (answer.code, head.split()) == (ExitCode.OK, LINE)
    assert line.split()[:6] == ["docai", "postgres", "1/5", "120/m", "0", "0"]
    assert line.endswith("1 of 5 permits in use, at most 120/m")
    assert (document["in_use"], document["concurrency"], document["state"]) == (1, 5, "AVAILABLE")
    assert len(document["holders"]) == 1


def test_the_list_says_that_nobody_calls_and_until_when(orders, docai, bus):
    refused(bus, retry_after=300.0)
    line = orders("limits").out.splitlines()[1]
    assert re.search(
        r"backing off until \d\d:\d\d:\d\d \(in about (5m|4m5\ds)\): 429 from docai, step 1 of the back-off$",
        line,
    )
    until = bus.get_limit("docai").until
    assert until is not None
    assert f"until {until.astimezone():%H:%M:%S} " in line, "in the reader's own zone"
    bus.open_breaker(limit="docai", operator="ann", reason="told to")
    assert "breaker open the breaker of docai is open: by ann: told to" in orders("limits").out


def test_show_has_everything(full, bus):
    full("limits", "set", "docai", "--tries", "7", "--operator", "ann", "--reason", "they asked")
    shown = full("limits", "show", "docai")
    assert shown.code == ExitCode.OK
    fields = {
        line[:18].strip(): line[18:].strip() for line in shown.out.split("\npermits\n")[0].splitlines() if line
    }
    text = shown.out
    assert re.search(r"^state +available: 1 of 1 permits in use, at most 120/m$", text, re.MULTILINE), fields
    for name, value in {
        "kept in": "postgres", "at once": "1", "rate": "120/m, burst 5", "lease": "2m", "longest wait": "1d",
        "back-off": "2s, 4s, 8s, 16s, 30s", "in use": "1/1", "set here": '{"tries": 7}',
        "breaker": r"opens after 3 bad answers in a row \(now 0\), for 1m",
        "waiting": r"4 commands, 0 callers, the first for .*", "estimate": r"in about .*: 4 ahead at docai",
    }.items():  # fmt: skip
        assert re.search(rf"^{name} +{value}$", text, re.MULTILINE), (name, text)
    assert '"concurrency": 1' in text.split("declared")[1].splitlines()[0]
    assert re.search(r"^LEFT +HOLDER.*\n *1[12]\d?s +\S+-bus-", text, re.MULTILINE)
    assert re.search(r"limit docai +SET +ann +they asked +\{\"tries\": 7\}", text)
    document = full("limits", "show", "docai", "--json").document
    assert document["actions"][0]["operator"] == "ann"
    assert (document["override"], document["declared"]["concurrency"]) == ({"tries": 7}, 1)
    assert document["estimate"]["ahead"] == document["parked"] == 4
    assert all(110 < left <= 120 for left in document["holders"].values())


def test_estimates(full, bus):
    assert re.search(r"^limit docai: in about .+: 4 ahead at docai$", full("limits", "estimate", "docai").out)
    of = ("--domain", "orders", "--command-id", "p2", "--json")
    document = full("limits", "estimate", "docai", *of).document
    assert (document["ahead"], document["limit"]) == (2, "docai")
    assert document["seconds"] > 0
    assert full("limits", "estimate", "docai", "--domain", "orders").code == ExitCode.USAGE
    unknown = full("limits", "estimate", "docai", "--domain", "orders", "--command-id", "none")
    assert unknown.code == ExitCode.NOT_FOUND
    bus.open_breaker(limit="docai", operator="ann")
    assert "no estimate: the breaker of docai is open" in full("limits", "estimate", "docai").out


def test_an_unknown_limit_is_not_found(orders, docai):
    for words in (["show"], ["unset"], ["estimate"]):
        answer = orders("limits", *words, "vision")
        assert (answer.code, answer.out) == (ExitCode.NOT_FOUND, "")
        assert "unknown limit 'vision' (known: docai)" in answer.err


# --- changing ---------------------------------------------------------------------------------------------------


def test_set_and_unset(orders, docai, bus):
    said = orders(
        "limits", "set", "docai", "--concurrency", "7", "--rate", "10/s", "--burst", "2", "--lease", "90s",
        "--call-timeout", "45s", "--max-wait", "1h", "--tries", "9", "--backoff", "1,2s,500ms",
        "--breaker-failures", "0", "--breaker-reset", "2m", "--reason", "more", "--operator", "ann",
    )  # fmt: skip
    assert (said.err, said.out) == ("", "limit docai: 7 at once, 10/s (burst 2), kept in postgres\n")
    info = bus.get_limit("docai")
    assert (info.concurrency, info.rate, info.burst, info.lease_seconds) == (7, "10/s", 2, 90)
    assert info.call_timeout_seconds == 45
    assert (info.max_wait_seconds, info.tries, info.backoff) == (3600, 9, (1, 2, 0.5))
    assert (info.breaker_failures, info.breaker_reset_seconds) == (0, 120)
    assert orders("limits", "set", "docai", "--max-wait", "none", "--json").document["max_wait_seconds"] is None
    assert "call timeout 45s" in " ".join(orders("limits", "show", "docai").out.split())
    none = orders("limits", "set", "docai", "--call-timeout", "none", "--json").document
    assert none["call_timeout_seconds"] is None
    left = orders("limits", "unset", "docai", "rate", "--max-wait", "breaker-failures", "--json").document
    assert (left["removed"], left["limit"]["rate"], left["limit"]["concurrency"]) == (False, "120/m", 7)
    assert orders("limits", "unset", "docai").out == "limit docai: 5 at once, 120/m (burst 5), kept in postgres\n"
    assert bus.get_limit("docai").override is None


def test_a_limit_that_was_only_set_is_gone_when_it_is_unset(orders, bus):
    assert orders("limits", "set", "vision", "--rate", "2/s", "--store", "postgres").code == 0
    assert bus.get_limit("vision").rate == "2/s"
    assert orders("limits", "unset", "vision").out == "limit vision is deleted: no program declares it\n"
    assert bus.limits().items == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "docai"], "no change is given"),
        (["set", "docai", "--concurrency", "0"], "concurrency must be a whole number from 1 to 1000000, not 0"),
        (["set", "docai", "--rate", "5/parsec"], "'5/parsec'"),
        (["set", "docai", "--rate", "fast"], "120/m"),
        (["set", "docai", "--lease", "soon"], "'soon' is not a duration"),
        (["set", "docai", "--max-wait", "never"], "'never' is not a duration"),
        (["set", "docai", "--backoff", "2,four"], "'four' is not a duration"),
        (["set", "docai", "--store", "etcd"], "etcd"),
        (["set", "Doc-AI", "--concurrency", "5"], "'Doc-AI' is not the name of a limit"),
        (["set", "vision", "--tries", "5"], "limits nothing: give concurrency=5, rate='120/m', or both"),
        (["unset", "docai", "--speed"], "a limit has no option '--speed'"),
        (["unset", "docai", "speed"], "a limit has no option 'speed'; it has concurrency, rate"),
    ],
)
def test_what_makes_no_sense_changes_nothing(orders, docai, bus, words, said):
    before = bus.get_limit("docai").changed_at
    answer = orders("limits", *words)
    assert (answer.code, answer.out) == (ExitCode.USAGE, "")
    assert said in answer.err
    assert bus.get_limit("docai").changed_at == before
    assert len(bus.limits()) == 1


# --- a parked command's own tracking ----------------------------------------------------------------------------


def test_a_command_that_waits_for_a_permit_says_how_many_are_ahead_and_how_long(full, bus):
    record = bus.get_command("orders", "p3")
    assert (record.waiting_for, record.waiting_limit, record.waiting_ahead) == ("limit", "docai", 3)
    assert record.waiting_estimated_seconds > 0
    assert record.waiting_until is None
    assert re.fullmatch(
        r"parked \(3 ahead, about .+\): waits for a permit of docai \(1 at once, 120/m\)", record.waiting_text
    )
    assert bus.get_command("orders", "p0").waiting_text.startswith("parked (next in line, about ")
    assert "parked (3 ahead, about " in full("show", "orders", "p3").out
    listed = full("commands").out
    assert [f"({n} ahead, " in listed for n in (1, 2, 3)] == [True] * 3
    document = full("show", "orders", "p3", "--json").document
    assert document["waiting_limit"] == "docai"
    assert document["waiting_ahead"] == 3
    assert document["waiting_estimated_seconds"] > 0
    assert document["waiting_note"] == "waits for a permit of docai (1 at once, 120/m)"
    (status,) = bus.status("orders")
    assert (status.parked, status.delayed, status.ready) == (4, 0, 0)


def test_a_command_that_waits_for_a_back_off_says_until_when_though_it_was_parked_for_a_permit(full, bus):
    refused(bus, retry_after=200.0)
    record = bus.get_command("orders", "p3")
    assert record.waiting_until is not None
    shown = full("show", "orders", "p3").out
    assert re.search(
        r"waits for +parked until \d\d:\d\d:\d\d \(in about 3m\d+s\): 429 from docai, step 1 of the back-off$",
        shown,
        re.MULTILINE,
    ), shown
    assert f"until {record.waiting_until.astimezone():%H:%M:%S} " in shown
    assert record.waiting_estimated_seconds > 190
    document = full("show", "orders", "p3", "--json").document
    assert document["waiting_until"] == record.waiting_until.isoformat()


def test_whose_turn_has_come_is_parked_no_more(full, bus, database):
    with psycopg.connect(database, autocommit=True) as db:
        first = "SELECT min(msg_id) FROM commandbus.parked"
        db.execute(f"UPDATE commandbus.parked SET woken_at = now() WHERE msg_id = ({first})".encode())
    (status,) = bus.status("orders")
    assert status.parked < 4
    assert bus.get_command("orders", "p0").waiting_for is None


def test_what_a_removed_limit_had_said_is_still_told(full, bus, database):
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("DELETE FROM commandbus.limits")
        record = bus.get_command("orders", "p3")
    assert record.waiting_text == "waits for a permit of docai (1 at once, 120/m)"


async def _asked(database):
    from commandbus import AsyncCommandBus

    async with AsyncCommandBus(database) as bus:
        return await bus.get_command("orders", "p3"), await bus.limits(), await bus.estimate("docai")


def test_the_async_bus_says_the_same(full, bus, database):
    import asyncio

    record, (info,), estimate = asyncio.run(_asked(database))
    assert (record.waiting_ahead, info.parked, estimate.ahead) == (3, 4, 4)


# --- Redis ------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_redis(database, redis_url, monkeypatch):
    """A bus whose limit has its permits in Redis, one of them held; the command line knows that Redis."""
    monkeypatch.setenv("COMMANDBUS_REDIS_URL", redis_url)
    with CommandBus(settings=Settings(database_url=database, redis_url=redis_url)) as bus:
        bus.declare_limit(Limit("docai", concurrency=2))
        with bus.limit("docai"):
            yield bus


def test_permits_in_redis_are_seen_without_taking_part(cli, in_redis, database):
    line = cli("limits").out.splitlines()[1]
    assert line.split()[:3] == ["docai", "redis", "1/2"]
    document = cli("limits", "show", "docai", "--json").document
    assert (document["mode"], document["store"], len(document["holders"])) == ("redis", "redis", 1)
    with psycopg.connect(database) as db:
        assert db.execute("SELECT count(*) FROM commandbus.limit_client").fetchone() == (1,)
    # What was given in Redis is counted where everybody can see it.
    until(lambda: in_redis.get_limit("docai").granted == 1)


NO_URL = "the permits are in Redis, and this program has no redis_url"
NO_REDIS = "the permits are in Redis, which this program cannot reach now"


@pytest.mark.parametrize(("url", "why"), [(None, NO_URL), ("redis://127.0.0.1:1/0", NO_REDIS)])
def test_list_and_show_agree_on_what_is_unknown_and_say_why(cli, in_redis, database, monkeypatch, url, why):
    """A limit of calls, one of a rate only, one in the middle of a back-off, and one in PostgreSQL."""
    in_redis.declare_limit(Limit("paced", rate="2/s"))
    in_redis.declare_limit(Limit("resting", concurrency=3))
    in_redis.declare_limit(Limit("unused", concurrency=3))
    in_redis.declare_limit(Limit("local", concurrency=4, store="postgres"))
    with psycopg.connect(database) as db:
        db.execute("UPDATE commandbus.limits SET step = 1, until = now() + interval '1 hour' "
                   "WHERE name = 'resting'")  # fmt: skip
    monkeypatch.delenv("COMMANDBUS_REDIS_URL")
    if url is not None:
        monkeypatch.setenv("COMMANDBUS_REDIS_URL", url)
    listed = {item["name"]: item for item in cli("limits", "--json").document}
    text = " ".join(cli("limits").out.split())
    assert text.count(f"use unknown: {why}") == 4
    used = {"docai": "?/2", "paced": "?", "resting": "?/3", "local": "0/4"}
    for name, use in used.items():
        shown = cli("limits", "show", name, "--json").document
        for key in ("mode", "in_use", "why_unknown", "state"):
            assert shown[key] == listed[name][key], (name, key)
        assert shown["why_unknown"] == (None if name == "local" else why)
        said = " ".join(cli("limits", "show", name).out.split())
        assert f"in use {use}" + ("" if name == "local" else f" (unknown: {why})") in said
        assert f"{name} {shown['mode']} {use} " in text
    assert f"no estimate: {why}" in cli("limits", "estimate", "unused").out


# --- the doctor -------------------------------------------------------------------------------------------------


def test_the_doctor_counts_limits_and_their_connection(orders, docai):
    answer = orders("doctor", "--json")
    assert findings(answer, "OK")["limits"]["message"] == "1 limit"
    everything = {item["check"]: item["message"] for item in answer.document}
    assert "× (4 slots + 5) + 1), limits included" in everything["connections"]


def test_the_doctor_without_limits(orders):
    answer = orders("doctor", "--json")
    assert findings(answer, "OK")["limits"]["message"] == "none are declared"
    assert "redis" not in {item["check"] for item in answer.document}


def test_the_doctor_sees_redis(cli, in_redis, redis_url):
    answer = cli("doctor", "--json")
    fine = findings(answer, "OK")
    assert fine["redis"]["message"].endswith(" answers")
    assert fine["limits"]["message"] == "1 limit, 1 of them in Redis"
    assert "slots + 6)" in {item["check"]: item["message"] for item in answer.document}["connections"]


def test_the_doctor_misses_redis(cli, in_redis, monkeypatch):
    monkeypatch.setenv("COMMANDBUS_REDIS_URL", "redis://:secret@127.0.0.1:1/0")
    answer = cli("doctor", "--json")
    assert answer.code == ExitCode.NO
    assert "docai cannot be used by this program" in findings(answer, "FAIL")["redis"]["message"]
    assert "secret" not in answer.out
    monkeypatch.delenv("COMMANDBUS_REDIS_URL")
    answer = cli("doctor", "--json")
    failed = findings(answer, "FAIL")["limits"]
    assert "docai: kept in Redis, but redis_url is not set" in failed["message"]
    assert "COMMANDBUS_REDIS_URL" in failed["remedy"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lease": 2}, "has a lease of 2s, renewed every third of that"),
        ({"max_wait": 10}, "commands wait 10s at most (max_wait), and its back-off grows to 30s"),
    ],
)
def test_the_doctor_warns_of_times_that_make_no_sense(orders, bus, options, said):
    bus.declare_limit(Limit("docai", concurrency=5, **options))
    warned = findings(orders("doctor", "--json"), "WARN")["limits"]
    assert said in warned["message"]
    assert "commandbus limits set docai --" in warned["remedy"]


def test_the_doctor_tells_of_a_breaker_that_is_open(orders, docai, bus):
    bus.open_breaker(limit="docai", operator="ann", reason="told to")
    warned = findings(orders("doctor", "--json"), "WARN")["limits"]
    assert warned["message"] == "the breaker of docai is open: by ann: told to"
    assert "breakers close --limit docai" in warned["remedy"]


# --- health -----------------------------------------------------------------------------------------------------


def test_a_worker_whose_redis_is_gone_says_that_it_is_degraded(database, bus, monkeypatch):
    bus.create_domain("orders")
    registry = HandlerRegistry()

    @registry.handler("orders", "page", limits=[Limit("docai", concurrency=5, lease=3)])
    def page(command: object, ctx: object) -> None:
        return None

    redis = RedisServer()
    try:
        redis.start()
        with Worker(registry, settings=quick_settings(database, redis_url=redis.url)) as worker:
            bus.send("orders", "page", command_id="a")
            until(lambda: bus.get_command("orders", "a").status == "COMPLETED")
            until(lambda: worker.health_status.state == "healthy")
            redis.kill()
            until(lambda: worker.health_status.degraded_reasons == ["limits_degraded"], 40)
            assert worker.health_status.state == "degraded"
            assert "limits degraded: docai: Redis is unreachable (for " in worker.health_status.reasons[0]
            redis.start()
            until(lambda: worker.health_status.state == "healthy", 60)
            with CommandBus(settings=Settings(database_url=database, redis_url=redis.url)) as other:
                assert other.get_limit("docai").mode in ("joining", "redis")
    finally:
        redis.close()
