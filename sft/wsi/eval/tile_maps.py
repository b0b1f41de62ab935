"""Maps of bags of tiles: contributions, attention and gradients of single tiles, on the grid of the tiles of a slide.

A map has a cell for each place of the grid; places without a tile are NaN, and stay uncoloured in pictures.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
from torch import nn

import sft
from sft.common.array_types import Float32Array
from sft.prediction import PredictedRaster, RasterWriter
from sft.prediction.delivery import resolve_dtype
from sft.wsi.config import ModelConfig
from sft.wsi.data.slides import make_thumbnail
from sft.wsi.data.table import SlideRecord
from sft.wsi.data.tile_bags import TileDataset
from sft.wsi.eval.heatmap import EvidenceMaps, Heatmap, HeatmapMaker, heatmap_of
from sft.wsi.eval.map_drawing import Grids, draw_overlay
from sft.wsi.model.bags import AttentionBagHead, BagEvidence, BagModel
from sft.wsi.run.files import atomic_write_with_parents
from sft.wsi.train.experiment import Experiment

__all__ = ["TileHeatmapMaker", "tile_raster"]

#: Name of the map of the attention.
_ATTENTION = "attention"
_OVERLAY_PX = 2048


class TileHeatmapMaker(HeatmapMaker):
    """Draws maps of slides from an encoder of tiles; see `HeatmapMaker`."""

    def draw_weights(self, record: SlideRecord) -> Heatmap | None:
        """Draw the attention over the slide, the share of each tile in the pooled vector; ``None`` for heads without attention.

        Raises:
            SourceError: the slide cannot be read.
            RunFolderError: a file cannot be written.
            BudgetError: the slide does not fit.
        """
        experiment = self._experiment
        maps = self._maps_of(record)
        if not isinstance(experiment.model.head, AttentionBagHead) or maps.weights is None:
            return None
        name = _ATTENTION if _ATTENTION not in experiment.task.classes else "attention of tiles"
        folder = self._folder / record.name
        files = [folder / f"map-{name.replace(' ', '_')}{suffix}" for suffix in (".npy", ".png")]
        with atomic_write_with_parents(files[0]) as temporary:
            np.save(temporary, maps.weights)
        small, factor = make_thumbnail(experiment.feed.picture(record), _OVERLAY_PX)
        title = f"{record.name}: attention{self._label}"
        draw_overlay(files[1], small, maps.weights, maps.grids, factor, title=title, label="share of the slide's vector", centred=False)
        highest = float(np.nanmax(maps.weights))
        return heatmap_of(
            record, name, highest, files, maps.grids, experiment.feed.frame(record), note=f"attention, at most {highest:.3g} of a tile"
        )

    def _evidence_model(self) -> nn.Module:
        model = self._experiment.model
        assert isinstance(model, BagModel)
        return BagEvidence(model)

    def _compute(self, record: SlideRecord) -> EvidenceMaps:
        scores, evidence, weights = (value.float().cpu().numpy() for value in self._evidence.eval()(self._experiment.feed.source(record)))
        layers, grids = self._on_grid(record, np.concatenate([evidence, weights], axis=1))
        return EvidenceMaps(scores=scores[0], evidence=layers[:-1], grids=grids, weights=layers[-1])

    def _saliency_map(self, record: SlideRecord, output: int, factor: int) -> tuple[Float32Array, Grids]:
        """The gradient of each tile."""
        with self._input_gradient(record, output) as gradient:
            tiles = gradient if gradient.ndim == 4 else gradient[None]
            squares = [float(np.square(tile, dtype=np.float64).sum()) / math.prod(tile.shape[1:]) for tile in tiles]
        layers, grids = self._on_grid(record, np.sqrt(np.array(squares, np.float32))[:, None])
        return layers[0], grids

    def _on_grid(self, record: SlideRecord, values: Float32Array) -> tuple[Float32Array, Grids]:
        """Values of tiles ``[N, K]`` as layers ``[K, rows, columns]``, and the grids of rows and columns."""
        feed, settings = self._experiment.feed, self._experiment.config.model
        assert isinstance(feed, TileDataset)
        image = feed.image(record)
        layers = _layers(feed.positions(record), values, settings, (image.height_px, image.width_px))
        grid = sft.PositionGrid(stride_px=Fraction(settings.step_px), first_centre_px=Fraction(settings.side_px, 2))
        return layers, (grid, grid)

    def write_maps(self, record: SlideRecord, writers: list[RasterWriter], dtype: str | None) -> PredictedRaster:
        """Write the contribution of each tile to each output, and its weight, as channels of a raster with a pixel for each place.

        Raises:
            SourceError: the slide cannot be read, or a file cannot be written.
            InputError: a format cannot hold the raster.
            BudgetError: the slide does not fit.
        """
        maps = self._maps_of(record)
        assert maps.weights is not None
        layers = np.concatenate([maps.evidence, maps.weights[None]])
        raster = tile_raster(self._experiment, record, layers.shape, dtype)
        try:
            for writer in writers:
                writer.begin(raster)
                writer.write(layers.astype(raster.dtype))
                writer.finish()
            for writer in writers:
                writer.publish()
        finally:
            for writer in writers:
                writer.discard()
        return raster


def tile_raster(experiment: Experiment, record: SlideRecord, shape: tuple[int, ...], dtype: str | None) -> PredictedRaster:
    """Raster of the grid of tiles of a slide, placed on its largest level.

    Args:
        experiment: of the model.
        record: the slide.
        shape: channels, rows and columns.
        dtype: element type. Default of `None`: float32
    """
    feed, settings, task = experiment.feed, experiment.config.model, experiment.task
    image, frame = feed.image(record), feed.frame(record)
    edge_px = (settings.side_px - settings.step_px) / 2
    names = task.classes if len(task.classes) == task.num_outputs else tuple(task.columns()) if task.num_outputs == 1 else ()
    names = names or tuple(f"output {number}" for number in range(task.num_outputs))
    return PredictedRaster(
        height_px=shape[1],
        width_px=shape[2],
        num_channels=shape[0],
        dtype=resolve_dtype("values", dtype),
        names=(*names, "weight"),
        scale=(frame.scale[0] * settings.step_px, frame.scale[1] * settings.step_px),
        origin_px=frame.to_slide(edge_px, edge_px),
        mpp=None if image.mpp is None else (image.mpp[0] * settings.step_px, image.mpp[1] * settings.step_px),
    )


def _layers(positions: npt.NDArray[np.int64], values: Float32Array, settings: ModelConfig, size_px: tuple[int, int]) -> Float32Array:
    """Values of tiles on the grid of all places of an image of (height, width) px, NaN where there is no tile."""
    rows, columns = ((extent - settings.side_px) // settings.step_px + 1 for extent in size_px)
    layers: Float32Array = np.full((values.shape[1], rows, columns), np.nan, np.float32)
    column, row = (positions // settings.step_px).T
    layers[:, row, column] = values.T
    return layers
