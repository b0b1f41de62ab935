"""Images that are arrays already: in memory, or mapped from a file so that only the rows in use are.

Arrays as images: pixels in memory, or in a mapped ``.npy`` file of which only the rows in use are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.common.array_types import BoolArray
from sft.common.errors import InputError, SourceError
from sft.common.interval import Interval
from sft.sources.host_arrays import AnyArray, HostArray, Layout, as_host_array, axis_order, check_mapping, release_pages, resolve_layout
from sft.sources.image import Pixels, Size, check_level, check_region
from sft.sources.normalize import Normalizer
from sft.sources.source import check_rows, check_samples, equal_rows
from sft.sources.views import resolve_mpp

__all__ = ["ArrayImage", "ArraySource", "map_npy_file"]

_PIXEL_DTYPES = {"uint8": torch.uint8, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


class ArraySource:
    """A host tensor, a NumPy array, a memmap or a ``.npy`` file as a `sft.sources.Source`. It is never copied as a whole.

    uint8 pixels become ``(pixel / 255 - mean) / std``, floats ``(x - mean) / std``. Without `mean` and `std` floats stay
    unchanged and uint8 pixels become 0..1. The array must not change between the forward and the backward pass.

    >>> source = ArraySource(np.full((2, 5, 3), 255, np.uint8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.25, 0.125))
    >>> out = torch.empty(1, 3, 1, 5)
    >>> source.rows(Interval(0, 1), out)
    >>> source.shape, out[0, :, 0, 0].tolist()
    ((1, 3, 2, 5), [1.0, 2.0, 4.0])

    Args:
        array: uint8 or floating point, three or four axes; or the path of a ``.npy`` file, which is mapped and not loaded.
        layout: names of the axes in order. None infers them, and refuses arrays that can be read in more than one way.
            Default: `None`
        mean: of each channel. Default: `None` (0)
        std: standard deviation of each channel. Default: `None` (1)
        dtype: floating-point type that the network gets. Default: `torch.float32`

    Raises:
        InputError: wrong type, rank, dtype, extent, layout, mean or std.
        SourceError: the file cannot be mapped.
    """

    def __init__(
        self,
        array: HostArray | str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.path = Path(array) if isinstance(array, (str, os.PathLike)) else None
        self._given: HostArray = as_host_array(array if self.path is None else map_npy_file(self.path), "read rows from")
        if not dtype.is_floating_point:
            raise InputError(f"cannot read {self._name} as {dtype}: normalised pixels are fractions. Use a floating-point dtype.")
        pixel_dtype = _pixel_dtype(self._given, self._name)
        self.dtype = dtype
        self.layout: Layout = resolve_layout(self._name, tuple(self._given.shape), layout)
        order = axis_order(self.layout, "NHWC")
        whole = self._given if len(self.layout) == 4 else self._given[None]
        # Views: rows of one batch element are [rows, width, channels], whatever lies in memory.
        self._pixels: HostArray = whole.permute(order) if isinstance(whole, Tensor) else whole.transpose(order)
        num, height_px, width_px, channels = self._pixels.shape
        self.shape: tuple[int, int, int, int] = (num, channels, height_px, width_px)
        self._normalizer = Normalizer(mean, std, num_channels=channels, width_px=width_px, pixel_dtype=pixel_dtype)

    def __repr__(self) -> str:
        return f"ArraySource({self._name}, shape={self.shape}, layout={self.layout!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapped file travels as its path: pickling a memmap would read all of it.
        array = self._given if self.path is None else self.path
        return _rebuild_source, (array, self.layout, self._normalizer.mean, self._normalizer.std, self.dtype)

    @property
    def _name(self) -> str:
        return "array" if self.path is None else str(self.path)

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with rows; see `sft.sources.Source`.

        Raises:
            InputError: the interval or ``out`` does not fit; `out` is unchanged.
            SourceError: the mapped file was cut short.
        """
        check_rows(self._name, self.shape, interval, out)
        if not interval:
            return
        check_mapping(self._given, self._name)
        for sample in range(self.shape[0]):
            pixels = self._pixels[sample, interval.start : interval.stop]
            self._normalizer.fill(pixels, out[sample])
            release_pages(pixels)

    def repeated_rows(self, columns: Interval) -> BoolArray:
        """For each row whether it equals the row above it in these columns: all of them are read once. See `RepeatingSource`.

        Raises:
            SourceError: the mapped file was cut short.
        """
        check_mapping(self._given, self._name)
        same: BoolArray = np.logical_and.reduce([equal_rows(self._pixels[sample], columns) for sample in range(self.shape[0])])
        return same

    def samples(self, batch: Interval) -> ArraySource:
        """The source of some batch elements: a view.

        Raises:
            InputError: the batch elements do not exist.
        """
        check_samples(self, batch)
        given = self._given[batch.start : batch.stop] if len(self.layout) == 4 else self._given
        part = _rebuild_source(given, self.layout, self._normalizer.mean, self._normalizer.std, self.dtype)
        return part


def _rebuild_source(
    array: HostArray | Path, layout: Layout, mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype
) -> ArraySource:
    return ArraySource(array, layout=layout, mean=mean, std=std, dtype=dtype)


def map_npy_file(path: Path) -> AnyArray:
    """A ``.npy`` file as a mapped array.

    Raises:
        SourceError: the file does not exist, or is no array.
    """
    if not path.exists():
        raise SourceError(f"cannot map {path}: there is no such file. Check the path.")
    try:
        # Not np.load: that would also unpickle, or unzip an .npz file into memory.
        array: AnyArray = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header raises almost anything
        num_bytes = path.stat().st_size
        raise SourceError(
            f"cannot map {path} ({num_bytes} bytes): {error}. Either no .npy file, or cut short; compare its size with the original "
            "and copy it again, or write it with numpy.save."
        ) from error
    return array


def _pixel_dtype(array: HostArray, name: str) -> torch.dtype:
    if isinstance(array, Tensor):
        return array.dtype  # bfloat16, see as_host_array
    dtype = _PIXEL_DTYPES.get(array.dtype.name)
    if dtype is None or array.dtype.fields is not None:
        raise InputError(
            f"cannot read pixels of {array.dtype} from {name}: supported are {', '.join(_PIXEL_DTYPES)} and torch.bfloat16. "
            "Convert it, strip by strip if it is large; labels of whole numbers want a sft.sources.LabelSource."
        )
    return dtype


class ArrayImage:
    """uint8 pixels as a `sft.sources.Raster`: for views that need rectangles (resolution, crops, masks).

    A network that reads the array unchanged needs `sft.sources.ArraySource` only, which takes floats, too.

    >>> image = ArrayImage(np.zeros((5, 7, 3), np.uint8), mpp=0.5)
    >>> image.level_dimensions, image.mpp, image.read(6, 4, 1, 1).shape
    (((7, 5),), (0.5, 0.5), (1, 1, 3))

    Args:
        array: uint8, ``[height, width, channels]`` or ``[channels, height, width]``; ``[height, width]`` is grey. Or the path of a
            ``.npy`` file of one, which is mapped and not loaded.
        layout: one of the first two. Default: `None` (inferred if only one is possible)
        mpp: micrometres per px; one number, or (x, y). Default: `None`
        background: colour, one number a channel. Default: `None` (white)

    Raises:
        InputError: wrong type, rank, layout or background.
        SourceError: the file cannot be mapped.
    """

    def __init__(
        self,
        array: AnyArray | str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        mpp: float | tuple[float, float] | None = None,
        background: tuple[int, ...] | None = None,
    ) -> None:
        self.path = Path(array) if isinstance(array, (str, os.PathLike)) else None
        given = map_npy_file(Path(array)) if isinstance(array, (str, os.PathLike)) else array
        self._name = "array" if self.path is None else str(self.path)
        if not isinstance(given, np.ndarray) or given.dtype != np.uint8:
            raise InputError(
                f"cannot use {self._name} of {getattr(given, 'dtype', type(given).__name__)} as an image: pixels are uint8. Convert it, or "
                "use sft.sources.ArraySource."
            )
        self._given = given
        whole = given[..., None] if given.ndim == 2 else given
        self.layout: Layout = "HWC" if given.ndim == 2 else resolve_layout(self._name, whole.shape, layout)
        if len(self.layout) != 3:
            raise InputError(f"cannot use {self._name} of shape {given.shape} as an image: it is a batch. Take one element: array[0].")
        #: a view [height, width, channels]
        self._pixels: AnyArray = whole.transpose([axis - 1 for axis in axis_order(self.layout, "NHWC")[1:]])
        self.height_px, self.width_px, self.num_channels = self._pixels.shape
        self.mpp = None if mpp is None else resolve_mpp(mpp, "mpp")
        self.background = (255,) * self.num_channels if background is None else tuple(background)
        if len(self.background) != self.num_channels or not all(0 <= value <= 255 for value in self.background):
            raise InputError(f"cannot use background {self.background}: give {self.num_channels} numbers of 0 to 255.")

    def __repr__(self) -> str:
        return f"ArrayImage({self._name}, {self.width_px} x {self.height_px} px)"

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapped file travels as its path: pickling a memmap would read all of it.
        given = self._given if self.path is None else self.path
        layout = self.layout if self._given.ndim == 3 else None
        return _rebuild_image, (given, layout, self.mpp, self.background)

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of the one level."""
        return ((self.width_px, self.height_px),)

    @property
    def level_downsamples(self) -> tuple[float, ...]:
        """1: an array has one level."""
        return (1.0,)

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """None: an array is not compressed."""
        return (None,)

    @property
    def tile_height_px(self) -> int | None:
        """None: an array is not compressed."""
        return None

    def close(self) -> None:
        """Do nothing: a mapping is closed with its last reference."""

    def read(self, x: int, y: int, w: int, h: int, level: int = 0) -> Pixels:
        """Read a rectangle; see `sft.sources.Image`.

        Raises:
            InputError: the level does not exist or the rectangle is not inside it.
            SourceError: the mapped file was cut short.
        """
        check_level(repr(self), level, 1)
        check_region(self._name, x, y, w, h, self.width_px, self.height_px)
        check_mapping(self._given, self._name)
        part = self._pixels[y : y + h, x : x + w]
        pixels: Pixels = part.copy(order="C")
        release_pages(part)
        return pixels


def _rebuild_image(
    given: AnyArray | Path, layout: Layout | None, mpp: tuple[float, float] | None, background: tuple[int, ...]
) -> ArrayImage:
    return ArrayImage(given, layout=layout, mpp=mpp, background=background)
