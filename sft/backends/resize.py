"""Rewrites of interpolations: rows and columns in one pass.

The lowering resamples rows by one call and columns by another, or by ATen if a strip has all columns. A kernel does both at once, without
an intermediate image. It computes the rows and weights of interpolations by powers of two, which are exact in single precision. Those of
others are tables, which depend on the origin of the strip, so they are made when the program runs, from the same banded matrices as the
lowering's (:mod:`sft.analysis.ir.ops.resize_matrix`). CUDA graphs record the first kind only: a table is copied from the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.ops.resize_matrix import ResamplingKind, interpolated_axes
from sft.backends.kernel_call import KernelCall, allocation, kernel_instruction, to_channels_last
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import KernelSelector, ShapeClass, pixel_class
from sft.kernels.resize.tile_axis import BandTable, LinearAxis
from sft.lower.concat import DimSlice, cat_slices, cat_slices_into
from sft.lower.program import Instruction, Slot
from sft.lower.row_gather import upload_table
from sft.lower.rules.resampled_range import ResampledRange

__all__ = ["ResizeCall", "band_rows", "band_table", "match_resizes", "selects_resize"]

aten = torch.ops.aten

#: with more terms for an element of the result it is faster to resample one axis after the other
_MAX_TERMS = 36
_CHANNELS = 1


@functools.lru_cache(maxsize=256)
def band_rows(span: ResampledRange, first: int, start: int) -> tuple[Any, Any, Any]:
    """First column, number of columns and weights of each result row of a range, columns numbered as in its buffer.

    Args:
        span: the range.
        first: first output row.
        start: first input row.
    """
    band = span.sampling.adjoint if span.is_adjoint else span.sampling.forward
    rows, low, extent = (start, first, span.length) if span.is_adjoint else (first, start, span.extent)
    selected = slice(rows, rows + span.num_rows)
    begin, end = band.start[selected], band.stop[selected]
    clipped_begin, clipped_end = np.clip(begin, low, low + extent), np.clip(end, low, low + extent)
    count = np.maximum(clipped_end - clipped_begin, 0)
    index = np.minimum((clipped_begin - begin)[:, None] + np.arange(band.width), band.width - 1)
    weights = np.take_along_axis(band.weights[selected], index, 1)
    return (clipped_begin - low).astype(np.int32), count.astype(np.int32), weights.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeCall(KernelCall):
    """Resampling of rows and columns.

    Attributes:
        height, width: resampled range of each axis; None for an axis that stays as it is.
    """

    height: ResampledRange | None
    width: ResampledRange | None

    @property
    def uploads(self) -> bool:
        """True if a table of rows and weights is copied from the host."""
        return any(span is not None and span.sampling.power_of_two is None for span in (self.height, self.width))

    def run(self, out: Tensor, x: Tensor, origin: tuple[int, int, int] | None) -> None:
        """Write the resampled strip; ``origin`` is its first sample, row and column in the image."""
        if not self.begin_launch(out):
            return
        from sft.kernels.resize.linear_triton import launch_linear_resize  # not above: they import Triton
        from sft.kernels.resize.resize_triton import launch_resize

        start = (0, 0, 0) if origin is None else origin
        if not self.uploads:
            launch_linear_resize(to_channels_last(x), out, *(_linear_axis(span, start) for span in (self.height, self.width)))
            return
        tables = [band_table(span, start, out.shape[2 + axis], out.device) for axis, span in enumerate((self.height, self.width))]
        launch_resize(to_channels_last(x), out, *tables)

    def scratch_bytes(self, out: tuple[int, ...]) -> int:
        """Bytes of the tables, for an output of this shape."""
        if not self.uploads:
            return 0
        spans = ((self.height, out[2]), (self.width, out[3]))
        return sum(4 * length * (2 + (1 if span is None else span.width)) for span, length in spans)


def _linear_axis(span: ResampledRange | None, origin: tuple[int, int, int]) -> LinearAxis:
    """The axis of a strip at ``origin`` of the image, for an interpolation by a power of two; the identity if the range is None."""
    if span is None:
        return LinearAxis()
    factor = span.sampling.power_of_two
    assert factor is not None
    first, start = span.first_rows(origin)
    return LinearAxis(factor=factor, extent=span.sampling.extent, first_output=first, first_input=start, is_adjoint=span.is_adjoint)


def band_table(span: ResampledRange | None, origin: tuple[int, int, int], length: int, device: torch.device) -> BandTable:
    """The table of one axis; of the identity on ``length`` rows if the range is None."""
    if span is None:
        ones = torch.ones(length, dtype=torch.int32, device=device)
        return BandTable(first=torch.arange(length, dtype=torch.int32, device=device), count=ones, weights=ones.float().view(-1, 1))
    first, count, weights = (upload_table(array, device) for array in band_rows(span, *span.first_rows(origin)))
    return BandTable(first=first, count=count, weights=weights)


def _span_of(call: Instruction) -> ResampledRange | None:
    return call.function if isinstance(call.function, ResampledRange) else None


_LINEAR = {aten.upsample_bilinear2d.default: False, aten.upsample_bilinear2d_backward.default: True}
_NEAREST = {aten.upsample_nearest2d.default: False, aten.upsample_nearest2d_backward.default: True}


def _match_axis_resizes(call: Instruction, *, is_on_gpu: bool) -> tuple[ResampledRange | None, ResampledRange | None] | None:
    """Resampled ranges of rows and columns of ATen's interpolation of a buffer; None for any other call."""
    kind: ResamplingKind
    if call.function in _LINEAR:
        kind, is_adjoint = "linear", _LINEAR[call.function]
    elif call.function in _NEAREST:
        kind, is_adjoint = "nearest", _NEAREST[call.function]
    else:
        return None
    arguments = list(call.arguments[1:])
    lengths = arguments.pop(0)
    extents = arguments.pop(0)[2:] if is_adjoint else call.arguments[0].shape[2:]
    align_corners = arguments.pop(0) if kind == "linear" else False
    scales = arguments or [None] * len(lengths)  # a call with `size=` has no scales
    height, width = (
        None if each.is_identity else ResampledRange(each, axis, each.length, each.extent, is_adjoint=is_adjoint)
        for axis, each in enumerate(
            interpolated_axes(kind, extents, lengths, scales, align_corners=align_corners, is_double=False, is_on_gpu=is_on_gpu)
        )
    )
    return height, width


@dataclass(slots=True)
class _ResizePass:
    """Group of calls that resample both axes.

    Attributes:
        positions: positions of the calls, in order.
        spans: resampled ranges of rows and columns.
        x: the input.
        origin: port of the strip's origin.
        value: the result.
    """

    positions: list[int]
    spans: list[ResampledRange | None]
    x: Slot
    origin: Slot | None
    value: Slot


def _match_resize(context: MatchContext, at: int, call: Instruction) -> _ResizePass | None:
    out = call.outputs[0] if call.outputs else None
    if out is None or out.root != out.number or len(out.shape) != 4 or not all(out.shape):
        return None
    span = _span_of(call)
    if span is not None and span.axis in (ROWS, COLUMNS):
        both = [span, None] if span.axis == ROWS else [None, span]
        return _ResizePass([at], both, call.arguments[0], call.arguments[1], out)
    spans = _match_axis_resizes(call, is_on_gpu=context.fusion_device is not None)
    return None if spans is None or not any(spans) else _ResizePass([at], list(spans), call.arguments[0], None, out)


def match_resizes(context: MatchContext) -> Iterator[Rewrite]:
    """Interpolations of images."""
    for at, call in enumerate(context.def_use.instructions):
        resize = None if at in context.claimed else _match_resize(context, at, call)
        if resize is None or not all(resize.x.shape):
            continue
        _extend_pass(context, resize)
        rewrites = (_rewrite_resize(context, each) for each in (_with_cast(context, resize), resize) if each is not None)
        rewrite = next(filter(None, rewrites), None)
        if rewrite is not None:
            yield rewrite


def _extend_pass(context: MatchContext, resize: _ResizePass) -> None:
    """Extend the group by the resampling of the second axis, and by a cast of the result."""
    def_use = context.def_use
    for _ in range(2):
        users = [p for p in def_use.users(resize.value) if p > resize.positions[-1]]
        if len(users) != 1 or users[0] in context.claimed or not def_use.is_private(resize.value, [*resize.positions, users[0]]):
            return
        at = users[0]
        call = def_use.instructions[at]
        other = _match_resize(context, at, call)
        if other is not None and other.x == resize.value and not any(a and b for a, b in zip(resize.spans, other.spans, strict=True)):
            if resize.origin is not None and other.origin is not None and resize.origin != other.origin:
                return
            spans, origin = [a or b for a, b in zip(resize.spans, other.spans, strict=True)], resize.origin or other.origin
            value: Slot | None = other.value
        elif call.function is aten._to_copy.default and call.keywords.keys() == {"dtype"}:
            spans, origin, value = resize.spans, resize.origin, call.outputs[0]
        else:
            return
        if value is None or not def_use.can_move_to([*resize.positions, at], at):
            return
        resize.positions.append(at)
        resize.spans, resize.origin, resize.value = spans, origin, value


def _with_cast(context: MatchContext, resize: _ResizePass) -> _ResizePass | None:
    """The group with the cast of its input to fp32, in which the kernel sums in any case; None if there is no such cast."""
    def_use = context.def_use
    at = def_use.makers.get(resize.x.number)
    if at is None or not context.is_unclaimed(at, aten._to_copy.default) or resize.x.dtype != torch.float32:
        return None
    cast, positions = def_use.instructions[at], [at, *resize.positions]
    image: Slot = cast.arguments[0]
    if cast.keywords.keys() != {"dtype"} or image.dtype not in (torch.float16, torch.bfloat16):
        return None
    if not def_use.is_private(resize.x, positions) or not def_use.can_move_to(positions, positions[-1]):
        return None
    return replace(resize, positions=positions, x=image)


def selects_resize(
    selector: KernelSelector, dtype: torch.dtype, shape: Sequence[int], num_terms: Sequence[int], *, is_adjoint: bool
) -> bool:
    """True if a selector chooses the kernel to resample an image.

    Args:
        selector: chooses between kernels and ATen.
        dtype: element type of the operand.
        shape: shape of the result.
        num_terms: number of terms of a sum, for each axis; 1 for an axis that stays as it is.
        is_adjoint: true for the gradient.
    """
    numbers = selector.number_format_of(dtype)
    if numbers is None or len(shape) != 4 or not all(shape) or math.prod(num_terms) > _MAX_TERMS:
        return False
    shape_class = ShapeClass(
        operator="resize gradient" if is_adjoint else "resize",
        numbers=numbers,
        channels=(shape[1], shape[1]),
        kernel=tuple(num_terms),
        pixels=pixel_class(math.prod(shape) // shape[1]),
    )
    return selector.selects_kernel(shape_class)


def _rewrite_resize(context: MatchContext, resize: _ResizePass) -> Rewrite | None:
    out, owner = resize.value, context.def_use.instructions[resize.positions[0]].owner
    num_terms = [1 if span is None else span.width for span in resize.spans]
    is_adjoint = any(span is not None and span.is_adjoint for span in resize.spans)
    if context.selector.number_format_of(out.dtype) is None:
        return None
    if not selects_resize(context.selector, resize.x.dtype, out.shape, num_terms, is_adjoint=is_adjoint):
        return None
    call = ResizeCall(height=resize.spans[0], width=resize.spans[1])
    image, body = context.to_channels_last(resize.x, owner)
    concat = _following_concat(context, resize)
    if concat is None:
        positions, before, after = resize.positions, [allocation(out, owner)], list[Instruction]()
    else:
        positions = [*resize.positions, concat.at]
        out, before, after = concat.instructions(context)
    launch = kernel_instruction(
        call.run, out, image, resize.origin, writes=(out,), owner=owner, scratch_bytes=call.scratch_bytes(out.shape)
    )
    return Rewrite(removed=frozenset(positions), inserted={positions[-1]: (*body, *before, launch, *after)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Concat:
    """Concatenation of channels, one range of which the kernel writes in place.

    Attributes:
        at: its position.
        call: its instruction.
        out: the result.
        is_made: true if the instruction makes the result, false if it writes into a buffer.
        slots: its operands.
        spans: the slices of each.
        index: position of the kernel's result among the operands.
    """

    at: int
    call: Instruction
    out: Slot
    is_made: bool
    slots: tuple[Slot, ...]
    spans: tuple[tuple[DimSlice, ...], ...]
    index: int

    def instructions(self, context: MatchContext) -> tuple[Slot, list[Instruction], list[Instruction]]:
        """The range that the kernel writes, the instructions that make it, and those that copy the other operands after the kernel."""
        owner = self.call.owner
        target, view = self._range(context, self.index, self.index + 1)
        before = [allocation(self.out, owner), view] if self.is_made else [view]
        after: list[Instruction] = []
        for first, last in ((0, self.index), (self.index + 1, len(self.slots))):
            if first < last:
                copied, view = self._range(context, first, last)
                arguments = (copied, self.slots[first:last], self.spans[first:last], _CHANNELS)
                after += [view, Instruction(cat_slices_into, arguments, {}, (), (copied,), 0, 0, 0, owner)]
        return target, before, after

    def _range(self, context: MatchContext, first: int, last: int) -> tuple[Slot, Instruction]:
        """A view of the channels of some operands in the result, and the instruction that makes it."""
        start, stop = (sum(slot.shape[_CHANNELS] for slot in self.slots[:index]) for index in (first, last))
        shape = (*self.out.shape[:_CHANNELS], stop - start, *self.out.shape[_CHANNELS + 1 :])
        view = context.builder.slot(shape, self.out.dtype, self.out.root)
        return view, Instruction(aten.slice.Tensor, (self.out, _CHANNELS, start, stop), {}, (view,), (), 0, 0, 0, self.call.owner)


def _following_concat(context: MatchContext, resize: _ResizePass) -> _Concat | None:
    """The concatenation of channels that alone reads the result: the kernel writes into its result, and no copy is made."""
    def_use, value = context.def_use, resize.value
    at = next((user for user in def_use.users(value) if user > resize.positions[-1]), None)
    if at is None or at in context.claimed or not def_use.is_private(value, [*resize.positions, at]):
        return None
    call = def_use.instructions[at]
    spans: Sequence[Sequence[DimSlice]] | None = None
    if call.function is cat_slices_into:
        out, slots, spans, dim = call.arguments
    elif call.function is cat_slices:
        (slots, spans, dim), (out,) = call.arguments, call.outputs
    elif call.function is aten.cat.out:
        (slots, dim), out = call.arguments, call.keywords["out"]
    elif call.function is aten.cat.default:
        (slots, dim, *_), (out,) = (*call.arguments, 0), call.outputs
    else:
        return None
    spans = [()] * len(slots) if spans is None else spans
    positions = [position for position, slot in enumerate(slots) if slot.number == value.number]
    if len(positions) != 1 or dim != _CHANNELS or spans[positions[0]]:
        return None
    if {slot.dtype for slot in slots} != {out.dtype} or not context.is_channels_last(out) or out.root == resize.x.root:
        return None
    if not def_use.can_move_to([*resize.positions, at], at):
        return None
    slices, index = tuple(tuple(each) for each in spans), positions[0]
    return _Concat(at=at, call=call, out=out, is_made=bool(call.outputs), slots=tuple(slots), spans=slices, index=index)
