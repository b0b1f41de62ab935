"""Normalised sources: ``((pixel - low) / (high - low) - mean) / std``, strip by strip, into memory of the caller.

``low`` and ``high`` are the value range of each channel. By default it begins at 0 and ends at the largest value of an integer type (255,
65535, 32767), and pixels of floating-point types stay in their own units. `sft.sources.percentile_range` measures a range.

`Normalized` makes any ``Image`` a ``Source``. A compressed file can only be decoded by full tiles, and strips rarely end at tile borders,
so each strip would decode the tiles at its two edges a second time: twice the work for strips as high as a tile. Rows are therefore read
in blocks that are aligned to the tiles. The blocks at both edges of the last interval are kept, one for a forward sweep and one for a
reverse sweep: at most two blocks of raw pixels, and a third while it is used.

`load_tensor` reads a full image into one allocation, a strip at a time. Both have the same bits: subtract ``low + span * mean``, divide by
``span * std``, where ``span`` is ``high - low``, in float32 or the wider requested type, one rounding each. NumPy does it: torch would
start threads that compete with the network's for the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.common.array_types import BoolArray
from sft.common.errors import InputError, SourceError, typed
from sft.common.interval import Interval
from sft.sources.georeference import Georeference
from sft.sources.host_arrays import AnyArray, HostArray, convert_pixels, copy_pixels, copy_serially
from sft.sources.image import Image, Pixels, pixel_dtype
from sft.sources.source import PixelRows, Source, check_rows, image_equal_rows
from sft.sources.value_range import ValueRange, channel_numbers, low_and_span

__all__ = ["PIXEL_DTYPES", "Normalized", "Normalizer", "load_tensor", "normalizer_of"]

#: Numbers are converted, shifted and scaled in pieces of this size: three passes over memory that stays in the cache, and the bound
#: of the scratch where the result has another type or layout.
_PIECE_BYTES = 1 << 18

_NUMPY_DTYPES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
#: Integer types of pixels, and the value that becomes 1.
_UNITS: dict[torch.dtype, int] = {torch.uint8: 255, torch.uint16: 65535, torch.int16: 32767}
#: torch's types of pixels by NumPy's names.
PIXEL_DTYPES: dict[str, torch.dtype] = {
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "int16": torch.int16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Normalizer:
    """Normalises rows of an image with a fixed number of channels and columns. Safe to use from several threads.

    Args:
        mean: of each channel; for uint8 pixels in units of 0..1, for floats in their own units. None: 0.
        std: standard deviation of each channel, in the units of `mean`. None: 1.
        num_channels: of the image.
        width_px: of the image.
        pixel_dtype: uint8, uint16, int16 or a floating-point type.
        value_range: ``(low, high)`` of all channels, or one pair a channel. None: that of the type.
        clip: True to limit pixels to the value range.

    Raises:
        InputError: wrong numbers of values, a mean that is not finite, a std that is not a positive float32, a wrong dtype, an empty range.
    """

    #: subtrahend and divisor of each channel that bring pixels to 0..1; None for those of the type
    _low: tuple[float, ...] | None = None
    _span: tuple[float, ...] | None = None
    clip: bool = False

    def __init__(
        self,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        *,
        num_channels: int,
        width_px: int,
        pixel_dtype: torch.dtype,
        value_range: ValueRange | None = None,
        clip: bool = False,
    ) -> None:
        if pixel_dtype not in _UNITS and not pixel_dtype.is_floating_point:
            raise InputError(
                f"cannot normalise pixels of {pixel_dtype}: supported are {', '.join(map(str, _UNITS))} and floating-point types. "
                "Convert them."
            )
        if value_range is not None:
            self._low, self._span = low_and_span(value_range, num_channels)
        elif clip and pixel_dtype.is_floating_point:
            raise InputError(f"cannot clip pixels of {pixel_dtype}: the type has no range. Give value_range=(low, high).")
        self.clip = clip
        self.mean = channel_numbers("mean", mean, 0.0, num_channels)
        self.std = channel_numbers("std", std, 1.0, num_channels)
        limits = torch.finfo(torch.float32)
        wrong = [value for value in self.mean if not abs(value) < limits.max] + [
            value for value in self.std if not limits.tiny <= value < limits.max / 255
        ]
        if wrong:
            raise InputError(
                f"cannot normalise with mean {self.mean} and std {self.std}: every mean must be finite and every std above 0, as "
                f"float32. Change {', '.join(map(str, wrong))}."
            )
        self._pixel_dtype = pixel_dtype
        self._width_px = width_px
        self._tables: dict[torch.dtype, tuple[AnyArray, AnyArray]] = {}

    def fill(self, pixels: HostArray, out: Tensor) -> None:
        """Normalise ``pixels`` of shape ``[..., rows, width, channels]`` into ``out`` of shape ``[..., channels, rows, width]``.

        Next to its arguments it holds at most 256 KiB, or one row where that is more.
        """
        if not self.changes(out.dtype):
            copy_pixels(pixels, out)
        elif pixels.ndim == 3:
            self._fill_image(pixels, out)
        elif _is_dense(pixels) and out.movedim(1, -1).is_contiguous():  # rows of several images are rows of a higher one
            self._fill_image(pixels.reshape(-1, *pixels.shape[2:]), out.movedim(1, -1).flatten(0, 1).movedim(-1, 0))
        else:
            for sample, image in zip(pixels, out, strict=True):
                self._fill_image(sample, image)

    def changes(self, dtype: torch.dtype) -> bool:
        """False if numbers of this type are the pixels themselves."""
        # float - 0 and / 1 would change no bit.
        return dtype is not self._pixel_dtype or self.clip or self._changes

    @cached_property
    def _changes(self) -> bool:
        """False if no pixel is shifted or scaled."""
        is_float = self._pixel_dtype.is_floating_point
        return not is_float or self._span is not None or any(self.mean) or any(value != 1 for value in self.std)

    def _fill_image(self, pixels: HostArray, out: Tensor) -> None:
        work_dtype = torch.promote_types(out.dtype, torch.float32)
        if self._pixel_dtype.is_floating_point:
            work_dtype = torch.promote_types(work_dtype, self._pixel_dtype)
        target = out.detach().permute(1, 2, 0)
        num_rows, width_px, num_channels = target.shape
        row_numbers = width_px * num_channels
        step = max(1, min(num_rows, _PIECE_BYTES // (row_numbers * work_dtype.itemsize)))
        # Channels last and of the right type, the result itself is the place to work in.
        scratch = (
            None
            if target.dtype is work_dtype and target.is_contiguous()
            else np.empty((step, width_px, num_channels), _NUMPY_DTYPES[work_dtype])
        )
        for top in range(0, num_rows, step):
            bottom = min(top + step, num_rows)
            piece: AnyArray = target[top:bottom].numpy() if scratch is None else scratch[: bottom - top]
            convert_pixels(pixels[top:bottom], piece)
            if self.clip:
                low, high = self._limits(work_dtype)
                np.clip(piece, low, high, out=piece)
            if self._changes:
                shift, scale = self._shift_and_scale(work_dtype)
                numbers = piece.reshape(bottom - top, row_numbers)  # a view: the piece is contiguous
                np.subtract(numbers, shift, out=numbers)
                np.divide(numbers, scale, out=numbers)
            if scratch is not None:
                copy_serially(target[top:bottom], torch.from_numpy(piece))

    @property
    def pixel_dtype(self) -> torch.dtype:
        """Type of the pixels."""
        return self._pixel_dtype

    def channel_values(self, work_dtype: torch.dtype) -> tuple[tuple[AnyArray, AnyArray] | None, AnyArray, AnyArray]:
        """Limits (``None`` without `clip`), subtrahend and divisor of each channel, for code that normalises elsewhere bit for bit."""
        num_channels = len(self.mean)
        shift, scale = (row[:num_channels] for row in self._shift_and_scale(work_dtype))
        if not self.clip:
            return None, shift, scale
        low, high = (np.broadcast_to(value, num_channels) for value in self._limits(work_dtype))
        return (low, high), shift, scale

    def _shift_and_scale(self, work_dtype: torch.dtype) -> tuple[AnyArray, AnyArray]:
        """Subtrahend and divisor for a full row: a row is one long vector loop, three channels are a short one."""
        if work_dtype not in self._tables:
            dtype = _NUMPY_DTYPES[work_dtype]
            span = np.asarray(_UNITS.get(self._pixel_dtype, 1) if self._span is None else self._span, dtype)
            shift, scale = (np.asarray(values, dtype) * span for values in (self.mean, self.std))
            if self._low is not None:
                shift = shift + np.asarray(self._low, dtype)
            self._tables[work_dtype] = np.tile(shift, self._width_px), np.tile(scale, self._width_px)
        return self._tables[work_dtype]

    def _limits(self, work_dtype: torch.dtype) -> tuple[AnyArray, AnyArray]:
        """Smallest and largest value of each channel."""
        dtype = _NUMPY_DTYPES[work_dtype]
        low = np.asarray(0 if self._low is None else self._low, dtype)
        span = np.asarray(_UNITS.get(self._pixel_dtype, 1) if self._span is None else self._span, dtype)
        return low, low + span


def _is_dense(pixels: HostArray) -> bool:
    """True if images ``[N, rows, width, channels]`` lie one after another, so that they are rows of one image."""
    strides = pixels.stride() if isinstance(pixels, Tensor) else pixels.strides
    return strides[0] == pixels.shape[1] * strides[1]


#: Some formats have tiles of eight rows. A block is a multiple of the tile height with at least this number of rows, since each read costs.
_MIN_BLOCK_ROWS = 64
_NUM_CHANNELS = 3


class Normalized(PixelRows):
    """Image as ``((pixel - low) / (high - low) - mean) / std``: a `sft.sources.Source` with one batch element.

    >>> from sft.sources import ArrayImage
    >>> image = ArrayImage(np.array([[0, 500], [1000, 65535]], np.uint16))
    >>> out = torch.empty(1, 1, 2, 2)
    >>> Normalized(image, value_range=(0, 1000), clip=True).rows(Interval(0, 2), out)
    >>> out.flatten().tolist()
    [0.0, 0.5, 1.0, 1.0]

    Args:
        image: a `Slide`, or an object with ``width_px``, ``height_px`` and ``read``. If it also has ``tile_height_px`` (rows of its
            compressed tiles, or None), rows are read in blocks of full tiles.
        mean: of each channel, in units of the value range (floats without one: in their own units). Default: `None` (0)
        std: standard deviation of each channel, in the same units. Default: `None` (1)
        dtype: floating-point type of the network's input. Default: `torch.float32`
        value_range: ``(low, high)`` of all channels, or one pair a channel, such as `sft.sources.percentile_range` measures; these values
            become 0 and 1. Default: `None` (0 and the largest value of an integer type; floats are unchanged)
        clip: True to limit pixels to the value range. Default: `False`

    Raises:
        InputError: an argument is wrong, the image is empty, or its element type is not supported.
        SourceError: the image cannot be opened.
    """

    def __init__(
        self,
        image: Image,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.float32,
        value_range: ValueRange | None = None,
        clip: bool = False,
    ) -> None:
        if not isinstance(image, Image):
            raise InputError(f"cannot read rows of {typed(image)}: expected width_px, height_px and read(). See sft.sources.Image.")
        num_channels, normalizer = normalizer_of(image, image.width_px, mean, std, dtype=dtype, value_range=value_range, clip=clip)
        self.image = image
        self.dtype = dtype
        self.shape: tuple[int, int, int, int] = (1, num_channels, image.height_px, image.width_px)
        if min(self.shape) < 1:
            raise InputError(f"cannot read {image}: it is {image.width_px} px wide and {image.height_px} px high. Give one with pixels.")
        self._normalizer = normalizer
        tile_rows = getattr(image, "tile_height_px", None)
        if tile_rows is not None and tile_rows < 1:
            raise InputError(f"cannot read {image} in tiles of {tile_rows} rows: a tile has at least one. Set tile_height_px to None.")
        #: rows of an aligned block; None: rows are read exactly as requested
        self.block_rows: int | None = None if tile_rows is None else tile_rows * -(-_MIN_BLOCK_ROWS // tile_rows)
        # Replaced as a whole, never changed: threads that race here decode a block twice and nothing worse. A lock could be
        # inherited, held forever, by a process forked at the wrong moment.
        self._blocks: Mapping[int, Pixels] = {}

    def __repr__(self) -> str:
        return f"Normalized({self.image!r}, shape={self.shape})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with rows; see `sft.sources.Source`.

        Raises:
            InputError: the interval or ``out`` does not fit, or the pixels do not have ``len(mean)`` channels.
            SourceError: the pixels cannot be read.
        """
        check_rows(repr(self.image), self.shape, interval, out)
        self._deliver(interval, out, self._normalizer.fill)

    def _deliver(self, interval: Interval, out: Tensor, fill: Callable[[HostArray, Tensor], None]) -> None:
        """Read rows in full blocks, and fill their places in the interval's tensor."""
        if not interval:
            return

        def place(rows: Interval, pixels: Pixels, top: int) -> None:
            fill(pixels[rows.start - top : rows.stop - top], out[0, :, rows.start - interval.start : rows.stop - interval.start])

        block_rows = self.block_rows
        if block_rows is None:
            place(interval, self._read_pixels(interval), interval.start)
            return
        first, last = interval.start // block_rows, (interval.stop - 1) // block_rows
        # Blocks outside this interval are dropped before the read.
        blocks = self._blocks = {index: pixels for index, pixels in self._blocks.items() if first <= index <= last}
        for index in range(first, last + 1):
            block = Interval(index * block_rows, min((index + 1) * block_rows, self.shape[2]))
            pixels = blocks[index] if index in blocks else self._read_pixels(block)
            place(block.intersect(interval), pixels, block.start)
            blocks = {kept: blocks[kept] for kept in blocks if kept > index or kept == first}
            if index in (first, last):
                blocks[index] = pixels
            self._blocks = blocks
            del pixels  # before the next block is read

    def repeated_rows(self, columns: Interval) -> BoolArray:
        """For each row, whether the image reports it equal to the row above it in these columns; see `RepeatingSource`."""
        return image_equal_rows(self.image, columns)

    @property
    def georeference(self) -> Georeference | None:
        """Coordinate system and transform of the image; None for an image without one."""
        georeference: Georeference | None = getattr(self.image, "georeference", None)
        return georeference

    def forget(self) -> None:
        """Drop the blocks kept for the next interval: after a pass, when their memory has a better use."""
        self._blocks = {}

    def _read_pixels(self, rows: Interval) -> Pixels:
        _, num_channels, _, width_px = self.shape
        pixels = self.image.read(0, rows.start, width_px, len(rows))
        expected = pixel_dtype(self.image)
        if pixels.ndim != 3 or pixels.shape[2] != num_channels or pixels.dtype.name != expected.name:
            raise InputError(
                f"cannot use pixels of shape {pixels.shape} and {pixels.dtype} from {self.image}: expected {expected} [height, width, "
                f"{num_channels}], a channel for each mean. Convert the source, or give as many means as it has channels."
            )
        if pixels.shape[:2] != (len(rows), width_px):
            raise SourceError(
                f"cannot use rows [{rows.start}, {rows.stop}) of {self.image}: it returned {pixels.shape[0]} x {pixels.shape[1]} px "
                f"instead of {len(rows)} x {width_px}. Its read() must return the rectangle of its arguments."
            )
        return pixels


def normalizer_of(
    image: Image,
    width_px: int,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    *,
    dtype: torch.dtype,
    value_range: ValueRange | None,
    clip: bool,
) -> tuple[int, Normalizer]:
    """Number of channels of an image, and the normalizer of its rectangles of some width; the arguments are those of `Normalized`.

    Raises:
        InputError: an argument is wrong, or the image's element type is not supported.
    """
    if not dtype.is_floating_point:
        raise InputError(f"cannot read {image} as {dtype}: normalised pixels are fractions. Use a floating-point dtype.")
    for name, values in (("mean", mean), ("std", std)):
        if values is not None and not isinstance(values, Sized):
            raise InputError(f"cannot normalise with {name} {values!r}: give a number for every channel.")
    if mean is not None and std is not None and (len(mean) < 1 or len(mean) != len(std)):
        raise InputError(f"cannot normalise with mean {tuple(mean)} and std {tuple(std)}: give one of each for every channel.")
    stated = mean if mean is not None else std
    num_channels = int(getattr(image, "num_channels", _NUM_CHANNELS if stated is None else len(stated)))
    pixel_type = PIXEL_DTYPES.get(pixel_dtype(image).name)
    if pixel_type is None:
        raise InputError(
            f"cannot read {image} of {pixel_dtype(image)}: pixels are {', '.join(PIXEL_DTYPES)}. Convert it; labels are read by "
            "sft.sources.LabelSource."
        )
    return num_channels, Normalizer(
        mean, std, num_channels=num_channels, width_px=width_px, pixel_dtype=pixel_type, value_range=value_range, clip=clip
    )


def load_tensor(
    image: Image | Source,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32,
    value_range: ValueRange | None = None,
    clip: bool = False,
    rows: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Read a whole image, or a whole source, into a tensor: what plain PyTorch takes.

    Args:
        image: an image, which is normalised as `Normalized` does; or a source (`Normalized`, `ArraySource`, ...), read as it is.
        mean: of each channel. Default: `None` (0)
        std: standard deviation of each channel. Default: `None` (1)
        dtype: floating-point type of the result; that of a source is its own. Default: `torch.float32`
        value_range: ``(low, high)`` of all channels, or one pair a channel. Default: `None`
        clip: True to limit pixels to the value range. Default: `False`
        rows: rows read at a time; a multiple of the file's tile height decodes every tile once.  Default: 256
        progress: called with (rows read, rows in all) after every strip.  Default: `None`

    Returns:
        Tensor of shape ``[N, channels, height, width]`` on the CPU; ``N`` is 1 for an image.

    Raises:
        InputError: an argument is wrong, or a source is given with a normalisation.
        SourceError: the pixels cannot be read.
    """
    if isinstance(image, Source):
        if clip or any(value is not None for value in (mean, std, value_range)):
            raise InputError(
                f"{image!r} is a source, which normalises by itself. Give its image, or leave mean, std, value_range and clip out."
            )
        source: Source = image
    else:
        source = Normalized(image, mean=mean, std=std, dtype=dtype, value_range=value_range, clip=clip)
    if rows < 1:
        raise InputError(f"cannot read strips of {rows} rows: give at least one row.")
    height = source.shape[2]
    tensor = torch.empty(tuple(source.shape), dtype=source.dtype, device="cpu")
    for top in range(0, height, rows):
        strip = Interval(top, min(top + rows, height))
        source.rows(strip, tensor[:, :, strip.start : strip.stop])
        if progress is not None:
            progress(strip.stop, height)
    return tensor
