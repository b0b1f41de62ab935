"""Decomposition of reductions over the image into a few streaming reductions and small operators on their results.

Every reduction over all axes of the image ends in a *global value*, one number or a few for each channel of each sample:

* ``aten.sum.dim_IntList``, ``aten.mean.dim``: sums and means;
* ``sft.moments``: mean, variance and count, also of all channels or of the whole batch together
  (:mod:`sft.analysis.passes.decompose_norms`);
* ``sft.minmax``: the largest (smallest) element and its number of occurrences, since ``amax`` divides its gradient evenly;
* ``sft.argmax``: the largest element and its index, the first in row-major order, since a pooling's gradient flows to that one only;
* ``sft.logsumexp``: a sum of exponentials that does not overflow.

::

    v = std(x, dim=(2, 3))                ->    v = sqrt(sft.variance(sft.moments(x)))
    y = softmax(x.flatten(2), dim=2)      ->    y = exp(x - sft.logsumexp(x))           # per pixel

Norms are roots of sums. The gradient of the softmax, ``y * (g - sum(g * y))``, follows from the decomposition by the chain rule. Further
reduced dimensions (channels, the batch) are reduced afterwards, on the small result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from typing import Any

from sft.analysis.ir.graph import Node, Ref
from sft.analysis.ir.symbolic import same_shape
from sft.analysis.passes.layout_tracker import LayoutTracker, TrackedImage

__all__ = [
    "ADAPTIVE_POOLINGS",
    "REDUCTIONS",
    "SOFTMAXES",
    "NodeSequence",
    "reduce_over_axes",
    "rewrite_global_pool",
    "rewrite_reduction",
    "rewrite_softmax",
    "select_statistic",
    "wide_dtype",
    "widen_half",
]

_WIDE_DTYPES = {"float16": "float32", "bfloat16": "float32"}
_ITEMSIZE_BYTES = {"bool": 1, "float32": 4, "float64": 8, "int64": 8}


class NodeSequence:
    """Nodes that replace one operator of the model; the last one takes its name."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.nodes: list[Node] = []

    def add(self, suffix: str, target: str, shape: Sequence[Any], arguments: Sequence[tuple[str, Any]], dtype: str | None = None) -> Node:
        """Append an operator; its name is the model operator's with a suffix."""
        kind = self.node.dtype if dtype is None else dtype
        size = self.node.itemsize_bytes if kind == self.node.dtype else _ITEMSIZE_BYTES.get(kind, 2)
        name = f"{self.node.name}__{suffix}"
        node = replace(
            self.node, name=name, target=target, shape=tuple(shape), arguments=tuple(arguments), dtype=kind, itemsize_bytes=size, effect=""
        )
        self.nodes.append(node)
        return node

    def cast(self, value: Node, dtype: str, suffix: str) -> Node:
        """The value in an element type; unchanged if it has that type."""
        if value.dtype == dtype:
            return value
        return self.add(suffix, "aten._to_copy.default", value.shape, (("self", Ref(value.name)), ("dtype", dtype)), dtype)

    def finish(self) -> tuple[Node, ...]:
        """The nodes, the last one under the name of the model's operator."""
        return (*self.nodes[:-1], replace(self.nodes[-1], name=self.node.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageReduction:
    """A reduction of an image over all of its axes, and possibly further dimensions.

    Attributes:
        node: the model's operator.
        image: its operand, in the image's order of dimensions.
        num_axes: axes of the image.
        other_dims: the image's reduced dimensions before its axes.
        remaining_dims: the image's dimensions that are not reduced, in the model's order.
    """

    node: Node
    image: Node
    num_axes: int
    other_dims: tuple[int, ...]
    remaining_dims: tuple[int, ...]

    @property
    def lead(self) -> tuple[Any, ...]:
        """Batch and channel extents of the image."""
        return tuple(self.image.shape[: len(self.image.shape) - self.num_axes])


def _decompose_reduction(reduction: _ImageReduction) -> tuple[Node, ...] | None:
    """The nodes of a reduction; ``None`` if no form of it streams."""
    sequence = NodeSequence(reduction.node)
    result = REDUCTIONS[reduction.node.target](sequence, reduction)
    if result is None:
        return None
    result = sequence.cast(result, reduction.node.dtype, "rounded")
    return _restore_model_shape(sequence, reduction, result)


def _restore_model_shape(sequence: NodeSequence, reduction: _ImageReduction, result: Node) -> tuple[Node, ...]:
    """Permute and reshape the remaining batch and channels to the model's order and shape."""
    kept_dims = sorted(set(range(len(reduction.lead))) - set(reduction.other_dims))
    order = [kept_dims.index(dim) for dim in reduction.remaining_dims]
    if order != list(range(len(kept_dims))) or tuple(result.shape) != tuple(reduction.node.shape):
        arguments = (("self", Ref(result.name)), ("order", tuple(order)), ("shape", tuple(reduction.node.shape)))
        sequence.add("placed", "sft.restore_dims", reduction.node.shape, arguments)
    return sequence.finish()


def wide_dtype(dtype: str) -> str:
    """The element type of sums: fp32 for half types, otherwise the type itself."""
    return _WIDE_DTYPES.get(dtype, dtype)


def widen_half(sequence: NodeSequence, image: Node) -> Node:
    """Cast half types to fp32: their squares and exponentials overflow."""
    return sequence.cast(image, wide_dtype(image.dtype), "wide")


def _reduce_rest(
    sequence: NodeSequence,
    target: str,
    value: Node,
    lead: Sequence[Any],
    other_dims: Sequence[int],
    extra: tuple[tuple[str, Any], ...],
    prefix: str = "",
) -> Node:
    """Apply the same reduction to the small result, over the dimensions ``other_dims``."""
    if not other_dims:
        return value
    shape = [extent for dim, extent in enumerate(lead) if dim not in other_dims]
    arguments = (("self", Ref(value.name)), ("dim", tuple(other_dims)), ("keepdim", False), *extra)
    return sequence.add(f"{prefix}rest", target, shape, arguments, value.dtype)


def reduce_over_axes(sequence: NodeSequence, image: Node, num_axes: int, other_dims: Sequence[int], target: str, prefix: str = "") -> Node:
    """The sum or mean over the axes, and then over the dimensions ``other_dims`` of the small result."""
    dtype_argument: tuple[tuple[str, Any], ...] = (("dtype", None),)
    first_axis = len(image.shape) - num_axes
    arguments = (("self", Ref(image.name)), ("dim", tuple(range(first_axis, len(image.shape)))), ("keepdim", False), *dtype_argument)
    pooled = sequence.add(f"{prefix}pooled", target, image.shape[:first_axis], arguments, image.dtype)
    return _reduce_rest(sequence, target, pooled, image.shape[:first_axis], other_dims, dtype_argument, prefix)


def _sum_over_axes(sequence: NodeSequence, reduction: _ImageReduction, image: Node, target: str = "aten.sum.dim_IntList") -> Node:
    return reduce_over_axes(sequence, image, reduction.num_axes, reduction.other_dims, target)


def _decompose_sum(sequence: NodeSequence, reduction: _ImageReduction, *, target: str) -> Node | None:
    keeps_dtype = reduction.node.dtype == reduction.image.dtype
    return _sum_over_axes(sequence, reduction, reduction.image, target) if keeps_dtype else None


def _decompose_minmax(sequence: NodeSequence, reduction: _ImageReduction, *, largest: bool, image: Node | None = None) -> Node | None:
    image = reduction.image if image is None else image
    if reduction.other_dims:
        return None
    arguments = (("self", Ref(image.name)), ("largest", largest), ("axes", reduction.num_axes))
    statistics = sequence.add("extremes", "sft.minmax", (*reduction.lead, 2), arguments, "float64")
    return select_statistic(sequence, statistics, 0, image.dtype)


def select_statistic(sequence: NodeSequence, value: Node, index: int, dtype: str) -> Node:
    """One of several global values, cast from the fp64 that holds counts and indices."""
    arguments = (("self", Ref(value.name)), ("dim", len(value.shape) - 1), ("index", index))
    column = sequence.add("value", "aten.select.int", value.shape[:-1], arguments, value.dtype)
    return sequence.cast(column, dtype, "value_as_is")


def _decompose_argmax(sequence: NodeSequence, reduction: _ImageReduction) -> Node | None:
    """The largest element, or (for the second result) its index in row-major order."""
    if reduction.other_dims:
        return None
    arguments = (("self", Ref(reduction.image.name)), ("axes", reduction.num_axes))
    statistics = sequence.add("peak", "sft.argmax", (*reduction.lead, 2), arguments, "float64")
    return select_statistic(sequence, statistics, reduction.node.argument("result", 0), reduction.node.dtype)


def _decompose_vector_norm(sequence: NodeSequence, reduction: _ImageReduction) -> Node | None:
    order, image = float(reduction.node.argument("ord", 2)), widen_half(sequence, reduction.image)
    shape, this = image.shape, ("self", Ref(image.name))
    if reduction.node.argument("dtype") is not None or (0 <= order < 1) or -inf < order < 0:
        return None
    if order == 2:
        square = sequence.add("square", "aten.mul.Tensor", shape, (this, ("other", Ref(image.name))), image.dtype)
        return _nth_root(sequence, _sum_over_axes(sequence, reduction, square), 2.0)
    size = sequence.add("size", "aten.abs.default", shape, (this,), image.dtype)
    if abs(order) == inf:
        return _decompose_minmax(sequence, reduction, largest=order > 0, image=size)
    if order == 1:
        return _sum_over_axes(sequence, reduction, size)
    power = sequence.add("power", "aten.pow.Tensor_Scalar", shape, (("self", Ref(size.name)), ("exponent", order)), image.dtype)
    return _nth_root(sequence, _sum_over_axes(sequence, reduction, power), order)


def _nth_root(sequence: NodeSequence, value: Node, order: float) -> Node:
    return sequence.add("root", "sft.nth_root", value.shape, (("self", Ref(value.name)), ("order", order)), value.dtype)


def _moments_over_axes(sequence: NodeSequence, reduction: _ImageReduction) -> tuple[Node, tuple[Any, ...]]:
    """Moments over the axes and ``other_dims``, and the shape of the statistics."""
    other_dims, lead, image = reduction.other_dims, reduction.lead, reduction.image
    kept_dims = [dim for dim in range(1, len(lead)) if dim not in other_dims]
    channels = [*kept_dims, *(dim for dim in range(1, len(lead)) if dim in other_dims)]
    if channels != sorted(channels):  # a group is a run of channels
        image = _reorder_channels(sequence, image, channels, reduction.num_axes)
    per_sample = 0 not in other_dims
    groups = prod(int(lead[dim]) for dim in kept_dims)
    batch = image.shape[0] if per_sample else 1
    arguments = (("self", Ref(image.name)), ("groups", groups), ("per_sample", per_sample), ("axes", reduction.num_axes))
    dtype = wide_dtype(image.dtype)
    moments = sequence.add("moments", "sft.moments", (batch, groups, 3), arguments, dtype)
    return moments, tuple(lead[dim] for dim in range(len(lead)) if dim not in other_dims)


def _reorder_channels(sequence: NodeSequence, image: Node, dims: Sequence[int], num_axes: int) -> Node:
    """The image with its dimensions of channels in the order ``dims``."""
    split = tuple(int(extent) for extent in image.shape[1 : len(image.shape) - num_axes])
    order = tuple(dim - 1 for dim in dims)
    channels = tuple(split[dim] for dim in order)
    shape = (image.shape[0], *channels, *image.shape[len(image.shape) - num_axes :])
    arguments = (("self", Ref(image.name)), ("split", split), ("order", order), ("shape", channels), ("axes", num_axes))
    return sequence.add("grouped", "sft.rearrange", shape, arguments, image.dtype)


def _decompose_variance(sequence: NodeSequence, reduction: _ImageReduction, *, is_root: bool) -> Node:
    node = reduction.node
    correction = node.argument("correction", 1 if node.argument("unbiased", True) else 0)
    moments, shape = _moments_over_axes(sequence, reduction)
    if node.argument("result", 0) == 1:  # the mean of `var_mean`
        return sequence.add("mean", "sft.moment_mean", shape, (("moments", Ref(moments.name)), ("shape", shape)), moments.dtype)
    arguments = (("moments", Ref(moments.name)), ("correction", 1 if correction is None else correction), ("shape", shape))
    variance = sequence.add("variance", "sft.variance", shape, arguments, moments.dtype)
    return _nth_root(sequence, variance, 2.0) if is_root else variance


def _logsumexp_over_axes(sequence: NodeSequence, image: Node, lead: Sequence[Any], num_axes: int) -> Node:
    arguments = (("self", Ref(image.name)), ("axes", num_axes))
    return sequence.add("logsumexp", "sft.logsumexp", lead, arguments, image.dtype)


def _decompose_logsumexp(sequence: NodeSequence, reduction: _ImageReduction) -> Node | None:
    image = widen_half(sequence, reduction.image)
    pooled = _logsumexp_over_axes(sequence, image, reduction.lead, reduction.num_axes)
    return _reduce_rest(sequence, "aten.logsumexp.default", pooled, reduction.lead, reduction.other_dims, ())


def _decompose_softmax(node: Node, image: Node, num_axes: int) -> tuple[Node, ...] | None:
    """``softmax`` and ``log_softmax`` over all axes of an image: per pixel, once the sum is known."""
    if node.argument("dtype") is not None:
        return None
    sequence = NodeSequence(node)
    wide = widen_half(sequence, image)
    lead = image.shape[: len(image.shape) - num_axes]
    total = _logsumexp_over_axes(sequence, wide, lead, num_axes)
    # After an overflow ATen's softmax is NaN everywhere: total - total is 0 for a finite sum, and NaN for infinity.
    zero = sequence.add("zero", "aten.sub.Tensor", lead, (("self", Ref(total.name)), ("other", Ref(total.name)), ("alpha", 1)), wide.dtype)
    total = sequence.add(
        "finite", "aten.add.Tensor", lead, (("self", Ref(total.name)), ("other", Ref(zero.name)), ("alpha", 1)), wide.dtype
    )
    pixel = (*lead, *[1] * num_axes)
    spread = sequence.add("total", "sft.align_dims", pixel, (("self", Ref(total.name)), ("shape", pixel)), wide.dtype)
    arguments = (("self", Ref(wide.name)), ("other", Ref(spread.name)), ("alpha", 1))
    result = sequence.add("difference", "aten.sub.Tensor", image.shape, arguments, wide.dtype)
    if node.target not in _LOG_SOFTMAXES:
        result = sequence.add("share", "aten.exp.default", image.shape, (("self", Ref(result.name)),), wide.dtype)
    sequence.cast(result, node.dtype, "rounded")
    return sequence.finish()


_LOG_SOFTMAXES = frozenset({"aten.log_softmax.int", "aten._log_softmax.default"})
#: Poolings by windows, and the adaptive pooling of the same kind.
ADAPTIVE_POOLINGS = {
    f"aten.{kind}_pool{count}d.default": f"aten.adaptive_{kind}_pool{count}d.default" for kind in ("avg", "max") for count in (1, 2, 3)
}
#: Softmaxes along dimensions.
SOFTMAXES = frozenset({"aten.softmax.int", "aten.log_softmax.int"})

#: Decomposition of each reduction, by target.
REDUCTIONS: dict[str, Callable[[NodeSequence, _ImageReduction], Node | None]] = {
    **{f"aten.sum.{kind}": partial(_decompose_sum, target="aten.sum.dim_IntList") for kind in ("dim_IntList", "default")},
    **{f"aten.mean.{kind}": partial(_decompose_sum, target="aten.mean.dim") for kind in ("dim", "default")},
    "aten.amax.default": partial(_decompose_minmax, largest=True),
    "aten.amin.default": partial(_decompose_minmax, largest=False),
    "aten.max.dim": _decompose_argmax,
    "aten.linalg_vector_norm.default": _decompose_vector_norm,
    **{
        f"aten.{name}{suffix}.{kind}": partial(_decompose_variance, is_root=name == "std")
        for name in ("var", "std")
        for suffix in ("", "_mean")
        for kind in ("default", "dim", "correction")
    },
    "aten.logsumexp.default": _decompose_logsumexp,
    **{f"aten.adaptive_max_pool{n}d.default": _decompose_argmax for n in (1, 2, 3)},
}


def rewrite_reduction(tracker: LayoutTracker, node: Node) -> bool:
    """Decompose a reduction over all axes of the image, possibly also over channels and the batch; false if no form streams."""
    image = tracker.images.get(node.operands[0])
    if image is None or len(node.operands) != 1:
        return False
    groups, source = image.layout.groups, tracker.nodes[image.node]
    dims = _reduced_dims(tracker, node, image)
    if dims is None:
        return False
    first_axis = len(source.shape) - tracker.axes.count
    reduced = [image_dim for dim in dims for image_dim in groups[dim]]
    axes = [dim for dim in reduced if dim >= first_axis]
    non_axes = tuple(sorted(set(reduced) - set(axes)))
    remaining = [image_dim for dim, group in enumerate(groups) if dim not in dims for image_dim in group]
    if len(axes) != tracker.axes.count or (node.target == "aten.max.dim" and axes != sorted(axes)):
        return False
    if node.target in ("aten.mean.dim", "aten.sum.dim_IntList") and image.layout.is_plain and not non_axes:
        return False  # streams unchanged
    remaining += [dim for dim in range(first_axis) if dim not in remaining and dim not in non_axes]
    reduction = _ImageReduction(node=node, image=source, num_axes=tracker.axes.count, other_dims=non_axes, remaining_dims=tuple(remaining))
    nodes = _decompose_reduction(reduction)
    tracker.add_nodes(nodes or ())
    return nodes is not None


def _reduced_dims(tracker: LayoutTracker, node: Node, image: TrackedImage) -> list[int] | None:
    """The dimensions of the model's value that are reduced."""
    rank = len(image.layout.groups)
    if "adaptive" in node.target:
        size = node.argument("output_size")
        is_pixel = all(extent == 1 for extent in ((size,) if isinstance(size, int) else size))
        return list(range(2, rank)) if is_pixel and image.layout.is_plain and rank == tracker.axes.rank else None
    argument = node.argument("dim")
    return sorted({dim % rank for dim in ([argument] if isinstance(argument, int) else argument or range(rank))})


def rewrite_global_pool(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite a pooling with one window over the full image, ``F.avg_pool2d(x, x.shape[2:])``, as a reduction."""
    image, count = tracker.first_image(node), tracker.axes.count
    image_shape, kernel = tracker.shape(image.node), node.argument("kernel_size")
    kernel = kernel if isinstance(kernel, (tuple, list)) and len(kernel) == count else (kernel,) * count
    padding, dilation, divisor = node.argument("padding", 0), node.argument("dilation", 1), node.argument("divisor_override")
    if not image.layout.is_plain or len(image_shape) != tracker.axes.rank or len(node.shape) != len(image_shape) or divisor is not None:
        return False
    if not all(extent == 1 for extent in tracker.axes.of(node.shape)):
        return False  # decided first: comparing symbolic shapes is expensive
    if not _all_equal(padding, 0) or not _all_equal(dilation, 1) or not same_shape(kernel, tracker.axes.of(image_shape)):
        return False
    arguments = (("self", node.argument("self")), ("output_size", (1,) * count))
    adaptive = replace(node, target=ADAPTIVE_POOLINGS[node.target], arguments=arguments)
    if adaptive.target not in REDUCTIONS or not rewrite_reduction(tracker, adaptive):
        tracker.copy_operator(adaptive)
    return True


def _all_equal(value: Any, number: int) -> bool:
    """True if an argument, with one entry or one per axis, is this number along all axes."""
    return all(entry == number for entry in (value if isinstance(value, (tuple, list)) else (value,)))


def rewrite_softmax(tracker: LayoutTracker, node: Node) -> bool:
    """Decompose a softmax over all axes of the image."""
    image = tracker.images[node.operands[0]]
    source = tracker.nodes[image.node]
    axes = range(len(source.shape) - tracker.axes.count, len(source.shape))
    if sorted(image.layout.groups[node.argument("dim") % len(image.layout.groups)]) != list(axes):
        return False
    nodes = _decompose_softmax(node, source, tracker.axes.count)
    return nodes is not None and all([tracker.put(new, image.layout) for new in nodes])
