"""Predicted masks of a segmentation: the class of each pixel as numbers, a picture over the slide, and polygons for QuPath.

The mask is computed in strips and leaves the device row by row, so a slide needs no tensor of its size. It has the size of the image that
the network sees, and the values of a label map: the index of the class. So it can be corrected and used as the mask of a table. The picture
and the polygons are made from every n-th pixel, as many as the picture has.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image as PillowImage

from sft.common.atomic_files import PARTIAL_MARK
from sft.common.errors import SourceError
from sft.sources.image import Pixels
from sft.tissue import Regions, TissueMask, write_geojson
from sft.tissue.geojson import mask_outline
from sft.wsi.data.dataset import SlideFrame
from sft.wsi.data.label_maps import count_values
from sft.wsi.data.slides import make_thumbnail
from sft.wsi.data.table import SlideRecord
from sft.wsi.errors import RunFolderError
from sft.wsi.eval.heatmap import Heatmap
from sft.wsi.eval.report import PLAIN_TEXT
from sft.wsi.model.heads import PredictedClasses, set_training
from sft.wsi.run.files import atomic_write_with_parents, safe_names
from sft.wsi.train.experiment import Experiment, autocast_context, compile_model

__all__ = ["MaskMaker"]

_OUTPUT = "classes"
_PICTURE_PX = 2048
_COLOURS = colormaps["tab10"]


class MaskMaker:
    """Draws the predicted masks of slides into a folder.

    Args:
        experiment: with the model and the slides; its head segments.
        folder: output folder, created if missing.
        label: of the model, in the titles of pictures. Default: none
    """

    def __init__(self, experiment: Experiment, folder: Path, *, label: str = "") -> None:
        self._experiment, self._folder = experiment, folder
        self._label = f"\n{label}" if label else ""
        # Next to the results: the file is as large as the slide has pixels, and /tmp may be memory.
        self._whole = folder / f"{PARTIAL_MARK}classes.npy"
        net = PredictedClasses(experiment.model, experiment.task.num_outputs)
        self._net = compile_model(net, experiment.config, skip_repeats=experiment.paints, output=str(self._whole))

    def draw(self, record: SlideRecord) -> Heatmap:
        """Predict and draw the mask of a slide.

        Returns:
            Its files: the mask, the picture, and a file of polygons for each class but the first that the slide has. The score is the
            share of the pixels that are not of the first class.

        Raises:
            SourceError: the slide cannot be read.
            RunFolderError: a file cannot be written.
            BudgetError: the slide does not fit.
        """
        experiment = self._experiment
        set_training(experiment.model, training=False, freeze_norms=experiment.freezes_norms)
        self._folder.mkdir(parents=True, exist_ok=True)
        folder = self._folder / record.name
        files = [folder / f"map-{_OUTPUT}.npy", folder / f"map-{_OUTPUT}.png"]
        try:
            with torch.no_grad(), autocast_context(experiment.config):
                classes: npt.NDArray[Any] = self._net.eval()(experiment.feed.source(record))[0, 0].numpy()
            with atomic_write_with_parents(files[0]) as temporary:
                np.save(temporary, classes)
        except SourceError as error:
            if str(self._whole) not in str(error):
                raise  # about the slide
            reason = os.strerror(error.errno or errno.EIO)
            raise RunFolderError(
                f"cannot write the mask of {record.name} to {self._folder.parent}: {reason}. Make room, or give another disk with --out."
            ) from error
        finally:
            self._whole.unlink(missing_ok=True)
        names = experiment.task.classes
        counts = count_values(classes)
        shares = [counts.get(number, 0) / classes.size for number in range(len(names))]
        note = ", ".join(f"{name} {share:.1%}" for name, share in zip(names, shares, strict=True))
        small, factor = make_thumbnail(experiment.feed.picture(record), _PICTURE_PX)
        reduced = _reduced(classes, small.shape[:2], factor)
        _draw(files[1], small, reduced, names, title=f"{record.name}: {note}{self._label}")
        frame = experiment.feed.frame(record)
        for number, class_name in enumerate(safe_names(names)):
            pixels = reduced == number
            if number and pixels.any():
                files.append(folder / f"map-{_OUTPUT}-{class_name}.geojson")
                with atomic_write_with_parents(files[-1]) as temporary:
                    write_geojson(temporary, _outline(pixels, factor, classes.shape, frame), name=names[number])
        return Heatmap(
            slide=record.name,
            output=_OUTPUT,
            score=1 - shares[0],
            files=tuple(files),
            stride_px=frame.scale,
            first_centre_px=frame.to_slide(0.5, 0.5),
            note=note,
        )


def _reduced(classes: npt.NDArray[Any], size: tuple[int, ...], factor: int) -> npt.NDArray[Any]:
    """The pixel in the middle of each block of ``factor`` px."""
    row, column = (
        np.minimum(np.arange(count) * factor + factor // 2, extent - 1) for count, extent in zip(size, classes.shape, strict=True)
    )
    reduced: npt.NDArray[Any] = classes[row[:, None], column]
    return reduced


def _outline(pixels: npt.NDArray[np.bool_], factor: int, extent: tuple[int, ...], frame: SlideFrame) -> Regions:
    """Outline of blocks of an image, in px of the slide's largest level; the last blocks end where the image does."""
    rows, columns = pixels.shape
    blocks = mask_outline(TissueMask(pixels=np.ascontiguousarray(pixels), width_px=columns, height_px=rows))
    last = np.array([extent[1], extent[0]], float)
    origin, scale = np.array(frame.origin_px), np.array(frame.scale)
    return Regions([[origin + scale * np.minimum(ring * factor, last) for ring in polygon] for polygon in blocks.polygons])


def _draw(path: Path, small: Pixels, classes: npt.NDArray[Any], names: Sequence[str], *, title: str) -> None:
    """Draw a slide, and next to it the classes over it; the first class is transparent."""
    colours = np.array([_COLOURS(number % _COLOURS.N)[:3] for number in range(len(names))])
    height, width = classes.shape
    over = np.zeros((height, width, 4))
    over[..., :3] = colours[classes]
    over[..., 3] = np.where(classes == 0, 0.0, 0.5)
    with rc_context(PLAIN_TEXT):
        figure = Figure(figsize=(12, 1.2 + 5.2 * min(1.6, height / width)), layout="constrained")
        plain, overlaid = figure.subplots(1, 2)
        for axis in (plain, overlaid):
            axis.imshow(small)
            axis.set(xticks=[], yticks=[])
        overlaid.imshow(over, interpolation="nearest")
        patches = [Patch(color=colours[number], label=name) for number, name in enumerate(names) if number]
        figure.legend(handles=patches, loc="outside lower right", ncols=min(len(patches), 6))
        figure.suptitle(title)
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=100, format="png")
    with atomic_write_with_parents(path) as temporary, PillowImage.open(drawn) as picture:
        picture.convert("RGB").save(temporary, optimize=True)
