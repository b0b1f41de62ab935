"""Sample rules: operators that are independent along samples, and their arguments for another number of samples.

The table lists operators by target, refused by default. For fewer samples the same operators run on a smaller ``N``; shapes in their
arguments are replaced (:func:`with_num_samples`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sft.analysis.ir.graph import Graph, Node, refs_in
from sft.analysis.ir.ops.sample_axis import SampleAxis, SampleRule, SampleTracker
from sft.analysis.ir.ops.table import DIMENSION_ARGUMENTS, ELEMENTWISE, DimensionArgument
from sft.analysis.ir.targets import ATTENTION, CAUSAL_ATTENTION

__all__ = ["PRODUCT_TARGETS", "SAMPLE_IMAGE_RULES", "SAMPLE_RULES", "graph_of_samples", "with_num_samples"]

_SPATIAL_SIDE_INPUT = "sft.spatial_side_input"
#: Arguments that hold the shape of the result.
_SHAPE_ARGUMENTS = {
    **{f"aten.{name}.default": "size" for name in ("expand", "zeros", "ones", "full", "view", "_unsafe_view")},
    **dict.fromkeys(("aten.reshape.default", "sft.restore_dims", "sft.align_dims"), "shape"),
}


def _broadcast(tracker: SampleTracker, names: Sequence[str], rank: int, *, last_dims: int = 0) -> SampleAxis | None:
    """Common sample axis of operands that broadcast to ``rank`` dimensions; none may be in the last ``last_dims`` dimensions."""
    positions = set()
    for name in names:
        axis = tracker.axes.get(name)
        if axis is not None:
            positions.add(replace(axis, dim=axis.dim + rank - len(tracker.shape(name))))
    if len(positions) != 1:
        return None
    (common,) = positions
    if common.dim >= rank - last_dims:
        return None
    for name in names:
        shape = tracker.shape(name)
        dim = common.dim - (rank - len(shape))
        if name not in tracker.axes and dim >= 0 and shape[dim] != 1 and tracker.take(name, replace(common, dim=dim)) is None:
            return None
    return common


def _elementwise(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    return _broadcast(tracker, node.operands, len(node.shape))


def _reshape(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    (name,) = node.operands
    return _regroup(tracker.axes[name], tracker.shape(name), node.shape, tracker.num_samples)


def _regroup(axis: SampleAxis, old: Sequence[int], new: Sequence[int], num_samples: int) -> SampleAxis | None:
    """Sample axis after a reshape: the new dimension that contains the samples, if it contains all of them."""
    before, after = math.prod(old[: axis.dim]) * axis.outer, math.prod(old[axis.dim + 1 :]) * axis.inner
    outside = 1
    for dim, extent in enumerate(new):
        if outside * extent > before:
            if before % outside or extent % (before // outside * num_samples):
                return None
            outer = before // outside
            inner = extent // (outer * num_samples)
            return SampleAxis(dim=dim, outer=outer, inner=inner) if inner * math.prod(new[dim + 1 :]) == after else None
        outside *= extent
    return None


def _squeeze(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    (name,) = node.operands
    rank, dims = len(tracker.shape(name)), _dims(node.argument("dim"))
    # A single sample would be squeezed, too.
    return None if dims is None or tracker.axes[name].dim in {dim % rank for dim in dims} else _reshape(tracker, node)


def _permute(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    (name,) = node.operands
    axis, rank = tracker.axes[name], len(tracker.shape(name))
    if node.target == "aten.permute.default":
        order = [dim % rank for dim in node.argument("dims")]
    else:
        order = list(range(rank))
        first, second = (0, 1) if node.target == "aten.t.default" else (node.argument("dim0") % rank, node.argument("dim1") % rank)
        if rank > 1:
            order[first], order[second] = order[second], order[first]
    return replace(axis, dim=order.index(axis.dim))


def _restore_dims(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    (name,) = node.operands
    shape, order = tracker.shape(name), node.argument("order")
    axis = tracker.axes[name]
    moved = replace(axis, dim=list(order).index(axis.dim))
    return _regroup(moved, [shape[dim] for dim in order], node.shape, tracker.num_samples)


def _expand(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    (name,) = node.operands
    axis = tracker.axes[name]
    return replace(axis, dim=axis.dim + len(node.shape) - len(tracker.shape(name)))


def _repeat(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    axis = _expand(tracker, node)
    return axis if axis is not None and node.argument("repeats")[axis.dim] == 1 else None


def _pad(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    (name,) = node.operands
    axis = tracker.axes[name]
    return axis if axis.dim < len(node.shape) - len(node.argument("pad")) // 2 else None


def _along_dims(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """Operators along dimensions that they name."""
    named = DIMENSION_ARGUMENTS.get(node.target, _REDUCED_DIMS)
    dims = _dims(node.argument(named.argument))
    names = tuple(dict.fromkeys(node.operands))
    ranks = {len(tracker.shape(name)) for name in names}
    if not dims or len(ranks) != 1:
        return None
    (rank,) = ranks
    axis = _broadcast(tracker, names, rank)
    if axis is None or any(tracker.take(name, axis) is None for name in names):
        return None  # operands along a dimension do not broadcast: each has its samples
    if named.adds:
        (added,) = (dim % (rank + 1) for dim in dims)
        return replace(axis, dim=axis.dim + (added <= axis.dim))
    dims = {dim % rank for dim in dims}
    if axis.dim in dims:
        return None
    drops = named.drops and not node.argument("keepdim", False)
    return replace(axis, dim=axis.dim - sum(dim < axis.dim for dim in dims)) if drops else axis


def _slice(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """Slices of dimensions without samples, and those with a stride that take the same elements of each sample."""
    (name,) = node.operands
    axis, shape = tracker.axes[name], tracker.shape(name)
    if node.argument("dim", 0) % len(shape) != axis.dim:
        return axis
    start, end, step = node.argument("start") or 0, node.argument("end"), node.argument("step", 1)
    is_full = 0 <= start < step and (end is None or end >= shape[axis.dim])
    return replace(axis, inner=axis.inner // step) if is_full and axis.inner % step == 0 else None


def _dims(value: Any) -> set[int] | None:
    return None if value is None else {value} if isinstance(value, int) else set(value)


def _trailing(num_dims: Callable[[Node], int]) -> SampleRule:
    """Rule of a function of the last dimensions of its input; its further operands are weights."""

    def rule(tracker: SampleTracker, node: Node) -> SampleAxis | None:
        (name,) = refs_in(node.argument("input"))
        axis = tracker.axes.get(name)
        is_inside = axis is None or axis.dim >= len(tracker.shape(name)) - num_dims(node)
        return None if is_inside or any(other in tracker.axes for other in node.operands if other != name) else axis

    return rule


def _leading(key: str, *, min_rank: int = 3) -> SampleRule:
    """Rule of an operator on images that are not streamed values: convolutions, pools, norms by channel of ``[N, C, ...]``."""

    def rule(tracker: SampleTracker, node: Node) -> SampleAxis | None:
        (name,) = refs_in(node.argument(key))
        axis, rank = tracker.axes.get(name), len(tracker.shape(name))
        is_shared = all(other == name or other not in tracker.axes for other in node.operands)
        is_batched = min_rank <= rank == len(node.shape)
        if node.target in _IMAGE_TARGETS:  # without a batch, the first dimension is channels
            is_batched &= all(len(tracker.shape(weight)) == rank for weight in refs_in(node.argument("weight")))
        return axis if axis is not None and axis.dim == 0 and is_shared and is_batched else None

    return rule


def _spatial_side_input(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """A tensor that varies along axes of an image, split into dimensions, permuted, and expanded to the size of the image."""
    (name,), (like,) = refs_in(node.argument("self")), refs_in(node.argument("like"))
    leading, split, first = SampleAxis(dim=0), node.argument("split"), node.argument("order")[0]
    if tracker.axes.get(like) != leading:
        return None
    if split[first] == 1:
        return None if name in tracker.axes else leading
    axis = tracker.take(name, leading)
    return leading if axis is not None and _split_axis(tracker, name, split) == SampleAxis(dim=first) else None


def _split_axis(tracker: SampleTracker, name: str, split: Sequence[int]) -> SampleAxis | None:
    return _regroup(tracker.axes[name], tracker.shape(name), split, tracker.num_samples)


def _statistics(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """Functions of the moments of each sample: the scale and shift of a norm."""
    (name,) = refs_in(node.argument("moments"))
    axis = tracker.axes.get(name)
    is_shared = all(other == name or other not in tracker.axes for other in node.operands)
    return axis if axis == SampleAxis(dim=0) and is_shared else None


def _axis_reduction(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """Reductions of some of the last dimensions; the first one stays."""
    (name,) = node.operands
    axis = tracker.axes[name]
    return axis if axis.dim == 0 and len(tracker.shape(name)) > node.argument("axes") else None


def _embedding(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    (indices,), (weight,) = refs_in(node.argument("indices")), refs_in(node.argument("weight"))
    counts = node.argument("scale_grad_by_freq", False)  # of an index in all samples
    return None if counts or weight in tracker.axes else tracker.axes.get(indices)


def _index_select(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    (name,), (index,) = refs_in(node.argument("self")), refs_in(node.argument("index"))
    axis = tracker.axes.get(name)
    return None if axis is None or index in tracker.axes or node.argument("dim") % len(node.shape) == axis.dim else axis


def _index(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """Indices that are equal for all samples, in dimensions after that of the samples."""
    (name,), indices = refs_in(node.argument("self")), node.argument("indices")
    axis = tracker.axes.get(name)
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if dims != list(range(dims[0], dims[0] + len(dims))):
        return None  # dimensions of indices that are apart move to the front
    return None if axis is None or axis.dim >= dims[0] or any(other in tracker.axes for other in refs_in(indices)) else axis


def _matmul(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """Products of matrices: samples are a batch dimension of both operands, rows of the left one, or columns of the right one.

    Of rows (queries), all columns of the other operand (keys) are read, and the other way round.
    """
    left, right = node.operands
    left_shape, right_shape, rank = tracker.shape(left), tracker.shape(right), len(node.shape)
    axis = tracker.axes.get(left)
    if axis is not None and right not in tracker.axes and len(right_shape) == 2 and axis.dim < len(left_shape) - 1:
        return axis  # a linear layer
    if min(len(left_shape), len(right_shape)) < 2:
        return None
    common = _broadcast(tracker, (left, right), rank, last_dims=2)
    if common is not None or left == right:
        return common
    if axis is not None and axis.dim == len(left_shape) - 2:
        return replace(axis, dim=rank - 2) if tracker.take_all(right) else None
    axis = tracker.axes.get(right)
    if axis is not None and axis.dim == len(right_shape) - 1:
        return replace(axis, dim=rank - 1) if tracker.take_all(left) else None
    return None


def _attention(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """Attention: samples are a batch dimension, or queries, each of which reads all keys and values."""
    common = _broadcast(tracker, tuple(dict.fromkeys(node.operands)), len(node.shape), last_dims=2)
    if common is not None:
        return common
    (query,), (key,), (value,) = (tuple(refs_in(node.argument(name))) for name in ("query", "key", "value"))
    axis, masks = tracker.axes.get(query), tuple(refs_in(node.argument("attn_mask")))
    if axis is None or axis.dim != len(tracker.shape(query)) - 2 or query in (key, value, *masks):
        return None
    if any(not tracker.take_all(name) for name in (key, value)) or not all(_has_queries(tracker, name, axis) for name in masks):
        return None
    queries = replace(axis, dim=len(node.shape) - 2)
    return queries if queries.has_positions or not node.argument("is_causal", False) else None


def _has_queries(tracker: SampleTracker, mask: str, axis: SampleAxis) -> bool:
    """True if a mask of attention is equal for all queries, or can be read for some."""
    dim = len(tracker.shape(mask)) - 2
    if mask not in tracker.axes and (dim < 0 or tracker.shape(mask)[dim] == 1):
        return True
    return tracker.take(mask, replace(axis, dim=dim)) == replace(axis, dim=dim)


def _einsum(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """Products of an index notation: one letter of the result counts the samples, in every operand that has it.

    Operands that have samples at another letter (the keys of attention) are read in full.
    """
    inputs, arrow, result = node.argument("equation").replace(" ", "").partition("->")
    names = tuple(refs_in(node.argument("tensors")))
    terms = inputs.split(",")
    if not arrow or "." in inputs or len(terms) != len(names):
        return None
    letters = {(name, term[tracker.axes[name].dim]) for term, name in zip(terms, names, strict=True) if name in tracker.axes}
    letter_of = dict(letters)
    first = next((name for name in names if name in letter_of and letter_of[name] in result), None)
    if first is None or len(letter_of) != len(letters):  # an operand that occurs twice, with samples at two letters
        return None
    letter, axis = letter_of[first], tracker.axes[first]
    for term, name in zip(terms, names, strict=True):
        if letter in term:
            expected = replace(axis, dim=term.index(letter))
            if term.count(letter) > 1 or tracker.take(name, expected) != expected:
                return None
        elif name in letter_of and not tracker.take_all(name):
            return None
    return replace(axis, dim=result.index(letter))


def _random(tracker: SampleTracker, node: Node) -> SampleAxis | None:
    """Positional random numbers: the counter of an element contains its indices."""
    axis = next((tracker.axes[name] for name in refs_in(node.argument("self")) if name in tracker.axes), None)
    return axis if axis is not None and axis.has_positions else None


_REDUCED_DIMS = DimensionArgument(drops=True)
_IMAGE_TARGETS = (
    *(f"aten.conv{n}d.{kind}" for n in (1, 2, 3) for kind in ("default", "padding")),
    *("aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"),
)
_POOL_TARGETS = tuple(f"aten.{kind}_pool{n}d.default" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for n in (1, 2, 3))
#: Operators whose FLOPs are counted: convolutions, products of matrices, attention.
PRODUCT_TARGETS = frozenset(
    {
        *_IMAGE_TARGETS,
        *(f"aten.{name}.default" for name in ("linear", "matmul", "mm", "bmm", "einsum", "scaled_dot_product_attention")),
        "sft.mix_channels",
        "sft.contract_pixels",
    }
)
#: Operators on untiled values that are independent along samples.
SAMPLE_RULES: dict[str, SampleRule] = {
    **dict.fromkeys(sorted(ELEMENTWISE), _elementwise),
    **{f"aten.{name}_like.default": _elementwise for name in ("zeros", "ones", "full")},
    **dict.fromkeys(sorted(DIMENSION_ARGUMENTS), _along_dims),
    **dict.fromkeys(("aten.mean.dim", "aten.sum.dim_IntList"), _along_dims),
    **dict.fromkeys(
        (*(f"aten.{name}.default" for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "clone", "alias")), "sft.align_dims"),
        _reshape,
    ),
    **dict.fromkeys(("aten.squeeze.dim", "aten.squeeze.dims"), _squeeze),
    **dict.fromkeys(("aten.permute.default", "aten.transpose.int", "aten.t.default"), _permute),
    "aten.contiguous.default": _reshape,
    "aten.flatten.using_ints": _reshape,
    "sft.restore_dims": _restore_dims,
    "aten.slice.Tensor": _slice,
    "aten.expand.default": _expand,
    "aten.repeat.default": _repeat,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
    "aten.linear.default": _trailing(lambda node: 1),
    "aten.layer_norm.default": _trailing(lambda node: len(node.argument("normalized_shape"))),
    "aten.rms_norm.default": _trailing(lambda node: len(node.argument("normalized_shape"))),
    **dict.fromkeys(_IMAGE_TARGETS, _leading("input")),
    **dict.fromkeys(_POOL_TARGETS, _leading("self")),
    **{f"aten.{name}.default": _leading("self", min_rank=4) for name in ("pixel_shuffle", "pixel_unshuffle")},
    **{f"aten.{name}.default": _leading("input", min_rank=2) for name in ("group_norm", "_native_batch_norm_legit_no_training")},
    "sft.scale_shift": _statistics,
    **dict.fromkeys(("sft.axis_sum", "sft.axis_minmax"), _axis_reduction),
    **dict.fromkeys(("sft.nth_root", "sft.inverse_sqrt"), _elementwise),
    "aten.embedding.default": _embedding,
    "aten.index_select.default": _index_select,
    "aten.index.Tensor": _index,
    **dict.fromkeys(("aten.matmul.default", "aten.mm.default", "aten.bmm.default"), _matmul),
    ATTENTION: _attention,
    "aten.einsum.default": _einsum,
    **dict.fromkeys(("sft.dropout", "sft.mask", "sft.noise"), _random),
}
#: The same, of operators that need a rule on images, too.
SAMPLE_IMAGE_RULES: dict[str, SampleRule] = {_SPATIAL_SIDE_INPUT: _spatial_side_input}


def graph_of_samples(graph: Graph, axes: Mapping[str, SampleAxis], num_samples: int) -> Graph:
    """The graph with the values of a run for another number of samples."""
    nodes = (with_num_samples(node, axes[node.name], num_samples) if node.name in axes else node for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def with_num_samples(node: Node, axis: SampleAxis, num_samples: int) -> Node:
    """The same operator for another number of samples."""
    key = _SHAPE_ARGUMENTS.get(node.target)
    arguments, shape = node.arguments, axis.resize(node.shape, num_samples)
    if node.target == _SPATIAL_SIDE_INPUT:
        split, first = list(node.argument("split")), node.argument("order")[0]
        split[first] = num_samples if split[first] != 1 else 1
        arguments = tuple((name, tuple(split) if name == "split" else value) for name, value in arguments)
    if key is not None:
        arguments = tuple((name, shape if name == key else value) for name, value in arguments)
    if node.target == ATTENTION and node.argument("is_causal", False) and axis.dim == len(shape) - 2:
        node = replace(node, target=CAUSAL_ATTENTION)  # the keys of a query depend on its position
    return replace(node, arguments=arguments, shape=shape)
