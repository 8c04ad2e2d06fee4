"""Two packages that are imported as `commandbus`: noticed, named, and what to do; as real processes."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from cli_harness import SOURCES, run

from commandbus.cli import installation
from commandbus.cli.exit_codes import ExitCode
from commandbus.db.pgmq import packaged_sql


def install(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """What pip leaves of a package: its files, its metadata and its record."""
    written = []
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        written.append(f"{path},sha256={digest},{len(text)}")
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "RECORD").write_text("\n".join(written))


def beside(folder: Path) -> str:
    return os.pathsep.join([SOURCES, str(folder)])


def test_somebody_elses_package_is_named_at_the_start_and_by_the_doctor(orders, database, tmp_path):
    install(tmp_path, "commandbus", "1.0.1", {"commandbus/__init__.py": "x = 1\n"})
    answer = run("domain", "list", "--database", database, PYTHONPATH=beside(tmp_path))
    assert answer.code == 0
    assert "warning: another package is installed over this one: commandbus 1.0.1 provides" in answer.err
    assert "pip uninstall commandbus commandbus-pg && pip install commandbus-pg" in answer.err
    answer = run("doctor", "--database", database, PYTHONPATH=beside(tmp_path))
    assert answer.code == ExitCode.NO
    assert "FAIL  installation: another package is installed over this one: commandbus 1.0.1" in answer.out


def test_a_package_of_another_name_that_writes_into_ours_is_found_by_the_doctor(orders, database, tmp_path):
    install(tmp_path, "harmless", "2.0", {"commandbus/evil.py": "x = 1\n", "harmless.py": ""})
    answer = run("doctor", "--database", database, PYTHONPATH=beside(tmp_path))
    assert answer.code == ExitCode.NO
    assert "harmless 2.0 provides commandbus, too" in answer.out


def test_alone_there_is_nothing_to_say(orders, database, tmp_path):
    install(tmp_path, "commandbus-web", "1.0", {"commandbus_web/__init__.py": ""})
    answer = run("doctor", "--database", database, PYTHONPATH=beside(tmp_path))
    assert "OK    installation: commandbus-pg " in answer.out
    assert "warning: another package" not in answer.err


def test_a_clash_is_named_even_if_nothing_can_be_imported_any_more(tmp_path):
    """Theirs was installed last, and has overwritten a module of ours."""
    broken = tmp_path / "commandbus"
    for path in Path(SOURCES, "commandbus").rglob("*.py"):
        target = broken / path.relative_to(Path(SOURCES, "commandbus"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    install(tmp_path, "commandbus", "1.0.1", {"commandbus/bus/__init__.py": "raise ImportError('theirs')\n"})
    done = subprocess.run(
        [sys.executable, "-m", "commandbus", "status"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.startswith("commandbus: warning: another package is installed over this one")


def test_files_that_are_not_as_they_were_installed_are_found(tmp_path, monkeypatch):
    files = {"commandbus/a.py": "a = 1\n", "commandbus/b.py": "b = 1\n", "commandbus/c.py": "c = 1\n"}
    install(tmp_path, "commandbus-pg", "0.1.0", files)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    assert installation.changed_files() == []
    (tmp_path / "commandbus/a.py").write_text("a = 2\n")
    (tmp_path / "commandbus/b.py").unlink()
    assert installation.changed_files() == ["commandbus/a.py", "commandbus/b.py"]
    ((text, remedy),) = [found for found in installation.findings() if "not as they were" in found[0]]
    assert "2 of its files" in text
    assert "--force-reinstall" in remedy


@pytest.mark.parametrize("module", ["commandbus", "commandbus.bus"])
def test_an_import_looks_at_no_metadata(module):
    code = f"import sys, {module}; sys.exit('commandbus.cli.installation' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SOURCES}).returncode == 0


@pytest.fixture
def foreign_pgmq(tmp_path: Path) -> Path:
    """Another package that is called pgmq, with SQL that nobody has checked."""
    sql = tmp_path / "pgmq" / "sql" / "pgmq.sql"
    sql.parent.mkdir(parents=True)
    (tmp_path / "pgmq" / "__init__.py").touch()
    sql.write_text(packaged_sql() + "CREATE TABLE public.owned ();")
    return sql


def test_pgmq_sql_that_nobody_has_checked_is_not_run(empty_database, tmp_path, foreign_pgmq):
    for option in ([], ["--print"]):
        answer = run("migrate", "--database", empty_database, *option, PYTHONPATH=beside(tmp_path))
        assert (answer.code, answer.out) == (ExitCode.DATABASE, "")
        assert re.search(r"SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}.*pip install", answer.err)
    with psycopg.connect(empty_database) as conn:
        assert conn.execute("SELECT to_regclass('public.owned'), to_regclass('pgmq.meta')").fetchone() == (
            None,
            None,
        )


def test_whoever_brings_his_own_pgmq_needs_no_sql_of_the_package(empty_database, tmp_path, foreign_pgmq):
    with psycopg.connect(empty_database) as conn:
        conn.execute(foreign_pgmq.read_bytes())
    assert run("migrate", "--database", empty_database, PYTHONPATH=beside(tmp_path)).code == 0
