"""Sums of the channels of images channels last on a GPU: time and memory of ATen's reduction, of wide rows of several widths, and of ours.

A wide row has the channels of several pixels. ATen reduces wide rows to one, then the pixels of that one. Many rows are reduced in two
phases with a staging buffer between blocks of threads, few rows without. Times are those of calls in a CUDA graph.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from harness.gpu import device_environment
from harness.report import Table

from sft.common.byte_units import format_bytes
from sft.lower.custom_ops.statistics import channel_sums

__all__ = ["SHAPES", "VARIANTS", "main", "wide_row_sums"]

#: Strips and images of half precision.
SHAPES = (
    (1, 512, 16, 128),
    (1, 256, 32, 256),
    (1, 128, 48, 512),
    (1, 128, 64, 512),
    (1, 64, 128, 1024),
    (1, 32, 256, 2048),
    (1, 512, 256, 256),
    (1, 128, 1024, 1024),
    (1, 64, 2048, 2048),
)
_NUM_CALLS, _NUM_REPLAYS = 10, 4


def _plain_sums(x: Tensor) -> Tensor:
    return x.sum([0, 2, 3], dtype=torch.float32)


def wide_row_sums(x: Tensor, pixels: int) -> Tensor:
    """Sums by wide rows of so many pixels."""
    matrix = x.movedim(1, -1).reshape(-1, x.shape[1])
    num_whole = len(matrix) // pixels * pixels
    total = matrix[:num_whole].view(-1, pixels * x.shape[1]).sum(0, dtype=torch.float32).view(pixels, -1).sum(0)
    return total if num_whole == len(matrix) else total + matrix[num_whole:].sum(0, dtype=torch.float32)


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "ATen": _plain_sums,
    "2^15 elements": lambda x: wide_row_sums(x, max(1, 2**15 // x.shape[1])),
    **{f"{pixels} pixels": functools.partial(wide_row_sums, pixels=pixels) for pixels in (8, 32, 128)},
    "ours": lambda x: channel_sums(x, torch.float32),
}


def _measure(function: Callable[[Tensor], Tensor], x: Tensor) -> str:
    """Microseconds of a call in a CUDA graph, and bytes that it takes."""
    function(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function(x)
    torch.cuda.synchronize()
    num_bytes = torch.cuda.max_memory_allocated() - before
    graph, begin, end = torch.cuda.CUDAGraph(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.graph(graph):
        for _ in range(_NUM_CALLS):
            result = function(x)
    graph.replay()
    begin.record()
    for _ in range(_NUM_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    del result
    return f"{1e3 * begin.elapsed_time(end) / (_NUM_CALLS * _NUM_REPLAYS):.1f} µs, {format_bytes(num_bytes)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 2 without a GPU."""
    argparse.ArgumentParser(description="Time sums of channels on a GPU.").parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device here, and nothing else can be measured; run it on a machine with a GPU", file=sys.stderr)
        return 2
    rows = []
    for shape in SHAPES:
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        rows.append(["x".join(map(str, shape)), *(_measure(function, x) for function in VARIANTS.values())])
    print(Table(title="Sums of channels", headers=("image", *VARIANTS), rows=rows).markdown())
    print("\n".join(f"- {key}: {value}" for key, value in device_environment(torch.device("cuda", 0)).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
