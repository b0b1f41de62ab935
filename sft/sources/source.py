"""Sources: inputs that deliver rows on demand instead of a full tensor.

An ``Image`` delivers rectangles of raw pixels; a :class:`Source` delivers the network's input, rows of ``[N, C, H, W]`` numbers. The strip
sweep reads row intervals, forward in pass 1 and in reverse in pass 2, each into its own memory. `sft.sources.StripReader`, between a
source and the sweep, reads ahead and copies overlapping rows.

A source of pixels may also deliver them before their normalisation, for a GPU (`PixelSource`).

A source may also state its *constant rows*: rows (or columns) equal to their predecessor. A strip of background need not run through a
network if the strip above it was the same (``Options(skip_repeats=True)``). Masks know their background, and views know its new place, so
no pixel is decoded for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sft.common.array_types import BoolArray
from sft.common.errors import InputError
from sft.common.interval import Interval
from sft.sources.host_arrays import HostArray, copy_pixels, release_pages

if TYPE_CHECKING:
    from sft.sources.normalize import Normalizer

__all__ = [
    "PixelRows",
    "PixelSource",
    "RepeatingImage",
    "RepeatingSource",
    "Source",
    "check_rows",
    "check_samples",
    "equal_rows",
    "image_equal_rows",
    "select_samples",
]


@runtime_checkable
class Source(Protocol):
    """Input that delivers rows: ``net(x)`` reads it in strips, so the full image is never in memory.

    The contract with the executor:

    - *Constant.* The same rows give the same bits every time. The backward pass reads rows again and differentiates at the forward
      pass's values.
    - *Any order.* Intervals come in any order, may overlap and may repeat. A source with expensive decoding may cache its last rows;
      ``StripReader`` requests overlapping rows once only.
    - *Any thread.* ``rows`` is called from a background thread, one call at a time for each reader, under ``torch.no_grad()``.
    - *No gradient.* The gradient of the input goes to a `sft.sources.RowSink` of the same shape, if requested.

    A source with ``N > 1`` may also have ``samples(batch: Interval) -> Source``, the source of some batch elements (no copy), so
    that the sweep can run the batch in chunks; see :func:`select_samples`. One that knows its constant rows is a `RepeatingSource`, too.
    """

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(N, C, H, W)``: batch elements, channels, rows, columns; all at least 1, and constant."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of the network's input: ``torch.int64`` for labels, else a floating-point type."""
        ...

    def rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out`` with the normalised rows ``interval`` of every batch element and channel.

        Args:
            interval: rows inside ``[0, H)``; an empty one writes nothing.
            out: CPU tensor of shape ``[N, C, len(interval), W]`` and any floating-point type (of labels: `dtype`), usually `dtype`.
                Channels last (each batch element's rows contiguous) is the fast layout; every other is right too. All of it is
                overwritten.

        Raises:
            InputError: the interval or ``out`` does not fit; `out` is unchanged.
            SourceError: the rows cannot be read; the contents of ``out`` are undefined.
        """
        ...


@runtime_checkable
class RepeatingSource(Protocol):
    """Optional method of a source: constant rows, so that strips of constant background need not run (``Options(skip_repeats=True)``)."""

    def repeated_rows(self, columns: Interval) -> npt.NDArray[np.bool_]:
        """Constant rows, bool ``[H]``: True for a row known to equal the row above it in these columns, in every batch element and
        channel.

        Equal means bit for bit, as `Source.rows` delivers them. False claims nothing about a row; the value of row 0 is not used.
        """
        ...


class _HasShape(Protocol):
    @property
    def shape(self) -> tuple[int, int, int, int]: ...


def check_rows(name: str, shape: tuple[int, int, int, int], interval: Interval, out: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Refuse an interval outside the image, or a destination that it does not fit; every source calls this first.

    ``dtype`` is that of sources that fill no other.

    >>> check_rows("scan", (1, 3, 10, 8), Interval(4, 6), torch.empty(1, 3, 2, 8))
    >>> check_rows("scan", (1, 3, 10, 8), Interval(8, 11), torch.empty(1, 3, 3, 8))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    sft.common.errors.InputError: cannot read rows [8, 11) of scan: it has 10 rows. ...

    Raises:
        InputError: one of them is wrong.
    """
    num, channels, height_px, width_px = shape
    rows = f"rows [{interval.start}, {interval.stop})"
    if interval and not Interval(0, height_px).contains(interval):
        raise InputError(
            f"cannot read {rows} of {name}: it has {height_px} rows. Clip the interval to the image; rows outside it have no value."
        )
    expected = (num, channels, len(interval), width_px)
    if tuple(out.shape) != expected:
        raise InputError(f"cannot read {rows} of {name} into shape {tuple(out.shape)}: they have shape {expected}. Allocate that.")
    if dtype is not None and out.dtype is not dtype:
        raise InputError(f"cannot read {rows} of {name} into a tensor of {out.dtype}: it holds {dtype}. Use that.")
    if out.device.type != "cpu" or (dtype is None and not out.dtype.is_floating_point) or out.layout is not torch.strided:
        raise InputError(
            f"cannot read {rows} of {name} into a tensor of {out.dtype} on {out.device}: pixels are normalised on the host into "
            "fractions. Use a floating-point CPU tensor and copy it to the device."
        )


@runtime_checkable
class PixelSource(Source, Protocol):
    """Source that also delivers its pixels in their own type: fewer bytes for a GPU, which then normalises them."""

    @property
    def normalizer(self) -> Normalizer:
        """Normalisation that makes the pixels the source's numbers."""
        ...

    def pixel_rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out``, of the pixels' type, with rows as `rows` reads them, before normalisation."""
        ...


class PixelRows:
    """Base class of sources that read pixels and normalise them: the methods of `PixelSource`."""

    _normalizer: Normalizer
    shape: tuple[int, int, int, int]

    @property
    def normalizer(self) -> Normalizer:
        """Normalisation of the pixels."""
        return self._normalizer

    def pixel_rows(self, interval: Interval, out: Tensor) -> None:
        """Fill ``out``, of the pixels' type, with rows before normalisation; see `PixelSource`.

        Raises:
            InputError, SourceError: as for `rows`.
        """
        check_rows(repr(self), self.shape, interval, out, dtype=self._normalizer.pixel_dtype)
        self._deliver(interval, out, copy_pixels)

    @abstractmethod
    def _deliver(self, interval: Interval, out: Tensor, fill: Callable[[Any, Tensor], None]) -> None:
        """Read rows, and ``fill`` their places in the tensor of the interval with them."""


_Batched = TypeVar("_Batched", bound=_HasShape)


def check_samples(source: _HasShape, batch: Interval) -> None:
    """Refuse batch elements that a source (or sink) does not have.

    Raises:
        InputError: the batch elements do not exist.
    """
    num = source.shape[0]
    if not batch or not Interval(0, num).contains(batch):
        raise InputError(f"cannot take batch elements [{batch.start}, {batch.stop}) of {source}: it has {num}. Stay inside them.")


def select_samples(source: _Batched, batch: Interval) -> _Batched:
    """Source (or sink) of the batch elements ``batch``, without a copy; the source itself if these are all.

    Raises:
        InputError: the batch elements do not exist, or the source cannot be split.
    """
    check_samples(source, batch)
    num = source.shape[0]
    if len(batch) == num:
        return source
    split = getattr(source, "samples", None)
    if split is None:
        raise InputError(
            f"cannot take {len(batch)} of {num} batch elements of {source}: it has no method samples(batch). "
            "Add one, or take the batch whole."
        )
    view: _Batched = split(batch)
    return view


#: Bytes of the pieces in which rows of arrays are compared.
_PIECE_BYTES = 1 << 20
_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@runtime_checkable
class RepeatingImage(Protocol):
    """Optional methods of an `sft.sources.Image` that knows its constant rows and columns."""

    def repeated(self, part: Interval, *, columns: bool = False) -> BoolArray:
        """Constant rows of level 0, bool ``[height_px]``: True for a row known to equal the row above it in the columns ``part``.

        With ``columns``, constant columns, ``[width_px]``: equal to the column to the left in the rows ``part``. False makes no claim; the
        value of the first row, or column, is not used.
        """
        ...


def image_equal_rows(image: Any, part: Interval, *, columns: bool = False) -> BoolArray:
    """Constant rows by an image's own statement; all False for an image without one."""
    if isinstance(image, RepeatingImage):
        return image.repeated(part, columns=columns)
    return np.zeros(image.width_px if columns else image.height_px, dtype=bool)


def equal_rows(pixels: HostArray, columns: Interval) -> BoolArray:
    """For each row of ``[rows, width, channels]`` whether it equals the row above it in some columns, bit for bit; all of them are read."""
    cropped = pixels[:, columns.start : columns.stop]
    if isinstance(cropped, Tensor):  # a type that NumPy does not have
        cropped = cropped.detach().view(torch.int16).numpy()
    numbers: npt.NDArray[Any] = cropped.view(_BITS[cropped.dtype.itemsize])
    height = numbers.shape[0]
    same = np.zeros(height, dtype=bool)
    step = max(1, _PIECE_BYTES // max(1, numbers[:1].size))
    for top in range(1, height, step):
        bottom = min(top + step, height)
        same[top:bottom] = (numbers[top:bottom] == numbers[top - 1 : bottom - 1]).all(axis=(1, 2))
        release_pages(pixels[top - 1 : bottom])
    return same
