"""Sliding windows: convolutions and poolings of one to three axes. The access map of a strided, dilated convolution is built here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from sft.analysis.ir.access import AxisMap
from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Graph, Node, refs_in
from sft.analysis.ir.ops.base import Operator, axis_entry

__all__ = ["AvgPoolSpec", "ChannelWindowSpec", "ConvolutionSpec", "MaxPoolSpec", "Window", "WindowedSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A sliding window along one axis. The paddings of the two ends may differ (``padding="same"`` with even kernels)."""

    kernel: int
    stride: int = 1
    pad_low: int = 0
    pad_high: int = 0
    dilation: int = 1
    ceil: bool = False

    @property
    def span(self) -> int:
        """Input rows from the first to the last one read, both included."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def access(self) -> AxisMap:
        """The access map."""
        return AxisMap(scale=self.stride, first=-self.pad_low, last=self.span - 1 - self.pad_low)

    def extent(self, extent: int) -> int:
        """Output rows for ``extent`` input rows; not positive if the window does not fit."""
        free = extent + self.pad_low + self.pad_high - self.span
        out = free // self.stride + 1
        # In ceil mode a last partial window counts if it starts inside the image or its lower padding.
        if self.ceil and free % self.stride and out * self.stride < extent + self.pad_low:
            out += 1
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedSpec(Operator, ABC):
    """Base of convolution and pooling."""

    backward_reads: tuple[bool, bool] = (True, False)

    def num_axes(self, node: Node) -> int:
        """Number of axes that the window slides along."""
        return len(node.shape) - 2

    @abstractmethod
    def window(self, node: Node, axis: int) -> Window:
        """The window along one of these axes."""

    def access(self, node: Node, axis: int) -> AxisMap:
        return self.window(node, axis).access if axis < self.num_axes(node) else AxisMap()

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return self.window(node, axis).extent(extent) if axis < self.num_axes(node) else extent

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if self.num_axes(node) != graph.axes.count:
            return [f"{node.label}: slides along {self.num_axes(node)} dimensions of images with {graph.axes.count} axes"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelWindowSpec(Operator):
    """Pooling window along channels only: a pooling with one more axis than the image has (local response norm)."""

    name: str = "per_pixel"

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        for key, neutral in (("kernel_size", 1), ("stride", 1), ("padding", 0)):
            argument = node.argument(key) or node.argument("kernel_size")
            entries = argument if isinstance(argument, (tuple, list)) else (argument,)
            if len(node.shape) != graph.axes.rank + 1 or len(entries) <= graph.axes.count or any(e != neutral for e in entries[1:]):
                return [f"{node.label}: slides along channels and the image's axes at once"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSpec(WindowedSpec):
    """Convolution: ``conv1d``, ``conv2d``, ``conv3d``."""

    name: str = "convolution"

    def window(self, node: Node, axis: int) -> Window:
        kernel = axis_entry(node.argument("kernel_size"), axis)
        stride, dilation = axis_entry(node.argument("stride"), axis), axis_entry(node.argument("dilation"), axis)
        padding = node.argument("padding")
        if padding == "valid":
            low = high = 0
        elif padding == "same":
            total = dilation * (kernel - 1)
            low, high = total // 2, total - total // 2
        else:
            low = high = axis_entry(padding, axis)
        return Window(kernel=kernel, stride=stride, pad_low=low, pad_high=high, dilation=dilation)

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        # One output channel of one group reads every input channel: there is no slice of it to read.
        depthwise = node.argument("groups") == node.shape[1] != 1
        return (0, 1 if depthwise else None, *range(2, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        problems = WindowedSpec.problems(self, node, graph, streamed)
        if problems:
            return problems
        names = [name for value in (node.argument("weight"), node.argument("bias")) for name in refs_in(value)]
        if any(name in streamed for name in names):
            return [f"{node.label}: the kernel is computed from the image; only parameters may be kernels"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolSpec(WindowedSpec):
    def window(self, node: Node, axis: int) -> Window:
        kernel = axis_entry(node.argument("kernel_size"), axis)
        stride = axis_entry(node.argument("stride") or node.argument("kernel_size"), axis)  # an empty stride means the kernel's
        padding = axis_entry(node.argument("padding"), axis)
        dilation = axis_entry(node.argument("dilation", 1), axis)
        ceil = node.argument("ceil_mode")
        return Window(kernel=kernel, stride=stride, pad_low=padding, pad_high=padding, dilation=dilation, ceil=ceil)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxPoolSpec(_PoolSpec):
    """Max pooling: ``max_pool1d``, ``max_pool2d``, ``max_pool3d``."""

    name: str = "max_pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class AvgPoolSpec(_PoolSpec):
    """Average pooling: ``avg_pool1d``, ``avg_pool2d``, ``avg_pool3d``."""

    name: str = "avg_pool"

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if node.argument("divisor_override") == 0:
            return [f"{node.label}: divisor_override is 0; give a positive divisor"]
        return WindowedSpec.problems(self, node, graph, streamed)
