"""Layout tracking: record the layout of each value in an image while permutes and reshapes are eliminated.

The new graph holds every image in one order of dimensions (:mod:`sft.analysis.passes.layout`). For each value of the model the tracker
knows the node of the new graph that holds it, and its layout in it::

    y = permute(x, [0, 2, 3, 1])                            # y -> x, layout ((0,), (2,), (3,), (1,))
    z = reshape(y, [n, h * w, c])                           # z -> x, layout ((0,), (2, 3), (1,))
    s = sum(z, dim=1)                     ->     s = sum(x, dim=(2, 3))

Permutes and reshapes only change the layout. If channels are split or merged, the image is rearranged within each pixel
(``sft.rearrange``). Pixels that become channels, and channels that become pixels, become ``sft.pixel_unshuffle`` and ``sft.pixel_shuffle``
images. A reader that needs the model's own order gets the untiled value restored (``sft.restore_dims``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sft.analysis.ir.graph import Graph, Node, Ref, map_refs
from sft.analysis.ir.symbolic import divide_extent, split_factors
from sft.analysis.passes.layout import ChannelRearrangement, DimLayout, merge_channels, reshape_layout

__all__ = ["EXPANDS", "PERMUTES", "RESHAPES", "LayoutTracker", "TrackedImage"]

RESHAPES = frozenset(
    {
        "aten.view.default",
        "aten.reshape.default",
        "aten._unsafe_view.default",
        "aten.flatten.using_ints",
        "aten.unflatten.int",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.squeeze.default",
        "aten.unsqueeze.default",
        "aten.view_as.default",
        "aten.reshape_as.default",
    }
)
EXPANDS = frozenset({"aten.expand.default", "aten.expand_as.default"})
PERMUTES = frozenset({"aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.movedim.int", "aten.swapaxes.default"})


@dataclass(frozen=True, slots=True)
class TrackedImage:
    """A value of the model that is held in an image.

    Attributes:
        node: the node of the new graph that holds it.
        layout: its layout in that image.
    """

    node: str
    layout: DimLayout


class LayoutTracker:
    """A graph under construction, with the position of each of the model's values in it.

    Attributes:
        graph: the model's graph.
        axes: the axes of its images.
        nodes: the new graph so far.
        images: images by the model's value; a value that is not in it is held in the model's order.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.axes = graph, graph.axes
        self._depends = graph.descendants(graph.inputs)
        self.nodes: dict[str, Node] = {}
        self.images: dict[str, TrackedImage] = {}

    # -- values -----------------------------------------------------------------------------------------------------

    def put(self, node: Node, layout: DimLayout) -> bool:
        """Add a node that computes an image, and bind the model's value of that name to it. Always true."""
        self.nodes[node.name] = node
        self.images[node.name] = TrackedImage(node.name, layout)
        return True

    def add_nodes(self, nodes: Iterable[Node]) -> None:
        """Add nodes that compute no image."""
        self.nodes.update((node.name, node) for node in nodes)

    def shape(self, name: str) -> tuple[Any, ...]:
        """Shape of a node of the new graph."""
        return self.nodes[name].shape

    def add_rearrangement(self, node: Node, change: ChannelRearrangement, source: str, name: str) -> None:
        """Add the node ``name`` that rearranges the channels of ``source``."""
        old = self.nodes[source]
        shape = (old.shape[0], *change.shape, *self.axes.of(old.shape))
        arguments = (
            ("self", Ref(source)),
            ("split", change.split),
            ("order", change.order),
            ("shape", change.shape),
            ("axes", self.axes.count),
        )
        self.nodes[name] = replace(node, name=name, target="sft.rearrange", shape=shape, arguments=arguments)

    def bind(self, node: Node, image: TrackedImage) -> bool:
        """Bind the model's value ``node`` to an image, after channels that the value has merged are merged in it. Always true."""
        merge = merge_channels(image.layout, self.shape(image.node), self.axes)
        if merge is not None and merge.rearrangement is not None:
            name = f"{node.name}__merged"
            self.add_rearrangement(node, merge.rearrangement, image.node, name)
            image = TrackedImage(name, merge.layout)
        self.images[node.name] = self._pixel_shuffled(node, image)
        return True

    def _pixel_shuffled(self, node: Node, image: TrackedImage) -> TrackedImage:
        """The image with channels moved to pixels if the value merges them into its axes; otherwise the image itself."""
        old = self.nodes[image.node]
        first_axis = len(old.shape) - self.axes.count
        channel_dims = image.layout.channels_merged_into_axes(first_axis)
        if channel_dims is None or len(channel_dims) != self.axes.count:
            return image
        moved = {dim for dims in channel_dims for dim in dims}
        named = {dim for group in image.layout.groups for dim in group}
        # A dimension of extent 1 that the value does not have is dropped.
        remaining = tuple(dim for dim in range(1, first_axis) if dim not in moved and (dim in named or old.shape[dim] != 1))
        factors = tuple(math.prod(int(old.shape[dim]) for dim in dims) for dims in channel_dims)
        extents = tuple(extent * factor for extent, factor in zip(self.axes.of(old.shape), factors, strict=True))
        name = f"{node.name}__unfolded"
        arguments = (("self", Ref(image.node)), ("rest", remaining), ("places", channel_dims), ("factors", factors))
        shape = (old.shape[0], *([old.shape[dim] for dim in remaining] or [1]), *extents)
        self.nodes[name] = replace(node, name=name, target="sft.pixel_shuffle", shape=shape, arguments=arguments)
        number = {dim: 1 + index for index, dim in enumerate(remaining)}
        number.update({0: 0, **{first_axis + axis: 1 + max(1, len(remaining)) + axis for axis in range(self.axes.count)}})
        groups = (tuple(number[dim] for dim in group if dim not in moved) for group in image.layout.groups)
        return TrackedImage(name, DimLayout(tuple(groups)))

    def _pixel_unshuffled(self, node: Node, image: TrackedImage) -> TrackedImage | None:
        """The image with pixels moved to channels if a reshape to the shape of ``node`` then succeeds; otherwise ``None``."""
        old = self.nodes[image.node]
        first_axis, extents = len(old.shape) - self.axes.count, self.axes.of(old.shape)
        groups = []
        for group in image.layout.groups:
            dims: list[int] = []
            for dim in group:
                dims += [dim] if dim < first_axis else [dim + self.axes.count, dim]
            groups.append(tuple(dims))
        layout = DimLayout(tuple(groups))
        for factors in itertools.product(*(split_factors(extent, node.shape) for extent in extents)):
            shape = (*old.shape[:first_axis], *factors, *(divide_extent(e, f) for e, f in zip(extents, factors, strict=True)))
            if any(factor != 1 for factor in factors) and reshape_layout(layout, shape, node.shape, self.axes) is not None:
                name, arguments = f"{node.name}__folded", (("self", Ref(image.node)), ("factors", factors))
                self.nodes[name] = replace(node, name=name, target="sft.pixel_unshuffle", shape=shape, arguments=arguments)
                return TrackedImage(name, layout)
        return None

    def copy_operator(self, node: Node) -> None:
        """Copy an operator unchanged, on operands in the model's order."""
        arguments = tuple((key, map_refs(value, lambda name: Ref(self.plain_name(name)))) for key, value in node.arguments)
        rewritten = replace(node, arguments=arguments)
        self.nodes[node.name] = rewritten
        images = [self.nodes[self.images[name].node] for name in node.operands if name in self.images]
        if self._is_image_of(rewritten, images) or (not images and node.name in self._depends and self._is_expanded_image(rewritten)):
            self.images[node.name] = TrackedImage(node.name, DimLayout.plain(len(node.shape)))

    def _is_expanded_image(self, node: Node) -> bool:
        """True if a value computed from no image has an image's size: an expanded vector of channels, an interpolated pixel."""
        if len(node.shape) < self.axes.rank or all(extent == 1 for extent in self.axes.of(node.shape)):
            return False
        size = (node.shape[0], *self.axes.of(node.shape))
        sizes = {(shape[0], *self.axes.of(shape)) for shape in (self.shape(image.node) for image in self.images.values())}
        return size in sizes

    def _is_image_of(self, node: Node, images: Sequence[Node]) -> bool:
        """True if a value has the form of an image: enough dimensions, the batch of an operand, and spatial extent."""
        if len(node.shape) < self.axes.rank:
            return False
        return any(node.shape[0] == image.shape[0] for image in images) and not all(extent == 1 for extent in self.axes.of(node.shape))

    def plain_name(self, name: str) -> str:
        """The node that holds a value in the model's order."""
        image = self.images.get(name)
        if image is None:
            return name
        rank = len(self.shape(image.node))
        if image.layout == DimLayout.plain(rank):
            return image.node
        plain = self._without_unit_channels(name, image)
        if plain is not None:
            return plain
        restored = f"{name}__restored"
        if restored not in self.nodes:
            model, order = self.graph[name], [dim for group in image.layout.groups for dim in group]
            order += [dim for dim in range(rank) if dim not in order]
            arguments = (("self", Ref(image.node)), ("order", tuple(order)), ("shape", model.shape))
            self.nodes[restored] = replace(model, name=restored, target="sft.restore_dims", arguments=arguments, effect="")
        return restored

    def _without_unit_channels(self, name: str, image: TrackedImage) -> str | None:
        """The image without channels of extent 1 that the value does not have; ``None`` if it differs by more than that."""
        groups, channels = image.layout.groups, range(1, len(self.shape(image.node)) - self.axes.count)
        named = [group[0] for group in groups if len(group) == 1]
        kept = [dim for dim in channels if dim in named]
        if not kept or named != sorted(named) or len(named) != len(groups) or len(named) != 1 + len(kept) + self.axes.count:
            return None
        plain = f"{name}__plain"
        if plain not in self.nodes:
            extents = tuple(int(self.shape(image.node)[dim]) for dim in channels)
            change = ChannelRearrangement(split=extents, order=tuple(range(len(extents))), shape=tuple(extents[dim - 1] for dim in kept))
            self.add_rearrangement(self.graph[name], change, image.node, plain)
        return plain

    # -- permutes and reshapes; each returns true if it was tracked --------------------------------------------------

    def first_image(self, node: Node) -> TrackedImage:
        """The first operand that is an image."""
        return self.images[next(name for name in node.operands if name in self.images)]

    def permute(self, node: Node) -> bool:
        """Track a permutation of dimensions. Always true."""
        image = self.first_image(node)
        rank = len(image.layout.groups)
        order = list(range(rank))
        if node.target == "aten.permute.default":
            order = [dim % rank for dim in node.argument("dims")]
        elif node.target == "aten.movedim.int":
            order.insert(node.argument("destination") % rank, order.pop(node.argument("source") % rank))
        else:
            names = ("axis0", "axis1") if node.target == "aten.swapaxes.default" else ("dim0", "dim1")
            a, b = (node.argument(name, default) for default, name in enumerate(names))
            order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
        return self.bind(node, TrackedImage(image.node, image.layout.permuted(order)))

    def reshape(self, node: Node) -> bool:
        """Track a reshape; false if it splits an axis other than into complete groups of pixels."""
        image = self.images.get(node.operands[0])
        if image is None:
            return False
        result = reshape_layout(image.layout, self.shape(image.node), node.shape, self.axes)
        if result is None:
            unshuffled = self._pixel_unshuffled(node, image)
            if unshuffled is None:
                return False
            image = unshuffled
            result = reshape_layout(image.layout, self.shape(image.node), node.shape, self.axes)
            if result is None:
                return False
        source = image.node
        if result.rearrangement is not None:
            source = f"{node.name}__split"
            self.add_rearrangement(node, result.rearrangement, image.node, source)
        return self.bind(node, TrackedImage(source, result.layout))
