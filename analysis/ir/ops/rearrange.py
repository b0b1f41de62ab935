"""Rearrangements of pixels and channels: pixel shuffle and unshuffle, im2col and col2im.

Pixel shuffles move rows in groups, each computed from its own input rows. A strip of complete groups is shuffled like an image, so torch's
own operator runs on it. Im2col and col2im (:mod:`sft.analysis.passes.decompose_windows`) move the pixels of a sliding window to channels
and back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sft.analysis.ir.access import AxisMap, AxisPlacement
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops.base import Operator, axis_entry
from sft.analysis.ir.ops.transposed import transposed_window_of
from sft.common.interval import Interval

__all__ = ["Col2imSpec", "Im2colSpec", "PixelShuffleSpec", "PixelUnshuffleSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShuffleSpec(Operator):
    """Attributes:
    argument: name of the argument with the number of rows and columns in a group.
    """

    name: str = "per_pixel"
    argument: str = "factors"
    keeps_channels: bool = False
    backward_reads: tuple[bool, bool] = (False, False)

    def factor(self, node: Node, axis: int) -> int:
        """Rows in a group."""
        return axis_entry(node.argument(self.argument), axis) if axis < self._num_axes(node) else 1

    def _num_axes(self, node: Node) -> int:
        factors = node.argument(self.argument)
        return len(factors) if isinstance(factors, tuple) else 2

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        # ATen's operators interpret the last three dimensions as channels, rows and columns.
        if node.target.startswith("aten.") and (graph.axes.count != 2 or len(node.shape) != graph.axes.rank):
            return [f"{node.label}: its operand has {len(node.shape)} dimensions; only images, of four, are shuffled in strips"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelShuffleSpec(_ShuffleSpec):
    """Pixel shuffle (``pixel_shuffle``, Shi et al. 2016): channels become pixels, with a factor for each axis."""

    def access(self, node: Node, axis: int) -> AxisMap:
        return AxisMap(divisor=self.factor(node, axis))

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return extent * self.factor(node, axis)

    def computed(self, node: Node, axis: int, rows: Interval) -> Interval:
        factor = self.factor(node, axis)
        return Interval(rows.start // factor * factor, -(-rows.stop // factor) * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelUnshuffleSpec(_ShuffleSpec):
    """Pixel unshuffle (``pixel_unshuffle``): pixels become channels."""

    def access(self, node: Node, axis: int) -> AxisMap:
        return AxisMap(scale=self.factor(node, axis), last=self.factor(node, axis) - 1)

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return extent // self.factor(node, axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Im2colSpec(Operator):
    """Im2col (``unfold``): the pixels of every window as channels, without a border."""

    name: str = "im2col"
    keeps_channels: bool = False
    backward_reads: tuple[bool, bool] = (False, False)

    def access(self, node: Node, axis: int) -> AxisMap:
        windows = transposed_window_of(node, axis)
        return AxisMap(scale=windows.stride, last=windows.span - 1)

    def extent(self, node: Node, axis: int, extent: int) -> int:
        windows = transposed_window_of(node, axis)
        return (extent - windows.span) // windows.stride + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Col2imSpec(Operator):
    """Col2im (``fold``): windows put back at their positions, summed where they overlap."""

    name: str = "col2im"
    is_phased: bool = True
    keeps_channels: bool = False
    backward_reads: tuple[bool, bool] = (False, False)

    def access(self, node: Node, axis: int) -> AxisMap:
        return transposed_window_of(node, axis).access

    def placement(self, node: Node, axis: int) -> AxisPlacement:
        return transposed_window_of(node, axis).placement

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return transposed_window_of(node, axis).extent(extent)
