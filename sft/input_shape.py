"""What a caller says of the inputs: shapes, tensors that stand for them, or the inputs themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sft.errors import InputError
from sft.inputs import check_extents, is_streamable_input
from sft.units import is_integer

__all__ = ["InputShape", "dtypes_of", "examples_of", "input_grads_of", "shapes_of"]

InputShape = Any


def examples_of(inputs: Any) -> tuple[Any, ...]:
    """The inputs themselves, where one of them is to be read in strips; empty where they are shapes."""
    if is_streamable_input(inputs):
        return (inputs,)
    is_several = isinstance(inputs, (list, tuple)) and any(is_streamable_input(value) for value in inputs)
    return tuple(inputs) if is_several else ()


def _items(input_shape: InputShape) -> list[Any]:
    """What stands for each input: a shape or a tensor."""
    if isinstance(input_shape, torch.Tensor):
        return [input_shape]
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str) or not input_shape:
        raise InputError(f"input_shape {input_shape!r}: give (N, C, H, W), or a sequence of such shapes")
    items = list(input_shape)
    is_each = [isinstance(item, (torch.Tensor, Sequence)) and not isinstance(item, str) for item in items]
    return items if all(is_each) else [items]


def dtypes_of(input_shape: InputShape) -> list[torch.dtype | None]:
    """The element type of each input that holds whole numbers; the others have the model's."""
    given = [item.dtype if isinstance(item, torch.Tensor) else None for item in _items(input_shape)]
    return [None if dtype is None or dtype.is_floating_point else dtype for dtype in given]


def input_grads_of(input_shape: InputShape) -> tuple[bool, ...]:
    """Of which inputs the gradient is wanted."""
    return tuple(isinstance(item, torch.Tensor) and item.requires_grad for item in _items(input_shape))


def shapes_of(input_shape: InputShape) -> tuple[tuple[int | None, ...], ...]:
    """One shape, or several, with ``None`` for extents that vary."""
    shapes = [tuple(item.shape) if isinstance(item, torch.Tensor) else tuple(item) for item in _items(input_shape)]
    shapes = [tuple(int(extent) if is_integer(extent) else extent for extent in shape) for shape in shapes]
    if not any(shapes):
        raise InputError(f"input_shape {shapes[0]}: no extents, expected at least one, the batch; (N, C, H, W) for images")
    for shape in shapes:
        for extent in shape:
            if extent is not None and not (is_integer(extent) and extent >= 1):
                raise InputError(f"input_shape {shape}: extent {extent!r} is not a positive integer (or None for one that varies)")
        check_extents("input_shape", shape)
    return tuple(shapes)
