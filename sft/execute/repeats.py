"""Which rows of an image equal the row above them, bit for bit: of tensors by looking, of sources by asking.

Bits are compared, not numbers: a program makes the same of the same bits, while it may tell 0 from -0, and a NaN is no number that equals
itself. Rows are compared in pieces, so that what that takes besides is known beforehand (``sft.walk.repeats.comparison_bytes``).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sft.analysis.axes import ROWS, Axes
from sft.analysis.interval import Interval
from sft.analysis.repeats import BoolArray
from sft.errors import SftError, SourceError
from sft.sources.source import RepeatingSource, Source, select_samples
from sft.walk.repeats import comparison_chunk_rows

__all__ = ["equal_rows_on_device", "source_equal_rows"]

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
