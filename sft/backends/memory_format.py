"""Memory-format inference: the slots of a program that are known to be channels-last.

A slot has a shape and a dtype but no strides. Buffers of the lowering are channels-last, and so are strips of sources, which are copied if
necessary. ATen's operators propagate the layout of their first image. Tensors of the caller, such as the gradient of an output, have the
caller's layout; a kernel reads a channels-last copy of them, which the program counts.

On a CUDA device, images of 2^31 elements are too large for some of ATen's kernels. These calls get row-major copies of blocks of channels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch

from sft.backends.convolution_relu import convolution_add_relu, convolution_relu
from sft.backends.def_use import DefUse, slots_in
from sft.backends.kernel_call import kernel_call_of
from sft.backends.pattern import MatchContext, Rewrite
from sft.lower.concat import cat_slices
from sft.lower.custom_ops.statistics import affine_channels
from sft.lower.custom_ops.windows import RowMajorCall, average_pool_gradient, max_pool_of_one_channel
from sft.lower.program import Instruction, Port, Slot

__all__ = ["channels_last_slots", "match_large_images"]

aten = torch.ops.aten

#: Operators that propagate the memory format of an operand, and the operand's index; None if all image operands must share the format.
_FORMAT_PRESERVING_OPS: dict[Any, int | None] = {
    aten.slice.Tensor: 0,
    aten.convolution.default: 0,
    convolution_relu: 0,
    convolution_add_relu: 0,
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
    affine_channels: 0,
    aten.cat.default: None,
    cat_slices: None,
    aten._native_batch_norm_legit_no_training.default: 0,
    aten.native_batch_norm_backward.default: 1,
    aten.max_pool2d_with_indices.default: 0,
    max_pool_of_one_channel: 0,
    aten.max_pool3d_with_indices.default: 0,
    aten.max_pool2d_with_indices_backward.default: 1,
    aten.max_pool3d_with_indices_backward.default: 1,
    aten.avg_pool2d.default: 0,
    aten.avg_pool2d_backward.default: 1,
    average_pool_gradient: 1,
    aten.upsample_bilinear2d.default: 0,
    aten.upsample_nearest2d.default: 0,
}
#: Operators whose CUDA kernels for channels last count elements in 32 bits: they fail, or leave elements out (pytorch/pytorch#141831,
#: #185788). Kernels of gradients for row-major images do so as well; those of results count the elements of a channel.
_INDEXED_OPS = (
    aten.max_pool2d_with_indices_backward.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
)
#: Elements of an image from which they do.
_MIN_LARGE_ELEMENTS = 2**31 - 1
_FORMATS = (torch.channels_last, torch.channels_last_3d)


def channels_last_slots(def_use: DefUse, laid_out: Collection[Port]) -> frozenset[int]:
    """Numbers of the slots that are channels-last.

    Args:
        def_use: the program.
        laid_out: ports bound to channels-last images.
    """
    channels_last = {slot.number for port, slot in def_use.ports.items() if port in laid_out}
    for instruction in def_use.instructions:
        for out in instruction.outputs:
            if out is not None and len(out.shape) in (4, 5) and (out.shape[1] == 1 or _is_channels_last_slot(instruction, channels_last)):
                channels_last.add(out.number)
    return frozenset(channels_last)


def match_large_images(context: MatchContext) -> Iterator[Rewrite]:
    """Calls on a CUDA device whose kernels for channels last cannot index all elements: they get row-major copies."""
    if context.fusion_device is None:
        return
    for function in _INDEXED_OPS:
        for at, call in list(context.unclaimed_calls(function)):
            (out,) = call.outputs
            if out is None:
                continue
            images = [slot for slot in slots_in(call.arguments) if len(slot.shape) == 4]
            # The gradient of a pool counts the elements of the result's gradient alone.
            indexed = images[:1] if function is aten.max_pool2d_with_indices_backward.default else [*images, out]
            if max(math.prod(slot.shape) for slot in indexed) >= _MIN_LARGE_ELEMENTS:
                name = str(function.overloadpacket).removeprefix("aten.")
                operator = RowMajorCall.of(name, [slot.shape for slot in (*images, out)], _MIN_LARGE_ELEMENTS - 1)
                share = operator.images_per_call * operator.channels_per_call / math.prod(out.shape[:2])
                scratch_bytes = math.ceil(sum(slot.num_bytes for slot in (*images, out)) * share)
                yield Rewrite(removed=frozenset((at,)), inserted={at: (call._replace(function=operator, scratch_bytes=scratch_bytes),)})


def _is_channels_last_slot(instruction: Instruction, known: Collection[int]) -> bool:
    function = instruction.function
    if kernel_call_of(function) is not None:
        return True
    memory_format: Any = instruction.keywords.get("memory_format")
    if memory_format is not None:
        return memory_format in _FORMATS
    if function not in _FORMAT_PRESERVING_OPS:
        return False
    index = _FORMAT_PRESERVING_OPS[function]
    if index is None:
        images = [slot for slot in slots_in(instruction.arguments) if len(slot.shape) in (4, 5)]
        return bool(images) and all(slot.number in known for slot in images)
    operand = instruction.arguments[index]
    return isinstance(operand, Slot) and operand.number in known
