"""Rehearse and replay on the command line."""

from __future__ import annotations

from commandbus.cli.exit_codes import ExitCode

MODULE = """
from commandbus import HandlerRegistry
handlers = HandlerRegistry()

@handlers.handler("orders", "ship")
def ship(command, ctx):
    with ctx.connection() as conn:
        conn.execute("CREATE TABLE trace (n integer)")
        conn.execute("INSERT INTO trace VALUES (1)")
    if command.data["to"] == "s2":
        raise ValueError("no\\x1b[31m street")
    return {"to": command.data["to"]}
"""


def test_a_rehearsal_says_what_would_happen_and_a_replay_does_it(troubled, bus, tmp_path, monkeypatch):
    (tmp_path / "rehearsed_shop.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    good = troubled("rehearse", "rehearsed_shop:handlers", "orders", "s1")
    assert good.code == 0, good.err
    assert "rehearsed_shop.ship would complete; nothing of it was kept" in good.out
    assert 'result      {"to": "s1"}' in good.out
    assert "public.trace" in good.out
    bad = troubled("rehearse", "rehearsed_shop:handlers", "orders", "s2")
    assert (bad.code, "would fail: ValueError" in bad.out, "\x1b" in bad.out) == (ExitCode.NO, True, False)
    document = troubled("rehearse", "rehearsed_shop:handlers", "orders", "s2", "--json").document
    assert (document["outcome"], document["is_isolated"]) == ("FAILED", True)
    refused = troubled("rehearse", "rehearsed_shop:handlers", "orders", "s1", "--no-isolation")
    assert "rehearsable=True" in refused.err
    assert "no module" in troubled("rehearse", "nowhere:handlers", "orders", "s1").err
    assert bus.status("orders")[0].in_tsq == 4
    sent = troubled(
        "replay", "orders", "s2", "--data", '{"to": "Bonn"}', "--id", "s2b", "--cancel", "--reason", "x"
    )
    assert sent.out == "sent s2b to domain orders, a replay of s2\n"
    assert bus.get_command("orders", "s2b").data == {"to": "Bonn"}
    assert bus.status("orders")[0].in_tsq == 3
    assert "not JSON" in troubled("replay", "orders", "s1", "--data", "{").err
    assert "no command" in troubled("replay", "orders", "nobody", "--data", "{}").err
