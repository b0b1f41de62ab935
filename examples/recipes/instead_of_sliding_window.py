"""Segmentation of a large image in place of a sliding window: no windows, no seams, no blending."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import sft
from sft.prediction import OmeTiffWriter, PolygonWriter


# [recipe]
def segment(model: nn.Module, image: str, folder: Path, names: list[str]) -> list[Path]:
    """Write the classes of all pixels as a pyramid, and their outlines for QuPath."""
    # Before: scores = sliding_window_inference(image_tensor, roi_size=(512, 512), sw_batch_size=4, predictor=model, overlap=0.25)
    device = next(model.parameters()).device
    net = sft.compile(model, (1, 3, None, None), budget="auto" if device.type == "cuda" else "512MiB")
    writers = [OmeTiffWriter(folder / "classes.ome.tif"), PolygonWriter(folder / "classes.geojson", min_area_px=20, simplify_px=1.0)]
    result = sft.predict(net, image, writers, names=names)
    print(f"{result.raster.width_px} x {result.raster.height_px} px in {result.total_seconds:.1f} s")
    return list(result.paths)
    # [end]


def main(folder: Path) -> list[Path]:
    """Segment a drawn slide with an untrained network."""
    from sft.tissue import write_synthetic_slide

    write_synthetic_slide(folder / "slide.tif", width_px=640, height_px=480)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))
    return segment(model, str(folder / "slide.tif"), folder, ["background", "tumour", "stroma"])


if __name__ == "__main__":
    main(Path())
