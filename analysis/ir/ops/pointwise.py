"""Per-pixel operators, which compute each pixel from the same pixel of their operands: activations, joins, channel norms, casts, masks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sft.analysis.ir.graph import Graph, Node, refs_in
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
    "IndexChannelsSpec",
    "PerPixelSpec",
    "PointwiseSpec",
    "RandomOpSpec",
    "RepeatChannelsSpec",
    "SpatialSideInputSpec",
    "UndecomposedLayerNormSpec",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointwiseSpec(Operator):
    """Function of one element, with ``self`` as the only tensor argument."""

    name: str = "pointwise"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (False, True) if node.target in ("aten.relu.default", "aten.leaky_relu.default") else (True, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachSpec(Operator):
    """The value itself, without a gradient."""

    name: str = "detach"
    backward_reads: tuple[bool, bool] = (False, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerPixelSpec(Operator):
    """Function of one pixel of each operand: all channels, global values, parameters.

    Attributes:
        broadcasts: True if the operands broadcast; then an untiled operand must not vary along the image.
    """

    name: str = "per_pixel"
    broadcasts: bool = True
    keeps_channels: bool = False

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        return _spatial_side_inputs(node, graph, streamed) if self.broadcasts else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelwiseSpec(Operator):
    """Function of a pixel's channels along some of their dimensions.

    Attributes:
        argument: the argument that names the dimensions.
        adds: True if it names a new dimension.
    """

    name: str = "per_pixel"
    argument: str = "dim"
    adds: bool = False
    keeps_channels: bool = False

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        rank = len(node.shape) if self.adds else len(graph[node.operands[0]].shape)
        argument = node.argument(self.argument, 0 if self.adds else None)
        dims = [argument] if isinstance(argument, int) else argument
        if not dims or any(not 1 <= dim % rank < rank - graph.axes.count for dim in dims):
            return [f"{node.label}: along dimension {argument} of {rank}; only dimensions of channels stay within a strip"]
        untiled = [name for name in node.operands if name not in streamed] if self.adds else []
        return [f"{node.label}: operand {untiled[0]} is not an image in strips, unlike the first"] if untiled else []


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatChannelsSpec(Operator):
    """All channels repeated several times."""

    name: str = "per_pixel"
    keeps_channels: bool = False
    backward_reads: tuple[bool, bool] = (False, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        rank, repeats = len(graph[node.operands[0]].shape), node.argument("repeats")
        first_axis = rank - graph.axes.count
        if len(repeats) == rank and all(repeats[dim] == 1 for dim in (0, *range(first_axis, rank))):
            return []
        return [f"{node.label}: repeats {tuple(repeats)} times along [N, channels, ...]; only channels can be repeated in strips"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherChannelsSpec(ChannelwiseSpec):
    """Gather or scatter of channels by per-pixel labels."""

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        untiled = [name for name in node.operands if name not in streamed]
        if untiled:
            return [f"{node.label}: operand {untiled[0]} is not an image of the same size; make it from one (torch.zeros_like)"]
        return ChannelwiseSpec.problems(self, node, graph, streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexChannelsSpec(Operator):
    """Lookup or assignment of channels by an index tensor: ``x[:, [2, 1, 0]]``, ``index_copy``."""

    name: str = "per_pixel"
    keeps_channels: bool = False

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        rank, indices = len(graph[node.operands[0]].shape), node.argument("indices")
        dims = [dim for dim, index in enumerate(indices) if index is not None] if indices is not None else [node.argument("dim") % rank]
        names = tuple(refs_in(node.argument("index", indices)))
        if len(dims) != 1 or not 1 <= dims[0] < rank - graph.axes.count or len(graph[names[0]].shape) != 1 or names[0] in streamed:
            return [f"{node.label}: an index along dimension {tuple(dims)} of {rank}; only one list of channels stays within a strip"]
        if graph[names[0]].dtype == "bool":
            return [f"{node.label}: a mask of channels, whose number depends on values; give their numbers"]
        numbers = {name for name in node.operands if all(extent == 1 for extent in graph[name].shape)}
        untiled = [name for name in node.operands if name not in streamed and name != names[0] and name not in numbers]
        return [f"{node.label}: operand {untiled[0]} is not an image in strips, unlike the one that is indexed"] if untiled else []


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignChannelsSpec(GatherChannelsSpec):
    """Assignment of another image to some channels: ``x[:, :2] = y``."""

    backward_reads: tuple[bool, bool] = (False, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BinarySpec(Operator):
    """Binary arithmetic: ``add``, ``sub``, ``mul``, ``div``."""

    name: str = "binary"

    def saves_for_backward(self, node: Node) -> tuple[bool, bool]:
        return (node.target in ("aten.mul.Tensor", "aten.div.Tensor"), False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        return _spatial_side_inputs(node, graph, streamed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatSpec(Operator):
    """Concatenation (``cat``) along a dimension of channels."""

    name: str = "cat"
    keeps_channels: bool = False
    backward_reads: tuple[bool, bool] = (False, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        dim = node.argument("dim", 0) % len(node.shape)
        if not 1 <= dim < len(node.shape) - graph.axes.count:
            return [f"{node.label}: cat along dimension {node.argument('dim', 0)}; only channels (dim=1) can be joined in strips"]
        untiled = [name for name in node.operands if name not in streamed]
        return [f"{node.label}: operand {untiled[0]} is not an image of the same size; expand it first"] if untiled else []


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenNormSpec(Operator):
    """BatchNorm with its running statistics."""

    name: str = "frozen_norm"
    backward_reads: tuple[bool, bool] = (True, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if any(name in streamed for name in node.operands[1:]):
            return [f"{node.label}: a streamed value serves as the norm's parameter; only parameters and buffers may"]
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class UndecomposedLayerNormSpec(Operator):
    """A layer norm over the image that could not be decomposed."""

    name: str = "per_pixel"

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        normalized = node.argument("normalized_shape")
        problem = f"{node.label}: over {normalized}, which includes dimensions of the image"
        if node.argument("weight") is not None:
            return [f"{problem}, with a weight for each pixel; leave it out (elementwise_affine=False), or use GroupNorm(1, channels)"]
        return [f"{problem}; normalize channels alone, or all channels and axes together"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineSpec(Operator):
    """The pointwise part of a norm over the image."""

    name: str = "affine"
    backward_reads: tuple[bool, bool] = (True, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpatialSideInputSpec(Operator):
    """Tensor that varies along the image without being one (position embedding, coordinate grid); each strip reads a slice."""

    name: str = "spatial_side_input"
    backward_reads: tuple[bool, bool] = (False, False)

    def streamed_operands(self, node: Node, streamed: Collection[str]) -> tuple[str, ...]:
        return node.operands[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class CastSpec(Operator):
    """Conversion to another element type."""

    name: str = "cast"
    backward_reads: tuple[bool, bool] = (False, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomOpSpec(Operator):
    """Dropout, masks and noise from counter-based random numbers: functions of the position."""

    backward_reads: tuple[bool, bool] = (False, False)

    def problems(self, node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
        if len(node.shape) > graph.axes.rank:
            return [f"{node.label}: draws random numbers for several dimensions of channels; draw before these are split"]
        return []


def _spatial_side_inputs(node: Node, graph: Graph, streamed: Collection[str]) -> list[str]:
    """Problems with untiled operands that vary along the axes, or along the batch without depending on an input."""
    axes = graph.axes
    for name in node.operands:
        shape = graph[name].shape
        if name not in streamed and any(extent != 1 for extent in axes.of(shape)):
            axis_names = " and ".join(axes.names)
            return [f"{node.label}: operand {name} of shape {shape} varies along the image; make its {axis_names} 1"]
        varies_by_sample = name not in streamed and len(shape) == len(node.shape) and shape[0] != 1
        if varies_by_sample and name not in graph.descendants(graph.call_leaves):
            return [f"{node.label}: operand {name} of shape {shape} has an entry for each sample, but depends on no input"]
    return []
