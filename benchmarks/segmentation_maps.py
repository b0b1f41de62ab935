"""Segmentation of a large image into files: `sft.predict` next to a sliding window, with the memory and the time of every stage.

Each case runs in a process of its own and reports its peak of process memory, libraries included. The image is a mapped file of uint16
with four channels. The network has strides, so an output pixel depends on pixels outside of its window. The sliding window is the usual
one: windows of 512 px that overlap by a quarter, scores added up for the full image and divided by the number of windows, then `argmax`
and a TIFF: `monai.inferers.sliding_window_inference` if MONAI is installed, otherwise the same loop written out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.memory import peak_rss_bytes
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import call_in_process
from rich.console import Console
from torch import Tensor, nn

import sft
from sft.prediction import CogWriter, OmeTiffWriter, PolygonWriter
from sft.sources import ArraySource

CHANNELS, CLASSES, WINDOW_PX, OVERLAP = 4, 5, 512, 0.25
#: Rows that an output row of `network` sees above it: 3 of the first layer, 4 (1 + 3 * 2) of those with stride 4, and the upsampling.
HALO_PX = 36
_LOW, _HIGH, _MEAN, _STD = 10000, 55000, 0.5, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MapCase:
    """A prediction in a process of its own."""

    folder: Path
    """Folder of `image.npy` and of the maps."""
    budget: str
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StripMaps:
    """Measurements of `sft.predict`."""

    process_peak_bytes: int
    projected_peak_bytes: int
    total_seconds: float
    read_seconds: float
    read_wait_seconds: float
    write_seconds: dict[str, float]
    """By writer."""
    write_wait_seconds: float
    hidden_share: float
    """Share of the seconds of writing during which the network was computing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMap:
    """Measurements of the sliding window."""

    process_peak_bytes: int
    total_seconds: float
    read_seconds: float
    window_seconds: float
    """Windows alone: no reading, no `argmax`, no writing."""
    write_seconds: float
    is_monai: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pixels in which the two maps differ."""

    num_classes: int
    num_pixels: int
    num_differing: int
    num_differing_at_seams: int
    """Pixels with a receptive field across a border of a window inside of the image."""
    strips_file_bytes: int
    windows_file_bytes: int


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


def predict_strips(case: MapCase) -> StripMaps:
    """`sft.predict` into an OME-TIFF, a COG and polygons."""
    torch.set_num_threads(case.threads)
    source = ArraySource(case.folder / "image.npy", layout="HWC", value_range=(_LOW, _HIGH), mean=[_MEAN] * CHANNELS, std=[_STD] * CHANNELS)
    net = sft.compile(network(), (1, CHANNELS, None, None), budget=case.budget)
    writers = {
        "OME-TIFF": OmeTiffWriter(case.folder / "strips.ome.tif"),
        "COG": CogWriter(case.folder / "strips.tif"),
        "polygons": PolygonWriter(case.folder / "strips.geojson", min_area_px=16),
    }
    result = sft.predict(net, source, list(writers.values()))
    reading = result.reading.forward if result.reading else None
    return StripMaps(
        process_peak_bytes=peak_rss_bytes(),
        projected_peak_bytes=result.plan.projected_peak_bytes,
        total_seconds=result.total_seconds,
        read_seconds=reading.read_seconds if reading else 0.0,
        read_wait_seconds=reading.waited_seconds if reading else 0.0,
        write_seconds=dict(zip(writers, result.write_seconds, strict=True)),
        write_wait_seconds=result.wait_seconds,
        hidden_share=result.hidden_share,
    )


def predict_windows(case: MapCase) -> WindowMap:
    """A sliding window over the full image in memory, then a TIFF."""
    import tifffile

    torch.set_num_threads(case.threads)
    begin = time.perf_counter()
    pixels = np.load(case.folder / "image.npy", mmap_mode="r")
    image = torch.from_numpy(pixels.astype(np.float32)).sub_(_LOW).div_(_HIGH - _LOW).sub_(_MEAN).div_(_STD).permute(2, 0, 1)[None]
    read = time.perf_counter()
    model = network()
    with torch.no_grad():
        try:
            from monai.inferers import sliding_window_inference
        except ImportError:
            is_monai, scores = False, _slide(image, model)
        else:
            is_monai, scores = True, sliding_window_inference(image, (WINDOW_PX, WINDOW_PX), 1, model, overlap=OVERLAP)
    computed = time.perf_counter()
    classes = scores.argmax(1)[0].to(torch.uint8).numpy()
    tifffile.imwrite(case.folder / "windows.tif", classes, tile=(512, 512), compression="adobe_deflate")
    end = time.perf_counter()
    return WindowMap(
        process_peak_bytes=peak_rss_bytes(),
        total_seconds=end - begin,
        read_seconds=read - begin,
        window_seconds=computed - read,
        write_seconds=end - computed,
        is_monai=is_monai,
    )


def _slide(image: Tensor, model: nn.Module) -> Tensor:
    """The loop of `sliding_window_inference` with constant weights."""
    height, width = image.shape[2:]
    scores, counts = torch.zeros(1, CLASSES, height, width), torch.zeros(1, 1, height, width)
    for top in _window_starts(height):
        for left in _window_starts(width):
            rows, columns = slice(top, top + WINDOW_PX), slice(left, left + WINDOW_PX)
            scores[:, :, rows, columns] += model(image[:, :, rows, columns])
            counts[:, :, rows, columns] += 1
    return scores / counts


def _window_starts(extent: int) -> list[int]:
    return sorted({min(at, extent - WINDOW_PX) for at in range(0, extent, int(WINDOW_PX * (1 - OVERLAP)))})


def compare(folder: Path) -> Comparison:
    """Compare the maps of both methods, pixel by pixel."""
    import tifffile

    strips, windows = tifffile.imread(folder / "strips.ome.tif"), tifffile.imread(folder / "windows.tif")
    differs = strips != windows
    rows, columns = (_near_seams(extent) for extent in differs.shape)
    return Comparison(
        num_classes=len(np.unique(strips)),
        num_pixels=strips.size,
        num_differing=int(differs.sum()),
        num_differing_at_seams=int((differs & (rows[:, None] | columns)).sum()),
        strips_file_bytes=(folder / "strips.ome.tif").stat().st_size,
        windows_file_bytes=(folder / "windows.tif").stat().st_size,
    )


def _near_seams(extent: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each row or column, True if its receptive field crosses a border of a window inside of the image."""
    near = np.zeros(extent, np.bool_)
    for seam in {edge for start in _window_starts(extent) for edge in (start, start + WINDOW_PX) if 0 < edge < extent}:
        near[max(0, seam - HALO_PX) : seam + HALO_PX] = True
    return near


def tables(size_px: int, strips: StripMaps, windows: WindowMap | None, comparison: Comparison | None) -> list[Table]:
    """Tables of the result."""
    title = f"{size_px} x {size_px} px, {CHANNELS} channels of uint16"
    rows = [
        ["peak of the process, MiB", mib(strips.process_peak_bytes), "" if windows is None else mib(windows.process_peak_bytes)],
        ["total, s", f"{strips.total_seconds:.1f}", "" if windows is None else f"{windows.total_seconds:.1f}"],
        ["read, s", f"{strips.read_seconds:.1f}", "" if windows is None else f"{windows.read_seconds:.1f}"],
        ["wait for reading, s", f"{strips.read_wait_seconds:.1f}", ""],
        *([f"write {name}, s", f"{seconds:.1f}", ""] for name, seconds in strips.write_seconds.items()),
        ["`argmax` and write a TIFF, s", "", "" if windows is None else f"{windows.write_seconds:.1f}"],
        ["wait for writing, s", f"{strips.write_wait_seconds:.1f}", ""],
        ["share of writing hidden by computing", f"{strips.hidden_share:.2f}", ""],
    ]
    result = [Table(title=title, headers=("", "sft.predict", "sliding window"), rows=rows)]
    if comparison is not None:
        share = comparison.num_differing / comparison.num_pixels
        at_seams = comparison.num_differing_at_seams / max(1, comparison.num_differing)
        cells = [
            f"{comparison.num_pixels:,}",
            str(comparison.num_classes),
            f"{comparison.num_differing:,}",
            f"{share:.2%}",
            f"{at_seams:.1%}",
        ]
        headers = ("pixels", "classes", "pixels that differ", "share", f"of them within {HALO_PX} px of a seam")
        result.append(Table(title="Maps of both methods", headers=headers, rows=[cells]))
    return result


_NOTES = """\
Segmentation of one image from a mapped file, classes by `argmax`. `sft.predict` writes a pyramidal OME-TIFF, a COG and polygons; the
sliding window keeps image and scores in memory and writes one flat TIFF. Peak: high-water mark of a fresh process, libraries and mapped
pages included. Writing is hidden where the network computes at the same time."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=positive_int, default=2048, help="height and width, pixels (default 2048)")
    parser.add_argument("--no-windows", action="store_true", help="leave out the sliding window, which needs memory for all scores")
    parser.add_argument("--folder", type=Path, help="folder for the image and the maps (default: a temporary one)")
    parser.add_argument("--budget", default="256MiB", help="of sft.compile (default 256MiB)")
    add_common_arguments(parser)
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace, folder: Path) -> tuple[StripMaps, WindowMap | None, Comparison | None]:
    """Run all cases, one process each."""
    case = MapCase(folder=folder, budget=args.budget, threads=args.threads)
    write_image(folder / "image.npy", args.size)
    strips = call_in_process(predict_strips, case)
    if args.no_windows:
        return strips, None, None
    return strips, call_in_process(predict_windows, case), compare(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args, console = parse_arguments(arguments), Console()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        strips, windows, comparison = measure(args, folder)
    raw = {
        "environment": environment(args.threads),
        "size_px": args.size,
        "budget": args.budget,
        "strips": asdict(strips),
        "windows": None if windows is None else asdict(windows),
        "comparison": None if comparison is None else asdict(comparison),
    }
    shown = tables(args.size, strips, windows, comparison)
    written = write_results(result_stem(args.out, "segmentation-maps"), raw, shown, _NOTES, None)
    for table in shown:
        console.print(table.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
