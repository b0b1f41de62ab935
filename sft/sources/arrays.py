"""Arrays as images and sources: pixels in memory, in a mapped ``.npy`` file, or in a chunked array that is read in rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.common.array_types import BoolArray
from sft.common.errors import InputError, SourceError, reason_text
from sft.common.interval import Interval
from sft.common.untrusted.foreign_files import file_format, format_remedy
from sft.sources.chunked_arrays import ChunkedRows, is_chunked_array
from sft.sources.host_arrays import AnyArray, HostArray, Layout, as_host_array, axis_order, check_mapping, release_pages, resolve_layout
from sft.sources.image import LevelledImage, Pixels, Rectangle, Size, check_level, dtype_range
from sft.sources.normalize import PIXEL_DTYPES, Normalizer
from sft.sources.source import PixelRows, check_rows, check_samples, equal_rows
from sft.sources.value_range import ValueRange
from sft.sources.views import resolve_mpp

__all__ = ["ArrayImage", "ArraySource", "map_npy_file"]

#: Images of a batch are read together up to this size: the pages of a mapped file stay until then.
_GROUP_BYTES = 8 << 20
_OTHER_FILES = "Images are opened by sft.sources.open_image, label maps by sft.sources.open_labels."


class ArraySource(PixelRows):
    """A host tensor, a NumPy array, a memmap, a ``.npy`` file or a chunked array as a `sft.sources.Source`. It is never copied as a whole.

    Pixels of integer types become ``(pixel / largest - mean) / std``, where ``largest`` is 255 (uint8), 65535 (uint16) or 32767 (int16);
    floats become ``(x - mean) / std``. Without `mean` and `std` floats stay unchanged and unsigned pixels become 0..1. With `value_range`
    both become ``((x - low) / (high - low) - mean) / std``. The array must not change between the forward and the backward pass.

    >>> source = ArraySource(np.full((2, 5, 3), 255, np.uint8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.25, 0.125))
    >>> out = torch.empty(1, 3, 1, 5)
    >>> source.rows(Interval(0, 1), out)
    >>> source.shape, out[0, :, 0, 0].tolist()
    ((1, 3, 2, 5), [1.0, 2.0, 4.0])

    Args:
        array: uint8, uint16, int16 or floating point, three or four axes; or the path of a ``.npy`` file, which is mapped and not loaded;
            or a chunked array (``zarr.Array``, ``dask.array.Array``, ``h5py.Dataset``), which is read in blocks of full chunks.
        layout: names of the axes in order. None infers them, and refuses arrays that can be read in more than one way.
            Default: `None`
        mean: of each channel. Default: `None` (0)
        std: standard deviation of each channel. Default: `None` (1)
        dtype: floating-point type that the network gets. Default: `torch.float32`
        value_range: ``(low, high)`` of all channels, or one pair a channel; these values become 0 and 1. Default: `None`
        clip: True to limit pixels to the value range (of integers: of their type). Default: `False`

    Raises:
        InputError: wrong type, rank, dtype, extent, layout, mean, std or value range.
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
        value_range: ValueRange | None = None,
        clip: bool = False,
    ) -> None:
        self.path = Path(array) if isinstance(array, (str, os.PathLike)) else None
        is_chunked = is_chunked_array(array)
        pixels: Any = array if self.path is None else map_npy_file(self.path)
        self._array: Any = pixels if is_chunked else as_host_array(pixels, "read rows from")
        if not dtype.is_floating_point:
            raise InputError(f"cannot read {self._name} as {dtype}: normalised pixels are fractions. Use a floating-point dtype.")
        pixel_dtype = _pixel_dtype(self._array, self._name)
        self.dtype = dtype
        self.layout: Layout = resolve_layout(self._name, tuple(self._array.shape), layout)
        self._chunks = ChunkedRows(self._array, self.layout) if is_chunked else None
        # A view: rows of one batch element are [rows, width, channels], whatever lies in memory.
        self._pixels: HostArray | None = None if is_chunked else _samples_last(self._array, self.layout)
        by_axis = dict(zip(self.layout, self._array.shape, strict=True))
        self.shape: tuple[int, int, int, int] = (by_axis.get("N", 1), by_axis["C"], by_axis["H"], by_axis["W"])
        self._value_range, self._clip = value_range, clip
        self._normalizer = Normalizer(
            mean, std, num_channels=by_axis["C"], width_px=by_axis["W"], pixel_dtype=pixel_dtype, value_range=value_range, clip=clip
        )

    def __repr__(self) -> str:
        return f"ArraySource({self._name}, shape={self.shape}, layout={self.layout!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapped file travels as its path: pickling a memmap would read all of it.
        array = self._array if self.path is None else self.path
        return _rebuild_source, (array, *self._settings)

    @property
    def _settings(self) -> tuple[Any, ...]:
        """Arguments of `_rebuild_source` after the array."""
        return self.layout, self._normalizer.mean, self._normalizer.std, self.dtype, self._value_range, self._clip

    @property
    def _name(self) -> str:
        return "array" if self.path is None else str(self.path)

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with rows; see `sft.sources.Source`.

        Raises:
            InputError: the interval or ``out`` does not fit; `out` is unchanged.
            SourceError: the mapped file was cut short, or chunks cannot be read.
        """
        check_rows(self._name, self.shape, interval, out)
        self._deliver(interval, out, self._normalizer.fill)

    def _deliver(self, interval: Interval, out: Tensor, fill: Callable[[HostArray, Tensor], None]) -> None:
        if not interval:
            return
        if self._pixels is None:
            assert self._chunks is not None
            for sample in range(self.shape[0]):
                fill(self._chunks.rows(sample, interval), out[sample])
            return
        # Several small tiles at once: each call may wait for the interpreter's lock.
        num_samples, sample_bytes = self.shape[0], self._pixels[0, interval.start : interval.stop].nbytes
        step = max(1, _GROUP_BYTES // sample_bytes)
        for first in range(0, num_samples, step):
            check_mapping(self._array, self._name)
            pixels = self._pixels[first : first + step, interval.start : interval.stop]
            fill(pixels, out[first : first + step])
            release_pages(pixels)

    def repeated_rows(self, columns: Interval) -> BoolArray:
        """For each row whether it equals the row above it in these columns: all of them are read once. See `RepeatingSource`.

        A chunked array makes no claim.

        Raises:
            SourceError: the mapped file was cut short.
        """
        if self._pixels is None:
            return np.zeros(self.shape[2], np.bool_)
        check_mapping(self._array, self._name)
        same: BoolArray = np.logical_and.reduce([equal_rows(self._pixels[sample], columns) for sample in range(self.shape[0])])
        return same

    def samples(self, batch: Interval) -> ArraySource:
        """The source of some batch elements: a view.

        Raises:
            InputError: the batch elements do not exist.
        """
        check_samples(self, batch)
        batch_array = self._array[batch.start : batch.stop] if len(self.layout) == 4 else self._array
        return _rebuild_source(batch_array, *self._settings)


def _rebuild_source(
    array: HostArray | Path,
    layout: Layout,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    dtype: torch.dtype,
    value_range: ValueRange | None = None,
    clip: bool = False,
) -> ArraySource:
    return ArraySource(array, layout=layout, mean=mean, std=std, dtype=dtype, value_range=value_range, clip=clip)


def _samples_last(array: HostArray, layout: Layout) -> HostArray:
    """A view ``[samples, rows, width, channels]`` of an array."""
    order = axis_order(layout, "NHWC")
    full = array if len(layout) == 4 else array[None]
    return full.permute(order) if isinstance(full, Tensor) else full.transpose(order)


def map_npy_file(path: Path) -> AnyArray:
    """A ``.npy`` file as a mapped array.

    Raises:
        SourceError: the file does not exist, or is not an array.
    """
    if not path.exists():
        raise SourceError(f"cannot map {path}: there is no such file. Check the path.")
    try:
        # Not np.load: that would also unpickle, or unzip an .npz file into memory.
        array: AnyArray = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # a damaged header raises almost anything
        num_bytes = path.stat().st_size
        remedy = format_remedy(file_format(path)) if path.is_file() else ""
        raise SourceError(
            f"cannot map {path} ({num_bytes} bytes): {reason_text(error)}. Either no .npy file, or cut short; compare its "
            f"size with the original "
            f"and copy it again, or write it with numpy.save. {remedy or _OTHER_FILES}"
        ) from error
    return array


def _pixel_dtype(array: HostArray, name: str) -> torch.dtype:
    if isinstance(array, Tensor):
        return array.dtype  # bfloat16, see as_host_array
    dtype = PIXEL_DTYPES.get(array.dtype.name)
    if dtype is None or array.dtype.fields is not None:
        raise InputError(
            f"cannot read pixels of {array.dtype} from {name}: supported are {', '.join(PIXEL_DTYPES)} and torch.bfloat16. "
            "Convert it, strip by strip if it is large; integer labels need an sft.sources.LabelSource."
        )
    return dtype


class ArrayImage(LevelledImage):
    """An array as a `sft.sources.Raster`: for views that need rectangles (resolution, crops, masks).

    A network that reads the array unchanged needs `sft.sources.ArraySource` only.

    >>> image = ArrayImage(np.zeros((5, 7, 3), np.uint8), mpp=0.5)
    >>> image.level_dimensions, image.mpp, image.read(6, 4, 1, 1).shape
    (((7, 5),), (0.5, 0.5), (1, 1, 3))

    Args:
        array: uint8, uint16, int16 or floating point, ``[height, width, channels]`` or ``[channels, height, width]``;
            ``[height, width]`` is grey. Or the path of a ``.npy`` file of one, which is mapped and not loaded.
        layout: one of the first two. Default: `None` (inferred if only one is possible)
        mpp: micrometres per px; one number, or (x, y). Default: `None`
        background: colour, one number a channel. Default: `None` (white for uint8, otherwise 0)

    Raises:
        InputError: wrong type, rank, layout or background.
        SourceError: the file cannot be mapped.
    """

    #: Element types that are pixels.
    dtypes: Collection[str] = tuple(PIXEL_DTYPES)
    #: Words of the error for other types.
    purpose: str = "an image: pixels"
    remedy: str = "Convert it, or use sft.sources.ArraySource."

    def __init__(
        self,
        array: AnyArray | str | os.PathLike[str],
        *,
        layout: Layout | None = None,
        mpp: float | tuple[float, float] | None = None,
        background: tuple[Any, ...] | None = None,
    ) -> None:
        self.path = Path(array) if isinstance(array, (str, os.PathLike)) else None
        pixels = map_npy_file(Path(array)) if isinstance(array, (str, os.PathLike)) else array
        self._name = "array" if self.path is None else str(self.path)
        if isinstance(pixels, np.ndarray) and pixels.dtype == np.bool_ and "bool" in self.dtypes:
            pixels = pixels.view(np.uint8)
        if not isinstance(pixels, np.ndarray) or pixels.dtype.name not in self.dtypes:
            raise InputError(
                f"cannot use {self._name} of {getattr(pixels, 'dtype', type(pixels).__name__)} as {self.purpose} are "
                f"{', '.join(self.dtypes)}. {self.remedy}"
            )
        self._array = pixels
        whole = pixels[..., None] if pixels.ndim == 2 else pixels
        self.layout: Layout = "HWC" if pixels.ndim == 2 else resolve_layout(self._name, whole.shape, layout)
        if len(self.layout) != 3:
            raise InputError(f"cannot use {self._name} of shape {pixels.shape} as an image: it is a batch. Take one element: array[0].")
        #: a view [height, width, channels]
        self._pixels: AnyArray = whole.transpose([axis - 1 for axis in axis_order(self.layout, "NHWC")[1:]])
        self.num_channels = self._pixels.shape[2]
        self.mpp = None if mpp is None else resolve_mpp(mpp, "mpp")
        self.dtype: np.dtype[Any] = self._pixels.dtype.newbyteorder("=")
        default = 255 if self.dtype == np.uint8 else 0
        self.background: tuple[Any, ...] = (default,) * self.num_channels if background is None else tuple(background)
        low, high = dtype_range(self.dtype)
        if len(self.background) != self.num_channels or any(value < low or value > high for value in self.background):
            raise InputError(f"cannot use background {self.background}: give {self.num_channels} numbers of {low} to {high}.")

    def __repr__(self) -> str:
        return f"ArrayImage({self._name}, {self.width_px} x {self.height_px} px)"

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapped file travels as its path: pickling a memmap would read all of it.
        origin = self._array if self.path is None else self.path
        layout = self.layout if self._array.ndim == 3 else None
        return _rebuild_image, (origin, layout, self.mpp, self.background, type(self))

    @property
    def level_dimensions(self) -> tuple[Size, ...]:
        """(width, height) of the one level."""
        height, width, _ = self._pixels.shape
        return ((width, height),)

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
        rectangle = Rectangle.of(x, y, w, h)
        rectangle.check_inside(self._name, (self.width_px, self.height_px))
        check_mapping(self._array, self._name)
        view = self._pixels[rectangle.slices]
        pixels: Pixels = view.astype(self.dtype, order="C")
        release_pages(view)
        return pixels


def _rebuild_image(
    pixels: AnyArray | Path,
    layout: Layout | None,
    mpp: tuple[float, float] | None,
    background: tuple[Any, ...],
    kind: type[ArrayImage] | None = None,
) -> ArrayImage:
    return (kind or ArrayImage)(pixels, layout=layout, mpp=mpp, background=background)
