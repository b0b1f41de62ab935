"""Transposed convolutions, and the overlap-add operator into which :mod:`sft.analysis.passes.decompose_windows` rewrites them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

from sft.analysis.ir.access import AxisMap, AxisPlacement
from sft.analysis.ir.axes import ROWS
from sft.analysis.ir.graph import Graph, Node, refs_in
from sft.analysis.ir.ops.base import Operator, axis_entry, symbolic_axis_entry
from sft.analysis.ir.targets import RANDOM_TARGETS
from sft.common.interval import Interval

__all__ = ["OverlapAddSpec", "TransposedConvolutionSpec", "TransposedWindow", "transposed_window_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedWindow:
    """A transposed convolution along one axis: input row ``i`` contributes to output row ``i * stride - padding + dilation * tap``.

    Attributes:
        output_padding: rows after the last one; symbolic if the model requests a size, until that is a number.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        """Output rows from the first to the last one that an input row reaches, both included."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def overlaps(self) -> bool:
        """True if output rows sum over several input rows."""
        return self.span > self.stride

    @property
    def access(self) -> AxisMap:
        """Row ``o`` is reached from ``ceil((o + padding - span + 1) / stride)`` to ``floor((o + padding) / stride)``.

        If rows do not overlap, no input row reaches an output row in a gap; it then counts as reading the input row above the gap.
        """
        beyond = max(0, self.span - self.stride)
        return AxisMap(first=self.padding - beyond, last=self.padding, divisor=self.stride)

    @property
    def placement(self) -> AxisPlacement:
        """Row ``o`` is reached from ``(o + padding - span + 1) / stride`` to ``(o + padding) / stride``."""
        first = Fraction(self.padding - self.span + 1, self.stride)
        return AxisPlacement(stride=Fraction(1, self.stride), first=first, last=Fraction(self.padding, self.stride))

    def extent(self, extent: int) -> int:
        """Output rows for ``extent`` input rows."""
        return (extent - 1) * self.stride - 2 * self.padding + self.span + self.output_padding

    def tap_ranges(self, read: Interval, out: Interval) -> list[tuple[int, int, int]]:
        """For each kernel row the part of the input rows ``read`` that it maps into the output rows ``out``.

        Each entry is (first input row, number of rows, first output row), counted from the start of the intervals.
        """
        ranges = []
        for tap in range(self.kernel):
            offset = self.dilation * tap - self.padding  # output row of input row 0
            first = max(read.start, -((offset - out.start) // self.stride))
            stop = min(read.stop, (out.stop - 1 - offset) // self.stride + 1)
            count = max(0, stop - first)
            ranges.append((first - read.start, count, first * self.stride + offset - out.start) if count else (0, 0, 0))
        return ranges


def transposed_window_of(node: Node, axis: int) -> TransposedWindow:
    """The geometry of a transposed convolution, or of a col2im, along an axis."""
    return TransposedWindow(
        kernel=axis_entry(node.argument("kernel_size"), axis),
        stride=axis_entry(node.argument("stride"), axis),
        padding=axis_entry(node.argument("padding", 0), axis),
        output_padding=symbolic_axis_entry(node.argument("output_padding", 0), axis),
        dilation=axis_entry(node.argument("dilation"), axis),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedConvolutionSpec(Operator):
    """Transposed convolution (``conv_transpose1d``, ``2d``, ``3d``) without overlapping rows."""

    name: str = "transposed_convolution"
    is_phased: bool = True
    keeps_channels: bool = False
    backward_reads: tuple[bool, bool] = (True, False)

    def access(self, node: Node, axis: int) -> AxisMap:
        return transposed_window_of(node, axis).access if axis < len(node.shape) - 2 else AxisMap()

    def placement(self, node: Node, axis: int) -> AxisPlacement:
        return transposed_window_of(node, axis).placement if axis < len(node.shape) - 2 else AxisPlacement()

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return transposed_window_of(node, axis).extent(extent)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        count = len(node.shape) - 2
        if count != graph.axes.count:
            return [f"{node.label}: slides along {count} dimensions of images with {graph.axes.count} axes"]
        names = [name for value in (node.argument("weight"), node.argument("bias")) for name in refs_in(value)]
        if any(name in streamed for name in names):
            return [f"{node.label}: the kernel is computed from the image; only parameters may be kernels"]
        if any(graph[name].target in RANDOM_TARGETS for name in graph.ancestors(names)):
            return [f"{node.label}: dropout on the kernel itself; drop its input or its output"]
        if transposed_window_of(node, ROWS).overlaps:
            return [f"{node.label}: its rows overlap"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapAddSpec(Operator):
    """Overlap-add: the output rows of each input row, summed where they overlap."""

    name: str = "overlap_add"
    is_phased: bool = True
    keeps_channels: bool = False
    backward_reads: tuple[bool, bool] = (False, False)

    def spread(self, node: Node) -> TransposedWindow:
        """The geometry along the rows."""
        return TransposedWindow(**dict(node.argument("spread")))

    def access(self, node: Node, axis: int) -> AxisMap:
        return self.spread(node).access if axis == ROWS else AxisMap()

    def placement(self, node: Node, axis: int) -> AxisPlacement:
        return self.spread(node).placement if axis == ROWS else AxisPlacement()

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return self.spread(node).extent(extent) if axis == ROWS else extent
