"""Decomposition of matrix products of images: contractions over all pixels, and products of every pixel's channels with a matrix.

``matmul``, ``bmm`` and ``einsum`` of two operands are represented with a letter for each dimension, as in ``einsum``. Two forms stream:

* ``sft.contract_pixels``: both operands are images, contracted over all axes of the image (attention pooling, Gram matrices, the
  keys times the values of linear attention). A reduction.
* ``sft.mix_channels``: one operand is an image, the other a matrix for each sample, contracted over channels.

::

    a = einsum("nchw,ndhw->ncd", x, y)    ->    a = sft.contract_pixels(x, y)
    b = einsum("ncd,nchw->ndhw", a, x)    ->    b = sft.mix_channels(x, a)

Products that pair pixels with pixels (self-attention) run untiled. ``linear`` along the channels of an image becomes a convolution with a
kernel of one pixel.

Attention that drops some of its weights is decomposed before all else, as torch documents it, so that its mask follows positions like that
of any other dropout::

    y = scaled_dot_product_attention(q, k, v, dropout_p=p)    ->    y = dropout(softmax(q k^T / sqrt(E)), p) v
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod, sqrt
from string import ascii_letters
from typing import Any

from sft.analysis.ir.axes import Axes
from sft.analysis.ir.graph import Graph, Node, Ref, refs_in
from sft.analysis.ir.symbolic import broadcast_shapes, same_shape
from sft.analysis.ir.targets import ATTENTION
from sft.analysis.passes.decompose_reductions import NodeSequence, wide_dtype
from sft.analysis.passes.layout import DimLayout
from sft.analysis.passes.layout_tracker import LayoutTracker, TrackedImage

__all__ = ["MATRIX_PRODUCTS", "expand_attention_dropout", "rewrite_linear", "rewrite_product"]

_MATMUL = "aten.matmul.default"
MATRIX_PRODUCTS = frozenset({_MATMUL, "aten.bmm.default", "aten.einsum.default"})


@dataclass(frozen=True, slots=True)
class _ContractionOperand:
    """An operand of a product.

    Attributes:
        letters: the letter of each of its dimensions.
        node: the node that holds it.
        layout: its layout in an image; ``None`` if it is not an image.
    """

    letters: str
    node: Node
    layout: DimLayout | None

    def dims(self, letter: str) -> tuple[int, ...]:
        """The node's dimensions that a letter runs over."""
        index = self.letters.index(letter)
        return (index,) if self.layout is None else self.layout.groups[index]

    def extent(self, letter: str) -> Any:
        """The extent of a letter."""
        return prod(self.node.shape[dim] for dim in self.dims(letter))

    def dims_of(self, letters: Sequence[str]) -> tuple[int, ...]:
        """The dimensions of several letters, in their order."""
        return tuple(dim for letter in letters for dim in self.dims(letter))


def _product_letters(node: Node, ranks: Sequence[int]) -> tuple[str, str, str] | None:
    """A letter for each dimension of the two operands and of the result; ``None`` if they broadcast or repeat one."""
    if node.target != "aten.einsum.default":
        if not ranks[0] == ranks[1] >= 3:
            return None
        shared, (row, column, inner) = ascii_letters[: ranks[0] - 2], list(ascii_letters[-3:])
        return shared + row + inner, shared + inner + column, shared + row + column
    operands, arrow, out = node.argument("equation").replace(" ", "").partition("->")
    terms = (*operands.split(","), out)
    if not arrow or len(terms) != 3 or any("." in term or len(set(term)) < len(term) for term in terms):
        return None
    return terms


def _decompose_product(
    node: Node, left: _ContractionOperand, right: _ContractionOperand, out: str, num_axes: int
) -> tuple[tuple[Node, ...], DimLayout | None] | None:
    """The nodes of a product, and the layout of its result if it is an image; ``None`` if no form of it streams."""
    if left.layout is not None and right.layout is not None:
        return _contract_pixels(node, left, right, out, num_axes)
    image, matrix = (left, right) if left.layout is not None else (right, left)
    return _mix_channels(node, image, matrix, out, num_axes)


def _contract_pixels(
    node: Node, left: _ContractionOperand, right: _ContractionOperand, out: str, num_axes: int
) -> tuple[tuple[Node, ...], None] | None:
    contracted = [letter for letter in left.letters if letter in right.letters and letter not in out]
    axes = [_axes_of_letters(factor, contracted, num_axes) for factor in (left, right)]
    shared = [letter for letter in out if letter in left.letters and letter in right.letters]
    groups = [letter for letter in shared if not left.dims(letter) == right.dims(letter) == (0,)]
    free = [[letter for letter in out if letter in factor.letters and letter not in shared] for factor in (left, right)]
    order = [*(letter for letter in shared if letter not in groups), *groups, *free[0], *free[1]]
    is_complete = sorted(order) == sorted(out) and set(left.letters + right.letters) == {*contracted, *out}
    if len(shared) != len(groups) + 1 or not is_complete or axes[0] != axes[1] or sorted(axes[0]) != list(range(num_axes)):
        return None
    channel_split = [
        _split_channels(factor, groups, free_letters, num_axes) for factor, free_letters in zip((left, right), free, strict=True)
    ]
    if None in channel_split or not same_shape([left.extent(g) for g in groups], [right.extent(g) for g in groups]):
        return None
    extents = {letter: (left if letter in left.letters else right).extent(letter) for letter in order}
    shape = tuple(extents[letter] for letter in order)
    arguments = (
        ("self", Ref(left.node.name)),
        ("other", Ref(right.node.name)),
        ("left", channel_split[0]),
        ("right", channel_split[1]),
        ("shape", shape[1:]),
        ("axes", num_axes),
    )
    product = replace(node, target="sft.contract_pixels", shape=shape, arguments=arguments)
    if order == list(out):
        return (product,), None
    product = replace(product, name=f"{node.name}__contracted")
    order_arguments = (("self", Ref(product.name)), ("order", tuple(order.index(letter) for letter in out)), ("shape", node.shape))
    return (product, replace(node, target="sft.restore_dims", arguments=order_arguments)), None


def _mix_channels(
    node: Node, image: _ContractionOperand, matrix: _ContractionOperand, out: str, num_axes: int
) -> tuple[tuple[Node, ...], DimLayout] | None:
    first_axis = len(image.node.shape) - num_axes
    pixels = [letter for letter in image.letters if any(dim >= first_axis for dim in image.dims(letter))]
    samples = [letter for letter in image.letters if image.dims(letter) == (0,)]
    groups = [letter for letter in out if letter in image.letters and letter in matrix.letters and letter not in samples]
    contracted = [letter for letter in image.letters if letter in matrix.letters and letter not in out]
    free = [letter for letter in out if letter not in image.letters]
    is_complete = sorted(matrix.letters) == sorted([*samples, *groups, *contracted, *free]) and sorted(out) == sorted(
        [*samples, *groups, *free, *pixels]
    )
    shared = [*samples, *groups, *contracted]
    if not is_complete or len(samples) != 1 or sorted(_axes_of_letters(image, pixels, num_axes)) != list(range(num_axes)):
        return None
    channel_split = _split_channels(image, groups, contracted, num_axes)
    if (
        channel_split is None
        or set(image.letters) != {*shared, *pixels}
        or not same_shape(*([f.extent(x) for x in shared] for f in (image, matrix)))
    ):
        return None
    inner = [prod(matrix.extent(letter) for letter in letters) for letters in (groups, free, contracted)]
    order = tuple(matrix.letters.index(letter) for letter in (*samples, *groups, *free, *contracted))
    # With the rank of an image, its first dimension counts as the batch.
    shape = (image.node.shape[0], *inner, 1)
    matrix_node = replace(
        matrix.node,
        name=f"{node.name}__matrix",
        kind="operator",
        target="sft.restore_dims",
        shape=shape,
        arguments=(("self", Ref(matrix.node.name)), ("order", order), ("shape", shape)),
        module_path=node.module_path,
        effect="",
    )
    channels = tuple(matrix.extent(letter) for letter in (*groups, *free)) or (1,)
    arguments = (
        ("self", Ref(image.node.name)),
        ("matrix", Ref(matrix_node.name)),
        ("part", channel_split),
        ("channels", channels),
        ("axes", num_axes),
    )
    product = replace(
        node, target="sft.mix_channels", shape=(image.node.shape[0], *channels, *image.node.shape[first_axis:]), arguments=arguments
    )
    shift = 1 + len(channels) - first_axis
    places: dict[str, tuple[int, ...]] = {letter: (1 + at,) for at, letter in enumerate((*groups, *free))}
    places |= {samples[0]: (0,), **{letter: tuple(dim + shift for dim in image.dims(letter)) for letter in pixels}}
    return (matrix_node, product), DimLayout(tuple(places[letter] for letter in out))


def _axes_of_letters(operand: _ContractionOperand, letters: Sequence[str], num_axes: int) -> list[int]:
    """Indices of the axes that letters run over; dimensions before the axes give negative numbers."""
    return [dim - (len(operand.node.shape) - num_axes) for dim in operand.dims_of(letters)]


def _split_channels(
    operand: _ContractionOperand, groups: Sequence[str], other_letters: Sequence[str], num_axes: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Channel dimensions of an operand as (batched over, contracted or free); ``None`` if a letter is not a channel."""
    batched, remaining = operand.dims_of(groups), operand.dims_of(other_letters)
    channels = range(1, len(operand.node.shape) - num_axes)
    if any(dim not in channels for dim in (*batched, *remaining)) or not all(isinstance(operand.node.shape[dim], int) for dim in channels):
        return None
    return batched, (*remaining, *(dim for dim in channels if dim not in (*batched, *remaining)))


def _decompose_linear(node: Node, matrix: Node, image: Node, axes: Axes) -> tuple[Node, Node]:
    """The kernel and the convolution for ``linear`` on an image with one dimension of channels.

    Args:
        node: the model's operator.
        matrix: its weight, ``[to, from]``.
        image: ``[N, from, axes...]``.
        axes: of the image.
    """
    ones = (1,) * axes.count
    shape = (*matrix.shape, *ones)
    kernel = replace(
        matrix,
        name=f"{node.name}__kernel",
        kind="operator",
        target="sft.align_dims",
        shape=shape,
        arguments=(("self", Ref(matrix.name)), ("shape", shape)),
        module_path=node.module_path,
    )
    arguments = (
        ("input", Ref(image.name)),
        ("weight", Ref(kernel.name)),
        ("bias", node.argument("bias")),
        ("stride", ones),
        ("padding", (0,) * axes.count),
        ("dilation", ones),
        ("groups", 1),
    )
    target, result_shape = f"aten.conv{axes.count}d.default", (image.shape[0], matrix.shape[0], *axes.of(image.shape))
    return kernel, replace(node, target=target, shape=result_shape, arguments=arguments)


def rewrite_product(tracker: LayoutTracker, node: Node) -> bool:
    """Decompose a matrix product contracted over all pixels, or over each pixel's channels; false if no form of it streams."""
    letters = _product_letters(node, [len(tracker.graph[name].shape) for name in node.operands])
    if letters is None or len(node.operands) != 2:
        return False
    left, right = (
        _ContractionOperand(term, tracker.nodes[image.node if image else name], image.layout if image else None)
        for name, image, term in zip(node.operands, map(tracker.images.get, node.operands), letters, strict=False)
    )
    product = _decompose_product(node, left, right, letters[2], tracker.axes.count)
    if product is None:
        return False
    nodes, layout = product
    tracker.add_nodes(nodes)
    return layout is None or tracker.bind(node, TrackedImage(nodes[-1].name, layout))


def rewrite_linear(tracker: LayoutTracker, node: Node) -> bool:
    """Rewrite a linear layer along the only dimension of channels, if that is the last dimension of the model's value."""
    image = tracker.images.get(node.argument("input").name)
    weight = node.argument("weight")
    parameters = [name for value in (weight, node.argument("bias")) for name in refs_in(value)]
    if image is None or any(name in tracker.images for name in parameters):
        return False
    if len(tracker.shape(image.node)) != tracker.axes.rank or image.layout.image_dim(-1) != 1:
        return False
    kernel, convolution = _decompose_linear(node, tracker.nodes[weight.name], tracker.nodes[image.node], tracker.axes)
    tracker.nodes[kernel.name] = kernel
    return tracker.put(convolution, image.layout)


def expand_attention_dropout(graph: Graph) -> Graph:
    """Decompose attention with dropout into two products, a softmax and a dropout; a graph without any is returned unchanged."""
    nodes = [new for node in graph.nodes for new in _expanded_attention(node, graph)]
    return replace(graph, nodes=tuple(nodes)) if len(nodes) > len(graph.nodes) else graph


def _expanded_attention(node: Node, graph: Graph) -> tuple[Node, ...]:
    """The nodes that replace attention with dropout; the node alone if it has none, or if its scale follows the image's size."""
    if node.target != ATTENTION or not node.argument("dropout_p", 0.0):
        return (node,)
    query, key, value = (graph[node.argument(name).name] for name in ("query", "key", "value"))
    scale = node.argument("scale")
    if scale is None and not isinstance(query.shape[-1], int):
        return (node,)
    sequence, dtype = NodeSequence(node), wide_dtype(node.dtype)
    query, key, value = (sequence.cast(x, dtype, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    if node.argument("enable_gqa", False):
        key, value = (_repeat_heads(sequence, x, query.shape[-3], name) for x, name in ((key, "keys"), (value, "values")))
    factor = 1 / sqrt(query.shape[-1]) if scale is None else scale
    query = sequence.add("scaled", "aten.mul.Tensor", query.shape, (("self", Ref(query.name)), ("other", factor)), dtype)
    turned = (*key.shape[:-2], key.shape[-1], key.shape[-2])
    key = sequence.add("turned", "aten.transpose.int", turned, (("self", Ref(key.name)), ("dim0", -2), ("dim1", -1)), dtype)
    rank = max(len(query.shape), len(key.shape))
    shape = (*broadcast_shapes((query.shape[:-2], key.shape[:-2]), rank - 2), query.shape[-2], key.shape[-1])
    weights = sequence.add("scores", _MATMUL, shape, (("self", Ref(query.name)), ("other", Ref(key.name))), dtype)
    weights = _mask_scores(sequence, weights, graph)
    # Rows without any key are zeros, as in torch's own decomposition.
    weights = sequence.add(
        "weights", "aten._safe_softmax.default", shape, (("self", Ref(weights.name)), ("dim", -1), ("dtype", None)), dtype
    )
    arguments = (("input", Ref(weights.name)), ("p", node.argument("dropout_p")), ("train", True))
    weights = sequence.add("kept", "aten.dropout.default", shape, arguments, dtype)
    result = sequence.add("mean", _MATMUL, node.shape, (("self", Ref(weights.name)), ("other", Ref(value.name))), dtype)
    sequence.cast(result, node.dtype, "rounded")
    return sequence.finish()


def _repeat_heads(sequence: NodeSequence, value: Node, num_heads: int, suffix: str) -> Node:
    """Keys or values of grouped-query attention, one head for each head of the queries."""
    shape = (*value.shape[:-3], num_heads, *value.shape[-2:])
    arguments = (("self", Ref(value.name)), ("repeats", num_heads // value.shape[-3]), ("dim", len(shape) - 3), ("output_size", None))
    return sequence.add(suffix, "aten.repeat_interleave.self_int", shape, arguments, value.dtype)


def _mask_scores(sequence: NodeSequence, scores: Node, graph: Graph) -> Node:
    """The scores after the mask of attention: added numbers, a table of the keys to read, or the keys up to the query's own position."""
    node, shape, dtype = sequence.node, scores.shape, scores.dtype
    this, mask = ("self", Ref(scores.name)), node.argument("attn_mask")
    if node.argument("is_causal", False):
        ones = sequence.add("ones", "aten.new_ones.default", shape[-2:], (this, ("size", shape[-2:])), dtype)
        table = sequence.add("causal", "aten.tril.default", ones.shape, (("self", Ref(ones.name)), ("diagonal", 0)), dtype)
    elif mask is None:
        return scores
    else:
        table = graph[mask.name]
        if table.dtype != "bool":
            addend = ("other", Ref(sequence.cast(table, dtype, "mask").name))
            return sequence.add("biased", "aten.add.Tensor", shape, (this, addend, ("alpha", 1)), dtype)
    dropped = sequence.add("dropped", "aten.logical_not.default", table.shape, (("self", Ref(table.name)),), "bool")
    return sequence.add("masked", "aten.masked_fill.Scalar", shape, (this, ("mask", Ref(dropped.name)), ("value", -inf)), dtype)
