"""Which values come in strips, what has no exact rule, and the order in which operators run.

A reduction over the image (a mean over height and width) is a barrier: whoever reads its result waits for the whole image.
Operators are therefore sorted into *phases*. Phase ``p`` is a run of streamed operators, which a strip walk may fuse from the
first to the last, followed by the operators on whole tensors that depend on it (the tail). An operator that mixes a streamed
value with a global value of phase ``p`` belongs to phase ``p + 1``. It may wait for a later one, where less is kept whole then
(:mod:`sft.analysis.tiling.retiming`).

An operator that cannot stream runs in the tail of its phase, on whole tensors. If what comes out is an image of the same size, it is
streamed again from there on: it is a source of the next phase, as an input is of the first.

Images stream together, so many samples at a time. Where inputs have different numbers of samples (one reference for all), those with
most are images, and the others whole tensors.

What follows from no input (a weight in another type, a mask drawn from the seed) waits for no image: it runs first, in a phase that
streams nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops import STATISTICS, WHOLE, Operator, operator_of, refusal_reason
from sft.analysis.tiling.retiming import retime
from sft.common.errors import UnsupportedError

__all__ = ["Phase", "PhasedGraph", "find_phases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One streamed run and its tail, as operator names in execution order."""

    streamed: tuple[str, ...]
    tail: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PhasedGraph:
    """The sorted graph.

    Attributes:
        graph: the graph, its operators in execution order.
        phases: the phases in order.
        streamed: names of the values that can come in strips.
        rows: the operator table's row for each operator.
        prologue: operators on parameters alone that others read; where there are any, they are the first phase.
        whole_reasons: why an operator that reads a streamed value runs whole, by operator.
    """

    graph: Graph
    phases: tuple[Phase, ...]
    streamed: frozenset[str]
    rows: dict[str, Operator]
    prologue: tuple[str, ...] = ()
    whole_reasons: Mapping[str, str] = field(default_factory=dict)


def find_phases(graph: Graph) -> PhasedGraph:
    """Classify every value and sort the operators.

    Raises:
        UnsupportedError: listing every operator without an exact rule, with its module path and a remedy.
    """
    found = _classify_values(graph, has_pixels=True)
    if _broadcasts_single_pixel(graph, *found[:2]):
        found = _classify_values(graph, has_pixels=False)
    return _sort_into_phases(graph, frozenset(found[0]), found[1], found[2])


def _classify_values(graph: Graph, *, has_pixels: bool) -> tuple[set[str], dict[str, Operator], dict[str, str]]:
    """The values that come in strips, the table's row of each operator, and why it runs whole although it reads one of these.

    Args:
        graph: the graph.
        has_pixels: whether an image of a single pixel, made of a larger one, is an image; else it is whole.

    Raises:
        UnsupportedError: as :func:`find_phases`.
    """
    streamed = _streamed_inputs(graph)
    rows: dict[str, Operator] = {}
    reasons: dict[str, str] = {}
    problems: list[str] = []
    depends = graph.descendants(graph.inputs)
    for node in graph.operators:
        refused = refusal_reason(node, graph)
        if refused is not None:
            if refused not in problems:  # an operator with several results is as many nodes
                problems.append(refused)
            continue
        row, why = operator_of(node, graph, streamed)
        if not has_pixels and row.role == "stream" and _is_single_pixel(graph, node.name):
            row, why = WHOLE, [f"{node.label}: makes a single pixel of the image"]
        if why:
            reasons[node.name] = why[0]
        rows[node.name] = row
        touched = [name for name in node.operands if name in streamed]
        # A global value spread over the image (the pooled branch of a DeepLab) is one, too.
        beside = touched or (streamed if node.name in depends else ())
        if (touched and row.role == "stream") or (row.role == "whole" and not row.is_extra_result and _is_image_like(graph, node, beside)):
            streamed.add(node.name)
    if problems:
        raise UnsupportedError(problems)
    return streamed, rows, reasons


def _broadcasts_single_pixel(graph: Graph, streamed: Collection[str], rows: Mapping[str, Operator]) -> bool:
    """Whether a single pixel that comes in strips is spread over a larger image (a gate made by a convolution as large as the image)."""
    for node in graph.operators:
        if rows[node.name].role == "stream":
            pixels = [_is_single_pixel(graph, name) for name in rows[node.name].streamed_operands(node, streamed)]
            if any(pixels) and not all(pixels):
                return True
    return False


def _is_single_pixel(graph: Graph, name: str) -> bool:
    """Whether a value is as small as a single pixel along all axes, at every size."""
    return graph.axes.is_image_shape(graph[name].shape) and all(extent == 1 for extent in graph.axes.of(graph[name].shape))


def _streamed_inputs(graph: Graph) -> set[str]:
    """The inputs that are images, with as many samples as any of them has; a single pixel beside larger ones is none."""
    images = [node for node in graph.nodes if node.kind == "input" and graph.axes.is_image_shape(node.shape)]
    images = [node for node in images if any(extent != 1 for extent in graph.axes.of(node.shape))] or images
    num_batch = max((node.shape[0] for node in images), default=0)
    return {node.name for node in images if node.shape[0] == num_batch}


def _is_image_like(graph: Graph, node: Node, operands: Collection[str]) -> bool:
    """Whether a value is laid out like one of these images, so that it can be streamed too; a single pixel is none."""
    axes = graph.axes
    if node.target in STATISTICS or all(extent == 1 for extent in axes.of(node.shape)):
        return False
    return len(node.shape) >= axes.rank and any(
        node.shape[0] == graph[name].shape[0] and axes.of(node.shape) == axes.of(graph[name].shape) for name in operands
    )


def _sort_into_phases(graph: Graph, streamed: frozenset[str], rows: dict[str, Operator], reasons: Mapping[str, str]) -> PhasedGraph:
    prologue = _prologue(graph)
    level: dict[str, int] = {node.name: 0 for node in graph.nodes if node.kind != "operator"}
    level.update(dict.fromkeys(prologue, -1))
    runs: dict[str, bool] = {}  # whether an operator runs in its phase's streamed run
    for node in graph.operators:
        if node.name in level:
            runs[node.name] = False
            continue
        runs[node.name] = rows[node.name].role != "whole"
        waits_for = [name for name in node.operands if graph[name].kind == "operator"]
        # What streams waits for global values, for images that are made whole, and for those that it does not read in strips.
        strips = rows[node.name].streamed_operands(node, streamed)
        late = [runs[node.name] and not (runs[name] and name in strips) for name in waits_for]
        level[node.name] = max((level[name] + is_late for name, is_late in zip(waits_for, late, strict=True)), default=0)
    level = retime(graph, level, runs, streamed, lambda name: rows[name].streamed_operands(graph[name], streamed))
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
    found = replace(graph, nodes=ordered)
    return PhasedGraph(graph=found, phases=phases, streamed=streamed, rows=rows, prologue=prologue, whole_reasons=reasons)


def _prologue(graph: Graph) -> tuple[str, ...]:
    """The operators that depend on no input, and that an operator which does depends on."""
    depends = graph.descendants(graph.inputs)
    wanted = graph.ancestors([name for name in depends if graph[name].kind == "operator"])
    return tuple(node.name for node in graph.operators if node.name in wanted and node.name not in depends)
