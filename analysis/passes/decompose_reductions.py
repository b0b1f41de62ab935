"""Reductions over the image, taken apart into a few that stream and small operators on what comes out.

Whatever reduces all axes of the image ends in a *global value*, one number or a few for each channel of each sample:

* ``aten.sum.dim_IntList``, ``aten.mean.dim``: sums and means;
* ``sft.moments``: mean, variance and count, also of all channels or of the whole batch together
  (:mod:`sft.analysis.passes.decompose_norms`);
* ``sft.minmax``: the largest (smallest) element and how often it occurs, since ``amax`` divides its gradient evenly;
* ``sft.argmax``: the largest element and its place, the first in row-major order, since a pooling's gradient goes to that one alone;
* ``sft.logsumexp``: a sum of exponentials that does not overflow.

Norms are roots of sums, variances and deviations follow from moments, a softmax over the image is ``exp(x - logsumexp(x))`` pixel by
pixel: its gradient, ``y * (g - sum(g * y))``, comes out of the parts by the chain rule. What is reduced besides the axes (channels, the
batch) is reduced afterwards, in the small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from sft.analysis.ir.graph import Node, Ref

__all__ = [
    "REDUCTIONS",
    "SOFTMAXES",
    "ImageReduction",
    "NodeSequence",
    "argmax_over_axes",
    "decompose_reduction",
    "decompose_softmax",
    "mean_over_axes",
    "reduce_over_axes",
    "widen_half",
]

_WIDE_DTYPES = {"float16": "float32", "bfloat16": "float32"}
_ITEMSIZE_BYTES = {"float32": 4, "float64": 8, "int64": 8}


class NodeSequence:
    """Nodes that stand for one operator of the model; the last one takes its name."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.nodes: list[Node] = []

    def add(self, part: str, target: str, shape: Sequence[Any], arguments: Sequence[tuple[str, Any]], dtype: str | None = None) -> Node:
        """Add an operator."""
        kind = self.node.dtype if dtype is None else dtype
        size = self.node.itemsize_bytes if kind == self.node.dtype else _ITEMSIZE_BYTES.get(kind, 2)
        name = f"{self.node.name}__{part}"
        made = replace(
            self.node, name=name, target=target, shape=tuple(shape), arguments=tuple(arguments), dtype=kind, itemsize_bytes=size, effect=""
        )
        self.nodes.append(made)
        return made

    def cast(self, value: Node, dtype: str, part: str) -> Node:
        """The value in an element type; itself where that is its own."""
        if value.dtype == dtype:
            return value
        return self.add(part, "aten._to_copy.default", value.shape, (("self", Ref(value.name)), ("dtype", dtype)), dtype)

    def finish(self) -> tuple[Node, ...]:
        """The nodes, the last one under the name of the model's."""
        return (*self.nodes[:-1], replace(self.nodes[-1], name=self.node.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReduction:
    """A reduction of an image over all of its axes, and maybe more.

    Attributes:
        node: the model's operator.
        image: what it reduces, in the image's order of dimensions.
        num_axes: axes of the image.
        rest: the dimensions of the image besides its axes that are reduced too.
        order: the image's dimensions that are left, as the model has them.
    """

    node: Node
    image: Node
    num_axes: int
    rest: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def lead(self) -> tuple[Any, ...]:
        """Batch and channels of the image."""
        return tuple(self.image.shape[: len(self.image.shape) - self.num_axes])

    @property
    def num_channels(self) -> int:
        """Channels of the image, all of their dimensions together."""
        return prod(int(extent) for extent in self.lead[1:])

    @property
    def is_pooled(self) -> bool:
        """Whether nothing but the axes is reduced."""
        return not self.rest


def decompose_reduction(reduction: ImageReduction) -> tuple[Node, ...] | None:
    """The nodes that stand for a reduction; ``None`` where there is no form of it that streams."""
    chain = NodeSequence(reduction.node)
    small = REDUCTIONS[reduction.node.target](chain, reduction)
    if small is None:
        return None
    small = chain.cast(small, reduction.node.dtype, "rounded")
    return _restore_model_shape(chain, reduction, small)


def _restore_model_shape(chain: NodeSequence, reduction: ImageReduction, small: Node) -> tuple[Node, ...]:
    """Put what is left of batch and channels into the model's order and shape."""
    left = sorted(set(range(len(reduction.lead))) - set(reduction.rest))
    order = [left.index(dim) for dim in reduction.order]
    if order != list(range(len(left))) or tuple(small.shape) != tuple(reduction.node.shape):
        arguments = (("self", Ref(small.name)), ("order", tuple(order)), ("shape", tuple(reduction.node.shape)))
        chain.add("placed", "sft.restore_dims", reduction.node.shape, arguments)
    return chain.finish()


def widen_half(chain: NodeSequence, image: Node) -> Node:
    """Half types are widened first: squares and exponentials of theirs leave their range."""
    return chain.cast(image, _WIDE_DTYPES.get(image.dtype, image.dtype), "wide")


def _reduce_rest(
    chain: NodeSequence,
    target: str,
    value: Node,
    lead: Sequence[Any],
    rest: Sequence[int],
    extra: tuple[tuple[str, Any], ...],
    prefix: str = "",
) -> Node:
    """The same reduction of what is left, over the dimensions ``rest``."""
    if not rest:
        return value
    shape = [extent for dim, extent in enumerate(lead) if dim not in rest]
    arguments = (("self", Ref(value.name)), ("dim", tuple(rest)), ("keepdim", False), *extra)
    return chain.add(f"{prefix}rest", target, shape, arguments, value.dtype)


def mean_over_axes(chain: NodeSequence, image: Node, num_axes: int, rest: Sequence[int]) -> Node:
    """The mean over the axes and the dimensions ``rest``."""
    return reduce_over_axes(chain, image, num_axes, rest, "aten.mean.dim")


def reduce_over_axes(chain: NodeSequence, image: Node, num_axes: int, rest: Sequence[int], target: str, prefix: str = "") -> Node:
    """The sum or mean over the axes, and then over the dimensions ``rest`` in the small."""
    nothing: tuple[tuple[str, Any], ...] = (("dtype", None),)
    first_axis = len(image.shape) - num_axes
    arguments = (("self", Ref(image.name)), ("dim", tuple(range(first_axis, len(image.shape)))), ("keepdim", False), *nothing)
    found = chain.add(f"{prefix}pooled", target, image.shape[:first_axis], arguments, image.dtype)
    return _reduce_rest(chain, target, found, image.shape[:first_axis], rest, nothing, prefix)


def _sum_over_axes(chain: NodeSequence, reduction: ImageReduction, image: Node, target: str = "aten.sum.dim_IntList") -> Node:
    return reduce_over_axes(chain, image, reduction.num_axes, reduction.rest, target)


def _decompose_sum(chain: NodeSequence, reduction: ImageReduction) -> Node | None:
    return _sum_over_axes(chain, reduction, reduction.image) if _keeps_dtype(reduction) else None


def _decompose_mean(chain: NodeSequence, reduction: ImageReduction) -> Node | None:
    return _sum_over_axes(chain, reduction, reduction.image, "aten.mean.dim") if _keeps_dtype(reduction) else None


def _keeps_dtype(reduction: ImageReduction) -> bool:
    return reduction.node.dtype == reduction.image.dtype


def _decompose_minmax(chain: NodeSequence, reduction: ImageReduction, *, largest: bool, image: Node | None = None) -> Node | None:
    image = reduction.image if image is None else image
    if reduction.rest:
        return None
    arguments = (("self", Ref(image.name)), ("largest", largest), ("axes", reduction.num_axes))
    both = chain.add("extremes", "sft.minmax", (*reduction.lead, 2), arguments, "float64")
    return _select_statistic(chain, both, 0, image.dtype)


def _select_statistic(chain: NodeSequence, value: Node, index: int, dtype: str, part: str = "value") -> Node:
    """One of several global values; what is kept in fp64 to hold counts and places is rounded here."""
    arguments = (("self", Ref(value.name)), ("dim", len(value.shape) - 1), ("index", index))
    column = chain.add(part, "aten.select.int", value.shape[:-1], arguments, value.dtype)
    return chain.cast(column, dtype, f"{part}_as_is")


def _decompose_amax(chain: NodeSequence, reduction: ImageReduction) -> Node | None:
    return _decompose_minmax(chain, reduction, largest=True)


def _decompose_amin(chain: NodeSequence, reduction: ImageReduction) -> Node | None:
    return _decompose_minmax(chain, reduction, largest=False)


def _decompose_argmax(chain: NodeSequence, reduction: ImageReduction) -> Node | None:
    return argmax_over_axes(chain, reduction) if reduction.is_pooled else None


def argmax_over_axes(chain: NodeSequence, reduction: ImageReduction) -> Node:
    """The largest element, or (where that is asked for) its place in row-major order."""
    arguments = (("self", Ref(reduction.image.name)), ("axes", reduction.num_axes))
    both = chain.add("peak", "sft.argmax", (*reduction.lead, 2), arguments, "float64")
    return _select_statistic(chain, both, reduction.node.argument("result", 0), reduction.node.dtype)


def _decompose_vector_norm(chain: NodeSequence, reduction: ImageReduction) -> Node | None:
    order, image = float(reduction.node.argument("ord", 2)), widen_half(chain, reduction.image)
    shape, this = image.shape, ("self", Ref(image.name))
    if reduction.node.argument("dtype") is not None or (0 <= order < 1) or -inf < order < 0:
        return None
    if order == 2:
        square = chain.add("square", "aten.mul.Tensor", shape, (this, ("other", Ref(image.name))), image.dtype)
        return _nth_root(chain, _sum_over_axes(chain, reduction, square), 2.0)
    size = chain.add("size", "aten.abs.default", shape, (this,), image.dtype)
    if abs(order) == inf:
        return _decompose_minmax(chain, reduction, largest=order > 0, image=size)
    if order == 1:
        return _sum_over_axes(chain, reduction, size)
    power = chain.add("power", "aten.pow.Tensor_Scalar", shape, (("self", Ref(size.name)), ("exponent", order)), image.dtype)
    return _nth_root(chain, _sum_over_axes(chain, reduction, power), order)


def _nth_root(chain: NodeSequence, value: Node, order: float) -> Node:
    return chain.add("root", "sft.nth_root", value.shape, (("self", Ref(value.name)), ("order", order)), value.dtype)


def moments_over_axes(chain: NodeSequence, reduction: ImageReduction) -> tuple[Node, tuple[Any, ...]] | None:
    """Moments over the axes and the rest, and the shape of what they are of; ``None`` where only some channels are reduced."""
    num_lead, channels = len(reduction.lead), range(1, len(reduction.lead))
    rest, image = set(reduction.rest), reduction.image
    of_all_channels = rest.issuperset(channels)
    if not of_all_channels and rest.intersection(channels):
        return None
    per_sample = 0 not in rest
    groups = 1 if of_all_channels else reduction.num_channels
    batch = image.shape[0] if per_sample else 1
    arguments = (("self", Ref(image.name)), ("groups", groups), ("per_sample", per_sample), ("axes", reduction.num_axes))
    dtype = _WIDE_DTYPES.get(image.dtype, image.dtype)
    made = chain.add("moments", "sft.moments", (batch, groups, 3), arguments, dtype)
    return made, tuple(reduction.lead[dim] for dim in range(num_lead) if dim not in rest)


def _decompose_variance(chain: NodeSequence, reduction: ImageReduction, *, is_root: bool) -> Node | None:
    node = reduction.node
    correction = node.argument("correction", 1 if node.argument("unbiased", True) else 0)
    found = moments_over_axes(chain, reduction)
    if found is None:
        return None
    moments, shape = found
    if node.argument("result", 0) == 1:  # the mean of `var_mean`
        chosen = chain.add("mean", "sft.moment_mean", shape, (("moments", Ref(moments.name)), ("shape", shape)), moments.dtype)
        return chosen
    arguments = (("moments", Ref(moments.name)), ("correction", 1 if correction is None else correction), ("shape", shape))
    variance = chain.add("variance", "sft.variance", shape, arguments, moments.dtype)
    return _nth_root(chain, variance, 2.0) if is_root else variance


def _decompose_var(chain: NodeSequence, reduction: ImageReduction) -> Node | None:
    return _decompose_variance(chain, reduction, is_root=False)


def _decompose_std(chain: NodeSequence, reduction: ImageReduction) -> Node | None:
    return _decompose_variance(chain, reduction, is_root=True)


def _logsumexp_over_axes(chain: NodeSequence, image: Node, lead: Sequence[Any], num_axes: int) -> Node:
    arguments = (("self", Ref(image.name)), ("axes", num_axes))
    return chain.add("logsumexp", "sft.logsumexp", lead, arguments, image.dtype)


def _decompose_logsumexp(chain: NodeSequence, reduction: ImageReduction) -> Node | None:
    image = widen_half(chain, reduction.image)
    found = _logsumexp_over_axes(chain, image, reduction.lead, reduction.num_axes)
    return _reduce_rest(chain, "aten.logsumexp.default", found, reduction.lead, reduction.rest, ())


def decompose_softmax(node: Node, image: Node, num_axes: int) -> tuple[Node, ...] | None:
    """``decompose_softmax`` and ``log_softmax`` over all axes of an image: pixel by pixel, once the sum is known."""
    if node.argument("dtype") is not None:
        return None
    chain = NodeSequence(node)
    wide = widen_half(chain, image)
    lead = image.shape[: len(image.shape) - num_axes]
    total = _logsumexp_over_axes(chain, wide, lead, num_axes)
    # Where something overflowed ATen's softmax is NaN everywhere: what adds zero to a finite sum makes NaN of infinity.
    zero = chain.add("zero", "aten.sub.Tensor", lead, (("self", Ref(total.name)), ("other", Ref(total.name)), ("alpha", 1)), wide.dtype)
    total = chain.add("finite", "aten.add.Tensor", lead, (("self", Ref(total.name)), ("other", Ref(zero.name)), ("alpha", 1)), wide.dtype)
    pixel = (*lead, *[1] * num_axes)
    spread = chain.add("total", "sft.align_dims", pixel, (("self", Ref(total.name)), ("shape", pixel)), wide.dtype)
    arguments = (("self", Ref(wide.name)), ("other", Ref(spread.name)), ("alpha", 1))
    found = chain.add("difference", "aten.sub.Tensor", image.shape, arguments, wide.dtype)
    if node.target not in _LOG_SOFTMAXES:
        found = chain.add("share", "aten.exp.default", image.shape, (("self", Ref(found.name)),), wide.dtype)
    chain.cast(found, node.dtype, "rounded")
    return chain.finish()


_LOG_SOFTMAXES = frozenset({"aten.log_softmax.int", "aten._log_softmax.default"})
#: Softmaxes along dimensions.
SOFTMAXES = frozenset({"aten.softmax.int", "aten.log_softmax.int"})

#: How each reduction is taken apart, by target.
REDUCTIONS: dict[str, Callable[[NodeSequence, ImageReduction], Node | None]] = {
    **{f"aten.sum.{kind}": _decompose_sum for kind in ("dim_IntList", "default")},
    **{f"aten.mean.{kind}": _decompose_mean for kind in ("dim", "default")},
    "aten.amax.default": _decompose_amax,
    "aten.amin.default": _decompose_amin,
    "aten.max.dim": _decompose_argmax,
    "aten.linalg_vector_norm.default": _decompose_vector_norm,
    **{f"aten.{name}.{kind}": _decompose_var for name in ("var", "var_mean") for kind in ("default", "dim", "correction")},
    **{f"aten.{name}.{kind}": _decompose_std for name in ("std", "std_mean") for kind in ("default", "dim", "correction")},
    "aten.logsumexp.default": _decompose_logsumexp,
    **{f"aten.adaptive_max_pool{n}d.default": _decompose_argmax for n in (1, 2, 3)},
}
