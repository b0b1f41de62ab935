"""Following how a model's values lie in images, while its permutes and reshapes vanish.

The graph that is built holds every image in one order of dimensions (:mod:`sft.analysis.passes.layout`); for each value of the model it is
known in which node of that graph it lies, and how. Permutes and reshapes only change that knowledge. Where channels are split or merged
the image is rearranged within each pixel (``sft.rearrange``); pixels that become channels, and channels that become pixels, are
``sft.pixel_unshuffle`` and ``sft.pixel_shuffle`` images. Whoever needs a value as the model has it gets it restored as a whole
(``sft.restore_dims``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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
    """A value of the model that lies in an image: the node of the new graph that holds it, and how."""

    node: str
    layout: DimLayout


class LayoutTracker:
    """A graph being rebuilt, and where the model's values are in it.

    Attributes:
        graph: the model's.
        axes: of its images.
        nodes: the new graph so far.
        images: by the model's value.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.axes = graph, graph.axes
        self._depends = graph.descendants(graph.inputs)
        self.nodes: dict[str, Node] = {}
        self.images: dict[str, TrackedImage] = {}

    # -- values -----------------------------------------------------------------------------------------------------

    def put(self, node: Node, layout: DimLayout) -> bool:
        """Add a node that makes an image, in which the model's value of that name lies."""
        self.nodes[node.name] = node
        self.images[node.name] = TrackedImage(node.name, layout)
        return True

    def shape(self, name: str) -> tuple[Any, ...]:
        """Of a node of the new graph."""
        return self.nodes[name].shape

    def rearranged(self, node: Node, change: ChannelRearrangement, source: str, name: str) -> None:
        """Add the node that moves the channels of ``source``."""
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

    def follow(self, node: Node, image: TrackedImage) -> bool:
        """Say that the model's value ``node`` is an image, with channels merged that the model has merged."""
        found = merge_channels(image.layout, self.shape(image.node), self.axes)
        if found is not None and found.rearrangement is not None:
            name = f"{node.name}__merged"
            self.rearranged(node, found.rearrangement, image.node, name)
            image = TrackedImage(name, found.layout)
        self.images[node.name] = self._unfolded(node, image)
        return True

    def _unfolded(self, node: Node, image: TrackedImage) -> TrackedImage:
        """The image with those channels as pixels that the model has as pixels."""
        old = self.nodes[image.node]
        first_axis = len(old.shape) - self.axes.count
        places = image.layout.channels_merged_into_axes(first_axis)
        if places is None or len(places) != self.axes.count:
            return image
        taken = {dim for dims in places for dim in dims}
        named = {dim for group in image.layout.groups for dim in group}
        # A dimension of extent 1 that the value does not have goes.
        rest = tuple(dim for dim in range(1, first_axis) if dim not in taken and (dim in named or old.shape[dim] != 1))
        factors = tuple(math.prod(int(old.shape[dim]) for dim in dims) for dims in places)
        grown = tuple(extent * factor for extent, factor in zip(self.axes.of(old.shape), factors, strict=True))
        name = f"{node.name}__unfolded"
        arguments = (("self", Ref(image.node)), ("rest", rest), ("places", places), ("factors", factors))
        shape = (old.shape[0], *([old.shape[dim] for dim in rest] or [1]), *grown)
        self.nodes[name] = replace(node, name=name, target="sft.pixel_shuffle", shape=shape, arguments=arguments)
        number = {dim: 1 + at for at, dim in enumerate(rest)}
        number.update({0: 0, **{first_axis + axis: 1 + max(1, len(rest)) + axis for axis in range(self.axes.count)}})
        groups = (tuple(number[dim] for dim in group if dim not in taken) for group in image.layout.groups)
        return TrackedImage(name, DimLayout(tuple(groups)))

    def _folded(self, node: Node, image: TrackedImage) -> TrackedImage | None:
        """The image with those pixels as channels that a reshape to the shape of ``node`` takes apart; ``None`` if it takes none."""
        old = self.nodes[image.node]
        first_axis, extents = len(old.shape) - self.axes.count, self.axes.of(old.shape)
        groups = []
        for group in image.layout.groups:
            apart: list[int] = []
            for dim in group:
                apart += [dim] if dim < first_axis else [dim + self.axes.count, dim]
            groups.append(tuple(apart))
        layout = DimLayout(tuple(groups))
        for factors in itertools.product(*(split_factors(extent, node.shape) for extent in extents)):
            shape = (*old.shape[:first_axis], *factors, *(divide_extent(e, f) for e, f in zip(extents, factors, strict=True)))
            if any(factor != 1 for factor in factors) and reshape_layout(layout, shape, node.shape, self.axes) is not None:
                name, arguments = f"{node.name}__folded", (("self", Ref(image.node)), ("factors", factors))
                self.nodes[name] = replace(node, name=name, target="sft.pixel_unshuffle", shape=shape, arguments=arguments)
                return TrackedImage(name, layout)
        return None

    def keep(self, node: Node) -> None:
        """Take an operator over as it is, on the model's own values."""
        arguments = tuple((key, map_refs(value, lambda name: Ref(self.plain_name(name)))) for key, value in node.arguments)
        kept = replace(node, arguments=arguments)
        self.nodes[node.name] = kept
        images = [self.nodes[self.images[name].node] for name in node.operands if name in self.images]
        if self._is_image_of(kept, images) or (not images and node.name in self._depends and self._is_expanded_image(kept)):
            self.images[node.name] = TrackedImage(node.name, DimLayout.plain(len(node.shape)))

    def _is_expanded_image(self, node: Node) -> bool:
        """Whether a value that no image makes is as large as one: a vector of channels, or a pixel, that was expanded or interpolated."""
        if len(node.shape) < self.axes.rank or all(extent == 1 for extent in self.axes.of(node.shape)):
            return False
        size = (node.shape[0], *self.axes.of(node.shape))
        sizes = {(shape[0], *self.axes.of(shape)) for shape in (self.shape(image.node) for image in self.images.values())}
        return size in sizes

    def _is_image_of(self, node: Node, images: Sequence[Node]) -> bool:
        """Whether a value may lie as an image does: anything with as many dimensions, along which images vary."""
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
        """The image without channels of extent 1 that the value does not have; ``None`` where it differs in more than that."""
        groups, channels = image.layout.groups, range(1, len(self.shape(image.node)) - self.axes.count)
        named = [group[0] for group in groups if len(group) == 1]
        kept = [dim for dim in channels if dim in named]
        if not kept or named != sorted(named) or len(named) != len(groups) or len(named) != 1 + len(kept) + self.axes.count:
            return None
        plain = f"{name}__plain"
        if plain not in self.nodes:
            extents = tuple(int(self.shape(image.node)[dim]) for dim in channels)
            change = ChannelRearrangement(split=extents, order=tuple(range(len(extents))), shape=tuple(extents[dim - 1] for dim in kept))
            self.rearranged(self.graph[name], change, image.node, plain)
        return plain

    # -- permutes and reshapes; each says whether it was followed ---------------------------------------------------

    def first_image(self, node: Node) -> TrackedImage:
        """The first operand that is an image."""
        return self.images[next(name for name in node.operands if name in self.images)]

    def permute(self, node: Node) -> bool:
        """Follow a change of the dimensions' order."""
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
        return self.follow(node, TrackedImage(image.node, image.layout.permuted(order)))

    def reshape(self, node: Node) -> bool:
        """Follow a reshape, where no axis of the image is split but into whole numbers of pixels."""
        image = self.images.get(node.operands[0])
        if image is None:
            return False
        found = reshape_layout(image.layout, self.shape(image.node), node.shape, self.axes)
        if found is None:
            folded = self._folded(node, image)
            if folded is None:
                return False
            image = folded
            found = reshape_layout(image.layout, self.shape(image.node), node.shape, self.axes)
            if found is None:
                return False
        held = image.node
        if found.rearrangement is not None:
            held = f"{node.name}__split"
            self.rearranged(node, found.rearrangement, image.node, held)
        return self.follow(node, TrackedImage(held, found.layout))
