"""Strides of a program's slots, as far as they are known before the program runs.

A slot has a shape and no strides: values of a program are contiguous, channels last, or views of either. :class:`SlotStrides` follows the
instructions in order and keeps the strides of results whose memory layout the kernels guarantee, on every device: products and norms of
matrices, copies, pointwise functions of row-major operands, and views of these. All other slots have unknown strides.

Strides of dimensions of extent 1 have no meaning, so they are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sft.common.torch_internals import OpOverload
from sft.lower.concat import sum_slices
from sft.lower.custom_ops.attention import fused_attention
from sft.lower.program import Instruction, Slot, slots_of

__all__ = ["ROW_MAJOR_COPIES", "SlotStrides", "is_row_major_copy"]

aten = torch.ops.aten

_Strides = tuple[int, ...]

#: Copies that are row-major for operands of every layout, clones into the contiguous format aside (:func:`is_row_major_copy`).
ROW_MAJOR_COPIES = (aten._reshape_copy.default, aten.select_backward.default, aten.slice_backward.default)

#: Operators of which the first result is row-major for operands of every layout.
_ROW_MAJOR_RESULTS = frozenset(
    {
        *ROW_MAJOR_COPIES,
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
    }
)

#: Operators of which all results have the layout of the first operand, if that is row-major.
_LIKE_FIRST_OPERAND = frozenset(
    {
        aten._softmax.default,
        aten._log_softmax.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.native_dropout.default,
    }
)

#: Pointwise operators with operands in the order of the iteration: the first one of full shape decides the layout of the result.
_LED_BY_FIRST_OPERAND = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})


def is_row_major_copy(instruction: Instruction) -> bool:
    """True for a clone into the contiguous format."""
    return instruction.function is aten.clone.default and instruction.keywords.get("memory_format") is torch.contiguous_format


class SlotStrides:
    """Known strides of slots, updated by each instruction in order.

    Args:
        row_major: slots of ports that are row-major.
    """

    def __init__(self, row_major: Iterable[Slot] = ()) -> None:
        self._strides: dict[int, _Strides] = {slot.number: _row_major_strides(slot.shape) for slot in row_major}

    def is_row_major(self, slot: Slot) -> bool:
        """True if a slot is known to be row-major."""
        strides = self._strides.get(slot.number)
        return strides is not None and _is_row_major(slot.shape, strides)

    def has_adjacent_channels(self, slot: Slot) -> bool:
        """True if the last dimension of a slot is known to be contiguous."""
        strides = self._strides.get(slot.number)
        return strides is not None and (strides[-1:] == (1,) or slot.shape[-1:] == (1,))

    def if_view(self, copy: Slot, source: Slot) -> SlotStrides:
        """Strides of a copy, and nothing else, as if it were a view of all of its source."""
        other = SlotStrides()
        if source.number in self._strides:
            other._strides[copy.number] = self._strides[source.number]
        return other

    def note(self, instruction: Instruction) -> None:
        """Derive the strides of the results of an instruction, as far as the operands and the operator determine them."""
        views = [out for out in instruction.outputs if out is not None and out.root != out.number]
        if views:
            self._note_views(instruction, views)
            return
        for position, out in enumerate(instruction.outputs):
            if out is None:
                continue
            if instruction.function is sum_slices:
                self._strides[out.number] = _ordered_strides(out.shape, instruction.arguments[3])
            elif len(out.shape) < 2 or self._has_row_major_result(instruction, position, out):
                self._strides[out.number] = _row_major_strides(out.shape)
            elif instruction.function is fused_attention and position == 0 and self._has_rows_of_heads(instruction.arguments[0]):
                _, heads, length, channels = out.shape
                self._strides[out.number] = (length * heads * channels, channels, heads * channels, 1)

    def _has_rows_of_heads(self, slot: Slot) -> bool:
        """True if samples, tokens, heads and channels follow each other in memory, as in slices of products; attention keeps this order."""
        strides = self._strides.get(slot.number)
        if strides is None or min(slot.shape) < 2:
            return False
        samples, heads, tokens, channels = strides
        return samples > tokens > heads > channels

    def _note_views(self, instruction: Instruction, views: Sequence[Slot]) -> None:
        operand = instruction.arguments[0] if instruction.arguments else None
        strides = self._strides.get(operand.number) if type(operand) is Slot else None
        if type(operand) is not Slot or strides is None:
            return
        viewed = _view_strides(instruction.function, instruction.arguments[1:], operand.shape, strides, views[0].shape)
        if viewed is not None:
            self._strides.update(dict.fromkeys((out.number for out in views), viewed))

    def _has_row_major_result(self, instruction: Instruction, position: int, out: Slot) -> bool:
        function = instruction.function
        if is_row_major_copy(instruction) or (position == 0 and function in _ROW_MAJOR_RESULTS):
            return True
        if function is torch.empty:
            return instruction.keywords.get("memory_format") is torch.contiguous_format
        operands = slots_of(instruction)
        if not operands:
            return False
        first = operands[0]
        if function in _LIKE_FIRST_OPERAND:
            return instruction.keywords.get("memory_format") is None and first.shape == out.shape and self.is_row_major(first)
        if type(function) is not OpOverload or torch.Tag.pointwise not in function.tags:
            return False
        if function in _LED_BY_FIRST_OPERAND and first.shape == out.shape and self.is_row_major(first):
            return True
        return all(len(operand.shape) < 2 or self.is_row_major(operand) for operand in operands)


def _row_major_strides(shape: Sequence[int]) -> _Strides:
    """Strides of a contiguous tensor.

    >>> _row_major_strides((4, 3, 2))
    (6, 2, 1)
    """
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


def _ordered_strides(shape: Sequence[int], order: Sequence[int]) -> _Strides:
    """Strides of a tensor of which the dimensions have this order in memory, outermost first.

    >>> _ordered_strides((4, 3, 2), (1, 0, 2))
    (2, 8, 1)
    """
    strides = _row_major_strides([shape[dim] for dim in order])
    return tuple(strides[order.index(dim)] for dim in range(len(order)))


def _is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if a tensor is contiguous.

    >>> _is_row_major((4, 1, 2), (2, 77, 1)), _is_row_major((4, 3), (1, 4))
    (True, False)
    """
    expected = _row_major_strides(shape)
    return 0 in shape or all(extent == 1 or stride == packed for extent, stride, packed in zip(shape, strides, expected, strict=True))


def _view_strides(
    function: Any, arguments: Sequence[Any], shape: Sequence[int], strides: _Strides, new_shape: Sequence[int]
) -> _Strides | None:
    """Strides of a view, from those of its base; ``None`` for views that are not followed.

    >>> _view_strides(aten.permute.default, ([0, 2, 1],), (4, 3, 2), (6, 2, 1), (4, 2, 3))
    (6, 1, 2)
    """
    steps = list(strides)
    if function in (aten.view.default, aten._unsafe_view.default):
        return _row_major_strides(new_shape) if _is_row_major(shape, strides) else None
    if function is aten.permute.default:
        return tuple(steps[dim] for dim in arguments[0])
    if function is aten.transpose.int:
        low, high = arguments
        steps[low], steps[high] = steps[high], steps[low]
    elif function is aten.t.default:
        steps.reverse()
    elif function in (aten.select.int, aten.unbind.int):
        del steps[arguments[0] if arguments else 0]
    elif function is aten.slice.Tensor:
        if len(arguments) > 3 and arguments[3] != 1:
            return None
    elif function is aten.unsqueeze.default:
        steps.insert(arguments[0] % len(new_shape), 1)
    elif function is aten.expand.default:
        num_new = len(new_shape) - len(shape)
        kept = [step if old == new else 0 for step, old, new in zip(steps, shape, new_shape[num_new:], strict=True)]
        steps = [0] * num_new + kept
    elif function not in (aten.alias.default, aten.split.Tensor, aten.split_with_sizes.default):
        return None
    return tuple(steps)
