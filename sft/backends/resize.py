"""Interpolations of a program: rows and columns in one pass.

The lowering gathers rows by one call and leaves the columns to another, or to ATen where a strip has all of them. A kernel does both at
once and keeps nothing between. Which rows and weights these are depends on where the strip lies, so the tables are made when the program
runs, from the very bands that the lowering gathers by (:mod:`sft.analysis.ir.ops.resize_matrix`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sft.analysis.ir.axes import COLUMNS, ROWS
from sft.analysis.ir.ops.resize_matrix import AxisResampling
from sft.backends.kernel_call import KernelCall, allocation, kernel_instruction, to_channels_last
from sft.backends.pattern import MatchContext, Rewrite
from sft.backends.selector import ShapeClass, pixel_class
from sft.kernels.resize.band_table import BandTable
from sft.lower.program import Instruction, Slot
from sft.lower.row_gather import upload_table
from sft.lower.rules.resample import ResampledRange

__all__ = ["ResizeCall", "band_rows", "band_table", "match_resizes"]

aten = torch.ops.aten

#: of a result's elements more are better summed up one axis after the other
_MAX_TERMS = 36


@functools.lru_cache(maxsize=256)
def band_rows(span: ResampledRange, first: int, start: int) -> tuple[Any, Any, Any]:
    """First column, count and weights of each row that a span makes, as its buffer numbers the columns."""
    band = span.sampling.adjoint if span.is_adjoint else span.sampling.forward
    rows, low, extent = (start, first, span.length) if span.is_adjoint else (first, start, span.extent)
    taken = slice(rows, rows + span.num_rows)
    begin, end = band.start[taken], band.stop[taken]
    inside = np.clip(begin, low, low + extent), np.clip(end, low, low + extent)
    count = np.maximum(inside[1] - inside[0], 0)
    place = np.minimum((inside[0] - begin)[:, None] + np.arange(band.width), band.width - 1)
    weights = np.take_along_axis(band.weights[taken], place, 1)
    return (inside[0] - low).astype(np.int32), count.astype(np.int32), weights.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeCall(KernelCall):
    """Rows and columns resampled.

    Attributes:
        height, width: what the strip has of each axis; None where nothing changes along it.
    """

    uploads: ClassVar[bool] = True
    height: ResampledRange | None
    width: ResampledRange | None

    def run(self, out: Tensor, x: Tensor, origin: tuple[int, int, int] | None) -> None:
        """Write the resampled strip, whose place in the image is ``origin``."""
        if not self.begins(out):
            return
        from sft.kernels.resize.resize_triton import launch_resize  # not above: it imports Triton

        where = (0, 0, 0) if origin is None else origin
        tables = [band_table(span, where, out.shape[2 + axis], out.device) for axis, span in enumerate((self.height, self.width))]
        launch_resize(to_channels_last(x), out, *tables)

    def scratch_bytes(self, out: tuple[int, ...]) -> int:
        """Of the tables."""
        spans = ((self.height, out[2]), (self.width, out[3]))
        return sum(4 * length * (2 + (1 if span is None else span.width)) for span, length in spans)


def band_table(span: ResampledRange | None, origin: tuple[int, int, int], length: int, device: torch.device) -> BandTable:
    if span is None:
        ones = torch.ones(length, dtype=torch.int32, device=device)
        return BandTable(first=torch.arange(length, dtype=torch.int32, device=device), count=ones, weights=ones.float().view(-1, 1))
    parts = [upload_table(part, device) for part in band_rows(span, *span.places(origin))]
    return BandTable(first=parts[0], count=parts[1], weights=parts[2])


def _span_of(call: Instruction) -> ResampledRange | None:
    return call.function if isinstance(call.function, ResampledRange) else None


_LINEAR = {aten.upsample_bilinear2d.default: False, aten.upsample_bilinear2d_backward.default: True}
_NEAREST = {aten.upsample_nearest2d.default: False, aten.upsample_nearest2d_backward.default: True}


def _match_axis_resizes(call: Instruction) -> tuple[ResampledRange | None, ResampledRange | None] | None:
    """What ATen's interpolation does along rows and columns of the buffer that it is given; None for anything else."""
    if call.function in _LINEAR:
        kind, is_adjoint = "linear", _LINEAR[call.function]
    elif call.function in _NEAREST:
        kind, is_adjoint = "nearest", _NEAREST[call.function]
    else:
        return None
    rest = list(call.arguments[1:])
    lengths = rest.pop(0)
    extents = rest.pop(0)[2:] if is_adjoint else call.arguments[0].shape[2:]
    align_corners = rest.pop(0) if kind == "linear" else False
    scales = rest or [None] * len(lengths)  # `size=` alone says none
    spans = []
    for axis, (extent, length, scale) in enumerate(zip(extents, lengths, scales, strict=True)):
        sampling = AxisResampling(
            kind="linear" if kind == "linear" else "nearest",
            extent=extent,
            length=length,
            scale=scale,
            align_corners=align_corners,
            is_double=False,
        )
        spans.append(None if sampling.is_identity else ResampledRange(sampling, axis, length, extent, is_adjoint=is_adjoint))
    return spans[0], spans[1]


@dataclass(slots=True)
class _ResizePass:
    """Calls that make one resampling together.

    Attributes:
        positions: in order.
        spans: along rows and columns.
        x: what they read.
        origin: where the strip lies.
        value: what they make.
    """

    positions: list[int]
    spans: list[ResampledRange | None]
    x: Slot
    origin: Slot | None
    value: Slot


def _match_resize(question: MatchContext, at: int, call: Instruction) -> _ResizePass | None:
    out = call.outputs[0] if call.outputs else None
    if out is None or out.root != out.number or len(out.shape) != 4 or not all(out.shape):
        return None
    span = _span_of(call)
    if span is not None and span.axis in (ROWS, COLUMNS):
        both = [span, None] if span.axis == ROWS else [None, span]
        return _ResizePass([at], both, call.arguments[0], call.arguments[1], out)
    found = _match_axis_resizes(call)
    return None if found is None or not any(found) else _ResizePass([at], list(found), call.arguments[0], None, out)


def match_resizes(question: MatchContext) -> Iterator[Rewrite]:
    """Interpolations."""
    for at, call in enumerate(question.listing.instructions):
        found = None if at in question.taken else _match_resize(question, at, call)
        if found is None or not all(found.x.shape):
            continue
        _extend_pass(question, found)
        replacement = _rewrite_resize(question, found)
        if replacement is not None:
            yield replacement


def _extend_pass(question: MatchContext, found: _ResizePass) -> None:
    """Take in the other axis, then a cast."""
    listing = question.listing
    for _ in range(2):
        users = [p for p in listing.users(found.value) if p > found.positions[-1]]
        if len(users) != 1 or users[0] in question.taken or not listing.is_private(found.value, [*found.positions, users[0]]):
            return
        at = users[0]
        call = listing.instructions[at]
        other = _match_resize(question, at, call)
        if other is not None and other.x == found.value and not any(a and b for a, b in zip(found.spans, other.spans, strict=True)):
            if found.origin is not None and other.origin is not None and found.origin != other.origin:
                return
            spans, origin = [a or b for a, b in zip(found.spans, other.spans, strict=True)], found.origin or other.origin
            made: Slot | None = other.value
        elif call.function is aten._to_copy.default and call.keywords.keys() == {"dtype"}:
            spans, origin, made = found.spans, found.origin, call.outputs[0]
        else:
            return
        if made is None or not listing.can_move_to([*found.positions, at], at):
            return
        found.positions.append(at)
        found.spans, found.origin, found.value = spans, origin, made


def _rewrite_resize(question: MatchContext, found: _ResizePass) -> Rewrite | None:
    numbers = question.selector.number_format_of(found.x.dtype)
    terms = math.prod(span.width for span in found.spans if span is not None)
    out, owner = found.value, question.listing.instructions[found.positions[0]].owner
    if numbers is None or terms > _MAX_TERMS or question.selector.number_format_of(out.dtype) is None:
        return None
    is_adjoint = any(span is not None and span.is_adjoint for span in found.spans)
    wanted = ShapeClass(
        operator="resize gradient" if is_adjoint else "resize",
        numbers=numbers,
        channels=(out.shape[1], out.shape[1]),
        kernel=tuple(1 if span is None else span.width for span in found.spans),
        pixels=pixel_class(math.prod(out.shape) // out.shape[1]),
    )
    if not question.selector.selects_kernel(wanted):
        return None
    call = ResizeCall(height=found.spans[0], width=found.spans[1])
    image, body = question.image(found.x, owner)
    launch = kernel_instruction(call.run, out, image, found.origin, writes=(out,), owner=owner, scratch_bytes=call.scratch_bytes(out.shape))
    last = found.positions[-1]
    return Rewrite(gone=frozenset(found.positions), inserted={last: (*body, allocation(out, owner), launch)})
