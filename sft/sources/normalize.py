"""Raw pixels to what a network eats: ``(pixel / 255 - mean) / std``, strip by strip, into memory that somebody else owns.

The arithmetic is that of `sft.sources.load_tensor` to the bit: subtract ``255 * mean``, divide by ``255 * std``, in float32 or the
wider type asked for, one rounding each. It is done here with NumPy and not with torch: a strip is normalised in a reader thread,
where torch would start a second team of OpenMP threads that fights the network's for the cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.errors import InputError
from sft.sources.host import AnyArray, HostArray

__all__ = ["Normalizer"]

#: Numbers are converted, shifted and scaled in pieces of this size: three passes over memory that stays in the cache, and the bound
#: of the scratch where the result has another type or layout.
_PIECE_BYTES = 1 << 18

_NUMPY_DTYPES: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


class Normalizer:
    """Normalises rows of an image with a fixed number of channels and columns. Safe to use from several threads.

    Args:
        mean: of each channel; for uint8 pixels in units of 0..1, for floats in their own units. None: 0.
        std: standard deviation of each channel, in the units of `mean`. None: 1.
        num_channels: of the image.
        width_px: of the image.
        pixel_dtype: uint8 or a floating-point type.

    Raises:
        InputError: wrong numbers of values, a mean that is not finite, a std that is not a positive float32, a wrong dtype.
    """

    def __init__(
        self, mean: Sequence[float] | None, std: Sequence[float] | None, *, num_channels: int, width_px: int, pixel_dtype: torch.dtype
    ) -> None:
        if pixel_dtype is not torch.uint8 and not pixel_dtype.is_floating_point:
            raise InputError(f"cannot normalise pixels of {pixel_dtype}: only uint8 and floating-point types are supported. Convert them.")
        self.mean = _values("mean", mean, 0.0, num_channels)
        self.std = _values("std", std, 1.0, num_channels)
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
        """Normalise ``pixels`` of shape ``[rows, width, channels]`` into ``out`` of shape ``[channels, rows, width]``.

        Next to its arguments it holds at most 256 KiB, or one row where that is more.
        """
        work_dtype = torch.promote_types(out.dtype, torch.float32)
        if self._pixel_dtype.is_floating_point:
            work_dtype = torch.promote_types(work_dtype, self._pixel_dtype)
        target = out.detach().permute(1, 2, 0)
        num_rows, width_px, num_channels = target.shape
        row_numbers = width_px * num_channels
        step = max(1, min(num_rows, _PIECE_BYTES // (row_numbers * work_dtype.itemsize)))
        # Channels last and of the right type, the result itself is the place to work in.
        direct = target.dtype is work_dtype and target.is_contiguous()
        scratch = None if direct else np.empty((step, width_px, num_channels), _NUMPY_DTYPES[work_dtype])
        # float - 0 and / 1 would change no bit, so they are left out.
        changes = self._pixel_dtype is torch.uint8 or any(self.mean) or any(value != 1 for value in self.std)
        for top in range(0, num_rows, step):
            bottom = min(top + step, num_rows)
            piece: AnyArray = target[top:bottom].numpy() if scratch is None else scratch[: bottom - top]
            _convert(pixels[top:bottom], piece)
            if changes:
                shift, scale = self._shift_and_scale(work_dtype)
                numbers = piece.reshape(bottom - top, row_numbers)  # a view: the piece is contiguous
                np.subtract(numbers, shift, out=numbers)
                np.divide(numbers, scale, out=numbers)
            if scratch is not None:
                target[top:bottom].copy_(torch.from_numpy(piece))

    def _shift_and_scale(self, work_dtype: torch.dtype) -> tuple[AnyArray, AnyArray]:
        """What to subtract and what to divide by, for a whole row: a row is one long vector loop, three channels are a short one."""
        if work_dtype not in self._tables:
            dtype = _NUMPY_DTYPES[work_dtype]
            unit = np.asarray(255 if self._pixel_dtype is torch.uint8 else 1, dtype)
            shift, scale = (np.tile(np.asarray(values, dtype) * unit, self._width_px) for values in (self.mean, self.std))
            self._tables[work_dtype] = shift, scale
        return self._tables[work_dtype]


def _values(name: str, values: Sequence[float] | None, default: float, num_channels: int) -> tuple[float, ...]:
    if values is None:
        return (default,) * num_channels
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise InputError(f"cannot normalise with {name} {values!r}: expected {num_channels} numbers, one a channel.") from error
    if len(numbers) != num_channels:
        raise InputError(
            f"cannot normalise with {name} {numbers}: these are {len(numbers)} values for {num_channels} channels. Give one a channel."
        )
    return tuple(math.copysign(0.0, 1.0) if number == 0 else number for number in numbers)  # x - -0.0 is not x for x = -0.0


def _convert(pixels: HostArray, piece: AnyArray) -> None:
    """Copy pixels into a contiguous piece of the working type; never narrows."""
    if isinstance(pixels, Tensor):
        torch.from_numpy(piece).copy_(pixels)
    elif pixels.strides[2] == pixels.itemsize:
        np.copyto(piece, pixels)
    else:  # planes: along the columns of one channel NumPy's inner loop is long, across the channels it would be three steps
        for channel in range(piece.shape[2]):
            np.copyto(piece[..., channel], pixels[..., channel])
