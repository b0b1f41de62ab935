"""Resampling: interpolation, and adaptive pooling to sizes that follow the image's; the grid changes without a sliding window."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sft.analysis.ir.access import AxisMap, AxisPlacement
from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops.base import Operator, Role, axis_entry
from sft.analysis.ir.ops.resize_matrix import AxisResampling, ResamplingKind, interpolated_axes
from sft.common.interval import Interval

__all__ = [
    "DEVICE_TYPE",
    "AdaptiveAvgPoolSpec",
    "AdaptiveMaxPoolSpec",
    "AntialiasedInterpolationSpec",
    "FixedSizeAvgPoolSpec",
    "InterpolationSpec",
    "NearestSpec",
    "ResamplingSpec",
    "is_interpolation",
]

#: Fewest windows along the rows; with fewer, a window would hold much of the image.
_MIN_WINDOWS = 4

#: Argument of interpolations on CUDA devices: the device's type. The positions of rows depend on it.
DEVICE_TYPE = "device_type"

#: Interpolation methods, by the operator's name without its number of axes.
_RESIZE_KINDS: dict[str, ResamplingKind] = {
    "upsample_nearest": "nearest",
    "_upsample_nearest_exact": "nearest exact",
    "upsample_linear": "linear",
    "upsample_bilinear": "linear",
    "upsample_trilinear": "linear",
    "upsample_bicubic": "cubic",
    "_upsample_bilinear_aa": "antialiased linear",
    "_upsample_bicubic_aa": "antialiased cubic",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestSpec(Operator):
    """Nearest-neighbour upsampling by integer factors."""

    name: str = "nearest"
    backward_reads: tuple[bool, bool] = (False, False)

    def _factor(self, node: Node, axis: int) -> int:
        factors: tuple[int, ...] = node.argument("factors")
        return factors[axis] if axis < len(factors) else 1

    def access(self, node: Node, axis: int) -> AxisMap:
        return AxisMap(divisor=self._factor(node, axis))

    def extent(self, node: Node, axis: int, extent: int) -> int:
        return extent * self._factor(node, axis)

    def computed(self, node: Node, axis: int, rows: Interval) -> Interval:
        # All copies of an input row at once: the further ones cost no read.
        factor = self._factor(node, axis)
        return Interval(rows.start // factor * factor, -(-rows.stop // factor) * factor)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        factors = node.argument("factors")
        if factors is None:
            return [f"{node.label}: the factor is not an integer"]
        for factor, extent in zip(factors, graph.axes.of(node.shape), strict=True):
            # ATen finds the source index in float32; beyond some size or for some factors that is not floor(i / factor).
            size = int(extent) if isinstance(extent, int) or extent.is_number else 2**17
            rows = np.arange(size, dtype=np.float32)
            if _resize_kind(node) == "nearest exact":
                rows += np.float32(0.5)
            if not np.array_equal(np.floor(rows * np.float32(1.0 / factor)), np.arange(size) // factor):
                return [f"{node.label}: ATen's float32 source index differs from i // {factor}"]
        return []


def is_interpolation(target: str) -> bool:
    """True for ATen's interpolations."""
    return target.startswith("aten.") and _without_rank(target) in _RESIZE_KINDS


def _resize_kind(node: Node) -> ResamplingKind:
    """The interpolation method of a node."""
    return _RESIZE_KINDS[_without_rank(node.target)]


def _without_rank(target: str) -> str:
    """An operator's name without its number of axes."""
    return re.sub(r"[123]d", "", target.split(".")[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ResamplingSpec(Operator, ABC):
    """Separable resampling (:mod:`sft.analysis.ir.ops.resize_matrix`); each axis is resolved once its extent is a number."""

    name: str = "resampling"
    backward_reads: tuple[bool, bool] = (False, False)

    def sampling(self, node: Node, axis: int) -> AxisResampling | None:
        """The resampling of an axis; ``None`` if the image has no such axis."""
        samplings: tuple[AxisResampling, ...] = node.argument("samplings")
        return samplings[axis] if axis < len(samplings) else None

    @abstractmethod
    def samplings(self, node: Node, extents: tuple[int, ...]) -> tuple[AxisResampling, ...]:
        """The resampling of each axis of an image."""

    def resolved(self, node: Node, extents: tuple[int, ...]) -> Node:
        return replace(node, arguments=(*node.arguments, ("samplings", self.samplings(node, extents))))

    def access(self, node: Node, axis: int) -> AxisMap:
        sampling = self.sampling(node, axis)
        return AxisMap() if sampling is None else sampling.access

    def placement(self, node: Node, axis: int) -> AxisPlacement:
        sampling = self.sampling(node, axis)
        return AxisPlacement() if sampling is None else sampling.placement

    def extent(self, node: Node, axis: int, extent: int) -> int:
        sampling = self.sampling(node, axis)
        return extent if sampling is None else sampling.length

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if len(node.shape) != graph.axes.rank:
            return [f"{node.label}: resamples {len(node.shape) - 2} dimensions of images with {graph.axes.count} axes"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpolationSpec(ResamplingSpec):
    """Nearest, linear and cubic interpolation, up and down, to a size or by a factor."""

    def samplings(self, node: Node, extents: tuple[int, ...]) -> tuple[AxisResampling, ...]:
        size, scales, kind = node.argument("output_size"), node.argument("scale_factors"), _resize_kind(node)
        lengths = tuple(int(extent * scale) for extent, scale in zip(extents, scales, strict=True)) if size is None else tuple(size)
        return interpolated_axes(
            kind,
            extents,
            lengths,
            [None] * len(lengths) if scales is None else [float(scale) for scale in scales],
            align_corners=bool(node.argument("align_corners", False)),
            is_double=node.dtype == "float64",
            is_on_gpu=node.argument(DEVICE_TYPE) == "cuda",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AntialiasedInterpolationSpec(InterpolationSpec):
    """Linear and cubic interpolation with antialiasing: the windows grow with the downscaling factor."""

    is_sized: bool = True

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if node.shape[-1] == 1:
            return [f"{node.label}: to a width of one pixel ATen repeats the first row on some devices; it runs untiled"]
        return InterpolationSpec.problems(self, node, graph, streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveAvgPoolSpec(ResamplingSpec):
    """Adaptive average pooling to a size that follows the image's."""

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        rows = node.argument("output_size")[0]
        if isinstance(rows, int) and rows < _MIN_WINDOWS:
            return [f"{node.label}: a row of its result averages 1/{rows} of the image's rows, which would all be carried"]
        return ResamplingSpec.problems(self, node, graph, streamed)

    def samplings(self, node: Node, extents: tuple[int, ...]) -> tuple[AxisResampling, ...]:
        size: Any = node.argument("output_size")
        return tuple(AxisResampling(kind="window", extent=extent, length=axis_entry(size, axis)) for axis, extent in enumerate(extents))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveMaxPoolSpec(AdaptiveAvgPoolSpec):
    """Adaptive max pooling, with the windows of adaptive average pooling."""

    name: str = "adaptive_max"
    backward_reads: tuple[bool, bool] = (True, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if node.argument("result", 0) != 0:
            return [f"{node.label}: its indices count the pixels of the full image"]
        return AdaptiveAvgPoolSpec.problems(self, node, graph, streamed)


#: Most windows along an axis that are accumulated as running sums.
_MAX_WINDOWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSizeAvgPoolSpec(AdaptiveAvgPoolSpec):
    """Adaptive average pooling to a few windows of any image: running sums over the strips, without carried rows."""

    name: str = "fixed_size_avg_pool"
    role: Role = "reduce"

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, 1, *([None] * axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        size = node.argument("output_size")
        if any(not isinstance(extent, int) or extent > _MAX_WINDOWS for extent in size):
            return [f"{node.label}: pools to {size}, which is not a small fixed grid"]
        return ResamplingSpec.problems(self, node, graph, streamed)
