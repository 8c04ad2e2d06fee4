"""Tables fit the terminal, and nothing that somebody may type again is cropped."""

from __future__ import annotations

import json
import re

import click
import psycopg
import pytest
from cli_harness import Terminal
from hypothesis import given, settings
from hypothesis import strategies as st

from commandbus import HandlerRegistry, PermanentCommandError, Worker
from commandbus.cli import entry
from commandbus.cli.table import columns, fitted, lay_out, width_of
from support.waiting import until
from support.workers import quick_settings

ROOMS = [80, 100, 120]
ID = "7d0c1d6e-5b1c-4a43-9a2e-3f6f1d0f4b{:02}"
DOMAIN, TYPE = "invoices", "reconcile_invoice"
ERROR = "the ledger of customer 4711 has no account for this currency, " * 12
REPLIES = "replies_of_the_invoice_portal_eu"
HOLDER = "worker-7f9c6d5b8-x2x9v-4711-5f0c1d6e/0123456789abcdef"
KEY = "customer-of-the-south-4711"
PAGE = "\f"
SHOW_PAGES = f"""
import json, sys
from commandbus.cli import entry
for words in json.loads(sys.argv[1]):
    print({PAGE!r}, end="", flush=True)
    entry.run(words)
"""


@pytest.mark.parametrize("room", ROOMS)
def test_a_wide_table_wraps_its_text_first(room):
    heads = columns(":id domain type =command_id sent? ~error")
    lines, left_out = lay_out(heads, [["#129", DOMAIN, TYPE, "c-1", "3m ago", ERROR]], room)
    assert left_out == []
    assert all(len(line) <= room for line in lines)
    assert len(lines) == 1 + 3, "three lines of an error are enough"
    assert lines[1].startswith(f"#129  {DOMAIN}  {TYPE}")
    assert lines[-1].endswith("…")


def test_then_the_least_important_columns_are_left_out():
    heads = columns(":id domain? type?? =command_id ~error?")
    row = ["#129", DOMAIN, TYPE, ID, "it has no account for this currency"]
    assert lay_out(heads, [row], 110)[1] == []
    assert lay_out(heads, [row], 90)[1] == ["TYPE"]
    assert lay_out(heads, [row], 70)[1] == ["TYPE", "ERROR"]
    assert lay_out(heads, [row], 50)[1] == ["DOMAIN", "TYPE", "ERROR"]


def test_then_states_wrap_and_only_then_ids():
    heads = columns(":id =command_id status")
    row = ["#129", ID, "IN_TROUBLESHOOTING_QUEUE"]
    lines, _ = lay_out(heads, [row], 64)
    assert lines[1:] == [f"#129  {ID}  IN_TROUBLESHOOTING", " " * 46 + "_QUEUE"] or ID in lines[1]
    lines, _ = lay_out(heads, [row], 40)
    assert ID not in lines[1]
    assert all(len(line) <= 40 for line in lines)
    assert "".join(line[6:].split("  ")[0].strip() for line in lines[1:]) == ID


def test_heads_wrap_before_anything_is_left_out():
    lines, left_out = lay_out(columns("name? :attempt_number"), [["abcdefgh", "3"]], 18)
    assert left_out == []
    assert lines == ["NAME      ATTEMPT", "           NUMBER", "abcdefgh        3"]


def test_a_file_or_a_pipe_gets_everything_on_one_line():
    lines, left_out = lay_out(columns("name? ~error?"), [["x", ERROR]], None)
    assert left_out == []
    assert lines[1] == f"x     {ERROR.rstrip()}"


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab0-_/ \u65e5\u0301"), max_size=200), st.integers(1, 60))
def test_a_cell_that_wraps_loses_nothing_but_spaces_at_the_ends_of_lines(text, room):
    lines, _ = lay_out(columns("=x"), [[text]], room)
    shown = "".join(lines[1:])
    assert shown.replace(" ", "") == text.replace(" ", "")
    if "\u65e5" not in text:
        assert all(width_of(line) <= max(room, 8) for line in lines)


@pytest.mark.parametrize("room", range(1, 60))
def test_a_figure_is_left_out_and_never_cut(room):
    parts = [" 58%", "5800/10000", "312.5/s", "ETA 13s", "120 failed"]
    line = fitted(parts, room)
    assert len(line) <= room
    assert all(part in [*parts, *map(str.strip, parts), "…"] for part in re.split("  ", line.strip()))


SHOWN = {
    "commands": ["commands"],
    "tsq list": ["tsq", "list"],
    "tsq count": ["tsq", "count"],
    "workers": ["workers", "--all"],
    "batch list": ["batch", "list"],
    "batch show": ["batch", "show", ID.format(10)],
    "process list": ["process", "list"],
    "process show": ["process", "show", ID.format(30)],
    "process strays": ["process", "strays"],
    "limits": ["limits"],
    "limits show": ["limits", "show", "ledger_of_the_south"],
    "breakers": ["breakers"],
    "pauses": ["pauses"],
    "pauses --actions": ["pauses", "--actions", "20"],
    "status": ["status"],
    "stuck": ["stuck"],
    "show": ["show", ID.format(0)],
    "config": ["config"],
    "domain list": ["domain", "list"],
    "rejected": ["rejected"],
    "undelivered": ["undelivered"],
    "roles": ["roles", "--prefix", "table_of_roles"],
    "schedules list": ["schedules", "list"],
    "schedules show": ["schedules", "show", DOMAIN, TYPE],
    "keys list": ["keys", "list"],
    "keys show": ["keys", "show", DOMAIN, "tenant_of_the_south"],
    "effect list": ["effect", "list"],
    "failures": ["failures"],
    "audit": ["audit"],
    "database": ["database"],
    "plan": ["plan"],
    "plan list": ["plan", "list"],
    "plan show": ["plan", "show", "1"],
    "schedules next": ["schedules", "next"],
    "handlers": ["handlers", "commandbus.cli.demo.handlers:registry"],
}
"""Every command that prints a table, and how it is called."""
FIELDS = (
    "show",
    "limits show",
    "batch show",
    "process show",
    "schedules show",
    "plan show",
    "database",
)  # their fields are one line each
WITHOUT_TABLE = {
    *("demo", "migrate", "doctor", "worker", "console", "send", "cancel", "pause", "resume", "priority", "prune"),
    *(
        "plan preview",
        "plan start",
        "plan stop",
        "top",
        "stack",
        "recycle",
        "pause-worker",
        "resume-worker",
        "rehearse",
        "replay",
    ),
    *("keys set", "keys override", "keys end-override", "keys delete", "effect resolve", "process signal"),
    *("domain create", "queue create", "embedded start", "embedded stop", "embedded status"),
    *("limits set", "limits unset", "limits estimate", "breakers open", "breakers close", "breakers reset"),
    *("tsq cancel", "tsq complete", "tsq retry", "process start", "process cancel", "process retry"),
    *("wait", "schedules create", "schedules delete", "schedules pause", "schedules resume", "schedules run-now"),
    *("batch create", "batch watch", "batch add", "batch close", "batch cancel", "batch retry-failed"),
}
"""Every other one."""


def leaves(group, words=()):
    """The commands below a group, and groups that are commands themselves."""
    found = {" ".join(words)} if words and group.invoke_without_command else set()
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        is_group = isinstance(command, click.Group)
        found |= leaves(command, (*words, name)) if is_group else {" ".join((*words, name))}
    return found


def test_no_command_is_forgotten():
    known = {name.partition(" --")[0] for name in SHOWN} | WITHOUT_TABLE
    assert leaves(entry.root) - known == set(), "a new command: enter it in SHOWN or in WITHOUT_TABLE"
    assert known - leaves(entry.root) == set(), "no such command"


@pytest.fixture
def pages(bus, database):
    """All tables of the command line, on terminals of these widths, with ids of the usual length."""
    bus.create_domain(DOMAIN)
    registry = HandlerRegistry()

    def refuse(command, ctx):
        raise PermanentCommandError(ERROR, code="NO_ACCOUNT")

    registry.register(DOMAIN, TYPE, refuse)
    for number in range(3):
        bus.send(DOMAIN, TYPE, command_id=ID.format(number))
    bus.create_batch(DOMAIN, [{"command_type": TYPE}], batch_id=ID.format(10), name="all invoices of October")
    bus.set_limit("ledger_of_the_south", concurrency=5, rate="120/m", reason="the contract of May says so")
    with Worker(registry, settings=quick_settings(database)):
        until(lambda: bus.status(DOMAIN)[0].in_tsq == 4)
    bus.schedules.create(
        DOMAIN, TYPE, cron="30 2 * * *", timezone="America/Argentina/Buenos_Aires", operator="anna"
    )
    bus.start_process("settle_invoice", domain=DOMAIN, process_id=ID.format(30))
    bus.key_limits.set(DOMAIN, "tenant_of_the_south", concurrency=1)
    bus.send(DOMAIN, TYPE, command_id=ID.format(50), key_limit="tenant_of_the_south", key=KEY)
    bus.plans.preview(DOMAIN, "retry", operator="anna.schmidt@example.com", reason="the contract of May says so")
    bus.pause(DOMAIN, TYPE, operator="anna.schmidt@example.com", reason="wait for the ledger")
    bus.open_breaker(DOMAIN, TYPE, operator="anna.schmidt@example.com", reason=ERROR)
    with psycopg.connect(database) as db:
        fill(db)
    arguments = json.dumps([[*words, "--database", database] for words in SHOWN.values()])

    def show(room):
        with Terminal(arguments, columns=room, python=("-c", SHOW_PAGES)) as terminal:
            shown = terminal.read_all().replace("\r\n", "\n").split(PAGE)[1:]
        return dict(zip(SHOWN, shown, strict=True))

    return show


def fill(db):
    """What a few commands do not leave behind: a stuck attempt, messages that were set aside, steps, holders."""
    db.execute("UPDATE commandbus.attempt SET rung = 'stuck', duration_ms = 61000")
    db.execute(
        "INSERT INTO commandbus.rejected_message (id, domain, msg_id, preview, reason) OVERRIDING SYSTEM VALUE "
        "VALUES (987654321, %s, 1, %s, %s)", (DOMAIN, ERROR, ERROR),
    )  # fmt: skip
    db.execute(
        "INSERT INTO commandbus.undelivered_reply (id, queue, message, reason) OVERRIDING SYSTEM VALUE "
        "VALUES (987654321, %s, '{}', %s)", (REPLIES, ERROR),
    )  # fmt: skip
    db.execute(
        "INSERT INTO commandbus.stray_reply (id, domain, process, message, reason) OVERRIDING SYSTEM VALUE "
        "SELECT 987654321, domain, id, '{}', %s FROM commandbus.process", (ERROR,),
    )  # fmt: skip
    db.execute(
        "INSERT INTO commandbus.process_step (process, number, name, status, command, domain, command_id, "
        "command_type, error) SELECT id, 1, 'reconcile_the_invoice', 'FAILED', 1, domain, %s, %s, "
        "json_build_object('error_code', 'NO_ACCOUNT', 'error', %s::text) FROM commandbus.process",
        (ID.format(40), TYPE, ERROR),
    )  # fmt: skip
    db.execute(
        "INSERT INTO commandbus.effect (command, attempt, name, key, worker, note) "
        "SELECT id, 1, 'charge_the_card', %s, %s, %s FROM commandbus.command WHERE command_id = %s",
        (KEY, HOLDER, ERROR, ID.format(0)),
    )
    db.execute(
        "UPDATE commandbus.limits SET holders = jsonb_build_object(%s::text, extract(epoch FROM now()) + 100)",
        (HOLDER,),
    )


@pytest.mark.parametrize("room", ROOMS)
def test_every_list_shows_whole_ids_on_a_terminal(pages, bus, room):
    shown = pages(room)
    for words, page in shown.items():
        assert "Traceback" not in page, page
        if words not in FIELDS:
            table = [line for line in page.splitlines() if not line.startswith("left out")]
            assert all(width_of(line) <= room for line in table), f"{words}\n{page}"
    in_tsq = [item for item in bus.query_commands(domain=DOMAIN).items if item.error]
    assert len(in_tsq) == 4
    for item in in_tsq:
        for words in ("commands", "tsq list"):
            assert re.search(rf"#{item.id}\b.*{re.escape(item.command_id)}", shown[words]), shown[words]
        assert item.command_id in shown["stuck"], shown["stuck"]
    assert DOMAIN in shown["commands"]
    assert (TYPE if room > 80 else "reconcile_  ") in shown["commands"], "a type wraps before an id does"
    assert all(worker.id in shown["workers"] for worker in bus.workers())
    whole = {
        "batch list": [ID.format(10)],
        "process list": [ID.format(30)],
        "process show": [ID.format(30), ID.format(40)],
        "process strays": ["987654321", ID.format(30)],
        "limits": ["ledger_of_the_south"],
        "limits show": [HOLDER],
        "breakers": [f"{DOMAIN}/{TYPE}"],
        "pauses": ["anna.schmidt@example.com"],
        "roles": ["table_of_roles_operator"],
        "rejected": ["987654321", DOMAIN],
        "undelivered": ["987654321", REPLIES],
        "domain list": [f"{DOMAIN}__commands"],
        "keys list": ["tenant_of_the_south"],
        "keys show": [KEY],
        "effect list": [ID.format(0)],
    }
    for words, ids in whole.items():
        assert all(id_ in shown[words] for id_ in ids), f"{words}\n{shown[words]}"
    assert "COMMANDBUS_DATABASE_URL" in shown["config"] or "ENVIRONMENT" in shown["config"].splitlines()[-1]
    assert "…" not in shown["status"] + shown["workers"] + shown["limits"]


@pytest.mark.parametrize("room", [60, 80, 100, 120])
def test_a_long_id_breaks_no_state(room: int) -> None:
    """The id wraps, and is whole; what stands beside it is not torn apart for it."""
    heads = columns(":# domain type =command_id status attempts? sent?? ~note???")
    long = "invoice-" + 85 * "x"
    lines, _ = lay_out(heads, [["#11", "orders", "ship", long, "COMPLETED", "1 of 3", "3m ago", ""]], room)
    assert max(map(len, lines)) <= room
    assert any("COMPLETED" in line for line in lines)
    assert long in "".join(line[len("#11  orders  ship  ") :].split("  ")[0].strip() for line in lines[1:])
