"""Label maps: integers for every pixel, read in strips along with the image, and unscaled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.common.array_types import BoolArray
from sft.common.errors import InputError
from sft.common.interval import Interval
from sft.sources.arrays import map_npy_file
from sft.sources.host_arrays import HostArray, as_host_array, check_mapping, release_pages
from sft.sources.image import Image, Size, pixel_dtype
from sft.sources.resample import level_scale
from sft.sources.row_blocks import RowBlocks
from sft.sources.source import check_rows, check_samples, equal_rows

__all__ = ["ImageLabels", "IndexArray", "LabelSource", "label_cells", "size_problem"]

#: Indices along one axis of an array.
IndexArray = npt.NDArray[np.intp]
#: Rows of an image that are compared at a time.
_ROWS_COMPARED = 256
#: Denominators of the scale between two resolutions, as of `sft.sources.resample`.
_MAX_DENOMINATOR = 1000
#: Px of a slide for a label; more than any slide has.
_MAX_SCALE = 1 << 40


class LabelSource:
    """A label map in memory, in a memmap or in a ``.npy`` file as a `sft.sources.Source` of ``torch.int64``.

    Nothing is scaled, as the bytes of an image would be. Its shape is ``[N, 1, H, W]``, whatever the array's. The array must not change
    between the forward and the backward pass.

    >>> source = LabelSource(np.array([[0, 1], [7, 255]], np.uint8))
    >>> out = torch.empty(1, 1, 1, 2, dtype=torch.int64)
    >>> source.rows(Interval(1, 2), out)
    >>> source.shape, out.tolist()
    ((1, 1, 2, 2), [[[[7, 255]]]])

    >>> LabelSource(np.array([[0, 255]], np.uint8), values={0: 0, 255: 1}).rows(Interval(0, 1), out)
    >>> out.tolist()
    [[[[0, 1]]]]

    Args:
        array: integers or booleans ``[H, W]``, ``[N, H, W]`` or ``[N, 1, H, W]``; or the path of a ``.npy`` file of these.
        values: label of each value of the array. Default: `None` (the values are the labels)

    Raises:
        InputError: wrong type, rank, dtype or extent.
        SourceError: the file cannot be mapped.
    """

    dtype = torch.int64

    def __init__(
        self,
        array: HostArray | str | os.PathLike[str],
        *,
        values: Mapping[int, int] | None = None,
    ) -> None:
        self.values = None if values is None else dict(sorted(values.items()))
        self.path = Path(array) if isinstance(array, (str, os.PathLike)) else None
        host_array = as_host_array(array if self.path is None else map_npy_file(self.path), "read labels from")
        name = "array" if self.path is None else str(self.path)
        if not isinstance(host_array, np.ndarray) or host_array.dtype.kind not in "uib":
            raise InputError(
                f"cannot read labels of {host_array.dtype} from {name}: labels are integers. Convert them, or use ArraySource."
            )
        if host_array.dtype == np.uint64 and host_array.size and int(host_array.max()) > np.iinfo(np.int64).max:
            raise InputError(f"cannot read labels from {name}: {int(host_array.max())} exceeds int64. Renumber the labels.")
        shape = host_array.shape if len(host_array.shape) != 4 else (host_array.shape[0], *host_array.shape[2:])
        if len(shape) not in (2, 3) or min(host_array.shape) < 1 or (len(host_array.shape) == 4 and host_array.shape[1] != 1):
            raise InputError(
                f"cannot read labels from {name} of shape {host_array.shape}: give [H, W], [N, H, W] or [N, 1, H, W], none empty."
            )
        self._array, self._name = host_array, name
        #: a view [N, H, W]
        self._labels = host_array.reshape(shape) if len(shape) == 3 else host_array[None]
        num, height_px, width_px = self._labels.shape
        self.shape: tuple[int, int, int, int] = (num, 1, height_px, width_px)

    def __repr__(self) -> str:
        return f"LabelSource({self._name}, shape={self.shape})"

    def __reduce__(self) -> tuple[Any, ...]:
        array = self._array if self.path is None else self.path
        return (LabelSource if self.values is None else partial(LabelSource, values=self.values), (array,))

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with rows; see `sft.sources.Source`.

        Raises:
            InputError: the interval or ``out`` does not fit (`out` is unchanged), or a value of the array has no label.
            SourceError: the mapped file was cut short.
        """
        check_rows(self._name, self.shape, interval, out, dtype=self.dtype)
        if not interval:
            return
        check_mapping(self._array, self._name)
        for sample in range(self.shape[0]):
            labels = self._labels[sample, interval.start : interval.stop]
            out[sample, 0].numpy()[...] = labels if self.values is None else _mapped(labels, self.values, self._name)
            release_pages(labels[..., None])

    def repeated_rows(self, columns: Interval) -> BoolArray:
        """For each row whether it equals the row above it in these columns: all of them are read once. See `RepeatingSource`.

        Raises:
            SourceError: the mapped file was cut short.
        """
        check_mapping(self._array, self._name)
        same: BoolArray = np.logical_and.reduce([equal_rows(labels[..., None], columns) for labels in self._labels])
        return same

    def samples(self, batch: Interval) -> LabelSource:
        """The source of some batch elements: a view.

        Raises:
            InputError: the batch elements do not exist.
        """
        check_samples(self, batch)
        return LabelSource(self._labels[batch.start : batch.stop], values=self.values)


def _mapped(values: npt.NDArray[Any], labels: Mapping[int, int], name: str) -> npt.NDArray[np.int64]:
    """Labels of values by a table, which is sorted.

    Raises:
        InputError: a value has none.
    """
    known, targets = (np.array(list(numbers), np.int64) for numbers in (labels, labels.values()))
    place = np.minimum(np.searchsorted(known, values), len(known) - 1)
    unknown = known[place] != values
    if unknown.any():
        raise InputError(f"cannot read labels from {name}: value {values[unknown][0]} has none; labelled are {known.tolist()}.")
    chosen: npt.NDArray[np.int64] = targets[place]
    return chosen


class ImageLabels:
    """An image of one channel of integers as a `sft.sources.Source` of ``torch.int64``, shape ``[1, 1, H, W]``.

    >>> from sft.sources import ArrayImage
    >>> source = ImageLabels(ArrayImage(np.array([[0, 255]], np.uint8)), values={0: 0, 255: 1})
    >>> out = torch.empty(1, 1, 1, 2, dtype=torch.int64)
    >>> source.rows(Interval(0, 1), out)
    >>> out.flatten().tolist()
    [0, 1]

    Args:
        image: such as `sft.sources.open_labels` reads, and views of it.
        values: label of each value of the image. Default: `None` (the values are the labels)

    Raises:
        InputError: several channels, or values that are not integers.
    """

    dtype = torch.int64

    def __init__(self, image: Image, *, values: Mapping[int, int] | None = None) -> None:
        num_channels, dtype = int(getattr(image, "num_channels", 1)), pixel_dtype(image)
        if num_channels != 1 or dtype.kind not in "ui":
            raise InputError(f"cannot read labels from {image}: it has {num_channels} channels of {dtype}. Give one channel of integers.")
        self.image = image
        self.values = None if values is None else dict(sorted(values.items()))
        self.shape: tuple[int, int, int, int] = (1, 1, image.height_px, image.width_px)
        self._blocks = RowBlocks(image, Interval(0, image.width_px))

    def __repr__(self) -> str:
        return f"ImageLabels({self.image!r}, shape={self.shape})"

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with rows; see `sft.sources.Source`.

        Raises:
            InputError: the interval or ``out`` does not fit (`out` is unchanged), or a value has no label.
            SourceError: the image cannot be read.
        """
        check_rows(repr(self.image), self.shape, interval, out, dtype=self.dtype)
        if interval:
            values = self._blocks.rows(interval)[..., 0]
            out[0, 0].numpy()[...] = values if self.values is None else _mapped(values, self.values, repr(self.image))

    def repeated_rows(self, columns: Interval) -> BoolArray:
        """For each row whether it equals the row above it in these columns: all of them are read once. See `RepeatingSource`.

        Raises:
            SourceError: the image cannot be read.
        """
        height = self.image.height_px
        same = np.zeros(height, bool)
        last: npt.NDArray[Any] | None = None
        for top in range(0, height, _ROWS_COMPARED):
            rows = self._blocks.rows(Interval(top, min(top + _ROWS_COMPARED, height)))[:, columns.start : columns.stop, 0]
            above = rows[:-1] if last is None else np.concatenate([last, rows[:-1]])
            same[top + (last is None) : top + len(rows)] = (rows[1 if last is None else 0 :] == above).all(axis=1)
            last = rows[-1:]
        return same


def label_cells(
    label_size: Size, *, slide_size: Size, image_size: Size, scale: tuple[float, float], name: str
) -> tuple[IndexArray, IndexArray] | None:
    """Row and column of a label map for each row and column of an image; None for one label a pixel.

    A label map of another resolution shows the same field: its first label begins where the slide does. One of floor(size / n) or
    ceil(size / n) px, as a level of a pyramid, is reduced by exactly n (`sft.sources.resample.level_scale`), any other by the quotient of
    the sizes, which is one number for both sides up to their rounding (`size_problem`). A pixel of the image has the label under its
    centre. With ``s`` px of the slide's largest level for a pixel of the image, and ``d`` for a label, pixel ``i`` has label
    ``floor((i + 1/2) s / d)``, at most the last one.

    >>> rows, columns = label_cells((2, 2), slide_size=(4, 4), image_size=(4, 4), scale=(1.0, 1.0), name="map")
    >>> rows.tolist()
    [0, 0, 1, 1]

    Args:
        label_size: (width, height) of the label map, in px.
        slide_size: (width, height) of the slide's largest level, in px.
        image_size: (width, height) of the image, in px.
        scale: px of the largest level for a pixel of the image, (x, y).
        name: of the label map, for messages.

    Raises:
        InputError: its size is that of no resolution of the slide.
    """
    if label_size == image_size:
        return None
    problem = size_problem(label_size, slide_size)
    if problem is not None:
        raise InputError(
            f"label map {name} has {label_size[0]} x {label_size[1]} px, its slide {slide_size[0]} x {slide_size[1]} px, and "
            f"{image_size[0]} x {image_size[1]} px at this resolution: {problem}. Give the label map of this slide."
        )
    columns, rows = (
        _cells(image_px, Fraction(step).limit_denominator(_MAX_DENOMINATOR), label_px, count)
        for image_px, step, label_px, count in zip(image_size, scale, level_scale(slide_size, label_size), label_size, strict=True)
    )
    return rows, columns


def size_problem(size: Size, slide_size: Size) -> str | None:
    """Reason why a size is not that of the slide at another resolution; None if it is.

    Both sides of an image of another resolution are those of the slide divided by one number, rounded up or down. An image of one pixel
    fits every slide, so it states no resolution.

    >>> size_problem((20, 25), (40, 50)), size_problem((20, 30), (40, 50)), size_problem((13, 17), (40, 50))
    (None, 'the sides have another ratio', None)

    Args:
        size: (width, height) of a label map or mask, in px.
        slide_size: (width, height) of the slide, in px.
    """
    if size == slide_size:
        return None
    if size == (1, 1):
        return "one pixel states no resolution"
    # Sizes are rounded, up or down: each leaves its scale open within a range.
    pairs = list(zip(slide_size, size, strict=True))
    lowest = max(Fraction(px, count + 1) for px, count in pairs)
    highest = min(Fraction(px, count - 1) if count > 1 else Fraction(_MAX_SCALE) for px, count in pairs)
    return "the sides have another ratio" if lowest >= highest else None


def _cells(image_px: int, scale: Fraction, label_px: Fraction, num_labels: int) -> IndexArray:
    """Label of each pixel along an axis: the one under its centre."""
    centres = (2 * np.arange(image_px) + 1) * (scale.numerator * label_px.denominator)
    cells: IndexArray = np.minimum(centres // (2 * scale.denominator * label_px.numerator), num_labels - 1)
    return cells
