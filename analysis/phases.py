"""Which values come in strips, what has no exact rule, and the order in which operators run.

A reduction over the image (a mean over height and width) is a barrier: whoever reads its result waits for the whole image.
Operators are therefore sorted into *phases*. Phase ``p`` is a run of streamed operators, which a strip walk may fuse from the
first to the last, followed by the operators on whole tensors that depend on it (the tail). An operator that mixes a streamed
value with a global value of phase ``p`` belongs to phase ``p + 1``.

What follows from no input (a weight in another type, a mask drawn from the seed) waits for no image: it runs first, in a phase that
streams nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sft.analysis.graph import Graph, Node
from sft.analysis.operators import Operator, operator_of, remedy
from sft.errors import UnsupportedError

__all__ = ["Phase", "Phases", "find_phases"]

_STREAMED_RANK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One streamed run and its tail, as operator names in execution order."""

    streamed: tuple[str, ...]
    tail: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The sorted graph.

    Attributes:
        graph: the graph, its operators in execution order.
        phases: the phases in order.
        streamed: names of the values that can come in strips.
        rows: the operator table's row for each operator.
        prologue: operators on parameters alone that others read; where there are any, they are the first phase.
    """

    graph: Graph
    phases: tuple[Phase, ...]
    streamed: frozenset[str]
    rows: dict[str, Operator]
    prologue: tuple[str, ...] = ()


def find_phases(graph: Graph) -> Phases:
    """Classify every value and sort the operators.

    Raises:
        UnsupportedError: listing every operator without an exact rule, with its module path and a remedy.
    """
    streamed = {node.name for node in graph.nodes if node.kind == "input" and len(node.shape) == _STREAMED_RANK}
    rows: dict[str, Operator] = {}
    problems: list[str] = []
    for node in graph.operators:
        row = operator_of(node, streamed)
        if row is None:
            problems.append(f"{node.label} has no exact rule; {remedy(node)}")
            continue
        touched = any(name in streamed for name in node.operands)
        if touched and row.role != "whole":
            found = row.problems(node, graph, streamed)
            if found:
                problems.extend(found)
                continue
            if row.role != "reduce":
                streamed.add(node.name)
        rows[node.name] = row
    if problems:
        raise UnsupportedError(problems)
    return _sorted(graph, frozenset(streamed), rows)


def _sorted(graph: Graph, streamed: frozenset[str], rows: dict[str, Operator]) -> Phases:
    prologue = _prologue(graph)
    level: dict[str, int] = {node.name: 0 for node in graph.nodes if node.kind != "operator"}
    level.update(dict.fromkeys(prologue, -1))
    runs: dict[str, bool] = {}  # whether an operator runs in its phase's streamed run
    for node in graph.operators:
        if node.name in level:
            runs[node.name] = False
            continue
        runs[node.name] = node.name in streamed or (rows[node.name].role == "reduce" and any(name in streamed for name in node.operands))
        level[node.name] = max((_level(graph, name, level, runs, runs[node.name]) for name in node.operands), default=0)
    num_phases = max((level[node.name] for node in graph.operators), default=0) + 1
    phases = tuple(
        Phase(
            streamed=tuple(n.name for n in graph.operators if level[n.name] == p and runs[n.name]),
            tail=tuple(n.name for n in graph.operators if level[n.name] == p and not runs[n.name]),
        )
        for p in range(-1 if prologue else 0, num_phases)
    )
    leaves = tuple(node for node in graph.nodes if node.kind != "operator")
    ordered: tuple[Node, ...] = leaves + tuple(graph[name] for phase in phases for name in (*phase.streamed, *phase.tail))
    return Phases(graph=replace(graph, nodes=ordered), phases=phases, streamed=streamed, rows=rows, prologue=prologue)


def _prologue(graph: Graph) -> tuple[str, ...]:
    """The operators that depend on no input, and that an operator which does depends on."""
    depends = graph.descendants(graph.inputs)
    wanted = graph.ancestors([name for name in depends if graph[name].kind == "operator"])
    return tuple(node.name for node in graph.operators if node.name in wanted and node.name not in depends)


def _level(graph: Graph, name: str, level: dict[str, int], runs: dict[str, bool], reader_streams: bool) -> int:
    """The earliest phase in which an operator that reads ``name`` can run."""
    if graph[name].kind != "operator":
        return 0
    waits = reader_streams and (not runs[name] or len(graph[name].shape) != _STREAMED_RANK or _is_global(graph, name))
    return level[name] + 1 if waits else level[name]


def _is_global(graph: Graph, name: str) -> bool:
    shape = graph[name].shape
    return (
        len(shape) == _STREAMED_RANK
        and shape[2] == 1
        and shape[3] == 1
        and graph[name].target
        in (
            "aten.mean.dim",
            "aten.adaptive_avg_pool2d.default",
        )
    )
