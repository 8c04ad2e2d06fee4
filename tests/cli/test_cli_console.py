"""`commandbus console` as a process: it serves, it ends when asked, and it lets nobody in by mistake."""

from __future__ import annotations

import re
import signal
import socket
import urllib.request

import pytest
from cli_harness import Program

from commandbus.cli.exit_codes import ExitCode
from support.waiting import until


def test_it_serves_and_ends_when_asked(database):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/"

    def page() -> str | None:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            return None

    with Program("console", "--port", str(port), "--database", database) as program:
        assert "<h1>Now</h1>" in until(page, 60)
        program.process.send_signal(signal.SIGTERM)
        answer = program.end()
    assert f"the console is at {address}" in answer.out
    assert answer.code in (0, 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("words", "text", "why"),
    [
        (["--host", "0.0.0.0"], None, "--host 0.0.0.0 would let everybody in"),
        (["--tokens"], "ann chief tttttttttttttttttttt", "is not NAME ROLE TOKEN"),
        (["--tokens"], "ann reader short", "the token of 'ann' has 5 characters"),
        (["--user-header", "X-User", "--tokens"], "ann reader tttttttttttttttttttt", "not both"),
    ],
)
def test_what_would_let_strangers_in_is_refused(cli, tmp_path, words, text, why):
    if text is not None:
        (tmp_path / "tokens").write_text(text)
        words = [*words, str(tmp_path / "tokens")]
    answer = cli("console", *words)
    assert answer.code == ExitCode.CONFIGURATION
    assert re.search(re.escape(why), answer.err)
