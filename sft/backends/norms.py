"""Rewrites of norms: frozen batch norms, and the parts of decomposed norms (:mod:`sft.analysis.passes.decompose_norms`).

Norm, residual sum and ReLU become one pass over the image. The backward pass becomes two: the ReLU's mask with the sums that make the
gradients of scale and shift, and the mask with the input's gradient.

Without kernels, affine maps of half-precision images are calls of ATen's norm on a GPU (:mod:`sft.lower.custom_ops.statistics`), so that
no image is written in fp32:

.. code-block:: text

    w = cast(x); addcmul(shift, w, scale, out=w); y = cast(w)      y = affine_channels(x, scale, shift)
    p = mul(cast(dy), x); dw = sum(p); db = sum(cast(dy))          dw, db = affine_gradient_sums(dy, x)
    w = cast(dy); mul_(w, scale); add_(dx, w)                      add_(dx, affine_channels(dy, scale, None))
    w = addcmul(shift, x, scale); add_(dx, w)                      add_(dx, affine_channels(x, scale, shift))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from sft.backends.fusion import Epilogue, ReluGradPrologue, match_relu_grad
from sft.backends.gradient_sums import deliver_gradients
from sft.backends.kernel_call import allocation, kernel_instruction
from sft.backends.norm_calls import AffineCall, FrozenNormCall, MomentsCall, num_norm_splits
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import ShapeClass, pixel_class
from sft.lower.custom_ops.statistics import affine_channels, affine_gradient_sums, biased_var_mean
from sft.lower.program import Instruction, Slot

__all__ = [
    "match_affine_gradients",
    "match_affines",
    "match_frozen_norm_gradients",
    "match_frozen_norms",
    "match_half_affine_gradients",
    "match_half_affines",
    "match_moments",
]

aten = torch.ops.aten


def _selects_kernel(context: MatchContext, operator: str, image: Slot, fused: tuple[str, ...] = ()) -> bool:
    """True if a kernel runs for an operation on an image."""
    numbers = context.selector.number_format_of(image.dtype)
    if numbers is None or len(image.shape) != 4 or not all(image.shape):
        return False
    num_pixels = math.prod(image.shape) // image.shape[1]
    channels = (image.shape[1], image.shape[1])
    shape_class = ShapeClass(operator=operator, fused=fused, numbers=numbers, channels=channels, pixels=pixel_class(num_pixels))
    return context.selector.selects_kernel(shape_class)


def match_frozen_norms(context: MatchContext) -> Iterator[Rewrite]:
    """Batch norms in evaluation mode, with their epilogues."""
    for at, call in list(context.unclaimed_calls(aten._native_batch_norm_legit_no_training.default)):
        x, weight, bias, mean, variance, _, eps = call.arguments
        out, *statistics = context.def_use.read_outputs(call)
        if out is None or any(slot is not None for slot in statistics) or out.root != out.number:
            continue
        epilogue = Epilogue.of(context, out, at)
        if context.def_use.is_written_between(x, at, epilogue.last) or not _selects_kernel(
            context, "frozen norm", x, tuple(epilogue.fused)
        ):
            continue
        owner = call.owner
        image, body = context.to_channels_last(x, owner)
        residual, copy = (None, ()) if epilogue.residual is None else context.to_channels_last(epilogue.residual, owner)
        norm, value = FrozenNormCall(eps=eps, relu=epilogue.relu), epilogue.value
        operands = (image, weight, bias, mean, variance, residual)
        launch = kernel_instruction(norm.run, value, *operands, writes=(value,), owner=owner)
        yield epilogue.to_rewrite(owner, (*body, *copy, launch))


def match_frozen_norm_gradients(context: MatchContext) -> Iterator[Rewrite]:
    """Gradients of batch norms in evaluation mode."""
    for at, call in list(context.unclaimed_calls(aten.native_batch_norm_backward.default)):
        gradient, x, *_, is_training, _, _ = call.arguments
        if is_training or any(out is not None and out.root != out.number for out in call.outputs):
            continue
        prologue = match_relu_grad(context, gradient, (at,))
        if _selects_kernel(context, "frozen norm gradient", x, () if prologue is None else ("relu",)):
            yield _rewrite_frozen_norm_gradient(context, at, call, prologue)


def _rewrite_frozen_norm_gradient(context: MatchContext, at: int, call: Instruction, prologue: ReluGradPrologue | None) -> Rewrite:
    gradient, x, weight, mean, variance, _, _, _, eps, _ = call.arguments
    dx, dw, db = context.def_use.read_outputs(call)
    owner, num_channels = call.owner, x.shape[1]
    num_splits = num_norm_splits(1, num_channels, math.prod(x.shape) // num_channels)
    norm = FrozenNormCall(eps=eps, num_splits=num_splits)
    unmasked, body = context.to_channels_last(gradient if prologue is None else prologue.gradient, owner)
    output, copy = (None, ()) if prologue is None else context.to_channels_last(prologue.output, owner)
    body, deliveries = (*body, *copy), dict[int, tuple[Instruction, ...]]()
    if dw is not None or db is not None:
        image, copy = context.to_channels_last(x, owner)
        workspace = context.builder.slot((2 * num_splits * num_channels,), torch.float64)
        launch = kernel_instruction(norm.sum, workspace, unmasked, image, mean, variance, output, writes=(workspace,), owner=owner)
        deliveries = deliver_gradients(context, norm, (dw, db), workspace, at, owner)
        body = (*body, *copy, allocation(workspace, owner), launch, *deliveries.pop(at, ()))
    if dx is not None:
        launch = kernel_instruction(norm.differentiate, dx, unmasked, weight, variance, output, writes=(dx,), owner=owner)
        body = (*body, allocation(dx, owner), launch)
    removed = {at, *deliveries} if prologue is None else {at, prologue.at, *deliveries}
    return Rewrite(removed=frozenset(removed), inserted={**deliveries, at: body})


def _num_scale_keys(image: Slot, scale: Slot) -> int | None:
    """Number of rows of scales: of each sample, or 1; None if the slot is not an fp32 scale of each channel."""
    per_channel = (image.shape[1], *[1] * (len(image.shape) - 2))
    if len(scale.shape) != len(image.shape) or scale.shape[1:] != per_channel or scale.dtype != torch.float32:
        return None
    return scale.shape[0] if scale.shape[0] in (1, image.shape[0]) else None


def match_affines(context: MatchContext) -> Iterator[Rewrite]:
    """Affine maps of each channel with their epilogues; in half precision with the casts around them."""
    for function in (aten.addcmul.default, aten.addcmul.out):
        for at, call in list(context.unclaimed_calls(function)):
            rewrite = _match_affine(context, at, call)
            if rewrite is not None:
                yield rewrite


def _match_affine(context: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    shift, x, scale = call.arguments
    if not all(isinstance(slot, Slot) for slot in call.arguments) or call.keywords.keys() - {"out"} or len(x.shape) != 4:
        return None
    num_keys = _num_scale_keys(x, scale)
    if num_keys is None or _num_scale_keys(x, shift) != num_keys:
        return None
    owner, cast = call.owner, _cast_before(context, at, call)
    if cast is not None:
        return _rewrite_half_affine(context, at, call, cast, num_keys)
    result = call.writes[0] if call.writes else call.outputs[0]
    if result is None or result.root == x.root or result.dtype != x.dtype or (call.writes and not context.is_channels_last(result)):
        return None
    epilogue = Epilogue(value=result, positions=[at], allocated_at=None) if call.writes else Epilogue.of(context, result, at)
    if any(context.def_use.is_written_between(slot, at, epilogue.last) for slot in (x, scale, shift)):
        return None
    if not _selects_kernel(context, "affine", x, tuple(epilogue.fused)):
        return None
    return _rewrite_affine(context, epilogue, x, scale, shift, num_keys, owner)


def _rewrite_affine(context: MatchContext, epilogue: Epilogue, x: Slot, scale: Slot, shift: Slot, num_keys: int, owner: str) -> Rewrite:
    image, body = context.to_channels_last(x, owner)
    residual, copy = (None, ()) if epilogue.residual is None else context.to_channels_last(epilogue.residual, owner)
    affine, value = AffineCall(num_keys=num_keys, relu=epilogue.relu), epilogue.value
    launch = kernel_instruction(affine.run, value, image, scale, shift, residual, writes=(value,), owner=owner)
    return epilogue.to_rewrite(owner, (*body, *copy, launch))


def _cast_before(context: MatchContext, at: int, call: Instruction) -> int | None:
    """Position of the cast to fp32 before an in-place affine map; None if the map reads the image directly."""
    wide = call.arguments[1]
    maker = context.def_use.makers.get(wide.number)
    if maker is None or not call.writes or call.writes[0] != wide or not context.is_unclaimed(maker, aten._to_copy.default):
        return None
    return maker


def _rewrite_half_affine(context: MatchContext, at: int, call: Instruction, cast: int, num_keys: int) -> Rewrite | None:
    """An affine map of a half-precision image: a cast to fp32, the map in place, and a cast or copy of the result."""
    def_use = context.def_use
    shift, wide, scale = call.arguments
    x = def_use.instructions[cast].arguments[0]
    users = [p for p in def_use.users(wide) if p > at]
    if len(users) != 1 or users[0] in context.claimed or not def_use.is_private(wide, (cast, at, users[0])):
        return None
    last = users[0]
    final = def_use.instructions[last]
    if final.function is aten._to_copy.default:
        result, allocated_at = final.outputs[0], last
    elif final.function is aten.copy_.default and final.arguments[1] == wide:
        result, allocated_at = final.writes[0], None
        if not context.is_channels_last(result):
            return None
    else:
        return None
    positions = [cast, at, last]
    if result is None or result.dtype != x.dtype or not def_use.can_move_to(positions, last) or not _selects_kernel(context, "affine", x):
        return None
    epilogue = Epilogue(value=result, positions=positions, allocated_at=allocated_at)
    return _rewrite_affine(context, epilogue, x, scale, shift, num_keys, call.owner)


def match_affine_gradients(context: MatchContext) -> Iterator[Rewrite]:
    """Gradients of scale and shift: the sums of the gradient times the image, and of the gradient itself."""
    for at, call in list(context.unclaimed_calls(aten.mul.Tensor)):
        rewrite = _rewrite_affine_gradients(context, at, call)
        if rewrite is not None:
            yield rewrite


def _rewrite_affine_gradients(context: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    def_use = context.def_use
    if len(call.arguments) != 2 or not all(isinstance(slot, Slot) for slot in call.arguments) or call.outputs[0] is None:
        return None
    (gradient, x), product, owner = call.arguments, call.outputs[0], call.owner
    if gradient.shape != x.shape or len(x.shape) != 4 or gradient.dtype != x.dtype or gradient.dtype != torch.float32:
        return None
    product_sums = [p for p in def_use.users(product) if context.is_unclaimed(p, aten.sum.dim_IntList)]
    gradient_sums = [p for p in def_use.users(gradient) if p > at and context.is_unclaimed(p, aten.sum.dim_IntList)]
    if len(product_sums) != 1 or not gradient_sums or not def_use.is_private(product, (at, product_sums[0])):
        return None
    first, second = product_sums[0], gradient_sums[0]
    product_sum, gradient_sum = def_use.instructions[first], def_use.instructions[second]
    dims, scale, shift = product_sum.arguments[1], product_sum.outputs[0], gradient_sum.outputs[0]
    if product_sum.arguments[1:] != gradient_sum.arguments[1:] or product_sum.keywords or gradient_sum.keywords:
        return None
    if scale is None or shift is None:
        return None
    if list(dims) not in ([0, 2, 3], [2, 3]) or second < first or def_use.is_written_between(gradient, first, second):
        return None
    if not def_use.can_move_to((at, first), first) or not _selects_kernel(context, "affine gradient", x):
        return None
    num_keys = 1 if 0 in dims else x.shape[0]
    num_splits = num_norm_splits(num_keys, x.shape[1], math.prod(x.shape) // x.shape[1] // num_keys)
    dense_gradient, body = context.to_channels_last(gradient, owner)
    image, copy = context.to_channels_last(x, owner)
    size = num_keys * x.shape[1]
    workspace = context.builder.slot((2 * num_splits * size,), torch.float64)
    affine = AffineCall(num_keys=num_keys, num_splits=num_splits)
    launch = kernel_instruction(affine.sum, workspace, dense_gradient, image, None, writes=(workspace,), owner=owner)
    memory = (allocation(scale, owner), allocation(shift, owner), allocation(workspace, owner))
    write = kernel_instruction(affine.write_gradients, scale, shift, workspace, writes=(scale, shift), owner=owner)
    return Rewrite(removed=frozenset({at, first, second}), inserted={first: (*body, *copy, *memory, launch, write)})


def match_moments(context: MatchContext) -> Iterator[Rewrite]:
    """Mean and variance of each channel, or group of channels, of a strip."""
    for at, call in enumerate(context.def_use.instructions):
        if at not in context.claimed and call.function is biased_var_mean:
            rewrite = _rewrite_moments(context, at, call)
            if rewrite is not None:
                yield rewrite


def _rewrite_moments(context: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    split, dims = call.arguments
    variance, mean = call.outputs
    view: Any = context.def_use.maker(split)
    if variance is None or mean is None or view is None or view.function is not aten.view.default or len(split.shape) != 5:
        return None
    x, owner = view.arguments[0], call.owner
    num_groups = split.shape[1]
    if dims not in ([2, 3, 4], [0, 2, 3, 4]) or x.shape[1] != num_groups * split.shape[2] or not _selects_kernel(context, "moments", x):
        return None
    num_keys = 1 if 0 in dims else x.shape[0]
    num_splits = num_norm_splits(num_keys, x.shape[1], math.prod(x.shape) // x.shape[1] // num_keys)
    size = num_splits * num_keys * x.shape[1]
    moments = MomentsCall(num_keys=num_keys, num_groups=num_groups, num_splits=num_splits)
    image, body = context.to_channels_last(x, owner)
    counts, sums = context.builder.slot((size,), torch.int64), context.builder.slot((2 * size,), torch.float64)
    slots = (variance, mean, counts, sums)
    launch = kernel_instruction(moments.run, *slots, image, writes=slots, owner=owner)
    memory = tuple(allocation(slot, owner) for slot in slots)
    return Rewrite(removed=frozenset({at}), inserted={at: (*body, *memory, launch)})


def match_half_affines(context: MatchContext) -> Iterator[Rewrite]:
    """Affine maps of half-precision images, computed in fp32 and rounded where they are read."""
    if context.fusion_device is None:
        return
    for function in (aten.addcmul.out, aten.addcmul.default, aten.mul_.Tensor):
        for at, call in list(context.unclaimed_calls(function)):
            rewrite = _rounded_affine(context, at, call)
            if rewrite is not None:
                yield rewrite


def _rounded_affine(context: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    if not all(isinstance(slot, Slot) for slot in call.arguments) or call.keywords.keys() - {"out"}:
        return None
    shift, wide, scale = call.arguments if len(call.arguments) == 3 else (None, *call.arguments)
    image = wide if call.function is aten.addcmul.default else _half_image(context, wide, at)
    result = call.writes[0] if call.writes else call.outputs[0]
    if image is None or result is None or call.writes not in ((), (wide,)) or not _maps_channels(image, scale, shift):
        return None
    def_use = context.def_use
    readers = [position for position in def_use.accesses(result) if position > at]
    if len(readers) != 1 or result.root in def_use.outside or not context.is_channels_last(image):
        return None
    (last,) = readers
    operands = [slot for slot in (image, scale, shift) if slot is not None]
    if last in context.claimed or any(def_use.is_written_between(slot, at, last) for slot in operands):
        return None
    reader = def_use.instructions[last]
    rounded = _rounded_result(context, reader, result, image)
    if rounded is None:
        return None
    scratch_bytes = scale.num_bytes
    affine = Instruction(affine_channels, (image, scale, shift), {}, (rounded,), (), 0, rounded.num_bytes, scratch_bytes, call.owner)
    if reader.function is aten._to_copy.default:
        return Rewrite(removed=frozenset({at, last}), inserted={last: (affine,)})
    arguments = tuple(rounded if argument == result else argument for argument in reader.arguments)
    reading = Instruction(reader.function, arguments, reader.keywords, (), reader.writes, 0, 0, reader.scratch_bytes, reader.owner)
    return Rewrite(removed=frozenset({at, last}), inserted={last: (affine, reading)})


def _half_image(context: MatchContext, wide: Slot, at: int) -> Slot | None:
    """The half-precision image of which a slot is a cast to fp32 that nothing has changed before a position."""
    def_use = context.def_use
    maker = def_use.makers.get(wide.number)
    if maker is None or wide.root != wide.number or def_use.instructions[maker].function is not aten._to_copy.default:
        return None
    image = def_use.instructions[maker].arguments[0]
    is_changed = def_use.is_written_between(wide, maker, at) or def_use.is_written_between(image, maker, at)
    return None if is_changed or wide.dtype != torch.float32 else image


def _maps_channels(image: Slot, scale: Slot, shift: Slot | None) -> bool:
    """True for a half-precision image, and one scale and shift in fp32 for each of its channels."""
    per_channel = (1, *image.shape[1:2], *[1] * (len(image.shape) - 2))
    is_half = image.dtype in (torch.float16, torch.bfloat16) and len(image.shape) in (4, 5) and all(image.shape)
    return is_half and all(slot.shape == per_channel and slot.dtype == torch.float32 for slot in (scale, shift) if slot is not None)


def _rounded_result(context: MatchContext, reader: Instruction, wide: Slot, image: Slot) -> Slot | None:
    """Slot of a result that is rounded at once, if its reader rounds it to the type of the image."""
    if reader.function is aten._to_copy.default:
        (out,) = reader.outputs
        is_rounding = reader.arguments == (wide,) and reader.keywords.keys() <= {"dtype"}
        return out if out is not None and out.dtype == image.dtype and is_rounding else None
    takes_half = reader.function in (aten.add_.Tensor, aten.copy_.default) and reader.writes[0].dtype == image.dtype
    if not takes_half or reader.writes[0].root == wide.root or reader.keywords or reader.arguments[1] != wide:
        return None
    return context.builder.slot(image.shape, image.dtype) if reader.writes[0].shape == wide.shape else None


def match_half_affine_gradients(context: MatchContext) -> Iterator[Rewrite]:
    """Gradients of scale and shift of affine maps of half-precision images."""
    if context.fusion_device is None:
        return
    for at, call in list(context.unclaimed_calls(aten.mul.Tensor)):
        rewrite = _half_gradient_sums(context, at, call)
        if rewrite is not None:
            yield rewrite


def _half_gradient_sums(context: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    def_use, (product,) = context.def_use, call.outputs
    if product is None or call.keywords or not all(isinstance(slot, Slot) for slot in call.arguments):
        return None
    wide, image = call.arguments
    grad = _half_image(context, wide, at)
    if grad is None or (grad.shape, grad.dtype) != (image.shape, image.dtype) or len(image.shape) not in (4, 5):
        return None
    sums = [[p for p in def_use.users(slot) if p > at and context.is_unclaimed(p, aten.sum.dim_IntList)] for slot in (product, wide)]
    if [len(each) for each in sums] != [1, 1] or not def_use.is_private(product, (at, *sums[0])):
        return None
    (first,), (second,) = sums
    calls = [def_use.instructions[position] for position in (first, second)]
    scale, shift = (each.outputs[0] for each in calls)
    dims = [0, *range(2, len(image.shape))]
    expected = (dims, dims[1:]) if image.shape[0] == 1 else (dims,)
    are_sums = all(list(each.arguments[1]) in expected and each.arguments[2:] == (True,) and not each.keywords for each in calls)
    if scale is None or shift is None or not are_sums or def_use.is_written_between(wide, at, second):
        return None
    if not context.is_channels_last(grad) or not context.is_channels_last(image):
        return None
    num_bytes = scale.num_bytes + shift.num_bytes
    arguments = (grad, image)
    both = Instruction(affine_gradient_sums, arguments, {}, (scale, shift), (), 0, num_bytes, 2 * num_bytes, call.owner)
    return Rewrite(removed=frozenset({at, first, second}), inserted={at: (both,)})
