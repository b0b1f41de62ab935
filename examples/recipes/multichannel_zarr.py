"""A multiplexed fluorescence image: OME-Zarr of uint16 channels in, OME-Zarr of probabilities out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.recipes.script import Comparison, measured, prediction_parser, run, stored_values, whole_source
from sft.prediction import OmeZarrWriter, PredictedRaster


# [recipe]
def normalized(image: Path) -> sft.sources.Normalized:
    """All channels of an image, each in a range of its own, from percentiles of its pixels."""
    channels = sft.sources.open_image(image)
    return sft.sources.Normalized(channels, value_range=sft.sources.percentile_range(channels, 1, 99.8), clip=True)


def phenotype(model: nn.Module, image: Path, target: Path, names: list[str], budget: str = "512MiB") -> sft.prediction.PredictionResult:
    """Write the probability of each cell type for every pixel."""
    source = normalized(image)
    net = sft.compile(model, (1, source.shape[1], None, None), budget=budget)
    return sft.predict(net, source, OmeZarrWriter(target), kind="softmax", dtype="uint16", names=names)
    # [end]


def write_image(path: Path, height: int, width: int) -> None:
    """Draw an image of six channels."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (5 + 3 * channel)) * np.cos(y / (9 + channel)) for channel in range(6)]
    pixels = (3000 + 2500 * np.stack(waves)).astype(np.uint16)
    raster = PredictedRaster(height_px=height, width_px=width, num_channels=6, dtype=pixels.dtype, mpp=(0.5, 0.5))
    writer = OmeZarrWriter(path)  # a writer stores any rows
    writer.begin(raster)
    writer.write(pixels)
    writer.finish()
    writer.publish()


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> Comparison:
    """Classify a drawn image with an untrained network, with plain PyTorch and with sft."""
    parser = prediction_parser(__doc__, "multichannel-zarr", height=1000, width=800, budget="24MiB")
    options = parser.parse_args(argv)
    write_image(options.out / "image.zarr", options.height, options.width)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 4, 1)).eval()

    def plain() -> Tensor:
        probabilities: Tensor = model(whole_source(normalized(options.out / "image.zarr"))).softmax(1)[0]
        return probabilities

    probabilities, plain_bytes = measured(plain)
    names = ["tumour", "T cell", "B cell", "stroma"]
    result, sft_bytes = measured(lambda: phenotype(model, options.out / "image.zarr", options.out / "types.zarr", names, options.budget))
    stored = stored_values(result.paths[0]) / result.raster.value_scale
    return Comparison(
        plain_bytes=plain_bytes,
        sft_bytes=sft_bytes,
        budget=options.budget,
        difference=float(np.abs(stored - probabilities.numpy()).max()),
        measure="largest difference of a probability (stored as uint16)",
    )


if __name__ == "__main__":
    sys.exit(run(main))
