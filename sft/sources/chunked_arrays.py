"""Chunked arrays as images: Zarr, dask and HDF5 arrays, of which a read loads only the chunks that it needs.

An array is chunked if it has ``shape``, a NumPy ``dtype`` and ``array[slices]``, but is neither a NumPy array nor a tensor. Its chunks may
be compressed, or the result of a computation (dask), so each row is read once a sweep: rows are read in blocks of full chunks
(`sft.sources.row_blocks`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from sft.common.errors import SftError, SourceError, reason_text
from sft.common.interval import Interval
from sft.sources.host_arrays import AnyArray, Layout, axis_order
from sft.sources.image import Pixels, Rectangle, check_level
from sft.sources.row_blocks import RowBlocks

__all__ = ["ChunkedRows", "chunk_extent", "is_chunked_array"]


def is_chunked_array(value: object) -> bool:
    """True for array objects that are read by slicing, such as ``zarr.Array`` and ``dask.array.Array``.

    >>> is_chunked_array(np.zeros(3)), is_chunked_array([0.0])
    (False, False)
    >>> is_chunked_array(np.int64(3))
    False
    """
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        return False
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return isinstance(shape, tuple) and isinstance(dtype, np.dtype) and hasattr(value, "__getitem__") and not hasattr(value, "rows")


def chunk_extent(array: Any, axis: int) -> int | None:
    """Entries of a chunk along an axis; None for an array without chunks. Chunks of dask may differ: the first counts."""
    chunks = getattr(array, "chunks", None)
    if not isinstance(chunks, tuple) or axis >= len(chunks):
        return None
    extent = chunks[axis][0] if isinstance(chunks[axis], tuple) else chunks[axis]
    return int(extent) if isinstance(extent, (int, np.integer)) and extent > 0 else None


class _Sample:
    """One batch element of a chunked array as an `sft.sources.Image`."""

    def __init__(self, array: Any, layout: Layout, sample: int) -> None:
        self._array, self._layout, self._sample = array, layout, sample
        by_axis = dict(zip(layout, array.shape, strict=True))
        self.height_px, self.width_px, self.num_channels = by_axis["H"], by_axis["W"], by_axis["C"]
        self.dtype: np.dtype[Any] = array.dtype
        self.tile_height_px = chunk_extent(array, layout.index("H"))

    def __repr__(self) -> str:
        return f"{type(self._array).__name__} of shape {tuple(self._array.shape)}"

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        check_level(repr(self), level, 1)
        rectangle = Rectangle.of(x, y, w, h)
        rectangle.check_inside(repr(self), (self.width_px, self.height_px))
        rows, columns = rectangle.slices
        index = {"N": slice(self._sample, self._sample + 1), "C": slice(None), "H": rows, "W": columns}
        try:
            block: AnyArray = np.asarray(self._array[tuple(index[axis] for axis in self._layout)])
        except SftError:
            raise
        except Exception as error:  # a store or a computation of the caller may raise any error
            raise SourceError(
                f"cannot read rows [{y}, {y + h}) of {self}: {type(error).__name__}: {reason_text(error)}. Repair the array."
            ) from error
        full = block if len(self._layout) == 4 else block[None]
        return np.ascontiguousarray(full.transpose(axis_order(self._layout, "NHWC"))[0])


class ChunkedRows:
    """Rows of a chunked array, in blocks of full chunks.

    Args:
        array: of which `is_chunked_array` is true.
        layout: names of its axes.
    """

    def __init__(self, array: Any, layout: Layout) -> None:
        by_axis = dict(zip(layout, array.shape, strict=True))
        self.shape: tuple[int, int, int, int] = (by_axis.get("N", 1), by_axis["C"], by_axis["H"], by_axis["W"])
        samples = [_Sample(array, layout, sample) for sample in range(self.shape[0])]
        self._blocks = [RowBlocks(sample, Interval(0, sample.width_px)) for sample in samples]

    def rows(self, sample: int, interval: Interval) -> Pixels:
        """Rows of a batch element, ``[rows, width, channels]``.

        Raises:
            SourceError: they cannot be read.
        """
        return self._blocks[sample].rows(interval)
