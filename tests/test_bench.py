"""What the benchmark does beside measuring: its plot, its ratios, and the peers that cannot be installed."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KINDS = ("", "_1ms", "_insert")
SVG = "{http://www.w3.org/2000/svg}"


def plot(folder: Path, *files: dict[str, float]) -> subprocess.CompletedProcess[str]:
    """Runs `./dev bench --plot out.svg --from …` on files with these figures."""
    sources = []
    for number, figures in enumerate(files):
        source = folder / f"{number}.json"
        source.write_text(json.dumps(figures))
        sources.append(str(source))
    command = [sys.executable, "-m", "bench", "--plot", str(folder / "out.svg"), "--from", *sources]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_plot_has_a_bar_for_each_figure_as_long_as_the_figure_is_large(tmp_path: Path) -> None:
    done = plot(
        tmp_path,
        {"installed_one_per_s": 40_000.0, "floor_overlapped_per_s": 20_000.0, "pickup_p50_ms": 2.5},
        {
            "peers_commandbus_one_per_s": 30_000.0,
            "peers_celery_one_per_s": 1_000.0,
            "peers_ratio_celery_one": 30.0,
        },
    )
    assert done.returncode == 0, done.stderr
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    assert root.tag == f"{SVG}svg"
    bars = root.findall(f"{SVG}rect[@class='bar']")
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(bars) == 4  # latency and ratio are no rates
    peers, drain = widths[:2], widths[2:]
    assert peers[1] == pytest.approx(peers[0] / 30, abs=0.1)
    assert drain[1] == pytest.approx(drain[0] / 2, abs=0.1)
    ours, other = (
        {bars[0].attrib["fill"], bars[2].attrib["fill"]},
        {bars[1].attrib["fill"], bars[3].attrib["fill"]},
    )
    assert len(ours) == len(other) == 1
    assert ours != other
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert {"celery", "1,000", "commandbus", "30,000", "floor overlapped", "20,000"} <= set(texts)


def test_the_plot_says_that_it_has_nothing_to_draw(tmp_path: Path) -> None:
    done = plot(tmp_path, {"pickup_p50_ms": 2.5})
    assert done.returncode == 1
    assert "there is no figure to plot" in done.stderr
    assert not (tmp_path / "out.svg").exists()


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, with an empty cache."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from bench import peers

    return peers


def test_ratios_are_ours_by_theirs_of_medians(peers: Any) -> None:
    comparison = peers.Comparison()
    comparison.rates["commandbus", "one"] += [10.0, 40.0, 30.0]
    comparison.rates["graphile_worker", "one"] += [20.0, 10.0, 90.0]
    assert comparison.figures() == {
        "peers_commandbus_one_per_s": 30.0,
        "peers_graphile_worker_one_per_s": 20.0,
        "peers_ratio_graphile_worker_one": 1.5,
    }


def test_a_peer_that_breaks_leaves_the_comparison_with_its_figures(peers: Any) -> None:
    class Broken:
        def measure(self, size: int) -> float:
            if size == 2:
                raise RuntimeError("a worker of celery ended by itself")
            return 1000.0

    comparison = peers.Comparison()
    assert comparison.note("celery", "one", Broken())
    assert not comparison.note("celery", "two", Broken())
    assert comparison.figures() == {}
    assert comparison.skipped == {"celery": "a worker of celery ended by itself"}
    with pytest.raises(RuntimeError):  # ours must not break
        comparison.note("commandbus", "two", Broken())


def test_without_npm_the_peer_is_unavailable(peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (peer,) = peers.chosen(["graphile-worker"])
    with pytest.raises(peers.Unavailable, match="npm is not installed"):
        peers.environment(peer)


@pytest.mark.slow
def test_without_a_registry_the_peer_is_unavailable_each_time(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (peer,) = peers.chosen(["procrastinate"])
    for _ in range(2):  # an environment that is half made is not taken for a whole one
        with pytest.raises(peers.Unavailable, match=r"procrastinate 3.* could not be installed .*install\.log"):
            peers.environment(peer)


def test_a_peer_that_nobody_knows_is_refused(peers: Any) -> None:
    with pytest.raises(SystemExit, match="there is no peer sidekiq, but graphile-worker, pgqueuer"):
        peers.chosen(["sidekiq"])


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    """The second round was twice as slow for both, and the third one for the second figure alone."""
    from bench.__main__ import ratio

    assert ratio({"ours": [80.0, 42.0, 80.0], "theirs": [100.0, 50.0, 50.0]}, "ours", "theirs") == 0.84
    assert ratio({"ours": [80.0, 40.0, 90.0], "theirs": [100.0]}, "ours", "theirs") == 0.8


@pytest.mark.parametrize(("sync", "mark"), [(1000.0, "ok  "), (895.0, "MISS"), (1112.0, "MISS"), (905.0, "ok  ")])
def test_parity_is_printed_for_each_kind_of_handler(
    capsys: pytest.CaptureFixture[str], sync: float, mark: str
) -> None:
    """The specification: sync within 10% of async, for no-ops, short waits and handlers with one INSERT."""
    from bench.__main__ import report

    report(
        {
            f"drain_{lane}{kind}_per_s": [value]
            for lane, value in (("sync", sync), ("async", 1000.0))
            for kind in KINDS
        }
    )
    said = [line for line in capsys.readouterr().out.splitlines() if "parity" in line]
    assert len(said) == 3
    assert all(line.startswith(mark) and f"sync / async = {sync / 1000:.2f}" in line for line in said)
