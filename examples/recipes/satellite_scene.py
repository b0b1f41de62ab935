"""A satellite scene: GeoTIFF of four uint16 bands in, cloud-optimized GeoTIFF of classes and GeoJSON in map coordinates out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import sft
from sft.prediction import CogWriter, PolygonWriter


# [recipe]
def map_land_cover(model: nn.Module, scene: Path, folder: Path, names: list[str]) -> sft.prediction.PredictionResult:
    """Write the classes of a scene in its coordinate system."""
    image = sft.sources.open_image(scene)
    bands = sft.sources.Normalized(image, value_range=(0, 10_000), clip=True)  # surface reflectance of Sentinel-2
    net = sft.compile(model, (1, bands.shape[1], None, None), budget="512MiB")
    return sft.predict(net, bands, [CogWriter(folder / "cover.tif"), PolygonWriter(folder / "cover.geojson", min_area_px=9)], names=names)
    # [end]


def main(folder: Path) -> sft.prediction.PredictionResult:
    """Map a drawn scene of 10 m per pixel with an untrained network."""
    import rasterio

    y, x = np.mgrid[:600, :500]
    waves = [np.sin(x / (20 + 9 * band)) * np.cos(y / (25 + 7 * band)) for band in range(4)]
    bands = (4000 + 3000 * np.stack(waves)).astype(np.uint16)
    profile = {"driver": "GTiff", "height": 600, "width": 500, "count": 4, "dtype": "uint16", "tiled": True, "blockxsize": 256}
    place = rasterio.Affine(10, 0, 399960, 0, -10, 5800020)
    with rasterio.open(folder / "scene.tif", "w", **profile, blockysize=256, crs="EPSG:32632", transform=place) as file:
        file.write(bands)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 8, 5, padding=2, bias=False), nn.Tanh(), nn.Conv2d(8, 3, 1, bias=False)
    )
    return map_land_cover(model, folder / "scene.tif", folder, ["water", "forest", "field"])


if __name__ == "__main__":
    main(Path())
