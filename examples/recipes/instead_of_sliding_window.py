"""Segmentation of a large image in place of a sliding window: no windows, no seams, no blending."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.recipes.script import Comparison, measured, prediction_parser, run, stored_values
from sft.prediction import OmeTiffWriter, PolygonWriter


# [recipe]
def segment(model: nn.Module, image: Path, folder: Path, names: list[str], budget: str = "512MiB") -> list[Path]:
    """Write the classes of all pixels as a pyramid, and their outlines for QuPath."""
    # Before: scores = sliding_window_inference(image_tensor, roi_size=(512, 512), sw_batch_size=4, predictor=model, overlap=0.25)
    net = sft.compile(model, (1, 3, None, None), budget=budget)
    writers = [OmeTiffWriter(folder / "classes.ome.tif"), PolygonWriter(folder / "classes.geojson", min_area_px=20, simplify_px=1.0)]
    result = sft.predict(net, image, writers, names=names)
    return list(result.paths)
    # [end]


def make_model(image: Tensor) -> nn.Module:
    """A network with random weights and a receptive field of 17 px; its norms have the statistics of an image."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for num_in in (3, 8):
        layers += [nn.Conv2d(num_in, 8, 9, padding=4, bias=False), nn.BatchNorm2d(8, affine=False, momentum=None), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Conv2d(8, 3, 1, bias=False))
    model(image)
    return model.eval()


def window_differences(model: nn.Module, image: Tensor, classes: Tensor) -> int | None:
    """Pixels of a sliding window with other classes than the full image; None without MONAI."""
    try:
        from monai.inferers import sliding_window_inference
    except ModuleNotFoundError:
        return None
    scores = sliding_window_inference(image, (128, 128), 4, model, overlap=0.25)
    return int((scores.argmax(1)[0] != classes).sum())


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> Comparison:
    """Segment a drawn slide with plain PyTorch and with sft."""
    from sft.tissue import write_synthetic_slide

    parser = prediction_parser(__doc__, "sliding-window", height=1024, width=1024, budget="24MiB")
    options = parser.parse_args(argv)
    slide = options.out / "slide.tif"
    write_synthetic_slide(slide, width_px=options.width, height_px=options.height)

    def read() -> Tensor:
        return sft.sources.load_tensor(sft.sources.open_image(slide), mean=(0, 0, 0), std=(1, 1, 1))

    def plain() -> Tensor:
        classes: Tensor = model(read()).argmax(1)[0].byte()
        return classes

    model = make_model(read())

    classes, plain_bytes = measured(plain)
    paths, sft_bytes = measured(lambda: segment(model, slide, options.out, ["background", "tumour", "stroma"], options.budget))
    num_different = window_differences(model, read(), classes)
    if num_different is not None:
        print(f"sliding_window_inference: {num_different} of {classes.numel()} pixels have another class than in the full image")
    return Comparison(
        plain_bytes=plain_bytes,
        sft_bytes=sft_bytes,
        budget=options.budget,
        difference=int((stored_values(paths[0])[0] != classes.numpy()).sum()),
        measure="pixels with another class",
    )


if __name__ == "__main__":
    sys.exit(run(main))
