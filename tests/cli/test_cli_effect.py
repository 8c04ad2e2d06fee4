"""Effects on the command line: what is open, what `show` says, and what a person says about it."""

from __future__ import annotations

import pytest

from commandbus import CommandStatus, HandlerRegistry, Worker
from commandbus.cli.exit_codes import ExitCode
from support.workers import quick_settings


@pytest.fixture
def charge(orders, bus, database):
    """A command whose call may have been made, and a way to run it again."""
    handlers, calls = HandlerRegistry(), []

    @handlers.handler("orders", "pay")
    def pay(command, ctx):
        ctx.checkpoint({"step": len(calls)})
        with ctx.effect("charge card", key="k-1") as effect:
            calls.append(effect.key)
            if len(calls) == 1:
                raise ConnectionResetError("no answer")
            effect.receipt = "ch_2"
        return effect.receipt

    def run():
        Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
        return calls

    bus.send("orders", "pay", command_id="c")
    run()
    return run


def test_an_effect_from_open_to_done(charge, orders, bus):
    text = orders("effect", "list").out
    assert "charge card" in text
    assert "UNCERTAIN" in text
    assert "k-1" in text
    (found,) = orders("effect", "list", "--domain", "orders", "--json").document
    assert (found["command_id"], found["name"], found["state"]) == ("c", "charge card", "UNCERTAIN")
    shown = orders("show", "orders", "c").out
    assert "EFFECT_UNCERTAIN" in shown
    assert "`commandbus effect resolve --done orders c 'charge card'` or with `--not-done`" in shown
    assert "charge card" in shown
    assert '{"step": 1} (attempt number 2' in shown
    document = orders("show", "orders", "c", "--json").document
    assert document["effects"][0]["key"] == "k-1"
    assert document["checkpoint"]["value"] == {"step": 1}
    words = ["effect", "resolve", "orders", "c", "charge card"]
    assert orders(*words).code == ExitCode.USAGE
    assert "say whether the call was made: --done or --not-done" in orders(*words).err
    assert orders(*words, "--not-done", "--receipt", "1").code == ExitCode.USAGE
    assert orders("effect", "resolve", "orders", "c", "other", "--done").code == ExitCode.NOT_FOUND
    assert orders("effect", "resolve", "orders", "x", "charge card", "--done").code == ExitCode.NOT_FOUND
    answer = orders(*words, "--done", "--receipt", '"ch_1"', "--operator", "ann", "--reason", "seen")
    assert answer.out == "effect charge card of orders c is recorded as done\n"
    assert orders(*words, "--done").code == ExitCode.REFUSED
    assert orders("effect", "list").out == "no effect is open\n"
    assert "OPERATOR_RESOLVE_EFFECT" in orders("show", "orders", "c").out
    assert orders("tsq", "retry", "orders", "c").code == 0
    assert len(charge()) == 1
    record = bus.get_command("orders", "c")
    assert (record.status, record.result) == (CommandStatus.COMPLETED, "ch_1")


def test_an_effect_that_was_not_made_is_made_with_the_same_key(charge, orders, bus):
    told = orders("effect", "resolve", "orders", "c", "charge card", "--not-done", "--json").document
    assert told == {
        "domain": "orders", "command_id": "c", "effect": "charge card", "resolved": "not done", "receipt": None,
    }  # fmt: skip
    orders("tsq", "retry", "orders", "c")
    assert charge() == ["k-1", "k-1"]
    assert bus.get_command("orders", "c").result == "ch_2"
