"""Operators that change the grid without a sliding window over it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from sft.analysis.access import AxisMap
from sft.analysis.axes import Axes
from sft.analysis.graph import Graph, Node
from sft.analysis.interval import Interval
from sft.analysis.operators.base import Operator

__all__ = ["Nearest", "PixelShuffle", "PixelUnshuffle"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelShuffle(Operator):
    """``pixel_shuffle``: channels become pixels, ``factor`` rows and columns for each (Shi et al. 2016). ATen does it to each strip."""

    name: str = "rowwise"

    def _factor(self, node: Node) -> int:
        factor: int = node.argument("upscale_factor")
        return factor

    def access(self, node: Node, axis: int) -> AxisMap:
        return AxisMap(divisor=self._factor(node))

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return extent * self._factor(node)

    def computed(self, node: Node, axis: int, part: Interval) -> Interval:
        factor = self._factor(node)
        return Interval(part.start // factor * factor, -(-part.stop // factor) * factor)

    def keeps(self, node: Node) -> tuple[bool, bool]:
        return (False, False)

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, None, *range(2, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        return _of_another_rank(node, graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelUnshuffle(Operator):
    """``pixel_unshuffle``: the pixels of squares become channels."""

    name: str = "rowwise"

    def _factor(self, node: Node) -> int:
        factor: int = node.argument("downscale_factor")
        return factor

    def access(self, node: Node, axis: int) -> AxisMap:
        return AxisMap(scale=self._factor(node), last=self._factor(node) - 1)

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return extent // self._factor(node)

    def keeps(self, node: Node) -> tuple[bool, bool]:
        return (False, False)

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, None, *range(2, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        return _of_another_rank(node, graph)


def _of_another_rank(node: Node, graph: Graph) -> list[str]:
    """ATen's shuffles take the last three dimensions for channels, rows and columns."""
    if graph.axes.count != 2 or len(node.shape) != graph.axes.rank:
        return [f"{node.label}: of {len(node.shape)} dimensions; only images, of four, are shuffled in strips"]
    return []
