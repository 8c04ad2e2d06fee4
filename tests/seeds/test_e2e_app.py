"""examples/e2e_app, as the specification wants it: FastAPI under uvicorn, and a worker, in real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "e2e_app"
PRINTED = [
    r"live: 200 \{'status': 'alive'\}",
    r"ready: 200 \{'status': 'healthy'\}",
    r"sent: 202 \{'command_id': 'first', 'created': True\}",
    r"sent again: 202 \{'command_id': 'first', 'created': False\}",
    r"other content: 409",
    r"looked at: 200 \{'status': 'COMPLETED', 'result': \{'ordered': 2\}, 'error': None, 'events': \['SENT'.*\]\}",
    r"refused: 200 \{'status': 'FAILED', 'result': None, 'error': 'an order needs at least one item', .*\}",
    r"three handlers hang: 503 \{'status': 'critical'\}",
    r"still live: 200 \{'status': 'alive'\}",
    r"looked at: 200 \{'status': 'COMPLETED', 'result': \{'ordered': 5\}, .*\}",
    r"both ended in order",
]


@pytest.mark.slow
def test_the_application_from_its_start_to_its_end(database: str) -> None:
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "main.py")],
        env=os.environ | {"COMMANDBUS_DATABASE_URL": database},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = ended.stdout.splitlines()
    assert len(said) == len(PRINTED), ended.stdout
    for line, pattern in zip(said, PRINTED, strict=True):
        assert re.fullmatch(pattern, line), line
    with psycopg.connect(database) as conn:
        assert conn.execute("SELECT * FROM e2e_order ORDER BY 1").fetchall() == [("first", 2), ("last", 5)]
