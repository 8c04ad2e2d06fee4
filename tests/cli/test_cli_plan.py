"""Plans on the command line."""

from __future__ import annotations

from commandbus import HandlerRegistry, Worker
from commandbus.cli.exit_codes import ExitCode


def test_preview_start_show_and_stop(troubled, bus):
    text = troubled(
        "plan", "preview", "orders", "retry", "--type", "ship", "--over", "10m", "--reason", "fixed"
    ).out
    assert "put 3 commands into the queue again" in text
    assert "nothing has happened yet; to do it: commandbus plan start 1" in text
    assert "\x1b" not in text
    assert bus.status("orders")[0].in_tsq == 4
    assert troubled("plan", "start", "1", "--operator", "ann").out == "plan 1 runs: 0 of 3 retried, 3 left\n"
    again = troubled("plan", "start", "1")
    assert again.code == ExitCode.NO or again.code != 0
    assert "ann started it at" in again.err
    shown = troubled("plan", "show", "1", "--json").document
    assert (shown["plan"]["state"], [item["state"] for item in shown["commands"]]) == ("RUNNING", ["WAITING"] * 3)
    assert "RUNNING" in troubled("plan", "show", "1").out
    assert "plan 1 is stopped" in troubled("plan", "stop", "1").out
    assert "STOPPED" in troubled("plan").out
    assert troubled("plan", "list", "--domain", "orders", "--json").document[0]["stopped_by"]


def test_start_and_wait_for_the_end(troubled, bus, database):
    found = troubled("plan", "preview", "orders", "complete", "--result", '{"by": "hand"}', "--json").document
    assert len(found["sample"]) == found["plan"]["total"] == 4
    handlers = HandlerRegistry()
    handlers.register("orders", "other", lambda command, ctx: None)
    with Worker(handlers, database_url=database):
        done = troubled("plan", "start", str(found["plan"]["id"]), "--wait").out
    assert done.endswith("is done: 4 of 4 completed, 0 left\n")
    assert bus.get_command("orders", "b1").result == {"by": "hand"}


def test_bad_input_is_named(troubled):
    assert "nowhere" in troubled("plan", "preview", "nowhere", "retry").err
    assert "explode" in troubled("plan", "preview", "orders", "explode").err
    assert "no command 'x'" in troubled("plan", "preview", "orders", "retry", "--id", "x").err
    assert "there is no plan 9" in troubled("plan", "start", "9").err
    assert troubled("plan", "start", "x").code == ExitCode.USAGE
    assert "there are no plans" in troubled("plan", "list").out
