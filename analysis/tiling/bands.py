"""Row bands: the rows of each value that a rank owns, computes and reads.

Ranks divide an image by rows of its tallest input: rank ``r`` owns ``[bounds[r], bounds[r + 1])`` of them, and of every other value the
proportional rows, so each row of each value has one owner. (A rank may own no row of a value with fewer rows than ranks.)

For one segment a rank computes its own rows of the segment's results, and all rows that these need: the receptive field, from the access
maps (:func:`sft.analysis.tiling.independent_tiles.independent_tile`). Ranks therefore exchange no rows inside a segment. Rows that two
bands need are computed by both, at the bands' borders only, since the strips inside a band carry their halo. The segment reads a range of
rows from outside: its own and a few of the neighbours', received before it runs. Only the first and the last band see true image borders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from sft.analysis.tiling.independent_tiles import independent_tile
from sft.analysis.tiling.operator_run import OperatorRun
from sft.analysis.tiling.strips import RowBand
from sft.common.interval import Interval

__all__ = ["BandPartition", "even_band_bounds", "row_band_of"]


def even_band_bounds(height: int, num_bands: int, multiple: int = 1) -> tuple[int, ...]:
    """Bounds of bands, as even as possible with multiples of ``multiple`` rows.

    >>> even_band_bounds(100, 4), even_band_bounds(100, 3, 8), even_band_bounds(5, 4, 2)
    ((0, 25, 50, 75, 100), (0, 32, 64, 100), (0, 2, 2, 4, 5))
    """
    inner = (round(band * height / num_bands / multiple) * multiple for band in range(1, num_bands))
    return (0, *(min(bound, height) for bound in inner), height)


@dataclass(frozen=True, slots=True)
class BandPartition:
    """The owner of each row.

    Attributes:
        bounds: first row of each band and the end, in rows of the tallest input: one entry more than the number of bands.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or any(stop < start for start, stop in pairwise(self.bounds)):
            raise ValueError(f"not the bounds of bands: {self.bounds}")

    @property
    def num_bands(self) -> int:
        """Number of bands, empty ones included."""
        return len(self.bounds) - 1

    @property
    def height(self) -> int:
        """Rows of the tallest input."""
        return self.bounds[-1]

    def rows(self, band: int, extent: int) -> Interval:
        """The rows that a band owns of a value of ``extent`` rows.

        >>> [BandPartition((0, 6, 7, 12)).rows(band, 3) for band in range(3)]
        [Interval(start=0, stop=2), Interval(start=2, stop=2), Interval(start=2, stop=3)]
        """
        start, stop = (-(-bound * extent // self.height) for bound in self.bounds[band : band + 2])
        return Interval(start, stop)


def row_band_of(run: OperatorRun, extents: Mapping[str, int], partition: BandPartition, band: int) -> RowBand:
    """The rows that a band computes and owns in a run."""
    owned = {name: partition.rows(band, extents[name]) for name in run.owned}
    tile = independent_tile(run, extents, {name: interval for name, interval in owned.items() if interval})
    return RowBand(computed={node.name: node.new for node in tile.nodes}, owned=owned)
