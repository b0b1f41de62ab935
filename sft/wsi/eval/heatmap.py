"""Heatmaps: class-activation maps, input gradients (saliency), and the crops with the largest contributions.

The map of a pooled head is exact (`Evidence`): its sum over all positions, plus the bias, is the logit. A value is drawn over the cell of
its position, centred where the access maps of the backbone say (`sft.position_grids`): position ``i`` of a ResNet covers the pixels from
``32 i - 15.5`` to ``32 i + 16.5``. Crops are cut around the same centres. Saliency is the gradient of a
logit with respect to the input, which ``net(x, input_grad=...)`` writes strip by strip into a file: for a slide of 50,000 px a side it
would be 30 GB as a tensor.
"""

from __future__ import annotations

import csv
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image as PillowImage
from torch import nn

import sft
from sft.common.array_types import Float32Array
from sft.common.byte_units import format_bytes
from sft.common.errors import InputError, some_names
from sft.sources.image import Image, Pixels
from sft.sources.sink import allocate_blocks, free_space_text
from sft.wsi.data.dataset import SlideFrame
from sft.wsi.data.slides import make_thumbnail
from sft.wsi.data.table import SlideRecord
from sft.wsi.errors import RunFolderError
from sft.wsi.eval.map_drawing import Grids, draw_overlay
from sft.wsi.model.heads import Evidence, set_training
from sft.wsi.run.files import atomic_write_with_parents, safe_names, write_csv
from sft.wsi.train.experiment import Experiment, autocast_context, compile_model

__all__ = [
    "EvidenceMaps",
    "Heatmap",
    "HeatmapMaker",
    "crop_places",
    "heatmap_of",
    "output_numbers",
    "write_map_table",
]

#: The longest side of an overlay; viewers and JPEG end at 65,500 px.
_OVERLAY_PX = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """Files written for a slide and an output.

    Attributes:
        slide: its name.
        output: name of the class (or ``value``, ``risk``).
        score: the model's output before the softmax.
        files: paths of the files.
        stride_px: (x, y) px of the slide's largest level from one position of the map to the next.
        first_centre_px: (x, y) centre of the map's first position, in px of the slide's largest level.
        note: about the map, in place of its score; empty for a map of a score.
    """

    slide: str
    output: str
    score: float
    files: tuple[Path, ...]
    stride_px: tuple[float, float]
    first_centre_px: tuple[float, float]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceMaps:
    """Scores of a slide, and the contributions to them.

    Attributes:
        scores: of each output, before the softmax.
        evidence: ``[K, rows, columns]``; NaN where the slide has no tile.
        grids: grids of the rows and columns.
        weights: weights of the pooling, ``[rows, columns]``; ``None`` for a feature map.
    """

    scores: Float32Array
    evidence: Float32Array
    grids: Grids
    weights: Float32Array | None = None


class HeatmapMaker:
    """Draws maps of slides into a folder.

    Args:
        experiment: with the model and the slides; its head is pooled.
        folder: output folder, created if missing.
        label: of the model, in the titles of pictures. Default: none

    Raises:
        InputError: a segmentation has no class-activation map.
    """

    def __init__(self, experiment: Experiment, folder: Path, *, label: str = "") -> None:
        self._label = f"\n{label}" if label else ""
        if experiment.task.kind == "segmentation":
            raise InputError("class-activation maps are for models that pool; MaskMaker draws the predicted masks of a segmentation")
        self._experiment, self._folder = experiment, folder
        self._evidence = compile_model(self._evidence_model(), experiment.config, skip_repeats=experiment.paints)
        self._net = compile_model(experiment.model, experiment.config, skip_repeats=experiment.paints)
        self._computed: tuple[str, EvidenceMaps] | None = None

    def draw(self, record: SlideRecord, output: int, *, saliency: bool, num_crops: int, crop_px: int) -> Heatmap:
        """Draw a slide's map for one output.

        Args:
            record: the slide.
            output: number of the class, or 0.
            saliency: whether to draw the input's gradient, too.
            num_crops: how many crops to cut out where the map is highest.
            crop_px: their side.

        Raises:
            SourceError: the slide cannot be read.
            RunFolderError: a file cannot be written.
            BudgetError: the slide does not fit.
        """
        experiment = self._experiment
        computed = self._maps_of(record)
        evidence, grids, score = computed.evidence[output], computed.grids, float(computed.scores[output])
        names = experiment.task.classes or experiment.task.columns()
        name = names[output] if output < len(names) else str(output)
        output_name = safe_names(names)[output] if output < len(names) else name
        image, frame = experiment.feed.picture(record), experiment.feed.frame(record)
        small, factor = make_thumbnail(image, _OVERLAY_PX)
        folder = self._folder / record.name
        title = f"{record.name}, {name}: score {score:.3f}{self._label}"
        files = [folder / f"map-{output_name}.npy", folder / f"map-{output_name}.png"]
        with atomic_write_with_parents(files[0]) as temporary:
            np.save(temporary, evidence)
        # A map is for a class; its sum is the score of the class. Colours compare positions, and the bar shows the scale.
        draw_overlay(files[1], small, evidence, grids, factor, title=title, label="contribution to the score", centred=True)
        if saliency:
            files += self._draw_saliency(record, output, name, folder / f"saliency-{output_name}", small, factor)
        files += self._cut_crops(image, frame, evidence, grids, folder, output_name, num_crops, crop_px)
        return heatmap_of(record, name, score, files, grids, frame)

    def draw_weights(self, record: SlideRecord) -> Heatmap | None:
        """Draw the weights of the pooling; ``None`` for a feature map, whose weights are part of its evidence."""
        return None

    def _evidence_model(self) -> nn.Module:
        """The model with the contributions of positions."""
        return Evidence(self._experiment.model)

    def _maps_of(self, record: SlideRecord) -> EvidenceMaps:
        """Maps of a slide; those of the last slide are kept for its other outputs."""
        if self._computed is None or self._computed[0] != record.name:
            experiment = self._experiment
            set_training(experiment.model, training=False, freeze_norms=experiment.freezes_norms)
            with torch.no_grad(), autocast_context(experiment.config):
                self._computed = record.name, self._compute(record)
        return self._computed[1]

    def _compute(self, record: SlideRecord) -> EvidenceMaps:
        source = self._experiment.feed.source(record)
        scores, maps = self._evidence.eval()(source)
        grids = _map_grids(self._evidence, source, (maps.shape[2], maps.shape[3]))
        return EvidenceMaps(scores=scores[0].float().cpu().numpy(), evidence=maps[0].float().cpu().numpy(), grids=grids)

    def saliency(self, record: SlideRecord, output: int, factor: int) -> Float32Array:
        """The input's gradient of one output: its length over channels, and the mean of squares over blocks of ``factor`` px, rooted.

        Raises:
            SourceError: the slide cannot be read, or its gradient not be written.
            BudgetError: the slide does not fit.
        """
        return self._saliency_map(record, output, factor)[0]

    def _saliency_map(self, record: SlideRecord, output: int, factor: int) -> tuple[Float32Array, Grids]:
        """The gradient in blocks, and the grids of the blocks."""
        with self._input_gradient(record, output) as gradient:
            height_px = gradient.shape[1]
            rows = [_block_means(np.square(gradient[:, top : top + factor]).sum(0), factor) for top in range(0, height_px, factor)]
        blocks: Float32Array = np.sqrt(np.concatenate(rows))
        grid = sft.PositionGrid(stride_px=Fraction(factor), first_centre_px=Fraction(factor, 2))
        return blocks, (grid, grid)

    @contextmanager
    def _input_gradient(self, record: SlideRecord, output: int) -> Iterator[npt.NDArray[np.float32]]:
        """Gradient of one output in the input, in a file that is removed at the end; without the dimension of a single sample."""
        experiment = self._experiment
        source = experiment.feed.source(record)
        shape = tuple(source.shape) if source.shape[0] > 1 else tuple(source.shape[1:])
        # In the folder of the results, since /tmp may be memory.
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = [(parameter, parameter.requires_grad) for parameter in experiment.model.parameters()]
        experiment.model.requires_grad_(False)  # no gradient but the input's
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".partial-", suffix=".gradient") as file:
                self._allocate(file.fileno(), 4 * math.prod(shape), record)
                gradient: Any = np.memmap(file.name, np.float32, "r+", shape=shape)
                with autocast_context(experiment.config):
                    scores = self._net.eval()(source, input_grad=gradient)
                scores[0, output].backward()
                yield gradient
                del gradient
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def _allocate(self, descriptor: int, num_bytes: int, record: SlideRecord) -> None:
        """Allocate the file before any computation: a mapped file without disk blocks ends the process.

        Raises:
            SourceError: the disk is full.
        """
        try:
            allocate_blocks(descriptor, 0, num_bytes)
        except OSError as error:
            raise RunFolderError(
                f"cannot write the gradient of slide {record.name}, {format_bytes(num_bytes)}, to {self._folder}: {error.strerror}"
                f"{free_space_text(self._folder)}. Make room, give --out on another disk, or leave out --saliency."
            ) from error

    def _draw_saliency(self, record: SlideRecord, output: int, name: str, stem: Path, small: Pixels, factor: int) -> list[Path]:
        blocks, grids = self._saliency_map(record, output, max(factor, 4))
        files = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".npy", ".png")]
        with atomic_write_with_parents(files[0]) as temporary:
            np.save(temporary, blocks)
        title = f"{record.name}, {name}: gradient of the score{self._label}"
        label = "root mean square of the gradient"
        draw_overlay(files[1], small, blocks, grids, factor, title=title, label=label, centred=False)
        return files

    def _cut_crops(
        self,
        image: Image,
        frame: SlideFrame,
        evidence: Float32Array,
        grids: Grids,
        folder: Path,
        output_name: str,
        num_crops: int,
        crop_px: int,
    ) -> list[Path]:
        width_px, height_px = min(crop_px, image.width_px), min(crop_px, image.height_px)
        rows_grid, columns_grid = grids
        spacing = (max(1, round(crop_px / rows_grid.stride_px)), max(1, round(crop_px / columns_grid.stride_px)))
        files, rows = [], []
        for rank, (row, col) in enumerate(crop_places(evidence, num_crops, spacing), start=1):
            left = _crop_start(columns_grid.centre_px(col), width_px, image.width_px)
            top = _crop_start(rows_grid.centre_px(row), height_px, image.height_px)
            files.append(folder / f"crop-{output_name}-{rank:02d}.png")
            with atomic_write_with_parents(files[-1]) as temporary:
                PillowImage.fromarray(image.read(left, top, width_px, height_px)).save(temporary)
            corners = frame.to_slide(left, top), frame.to_slide(left + width_px, top + height_px)
            on_slide = [corners[0][0], corners[0][1], corners[1][0] - corners[0][0], corners[1][1] - corners[0][1]]
            rows.append([rank, left, top, width_px, height_px, float(evidence[row, col]), *(round(value, 3) for value in on_slide)])
        if num_crops:
            files.append(folder / f"crops-{output_name}.csv")
            columns = ["rank", "left_px", "top_px", "width_px", "height_px", "contribution"]
            write_csv(files[-1], [*columns, "slide_left_px", "slide_top_px", "slide_width_px", "slide_height_px"], rows)
        return files


def heatmap_of(
    record: SlideRecord, name: str, score: float, files: Sequence[Path], grids: Grids, frame: SlideFrame, *, note: str = ""
) -> Heatmap:
    """Record of a drawn map."""
    rows, columns = grids
    return Heatmap(
        slide=record.name,
        output=name,
        score=score,
        files=tuple(files),
        stride_px=(float(columns.stride_px) * frame.scale[0], float(rows.stride_px) * frame.scale[1]),
        first_centre_px=frame.to_slide(float(columns.first_centre_px), float(rows.first_centre_px)),
        note=note,
    )


def _map_grids(net: Any, source: Any, positions: tuple[int, int]) -> Grids:
    """Grids of a map: those of the network, or equal cells of the image for a map without an affine grid.

    Args:
        net: the compiled model whose second output is the map.
        source: its input.
        positions: rows and columns of the map.
    """
    grids = sft.position_grids(net, source)[1]
    if grids is None or len(grids) != 2:
        rows, columns = (sft.PositionGrid.equal_cells(px, count) for px, count in zip(source.shape[2:], positions, strict=True))
        return rows, columns
    return grids[0], grids[1]


def _crop_start(centre_px: Fraction, crop_px: int, extent_px: int) -> int:
    """First pixel of a crop around a centre, moved into the image."""
    return min(max(round(centre_px - Fraction(crop_px, 2)), 0), extent_px - crop_px)


def crop_places(evidence: Float32Array, num_crops: int, spacing: tuple[int, int]) -> list[tuple[int, int]]:
    """The highest positions of a map, none closer to another than ``spacing`` (rows, columns) along both axes.

    >>> crop_places(np.array([[5, 4, 0, 3]], np.float32), 2, (2, 2))
    [(0, 0), (0, 3)]
    """
    left = np.where(np.isnan(evidence), -np.inf, evidence.astype(np.float64))  # places without a tile
    places: list[tuple[int, int]] = []
    while len(places) < num_crops and np.isfinite(left.max()):
        row, col = (int(number) for number in np.unravel_index(int(left.argmax()), left.shape))
        places.append((row, col))
        left[max(0, row - spacing[0] + 1) : row + spacing[0], max(0, col - spacing[1] + 1) : col + spacing[1]] = -np.inf
    return places


_MAP_COLUMNS = ("slide", "output", "score", "stride_x_px", "stride_y_px", "first_centre_x_px", "first_centre_y_px", "map", "weights")


def write_map_table(folder: Path, heatmap: Heatmap, weights: str = "") -> None:
    """Add a map to ``maps.csv``: its stride and the centre of its first position, in px of the slide's largest level.

    Rows of other maps are kept; a file with other columns is replaced.

    Args:
        folder: of the maps.
        heatmap: the map.
        weights: epoch and hash of the weights that it is of. Default: none

    Raises:
        RunFolderError: it cannot be written.
    """
    path = folder / "maps.csv"
    written: list[list[str]] = []
    if path.is_file():
        with path.open(newline="", encoding="utf-8") as file:
            written = list(csv.reader(file))
    rows: list[Sequence[object]] = [row for row in written[1:] if row[:2] != [heatmap.slide, heatmap.output]]
    rows = rows if written and tuple(written[0]) == _MAP_COLUMNS else []
    place = [*heatmap.stride_px, *heatmap.first_centre_px]
    rows.append([heatmap.slide, heatmap.output, heatmap.score, *place, heatmap.files[0].relative_to(folder).as_posix(), weights])
    write_csv(path, _MAP_COLUMNS, rows)


def output_numbers(experiment: Experiment, names: str | Sequence[str] | None) -> list[int]:
    """Indices of the outputs to draw: the named ones, or by default all classes but the first of two.

    Raises:
        InputError: the class does not exist.
    """
    classes = experiment.task.classes
    if not names:
        return [1] if experiment.task.kind == "classification" and len(classes) == 2 else list(range(experiment.task.num_outputs))
    names = (names,) if isinstance(names, str) else names
    unknown = [name for name in names if name not in classes]
    if unknown:
        raise InputError(f"--classes {some_names(unknown)}: the model's are {some_names(classes) or 'none'}")
    return [classes.index(name) for name in names]


def _block_means(values: npt.NDArray[np.floating[Any]], factor: int) -> npt.NDArray[np.floating[Any]]:
    """Means over the rows given and blocks of columns: ``[1, blocks]``."""
    columns = np.add.reduceat(values.sum(0), np.arange(0, values.shape[1], factor))
    counts = np.minimum(factor, values.shape[1] - np.arange(0, values.shape[1], factor)) * values.shape[0]
    means: npt.NDArray[np.floating[Any]] = columns / counts
    return means[None]
