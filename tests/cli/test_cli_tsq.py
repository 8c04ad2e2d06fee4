"""The troubleshooting queue on the command line: one command, many, and the question before many."""

from __future__ import annotations

import pytest

from commandbus import CommandStatus
from commandbus.cli.exit_codes import ExitCode


def test_list_and_count(troubled):
    text = troubled("tsq", "list").out
    assert "BAD_ADDRESS" in text
    (one,) = troubled("tsq", "list", "--type", "bill", "--json").document
    assert f"#{one['id']} " in text
    assert "\x1b" not in text
    assert [item["command_id"] for item in troubled("tsq", "list", "--type", "bill", "--json").document] == ["b1"]
    page = troubled("tsq", "list", "--domain", "orders", "--limit", "2", "--json").document
    rest = troubled("tsq", "list", "--cursor", str(page[-1]["id"]), "--json").document
    assert len(page) == len(rest) == 2
    assert f"--cursor {page[-1]['id']}" in troubled("tsq", "list", "--limit", "2").out
    counts = {item["command_type"]: item["count"] for item in troubled("tsq", "count", "--json").document}
    assert counts == {"ship": 3, "bill": 1}
    assert "ship" in troubled("tsq", "count", "--code", "BAD_ADDRESS").out
    assert troubled("tsq", "list", "--code", "NONE").out == "no command needs a person\n"


def test_both_lists_and_show_have_the_same_word_for_the_status(troubled):
    for words in (["commands", "--status", "IN_TSQ"], ["commands", "--status", "in_troubleshooting_queue"],
                  ["show", "b1"]):  # fmt: skip
        assert "IN_TROUBLESHOOTING_QUEUE" in troubled(*words).out


def test_one_command_each(troubled, status_of, bus):
    assert troubled("tsq", "retry", "orders", "s1", "--reason", "fixed").out == "retried s1 of domain orders\n"
    assert troubled("tsq", "cancel", "orders", "s2", "--operator", "ann").code == 0
    done = troubled("tsq", "complete", "orders", "s3", "--result", '{"by": "hand"}', "--json").document
    assert done == {"domain": "orders", "command_id": "s3", "action": "completed", "count": 1}
    assert [status_of(name) for name in ("s1", "s2", "s3")] == [
        CommandStatus.PENDING,
        CommandStatus.CANCELED,
        CommandStatus.COMPLETED,
    ]
    assert bus.get_command("orders", "s3").result == {"by": "hand"}
    assert "operator=ann" in troubled("show", "s2").out


def test_the_second_operator_is_refused(troubled):
    assert troubled("tsq", "cancel", "orders", "s1").code == 0
    for verb in ("cancel", "retry", "complete"):
        answer = troubled("tsq", verb, "orders", "s1")
        assert answer.code == ExitCode.REFUSED
        assert "CANCELED" in answer.err
    assert troubled("tsq", "retry", "orders", "nobody").code == ExitCode.NOT_FOUND


@pytest.mark.parametrize("verb", ["retry", "cancel", "complete"])
def test_many_need_a_yes(troubled, bus, verb):
    words = ["tsq", verb, "--all", "--domain", "orders"]
    asked = troubled(*words)
    assert asked.code == ExitCode.REFUSED
    assert "4 commands" in asked.err
    assert "--yes" in asked.err
    assert bus.status("orders")[0].in_tsq == 4
    assert troubled(*words, "--type", "ship", "--code", "BAD_ADDRESS", "--yes", "--json").document["count"] == 3
    assert bus.status("orders")[0].in_tsq == 1
    assert troubled(*words, "--yes").out.startswith({"retry": "retried 1"}.get(verb, ""))
    assert troubled(*words).code == 0  # nobody is left, and nobody is asked


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", ExitCode.NO, 4), ("y\n", ExitCode.OK, 0)])
def test_a_person_is_asked(troubled, bus, monkeypatch, answer, code, left):
    monkeypatch.setattr("commandbus.cli.tsq.is_somebody_there", lambda: True)
    told = troubled("tsq", "cancel", "--all", "--domain", "orders", stdin=answer)
    assert told.code == code
    assert "cancel 4 commands of domain orders?" in told.err
    assert bus.status("orders")[0].in_tsq == left


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["orders"],
        ["--all"],
        ["orders", "--all"],
        ["orders", "s1", "--all", "--domain", "orders"],
        ["orders", "s1", "--type", "ship"],
    ],
)
def test_it_must_be_clear_which_are_meant(orders, words):
    assert orders("tsq", "retry", *words).code == ExitCode.USAGE


def test_a_result_must_be_json(orders):
    assert orders("tsq", "complete", "orders", "x", "--result", "done").code == ExitCode.USAGE


def test_failures_that_are_alike_are_listed_together_and_chosen_by_their_fingerprint(troubled):
    listed = troubled("failures", "--domain", "orders").out
    assert "PermanentCommandError [BAD_ADDRESS]" in listed
    assert "\x1b" not in listed
    found = troubled("failures", "--type", "ship", "--tsq", "--json").document
    assert [(item["count"], item["in_troubleshooting"]) for item in found] == [(3, 3)]
    chosen = troubled("tsq", "list", "--fingerprint", found[0]["fingerprint"], "--json").document
    assert {item["command_id"] for item in chosen} == {"s1", "s2", "s3"}
    plan = troubled("plan", "preview", "orders", "cancel", "--fingerprint", found[0]["fingerprint"], "--json")
    assert plan.document["plan"]["total"] == 3
    assert "twelve hexadecimal digits" in troubled("tsq", "list", "--fingerprint", "x").err
