"""One SVG of the figures in files that `./dev bench --json` wrote: ours in color, floors and peers in gray."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

PANELS = [  # title, the names of its figures, what is left out of a bar's label
    ("Beside other job queues, one worker", r"peers_(?!ratio_)\w+_one_per_s", r"^peers_|_one_per_s$"),
    ("Beside other job queues, two workers", r"peers_(?!ratio_)\w+_two_per_s", r"^peers_|_two_per_s$"),
    ("A full queue is drained", r"(installed|drain)_\w+_per_s|floor_(serial|overlapped)_per_s", r"_per_s$"),
    ("A burst on idle workers, and a queue that was full", r"burst_\w+_per_s", r"^burst_|_per_s$"),
    ("Commands are sent", r"(send|floor_insert)(_\w+)?_per_s", r"_per_s$"),
    ("Permits of a limit: request and release", r"(limit|floor)_\w+_pairs_per_s", r"_pairs_per_s$"),
]
WIDTH, LABELS, VALUES, MARGIN = 860, 250, 90, 24
BAR, GAP, TITLE = 18, 7, 34
OURS, OTHERS, TEXT = "#1f5fbf", "#a3abb5", "#1b1f24"


@dataclass(frozen=True)
class Bar:
    """One figure."""

    label: str
    value: float
    color: str


def svg(figures: dict[str, float]) -> str:
    """The drawing. Figures that belong to no panel are left out."""
    panels = [(title, _bars(figures, pattern, cut)) for title, pattern, cut in PANELS]
    panels = [(title, bars) for title, bars in panels if bars]
    if not panels:
        raise SystemExit("there is no figure to plot: --from needs files that ./dev bench --json wrote")
    body, y = [], MARGIN
    for title, bars in panels:
        body += _panel(title, bars, y)
        y += TITLE + len(bars) * (BAR + GAP) + MARGIN
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{TEXT}">',
        "<title>commandbus: a second, more is better</title>",
        f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>',
        *body,
        "</svg>\n",
    ])  # fmt: skip


def _bars(figures: dict[str, float], pattern: str, cut: str) -> list[Bar]:
    return [
        Bar(re.sub(cut, "", name).replace("_", " "), value, OTHERS if _is_other(name) else OURS)
        for name, value in figures.items()
        if re.fullmatch(pattern, name)
    ]


def _is_other(name: str) -> bool:
    return name.startswith("floor_") or (name.startswith("peers_") and not name.startswith("peers_commandbus_"))


def _panel(title: str, bars: list[Bar], y: int) -> list[str]:
    most = max(bar.value for bar in bars) or 1.0
    room = WIDTH - LABELS - VALUES - MARGIN
    lines = [f'<text x="{MARGIN}" y="{y + 14}" font-size="16" font-weight="600">{escape(title)} (a second)</text>']
    for number, bar in enumerate(bars):
        top = y + TITLE + number * (BAR + GAP)
        wide = room * bar.value / most
        lines += [
            f'<text x="{LABELS - 8}" y="{top + 13}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect class="bar" x="{LABELS}" y="{top}" width="{wide:.1f}" height="{BAR}" fill="{bar.color}"/>',
            f'<text x="{LABELS + wide + 6:.1f}" y="{top + 13}">{bar.value:,.0f}</text>',
        ]
    return lines


def run(file: Path, sources: list[Path]) -> None:
    """`./dev bench --plot`: of a name that is in several files, the last one counts."""
    figures: dict[str, float] = {}
    for source in sources:
        figures |= json.loads(source.read_text())
    file.write_text(svg(figures))
