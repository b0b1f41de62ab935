"""``decompose_linear`` along the channels of an image: a convolution with a kernel of one pixel."""

from __future__ import annotations

from dataclasses import replace

from sft.analysis.axes import Axes
from sft.analysis.graph import Node, Ref

__all__ = ["decompose_linear"]


def decompose_linear(node: Node, matrix: Node, image: Node, axes: Axes) -> tuple[Node, Node]:
    """The kernel and the convolution that stand for ``decompose_linear`` on an image with one dimension of channels.

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
    target, made = f"aten.conv{axes.count}d.default", (image.shape[0], matrix.shape[0], *axes.of(image.shape))
    return kernel, replace(node, target=target, shape=made, arguments=arguments)
