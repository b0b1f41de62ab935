"""Reductions over the image; their results are global values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops.base import Operator, Role, untiled_operand_problem

__all__ = [
    "STATISTICS",
    "ArgMaxSpec",
    "AxisMinMaxSpec",
    "AxisSumSpec",
    "LogSumExpSpec",
    "MeanSpec",
    "MinMaxSpec",
    "MomentsSpec",
    "SpatialContractionSpec",
    "SumSpec",
]

#: Operators with statistics of different kinds along their last dimension (mean, variance): never images, independent of their extents.
STATISTICS = frozenset({"sft.moments", "sft.scale_shift", "sft.minmax", "sft.axis_minmax", "sft.argmax"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReductionSpec(Operator):
    """Base of all reductions: the axes disappear."""

    role: Role = "reduce"

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, 1, *([None] * axes.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class SumSpec(_ReductionSpec):
    """Sum over all axes of the image."""

    name: str = "sum"
    backward_reads: tuple[bool, bool] = (False, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        axes = graph.axes
        rank = len(graph[node.operands[0]].shape)
        dims = sorted(dim % rank for dim in node.argument("dim") or ())
        if dims != list(range(rank - axes.count, rank)):
            listed = tuple(range(2, axes.rank))
            return [f"{node.label}: {self.name} over {node.argument('dim')}; only all axes of the image together, dim={listed}, stream"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanSpec(SumSpec):
    """Mean over all axes of the image."""

    name: str = "mean"

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        axes = graph.axes
        if node.target.startswith("aten.adaptive_avg_pool"):
            size = node.argument("output_size")
            if any(extent != 1 for extent in size):
                return [f"{node.label}: pools to {size}; only a single pixel streams, use AdaptiveAvgPool{axes.count}d(1)"]
            return []
        return SumSpec.problems(self, node, graph, streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSumSpec(_ReductionSpec):
    """Sum or mean over some axes of the image."""

    name: str = "axis_sum"
    backward_reads: tuple[bool, bool] = (False, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMinMaxSpec(_ReductionSpec):
    """Largest or smallest element along some axes of the image, and its number of occurrences."""

    name: str = "axis_minmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class MinMaxSpec(_ReductionSpec):
    """Largest or smallest element, and its number of occurrences."""

    name: str = "minmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgMaxSpec(_ReductionSpec):
    """Largest element, and its index."""

    name: str = "argmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatialContractionSpec(_ReductionSpec):
    """Matrix product of two images, contracted over all pixels."""

    name: str = "spatial_contraction"

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, None, *([None] * axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        return untiled_operand_problem(node, streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSumExpSpec(_ReductionSpec):
    """Logarithm of a sum of exponentials."""

    name: str = "logsumexp"


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsSpec(_ReductionSpec):
    """Mean, variance and count of groups of elements."""

    name: str = "moments"

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0 if node.argument("per_sample") else None, 1, *([None] * axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        shape = graph[node.operands[0]].shape
        channels = [int(extent) for extent in shape[1 : len(shape) - graph.axes.count]]
        if len(channels) > 1 and node.argument("groups") not in accumulate(channels, mul, initial=1):
            return [f"{node.label}: groups that divide one of several dimensions of channels; merge them with flatten"]
        return []
