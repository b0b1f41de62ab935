"""Constant strips on real tensors: comparison of rows, and weights of sums.

Rows are compared bit by bit. A program computes the same from the same bits, while it may distinguish 0 from -0, and a NaN does not equal
itself. Tensors are compared chunk by chunk, so that the memory is known in advance (``sft.runtime.skip_constant``); sources report
themselves which rows are equal (`RepeatingSource`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS, Axes
from sft.common.array_types import BoolArray
from sft.common.errors import SftError, SourceError
from sft.common.interval import Interval
from sft.lower.program import Program
from sft.lower.rules.base import AdditivePart
from sft.runtime.skip_constant import comparison_chunk_rows
from sft.sources.source import RepeatingSource, Source, select_samples
from sft.torch_runtime.host.streamed_cuts import HostGradient
from sft.torch_runtime.pass_statistics import LISTENERS, PassSkipping, note_flops

__all__ = ["TorchStripOps", "equal_rows_on_device", "source_equal_rows"]

#: Integer types by size in bytes; equal integers are equal bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TorchStripOps:
    """Operations on tensors that stand in for strips left out; see `sft.runtime.strip_policy.StripOps`.

    Attributes:
        device: device of the buffers; on ``meta`` no row is known to repeat.
        view: takes a view of an image, as `sft.runtime.machine.BufferOps.view`.
        skipping: statistics of the pass.
    """

    device: torch.device
    view: Callable[..., Tensor]
    skipping: PassSkipping

    def equal_rows(self, image: Any, batch: Interval, columns: Interval, *, axes: Axes) -> BoolArray | None:
        if self.device.type == "meta":
            return None
        if isinstance(image, HostGradient):
            image = image.tensor
        if isinstance(image, Tensor):
            return equal_rows_on_device(self.view(image, batch, None, columns, axes=axes), axes)
        return source_equal_rows(image, batch, columns)

    def reserve(self, num_bytes: int) -> None:
        return None

    def scale_sums(self, buffer: Tensor, additive: AdditivePart, factor: int, *, divide: bool) -> None:
        sums = [buffer] if additive.columns is None else [buffer.select(-1, column) for column in additive.columns]
        for value in sums:
            if additive.is_logarithm:
                value.sub_(math.log(factor)) if divide else value.add_(math.log(factor))
            else:
                value.div_(factor) if divide else value.mul_(factor)

    def count_strips(self, program: Program, *, num_run: int, num_skipped: int) -> None:
        self.skipping.note(num_run=num_run, num_skipped=num_skipped, flops=program.flops)
        if LISTENERS:
            note_flops(num_skipped * program.flops)


def equal_rows_on_device(image: Tensor, axes: Axes) -> BoolArray | None:
    """For each row of an image on any device, True if it equals the row above it; ``None`` for a type without comparable bits."""
    dim = axes.dim(image.dim(), ROWS)
    bits = _BITS.get(image.element_size())
    if dim is None or bits is None or image.is_complex():
        return None
    extent = image.shape[dim]
    numbers = image.detach().view(bits)
    other_dims = [axis for axis in range(image.dim()) if axis != dim]
    differs = torch.ones(extent, dtype=torch.bool, device=image.device)
    step = comparison_chunk_rows(image.numel() // max(1, extent))
    for top in range(1, extent, step):
        count = min(step, extent - top)
        unequal = torch.ne(numbers.narrow(dim, top, count), numbers.narrow(dim, top - 1, count))
        differs[top : top + count] = unequal.any(other_dims)
        del unequal
    equal: BoolArray = np.logical_not(differs.cpu().numpy())
    return equal


def source_equal_rows(source: Source, batch: Interval, columns: Interval) -> BoolArray | None:
    """For each row of a source, True if it equals the row above it; ``None`` for a source without that method.

    Raises:
        SourceError: the method fails or returns another number of rows.
    """
    samples = select_samples(source, batch)
    if not isinstance(samples, RepeatingSource):
        return None
    _, _, height_px, _ = samples.shape
    try:
        equal = np.asarray(samples.repeated_rows(columns), dtype=bool)
    except SftError:
        raise
    except Exception as error:
        raise SourceError(
            f"cannot determine which rows of {source} repeat: {type(error).__name__}: {error}. Correct the source."
        ) from error
    if equal.shape != (height_px,):
        raise SourceError(f"repeated_rows of {source} has shape {equal.shape}, and the source has {height_px} rows. Correct repeated_rows.")
    return equal
