"""What our processes do not import: the memory of a supervisor and its worker is bounded (docs/performance.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from cli_harness import SOURCES

from commandbus.light_imports import may_be_installed, version_of

WORKER = "import commandbus.supervisor.child_main"
SUPERVISOR = """
import contextlib
from commandbus.cli import entry
with contextlib.suppress(SystemExit):
    entry.main(["worker", "--help"])
"""


def run(code: str, *paths: Path) -> list[str]:
    """Run the code in a fresh process; returns what its last line prints as JSON."""
    path = os.pathsep.join([SOURCES, *map(str, paths)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=True,
        text=True,
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def modules_after(code: str) -> list[str]:
    return run(f"{code}\nimport json, sys; print(json.dumps([name for name in sys.modules if sys.modules[name]]))")


def test_a_supervisor_imports_no_worker_and_nothing_for_mail_or_tls():
    found = modules_after(SUPERVISOR)
    assert "psycopg" in found
    assert not {"email.message", "zipfile", "ssl", "importlib.metadata", "tempfile"} & set(found)
    assert not [name for name in found if name.startswith(("commandbus.worker.execution.", "commandbus.limits."))]


def test_a_worker_without_limits_imports_no_limit_client_and_nothing_for_mail():
    found = modules_after(WORKER)
    assert "commandbus.worker.runtime" in found
    assert not {"email.message", "zipfile", "importlib.metadata", "commandbus.limits.client"} & set(found)
    assert not {"importlib.resources", "tempfile", "shutil"} & set(found)


def test_psycopg_knows_its_version_and_others_find_the_real_modules():
    code = f"""
{WORKER}
{SUPERVISOR}
import importlib.metadata, json, ssl
import psycopg, psycopg_pool
from psycopg.pq import misc
from psycopg.version import metadata
assert misc.ctypes.util.find_library("no such library") is None
assert metadata.PackageNotFoundError is importlib.metadata.PackageNotFoundError
assert ssl.create_default_context().minimum_version
print(json.dumps([psycopg.__version__, psycopg_pool.__version__, importlib.metadata.version("psycopg")]))
"""
    assert run(code) == [version("psycopg"), version("psycopg-pool"), version("psycopg")]


@pytest.mark.parametrize("name", ["psycopg", "psycopg-pool", "Psycopg.Pool", "commandbus-pg"])
def test_the_version_is_that_of_importlib_metadata(name):
    assert version_of(name) == version(name)
    assert may_be_installed(name)


def test_a_distribution_that_is_not_there_has_no_version():
    assert version_of("no-such-distribution") is None
    assert not may_be_installed("no-such-distribution")


@pytest.mark.parametrize("folder", ["odd_one-2.5.dist-info", "odd_one.egg-info", "odd_one-2.5-py3.11.egg-info"])
def test_metadata_of_any_kind_is_found(folder, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir()
    for file in ("METADATA", "PKG-INFO"):
        (tmp_path / folder / file).write_text("Metadata-Version: 2.1\nName: odd-one\nVersion: 2.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert may_be_installed("odd-one")
    assert version_of("odd-one") == "2.5"
