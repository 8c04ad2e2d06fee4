"""A process as a graph: its steps from left to right, what runs side by side below each other, and each
compensation below the step that it undoes. Pure.

An edge leads from what was done to what followed. An edge to something that has not ended says what the process
waits for. `would_undo` names the steps that a cancel undoes, in that order: completed ones that have an undo, and
that nothing has undone yet. `may_undo` names those of which only their program can say whether they have one.
`stays_done` names those that have none: a cancel leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import groupby, pairwise
from typing import Final

from commandbus.model.process import ProcessRecord, StepRecord, StepStatus
from commandbus.quick_dataclass import dataclass

MOST_NODES: Final = 80
MOST_CROSSING: Final = 16


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A step or a compensation, and where it stands. `kind` is command, signal, sleep or process."""

    number: int
    name: str
    kind: str
    status: StepStatus
    undoes: int | None
    column: int
    row: int
    step: StepRecord


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """From one step (0: the start) to another. `waits_for` says for what, if the second has not ended; `until` is
    the end of a sleep."""

    start: int
    end: int
    is_undo: bool
    waits_for: str | None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class ProcessGraph:
    """The graph. `left_out`: so many of the first steps are not in it."""

    nodes: list[GraphNode]
    edges: list[GraphEdge]
    would_undo: list[str]
    may_undo: list[str]
    stays_done: list[str]
    columns: int
    rows: int
    left_out: int


def process_graph(record: ProcessRecord) -> ProcessGraph:
    """The graph of a process with its steps (`get_process`)."""
    forward = [step for step in record.steps if step.undoes is None]
    left_out = max(0, len(forward) - MOST_NODES)
    # What is sent in one move has the same moment.
    groups = [list(group) for _, group in groupby(forward[left_out:], key=lambda step: step.sent_at)]
    nodes = [_node(step, column, row) for column, group in enumerate(groups) for row, step in enumerate(group)]
    places = {node.number: node.column for node in nodes}
    undos = [step for step in record.steps if step.undoes in places][:MOST_NODES]
    heights = {column: len(group) for column, group in enumerate(groups)}
    for step in undos:
        column = places[step.undoes or 0]
        nodes.append(_node(step, column, heights[column]))
        heights[column] += 1
    edges = [*_forward(groups), *(_edge(step.undoes or 0, step) for step in undos)]
    return ProcessGraph(
        nodes,
        edges,
        completed(record, has_undo=True),
        completed(record, has_undo=None),
        completed(record, has_undo=False),
        len(groups),
        max(heights.values(), default=0),
        left_out,
    )


def completed(record: ProcessRecord, *, has_undo: bool | None) -> list[str]:
    """The completed steps that nothing has undone yet, and that have an undo, have none, or may have one (None);
    the last one first. None if the process cannot be canceled."""
    if record.status.is_final or record.is_compensating:
        return []
    undone = {step.undoes for step in record.steps if step.undoes is not None}
    done = [
        step
        for step in record.steps
        if step.undoes is None and step.status is StepStatus.COMPLETED and step.kind in (None, "process")
    ]
    return [step.name for step in reversed(done) if step.number not in undone and step.has_undo is has_undo]


def _node(step: StepRecord, column: int, row: int) -> GraphNode:
    return GraphNode(step.number, step.name, step.kind or "command", step.status, step.undoes, column, row, step)


def _forward(groups: Sequence[Sequence[StepRecord]]) -> list[GraphEdge]:
    edges = [_edge(0, step) for step in (groups or [[]])[0]]
    for before, after in pairwise(groups):
        starts = before if len(before) * len(after) <= MOST_CROSSING else before[:1]
        edges += [_edge(start.number, end) for start in starts for end in after]
    return edges


def _edge(start: int, end: StepRecord) -> GraphEdge:
    sleeps = end.kind == "sleep" and end.status is StepStatus.SENT
    until = end.deadline_at if sleeps else None
    return GraphEdge(start, end.number, end.undoes is not None, _waits_for(end), until)


def _waits_for(step: StepRecord) -> str | None:
    """For what the process waits, in a few words."""
    if step.status is not StepStatus.SENT:
        return None
    if step.kind == "signal":
        return f"the signal {step.command_type}"
    if step.kind == "sleep":
        return "the end of its sleep"
    if step.kind == "process":
        return "a nested process"
    return "a person" if step.command_status == "IN_TROUBLESHOOTING_QUEUE" else "its reply"
