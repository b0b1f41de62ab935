"""Diagnostics for operators without a row in the table, which run untiled: the reason and a remedy."""

from __future__ import annotations

import re

from sft.analysis.ir.graph import Graph, Node

__all__ = ["NO_STRIP_RULE", "unsupported_reason"]

_WHOLE_IMAGE_REMEDY = "it reads the full image, so apply it where the image is small, or outside the compiled model"
NO_STRIP_RULE = f"has no rule for strips; {_WHOLE_IMAGE_REMEDY}"
_ATTENTION_REASON = "mixes all pixels; attend to a pooled image, or within channels"
_TRANSFORM_REASON = "mixes all pixels; transform before the compiled model"
#: Number of axes in an operator's name.
_NUM_AXES = re.compile(r"(?:conv|conv_transpose|pool)(\d)d")
#: Reasons and remedies for particular operators without a row.
_UNSUPPORTED_REASONS = {
    **dict.fromkeys(("matmul", "bmm", "einsum", "baddbmm", "scaled_dot_product_attention"), _ATTENTION_REASON),
    **dict.fromkeys(
        ("slice_scatter", "select_scatter"),
        "assigns samples, or a value of another size or type; assign an image of the size of the slice, or use torch.where",
    ),
    "roll": "rolls the batch, or the flattened image; roll along the image's axes, or before the compiled model",
    "sft.repeat": "runs its blocks one after the other on the whole image, by their own schedule; put it where the image is small",
    "repeat": "repeats an image in another order of dimensions than [N, channels, ...]; repeat its channels before it is permuted",
    "repeat_interleave": "repeats samples, pixels in a merged dimension, or by a tensor; repeat rows or channels by a number",
    "flip": "turns the image round; flip it before the compiled model",
    "rot90": "turns the image round; turn it before the compiled model",
    "grid_sampler": "samples anywhere in the image; resize with F.interpolate, or warp before the compiled model",
    "deform_conv2d": "samples anywhere in the image; use a plain convolution",
    **{f"fft_{kind}{axes}": _TRANSFORM_REASON for kind in ("fft", "ifft", "rfft", "irfft") for axes in ("", "2", "n")},
}


def unsupported_reason(node: Node, graph: Graph) -> str:
    """Reason why an operator without a row runs untiled, with a remedy."""
    if node.target == "sft.restore_dims":  # inserted for a reader in the model's own order of dimensions
        if not graph.users[node.name]:
            return f"{node.label}: the model returns an image in another order of dimensions than [N, channels, ...]; permute it outside"
        node = graph[graph.users[node.name][0]]
    namespace, name = node.target.split(".")[:2]
    along = _NUM_AXES.search(name)
    if along is not None and int(along[1]) != graph.axes.count:
        return f"{node.label}: {_axis_count_mismatch(int(along[1]), graph)}"
    return f"{node.label}: {_UNSUPPORTED_REASONS.get(f'{namespace}.{name}') or _UNSUPPORTED_REASONS.get(name, NO_STRIP_RULE)}"


def _axis_count_mismatch(num_axes: int, graph: Graph) -> str:
    """Reason for an operator along another number of axes than images have."""
    axes = graph.axes
    remedy = "give frames, or tiles, as samples: [N, channels, height, width]" if (num_axes, axes.count) == (2, 3) else _WHOLE_IMAGE_REMEDY
    axis_text = "one axis" if num_axes == 1 else f"{num_axes} axes"
    return f"is for images of {axis_text}, and the model's input is read as [N, channels, {', '.join(axes.names)}]; {remedy}"
