"""Norms of a program: frozen ones, and the parts that a norm over the image is made of (:mod:`sft.analysis.passes.decompose_norms`).

Applying a norm, adding a branch and the ReLU are one pass over the image; so are, backwards, the ReLU's mask with the sums that are the
gradients of scale and shift, and once more with the input's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from sft.backends.fusion import Epilogue, ReluGradPrologue, match_relu_grad
from sft.backends.kernel_call import allocation, kernel_instruction, zeroed_workspace
from sft.backends.norm_calls import AffineCall, FrozenNormCall, MomentsCall, num_norm_splits
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import ShapeClass, pixel_class
from sft.lower.program import Instruction, Slot

__all__ = ["match_affine_gradients", "match_affines", "match_frozen_norm_gradients", "match_frozen_norms", "match_moments"]

aten = torch.ops.aten


def _selects_kernel(question: MatchContext, operator: str, image: Slot, fused: tuple[str, ...] = ()) -> bool:
    numbers = question.selector.number_format_of(image.dtype)
    if numbers is None or len(image.shape) != 4 or not all(image.shape):
        return False
    num_pixels = math.prod(image.shape) // image.shape[1]
    channels = (image.shape[1], image.shape[1])
    wanted = ShapeClass(operator=operator, fused=fused, numbers=numbers, channels=channels, pixels=pixel_class(num_pixels))
    return question.selector.selects_kernel(wanted)


def _fp32_workspace(question: MatchContext, num_elements: int, owner: str) -> tuple[Slot, Instruction]:
    """A workspace of fp32 that need not be zero."""
    slot = question.emitter.slot((num_elements,), torch.float32)
    return slot, allocation(slot, owner)


def match_frozen_norms(question: MatchContext) -> Iterator[Rewrite]:
    """Batch norms in evaluation mode, with what follows them."""
    for at, call in list(question.free(aten._native_batch_norm_legit_no_training.default)):
        x, weight, bias, mean, variance, _, eps = call.arguments
        out, *others = call.outputs
        if out is None or any(other is not None for other in others) or out.root != out.number:
            continue
        chain = Epilogue.of(question, out, at)
        if question.listing.is_written_between(x, at, chain.last) or not _selects_kernel(question, "frozen norm", x, tuple(chain.fused)):
            continue
        owner = call.owner
        image, body = question.image(x, owner)
        residual, copied = (None, ()) if chain.residual is None else question.image(chain.residual, owner)
        space, memory = _fp32_workspace(question, 2 * x.shape[1], owner)
        norm = FrozenNormCall(eps=eps, relu=chain.relu)
        launch = kernel_instruction(
            norm.run, chain.value, space, image, weight, bias, mean, variance, residual, writes=(chain.value, space), owner=owner
        )
        yield chain.replacement(owner, (*body, *copied, memory, launch))


def match_frozen_norm_gradients(question: MatchContext) -> Iterator[Rewrite]:
    """Gradients of such norms."""
    for at, call in list(question.free(aten.native_batch_norm_backward.default)):
        gradient, x, *_, is_training, _, _ = call.arguments
        if is_training or any(out is not None and out.root != out.number for out in call.outputs):
            continue
        mask = match_relu_grad(question, gradient, (at,))
        if _selects_kernel(question, "frozen norm gradient", x, () if mask is None else ("relu",)):
            yield _rewrite_frozen_norm_gradient(question, at, call, mask)


def _rewrite_frozen_norm_gradient(question: MatchContext, at: int, call: Instruction, mask: ReluGradPrologue | None) -> Rewrite:
    gradient, x, weight, mean, variance, _, _, _, eps, _ = call.arguments
    dx, dw, db = call.outputs
    owner, num_channels = call.owner, x.shape[1]
    num_splits = num_norm_splits(1, num_channels, math.prod(x.shape) // num_channels)
    norm = FrozenNormCall(eps=eps, num_splits=num_splits)
    given, body = question.image(gradient if mask is None else mask.gradient, owner)
    output, copied = (None, ()) if mask is None else question.image(mask.output, owner)
    space, memory = _fp32_workspace(question, 2 * num_channels, owner)
    body = (*body, *copied, memory)
    if dw is not None or db is not None:
        image, copied = question.image(x, owner)
        sums = question.emitter.slot((2 * num_splits * num_channels,), torch.float64)
        launch = kernel_instruction(norm.sum, sums, space, given, image, mean, variance, output, writes=(sums, space), owner=owner)
        body = (*body, *copied, *zeroed_workspace(sums, owner), launch)
        for out, give in ((dw, norm.write_weight_grad), (db, norm.write_bias_grad)):
            if out is not None:
                body = (*body, allocation(out, owner), kernel_instruction(give, out, sums, writes=(out,), owner=owner))
    if dx is not None:
        launch = kernel_instruction(norm.differentiate, dx, space, given, weight, mean, variance, output, writes=(dx, space), owner=owner)
        body = (*body, allocation(dx, owner), launch)
    return Rewrite(gone=frozenset({at} if mask is None else {at, mask.at}), inserted={at: body})


def _num_scale_keys(image: Slot, scale: Slot) -> int | None:
    """How many samples have a scale of their own; None where it is not one for each channel."""
    lead = (image.shape[1], *[1] * (len(image.shape) - 2))
    if len(scale.shape) != len(image.shape) or scale.shape[1:] != lead or scale.dtype != torch.float32:
        return None
    return scale.shape[0] if scale.shape[0] in (1, image.shape[0]) else None


def match_affines(question: MatchContext) -> Iterator[Rewrite]:
    """Affine maps of each channel, with what follows them; in half precision with the casts around them."""
    for function in (aten.addcmul.default, aten.addcmul.out):
        for at, call in list(question.free(function)):
            found = _match_affine(question, at, call)
            if found is not None:
                yield found


def _match_affine(question: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    shift, x, scale = call.arguments
    if not all(isinstance(slot, Slot) for slot in call.arguments) or call.keywords.keys() - {"out"} or len(x.shape) != 4:
        return None
    num_keys = _num_scale_keys(x, scale)
    if num_keys is None or _num_scale_keys(x, shift) != num_keys:
        return None
    owner, cast = call.owner, _cast_before(question, at, call)
    if cast is not None:
        return _rewrite_half_affine(question, at, call, cast, num_keys)
    made = call.writes[0] if call.writes else call.outputs[0]
    if made is None or made.root == x.root or made.dtype != x.dtype or (call.writes and not question.is_image(made)):
        return None
    chain = Epilogue(value=made, positions=[at], made=None) if call.writes else Epilogue.of(question, made, at)
    if any(question.listing.is_written_between(slot, at, chain.last) for slot in (x, scale, shift)):
        return None
    if not _selects_kernel(question, "affine", x, tuple(chain.fused)):
        return None
    return _rewrite_affine(question, chain, x, scale, shift, num_keys, owner)


def _rewrite_affine(question: MatchContext, chain: Epilogue, x: Slot, scale: Slot, shift: Slot, num_keys: int, owner: str) -> Rewrite:
    image, body = question.image(x, owner)
    residual, copied = (None, ()) if chain.residual is None else question.image(chain.residual, owner)
    space, memory = _fp32_workspace(question, 3 * num_keys * x.shape[1], owner)
    made = AffineCall(num_keys=num_keys, relu=chain.relu)
    launch = kernel_instruction(made.run, chain.value, space, image, scale, shift, residual, writes=(chain.value, space), owner=owner)
    return chain.replacement(owner, (*body, *copied, memory, launch))


def _cast_before(question: MatchContext, at: int, call: Instruction) -> int | None:
    """Position of the cast that makes what is mapped, in place, in single precision; None where it is mapped as it is."""
    wide = call.arguments[1]
    maker = question.listing.makers.get(wide.number)
    if maker is None or not call.writes or call.writes[0] != wide or not question.is_free(maker, aten._to_copy.default):
        return None
    return maker


def _rewrite_half_affine(question: MatchContext, at: int, call: Instruction, cast: int, num_keys: int) -> Rewrite | None:
    """Of a half precision: widened, mapped in place, and rounded into the result."""
    listing = question.listing
    shift, wide, scale = call.arguments
    x = listing.instructions[cast].arguments[0]
    after = [p for p in listing.users(wide) if p > at]
    if len(after) != 1 or after[0] in question.taken or not listing.is_private(wide, (cast, at, after[0])):
        return None
    last = after[0]
    final = listing.instructions[last]
    if final.function is aten._to_copy.default:
        made, memory = final.outputs[0], last
    elif final.function is aten.copy_.default and final.arguments[1] == wide:
        made, memory = final.writes[0], None
        if not question.is_image(made):
            return None
    else:
        return None
    positions = [cast, at, last]
    if made is None or made.dtype != x.dtype or not listing.can_move_to(positions, last) or not _selects_kernel(question, "affine", x):
        return None
    chain = Epilogue(value=made, positions=positions, made=memory)
    return _rewrite_affine(question, chain, x, scale, shift, num_keys, call.owner)


def match_affine_gradients(question: MatchContext) -> Iterator[Rewrite]:
    """Sums that are the gradients of scale and shift: of a product with the image, and of the gradient itself."""
    for at, call in list(question.free(aten.mul.Tensor)):
        found = _rewrite_affine_gradients(question, at, call)
        if found is not None:
            yield found


def _rewrite_affine_gradients(question: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    listing = question.listing
    if len(call.arguments) != 2 or not all(isinstance(slot, Slot) for slot in call.arguments) or call.outputs[0] is None:
        return None
    (gradient, x), product, owner = call.arguments, call.outputs[0], call.owner
    if gradient.shape != x.shape or len(x.shape) != 4 or gradient.dtype != x.dtype or gradient.dtype != torch.float32:
        return None
    sums = [p for p in listing.users(product) if question.is_free(p, aten.sum.dim_IntList)]
    others = [p for p in listing.users(gradient) if p > at and question.is_free(p, aten.sum.dim_IntList)]
    if len(sums) != 1 or not others or not listing.is_private(product, (at, sums[0])):
        return None
    first, second = sums[0], others[0]
    asked, also = listing.instructions[first], listing.instructions[second]
    dims, scale, shift = asked.arguments[1], asked.outputs[0], also.outputs[0]
    if asked.arguments[1:] != also.arguments[1:] or asked.keywords or also.keywords or scale is None or shift is None:
        return None
    if list(dims) not in ([0, 2, 3], [2, 3]) or second < first or listing.is_written_between(gradient, first, second):
        return None
    if not listing.can_move_to((at, first), first) or not _selects_kernel(question, "affine gradient", x):
        return None
    num_keys = 1 if 0 in dims else x.shape[0]
    num_splits = num_norm_splits(num_keys, x.shape[1], math.prod(x.shape) // x.shape[1] // num_keys)
    given, body = question.image(gradient, owner)
    image, copied = question.image(x, owner)
    size = num_keys * x.shape[1]
    space, memory = _fp32_workspace(question, 2 * size, owner)
    total = question.emitter.slot((2 * num_splits * size,), torch.float64)
    made = AffineCall(num_keys=num_keys, num_splits=num_splits)
    launch = kernel_instruction(made.sum, total, space, given, image, None, writes=(total, space), owner=owner)
    body = (*body, *copied, memory, *zeroed_workspace(total, owner), launch)
    for out, give in ((scale, made.write_scale_grad), (shift, made.write_shift_grad)):
        body = (*body, allocation(out, owner), kernel_instruction(give, out, total, writes=(out,), owner=owner))
    return Rewrite(gone=frozenset({at, first, second}), inserted={first: body})


def match_moments(question: MatchContext) -> Iterator[Rewrite]:
    """Mean and variance of each channel, or group of channels, of a strip."""
    for at, call in enumerate(question.listing.instructions):
        if at not in question.taken and getattr(call.function, "__name__", "") == "_var_mean":
            found = _rewrite_moments(question, at, call)
            if found is not None:
                yield found


def _rewrite_moments(question: MatchContext, at: int, call: Instruction) -> Rewrite | None:
    split, dims = call.arguments
    variance, mean = call.outputs
    view: Any = question.listing.maker(split)
    if variance is None or mean is None or view is None or view.function is not aten.view.default or len(split.shape) != 5:
        return None
    x, owner = view.arguments[0], call.owner
    num_groups = split.shape[1]
    if dims not in ([2, 3, 4], [0, 2, 3, 4]) or x.shape[1] != num_groups * split.shape[2] or not _selects_kernel(question, "moments", x):
        return None
    num_keys = 1 if 0 in dims else x.shape[0]
    num_splits = num_norm_splits(num_keys, x.shape[1], math.prod(x.shape) // x.shape[1] // num_keys)
    size = num_splits * num_keys * x.shape[1]
    made = MomentsCall(num_keys=num_keys, num_groups=num_groups, num_splits=num_splits)
    image, body = question.image(x, owner)
    counts, sums = question.emitter.slot((size,), torch.int64), question.emitter.slot((2 * size,), torch.float64)
    launch = kernel_instruction(
        made.run,
        variance,
        mean,
        counts,
        sums,
        image,
        writes=(variance, mean, counts, sums),
        owner=owner,
        scratch_bytes=8 * made.scratch_elements * size,
    )
    memory = (allocation(variance, owner), allocation(mean, owner), *zeroed_workspace(counts, owner), *zeroed_workspace(sums, owner))
    return Rewrite(gone=frozenset({at}), inserted={at: (*body, *memory, launch)})
