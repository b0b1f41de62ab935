"""Faster calls of PyTorch's libraries in programs for a CUDA device: fused convolutions, gradients of frozen norms, moments.

*Convolutions.* A convolution and its ReLU become one call of cuDNN (:mod:`sft.backends.convolution_relu`).

The call takes the position of the convolution, so no instruction moves, and no value lives longer than before. The instruction of the ReLU
vanishes if it is in place; a ReLU into a buffer of carried rows becomes a copy:

.. code-block:: text

    s = convolution(x, w, b)        s = convolution_relu(x, w, b)
    relu_(s)                                                                in place
    t = relu(s)                     t = convolution_relu(x, w, b)           into a new tensor
    clamp_min(s, 0, out=rows)       copy_(rows, s)                          into a buffer
    add_(s, z); relu_(s)            s = convolution_add_relu(x, w, b, z)    after a sum: the shortcut of a residual block

No other instruction may read the convolution's own result, or the sum. An addend must be computed before the convolution, and must not
be written until the sum. The derivative of a ReLU needs only the ReLU's result.

Only convolutions in one group are fused: those of several groups, and depthwise ones, have kernels of their own in ATen. Images are
channels last, and have at most 2^31 - 1 elements, as ATen divides larger ones.

*Frozen norms.* ``native_batch_norm_backward`` in evaluation mode computes the image's gradient in a kernel of mixed element types, which
takes 551 of 1,525 ms of a step of ResNet-18 on an H100 (``benchmarks/results/*-h100-gpu-kernels.md``). The gradient of an affine map of
each channel is the map without its shift, which the forward operator computes at the memory's bandwidth:

.. code-block:: text

    dx, dw, db = native_batch_norm_backward(dy, x, w, mean, var)
                                    _, dw, db = native_batch_norm_backward(dy, x, w, mean, var)      sums alone, if a gradient is needed
                                    dx = native_batch_norm(dy, w, no bias, zeros, var)

*Gradients of biases.* The sums of a gradient over its pixels, for which ATen takes up to the time of the weight's gradient, are those of
wide rows (:func:`sft.lower.custom_ops.statistics.channel_sums`). So are the moments of channels in strips
(:func:`sft.lower.custom_ops.statistics.channel_var_mean`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from sft.backends.convolution_relu import convolution_add_relu, convolution_relu
from sft.backends.def_use import DefUse, slots_in
from sft.backends.pattern import MatchContext, Rewrite
from sft.lower.custom_ops.statistics import (
    biased_var_mean,
    channel_sums,
    channel_sums_bytes,
    channel_var_mean,
    channel_var_mean_bytes,
)
from sft.lower.program import Instruction, Slot

__all__ = [
    "match_channel_moments",
    "match_channel_sums",
    "match_convolution_relus",
    "match_frozen_norm_image_gradients",
]

aten = torch.ops.aten

_MAX_ELEMENTS = 2**31 - 1
#: Elements from which moments of wide rows are faster.
_LEAST_MOMENT_ELEMENTS = 2**21
#: Dimension of the rows of an image.
_ROWS = 2


def match_convolution_relus(context: MatchContext) -> Iterator[Rewrite]:
    """Convolutions with a result that only a ReLU reads, or a sum before it."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """The sum of a convolution's result and another value.

    Attributes:
        at: position.
        addend: the other value.
        view_at: position of the instruction that makes the addend as a view after the convolution; ``None`` if it is there before.
        out: the sum.
    """

    at: int
    addend: Slot
    view_at: int | None
    out: Slot


def _fused(context: MatchContext, at: int, call: Instruction, out: Slot) -> Rewrite | None:
    """The rewrite of a convolution and the ReLU that reads its result, or its sum; None if another instruction may read it."""
    total = _sum_of(context, at, out)
    operand, removed = (out, {at}) if total is None else (total.out, {at, total.at})
    following = _next_access(context, operand, max(removed))
    if following is None:
        return None
    position, is_private = following
    relu = context.def_use.instructions[position]
    if relu.arguments[:1] != (operand,):
        return None
    result: Slot | None = operand
    copy: tuple[Instruction, ...] = ()
    if relu.function is aten.relu.default and is_private:
        result = _relu_result(relu, operand)
    elif relu.function is aten.clamp_min.out and relu.arguments[1] == 0 and is_private:
        rows = relu.writes[0]
        copy = (Instruction(aten.copy_.default, (rows, operand), {}, (), (rows,), 0, 0, 0, relu.owner),)
    elif relu.function is not aten.relu_.default:
        return None
    if result is None:
        return None
    fused = _instruction(call, result, None if total is None else total.addend)
    view: tuple[Instruction, ...] = ()
    if total is not None and total.view_at is not None:
        view, removed = (context.def_use.instructions[total.view_at],), removed | {total.view_at}
    return Rewrite(removed=frozenset((*removed, position)), inserted={at: (*view, fused), position: copy})


def _next_access(context: MatchContext, slot: Slot, after: int) -> tuple[int, bool] | None:
    """The next position that accesses a slot's elements, and whether it is the only one; None if there is none, or it is claimed."""
    def_use = context.def_use
    later = [position for position in def_use.accesses(slot) if position > after]
    if not later or later[0] in context.claimed:
        return None
    return later[0], len(later) == 1 and slot.root not in def_use.outside and not _is_viewed(def_use, slot)


def _sum_of(context: MatchContext, at: int, out: Slot) -> _Sum | None:
    """The sum with an addend that is there when the convolution at this position runs; None if the next access is no such sum."""
    following = _next_access(context, out, at)
    if following is None:
        return None
    position, is_private = following
    add = context.def_use.instructions[position]
    if add.function not in (aten.add_.Tensor, aten.add.Tensor) or len(add.arguments) != 2 or add.keywords:
        return None
    total = out if add.function is aten.add_.Tensor else add.outputs[0]
    others = [value for value in add.arguments if value != out]
    if total is None or len(others) != 1 or not isinstance(others[0], Slot):
        return None
    if (add.arguments[0] != out and add.function is aten.add_.Tensor) or (total is not out and not is_private):
        return None
    addend = others[0]
    fits = (addend.shape, addend.dtype) == (out.shape, out.dtype) == (total.shape, total.dtype) and addend.root != out.root
    if not fits or not context.is_channels_last(addend) or context.def_use.is_written_between(addend, at, position):
        return None
    made = context.def_use.makers.get(addend.number, -1)
    if made < at:
        return _Sum(at=position, addend=addend, view_at=None, out=total)
    return _Sum(at=position, addend=addend, view_at=made, out=total) if _can_move_view(context, made, at) else None


def _can_move_view(context: MatchContext, made: int, at: int) -> bool:
    """True if the instruction at ``made`` is a view of rows of one image, which is contiguous, and whose operand is there at ``at``."""
    view = context.def_use.instructions[made]
    sources = list(slots_in((view.arguments, view.keywords)))
    if view.function is not aten.slice.Tensor or len(sources) != 1 or view.writes or made in context.claimed:
        return False
    return view.arguments[1] == _ROWS and sources[0].shape[0] == 1 and context.def_use.makers.get(sources[0].number, -1) < at


def _relu_result(relu: Instruction, operand: Slot) -> Slot | None:
    """The result of a ReLU that can take the place of its operand."""
    (out,) = relu.outputs
    return out if out is not None and out.root == out.number and (out.shape, out.dtype) == (operand.shape, operand.dtype) else None


def _is_viewed(def_use: DefUse, slot: Slot) -> bool:
    """True if an instruction makes a view of a slot."""
    return any(out is not None and out.root == slot.root and out != slot for i in def_use.instructions for out in i.outputs)


def _instruction(call: Instruction, result: Slot, addend: Slot | None) -> Instruction:
    """The fused call in place of a convolution. Without a bias, ATen's operator makes one of zeros."""
    x, weight, bias, stride, padding, dilation, *_, groups = call.arguments
    scratch_bytes = call.scratch_bytes + (weight.shape[0] * weight.dtype.itemsize if bias is None else 0)
    operands = (x, weight, bias) if addend is None else (x, weight, bias, addend)
    function = convolution_relu if addend is None else convolution_add_relu
    arguments = (*operands, stride, padding, dilation, groups)
    return Instruction(function, arguments, {}, (result,), (), call.flops, result.num_bytes, scratch_bytes, call.owner)


def match_frozen_norm_image_gradients(context: MatchContext) -> Iterator[Rewrite]:
    """Gradients of batch norms in evaluation mode with respect to the image."""
    if context.fusion_device is None:
        return
    for at, call in list(context.unclaimed_calls(aten.native_batch_norm_backward.default)):
        is_training, image = call.arguments[7], call.outputs[0]
        if not is_training and image is not None and all(out is None or out.root == out.number for out in call.outputs):
            yield Rewrite(removed=frozenset((at,)), inserted={at: tuple(_gradient_calls(context, call, image))})


def _gradient_calls(context: MatchContext, call: Instruction, image: Slot) -> Iterator[Instruction]:
    gradient, _, weight, mean, variance, *_, eps, (_, *mask) = call.arguments
    sums = call.outputs[1:]
    if any(out is not None for out in sums):
        num_bytes = sum(out.num_bytes for out in sums if out is not None)
        arguments = (*call.arguments[:-1], [False, *mask])
        yield Instruction(call.function, arguments, {}, (None, *sums), (), 0, num_bytes, call.scratch_bytes, call.owner)
    zeros = context.builder.slot(mean.shape, mean.dtype)
    yield Instruction(aten.zeros_like.default, (mean,), {}, (zeros,), (), 0, zeros.num_bytes, 0, call.owner)
    arguments = (gradient, weight, None, zeros, variance, 0.0, eps)
    function = aten._native_batch_norm_legit_no_training.default
    yield Instruction(function, arguments, {}, (image, None, None), (), 0, image.num_bytes, 0, call.owner)


def match_channel_sums(context: MatchContext) -> Iterator[Rewrite]:
    """Sums of images over all dimensions but the channels: gradients of biases."""
    if context.fusion_device is None:
        return
    for at, call in list(context.unclaimed_calls(aten.sum.dim_IntList)):
        image, dims, *others = call.arguments
        out = call.outputs[0]
        is_over_pixels = len(image.shape) in (4, 5) and list(dims) == [0, *range(2, len(image.shape))]
        if out is None or others or not is_over_pixels or len(out.shape) != 1 or not context.is_channels_last(image):
            continue
        scratch_bytes = max(call.scratch_bytes, channel_sums_bytes(image.shape, out.dtype))
        sums = Instruction(channel_sums, (image, out.dtype), {}, (out,), (), 0, out.num_bytes, scratch_bytes, call.owner)
        yield Rewrite(removed=frozenset((at,)), inserted={at: (sums,)})


def match_channel_moments(context: MatchContext) -> Iterator[Rewrite]:
    """Variances and means of each channel, over all samples."""
    if context.fusion_device is None:
        return
    for at, call in list(context.unclaimed_calls(biased_var_mean)):
        (split, dims), (variance, mean) = call.arguments, call.outputs
        view = context.def_use.maker(split)
        if view is None or view.function is not aten.view.default or len(split.shape) not in (5, 6) or variance is None or mean is None:
            continue
        image = view.arguments[0]
        is_over_samples = dims[0] == 0 or image.shape[0] == 1
        is_large = prod(image.shape) >= _LEAST_MOMENT_ELEMENTS
        if split.shape[1] != image.shape[1] or not is_large or not is_over_samples or not context.is_channels_last(image):
            continue
        scratch_bytes = max(call.scratch_bytes, channel_var_mean_bytes(image.shape, image.dtype))
        arguments = (image, variance.shape)
        moments = Instruction(channel_var_mean, arguments, {}, call.outputs, (), 0, call.num_bytes, scratch_bytes, call.owner)
        yield Rewrite(removed=frozenset((at,)), inserted={at: (moments,)})
