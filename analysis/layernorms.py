"""Layer norm and RMS norm of images: of each pixel's channels, or of whole samples.

Of channels alone they are functions of single pixels. A layer norm of whole samples is a group norm with one group, one over the axes
alone has a group for each channel; the root mean square is a mean over the image. With a weight for each pixel they run whole: that
weight would have to come in strips, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sft.analysis.graph import Node, Ref
from sft.analysis.reduced import NodeSequence, mean_over_axes, widen_half

__all__ = ["LAYER_NORMS", "decompose_layer_norm"]

#: Norms of a value's last dimensions, by target, and what they are called where those are channels.
LAYER_NORMS = {"aten.layer_norm.default": "sft.channel_norm", "aten.rms_norm.default": "sft.channel_rms_norm"}


def decompose_layer_norm(node: Node, image: Node, places: Sequence[int], num_axes: int) -> tuple[Node, ...] | None:
    """The nodes that stand for a norm over the image's dimensions ``places``; ``None`` where there is no form of it that streams."""
    first_axis = len(image.shape) - num_axes
    affine = tuple((key, value) for key, value in node.arguments if key in ("weight", "bias"))
    if all(1 <= place < first_axis for place in places):
        arguments = (("self", Ref(image.name)), *affine, ("eps", node.argument("eps")), ("dims", tuple(places)))
        return (replace(node, target=LAYER_NORMS[node.target], shape=image.shape, arguments=arguments),)
    rest = tuple(sorted(place for place in places if place < first_axis))
    all_channels = tuple(range(1, first_axis))
    if rest not in ((), all_channels) or len(places) - len(rest) != num_axes or any(value is not None for _, value in affine):
        return None
    if node.target == "aten.rms_norm.default":
        return _decompose_rms_norm(node, image, rest, num_axes)
    if not rest and len(all_channels) > 1:
        return None
    groups = 1 if rest else image.shape[1]
    nothing = (("weight", None), ("bias", None))
    arguments = (("input", Ref(image.name)), ("num_groups", groups), *nothing, ("eps", node.argument("eps")))
    return (replace(node, target="aten.group_norm.default", shape=image.shape, arguments=arguments),)


def _decompose_rms_norm(node: Node, image: Node, rest: tuple[int, ...], num_axes: int) -> tuple[Node, ...]:
    """``x / sqrt(mean(x^2) + eps)`` (Zhang and Sennrich, 2019)."""
    chain = NodeSequence(node)
    wide = widen_half(chain, image)
    square = chain.add("square", "aten.mul.Tensor", image.shape, (("self", Ref(wide.name)), ("other", Ref(wide.name))), wide.dtype)
    mean = mean_over_axes(chain, square, num_axes, rest)
    arguments = (("self", Ref(mean.name)), ("eps", node.argument("eps")), ("dtype", node.dtype))
    factor = chain.add("factor", "sft.inverse_sqrt", mean.shape, arguments, wide.dtype)
    first_axis = len(image.shape) - num_axes
    pixel = tuple(1 if dim in rest or dim >= first_axis else extent for dim, extent in enumerate(image.shape))
    spread = chain.add("spread", "sft.align_dims", pixel, (("self", Ref(factor.name)), ("shape", pixel)), wide.dtype)
    made = chain.add("scaled", "aten.mul.Tensor", image.shape, (("self", Ref(wide.name)), ("other", Ref(spread.name))), wide.dtype)
    chain.cast(made, node.dtype, "rounded")
    return chain.finish()
