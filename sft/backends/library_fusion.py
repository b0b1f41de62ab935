"""Fusion of a convolution and its ReLU into one call of cuDNN, in programs for a CUDA device (:mod:`sft.backends.convolution_relu`).

The call takes the position of the convolution, so no instruction moves, and no value lives longer than before. The instruction of the ReLU
vanishes if it is in place; a ReLU into a buffer of carried rows becomes a copy:

.. code-block:: text

    s = convolution(x, w, b)        s = convolution_relu(x, w, b)
    relu_(s)                                                                in place
    t = relu(s)                     t = convolution_relu(x, w, b)           into a new tensor
    clamp_min(s, 0, out=rows)       copy_(rows, s)                          into a buffer

No other instruction may read the convolution's own result. The derivative of a ReLU needs only the ReLU's result.

Only convolutions in one group are fused: those of several groups, and depthwise ones, have kernels of their own in ATen. Images are
channels last, and have at most 2^31 - 1 elements, as ATen divides larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from sft.backends.convolution_relu import convolution_relu
from sft.backends.def_use import DefUse
from sft.backends.pattern import MatchContext, Rewrite
from sft.lower.program import Instruction, Slot

__all__ = ["match_convolution_relus"]

aten = torch.ops.aten

_MAX_ELEMENTS = 2**31 - 1


def match_convolution_relus(context: MatchContext) -> Iterator[Rewrite]:
    """Convolutions whose result only a ReLU reads."""
    device = context.fusion_device
    if device is None:
        return
    for at, call in list(context.unclaimed_calls(aten.convolution.default)):
        out = call.outputs[0]
        if out is not None and out.root == out.number and _is_fusable(context, call) and device.fuses(out.dtype, len(out.shape) - 2):
            rewrite = _fused(context, at, call, out)
            if rewrite is not None:
                yield rewrite


def _is_fusable(context: MatchContext, call: Instruction) -> bool:
    """True for a convolution that cuDNN's fused call computes as ATen does."""
    (out,), (x, weight, bias, *_, is_transposed, _, groups) = call.outputs, call.arguments
    slots = [slot for slot in (out, x, weight, bias) if slot is not None]
    if is_transposed or groups != 1 or not all(isinstance(slot, Slot) for slot in slots):
        return False
    sizes = [prod(slot.shape) for slot in slots]
    return len({slot.dtype for slot in slots}) == 1 and min(sizes) > 0 and max(sizes) <= _MAX_ELEMENTS and context.is_channels_last(x)


def _fused(context: MatchContext, at: int, call: Instruction, out: Slot) -> Rewrite | None:
    """The rewrite of a convolution and the ReLU that reads its result; None if another instruction may read it."""
    def_use = context.def_use
    later = [position for position in def_use.accesses(out) if position > at]
    if not later or later[0] in context.claimed:
        return None
    relu = def_use.instructions[later[0]]
    is_private = len(later) == 1 and out.root not in def_use.outside and not _is_viewed(def_use, out)
    if relu.arguments[:1] != (out,):
        return None
    result: Slot | None = out
    copy: tuple[Instruction, ...] = ()
    if relu.function is aten.relu.default and is_private:
        result = _relu_result(relu, out)
    elif relu.function is aten.clamp_min.out and relu.arguments[1] == 0 and is_private:
        rows = relu.writes[0]
        copy = (Instruction(aten.copy_.default, (rows, out), {}, (), (rows,), 0, 0, 0, relu.owner),)
    elif relu.function is not aten.relu_.default:
        return None
    if result is None:
        return None
    return Rewrite(removed=frozenset((at, later[0])), inserted={at: (_instruction(call, result),), later[0]: copy})


def _relu_result(relu: Instruction, operand: Slot) -> Slot | None:
    """The result of a ReLU that can take the place of its operand."""
    (out,) = relu.outputs
    return out if out is not None and out.root == out.number and (out.shape, out.dtype) == (operand.shape, operand.dtype) else None


def _is_viewed(def_use: DefUse, slot: Slot) -> bool:
    """True if an instruction makes a view of a slot."""
    return any(out is not None and out.root == slot.root and out != slot for i in def_use.instructions for out in i.outputs)


def _instruction(call: Instruction, result: Slot) -> Instruction:
    """The fused call in place of a convolution. Without a bias, ATen's operator makes one of zeros."""
    x, weight, bias, stride, padding, dilation, *_, groups = call.arguments
    zeros_bytes = weight.shape[0] * weight.dtype.itemsize if bias is None else 0
    arguments = (x, weight, bias, stride, padding, dilation, groups)
    scratch_bytes = call.scratch_bytes + zeros_bytes
    return Instruction(convolution_relu, arguments, {}, (result,), (), call.flops, result.num_bytes, scratch_bytes, call.owner)
