"""Operators that compute each pixel from the same pixel of their operands: activations, joins, norms of channels, casts, masks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Graph, Node
from sft.analysis.ir.ops.base import Operator

__all__ = [
    "AffineSpec",
    "AssignChannelsSpec",
    "BinarySpec",
    "CastSpec",
    "CatSpec",
    "DetachSpec",
    "FrozenNormSpec",
    "GatherChannelsSpec",
    "PerPixelSpec",
    "PointwiseSpec",
    "RandomOpSpec",
    "RepeatChannelsSpec",
    "SpatialSideInputSpec",
    "UndecomposedLayerNormSpec",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointwiseSpec(Operator):
    """A function of one element, without tensors among its arguments but ``self``."""

    name: str = "pointwise"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, True) if node.target in ("aten.relu.default", "aten.leaky_relu.default") else (True, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachSpec(Operator):
    """The value itself, without a gradient."""

    name: str = "detach"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerPixelSpec(Operator):
    """Anything else that reads, for a pixel of its result, that pixel of its operands: all channels, other values, parameters.

    Attributes:
        broadcasts: whether its operands broadcast, so that one which is no image must not vary along one.
    """

    name: str = "per_pixel"
    broadcasts: bool = True

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, None, *range(2, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        return _spatial_side_inputs(node, graph, streamed) if self.broadcasts else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelwiseSpec(Operator):
    """A function of a pixel's channels along some of their dimensions.

    Attributes:
        argument: the argument that names the dimensions.
        adds: whether it names a new one.
    """

    name: str = "per_pixel"
    argument: str = "dim"
    adds: bool = False

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, None, *range(2, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        rank = len(node.shape) if self.adds else len(graph[node.operands[0]].shape)
        given = node.argument(self.argument, 0 if self.adds else None)
        dims = [given] if isinstance(given, int) else given
        if not dims or any(not 1 <= dim % rank < rank - graph.axes.count for dim in dims):
            return [f"{node.label}: along dimension {given} of {rank}; only dimensions of channels stay within a strip"]
        whole = [name for name in node.operands if name not in streamed] if self.adds else []
        return [f"{node.label}: operand {whole[0]} is no image in strips as the others are"] if whole else []


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatChannelsSpec(Operator):
    """All channels several times."""

    name: str = "per_pixel"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, False)

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, None, *range(2, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        rank, repeats = len(graph[node.operands[0]].shape), node.argument("repeats")
        first_axis = rank - graph.axes.count
        if len(repeats) == rank and all(repeats[dim] == 1 for dim in (0, *range(first_axis, rank))):
            return []
        return [f"{node.label}: repeats {tuple(repeats)} times along [N, channels, ...]; only channels can be repeated in strips"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherChannelsSpec(ChannelwiseSpec):
    """Channels that each pixel's own labels name."""

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        whole = [name for name in node.operands if name not in streamed]
        if whole:
            return [f"{node.label}: operand {whole[0]} is not an image of the same size; make it from one (torch.zeros_like)"]
        return ChannelwiseSpec.problems(self, node, graph, streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignChannelsSpec(GatherChannelsSpec):
    """Some channels of an image replaced by another image: ``x[:, :2] = y``."""

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BinarySpec(Operator):
    """``add``, ``sub``, ``mul``, ``div``."""

    name: str = "binary"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (node.target in ("aten.mul.Tensor", "aten.div.Tensor"), False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        return _spatial_side_inputs(node, graph, streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatSpec(Operator):
    """``cat`` along a dimension of channels."""

    name: str = "cat"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, False)

    def dimension_map(self, node: Node, axes: Axes) -> tuple[int | None, ...]:
        return (0, None, *range(2, 2 + axes.count))

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        dim = node.argument("dim", 0) % len(node.shape)
        if not 1 <= dim < len(node.shape) - graph.axes.count:
            return [f"{node.label}: cat along dimension {node.argument('dim', 0)}; only channels (dim=1) can be joined in strips"]
        whole = [name for name in node.operands if name not in streamed]
        return [f"{node.label}: operand {whole[0]} is not an image of the same size; expand it first"] if whole else []


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenNormSpec(Operator):
    """BatchNorm with its running statistics."""

    name: str = "frozen_norm"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (True, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if any(name in streamed for name in node.operands[1:]):
            return [f"{node.label}: a streamed value serves as the norm's parameter; only parameters and buffers may"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class UndecomposedLayerNormSpec(Operator):
    """A layer norm over the image that could not be taken apart."""

    name: str = "per_pixel"

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        over = node.argument("normalized_shape")
        why = f"{node.label}: over {over}, part of which is the image"
        if node.argument("weight") is not None:
            return [f"{why}, with a weight for each pixel; leave it out (elementwise_affine=False), or use GroupNorm(1, channels)"]
        return [f"{why}; normalize channels alone, or all channels and axes together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineSpec(Operator):
    """The pointwise part of a norm over the image."""

    name: str = "affine"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (True, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatialSideInputSpec(Operator):
    """What varies along the image without being one (a position embedding, a grid of coordinates): each strip takes its part."""

    name: str = "spatial_side_input"

    def streamed_operands(self, node: Node, streamed: Collection[str]) -> tuple[str, ...]:
        return node.operands[1:]

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec(Operator):
    """A conversion to another element type."""

    name: str = "cast"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomOpSpec(Operator):
    """Dropout, masks and noise, which follow positions."""

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if len(node.shape) > graph.axes.rank:
            return [f"{node.label}: draws for several dimensions of channels; draw before these are split"]
        return []


def _spatial_side_inputs(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    """Operands that are no images and yet vary along the axes."""
    axes = graph.axes
    for name in node.operands:
        shape = graph[name].shape
        if name not in streamed and any(extent != 1 for extent in axes.of(shape)):
            wanted = " and ".join(axes.names)
            return [f"{node.label}: operand {name} of shape {shape} varies along the image; make its {wanted} 1"]
        is_many = name not in streamed and len(shape) == len(node.shape) and shape[0] != 1
        if is_many and name not in graph.descendants([node.name for node in graph.nodes if node.kind in ("input", "seed")]):
            return [f"{node.label}: operand {name} of shape {shape} has an entry for each sample, but follows from no input"]
    return []
