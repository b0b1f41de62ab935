"""Pictures of the documentation that are drawn from computed values.

``python docs/drawings.py`` writes ``docs/images/strips-*.svg``, the rows of a strip schedule as the planner builds it, and
``docs/images/mask.png``, a segmentation that is trained inside a byte budget on a drawn slide.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

import sft
from sft.analysis.tiling.strips import StripSchedule
from sft.common.atomic_files import atomic_write
from sft.planner import region_builder
from sft.sources import open_image
from sft.tissue import find_tissue, write_synthetic_slide

_IMAGES = Path(__file__).resolve().parent / "images"
_INK = {"light": "#24292f", "dark": "#e6edf3"}
_STRIPS = ("#1f6feb", "#d0495c", "#bf8700", "#2da44e")
_ROWS = 24
_LABELS = ("image", "conv 3 x 3", "ReLU", "conv 3 x 3", "max pool")


def schedule() -> StripSchedule:
    """The strips of 8 rows of two convolutions and a pool on 24 rows."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2))
    built: list[StripSchedule] = []
    build = region_builder.build_schedule

    def record(*arguments: object, **options: object) -> StripSchedule:
        built.append(build(*arguments, **options))  # type: ignore[arg-type]
        return built[-1]

    region_builder.build_schedule = record
    try:
        sft.plan(model, (1, 3, _ROWS, 16), budget="1MiB", options=sft.Options(tile=(8, None)))
    finally:
        region_builder.build_schedule = build
    return built[-1]


def strips_figure(strips: StripSchedule, theme: str) -> Figure:
    """Rows of each value by the strip that computes them; carried rows are hatched in the colour of the strip that reads them."""
    ink = _INK[theme]
    with rc_context({"text.color": ink, "xtick.color": ink, "ytick.color": ink, "axes.edgecolor": ink, "axes.labelcolor": ink}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        for index in range(strips.num_steps):
            color = _STRIPS[index % len(_STRIPS)]
            for column, node in enumerate(strips.step(index).nodes):
                scale = _ROWS / strips.extents[node.name]
                new, carried = node.new, node.carried
                if len(new):
                    axes.add_patch(
                        Rectangle((column, new.start * scale), 0.5, len(new) * scale, facecolor=color, alpha=0.75, edgecolor=ink)
                    )
                if len(carried):
                    place = (column + 0.5, carried.start * scale)
                    axes.add_patch(Rectangle(place, 0.22, len(carried) * scale, facecolor="none", edgecolor=color, hatch="////"))
        for index in range(strips.num_steps):
            axes.plot([], [], "s", color=_STRIPS[index], alpha=0.75, label=f"strip {index + 1}")
        axes.set(xlim=(-0.2, len(_LABELS)), ylim=(_ROWS, 0), ylabel=f"rows of the image (0 to {_ROWS})")
        axes.set_xticks([column + 0.25 for column in range(len(_LABELS))], _LABELS)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.legend(loc="outside lower center", ncols=strips.num_steps, frameon=False, labelcolor=ink)
    return figure


def mask_figure() -> Figure:
    """A drawn slide, its tissue, and the predicted mask of a network that was trained on the whole image inside 48 MiB."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slide.svs"
        write_synthetic_slide(path)
        with open_image(path) as slide:
            pixels = slide.read(0, 0, slide.width_px, slide.height_px)
            mask = find_tissue(slide)
        step = 4
        image = np.ascontiguousarray(pixels[::step, ::step])
        height, width = image.shape[:2]
        cells = np.asarray(mask.at(width, height).region(0, 0, width, height))
        labels = torch.from_numpy(cells.astype(np.int64))[None]
    x = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    model = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    training = sft.compile(sft.nn.WithLoss(model, nn.CrossEntropyLoss()), (tuple(x.shape), labels), budget="48MiB")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        training(x, labels).backward()
        optimizer.step()
    with torch.no_grad():
        predicted = model(x)[0].argmax(0).numpy()
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    panels: Sequence[tuple[str, np.ndarray]] = (("slide", image), ("label map", labels[0].numpy()), ("predicted mask", predicted))
    for axes, (title, picture) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.imshow(picture, cmap="cividis", interpolation="nearest")
        axes.set_title(title)
        axes.set_axis_off()
    return figure


def main() -> None:
    """Write all pictures."""
    strips = schedule()
    for theme in _INK:
        with atomic_write(_IMAGES / f"strips-{theme}.svg") as temporary:
            strips_figure(strips, theme).savefig(temporary, format="svg", metadata={"Date": None})
    with atomic_write(_IMAGES / "mask.png") as temporary:
        mask_figure().savefig(temporary, format="png", dpi=110)


if __name__ == "__main__":
    main()
