"""Which rows of an image equal the row above them, bit for bit: of tensors by looking, of sources by asking.

Bits are compared, not numbers: a program makes the same of the same bits, while it may tell 0 from -0, and a NaN is no number that equals
itself. Rows are compared in pieces, so that what that takes besides is known beforehand (``sft.runtime.skip_constant.comparison_bytes``).

An account of strips that were left out since they would have made what a neighbour made (``Options(skip_repeats=True)``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sft.analysis.ir.axes import ROWS, Axes
from sft.analysis.tiling.constant_strips import BoolArray
from sft.common.errors import SftError, SourceError
from sft.common.interval import Interval
from sft.runtime.skip_constant import comparison_chunk_rows
from sft.sources.source import RepeatingSource, Source, select_samples

__all__ = ["PassSkipping", "Skipping", "equal_rows_on_device", "source_equal_rows"]

#: Types of as many bytes whose equality is that of bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def equal_rows_on_device(image: Tensor, axes: Axes) -> BoolArray | None:
    """For each row of an image on any device whether it equals the row above it; ``None`` for a type whose bits cannot be compared."""
    dim = axes.dim(image.dim(), ROWS)
    bits = _BITS.get(image.element_size())
    if dim is None or bits is None or image.is_complex():
        return None
    extent = image.shape[dim]
    numbers = image.detach().view(bits)
    others = [axis for axis in range(image.dim()) if axis != dim]
    differs = torch.ones(extent, dtype=torch.bool, device=image.device)
    step = comparison_chunk_rows(image.numel() // max(1, extent))
    for top in range(1, extent, step):
        count = min(step, extent - top)
        piece = torch.ne(numbers.narrow(dim, top, count), numbers.narrow(dim, top - 1, count))
        differs[top : top + count] = piece.any(others)
        del piece
    same: BoolArray = np.logical_not(differs.cpu().numpy())
    return same


def source_equal_rows(source: Source, batch: Interval, columns: Interval) -> BoolArray | None:
    """What a source says of the same; ``None`` for one that says nothing.

    Raises:
        SourceError: it cannot be asked.
    """
    part = select_samples(source, batch)
    if not isinstance(part, RepeatingSource):
        return None
    _, _, height_px, _ = part.shape
    try:
        same = np.asarray(part.repeated_rows(columns), dtype=bool)
    except SftError:
        raise
    except Exception as error:
        raise SourceError(f"cannot tell which rows of {source} are repeated: {type(error).__name__}: {error}. Mend the source.") from error
    if same.shape != (height_px,):
        raise SourceError(f"{source} says of {same.shape} rows whether they are repeated: it has {height_px}. Mend repeated_rows.")
    return same


@dataclass(slots=True, kw_only=True)
class PassSkipping:
    """What one pass, forward or backward, left out.

    Attributes:
        num_strips: strips of all walks, those that run forward once more to restore states included.
        num_skipped: of these, strips that were not run.
        skipped_flops: what these would have computed; the pass ran so much less than was planned.
    """

    num_strips: int = 0
    num_skipped: int = 0
    skipped_flops: int = 0

    def note(self, *, num_run: int, num_skipped: int, flops: int) -> None:
        """Count strips of a program of so many FLOPs."""
        self.num_strips += num_run + num_skipped
        self.num_skipped += num_skipped
        self.skipped_flops += num_skipped * flops

    def __str__(self) -> str:
        return f"{self.num_skipped:,} of {self.num_strips:,} strips left out ({self.skipped_flops:.4g} FLOPs)"


@dataclass(frozen=True, slots=True)
class Skipping:
    """What a call left out; the backward pass adds its part when it runs.

    >>> print(Skipping())
    forward: 0 of 0 strips left out (0 FLOPs)
    backward: 0 of 0 strips left out (0 FLOPs)

    Attributes:
        forward: of the forward pass.
        backward: of the backward passes so far.
    """

    forward: PassSkipping = field(default_factory=PassSkipping)
    backward: PassSkipping = field(default_factory=PassSkipping)

    @property
    def skipped_flops(self) -> int:
        """Of both passes: so much less than ``plan.flops`` was computed."""
        return self.forward.skipped_flops + self.backward.skipped_flops

    def __str__(self) -> str:
        return f"forward: {self.forward}\nbackward: {self.backward}"
