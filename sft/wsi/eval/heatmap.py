"""Heatmaps: class-activation maps, input gradients (saliency), and the crops with the largest contributions.

The map of a pooled head is exact (`Evidence`): its sum over all positions, plus the bias, is the logit. Saliency is the gradient of a
logit with respect to the input, which ``net(x, input_grad=...)`` writes strip by strip into a file: for a slide of 50,000 px a side it
would be 30 GB as a tensor.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import rc_context
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image as PillowImage

from sft.common.array_types import Float32Array
from sft.common.byte_units import format_bytes
from sft.common.errors import InputError
from sft.sources.image import Image, Pixels
from sft.sources.sink import allocate_blocks, free_space_text
from sft.wsi.data.slides import make_thumbnail
from sft.wsi.data.table import SlideRecord
from sft.wsi.errors import RunFolderError
from sft.wsi.eval.report import PLAIN_TEXT
from sft.wsi.model.heads import Evidence, set_training
from sft.wsi.run.files import atomic_write_with_parents, safe_names, write_csv
from sft.wsi.train.experiment import Experiment, autocast_context, compile_model

__all__ = ["Heatmap", "HeatmapMaker", "crop_places", "draw_overlay", "output_numbers"]

#: The longest side of an overlay: viewers and JPEG end at 65,500 px, people long before.
_OVERLAY_PX = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Heatmap:
    """Files written for a slide and an output.

    Attributes:
        slide: its name.
        output: name of the class (or ``value``, ``risk``).
        score: the model's output before the softmax.
        files: paths of the files.
    """

    slide: str
    output: str
    score: float
    files: tuple[Path, ...]


class HeatmapMaker:
    """Draws maps of slides into a folder.

    Args:
        experiment: with the model and the slides; its head is pooled.
        folder: output folder, created if missing.

    Raises:
        InputError: a segmentation has no class-activation map.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        if experiment.task.kind == "segmentation":
            raise InputError("heatmaps are for models that pool; a segmentation's output is a map itself. Use evaluate.")
        self._experiment, self._folder = experiment, folder
        self._evidence = compile_model(Evidence(experiment.model), experiment.config, skip_repeats=experiment.paints)
        self._net = compile_model(experiment.model, experiment.config, skip_repeats=experiment.paints)

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
        set_training(experiment.model, training=False, freeze_norms=experiment.freezes_norms)
        source = experiment.feed.source(record)
        with torch.no_grad(), autocast_context(experiment.config):
            scores, maps = self._evidence.eval()(source)
        evidence: Float32Array = maps[0, output].float().cpu().numpy()
        names = experiment.task.classes or experiment.task.columns()
        name = names[output] if output < len(names) else str(output)
        part = safe_names(names)[output] if output < len(names) else name
        image = experiment.feed.coloured(record)
        small, factor = make_thumbnail(image, _OVERLAY_PX)
        folder = self._folder / record.name
        stride_px = _stride_px((image.height_px, image.width_px), evidence.shape)
        title = f"{record.name}, {name}: score {scores[0, output].item():.3f}"
        files = [folder / f"map-{part}.npy", folder / f"map-{part}.png"]
        with atomic_write_with_parents(files[0]) as temporary:
            np.save(temporary, evidence)
        # A map is for a class; its sum is what the class gets, so that colours compare positions and the bar tells the scale.
        draw_overlay(files[1], small, evidence, stride_px / factor, title=title, label="contribution to the score", centred=True)
        if saliency:
            files += self._draw_saliency(record, output, name, folder / f"saliency-{part}", small, factor)
        files += self._cut_crops(image, evidence, stride_px, folder, part, num_crops, crop_px)
        return Heatmap(slide=record.name, output=name, score=scores[0, output].item(), files=tuple(files))

    def saliency(self, record: SlideRecord, output: int, factor: int) -> Float32Array:
        """The input's gradient of one output: its length over channels, and the mean of squares over blocks of ``factor`` px, rooted.

        Raises:
            SourceError: the slide cannot be read, or its gradient not be written.
            BudgetError: the slide does not fit.
        """
        experiment = self._experiment
        source = experiment.feed.source(record)
        _, channels, height_px, width_px = source.shape
        # Beside the results, since /tmp may be memory.
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = [(parameter, parameter.requires_grad) for parameter in experiment.model.parameters()]
        experiment.model.requires_grad_(False)  # no gradient but the input's
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".partial-", suffix=".gradient") as file:
                self._allocate(file.fileno(), 4 * channels * height_px * width_px, record)
                gradient: Any = np.memmap(file.name, np.float32, "r+", shape=(channels, height_px, width_px))
                with autocast_context(experiment.config):
                    scores = self._net.eval()(source, input_grad=gradient)
                scores[0, output].backward()
                rows = [_block_means(np.square(gradient[:, top : top + factor]).sum(0), factor) for top in range(0, height_px, factor)]
                del gradient
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
        blocks: Float32Array = np.sqrt(np.concatenate(rows))
        return blocks

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
        blocks = self.saliency(record, output, max(factor, 4))
        files = [stem.with_name(f"{stem.name}{suffix}") for suffix in (".npy", ".png")]
        with atomic_write_with_parents(files[0]) as temporary:
            np.save(temporary, blocks)
        title = f"{record.name}, {name}: gradient of the score"
        draw_overlay(files[1], small, blocks, max(factor, 4) / factor, title=title, label="root mean square of the gradient", centred=False)
        return files

    def _cut_crops(
        self, image: Image, evidence: Float32Array, stride_px: float, folder: Path, part: str, num_crops: int, crop_px: int
    ) -> list[Path]:
        width_px, height_px = min(crop_px, image.width_px), min(crop_px, image.height_px)
        files, rows = [], []
        for rank, (row, col) in enumerate(crop_places(evidence, num_crops, max(1, round(crop_px / stride_px))), start=1):
            left = min(max(round((col + 0.5) * stride_px - width_px / 2), 0), image.width_px - width_px)
            top = min(max(round((row + 0.5) * stride_px - height_px / 2), 0), image.height_px - height_px)
            files.append(folder / f"crop-{part}-{rank:02d}.png")
            with atomic_write_with_parents(files[-1]) as temporary:
                PillowImage.fromarray(image.read(left, top, width_px, height_px)).save(temporary)
            rows.append([rank, left, top, width_px, height_px, float(evidence[row, col])])
        if num_crops:
            files.append(folder / f"crops-{part}.csv")
            write_csv(files[-1], ["rank", "left_px", "top_px", "width_px", "height_px", "contribution"], rows)
        return files


def crop_places(evidence: Float32Array, num_crops: int, spacing: int) -> list[tuple[int, int]]:
    """The highest positions of a map, none closer to another than ``spacing`` rows or columns.

    >>> crop_places(np.array([[5, 4, 0, 3]], np.float32), 2, 2)
    [(0, 0), (0, 3)]
    """
    left = evidence.astype(np.float64)
    places: list[tuple[int, int]] = []
    while len(places) < num_crops and np.isfinite(left.max()):
        row, col = (int(number) for number in np.unravel_index(int(left.argmax()), left.shape))
        places.append((row, col))
        left[max(0, row - spacing + 1) : row + spacing, max(0, col - spacing + 1) : col + spacing] = -np.inf
    return places


def draw_overlay(
    path: Path, small: Pixels, values: npt.NDArray[np.floating[Any]], cell_px: float, *, title: str, label: str, centred: bool
) -> None:
    """Draw values over a slide, with a colour bar.

    Args:
        path: of the image.
        small: the slide, ``[height, width, 3]``.
        values: ``[rows, cols]``.
        cell_px: pixels of ``small`` that one value covers.
        title: above.
        label: of the colour bar.
        centred: whether zero is the middle of the colours.

    Raises:
        RunFolderError: it cannot be written.
    """
    with rc_context(PLAIN_TEXT):
        _draw_overlay(path, small, values, cell_px, title, label, centred)


def _draw_overlay(
    path: Path, small: Pixels, values: npt.NDArray[np.floating[Any]], cell_px: float, title: str, label: str, centred: bool
) -> None:
    height, width = small.shape[:2]
    figure = Figure(figsize=(12, 1.2 + 5.2 * min(1.6, height / width)), layout="constrained")
    plain, overlaid = figure.subplots(1, 2)
    for axis in (plain, overlaid):
        axis.imshow(small, extent=(0, width, height, 0))
        axis.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    # A few positions at the border see mostly padding and would take the whole range of colours.
    low, high = (float(value) for value in np.percentile(values, (1, 99)))
    if centred:
        low, high = -max(abs(low), abs(high), 1e-12), max(abs(low), abs(high), 1e-12)
    scale = ScalarMappable(Normalize(low, max(high, low + 1e-12)), "coolwarm" if centred else "viridis")
    extent = (0, values.shape[1] * cell_px, values.shape[0] * cell_px, 0)
    overlaid.imshow(values, extent=extent, norm=scale.norm, cmap=scale.cmap, alpha=0.5, interpolation="nearest")
    overlaid.set(xlim=(0, width), ylim=(height, 0))
    figure.colorbar(scale, ax=overlaid, shrink=0.8, extend="both", label=label)
    figure.suptitle(title)
    with atomic_write_with_parents(path) as temporary:
        figure.savefig(temporary, dpi=120)


def output_numbers(experiment: Experiment, names: Sequence[str] | None) -> list[int]:
    """Indices of the outputs to draw: the named ones, or by default all classes but the first of two.

    Raises:
        InputError: the class does not exist.
    """
    classes = experiment.task.classes
    if not names:
        return [1] if experiment.task.kind == "classification" and len(classes) == 2 else list(range(experiment.task.num_outputs))
    unknown = [name for name in names if name not in classes]
    if unknown:
        raise InputError(f"--classes {', '.join(unknown)}: the model's are {', '.join(classes) or 'none'}")
    return [classes.index(name) for name in names]


def _stride_px(extents_px: tuple[int, int], positions: tuple[int, ...]) -> float:
    """Pixels from one position of the map to the next: nearly always a power of two; the last row or column may be partial.

    The axis with more positions determines it best; the height of a map of one row determines almost no stride.
    """
    both = list(zip(extents_px, positions, strict=True))
    extent, count = max(both, key=lambda each: each[1])
    power = float(2 ** round(np.log2(extent / count)))
    return power if all(n - 1 < e / power < n + 1 for e, n in both) else extent / count


def _block_means(values: npt.NDArray[np.floating[Any]], factor: int) -> npt.NDArray[np.floating[Any]]:
    """Means over the rows given and blocks of columns: ``[1, blocks]``."""
    columns = np.add.reduceat(values.sum(0), np.arange(0, values.shape[1], factor))
    counts = np.minimum(factor, values.shape[1] - np.arange(0, values.shape[1], factor)) * values.shape[0]
    means: npt.NDArray[np.floating[Any]] = columns / counts
    return means[None]
