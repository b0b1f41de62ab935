"""Loss decomposition: a per-pixel value, which streams like an activation, and its sum or mean, a global value.

A loss inside the compiled model then needs neither the model's output nor its gradient at full size: both exist strip by strip. ::

    l = cross_entropy(x, labels)      ->      e = sft.cross_entropy(x, labels)      # an image of one channel
                                              l = sum(e) / sum(sft.label_weight(labels))

* Elementwise losses (``mse_loss``, ``binary_cross_entropy_with_logits``, ...) are kept, with ``reduction="none"``.
* Cross-entropy and negative log-likelihood read the channel of a pixel's label: ``sft.cross_entropy`` and ``sft.nll`` compute an
  image of one channel. Their mean divides by the sum of the labels' weights, ``sft.label_weight``, also an image of one channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Node, Ref
from sft.analysis.ir.symbolic import broadcast_shapes
from sft.analysis.passes.decompose_reductions import NodeSequence, reduce_over_axes
from sft.analysis.passes.elementwise import rewrite_elementwise
from sft.analysis.passes.layout import DimLayout
from sft.analysis.passes.layout_tracker import LayoutTracker, TrackedImage

__all__ = ["LABEL_LOSSES", "decompose_whole_loss", "rewrite_elementwise_loss", "rewrite_label_loss"]

#: Codes of reductions, as in ``torch.nn._reduction``.
_REDUCTION_NONE, _REDUCTION_MEAN, _REDUCTION_SUM = 0, 1, 2
_MEAN, _SUM = "aten.mean.dim", "aten.sum.dim_IntList"

_OVERALLOCATING_LOSSES = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
#: Losses that read one channel of each pixel, and their operator on images.
LABEL_LOSSES = {
    "aten.cross_entropy_loss.default": "sft.cross_entropy",
    "aten.nll_loss_nd.default": "sft.nll",
    "aten.nll_loss2d.default": "sft.nll",
    "aten.nll_loss.default": "sft.nll",
}


def _loss_reduction(node: Node) -> int:
    """The code of a loss's reduction."""
    reduction = node.argument("reduction", _REDUCTION_MEAN)
    assert isinstance(reduction, int)
    return reduction


def _unreduced_loss(node: Node) -> Node:
    """An elementwise loss without its reduction, under a new name if it has one."""
    arguments = tuple((key, value) for key, value in node.arguments if key != "reduction")
    name = node.name if _loss_reduction(node) == _REDUCTION_NONE else f"{node.name}__each"
    return replace(node, name=name, arguments=(*arguments, ("reduction", _REDUCTION_NONE)))


def _reduce_loss(node: Node, elements: Node, num_axes: int) -> tuple[Node, ...]:
    """The sum or mean of all elements of an image, as the value of ``node``."""
    sequence = NodeSequence(node)
    reduce_over_axes(
        sequence, elements, num_axes, range(len(elements.shape) - num_axes), _MEAN if _loss_reduction(node) == _REDUCTION_MEAN else _SUM
    )
    return sequence.finish()


def decompose_whole_loss(node: Node, shapes: Sequence[Sequence[Any]]) -> tuple[Node, ...]:
    """Nodes of an untiled elementwise loss, given its operands' shapes: split from its reduction if ATen over-allocates the result.

    ATen computes the elements of these losses in the memory of the result and reduces them in place, so the result keeps
    the memory of all elements. Decomposed, the elements are a value of their own, which is freed.
    """
    if node.target not in _OVERALLOCATING_LOSSES or _loss_reduction(node) == _REDUCTION_NONE:
        return (node,)
    elements = replace(_unreduced_loss(node), shape=broadcast_shapes(shapes, max(map(len, shapes))))
    target = "aten.mean.default" if _loss_reduction(node) == _REDUCTION_MEAN else "aten.sum.default"
    return elements, replace(node, target=target, arguments=(("self", Ref(elements.name)),))


def _decompose_label_loss(node: Node, image: Node, target: Node, num_axes: int) -> tuple[Node, ...]:
    """Cross-entropy or negative log-likelihood of images: the reduced number, or without a reduction an image of one channel.

    Args:
        node: the model's operator.
        image: scores (or log-probabilities) of the classes, ``[N, classes, axes...]``.
        target: labels, ``[N, 1, axes...]``, or probabilities of the classes, in the layout of the scores.
        num_axes: axes of the images.
    """
    sequence, reduction = NodeSequence(node), _loss_reduction(node)
    shape = (image.shape[0], 1, *image.shape[2:])
    has_labels = not target.is_floating
    weight, ignored = node.argument("weight"), ("ignore_index", node.argument("ignore_index", -100))
    arguments = [("self", Ref(image.name)), ("target", Ref(target.name)), ("weight", weight), ignored]
    if LABEL_LOSSES[node.target] == "sft.cross_entropy":
        arguments.append(("label_smoothing", node.argument("label_smoothing", 0.0)))
    elements = sequence.add("each", LABEL_LOSSES[node.target], shape, arguments)
    if reduction == _REDUCTION_NONE:
        return sequence.finish()
    other_dims = range(len(shape) - num_axes)
    if reduction == _REDUCTION_SUM or not has_labels:  # the mean over probabilities is one over pixels
        reduce_over_axes(sequence, elements, num_axes, other_dims, _SUM if reduction == _REDUCTION_SUM else _MEAN)
        return sequence.finish()
    wide = sequence.cast(elements, "float32" if elements.dtype in ("float16", "bfloat16") else elements.dtype, "wide")
    total = reduce_over_axes(sequence, wide, num_axes, other_dims, _SUM)
    weight_arguments = (("self", Ref(target.name)), ("weight", weight), ignored, ("dtype", total.dtype))
    label_weights = sequence.add("weights", "sft.label_weight", shape, weight_arguments, total.dtype)
    total_weight = reduce_over_axes(sequence, label_weights, num_axes, other_dims, _SUM, "weights_")
    mean = sequence.add("mean", "aten.div.Tensor", (), (("self", Ref(total.name)), ("other", Ref(total_weight.name))), total.dtype)
    sequence.cast(mean, node.dtype, "rounded")
    return sequence.finish()


def rewrite_elementwise_loss(tracker: LayoutTracker, node: Node) -> bool:
    """Decompose an elementwise loss and its reduction, if any; false if its operands cannot be aligned."""
    unreduced = _unreduced_loss(node)
    images = [tracker.images[name] for name in node.operands if name in tracker.images]
    shape = broadcast_shapes([image.layout.shape(tracker.shape(image.node)) for image in images], len(images[0].layout.groups))
    if not rewrite_elementwise(tracker, replace(unreduced, shape=shape)):
        return False
    if unreduced.name != node.name:
        elements = tracker.nodes[tracker.images.pop(unreduced.name).node]
        tracker.add_nodes(_reduce_loss(node, elements, tracker.axes.count))
    return True


def rewrite_label_loss(tracker: LayoutTracker, node: Node) -> bool:
    """Decompose a loss that reads, for each pixel, the channel of its label; false if scores and labels differ in layout."""
    scores, target = (tracker.images.get(node.argument(key).name) for key in ("self", "target"))
    if scores is None or target is None or len(tracker.shape(scores.node)) != tracker.axes.rank or scores.layout.image_dim(1) != 1:
        return False
    pixel_layout = DimLayout(tuple(group for group in scores.layout.groups if group != (1,)))
    labels = tracker.nodes[target.node]
    has_labels = not labels.is_floating
    if len(labels.shape) != tracker.axes.rank or target.layout != (pixel_layout if has_labels else scores.layout):
        return False
    if has_labels and labels.shape[1] != 1:
        return False
    tracker.add_nodes(_decompose_label_loss(node, tracker.nodes[scores.node], labels, tracker.axes.count))
    if _loss_reduction(node) == _REDUCTION_NONE:
        tracker.images[node.name] = TrackedImage(node.name, pixel_layout)
    return True
