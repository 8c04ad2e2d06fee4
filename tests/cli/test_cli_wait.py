"""`commandbus wait`: the result of a command, or an exit code."""

from __future__ import annotations

from commandbus import BusinessRuleException, HandlerRegistry, Worker
from commandbus.cli.exit_codes import ExitCode
from support.workers import quick_settings


def refuse(command, ctx):
    raise BusinessRuleException("no such order", code="NO_ORDER")


def test_it_prints_the_result_or_says_why_there_is_none(cli, orders, bus, database):
    handlers = HandlerRegistry()
    handlers.register("orders", "ship", lambda command, ctx: {"by": "truck"})
    handlers.register("orders", "refuse", refuse)
    bus.send("orders", "ship", command_id="good")
    bus.send("orders", "refuse", command_id="bad")
    Worker(handlers, settings=quick_settings(database)).run(until_idle=True)
    bus.send("orders", "ship", command_id="late", delay=600)
    assert cli("wait", "orders", "good").out == '{"by": "truck"}\n'
    assert cli("wait", "orders", "good", "--json").document == {"by": "truck"}
    failed = cli("wait", "orders", "bad")
    assert (failed.code, failed.out) == (ExitCode.NO, "")
    assert "NO_ORDER" in failed.err
    late = cli("wait", "orders", "late", "--wait", "100ms")
    assert late.code == ExitCode.NO
    assert "no outcome after 0.1 s" in late.err
    assert cli("wait", "orders", "nobody").code == ExitCode.NOT_FOUND
    assert cli("wait", "orders", "late", "--wait", "soon").code == ExitCode.USAGE
