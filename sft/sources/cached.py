"""Decoded rows kept in host memory, so that the backward pass, and the next epoch, need not decode them again."""

from __future__ import annotations

from collections.abc import Iterator

from sft.common.array_types import BoolArray
from sft.common.byte_units import format_bytes, parse_bytes
from sft.common.interval import Interval
from sft.sources.image import Image, Pixels, Rectangle, Size
from sft.sources.row_blocks import RowBlocks
from sft.sources.source import image_equal_rows
from sft.sources.views import RasterView

__all__ = ["Cached"]


class Cached(RasterView):
    """An image with full-width rows that are kept as they were decoded, as many as fit a byte budget; see `sft.sources.row_blocks`.

    Put it outermost: what is kept is then what the network reads, after resampling, masks and crops. Rectangles that are narrower than
    the image, and other levels, pass through.

    Args:
        image: of any kind. It must not change.
        host_budget_bytes: bytes, or text such as ``"4GiB"``. On top of it come a few blocks of rows, as without a cache.

    Raises:
        InputError: not a size.
    """

    def __init__(self, image: Image, *, host_budget_bytes: int | str) -> None:
        super().__init__(image)
        self.host_budget_bytes = parse_bytes(host_budget_bytes)
        self._blocks = RowBlocks(image, Interval(0, image.width_px), host_budget_bytes=self.host_budget_bytes)

    def __repr__(self) -> str:
        return f"Cached({self.image!r}, host_budget_bytes={self.host_budget_bytes})"

    @property
    def level_tiles_px(self) -> tuple[Size | None, ...]:
        """None at level 0: views of this image need neither keep rows nor skip tiles."""
        return (None, *super().level_tiles_px[1:])

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for later passes; at most ``host_budget_bytes``."""
        return self._blocks.kept_bytes

    @property
    def num_blocks_read(self) -> int:
        """Blocks of rows that were decoded."""
        return self._blocks.num_blocks_read

    @property
    def num_blocks_reused(self) -> int:
        """Blocks of rows that were found decoded."""
        return self._blocks.num_blocks_reused

    def summary(self) -> str:
        """One-line summary, such as ``12 blocks decoded, 12 reused, 18.85 MiB of 1.00 GiB kept``."""
        return (
            f"{self.num_blocks_read} blocks decoded, {self.num_blocks_reused} reused, {format_bytes(self.kept_bytes)} of "
            f"{format_bytes(self.host_budget_bytes)} kept"
        )

    def decode(self, most_bytes: int) -> Iterator[None]:
        """Decode rows ahead of their use, from the top, a block with each element.

        Args:
            most_bytes: that all kept rows may take; never more than ``host_budget_bytes``.

        Raises:
            SourceError: rows cannot be read.
        """
        yield from self._blocks.decode(most_bytes)

    def forget(self) -> None:
        """Drop all cached rows."""
        self._blocks.forget()

    def close(self) -> None:
        """Close the underlying file and drop all cached rows."""
        self.forget()
        super().close()

    def repeated(self, part: Interval, *, columns: bool = False) -> BoolArray:
        """Repeated rows of the underlying image; see `sft.sources.source.RepeatingImage`."""
        return image_equal_rows(self.image, part, columns=columns)

    def _read(self, rectangle: Rectangle) -> Pixels:
        is_full_width = rectangle.level == 0 and len(rectangle.columns) == self.width_px
        return self._blocks.rows(rectangle.rows) if is_full_width else rectangle.read(self.image)
