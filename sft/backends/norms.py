"""Norms of a program: frozen ones, and the parts that a norm over the image is made of (:mod:`sft.analysis.norms`).

Applying a norm, adding a branch and the ReLU are one pass over the image; so are, backwards, the ReLU's mask with the sums that are the
gradients of scale and shift, and once more with the input's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from sft.backends.calls import allocation, instruction, workspace
from sft.backends.chains import Chain
from sft.backends.choice import ShapeClass, pixel_class
from sft.backends.masks import Mask, mask_before
from sft.backends.norm_calls import Affine, FrozenNorm, Moments, norm_splits
from sft.backends.replacement import Question, Replacement
from sft.lower.program import Instruction, Slot

__all__ = ["affine_gradients", "affines", "frozen_norm_gradients", "frozen_norms", "moments"]

aten = torch.ops.aten


def _is_wanted(question: Question, operator: str, image: Slot, fused: tuple[str, ...] = ()) -> bool:
    numbers = question.chooser.numbers_of(image.dtype)
    if numbers is None or len(image.shape) != 4 or not all(image.shape):
        return False
    num_pixels = math.prod(image.shape) // image.shape[1]
    channels = (image.shape[1], image.shape[1])
    wanted = ShapeClass(operator=operator, fused=fused, numbers=numbers, channels=channels, pixels=pixel_class(num_pixels))
    return question.chooser.takes_kernel(wanted)


def _space(question: Question, num_elements: int, owner: str) -> tuple[Slot, Instruction]:
    """A workspace of fp32 that need not be zero."""
    slot = question.emitter.slot((num_elements,), torch.float32)
    return slot, allocation(slot, owner)


def frozen_norms(question: Question) -> Iterator[Replacement]:
    """Batch norms in evaluation mode, with what follows them."""
    for at, call in list(question.free(aten._native_batch_norm_legit_no_training.default)):
        x, weight, bias, mean, variance, _, eps = call.arguments
        out, *others = call.outputs
        if out is None or any(other is not None for other in others) or out.root != out.number:
            continue
        chain = Chain.of(question, out, at)
        if question.listing.writes_between(x, at, chain.last) or not _is_wanted(question, "frozen norm", x, tuple(chain.fused)):
            continue
        owner = call.owner
        image, body = question.image(x, owner)
        residual, copied = (None, ()) if chain.residual is None else question.image(chain.residual, owner)
        space, memory = _space(question, 2 * x.shape[1], owner)
        norm = FrozenNorm(eps=eps, relu=chain.relu)
        launch = instruction(
            norm.run, chain.value, space, image, weight, bias, mean, variance, residual, writes=(chain.value, space), owner=owner
        )
        yield chain.replacement(owner, (*body, *copied, memory, launch))


def frozen_norm_gradients(question: Question) -> Iterator[Replacement]:
    """Gradients of such norms."""
    for at, call in list(question.free(aten.native_batch_norm_backward.default)):
        gradient, x, *_, is_training, _, _ = call.arguments
        if is_training or any(out is not None and out.root != out.number for out in call.outputs):
            continue
        mask = mask_before(question, gradient, (at,))
        if _is_wanted(question, "frozen norm gradient", x, () if mask is None else ("relu",)):
            yield _frozen_gradient(question, at, call, mask)


def _frozen_gradient(question: Question, at: int, call: Instruction, mask: Mask | None) -> Replacement:
    gradient, x, weight, mean, variance, _, _, _, eps, _ = call.arguments
    dx, dw, db = call.outputs
    owner, num_channels = call.owner, x.shape[1]
    num_splits = norm_splits(1, num_channels, math.prod(x.shape) // num_channels)
    norm = FrozenNorm(eps=eps, num_splits=num_splits)
    given, body = question.image(gradient if mask is None else mask.gradient, owner)
    output, copied = (None, ()) if mask is None else question.image(mask.output, owner)
    space, memory = _space(question, 2 * num_channels, owner)
    body = (*body, *copied, memory)
    if dw is not None or db is not None:
        image, copied = question.image(x, owner)
        sums = question.emitter.slot((2 * num_splits * num_channels,), torch.float64)
        launch = instruction(norm.sum, sums, space, given, image, mean, variance, output, writes=(sums, space), owner=owner)
        body = (*body, *copied, *workspace(sums, owner), launch)
        for out, give in ((dw, norm.give_weight), (db, norm.give_bias)):
            if out is not None:
                body = (*body, allocation(out, owner), instruction(give, out, sums, writes=(out,), owner=owner))
    if dx is not None:
        launch = instruction(norm.differentiate, dx, space, given, weight, mean, variance, output, writes=(dx, space), owner=owner)
        body = (*body, allocation(dx, owner), launch)
    return Replacement(gone=frozenset({at} if mask is None else {at, mask.at}), inserted={at: body})


def _keys(image: Slot, scale: Slot) -> int | None:
    """How many samples have a scale of their own; None where it is not one for each channel."""
    lead = (image.shape[1], *[1] * (len(image.shape) - 2))
    if len(scale.shape) != len(image.shape) or scale.shape[1:] != lead or scale.dtype != torch.float32:
        return None
    return scale.shape[0] if scale.shape[0] in (1, image.shape[0]) else None


def affines(question: Question) -> Iterator[Replacement]:
    """Affine maps of each channel, with what follows them; in half precision with the casts around them."""
    for function in (aten.addcmul.default, aten.addcmul.out):
        for at, call in list(question.free(function)):
            found = _affine(question, at, call)
            if found is not None:
                yield found


def _affine(question: Question, at: int, call: Instruction) -> Replacement | None:
    shift, x, scale = call.arguments
    if not all(isinstance(slot, Slot) for slot in call.arguments) or call.keywords.keys() - {"out"} or len(x.shape) != 4:
        return None
    num_keys = _keys(x, scale)
    if num_keys is None or _keys(x, shift) != num_keys:
        return None
    owner, cast = call.owner, _cast_before(question, at, call)
    if cast is not None:
        return _half_affine(question, at, call, cast, num_keys)
    made = call.writes[0] if call.writes else call.outputs[0]
    if made is None or made.root == x.root or made.dtype != x.dtype or (call.writes and not question.is_image(made)):
        return None
    chain = Chain(value=made, positions=[at], made=None) if call.writes else Chain.of(question, made, at)
    if any(question.listing.writes_between(slot, at, chain.last) for slot in (x, scale, shift)):
        return None
    if not _is_wanted(question, "affine", x, tuple(chain.fused)):
        return None
    return _affine_replacement(question, chain, x, scale, shift, num_keys, owner)


def _affine_replacement(question: Question, chain: Chain, x: Slot, scale: Slot, shift: Slot, num_keys: int, owner: str) -> Replacement:
    image, body = question.image(x, owner)
    residual, copied = (None, ()) if chain.residual is None else question.image(chain.residual, owner)
    space, memory = _space(question, 3 * num_keys * x.shape[1], owner)
    made = Affine(num_keys=num_keys, relu=chain.relu)
    launch = instruction(made.run, chain.value, space, image, scale, shift, residual, writes=(chain.value, space), owner=owner)
    return chain.replacement(owner, (*body, *copied, memory, launch))


def _cast_before(question: Question, at: int, call: Instruction) -> int | None:
    """Position of the cast that makes what is mapped, in place, in single precision; None where it is mapped as it is."""
    wide = call.arguments[1]
    maker = question.listing.makers.get(wide.number)
    if maker is None or not call.writes or call.writes[0] != wide or not question.is_free(maker, aten._to_copy.default):
        return None
    return maker


def _half_affine(question: Question, at: int, call: Instruction, cast: int, num_keys: int) -> Replacement | None:
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
    if made is None or made.dtype != x.dtype or not listing.moves_to(positions, last) or not _is_wanted(question, "affine", x):
        return None
    chain = Chain(value=made, positions=positions, made=memory)
    return _affine_replacement(question, chain, x, scale, shift, num_keys, call.owner)


def affine_gradients(question: Question) -> Iterator[Replacement]:
    """Sums that are the gradients of scale and shift: of a product with the image, and of the gradient itself."""
    for at, call in list(question.free(aten.mul.Tensor)):
        found = _sums(question, at, call)
        if found is not None:
            yield found


def _sums(question: Question, at: int, call: Instruction) -> Replacement | None:
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
    if list(dims) not in ([0, 2, 3], [2, 3]) or second < first or listing.writes_between(gradient, first, second):
        return None
    if not listing.moves_to((at, first), first) or not _is_wanted(question, "affine gradient", x):
        return None
    num_keys = 1 if 0 in dims else x.shape[0]
    num_splits = norm_splits(num_keys, x.shape[1], math.prod(x.shape) // x.shape[1] // num_keys)
    given, body = question.image(gradient, owner)
    image, copied = question.image(x, owner)
    size = num_keys * x.shape[1]
    space, memory = _space(question, 2 * size, owner)
    total = question.emitter.slot((2 * num_splits * size,), torch.float64)
    made = Affine(num_keys=num_keys, num_splits=num_splits)
    launch = instruction(made.sum, total, space, given, image, None, writes=(total, space), owner=owner)
    body = (*body, *copied, memory, *workspace(total, owner), launch)
    for out, give in ((scale, made.give_scale), (shift, made.give_shift)):
        body = (*body, allocation(out, owner), instruction(give, out, total, writes=(out,), owner=owner))
    return Replacement(gone=frozenset({at, first, second}), inserted={first: body})


def moments(question: Question) -> Iterator[Replacement]:
    """Mean and variance of each channel, or group of channels, of a strip."""
    for at, call in enumerate(question.listing.instructions):
        if at not in question.taken and getattr(call.function, "__name__", "") == "_var_mean":
            found = _moments(question, at, call)
            if found is not None:
                yield found


def _moments(question: Question, at: int, call: Instruction) -> Replacement | None:
    split, dims = call.arguments
    variance, mean = call.outputs
    view: Any = question.listing.maker(split)
    if variance is None or mean is None or view is None or view.function is not aten.view.default or len(split.shape) != 5:
        return None
    x, owner = view.arguments[0], call.owner
    num_groups = split.shape[1]
    if dims not in ([2, 3, 4], [0, 2, 3, 4]) or x.shape[1] != num_groups * split.shape[2] or not _is_wanted(question, "moments", x):
        return None
    num_keys = 1 if 0 in dims else x.shape[0]
    num_splits = norm_splits(num_keys, x.shape[1], math.prod(x.shape) // x.shape[1] // num_keys)
    size = num_splits * num_keys * x.shape[1]
    made = Moments(num_keys=num_keys, num_groups=num_groups, num_splits=num_splits)
    image, body = question.image(x, owner)
    counts, sums = question.emitter.slot((size,), torch.int64), question.emitter.slot((2 * size,), torch.float64)
    launch = instruction(
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
    memory = (allocation(variance, owner), allocation(mean, owner), *workspace(counts, owner), *workspace(sums, owner))
    return Replacement(gone=frozenset({at}), inserted={at: (*body, *memory, launch)})
