"""The geometry of charts that templates draw as SVG. Pure: positions are numbers, texts are escaped by the
templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from commandbus.flow.limits.detail import LimitBackoff
from commandbus.flow.schedules.timeline import ScheduleTimeline
from commandbus.model.process_graph import GraphEdge, GraphNode, ProcessGraph
from commandbus.quick_dataclass import dataclass

WIDTH: Final = 1000.0
HEIGHT: Final = 100.0
TICKS: Final = 6
ROW: Final = 24
NARROWEST: Final = 2.0
START, TOP, COLUMN, LINE, BOX_WIDTH, BOX_HEIGHT = 130, 20, 300, 84, 160, 46


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on a time axis."""

    x: float
    at: datetime

    @property
    def text(self) -> str:
        """The time of day in UTC."""
        return f"{self.at.astimezone(UTC):%H:%M}"


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a chart: a back-off, as wide as it lasted and as high as its step."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    event: LimitBackoff


@dataclass(frozen=True, slots=True)
class BackoffChart:
    """The back-offs of a limit within a span of time."""

    bars: list[Bar]
    ticks: list[Tick]
    hours: int


def backoff_chart(backoffs: Sequence[LimitBackoff], now: datetime, *, hours: int = 24) -> BackoffChart:
    """The last hours. The highest step is as high as the chart."""
    first = now - timedelta(hours=hours)
    shown = [event for event in backoffs if event.at >= first]
    highest = max((event.step for event in shown), default=0) + 1
    bars = []
    for event in shown:
        x = min(position(event.at, first, now), WIDTH - NARROWEST)
        height = HEIGHT * (event.step + 1) / (highest + 1)
        width = min(max(NARROWEST, WIDTH * event.seconds / (hours * 3600)), WIDTH - x)
        kind = "opened" if event.breaker_open else event.answer
        bars.append(Bar(x, HEIGHT - height, max(width, 0.0), height, kind, event))
    return BackoffChart(bars, ticks(first, now), hours)


@dataclass(frozen=True, slots=True)
class Dot:
    """One firing."""

    x: float
    at: datetime


@dataclass(frozen=True, slots=True)
class FiringsRow:
    """A schedule on the timeline: where its firings are, and whether it has missed some."""

    y: int
    name: str
    dots: list[Dot]
    is_paused: bool
    missed: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class FiringsChart:
    """The next firings of all schedules, a row each."""

    rows: list[FiringsRow]
    ticks: list[Tick]
    height: int


def firings_chart(found: ScheduleTimeline) -> FiringsChart:
    """The timeline. Schedules that fire first, or have missed something, come first."""
    ordered = sorted(found.schedules, key=lambda item: (not item.missed, item.firings[:1] or [found.end]))
    rows = [
        FiringsRow(
            ROW * (number + 1),
            f"{item.schedule.domain}/{item.schedule.name}",
            [Dot(position(moment, found.start, found.end), moment) for moment in item.firings],
            item.schedule.is_paused,
            len(item.missed),
            item.has_more,
        )
        for number, item in enumerate(ordered)
    ]
    return FiringsChart(rows, ticks(found.start, found.end), ROW * (len(rows) + 2))


@dataclass(frozen=True, slots=True)
class DrawnEdge:
    """An edge of a process graph: a line, and what it says. Of several edges to one step, the first says it."""

    x1: int
    y1: int
    x2: int
    y2: int
    edge: GraphEdge
    text: str | None


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A box of a process graph."""

    x: int
    y: int
    node: GraphNode


@dataclass(frozen=True, slots=True)
class DrawnProcess:
    """A process graph with places."""

    nodes: list[DrawnNode]
    edges: list[DrawnEdge]
    width: int
    height: int


def drawn_process(graph: ProcessGraph) -> DrawnProcess:
    """Boxes in columns, with room between them for what the edges say."""
    places = {node.number: (START + node.column * COLUMN, TOP + node.row * LINE) for node in graph.nodes}
    nodes = [DrawnNode(*places[node.number], node) for node in graph.nodes]
    first = {edge.end: edge for edge in reversed(graph.edges)}
    edges = [
        DrawnEdge(*_line(places, edge), edge, edge.waits_for if first[edge.end] is edge else None)
        for edge in graph.edges
    ]
    width = START + max(graph.columns - 1, 0) * COLUMN + BOX_WIDTH + TOP
    return DrawnProcess(nodes, edges, width, TOP + graph.rows * LINE)


def _line(places: Mapping[int, tuple[int, int]], edge: GraphEdge) -> tuple[int, int, int, int]:
    x, y = places[edge.end]
    if edge.start == 0:
        return 8, TOP + BOX_HEIGHT // 2, x, y + BOX_HEIGHT // 2
    start_x, start_y = places[edge.start]
    if edge.is_undo:
        return start_x + BOX_WIDTH // 2, start_y + BOX_HEIGHT, x + BOX_WIDTH // 2, y
    return start_x + BOX_WIDTH, start_y + BOX_HEIGHT // 2, x, y + BOX_HEIGHT // 2


def position(moment: datetime, first: datetime, last: datetime) -> float:
    """Where a moment is on an axis between two others, which is its edge if it lies outside."""
    share = (moment - first).total_seconds() / max((last - first).total_seconds(), 1.0)
    return WIDTH * min(max(share, 0.0), 1.0)


def ticks(first: datetime, last: datetime) -> list[Tick]:
    """Marks at even distances."""
    step = (last - first) / TICKS
    moments = [first + number * step for number in range(TICKS)]
    return [Tick(position(moment, first, last), moment) for moment in moments]
