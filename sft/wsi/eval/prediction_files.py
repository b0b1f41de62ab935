"""Files of predictions: maps of slides of any size, written strip by strip by `sft.predict`, one folder for each slide.

A segmentation gives classes or probabilities at the resolution of the run. A model with a pooled head gives its evidence (`Evidence`): for
each class a map; its sum over all positions, plus a bias, is the score. An encoder of tiles gives a pixel for each place of the grid of
tiles, NaN without a tile, and the weight of each tile as the last channel. Each folder has ``prediction.json``, written last: a folder
that has it is complete. A command that is started again, after a kill or with more slides, skips slides if the file names the same
weights, settings and slide file. The rows of an interrupted slide are in a journal (`sft.prediction.row_journal`), after which it resumes;
maps of tiles start again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import sft
from sft.common.errors import InputError
from sft.common.interval import Interval
from sft.prediction import CogWriter, NpyWriter, OmeTiffWriter, OmeZarrWriter, PolygonWriter, PredictedRaster, RasterWriter
from sft.prediction.prediction_head import Kind
from sft.prediction.raster import RasterRows
from sft.sources import Source
from sft.wsi.data.label_maps import IGNORED_LABEL
from sft.wsi.data.table import SlideRecord
from sft.wsi.errors import RunFolderError
from sft.wsi.eval.tile_maps import TileHeatmapMaker
from sft.wsi.model.heads import Evidence, set_training
from sft.wsi.run.files import write_json
from sft.wsi.train.checkpoint import WeightsId
from sft.wsi.train.experiment import Experiment, autocast_context, compile_model

__all__ = ["FORMATS", "PREDICTION_FILE", "ConfusionCounter", "MapWriter", "SlideMap"]

PREDICTION_FILE = "prediction.json"
_WRITERS: dict[str, Any] = {
    "ome.tif": OmeTiffWriter,
    "tif": CogWriter,
    "zarr": OmeZarrWriter,
    "npy": NpyWriter,
    "geojson": PolygonWriter,
}
#: Formats of maps.
FORMATS = tuple(_WRITERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlideMap:
    """The map of a slide.

    Attributes:
        slide: its name.
        files: the files.
        seconds: seconds of the computation; 0 for a map that existed.
        hidden_share: share of the writing that overlapped with the computation.
        is_new: False for a map that existed.
        num_resumed_rows: rows that an interrupted command has computed.
    """

    slide: str
    files: tuple[str, ...]
    seconds: float = 0.0
    hidden_share: float = 1.0
    is_new: bool = True
    num_resumed_rows: int = 0


class MapWriter:
    """Writer of the maps of a trained model.

    Args:
        experiment: with the model and the slides.
        weights: identity of the model's weights.
        kind: of the maps; a model with a pooled head has ``"values"`` only. Default: ``"classes"`` of a segmentation
        formats: of the maps. Default: OME-TIFF, and polygons of classes
        dtype: element type. Default: that of the kind

    Raises:
        InputError: the model has no maps of this kind, or a format does not exist.
    """

    def __init__(
        self,
        experiment: Experiment,
        weights: WeightsId,
        *,
        kind: Kind | None = None,
        formats: Sequence[str] = (),
        dtype: str | None = None,
    ) -> None:
        segments = experiment.task.kind == "segmentation"
        self.kind: Kind = kind or ("classes" if segments else "values")
        if not segments and self.kind != "values":
            raise InputError(f"kind {self.kind!r}: this run predicts {experiment.task.kind}, whose maps are its evidence; leave out --kind")
        self.formats = tuple(formats) or (("ome.tif", "geojson") if self.kind == "classes" else ("ome.tif",))
        unknown = [name for name in self.formats if name not in _WRITERS]
        if unknown:
            raise InputError(f"format {unknown[0]!r}: choose among {', '.join(FORMATS)}")
        if "geojson" in self.formats and self.kind != "classes":
            raise InputError(f"format 'geojson' outlines classes, and the maps are of kind {self.kind!r}; choose another format")
        self._experiment, self._weights, self._dtype = experiment, weights, dtype
        self._index = None if segments else 1
        self._tiles = TileHeatmapMaker(experiment, Path()) if experiment.config.model.takes_tiles else None
        if self._tiles is None:
            model = experiment.model if segments else Evidence(experiment.model)
            self._net = compile_model(model, experiment.config, skip_repeats=experiment.paints)
        task = experiment.task
        self.names = task.classes if len(task.classes) == task.num_outputs else tuple(task.columns())

    @property
    def fills_damage(self) -> bool:
        """True if damaged tiles are filled, and listed."""
        return self._experiment.config.train.on_error == "fill"

    def existing(self, record: SlideRecord, folder: Path) -> SlideMap | None:
        """The map of a slide in its folder; ``None`` if it must be computed."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            stored = json.loads((folder / PREDICTION_FILE).read_text(encoding="utf-8"))
            files = [str(name) for name in stored["files"]]
            if stored["key"] == self._key(record) and all((folder / name).exists() for name in files):
                return SlideMap(slide=record.name, files=tuple(str(folder / name) for name in files), is_new=False)
        return None

    def write(self, record: SlideRecord, folder: Path, *further: RasterWriter, journal: Path | None = None) -> SlideMap:
        """Compute and write the map of a slide.

        Args:
            record: the slide.
            folder: for the files; it must be empty.
            further: writers that get the map as well.
            journal: file for the rows until the map is complete. Default: `None` (an interrupted slide starts again)

        Raises:
            SourceError: the slide cannot be read.
            RunFolderError: a file cannot be written.
            BudgetError: the slide does not fit.
        """
        experiment = self._experiment
        set_training(experiment.model, training=False, freeze_norms=experiment.freezes_norms)
        folder.mkdir(parents=True, exist_ok=True)
        writers = [_WRITERS[name](folder / f"{self.kind}.{name}") for name in self.formats]
        begin, hidden_share, num_resumed_rows = time.perf_counter(), 0.0, 0
        try:
            if self._tiles is not None:
                raster = self._tiles.write_maps(record, [*writers, *further], self._dtype)
            else:
                with autocast_context(experiment.config):
                    result = sft.predict(
                        self._net,
                        experiment.feed.source(record),
                        [*writers, *further],
                        kind=self.kind,
                        dtype=self._dtype,
                        names=self.names,
                        index=self._index,
                        resume=False if journal is None else journal,
                    )
                raster, hidden_share, num_resumed_rows = result.raster, result.hidden_share, result.num_resumed_rows
        except sft.SourceError as error:
            if not any(place is not None and str(place) in str(error) for place in (folder, journal)):
                raise  # about the slide
            reason = str(error) if error.errno is None else os.strerror(error.errno)
            raise RunFolderError(
                f"cannot write the map of {record.name} to {folder.parent.parent}: {reason}. Make room, or name another folder with --out."
            ) from error
        paths = [path for writer in writers for path in (writer.path, *([writer.table_path] if isinstance(writer, PolygonWriter) else []))]
        description = {
            "slide": record.name,
            "kind": self.kind,
            "names": list(raster.names),
            "value_scale": raster.value_scale,
            "scale_px": list(raster.scale),
            "origin_px": list(raster.origin_px),
            "weights": self._weights.as_dict(),
            "files": [path.name for path in paths],
            "key": self._key(record),
        }
        write_json(folder / PREDICTION_FILE, description)
        return SlideMap(
            slide=record.name,
            files=tuple(map(str, paths)),
            seconds=time.perf_counter() - begin,
            hidden_share=hidden_share,
            num_resumed_rows=num_resumed_rows,
        )

    def _key(self, record: SlideRecord) -> dict[str, Any]:
        """Identity of a map: the weights, the settings and the slide's file."""
        files = {str(path): path.stat() for path in record.paths}
        mask = None if record.mask is None or self._experiment.task.kind == "segmentation" else record.mask.stat()
        tissue = {} if mask is None else {"mask": str(record.mask), "mask_bytes": mask.st_size, "mask_modified_ns": mask.st_mtime_ns}
        return {
            "weights": self._weights.sha256,
            "kind": self.kind,
            "formats": list(self.formats),
            "dtype": self._dtype,
            "path": ";".join(files),
            "file_bytes": sum(status.st_size for status in files.values()),
            "modified_ns": max(status.st_mtime_ns for status in files.values()),
            **tissue,
            **({} if record.mpp is None else {"mpp": record.mpp}),
        }


class ConfusionCounter:
    """Confusion matrix of the pixels that have a label, counted row by row while a map is predicted (`sft.prediction.RasterWriter`).

    Args:
        labels: label map of the image.
        num_classes: number of classes.

    Attributes:
        counts: ``[true, predicted]``.
        path: a name, which no file has.
    """

    def __init__(self, labels: Source, num_classes: int) -> None:
        self._labels, self._num_classes = labels, num_classes
        self.counts: npt.NDArray[np.int64] = np.zeros((num_classes, num_classes), np.int64)
        self.path = Path("confusion")

    def begin(self, raster: PredictedRaster) -> None:
        """Begin a map."""
        self.counts[:] = 0
        self._top, self._width_px = 0, raster.width_px

    def write(self, rows: RasterRows) -> None:
        """Count the next rows."""
        interval = Interval(self._top, self._top + rows.shape[1])
        true = torch.empty((1, 1, len(interval), self._width_px), dtype=torch.int64)
        self._labels.rows(interval, true)
        self._top = interval.stop
        expected, predicted = true.numpy()[0, 0], rows[0].astype(np.int64)
        counted = expected != IGNORED_LABEL
        pairs = expected[counted] * self._num_classes + predicted[counted]
        self.counts += np.bincount(pairs, minlength=self._num_classes**2).reshape(self._num_classes, self._num_classes)

    def finish(self) -> None:
        """No file is written."""

    def publish(self) -> None:
        """No file is written."""

    def discard(self) -> None:
        """No file is written."""
