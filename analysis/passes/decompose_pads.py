"""Decomposition of padding: pads of channels and axes one after the other, and circular padding of rows.

*Channels.* ``pad`` lists an amount for each dimension, the last one first. A model may pad channels and axes in one call, with pairs of
zeros for dimensions that it leaves alone, and in its own order of dimensions (channels last). Padding is separable, so a pad of both
becomes two nodes, with the same mode; channels are cropped first and added last, so that the axes' pad moves fewer bytes::

    F.pad(x, (1, 1, 0, 0, 2, 2, 0, 0))    ->    a = pad(x, (1, 1, 0, 0)); y = pad(a, (0, 0, 0, 0, 2, 2))

Channels that are reflected, replicated or wrapped become ``sft.pad_channels``: torch reflects the last dimensions only, which are channels
where the model has these last. A pad of the batch has no rule.

*Circular padding of rows.* The rows above the image are its last ones, which a sweep reads at its end. They are few, so they become a
global value::

    y = pad(x, circular)               ->      r = sft.border_rows(x)          # the last low rows, then the first high ones
                                               y = sft.circular_pad(x, r)      # streamed in the next sweep

``pad`` along the other axes, of which a strip holds all, follows if they are padded too.

*Roll.* ``roll`` along an axis is a circular pad on one side and a crop on the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Graph, Node, Ref
from sft.analysis.passes.layout import DimLayout
from sft.analysis.passes.layout_tracker import LayoutTracker

__all__ = ["PADS", "decompose_circular_pads", "pad_axis", "rewrite_pad", "rewrite_roll"]

#: Pads of a single mode, which are ``aten.pad.default`` with that mode.
_MODES = {
    "aten.constant_pad_nd.default": "constant",
    **{
        f"aten.{name}_pad{count}d.default": mode
        for name, mode in (("reflection", "reflect"), ("replication", "replicate"))
        for count in (1, 2, 3)
    },
    "aten._pad_circular.default": "circular",
}
PADS = ("aten.pad.default", *_MODES)

Pair = tuple[Any, Any]
"""Amounts before and after."""


def rewrite_pad(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite a pad of an image as pads of its axes and of its channels; false for pads of the batch."""
    image = tracker.images.get(node.operands[0])
    if image is None:
        return False
    pad, source = _general_pad(node), tracker.nodes[image.node]
    pairs, first_axis = _amounts_by_dim(pad, image.layout), len(source.shape) - tracker.axes.count
    channels = {dim: pair for dim, pair in (pairs or {}).items() if dim < first_axis}
    if pairs is None or not (channels or not image.layout.is_plain) or not _can_pad_channels(channels, pad.argument("mode")):
        if pad is not node:
            tracker.copy_operator(pad)
        return pad is not node
    axes = {dim: pair for dim, pair in pairs.items() if dim >= first_axis}
    steps = [axes] if axes or not channels else []
    steps += [channels] if pad.argument("mode") == "constant" and channels else [{dim: pair} for dim, pair in channels.items()]
    if sum(low + high for low, high in channels.values()) < 0:
        steps.reverse()  # crops first
    for number, step in enumerate(steps):
        name = node.name if number == len(steps) - 1 else f"{node.name}__{number}"
        source = _pad_of(pad, source, name, step, tracker.axes.count)
        tracker.put(source, image.layout)
    return True


def _amounts_by_dim(pad: Node, layout: DimLayout) -> dict[int, Pair] | None:
    """The amounts of each padded dimension of the image; ``None`` if the batch, or several dimensions that the value merges, are padded."""
    flat, rank = pad.argument("pad"), len(layout.groups)
    by_dim = {rank - 1 - index: (flat[2 * index], flat[2 * index + 1]) for index in range(len(flat) // 2)}
    pairs = {layout.image_dim(dim): pair for dim, pair in by_dim.items() if pair != (0, 0)}
    if None in pairs or 0 in pairs:
        return None
    return {dim: pair for dim, pair in pairs.items() if dim is not None}


def _can_pad_channels(channels: Mapping[int, Pair], mode: str) -> bool:
    """True if the amounts are numbers; other modes than constants cannot crop."""
    amounts = [amount for pair in channels.values() for amount in pair]
    return all(isinstance(amount, int) and (mode == "constant" or amount >= 0) for amount in amounts)


def rewrite_roll(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite a roll along axes of an image, and of channels, as circular pads and crops; false for a roll of the batch."""
    image, shifts = tracker.images.get(node.operands[0]), node.argument("shifts")
    dims = [] if image is None else [image.layout.image_dim(dim) for dim in node.argument("dims") or ()]
    if image is None or not dims or None in dims or 0 in dims or not all(isinstance(shift, int) for shift in shifts):
        return False
    source = tracker.nodes[image.node]
    total: dict[int, int] = {}
    for dim, shift in zip(dims, shifts, strict=True):
        assert dim is not None
        total[dim] = total.get(dim, 0) + shift
    first_axis = len(source.shape) - tracker.axes.count
    steps: list[list[Node]] = []
    for number, (dim, shift) in enumerate(total.items()):
        name = node.name if number == len(total) - 1 else f"{node.name}__{number}"
        if dim < first_axis:
            arguments = (("self", Ref(source.name)), ("shifts", (shift,)), ("dims", (dim,)))
            steps.append([replace(node, name=name, shape=source.shape, arguments=arguments)])
        else:
            steps.append(_rolled_axis(node, source, name, dim, shift, tracker.axes.count))
        source = steps[-1][-1]
    return all([tracker.put(new, image.layout) for step in steps for new in step])


def _rolled_axis(node: Node, image: Node, name: str, dim: int, shift: int, num_axes: int) -> list[Node]:
    """The nodes of an image rolled along one axis: padded on one side, cropped on the other."""
    low, high, extent = max(0, shift), max(0, -shift), image.shape[dim]
    wrap = replace(node, target="aten.pad.default", arguments=(("mode", "circular"), ("value", None)))
    padded = _pad_of(wrap, image, f"{name}__wrapped", {dim: (low, high)}, num_axes)
    arguments = (("self", Ref(padded.name)), ("dim", dim), ("start", high), ("end", high + extent), ("step", 1))
    return [padded, replace(node, name=name, target="aten.slice.Tensor", shape=image.shape, arguments=arguments)]


def _general_pad(node: Node) -> Node:
    """The same pad as ``aten.pad.default``."""
    mode = _MODES.get(node.target)
    if mode is None:
        return node
    pad = node.argument("pad", node.argument("padding"))
    arguments = (("self", node.argument("self")), ("pad", pad), ("mode", mode), ("value", node.argument("value")))
    return replace(node, target="aten.pad.default", arguments=arguments)


def pad_axis(node: Node, image: Node, name: str, dim: int, amounts: Pair, num_axes: int, *, value: Any = 0) -> Node:
    """The node ``name``: an image with rows, columns or slices of a constant added along one axis, for the operator ``node``."""
    constant = replace(image, module_path=node.module_path, target="aten.pad.default", effect="", kind="operator")
    constant = replace(constant, arguments=(("mode", "constant"), ("value", value)))
    return _pad_of(constant, image, name, {dim: amounts}, num_axes)


def _pad_of(node: Node, image: Node, name: str, pairs: Mapping[int, Pair], num_axes: int) -> Node:
    """The node ``name``: an image padded along its axes, or along dimensions of channels."""
    rank, mode = len(image.shape), node.argument("mode")
    shape = tuple(pairs.get(dim, (0, 0))[0] + extent + pairs.get(dim, (0, 0))[1] for dim, extent in enumerate(image.shape))
    if mode != "constant" and any(dim < rank - num_axes for dim in pairs):
        ((dim, (low, high)),) = pairs.items()
        arguments = (("self", Ref(image.name)), ("dim", dim), ("low", low), ("high", high), ("mode", mode))
        return replace(node, name=name, target="sft.pad_channels", shape=shape, arguments=arguments)
    first = min((rank - num_axes, *pairs))
    flat = tuple(amount for dim in reversed(range(first, rank)) for amount in pairs.get(dim, (0, 0)))
    other_arguments = tuple(pair for pair in node.arguments if pair[0] not in ("self", "pad"))
    return replace(node, name=name, shape=shape, arguments=(("self", Ref(image.name)), ("pad", flat), *other_arguments))


def decompose_circular_pads(graph: Graph) -> Graph:
    """Replace every circular padding of an image's rows by its decomposition."""
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += _decompose_circular_pad(node, graph) if _wraps_rows(node, graph) else [node]
    return replace(graph, nodes=tuple(nodes))


def _wraps_rows(node: Node, graph: Graph) -> bool:
    if node.target != "aten.pad.default" or node.argument("mode") != "circular" or len(node.shape) < graph.axes.rank:
        return False
    flat = node.argument("pad")
    return len(flat) == 2 * graph.axes.count and any(flat[-2:]) and min(flat) >= 0


def _decompose_circular_pad(node: Node, graph: Graph) -> list[Node]:
    count, flat = graph.axes.count, node.argument("pad")
    image, (low, high) = graph[node.argument("self").name], flat[-2:]
    lead, (rows, *further) = image.shape[:-count], graph.axes.of(image.shape)
    amounts = (("low", low), ("high", high), ("axes", count))
    border = replace(
        node,
        name=f"{node.name}__border",
        target="sft.border_rows",
        shape=(*lead, low + high, *further),
        arguments=(("self", Ref(image.name)), *amounts),
    )
    rows_only = not any(flat[:-2])
    wrapped = replace(
        node,
        name=node.name if rows_only else f"{node.name}__wrapped",
        target="sft.circular_pad",
        shape=(*lead, rows + low + high, *further),
        arguments=(("self", Ref(image.name)), ("border", Ref(border.name)), *amounts),
    )
    if rows_only:
        return [border, wrapped]
    return [border, wrapped, replace(node, arguments=(("self", Ref(wrapped.name)), ("pad", (*flat[:-2], 0, 0)), *node.arguments[2:]))]
