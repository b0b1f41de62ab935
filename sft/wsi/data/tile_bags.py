"""Slides of a run as bags of tiles: the tiles of a slide's tissue, at the resolution of the run, in place of its image.

The grid of tiles begins at the upper left corner of the slide, and is the same for every epoch: augmentation turns the pixels of the
tiles, not the grid. So a slide has one number of tiles, and a tile one place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sft.sources import Raster, Tiles
from sft.tissue.mask import Box
from sft.wsi.data.augment import IDENTITY_AUGMENTATION, Augmentation
from sft.wsi.data.dataset import SlideDataset
from sft.wsi.data.slides import OpenedSlide
from sft.wsi.data.table import SlideRecord
from sft.wsi.data.tissue import rescale_area
from sft.wsi.data.transforms import Turned

__all__ = ["SlideTiles", "TileDataset"]

_MIN_TISSUE = 0.5
#: Host memory for decoded pixels of a slide where ``data.host_budget`` is not set.
_HOST_BYTES = 256 * 2**20


class SlideTiles(Tiles):
    """Tiles of a slide of the table.

    Attributes:
        record: the slide.
    """

    record: SlideRecord


class TileDataset(SlideDataset):
    """Opens the slides of a run as bags of tiles.

    `sizes` counts the tiles of a slide as one column: its width is that of a tile, its height that of all tiles.
    """

    def source(self, record: SlideRecord, augmentation: Augmentation = IDENTITY_AUGMENTATION) -> SlideTiles:
        """Input of the network: all tiles of the slide, of its tissue if the run or the table has masks.

        Raises:
            InputError: as `image`; or no tile has enough tissue.
            SourceError: the slide cannot be read.
        """
        image, stain = self._normalised(record)
        changed = augmentation.apply(image, stain=stain)
        settings = self._config.model
        tiles = SlideTiles(
            changed,
            settings.side_px,
            **self.normalisation(record),
            host_budget_bytes=_HOST_BYTES if self._cache_bytes is None else self._cache_bytes,
        )
        positions = self.positions(record)
        if isinstance(changed, Turned):
            positions = changed.positions(positions, settings.side_px)
        bag = tiles.at(positions)
        bag.record = record
        return bag

    def positions(self, record: SlideRecord) -> npt.NDArray[np.int64]:
        """Column and row of the upper left px of each tile, in px of the slide at the run's resolution, ``[N, 2]``.

        Raises:
            InputError, SourceError: as :meth:`source`.
        """
        slide, settings = self._open(record), self._config.model
        area = self._area(record, slide)
        tissue = None if area is None else rescale_area(area, slide.image, slide.scale)
        min_tissue = _MIN_TISSUE if settings.min_tissue is None else settings.min_tissue
        return Tiles(slide.image, settings.side_px, tissue=tissue, min_tissue=min_tissue, stride_px=settings.step_px).positions_px

    def _view_of(self, record: SlideRecord, slide: OpenedSlide) -> tuple[Raster, Box | None]:
        """The slide without a crop: tissue selects tiles."""
        image, _ = super()._view_of(record, slide)
        return image, None

    def _input_size(self, record: SlideRecord, image: Raster) -> tuple[int, int]:
        side_px = self._config.model.side_px
        return side_px, len(self.positions(record)) * side_px
