"""Segmentation of a large image into files: `sft.predict` next to a sliding window, with the memory and the time of every part.

    python benchmarks/segmentation_maps.py --size 16384 --folder /tmp/maps

Each case runs in a process of its own, and reports its peak of process memory (the libraries included). The image has four channels of
uint16 in a file that is mapped. The network has strides, so a pixel depends on a neighbourhood that a window cuts off. The sliding window
is the usual one: windows of 512 px that overlap by a quarter, scores added up for the full image and divided by the number of windows, then
``argmax`` and a TIFF; ``monai.inferers.sliding_window_inference`` if MONAI is installed, otherwise the same loop written out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sft
from sft.prediction import CogWriter, OmeTiffWriter, PolygonWriter
from sft.sources import ArraySource

CHANNELS, CLASSES, WINDOW_PX, OVERLAP = 4, 5, 512, 0.25
#: Rows that an output row of `network` sees above it: 3 of the first layer, 4 (1 + 3 * 2) of those with stride 4, and the upsampling.
HALO_PX = 36


def network() -> nn.Module:
    """A small segmentation network with strides and upsampling."""
    torch.manual_seed(0)
    encoder = [nn.Conv2d(CHANNELS, 16, 7, stride=4, padding=3), nn.BatchNorm2d(16), nn.ReLU()]
    middle = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.BatchNorm2d(16), nn.ReLU())]
    decoder = [nn.Conv2d(16, CLASSES, 1), nn.Upsample(scale_factor=4, mode="bilinear")]
    model = nn.Sequential(*encoder, *middle, *decoder).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)  # else one class has all pixels
    return model


def write_image(path: Path, size_px: int) -> None:
    """Write smooth waves with noise, strip by strip."""
    image = np.lib.format.open_memmap(path, "w+", np.uint16, (size_px, size_px, CHANNELS))
    random, x = np.random.default_rng(0), np.arange(size_px)
    for top in range(0, size_px, 256):
        y = np.arange(top, min(top + 256, size_px))[:, None]
        for channel in range(CHANNELS):
            waves = np.sin(x / (90 + 20 * channel)) * np.cos(y / (80 + 30 * channel))
            image[top : top + len(y), :, channel] = 30000 + 20000 * waves + random.integers(0, 500, (len(y), size_px))
    image.flush()


def predict_strips(folder: Path, budget: str) -> dict[str, Any]:
    """`sft.predict` into an OME-TIFF, a COG and polygons."""
    source = ArraySource(folder / "image.npy", layout="HWC", value_range=(10000, 55000), mean=[0.5] * CHANNELS, std=[0.2] * CHANNELS)
    net = sft.compile(network(), (1, CHANNELS, None, None), budget=budget)
    writers = [
        OmeTiffWriter(folder / "strips.ome.tif"),
        CogWriter(folder / "strips.tif"),
        PolygonWriter(folder / "strips.geojson", min_area_px=16),
    ]
    result = sft.predict(net, source, writers)
    reading = result.reading.forward if result.reading else None
    return {
        "total_seconds": result.total_seconds,
        "read_seconds": reading.read_seconds if reading else 0.0,
        "read_wait_seconds": reading.waited_seconds if reading else 0.0,
        **{f"{type(writer).__name__}_seconds": seconds for writer, seconds in zip(writers, result.write_seconds, strict=True)},
        "write_wait_seconds": result.wait_seconds,
        "hidden_share_of_writing": result.hidden_share,
        "projected_peak_bytes": result.plan.projected_peak_bytes,
    }


def predict_windows(folder: Path) -> dict[str, Any]:
    """A sliding window over the full image in memory, then a TIFF."""
    import tifffile

    begin = time.perf_counter()
    pixels = np.load(folder / "image.npy", mmap_mode="r")
    image = ((torch.from_numpy(pixels.astype(np.float32)) - 10000) / 45000 - 0.5).div_(0.2).permute(2, 0, 1)[None]
    model = network()
    with torch.no_grad():
        try:
            from monai.inferers import sliding_window_inference

            scores = sliding_window_inference(image, (WINDOW_PX, WINDOW_PX), 1, model, overlap=OVERLAP)
        except ImportError:
            scores = _slide(image, model)
    classes = scores.argmax(1)[0].to(torch.uint8).numpy()
    tifffile.imwrite(folder / "windows.tif", classes, tile=(512, 512), compression="adobe_deflate")
    return {"total_seconds": time.perf_counter() - begin}


def _slide(image: Tensor, model: nn.Module) -> Tensor:
    """The loop of ``sliding_window_inference`` with constant weights."""
    height, width = image.shape[2:]
    step = int(WINDOW_PX * (1 - OVERLAP))
    tops, lefts = (sorted({min(at, extent - WINDOW_PX) for at in range(0, extent, step)}) for extent in (height, width))
    scores, counts = torch.zeros(1, CLASSES, height, width), torch.zeros(1, 1, height, width)
    for top in tops:
        for left in lefts:
            rows, columns = slice(top, top + WINDOW_PX), slice(left, left + WINDOW_PX)
            scores[:, :, rows, columns] += model(image[:, :, rows, columns])
            counts[:, :, rows, columns] += 1
    return scores / counts


def compare(folder: Path) -> dict[str, Any]:
    """Pixels in which the two maps differ."""
    import tifffile

    strips, windows = tifffile.imread(folder / "strips.ome.tif"), tifffile.imread(folder / "windows.tif")
    differs = strips != windows
    rows, columns = (_near_seams(extent) for extent in differs.shape)
    return {
        "classes": len(np.unique(strips)),
        "pixels": strips.size,
        "differing_pixels": int(differs.sum()),
        "differing_pixels_at_seams": int((differs & (rows[:, None] | columns)).sum()),
        "strips_file_bytes": (folder / "strips.ome.tif").stat().st_size,
        "windows_file_bytes": (folder / "windows.tif").stat().st_size,
    }


def _near_seams(extent: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each row or column, True if it is nearer to a border of a window inside of the image than the network sees."""
    step = int(WINDOW_PX * (1 - OVERLAP))
    starts = {min(at, extent - WINDOW_PX) for at in range(0, extent, step)}
    near = np.zeros(extent, np.bool_)
    for seam in {edge for start in starts for edge in (start, start + WINDOW_PX) if 0 < edge < extent}:
        near[max(0, seam - HALO_PX) : seam + HALO_PX] = True
    return near


def process_peak_bytes() -> int:
    """Peak of resident memory since the process began; ``ru_maxrss`` would include the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def run(case: str, folder: Path, budget: str) -> dict[str, Any]:
    """Run a case in a process of its own; its results and its peak of process memory."""
    command = [sys.executable, __file__, "--case", case, "--folder", str(folder), "--budget", budget]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run all cases, print and return their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="height and width in px")
    parser.add_argument(
        "--window-size", type=int, help="size for the sliding window, which needs memory for all scores; 0 for none; default: --size"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the image and the maps")
    parser.add_argument("--budget", default="256MiB", help="of sft.compile")
    parser.add_argument("--case", choices=("strips", "windows"), help="run one case in this process")
    given = parser.parse_args(arguments)
    if given.case:
        result = predict_strips(given.folder, given.budget) if given.case == "strips" else predict_windows(given.folder)
        print(json.dumps({**result, "process_peak_bytes": process_peak_bytes()}))
        return result
    given.folder.mkdir(parents=True, exist_ok=True)
    write_image(given.folder / "image.npy", given.size)
    results: dict[str, Any] = {"size_px": given.size, "strips": run("strips", given.folder, given.budget)}
    print(json.dumps(results, indent=1), flush=True)
    if given.window_size == 0:
        return results
    if (given.window_size or given.size) != given.size:
        write_image(given.folder / "image.npy", given.window_size)
        results["strips at the size of the windows"] = run("strips", given.folder, given.budget)
    results["windows"] = {"size_px": given.window_size or given.size, **run("windows", given.folder, given.budget), **compare(given.folder)}
    print(json.dumps(results, indent=1))
    return results


if __name__ == "__main__":
    main()
