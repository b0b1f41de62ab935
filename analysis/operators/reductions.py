"""Reductions over the image, whose results are global values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sft.analysis.axes import Axes
from sft.analysis.graph import Graph, Node
from sft.analysis.operators.base import Operator, Role

__all__ = ["Mean", "Moments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Operator):
    """The mean over all axes of the image."""

    name: str = "mean"
    role: Role = "reduce"

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, 1, *([None] * axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        axes = graph.axes
        if node.target.startswith("aten.adaptive_avg_pool"):
            size = node.argument("output_size")
            if any(extent != 1 for extent in size):
                return [f"{node.label}: pools to {size}; only a single pixel streams, use AdaptiveAvgPool{axes.count}d(1)"]
            return []
        rank = len(graph[node.operands[0]].shape)
        dims = sorted(dim % rank for dim in node.argument("dim") or ())
        if dims != list(range(rank - axes.count, rank)):
            listed = tuple(range(2, axes.rank))
            return [f"{node.label}: mean over {node.argument('dim')}; only all axes of the image together, dim={listed}, stream"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments(Operator):
    """Mean, variance and count of groups of elements."""

    name: str = "moments"
    role: Role = "reduce"

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0 if node.argument("per_sample") else None, 1, *([None] * axes.count))
