"""A console that connects as one of the least-privileged roles: each page, and each read of the API, is there, or
says in one sentence which right is missing. What a role may not do is refused with the same sentence."""

from __future__ import annotations

import re

import psycopg
import pytest

from commandbus.cli import entry
from commandbus.cli.exit_codes import ExitCode
from web.roles.role_consoles import Consoles, problem

pytestmark = [pytest.mark.slow, pytest.mark.shared_setup("consoles")]
SENTENCE = re.compile(
    r"The console's database role \w+_user may not do this: permission denied for .+: see `commandbus roles`\."
)


@pytest.mark.parametrize("kind", ["reader", "operator", "worker"])
def test_every_page_and_every_read_is_there(consoles: Consoles, kind: str) -> None:
    wrong = []
    for address in consoles.reads:
        answer = consoles.visits[kind].get(address)
        if answer.status != 200:
            wrong.append(f"{address}: {answer.status} {problem(answer.text)[:200]}")
    assert not wrong, "\n".join(wrong)
    assert "of other roles hide what they do" in consoles.visits[kind].get("/database").text


def test_a_reader_sees_who_holds_back_vacuum_though_it_may_not_see_what_they_do(consoles: Consoles) -> None:
    with psycopg.connect(consoles.database, application_name="forgotten") as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM commandbus.command LIMIT 1")
        pid, reader = str(other.info.backend_pid), consoles.visits["reader"]
        report = reader.get("/api/database").json
    (mine,) = [item for item in report["holders"] if item["name"] == pid]
    assert (mine["role"], mine["application"], mine["state"]) == ("postgres", "forgotten", None)
    assert mine["xid_age"] is not None
    shown = {item["application"]: item["hidden"] for item in report["connections"]}
    assert shown["forgotten"] == 1
    assert report["used_connections"] >= sum(item["total"] for item in report["connections"])


@pytest.mark.parametrize("kind", ["producer", "limiter"])
def test_a_role_that_may_not_look_is_told_which_right_is_missing(consoles: Consoles, kind: str) -> None:
    wrong = []
    for address in consoles.reads:
        answer = consoles.visits[kind].get(address)
        is_told = answer.status == 403 and SENTENCE.search(problem(answer.text))
        if answer.status not in (200, 404) and not is_told:
            wrong.append(f"{address}: {answer.status} {problem(answer.text)[:200]}")
    assert not wrong, "\n".join(wrong)
    assert consoles.visits[kind].get("/api/audit").status == 403


def test_a_console_that_may_only_look_says_so_when_somebody_acts(consoles: Consoles) -> None:
    reader, operator = consoles.visits["reader"], consoles.visits["operator"]
    done: dict[str, str] = {"domain": "orders", "command_type": "nothing", "reason": "a try"}
    refused = reader.act("pause", "/domains", **done)
    assert (refused.status, bool(SENTENCE.search(problem(refused.text)))) == (403, True), problem(refused.text)
    assert "nothing" not in reader.get("/domains").text
    assert operator.act("pause", "/domains", **done).status == 200
    assert "nothing" in reader.get("/domains").text
    assert operator.act("resume", "/domains", **done).status == 200


@pytest.mark.parametrize("kind", ["reader", "operator", "producer"])
def test_the_command_line_is_there_or_names_the_missing_right(
    consoles: Consoles, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in ("audit", "audit --json", "database", "database --json", "doctor", "stuck"):
        code = entry.run(["--database", consoles.url(kind), *words.split()])
        out, err = capfd.readouterr()
        if kind == "producer" and words.split()[0] in ("audit", "stuck"):
            assert (code, "permission denied for" in err) == (ExitCode.REFUSED, True), (words, err)
        else:
            assert (code, err) == (0, ""), (words, out)
        assert "Traceback" not in err
