"""Tables fit the terminal, and nothing that somebody may type again is cropped."""

from __future__ import annotations

import json
import re

import pytest
from cli_harness import Terminal
from hypothesis import given, settings
from hypothesis import strategies as st

from commandbus import HandlerRegistry, PermanentCommandError, Worker
from commandbus.cli.table import columns, fitted, lay_out, width_of
from support.waiting import until
from support.workers import quick_settings

ROOMS = [80, 100, 120]
ID = "7d0c1d6e-5b1c-4a43-9a2e-3f6f1d0f4b{:02}"
DOMAIN, TYPE = "invoices", "reconcile_invoice"
ERROR = "the ledger of customer 4711 has no account for this currency, " * 12
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


@pytest.fixture
def pages(bus, database):
    """The lists of the command line, on terminals of these widths; with ids of the usual length in all of them."""
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
    bus.start_process("settle_invoice", domain=DOMAIN, process_id=ID.format(30))
    bus.pause(DOMAIN, TYPE, operator="anna.schmidt@example.com", reason="wait for the ledger")
    lists = [
        ["commands"], ["tsq", "list"], ["workers", "--all"], ["batch", "list"], ["batch", "show", ID.format(10)],
        ["process", "list"], ["limits"], ["limits", "show", "ledger_of_the_south"], ["breakers"], ["pauses"],
        ["status"], ["stuck"], ["show", ID.format(0)], ["config"], ["domain", "list"],
    ]  # fmt: skip
    arguments = json.dumps([[*words, "--database", database] for words in lists])

    def show(room):
        with Terminal(arguments, columns=room, python=("-c", SHOW_PAGES)) as terminal:
            shown = terminal.read_all().replace("\r\n", "\n").split(PAGE)[1:]
        return {" ".join(words[:2]): page for words, page in zip(lists, shown, strict=True)}

    return show


@pytest.mark.parametrize("room", ROOMS)
def test_every_list_shows_whole_ids_on_a_terminal(pages, bus, room):
    shown = pages(room)
    for words, page in shown.items():
        if not words.startswith(("show", "limits show", "batch show")):  # their fields are one line each
            table = [line for line in page.splitlines() if not line.startswith("left out")]
            assert all(width_of(line) <= room for line in table), f"{words}\n{page}"
    in_tsq = [item for item in bus.query_commands(domain=DOMAIN).items if item.error]
    assert len(in_tsq) == 4
    for item in in_tsq:
        for words in ("commands", "tsq list"):
            assert re.search(rf"#{item.id}\b.*{re.escape(item.command_id)}", shown[words]), shown[words]
    assert DOMAIN in shown["commands"]
    assert (TYPE if room > 80 else "reconcile_  ") in shown["commands"], "a type wraps before an id does"
    assert all(worker.id in shown["workers --all"] for worker in bus.workers())
    assert ID.format(10) in shown["batch list"]
    assert ID.format(30) in shown["process list"]
    assert "ledger_of_the_south" in shown["limits"]
    assert "anna.schmidt@example.com" in shown["pauses"]
    assert f"{DOMAIN}__commands" in shown["domain list"]
    assert "COMMANDBUS_DATABASE_URL" in shown["config"] or "ENVIRONMENT" in shown["config"].splitlines()[-1]
    assert "…" not in shown["status"] + shown["workers --all"] + shown["limits"]


@pytest.mark.parametrize("room", [60, 80, 100, 120])
def test_a_long_id_breaks_no_state(room: int) -> None:
    """The id wraps, and is whole; what stands beside it is not torn apart for it."""
    heads = columns(":# domain type =command_id status attempts? sent?? ~note???")
    long = "invoice-" + 85 * "x"
    lines, _ = lay_out(heads, [["#11", "orders", "ship", long, "COMPLETED", "1 of 3", "3m ago", ""]], room)
    assert max(map(len, lines)) <= room
    assert any("COMPLETED" in line for line in lines)
    assert long in "".join(line[len("#11  orders  ship  ") :].split("  ")[0].strip() for line in lines[1:])
