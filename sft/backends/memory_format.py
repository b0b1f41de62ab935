"""Which slots are surely channels-last, as kernels need them.

A slot says its shape and its type, not its strides. Buffers that the lowering makes are channels-last, strips of sources are (they were
copied where they were not), and ATen's operators hand the layout of their first image on. What comes from elsewhere, such as the gradient
of an output, has the caller's layout; in front of a kernel it gets a copy, which the program counts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from sft.backends.def_use import DefUse, slots_in
from sft.backends.kernel_call import kernel_call_of
from sft.lower.concat import cat_slices
from sft.lower.program import Instruction, Port, Slot

__all__ = ["channels_last_slots"]

aten = torch.ops.aten

#: Operators whose result is laid out as one of their operands is, and which operand; None for those that want all images alike.
_FORMAT_PRESERVING_OPS: dict[Any, int | None] = {
    aten.slice.Tensor: 0,
    aten.convolution.default: 0,
    aten.convolution_backward.default: 1,
    aten.constant_pad_nd.default: 0,
    aten.clone.default: 0,
    aten._to_copy.default: 0,
    aten.relu.default: 0,
    aten.threshold_backward.default: None,
    aten.add.Tensor: None,
    aten.sub.Tensor: None,
    aten.mul.Tensor: 0,
    aten.addcmul.default: 1,
    aten.cat.default: None,
    cat_slices: None,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.max_pool2d_with_indices.default: 0,
    aten.max_pool3d_with_indices.default: 0,
    aten.max_pool2d_with_indices_backward.default: 1,
    aten.max_pool3d_with_indices_backward.default: 1,
    aten.avg_pool2d.default: 0,
    aten.avg_pool2d_backward.default: 1,
    aten.upsample_bilinear2d.default: 0,
    aten.upsample_nearest2d.default: 0,
}
_FORMATS = (torch.channels_last, torch.channels_last_3d)


def channels_last_slots(listing: DefUse, laid_out: Collection[Port]) -> frozenset[int]:
    """Numbers of the slots that are channels-last.

    Args:
        listing: the program.
        laid_out: ports that are bound to such images.
    """
    found = {slot.number for port, slot in listing.ports.items() if port in laid_out}
    for instruction in listing.instructions:
        for out in instruction.outputs:
            if out is not None and len(out.shape) in (4, 5) and (out.shape[1] == 1 or _is_channels_last_slot(instruction, found)):
                found.add(out.number)
    return frozenset(found)


def _is_channels_last_slot(instruction: Instruction, known: Collection[int]) -> bool:
    function = instruction.function
    if kernel_call_of(function) is not None:
        return True
    asked: Any = instruction.keywords.get("memory_format")
    if asked is not None:
        return asked in _FORMATS
    if function not in _FORMAT_PRESERVING_OPS:
        return False
    place = _FORMAT_PRESERVING_OPS[function]
    if place is None:
        images = [slot for slot in slots_in(instruction.arguments) if len(slot.shape) in (4, 5)]
        return bool(images) and all(slot.number in known for slot in images)
    operand = instruction.arguments[place]
    return isinstance(operand, Slot) and operand.number in known
