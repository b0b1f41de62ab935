"""Resampling of a range of one axis of an image: weighted sums of rows (columns) that are gathered by index::

    out[i] = sum_k weight[k, i] * in[index[k, i]]

The adjoint has the same form with transposed windows, so gradients are sums in a fixed order, too. Indices and weights depend on the
strip's position, which is bound when the program runs (the ``origin`` port); so strips of one signature share their program.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.analysis.ir.axes import COLUMNS
from sft.analysis.ir.ops.resampling import ResamplingSpec
from sft.analysis.ir.ops.resize_matrix import AxisResampling
from sft.lower.context import NodeContext
from sft.lower.program import Slot
from sft.lower.row_gather import upload_table

__all__ = ["ResampledRange", "emit_resampling", "index_select_channels_last", "may_be_scattered", "resampled_ranges"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ResampledRange:
    """The range of one axis that a strip or panel resamples; also the function that resamples it.

    Attributes:
        sampling: indices and weights of the full axis.
        axis: index of the axis.
        length: number of output rows.
        extent: number of input rows.
        is_adjoint: True if rows of a gradient are gathered (the adjoint).
        is_sum: True if the range has all output rows, and the origin is the first input row (a reduction over strips).
    """

    sampling: AxisResampling
    axis: int
    length: int
    extent: int
    is_adjoint: bool = False
    is_sum: bool = False

    @property
    def is_full_axis(self) -> bool:
        """True if it is the full axis."""
        return (self.length, self.extent) == (self.sampling.length, self.sampling.extent)

    @property
    def num_rows(self) -> int:
        """Number of rows computed."""
        return self.extent if self.is_adjoint else self.length

    @property
    def width(self) -> int:
        """Number of terms in the sum of a row."""
        return (self.sampling.adjoint if self.is_adjoint else self.sampling.forward).width

    def first_rows(self, origin: tuple[int, int, int]) -> tuple[int, int]:
        """The first output row and the first input row."""
        first = origin[1 + self.axis] if self.axis <= COLUMNS else 0
        if self.is_sum:
            return 0, first
        is_full = self.extent == self.sampling.extent
        return first, 0 if is_full else min(max(0, self.sampling.access.low(first)), self.sampling.extent)

    def tables(self, origin: tuple[int, int, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Indices and weights for a strip at ``origin`` of the image: batch element, row and column of its first element."""
        first, start = self.first_rows(origin)
        band = self.sampling.adjoint if self.is_adjoint else self.sampling.forward
        return band.submatrix(*((start, self.extent, first, self.length) if self.is_adjoint else (first, self.length, start, self.extent)))

    def is_same_at(self, origin: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        """True if indices and weights are the same at both origins."""
        return all(map(np.array_equal, self.tables(origin), self.tables(other)))

    def __call__(self, value: Tensor, origin: tuple[int, int, int], *, dim: int, dtype: torch.dtype) -> Tensor:
        """Resample a strip at ``origin`` of the image along ``dim``."""
        indices, weights = self.tables(origin)
        if dim != value.dim() - 1 and not (self.sampling.forward.is_selection and not self.is_adjoint):
            return _weighted_row_sums(value.to(dtype), dim, indices, weights)
        index = upload_table(indices, value.device)
        out = index_select_channels_last(value, dim, index[0]).to(dtype)
        if self.sampling.forward.is_selection and not self.is_adjoint:
            return out
        shape = [-1 if each == dim else 1 for each in range(value.dim())]
        weight = upload_table(weights, value.device, dtype)
        out.mul_(weight[0].view(shape))
        for term in range(1, self.width):
            out.addcmul_(index_select_channels_last(value, dim, index[term]).to(dtype), weight[term].view(shape))
        return out


def _weighted_row_sums(value: Tensor, dim: int, indices: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]) -> Tensor:
    """Weighted sums of rows along ``dim``, in one pass over memory: an embedding bag with a row of all columns as an embedding.

    Args:
        value: the strip; rows are not its last axis.
        dim: axis of the rows.
        indices: rows of each sum, ``[terms, sums]``.
        weights: their weights, likewise.
    """
    is_channels_last = value.dim() > 3 and value.shape[1] > 1 and value.stride(1) == 1
    if is_channels_last:
        value, dim = value.movedim(1, -1), dim - 1
    rows, plane_rows = _row_matrix(value, dim)
    planes, length = math.prod(value.shape[:dim]), indices.shape[1]
    index = upload_table(indices.T, value.device, torch.int32)
    weight = upload_table(weights.T, value.device, value.dtype)
    if planes > 1:
        first = torch.arange(0, planes * plane_rows, plane_rows, dtype=torch.int32, device=value.device)
        index, weight = (index + first.view(-1, 1, 1)).flatten(0, 1), weight.repeat(planes, 1)
    offsets = torch.arange(0, index.numel(), index.shape[1], dtype=torch.int32, device=value.device)
    sums = torch.embedding_bag(rows, index.flatten(), offsets, False, 0, False, weight.flatten())[0]
    out = sums.view(*value.shape[:dim], length, *value.shape[dim + 1 :])
    return out.movedim(-1, 1) if is_channels_last else out


def _row_matrix(value: Tensor, dim: int) -> tuple[Tensor, int]:
    """Rows along ``dim`` of all planes (the axes before it) as a matrix, and the number of its rows from one plane to the next.

    A copy only if the columns of a row, or the planes, are not at equal distances in memory.
    """
    planes, extent, width = math.prod(value.shape[:dim]), value.shape[dim], math.prod(value.shape[dim + 1 :])
    with contextlib.suppress(RuntimeError):  # planes at different distances
        stacked = value.view(planes, extent, width)
        plane_rows = stacked.stride(0) // width if planes > 1 else extent
        if stacked[0].is_contiguous() and (planes == 1 or stacked.stride(0) == plane_rows * width):
            return stacked.as_strided(((planes - 1) * plane_rows + extent, width), (width, 1)), plane_rows
    return value.reshape(planes * extent, width), extent


def index_select_channels_last(value: Tensor, dim: int, index: Tensor) -> Tensor:
    """``index_select`` that keeps the channels-last layout."""
    if value.dim() > 3 and value.shape[1] > 1 and value.stride(1) == 1:
        return value.movedim(1, -1).index_select(dim - 1, index).movedim(-1, 1)
    return value.index_select(dim, index)


def _table_bytes(max_planes: int, span: ResampledRange, dtype: torch.dtype) -> int:
    """Most bytes of the tables of :func:`_weighted_row_sums`: of 4-byte indices, and of weights.

    Args:
        max_planes: most matrices of rows.
        span: the range.
        dtype: element type of the weights.
    """
    num_sums = max_planes * span.num_rows
    num_terms, entry_bytes = num_sums * span.width, 4 + dtype.itemsize
    first_rows, bags = 4 * max_planes, 4 * num_sums  # bags: the first index of each
    tiling = first_rows + entry_bytes * (span.width * span.num_rows + num_terms)
    # ATen also returns the bag of each index, of which there is one more, and two numbers of each bag.
    summing = first_rows + entry_bytes * num_terms + bags + 4 * (num_terms + 1) + 2 * bags
    return max(tiling, summing)


def emit_resampling(ctx: NodeContext, value: Slot, span: ResampledRange, dtype: torch.dtype) -> Slot:
    """Emit the resampling of a value along one axis."""
    dim = ctx.scope.axes.dim(len(value.shape), span.axis)
    assert dim is not None
    shape = (*value.shape[:dim], span.num_rows, *value.shape[dim + 1 :])
    count, num_terms = math.prod(shape), span.width * span.num_rows
    if dim == len(shape) - 1:
        # A term of the sum, its copy in a narrower type, and the tables of indices and weights.
        term = count * dtype.itemsize if span.width > 1 else 0
        narrow = count * value.dtype.itemsize if value.dtype != dtype else 0
        scratch_bytes = term + narrow + num_terms * (8 + dtype.itemsize)
    else:
        # A copy of the strip, and the tables of indices, weights and bags, of each plane.
        is_copied = value.dtype != dtype or may_be_scattered(ctx, value, (0, dim, dim + 1) if value.shape[0] == 1 else (0, dim))
        scratch_bytes = math.prod(value.shape) * dtype.itemsize * is_copied + _table_bytes(math.prod(shape[:dim]), span, dtype)
    return ctx.builder.call(
        span,
        value,
        ctx.builder.port("origin", ctx.node.name, ()),
        shape=shape,
        dtype=dtype,
        keywords={"dim": dim, "dtype": dtype},
        scratch_bytes=scratch_bytes,
    )


#: Ports whose tensors are dense in memory, except for slices along the rows or the samples.
_DENSE_PORTS = frozenset({"source", "carry", "grad_carry"})


def may_be_scattered(ctx: NodeContext, value: Slot, harmless: Collection[int]) -> bool:
    """True if the elements of a slot may be scattered in memory, so that a function of it may need a copy.

    That is so for slices along dimensions that are not ``harmless``, for gradients of the caller, and for views that another operator has
    made, such as some of the channels.
    """
    builder = ctx.builder
    for instruction in reversed(builder.instructions):
        if value.root == value.number or instruction.owner != builder.owner:
            break
        if all(out is None or out.number != value.number for out in instruction.outputs):
            continue
        if instruction.function is not aten.slice.Tensor or instruction.arguments[1] not in harmless:
            return True
        value = instruction.arguments[0]
    port = next((port for port, slot in builder.ports.items() if slot.number == value.number), None)
    return value.root != value.number or (port is not None and port.role not in _DENSE_PORTS)


def resampled_ranges(ctx: NodeContext, lengths: Sequence[int], extents: Sequence[int], *, is_sum: bool = False) -> list[ResampledRange]:
    """The range of each axis that the strip resamples."""
    row = ctx.scope.specs[ctx.node.name]
    assert isinstance(row, ResamplingSpec)
    spans = []
    for axis, (length, extent) in enumerate(zip(lengths, extents, strict=True)):
        sampling = row.sampling(ctx.node, axis)
        assert sampling is not None
        spans.append(ResampledRange(sampling, axis, length, extent, is_sum=is_sum))
    return spans
