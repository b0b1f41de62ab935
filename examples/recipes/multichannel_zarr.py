"""A multiplexed fluorescence image: OME-Zarr of uint16 channels in, OME-Zarr of probabilities out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import sft
from sft.prediction import OmeZarrWriter, PredictedRaster


# [recipe]
def phenotype(model: nn.Module, image: Path, target: Path, names: list[str]) -> sft.prediction.PredictionResult:
    """Write the probability of each cell type for every pixel."""
    channels = sft.sources.open_image(image)
    source = sft.sources.Normalized(channels, value_range=sft.sources.percentile_range(channels, 1, 99.8), clip=True)
    net = sft.compile(model, (1, source.shape[1], None, None), budget="512MiB")
    return sft.predict(net, source, OmeZarrWriter(target), kind="softmax", dtype="uint16", names=names)
    # [end]


def main(folder: Path) -> sft.prediction.PredictionResult:
    """Classify a drawn image of six channels with an untrained network."""
    y, x = np.mgrid[:300, :260]
    waves = [np.sin(x / (5 + 3 * channel)) * np.cos(y / (9 + channel)) for channel in range(6)]
    pixels = (3000 + 2500 * np.stack(waves)).astype(np.uint16)
    raster = PredictedRaster(height_px=300, width_px=260, num_channels=6, dtype=pixels.dtype, mpp=(0.5, 0.5))
    writer = OmeZarrWriter(folder / "image.zarr")  # a writer stores any rows
    writer.begin(raster)
    writer.write(pixels)
    writer.finish()
    writer.publish()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 4, 1))
    return phenotype(model, folder / "image.zarr", folder / "types.zarr", ["tumour", "T cell", "B cell", "stroma"])


if __name__ == "__main__":
    main(Path())
