"""Operators that change the grid without a sliding window over it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sft.analysis.access import AxisMap
from sft.analysis.graph import Graph, Node
from sft.analysis.interval import Interval
from sft.analysis.operators.base import Operator

__all__ = ["Nearest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest(Operator):
    """Nearest upsampling by whole factors."""

    name: str = "nearest"

    def _factor(self, node: Node, axis: int) -> int:
        factors: tuple[int, ...] = node.argument("factors")
        return factors[axis] if axis < len(factors) else 1

    def access(self, node: Node, axis: int) -> AxisMap:
        return AxisMap(divisor=self._factor(node, axis))

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return extent * self._factor(node, axis)

    def computed(self, node: Node, axis: int, part: Interval) -> Interval:
        # By whole input rows, whose further copies cost no read.
        factor = self._factor(node, axis)
        return Interval(part.start // factor * factor, -(-part.stop // factor) * factor)

    def keeps(self, node: Node) -> tuple[bool, bool]:
        return (False, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        factors = node.argument("factors")
        if factors is None:
            return [f"{node.label}: the factor is not a whole number; upsample by an integer factor (or to an integer multiple)"]
        for factor, extent in zip(factors, graph.axes.of(node.shape), strict=True):
            # ATen finds the source index in float32; beyond some size or for some factors that is not floor(i / factor).
            size = int(extent) if isinstance(extent, int) or extent.is_number else 2**17
            rows = np.arange(size, dtype=np.float32)
            if not np.array_equal(np.floor(rows * np.float32(1.0 / factor)), np.arange(size) // factor):
                return [f"{node.label}: ATen's float32 source index differs from i // {factor}; use a factor of 2 or 3"]
        return []
