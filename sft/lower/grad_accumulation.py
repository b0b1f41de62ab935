"""Accumulation of gradient contributions: the sum of all gradients that reach a value in one step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from sft.common.interval import Interval
from sft.lower.builder import ProgramBuilder
from sft.lower.concat import DimSlice, add_slices, cat_slices_into, dim_slices, partition_dim, sum_slices
from sft.lower.context import GradContribution, SegmentInfo
from sft.lower.program import Instruction, Slot, slots_of

__all__ = [
    "accumulate_products",
    "add_contributions",
    "add_patch_gradient",
    "contribution_slot",
    "sum_contributions",
    "sum_global_gradients",
]

aten = torch.ops.aten

#: Element types in which a product may add to its accumulator; of narrower ones the sum is rounded by the call.
_ACCUMULATED_DTYPES = (torch.float32, torch.float64)


def contribution_slot(builder: ProgramBuilder, term: GradContribution) -> Slot:
    """The slot of a contribution, narrowed to its channels."""
    return term.slot if term.channels is None else builder.narrow(term.slot, 1, term.channels.start, len(term.channels))


def sum_contributions(
    scope: SegmentInfo, builder: ProgramBuilder, name: str, rows: Interval, terms: Sequence[GradContribution], dtype: torch.dtype
) -> tuple[Slot, bool]:
    """Emit the sum of contributions over rows of a streamed value.

    If a contribution has a wider type than the result, the sum is made in the wider type and rounded once.

    Args:
        scope: the segment.
        builder: takes the instructions.
        name: the value.
        rows: the rows of the sum.
        terms: its gradient contributions.
        dtype: element type of the sum.

    Returns:
        The sum, and true if its storage may be overwritten.
    """
    wide = max((dtype, *(term.slot.dtype for term in terms)), key=lambda kind: kind.itemsize)
    columns = scope.columns[name].new
    full = [term.rows == rows and term.columns == columns and term.span is None for term in terms]
    if len(terms) == 1 and full[0]:
        slot = contribution_slot(builder, terms[0])
        return builder.cast(slot, dtype), terms[0].owned or slot.dtype != dtype
    shape = scope.strip_shape(name, len(rows))
    if terms and all(term.rows == rows and term.columns == columns and term.slot.dtype == wide for term in terms):
        spans = [term.span for term in terms if term.span is not None]
        dim = partition_dim(spans, shape) if len(spans) == len(terms) else None
        if dim is not None:
            total = _concatenate(builder, shape, wide, terms, dim)
            return builder.cast(total, dtype), True
    base = next((i for i, term in enumerate(terms) if term.owned and full[i] and term.slot.dtype == wide), None)
    total = builder.zeros(shape, wide) if base is None else terms[base].slot
    add_contributions(scope, builder, name, total, rows, [term for i, term in enumerate(terms) if i != base])
    return builder.cast(total, dtype), True


def _concatenate(builder: ProgramBuilder, shape: tuple[int, ...], dtype: torch.dtype, terms: Sequence[GradContribution], dim: int) -> Slot:
    """The gradient of a streamed value of which all slices along ``dim`` have one contribution."""
    starts = {term.span.start: term for term in terms if term.span is not None and term.span.length}
    ordered = [starts[start] for start in sorted(starts)]
    total = builder.empty(shape, dtype)
    slots, spans = tuple(term.slot for term in ordered), tuple(_channels_of(term) for term in ordered)
    return builder.call(cat_slices_into, total, slots, spans, dim, writes=total)


def _channels_of(term: GradContribution) -> tuple[DimSlice, ...]:
    """The slices of its slot that a contribution consists of."""
    return () if term.channels is None else (DimSlice(1, term.channels.start, len(term.channels)),)


def add_contributions(
    scope: SegmentInfo, builder: ProgramBuilder, name: str, target: Slot, rows: Interval, terms: Sequence[GradContribution]
) -> None:
    """Add contributions to a gradient of the panel's columns and ``rows``; those that are slices last, in one instruction."""
    sliced = [term for term in terms if _is_sliced(term)]
    separate = terms if len(sliced) < 2 else [term for term in terms if not _is_sliced(term)]
    for term in separate:
        view = target
        for span in _slices_of(scope, name, target, rows, term):
            view = builder.narrow(view, *span)
        builder.add_into(view, contribution_slot(builder, term))
    if len(sliced) > 1:
        targets = tuple(_slices_of(scope, name, target, rows, term) for term in sliced)
        builder.call(add_slices, target, targets, tuple(term.slot for term in sliced), tuple(map(_channels_of, sliced)), writes=target)


def _is_sliced(term: GradContribution) -> bool:
    return term.channels is not None or term.span is not None


def _slices_of(scope: SegmentInfo, name: str, target: Slot, rows: Interval, term: GradContribution) -> tuple[DimSlice, ...]:
    """The slices of a gradient of the panel's columns and ``rows`` that a contribution covers."""
    assert term.rows is not None and term.columns is not None
    first_row, first_column = term.rows.start - rows.start, term.columns.start - scope.columns[name].new.start
    slices = dim_slices(scope.axes, target, first_row, len(term.rows), first_column, len(term.columns))
    return slices if term.span is None else (*slices, term.span)


def sum_global_gradients(builder: ProgramBuilder, shape: tuple[int, ...], terms: Sequence[GradContribution]) -> tuple[Slot, bool]:
    """Emit the sum of gradients of a global value.

    Args:
        builder: takes the instructions.
        shape: shape of the value.
        terms: its gradient contributions.

    Returns:
        The sum, and true if its storage may be overwritten.
    """
    gradients = [(contribution_slot(builder, term), term.owned) for term in terms if term.span is None]
    slots = tuple(contribution_slot(builder, term) for term in terms if term.span is not None)
    if slots:
        spans = tuple(term.span for term in terms if term.span is not None)
        dtype = max((slot.dtype for slot in slots), key=lambda kind: kind.itemsize)
        total = builder.call(sum_slices, slots, spans, shape, tuple(range(len(shape))), dtype, shape=shape, dtype=dtype)
        gradients.append((total, True))
    first, *others = sorted(gradients, key=lambda gradient: -gradient[0].dtype.itemsize)  # widest type first, which is the type of the sum
    if not others:
        return first
    base = next((gradient for gradient in (first, *others) if gradient[1] and gradient[0].dtype == first[0].dtype), None)
    if base is None:
        total = builder.call(aten.add.Tensor, first[0], others[0][0], shape=first[0].shape, dtype=first[0].dtype)
        addends = others[1:]
    else:
        total, addends = base[0], [gradient for gradient in (first, *others) if gradient is not base]
    for slot, _ in addends:
        builder.add_into(total, slot)
    return total, True


def accumulate_products(builder: ProgramBuilder) -> None:
    """Let products of matrices add to an accumulator in place: ``acc += a @ b`` in one call, without a buffer for the product."""
    instructions = builder.instructions
    num_reads = Counter(slot.root for instruction in instructions for slot in slots_of(instruction))
    external = {slot.root for slot in (*builder.ports.values(), *builder.results.values())}
    accumulators = {slot.number for slot in builder.ports.values()}
    makers = {
        out.number: (position, index)
        for position, instruction in enumerate(instructions)
        if instruction.function in (aten.mm.default, aten.convolution_backward.default)
        for index, out in enumerate(instruction.outputs)
        if out is not None
    }
    changed: dict[int, list[Instruction]] = {}
    for position, instruction in enumerate(instructions):
        if instruction.function is not aten.add_.Tensor or len(instruction.arguments) != 2 or instruction.keywords:
            continue
        target, term = instruction.arguments
        maker = makers.get(term.number) if type(term) is Slot else None
        if maker is None or num_reads[term.root] != 1 or term.root in external or target.number not in accumulators:
            continue
        if target.dtype == term.dtype and term.dtype in _ACCUMULATED_DTYPES:
            accumulated = _accumulated(instructions[maker[0]], maker[1], target)
            if accumulated is not None:
                changed |= {maker[0]: accumulated, position: []}
    instructions[:] = [each for position, instruction in enumerate(instructions) for each in changed.get(position, [instruction])]


def _accumulated(product: Instruction, index: int, target: Slot) -> list[Instruction] | None:
    """Instructions that add result ``index`` of a product to a buffer, in place of the product; ``None`` if no such call exists."""
    if product.function is aten.mm.default:
        arguments, keywords = (target, *product.arguments), {"out": target}
        return [
            product._replace(function=aten.addmm.out, arguments=arguments, keywords=keywords, outputs=(), writes=(target,), num_bytes=0)
        ]
    grad, image, weight, _, stride, padding, dilation, is_transposed, _, groups, mask = product.arguments
    kernel, extents = list(weight.shape[2:]), image.shape[2:]
    is_patch = kernel == list(stride) and not any(padding) and set(dilation) == {1} and groups == 1 and not is_transposed
    if (
        index != 1
        or not is_patch
        or any(extent % size for extent, size in zip(extents, kernel, strict=True))
        or image.dtype != target.dtype
    ):
        return None
    flops = 2 * math.prod(grad.shape) * math.prod(weight.shape[1:])
    added = product._replace(
        function=add_patch_gradient,
        arguments=(target, grad, image),
        outputs=(),
        writes=(target,),
        flops=flops,
        num_bytes=0,
        scratch_bytes=grad.num_bytes + image.num_bytes,
    )
    remaining = []
    image_grad, _, bias_grad = product.outputs
    if mask[0] and image_grad is not None:
        arguments = (*product.arguments[:-1], [True, False, False])
        outputs = (image_grad, None, None)
        remaining.append(
            product._replace(arguments=arguments, outputs=outputs, flops=product.flops - flops, num_bytes=image_grad.num_bytes)
        )
    if mask[2] and bias_grad is not None:  # oneDNN computes the weight's gradient with that of the bias, also where it is masked
        arguments = (grad, [0, *range(2, len(grad.shape))])
        total = product._replace(function=aten.sum.dim_IntList, arguments=arguments, outputs=(bias_grad,), flops=0, scratch_bytes=0)
        remaining.append(total._replace(num_bytes=bias_grad.num_bytes))
    return [*remaining, added]


def add_patch_gradient(total: Tensor, grad: Tensor, image: Tensor) -> None:
    """Add the weight gradient of a convolution of adjacent patches (kernel and stride equal, no padding) to ``total``.

    The patches and the gradient are copied as matrices, and their product is added in place.
    """
    axes = range(2, image.dim())
    patches = image
    for axis in reversed(axes):
        patches = patches.unflatten(axis, (grad.shape[axis], total.shape[axis]))
    places, pixels = [2 * axis - 2 for axis in axes], [2 * axis - 1 for axis in axes]
    is_contiguous = total.is_contiguous()
    order = [1, *pixels] if is_contiguous else [*pixels, 1]
    matrix = torch.empty(
        grad.numel() // grad.shape[1], image.numel() * grad.shape[1] // grad.numel(), dtype=image.dtype, device=image.device
    )
    patches = patches.permute(0, *places, *order)
    matrix.view(patches.shape).copy_(patches)
    rows = grad.permute(1, 0, *axes).clone(memory_format=torch.contiguous_format).view(grad.shape[1], -1)
    weights = total if is_contiguous else total.permute(0, *axes, 1)
    if weights.is_contiguous():
        flat = weights.view(grad.shape[1], -1)
        torch.addmm(flat, rows, matrix, out=flat)
    else:
        weights.add_(torch.mm(rows, matrix).view(weights.shape))
