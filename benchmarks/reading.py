"""Reading of compressed slides in full-width strips: speed against OpenSlide, and memory.

The script writes the slide: 20,000 x 20,000 px, JPEG tiles of 256 px, a pyramid, a mosaic of a real slide. One process has all readers. In
each round they read the same rows in turns; the next round has other rows. Rates are decoded bytes (RGB, uint8) per second of processor
time of all cores and per second of elapsed time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.images import TILE_PX, write_slide
from harness.memory import peak_rss_bytes, rss_bytes
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console

from sft.sources import AtLevel, Cached, Image, Raster, Resampled, Slide, TiffImage, open_image

#: Rows of one measurement: whole tiles.
PIECE_ROWS = 8 * TILE_PX


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One reading of some rows."""

    decoded_bytes: int
    cpu_seconds: float
    """Of all threads."""
    wall_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCase:
    """Arguments of the process that measures speed."""

    path: Path
    num_rounds: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """A walk over a whole slide in strips."""

    path: Path
    rows: int
    threads: int
    reader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNumbers:
    """Memory of a process that walked over a slide."""

    reader: str
    height: int
    start_bytes: int
    """Process memory before the slide is opened."""
    peak_bytes: int
    """High-water mark above it."""


def _read_rows(image: Image, top: int, rows: int) -> int:
    """Read rows in full-width strips of a tile's height; returns the bytes."""
    num_bytes = 0
    for start in range(top, top + rows, TILE_PX):
        num_bytes += image.read(0, start, image.width_px, min(TILE_PX, top + rows - start)).nbytes
    return num_bytes


def _timed(read: Callable[[], int]) -> Speed:
    cpu, wall = time.process_time(), time.perf_counter()
    num_bytes = read()
    return Speed(decoded_bytes=num_bytes, cpu_seconds=time.process_time() - cpu, wall_seconds=time.perf_counter() - wall)


def measure_speed(case: SpeedCase) -> dict[str, list[Speed]]:
    """All readers in turns; call it in a fresh process.

    Raises:
        ValueError: two readers do not see the same pixels.
    """
    single, many, theirs = TiffImage(case.path, num_threads=1), TiffImage(case.path, num_threads=case.threads), Slide(case.path)
    half = Resampled(AtLevel(TiffImage(case.path, num_threads=1), 0), Fraction(2), Fraction(2))
    decoded = Cached(TiffImage(case.path, num_threads=1), host_budget_bytes=PIECE_ROWS * single.width_px * 3)
    places = [round * PIECE_ROWS % (single.height_px - PIECE_ROWS) // TILE_PX * TILE_PX for round in range(case.num_rounds + 1)]
    _check_same(single, theirs)
    readers: dict[str, Callable[[int], int]] = {
        "tiles, 1 thread": lambda top: _read_rows(single, top, PIECE_ROWS),
        f"tiles, {case.threads} threads": lambda top: _read_rows(many, top, PIECE_ROWS),
        "OpenSlide": lambda top: _read_rows(theirs, top, PIECE_ROWS),
        # Compressed bytes, as for the other readers.
        "tiles, 1 thread, reduced by 2": lambda top: 4 * _read_rows(half, top // 2, PIECE_ROWS // 2),
        "kept decoded": lambda top: _read_rows(decoded, 0, PIECE_ROWS),
    }
    speeds: dict[str, list[Speed]] = {name: [] for name in readers}
    for number, top in enumerate(places):
        order = list(readers.items())
        for name, read in order if number % 2 else order[::-1]:
            speed = _timed(partial(read, top))
            if number:  # the first round fills caches
                speeds[name].append(speed)
    return speeds


def _check_same(ours: Raster, theirs: Raster) -> None:
    if ours.level_dimensions != theirs.level_dimensions:
        raise ValueError(f"levels differ: {ours.level_dimensions} and {theirs.level_dimensions}")
    for level, (width, height) in enumerate(ours.level_dimensions):
        rows = min(3 * TILE_PX + 7, height)
        for top in (0, height - rows):
            if not np.array_equal(ours.read(0, top, width, rows, level), theirs.read(0, top, width, rows, level)):
                raise ValueError(f"pixels differ at level {level}, row {top}")


def measure_memory(case: MemoryCase) -> MemoryNumbers:
    """Walk over a slide; call it in a fresh process."""
    start_bytes = rss_bytes()
    image = open_image(case.path, reader="openslide" if case.reader == "OpenSlide" else "tiff", num_threads=case.threads)
    for top in range(0, image.height_px, case.rows):
        image.read(0, top, image.width_px, min(case.rows, image.height_px - top))
    return MemoryNumbers(reader=case.reader, height=image.height_px, start_bytes=start_bytes, peak_bytes=peak_rss_bytes() - start_bytes)


def speed_row(name: str, rounds: list[Speed], base: list[Speed]) -> list[str]:
    """The row of the table: medians, and the range of the first."""
    per_cpu = [speed.decoded_bytes / speed.cpu_seconds / 1e6 for speed in rounds]
    per_wall = [speed.decoded_bytes / speed.wall_seconds / 1e6 for speed in rounds]
    ratios = [
        (speed.decoded_bytes / speed.cpu_seconds) / (other.decoded_bytes / other.cpu_seconds)
        for speed, other in zip(rounds, base, strict=True)
    ]
    cells = [f"{statistics.median(per_cpu):,.0f} ({min(per_cpu):,.0f} - {max(per_cpu):,.0f})", f"{statistics.median(per_wall):,.0f}"]
    return [name, *cells, f"{statistics.median(ratios):.2f}"]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Throughput and memory of reading a compressed slide in full-width strips.")
    parser.add_argument("--size", type=positive_int, default=20_000, help="columns and rows of the slide, pixels")
    parser.add_argument("--low", type=positive_int, default=5_000, help="rows of the lower slide, for memory")
    parser.add_argument("--rounds", type=positive_int, default=7, help="rounds counted, after one that is not")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 when two readers differ or a process has no result."""
    args = parse_arguments()
    console = Console()
    if args.size < 2 * PIECE_ROWS or args.low < 2 * TILE_PX:
        console.print(f"the slide must have at least {2 * PIECE_ROWS} rows, the lower one {2 * TILE_PX}")
        return 1
    stem = result_stem(args.out, "reading")
    with tempfile.TemporaryDirectory() as folder:
        paths = {height: Path(folder) / f"{height}.tif" for height in (args.low, args.size)}
        started = time.perf_counter()
        for height, path in paths.items():
            write_slide(path, height, args.size)
        console.print(f"written in {time.perf_counter() - started:.0f} s")
        file_bytes = {height: os.path.getsize(path) for height, path in paths.items()}
        try:
            case = SpeedCase(path=paths[args.size], num_rounds=args.rounds, threads=args.threads)
            speeds: dict[str, list[Speed]] = call_in_process(measure_speed, case)
            memory: list[MemoryNumbers] = [
                call_in_process(measure_memory, MemoryCase(path=path, rows=TILE_PX, threads=args.threads, reader=reader))
                for reader in ("tiles", "OpenSlide")
                for path in paths.values()
            ]
        except WorkerError as error:
            console.print(f"{error.kind}: {error}", markup=False)
            return 1
    tables = [
        Table(
            title=f"Full-width strips of {TILE_PX} rows, {args.size:,} x {args.size:,} px",
            headers=("reader", "decoded MB per CPU second (range)", "decoded MB/s", "per CPU second, over OpenSlide's"),
            rows=[speed_row(name, rounds, speeds["OpenSlide"]) for name, rounds in speeds.items()],
        ),
        Table(
            title="Memory of a walk over the whole slide, above the process before the walk, MiB",
            headers=("reader", "rows", "compressed", "decoded", "peak"),
            rows=[
                [
                    numbers.reader,
                    f"{numbers.height:,}",
                    mib(file_bytes[numbers.height]),
                    mib(3 * numbers.height * args.size),
                    mib(numbers.peak_bytes),
                ]
                for numbers in memory
            ],
        ),
    ]
    raw: dict[str, Any] = {
        "environment": environment(args.threads)
        | {name: importlib.metadata.version(name) for name in ("openslide-bin", "tifffile", "simplejpeg", "numpy")},
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "file_bytes": file_bytes,
        "speeds": {name: [asdict(speed) for speed in rounds] for name, rounds in speeds.items()},
        "memory": [asdict(numbers) for numbers in memory],
    }
    notes = (
        f"A tiled BigTIFF with a pyramid (JPEG, quality 85, tiles of {TILE_PX} px, content from a real slide), in the page cache. One "
        f"process has all readers, which take turns at the same {PIECE_ROWS} rows in each of {args.rounds} rounds; medians. Before, both "
        "readers are compared pixel by pixel on some rows of every level. CPU seconds are those of all threads, so MB per CPU second is "
        'the throughput of a core. "Reduced by 2" counts the bytes that go in; "kept decoded" reads rows '
        "that `sft.sources.Cached` has. Memory: high-water mark of a fresh process."
    )
    written = write_results(stem, raw, tables, notes, None)
    for table in tables:
        console.print(table.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
