"""Losses taken apart: a value for each pixel, which streams like an activation, and the sum or mean of these, a global value.

So a loss inside the compiled model needs neither the model's output nor its gradient as a whole: both exist strip by strip.

* Losses of single elements (``mse_loss``, ``binary_cross_entropy_with_logits``, ...) are themselves with ``reduction="none"``.
* Cross-entropy and negative log-likelihood look up the channel that a pixel's label names: ``sft.cross_entropy`` and ``sft.nll`` make an
  image of one channel. Their mean divides by the sum of the labels' weights, ``sft.label_weight``, another such image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Node, Ref
from sft.analysis.ir.symbolic import broadcast_shapes
from sft.analysis.passes.decompose_reductions import NodeSequence, reduce_over_axes

__all__ = [
    "LABEL_LOSSES",
    "REDUCTION_NONE",
    "decompose_label_loss",
    "decompose_whole_loss",
    "loss_reduction",
    "reduce_loss",
    "unreduced_loss",
]

#: ``torch.nn._reduction``'s numbers.
REDUCTION_NONE, REDUCTION_MEAN, REDUCTION_SUM = 0, 1, 2
_MEAN, _SUM = "aten.mean.dim", "aten.sum.dim_IntList"

_OVERALLOCATING_LOSSES = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
#: Losses that look up a channel of each pixel, and the operator on images that does.
LABEL_LOSSES = {
    "aten.cross_entropy_loss.default": "sft.cross_entropy",
    "aten.nll_loss_nd.default": "sft.nll",
    "aten.nll_loss2d.default": "sft.nll",
    "aten.nll_loss.default": "sft.nll",
}


def loss_reduction(node: Node) -> int:
    """The number of a loss' reduction."""
    given = node.argument("reduction", REDUCTION_MEAN)
    assert isinstance(given, int)
    return given


def unreduced_loss(node: Node) -> Node:
    """A loss of single elements before its reduction, under a name of its own unless there is none."""
    kept = tuple((key, value) for key, value in node.arguments if key != "reduction")
    name = node.name if loss_reduction(node) == REDUCTION_NONE else f"{node.name}__each"
    return replace(node, name=name, arguments=(*kept, ("reduction", REDUCTION_NONE)))


def reduce_loss(node: Node, each: Node, num_axes: int) -> tuple[Node, ...]:
    """The sum or mean of all elements of an image, as the value of ``node``."""
    chain = NodeSequence(node)
    reduce_over_axes(chain, each, num_axes, range(len(each.shape) - num_axes), _MEAN if loss_reduction(node) == REDUCTION_MEAN else _SUM)
    return chain.finish()


def decompose_whole_loss(node: Node, shapes: Sequence[Sequence[Any]]) -> tuple[Node, ...]:
    """A loss of whole values, given their shapes: apart where torch returns a number in the room of all elements.

    ATen computes those of these losses into their result, and reduces them there. So they are held as what they are, and let go.
    """
    if node.target not in _OVERALLOCATING_LOSSES or loss_reduction(node) == REDUCTION_NONE:
        return (node,)
    each = replace(unreduced_loss(node), shape=broadcast_shapes(shapes, max(map(len, shapes))))
    target = "aten.mean.default" if loss_reduction(node) == REDUCTION_MEAN else "aten.sum.default"
    return each, replace(node, target=target, arguments=(("self", Ref(each.name)),))


def decompose_label_loss(node: Node, image: Node, target: Node, num_axes: int) -> tuple[Node, ...]:
    """Cross-entropy or negative log-likelihood of images; with a reduction its last node is the number, else an image of one channel.

    Args:
        node: the model's operator.
        image: scores (or log-probabilities) of the classes, ``[N, classes, axes...]``.
        target: labels, ``[N, 1, axes...]``, or probabilities of the classes, laid out as the scores are.
        num_axes: axes of the images.
    """
    chain, reduction = NodeSequence(node), loss_reduction(node)
    shape = (image.shape[0], 1, *image.shape[2:])
    has_labels = not target.is_floating
    weight, ignored = node.argument("weight"), ("ignore_index", node.argument("ignore_index", -100))
    given = [("self", Ref(image.name)), ("target", Ref(target.name)), ("weight", weight), ignored]
    if LABEL_LOSSES[node.target] == "sft.cross_entropy":
        given.append(("label_smoothing", node.argument("label_smoothing", 0.0)))
    each = chain.add("each", LABEL_LOSSES[node.target], shape, given)
    if reduction == REDUCTION_NONE:
        return chain.finish()
    rest = range(len(shape) - num_axes)
    if reduction == REDUCTION_SUM or not has_labels:  # the mean over probabilities is one over pixels
        reduce_over_axes(chain, each, num_axes, rest, _SUM if reduction == REDUCTION_SUM else _MEAN)
        return chain.finish()
    wide = chain.cast(each, "float32" if each.dtype in ("float16", "bfloat16") else each.dtype, "wide")
    total = reduce_over_axes(chain, wide, num_axes, rest, _SUM)
    arguments = (("self", Ref(target.name)), ("weight", weight), ignored, ("dtype", total.dtype))
    weighed = chain.add("weights", "sft.label_weight", shape, arguments, total.dtype)
    weights = reduce_over_axes(chain, weighed, num_axes, rest, _SUM, "weights_")
    mean = chain.add("mean", "aten.div.Tensor", (), (("self", Ref(total.name)), ("other", Ref(weights.name))), total.dtype)
    chain.cast(mean, node.dtype, "rounded")
    return chain.finish()
