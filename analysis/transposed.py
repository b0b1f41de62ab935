"""Transposed convolutions whose rows overlap, taken apart into products and sums.

A transposed convolution spreads each input row over ``kernel`` output rows, ``stride`` apart from those of the next. Where they overlap,
a strip that computed its rows from all input rows that reach them would multiply those at the seams twice. What is carried from strip to
strip must be products, then, not input rows. So the operator becomes

* ``conv_transpose`` one row tall: for each row of the input its products with every row of the kernel, as channels. The kernel
  ``[Cin, Cout / g, kh, ...]`` is laid out as ``[Cin, kh * Cout / g, 1, ...]`` for it (``sft.kernel_rows``, once a step). As many
  multiplications as the operator itself, none of them twice; along the other axes it is what it was.
* ``sft.overlap_add``: each output row is the sum of the products that land on it, and the bias.

In half precision all of this is in single precision: products that were rounded before they are summed up would be off by more than the
operator's own rounding, and where a ReLU follows, of another sign. (Half numbers times half numbers are exact in TF32, too.)

Rows that do not overlap (a kernel of 2 with a stride of 2) need none of this: then an output row is one input row's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sft.analysis.axes import ROWS
from sft.analysis.graph import Graph, Node, Ref
from sft.analysis.operators.base import axis_entry, symbolic_axis_entry

__all__ = ["decompose_transposed_convolutions"]


def decompose_transposed_convolutions(graph: Graph) -> Graph:
    """The graph with every transposed convolution of images whose rows overlap replaced by its parts."""
    depends = graph.descendants(graph.inputs)
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += (
            _decompose_transposed_convolution(node, graph)
            if _has_overlapping_rows(node, graph) and node.argument("weight").name not in depends
            else [node]
        )
    return replace(graph, nodes=tuple(nodes))


def _has_overlapping_rows(node: Node, graph: Graph) -> bool:
    if not node.target.startswith(f"aten.conv_transpose{graph.axes.count}d.") or len(node.shape) != graph.axes.rank:
        return False
    kernel, stride, dilation = (axis_entry(node.argument(name), ROWS) for name in ("kernel_size", "stride", "dilation"))
    return dilation * (kernel - 1) + 1 > stride


def _decompose_transposed_convolution(node: Node, graph: Graph) -> list[Node]:
    weight, image = graph[node.argument("weight").name], graph[node.argument("input").name]
    groups, count = node.argument("groups"), graph.axes.count
    wider: list[Node] = []
    if node.dtype in _HALF_DTYPES:
        wider = [_widened_operand(value, node, name) for value, name in ((weight, "weight"), (image, "input"))]
        weight, image = wider
    inputs, channels, kernel, *rest = weight.shape
    shape = (inputs, channels * kernel, 1, *rest)
    rows = replace(
        weight,
        name=f"{node.name}__kernel_rows",
        kind="operator",
        target="sft.kernel_rows",
        shape=shape,
        arguments=(("self", Ref(weight.name)),),
        module_path=node.module_path,
        effect="",
    )
    across = {name: _without_rows(node.argument(name), alone, count) for name, alone in _NEUTRAL_ARGUMENTS.items()}
    arguments = (
        ("input", Ref(image.name)),
        ("weight", Ref(rows.name)),
        ("bias", None),
        *((name, across[name]) for name in ("stride", "padding", "output_padding")),
        ("groups", groups),
        ("dilation", across["dilation"]),
        ("kernel_size", shape[2:]),
    )
    products = replace(
        node,
        name=f"{node.name}__products",
        shape=(node.shape[0], node.shape[1] * kernel, image.shape[2], *node.shape[3:]),
        dtype=image.dtype,
        itemsize_bytes=image.itemsize_bytes,
        arguments=arguments,
    )
    spread = tuple(
        (_ARGUMENT_NAMES.get(name, name), symbolic_axis_entry(node.argument(name), ROWS)) for name in ("kernel_size", *_NEUTRAL_ARGUMENTS)
    )
    sums = replace(
        node,
        target="sft.overlap_add",
        arguments=(("self", Ref(products.name)), ("bias", node.argument("bias")), ("groups", groups), ("spread", spread)),
    )
    return [*wider, rows, products, sums]


def _widened_operand(value: Node, node: Node, name: str) -> Node:
    """What the operator reads, in single precision."""
    return replace(
        value,
        name=f"{node.name}__{name}",
        kind="operator",
        target="aten._to_copy.default",
        dtype="float32",
        itemsize_bytes=4,
        arguments=(("self", Ref(value.name)), ("dtype", "float32")),
        module_path=node.module_path,
        effect="",
    )


_HALF_DTYPES = frozenset({"float16", "bfloat16"})
#: Arguments with an entry for each axis, and what they are along one that is not spread.
_NEUTRAL_ARGUMENTS = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
_ARGUMENT_NAMES = {"kernel_size": "kernel"}


def _without_rows(value: Any, alone: int, count: int) -> tuple[Any, ...]:
    """An argument for each axis with the rows left alone."""
    return (alone, *(symbolic_axis_entry(value, axis) for axis in range(1, count)))
