"""Phases: classification of values (streamed or untiled), and the execution order between reduction barriers.

A reduction over the image (a mean over height and width) is a barrier: readers of its result wait for the full image. Operators are
therefore sorted into *phases*. Phase ``p`` is a run of streamed operators, which a sweep may fuse from the first to the last, followed by
the operators on untiled tensors that depend on it (the tail). An operator that mixes a streamed value with a global value of phase ``p``
belongs to phase ``p + 1``::

    y = conv(x); m = mean(y); s = sigmoid(m); z = y * s

    phase 0   streamed: conv, mean    tail: sigmoid
    phase 1   streamed: mul

An operator may move to a later phase if less memory crosses the barriers then (:mod:`sft.analysis.tiling.retiming`).

An operator that cannot stream runs in the tail of its phase, on untiled tensors. If its result is an image of the same size, it is streamed
again afterwards: it is a source of the next phase, as an input is of the first.

Images stream together, with the same number of samples at a time. If inputs have different numbers of samples (one reference for all),
those with most are images, and the remaining ones untiled tensors.

Values that depend on no input (a weight in another type, a mask from the seed) wait for no image: they are computed first, in a phase
without streamed operators.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops import STATISTICS, WHOLE, Operator, operator_of, refusal_reason
from sft.analysis.tiling.operator_run import OperatorRun
from sft.analysis.tiling.retiming import retime
from sft.common.errors import UnsupportedError

__all__ = ["Phase", "PhasedGraph", "find_phases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One streamed run and its tail.

    Attributes:
        streamed: operators of the run, in execution order.
        tail: operators on untiled tensors after it, in execution order.
    """

    streamed: tuple[str, ...]
    tail: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PhasedGraph:
    """A graph sorted into phases.

    Attributes:
        graph: the graph, its operators in execution order.
        phases: the phases in order.
        streamed: names of the values that can be streamed in strips.
        rows: the operator table's row for each operator.
        prologue: operators on parameters only that later operators read; if not empty, they are the first phase.
        whole_reasons: for each operator that runs untiled although it reads a streamed value, the reason.
        clones: operators that compute values of other operators again (:mod:`sft.analysis.tiling.rematerialization`).
    """

    graph: Graph
    phases: tuple[Phase, ...]
    streamed: frozenset[str]
    rows: dict[str, Operator]
    prologue: tuple[str, ...] = ()
    whole_reasons: Mapping[str, str] = field(default_factory=dict)
    clones: frozenset[str] = frozenset()

    def run(self, names: Sequence[str]) -> OperatorRun:
        """The run of these operators, in the graph's order."""
        return OperatorRun(graph=self.graph, names=tuple(names), rows=self.rows, streamed=self.streamed)


def find_phases(graph: Graph) -> PhasedGraph:
    """Classify every value and sort the operators into phases.

    Raises:
        UnsupportedError: lists every operator without an exact rule, with its module path and a remedy.
    """
    classes = _classify_values(graph, has_pixels=True)
    if _broadcasts_single_pixel(graph, *classes[:2]):
        classes = _classify_values(graph, has_pixels=False)
    return _sort_into_phases(graph, frozenset(classes[0]), classes[1], classes[2])


def _classify_values(graph: Graph, *, has_pixels: bool) -> tuple[set[str], dict[str, Operator], dict[str, str]]:
    """The streamed values, the table's row of each operator, and reasons of operators that run untiled although they read images.

    Args:
        graph: the graph.
        has_pixels: True if an image of a single pixel, computed from a larger one, counts as an image; otherwise it is untiled.

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
        row, reason = operator_of(node, graph, streamed)
        if not has_pixels and row.role == "stream" and _is_single_pixel(graph, node.name):
            row, reason = WHOLE, [f"{node.label}: makes a single pixel of the image"]
        if reason:
            reasons[node.name] = reason[0]
        rows[node.name] = row
        streamed_operands = [name for name in node.operands if name in streamed]
        # A global value broadcast over the image (the pooled branch of a DeepLab) is an image, too.
        references = streamed_operands or (streamed if node.name in depends else ())
        if (streamed_operands and row.role == "stream") or (
            row.role == "whole" and not row.is_extra_result and _is_image_like(graph, node, references)
        ):
            streamed.add(node.name)
    if problems:
        raise UnsupportedError(problems)
    return streamed, rows, reasons


def _broadcasts_single_pixel(graph: Graph, streamed: Collection[str], rows: Mapping[str, Operator]) -> bool:
    """True if a streamed single pixel broadcasts to a larger image (a gate from a convolution with a kernel of the image's size)."""
    for node in graph.operators:
        if rows[node.name].role == "stream":
            pixels = [_is_single_pixel(graph, name) for name in rows[node.name].streamed_operands(node, streamed)]
            if any(pixels) and not all(pixels):
                return True
    return False


def _is_single_pixel(graph: Graph, name: str) -> bool:
    """True if a value has extent 1 along all axes, at every size."""
    return graph.axes.is_image_shape(graph[name].shape) and all(extent == 1 for extent in graph.axes.of(graph[name].shape))


def _streamed_inputs(graph: Graph) -> set[str]:
    """The inputs that are images, with the largest number of samples; single pixels are none if larger images exist."""
    images = [node for node in graph.nodes if node.kind == "input" and graph.axes.is_image_shape(node.shape)]
    images = [node for node in images if any(extent != 1 for extent in graph.axes.of(node.shape))] or images
    num_batch = max((node.shape[0] for node in images), default=0)
    return {node.name for node in images if node.shape[0] == num_batch}


def _is_image_like(graph: Graph, node: Node, operands: Collection[str]) -> bool:
    """True if a value has the batch and spatial extents of one of these images, so that it can be streamed; a single pixel has not."""
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
    runs: dict[str, bool] = {}  # True if an operator belongs to its phase's streamed run
    for node in graph.operators:
        if node.name in level:
            runs[node.name] = False
            continue
        runs[node.name] = rows[node.name].role != "whole"
        waits_for = [name for name in node.operands if graph[name].kind == "operator"]
        # A streamed operator waits for global values, untiled images, and images that it does not read in strips.
        in_strips = rows[node.name].streamed_operands(node, streamed)
        is_late = [runs[node.name] and not (runs[name] and name in in_strips) for name in waits_for]
        level[node.name] = max((level[name] + is_late for name, is_late in zip(waits_for, is_late, strict=True)), default=0)
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
    sorted_graph = replace(graph, nodes=ordered)
    return PhasedGraph(graph=sorted_graph, phases=phases, streamed=streamed, rows=rows, prologue=prologue, whole_reasons=reasons)


def _prologue(graph: Graph) -> tuple[str, ...]:
    """The operators that depend on no input and that an operator on inputs depends on."""
    depends = graph.descendants(graph.inputs)
    needed = graph.ancestors([name for name in depends if graph[name].kind == "operator"])
    return tuple(node.name for node in graph.operators if node.name in needed and node.name not in depends)
