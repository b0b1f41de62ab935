"""A satellite scene: GeoTIFF of four uint16 bands in, cloud-optimized GeoTIFF of classes and GeoJSON in map coordinates out."""

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
from sft.prediction import CogWriter, PolygonWriter


# [recipe]
def reflectance(scene: Path) -> sft.sources.Normalized:
    """The bands of a scene as the network takes them: surface reflectance of Sentinel-2, 0 to 1."""
    return sft.sources.Normalized(sft.sources.open_image(scene), value_range=(0, 10_000), clip=True)


def map_land_cover(
    model: nn.Module, scene: Path, folder: Path, names: list[str], budget: str = "512MiB"
) -> sft.prediction.PredictionResult:
    """Write the classes of a scene in its coordinate system."""
    bands = reflectance(scene)
    net = sft.compile(model, (1, bands.shape[1], None, None), budget=budget)
    return sft.predict(net, bands, [CogWriter(folder / "cover.tif"), PolygonWriter(folder / "cover.geojson", min_area_px=9)], names=names)
    # [end]


def write_scene(path: Path, height: int, width: int) -> None:
    """Draw a scene of four bands with 10 m per pixel."""
    import rasterio

    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (20 + 9 * band)) * np.cos(y / (25 + 7 * band)) for band in range(4)]
    bands = (4000 + 3000 * np.stack(waves)).astype(np.uint16)
    profile = {"driver": "GTiff", "height": height, "width": width, "count": 4, "dtype": "uint16", "tiled": True, "blockxsize": 256}
    place = rasterio.Affine(10, 0, 399960, 0, -10, 5800020)
    with rasterio.open(path, "w", **profile, blockysize=256, crs="EPSG:32632", transform=place) as file:
        file.write(bands)


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> Comparison:
    """Map a drawn scene with an untrained network, with plain PyTorch and with sft."""
    parser = prediction_parser(__doc__, "satellite", height=1200, width=1000, budget="24MiB")
    options = parser.parse_args(argv)
    write_scene(options.out / "scene.tif", options.height, options.width)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 8, 5, padding=2, bias=False), nn.Tanh(), nn.Conv2d(8, 3, 1, bias=False)
    ).eval()

    def plain() -> Tensor:
        classes: Tensor = model(whole_source(reflectance(options.out / "scene.tif"))).argmax(1)[0].byte()
        return classes

    classes, plain_bytes = measured(plain)
    names = ["water", "forest", "field"]
    result, sft_bytes = measured(lambda: map_land_cover(model, options.out / "scene.tif", options.out, names, options.budget))
    return Comparison(
        plain_bytes=plain_bytes,
        sft_bytes=sft_bytes,
        budget=options.budget,
        difference=int((stored_values(result.paths[0])[0] != classes.numpy()).sum()),
        measure="pixels with another class",
    )


if __name__ == "__main__":
    sys.exit(run(main))
