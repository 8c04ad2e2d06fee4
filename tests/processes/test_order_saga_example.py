"""examples/order_saga, run as a stranger would: it prints what the docs promise, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from support.examples import run, start, survivors
from support.waiting import until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "processes.md").read_text("utf-8")


@pytest.mark.long
def test_it_ends_as_the_docs_say(folder: Path) -> None:
    (promised,) = (
        code for code in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if "The books balance" in code
    )
    assert run("order_saga", folder) == (0, promised, "")


def test_it_cleans_up_when_it_is_interrupted(folder: Path) -> None:
    with start("order_saga", folder) as example:
        assert example.stdout is not None
        example.stdout.readline()
        example.send_signal(signal.SIGTERM)
        example.communicate(timeout=60)
    assert example.returncode == 128 + signal.SIGTERM
    assert list(folder.iterdir()) == []
    until(lambda: not survivors(example.pid, folder), what=lambda: survivors(example.pid, folder))
