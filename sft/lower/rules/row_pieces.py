"""Pieces of rows for the weight gradient of a large convolution on a CPU.

oneDNN (torch 2.13, AVX-512) has no compiled code for weight gradients of large channels-last images and runs its reference loop, which
takes about a thousand times as long. Images of 384 MiB were fast, of 512 MiB slow with a stride of 2, of 1 GiB slow for a transposed
convolution, of 2 GiB slow for any convolution. The gradient is a sum over rows, so large images are divided. Pieces are views; only rows
that read padding are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sft.common.interval import Interval
from sft.lower.builder import ProgramBuilder
from sft.lower.context import SegmentInfo
from sft.lower.program import Slot

__all__ = ["RowPiece", "RowWindow", "divide_rows", "is_divided", "row_pieces"]

aten = torch.ops.aten

#: Bytes of an image or of its gradient above which a weight gradient is divided on a CPU.
_LARGE_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPiece:
    """Some output rows of a convolution and the rows that they read.

    Attributes:
        out_rows: rows of the output.
        rows: rows of the image.
        pad_low: rows of padding before them.
        pad_high: rows of padding after them.
    """

    out_rows: Interval
    rows: Interval
    pad_low: int = 0
    pad_high: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWindow:
    """Geometry of a convolution along the rows.

    Attributes:
        kernel_rows: rows from the first to the last tap of the kernel.
        stride: rows of the image for each row of the output.
        padding: rows of padding at both borders of the image.
    """

    kernel_rows: int
    stride: int
    padding: int


def row_pieces(num_out: int, num_rows: int, window: RowWindow, max_rows: int) -> Iterator[RowPiece]:
    """Pieces of at most ``max_rows`` output rows; those that read padding have pieces of their own.

    Args:
        num_out: rows of the output.
        num_rows: rows of the image.
        window: geometry of the convolution.
        max_rows: most output rows of a piece.

    >>> pieces = row_pieces(8, 8, RowWindow(kernel_rows=3, stride=1, padding=1), max_rows=4)
    >>> [(len(piece.out_rows), piece.rows.start, piece.pad_low, piece.pad_high) for piece in pieces]
    [(1, 0, 1, 0), (4, 0, 0, 0), (2, 4, 0, 0), (1, 6, 0, 1)]
    """
    kernel_rows, stride, padding = window.kernel_rows, window.stride, window.padding
    low = min(num_out, -(-padding // stride))
    high = max(low, min(num_out, (num_rows + padding - kernel_rows) // stride + 1))
    stops = [*([low] if low else []), *range(low + max_rows, high, max_rows), *([high] if high > low else []), num_out]
    start = 0
    for stop in stops:
        if stop > start:
            first, last = start * stride - padding, (stop - 1) * stride + kernel_rows - padding
            rows = Interval(max(0, first), min(num_rows, last))
            yield RowPiece(out_rows=Interval(start, stop), rows=rows, pad_low=max(0, -first), pad_high=max(0, last - num_rows))
        start = stop


def is_divided(scope: SegmentInfo, image: Slot, out: Slot, window: RowWindow) -> bool:
    """True for a weight gradient on a CPU of large tensors. A padding of the kernel's height would leave output rows without data."""
    return scope.backend is None and window.padding < window.kernel_rows and max(image.num_bytes, out.num_bytes) > _LARGE_BYTES


def divide_rows(builder: ProgramBuilder, image: Slot, out: Slot, window: RowWindow, *, num_axes: int) -> Iterator[tuple[Slot, Slot]]:
    """Pieces of a convolution's images, with their padding, and of its outputs: some images of a batch, or some rows of one.

    Args:
        builder: takes the instructions of views and padded copies.
        image: the image, or for a transposed convolution the output.
        out: the output or its gradient, or for a transposed convolution the image.
        window: geometry of the convolution from ``image`` to ``out``.
        num_axes: axes of the image that the kernel slides over.
    """
    dim = len(image.shape) - num_axes
    num_images = image.shape[0] if dim == 2 else 1
    row_bytes = max(image.num_bytes, out.num_bytes) // (num_images * out.shape[dim])
    max_rows = max(1, _LARGE_BYTES // (2 * row_bytes))
    max_images = max(1, max_rows // out.shape[dim])
    pieces = list(row_pieces(out.shape[dim], image.shape[dim], window, max_rows))
    for first in range(0, num_images, max_images):
        length = min(max_images, num_images - first)
        images, outs = (slot if length == num_images else builder.narrow(slot, 0, first, length) for slot in (image, out))
        for piece in pieces:
            rows = builder.narrow(images, dim, piece.rows.start, len(piece.rows))
            if piece.pad_low or piece.pad_high:
                shape = (*rows.shape[:dim], piece.pad_low + len(piece.rows) + piece.pad_high, *rows.shape[dim + 1 :])
                flat = [*[0] * (2 * num_axes - 2), piece.pad_low, piece.pad_high]
                rows = builder.call(aten.constant_pad_nd.default, rows, flat, 0.0, shape=shape, dtype=rows.dtype)
            yield rows, builder.narrow(outs, dim, piece.out_rows.start, len(piece.out_rows))
