"""Reading of tiles from a mapped array, as a GPU's reader does: pixels, or normalised numbers, against NumPy's copy.

The file has uint8 tiles ``[N, 224, 224, 3]`` and is in the page cache. Chunks of tiles are read into one buffer, by the calling thread. In
half of the rounds another thread issues small operators of torch, as the host of a GPU does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from rich.console import Console
from torch import Tensor

from sft.common.interval import Interval
from sft.sources import ArraySource, select_samples

_TILE = (224, 224, 3)
_MEAN, _STD = (0.7, 0.5, 0.6), (0.2, 0.3, 0.25)
_NUMBER_DTYPES = {"numbers in float32": torch.float32, "numbers in bfloat16": torch.bfloat16}


@contextmanager
def _issuing_thread() -> Iterator[None]:
    """Context in which a thread issues small operators of torch."""
    ended = threading.Event()

    def issue() -> None:
        numbers = torch.zeros(8)
        while not ended.is_set():
            (numbers + 1).view(2, 4)

    thread = threading.Thread(target=issue)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _buffer(num_tiles: int, dtype: torch.dtype) -> Tensor:
    """A buffer of some tiles, channels last, of which every page exists."""
    return torch.zeros(num_tiles, *_TILE, dtype=dtype).permute(0, 3, 1, 2)


def _readers(path: Path, num_tiles: int, chunk_tiles: int) -> dict[str, Callable[[], None]]:
    """Functions that read all tiles, chunk by chunk."""
    chunks = [Interval(first, min(first + chunk_tiles, num_tiles)) for first in range(0, num_tiles, chunk_tiles)]
    sources = {dtype: ArraySource(path, layout="NHWC", mean=_MEAN, std=_STD, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    rows = Interval(0, _TILE[0])
    pixels, buffers = _buffer(chunk_tiles, torch.uint8), {dtype: _buffer(chunk_tiles, dtype) for dtype in sources}

    def copy() -> None:
        array, target = np.load(path, mmap_mode="r"), pixels.permute(0, 2, 3, 1).numpy()
        for chunk in chunks:
            np.copyto(target[: len(chunk)], array[chunk.start : chunk.stop])

    def read_pixels() -> None:
        for chunk in chunks:
            select_samples(sources[torch.float32], chunk).pixel_rows(rows, pixels[: len(chunk)])

    def read_numbers(dtype: torch.dtype) -> None:
        for chunk in chunks:
            select_samples(sources[dtype], chunk).rows(rows, buffers[dtype][: len(chunk)])

    readers: dict[str, Callable[[], None]] = {"NumPy's copy": copy, "pixels": read_pixels}
    for name, dtype in _NUMBER_DTYPES.items():
        readers[name] = lambda dtype=dtype: read_numbers(dtype)  # type: ignore[misc]  # a default that mypy cannot infer
    return readers


def measure(path: Path, num_tiles: int, chunk_tiles: int, num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Bytes of pixels per second of each reader, alone and next to the issuing thread; the readers take turns."""
    readers = _readers(path, num_tiles, chunk_tiles)
    speeds: dict[str, dict[str, list[float]]] = {name: {"alone": [], "issuing": []} for name in readers}
    num_bytes = num_tiles * int(np.prod(_TILE))
    for number in range(num_rounds + 1):
        for name, read in readers.items():
            for condition in ("alone", "issuing"):
                with torch.no_grad():
                    if condition == "alone":
                        seconds = _seconds(read)
                    else:
                        with _issuing_thread():
                            seconds = _seconds(read)
                if number:  # the first round fills caches
                    speeds[name][condition].append(num_bytes / seconds)
    return speeds


def _seconds(read: Callable[[], None]) -> float:
    started = time.perf_counter()
    read()
    return time.perf_counter() - started


def _cell(speeds: list[float]) -> str:
    low, middle, high = (value / 1e6 for value in (min(speeds), statistics.median(speeds), max(speeds)))
    return f"{middle:,.0f} ({low:,.0f} - {high:,.0f})"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Throughput of reading tiles from a mapped array.")
    parser.add_argument("--tiles", type=positive_int, default=1024, help="tiles in the file")
    parser.add_argument("--chunk", type=positive_int, default=64, help="tiles that are read at a time")
    parser.add_argument("--rounds", type=positive_int, default=7, help="rounds counted, after one that is not")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    stem = result_stem(args.out, "array-reading")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiles.npy"
        np.save(path, np.random.default_rng(0).integers(0, 256, (args.tiles, *_TILE), dtype=np.uint8))
        speeds = measure(path, args.tiles, args.chunk, args.rounds)
    table = Table(
        title=f"{args.tiles:,} tiles of 224 x 224 px, uint8, in chunks of {args.chunk}; {args.threads} threads of torch",
        headers=("reader", "MB of pixels per second, alone (range)", "next to a thread that issues operators (range)"),
        rows=[[name, _cell(each["alone"]), _cell(each["issuing"])] for name, each in speeds.items()],
    )
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "bytes_per_second": speeds,
    }
    notes = (
        f"Medians of {args.rounds} rounds in which the readers take turns; the file is in the page cache. The reader "
        "of a GPU reads pixels, that of a CPU reads numbers. The machine was shared."
    )
    written = write_results(stem, raw, [table], notes, None)
    console = Console()
    console.print(table.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
