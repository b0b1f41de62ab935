"""One training step on an image that is read strip by strip from a file: memory of the process, time, and overlap of reading with
computation.

The image is a uint8 ``.npy`` file of random pixels, mapped and never loaded; as float32 alone it would be larger than the limit. The
same step on the file's first rows shows that memory does not follow the image's height.
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
from harness.cases import PlanNumbers, describe_plan
from harness.gradcheck import CHECK_SIZE, TOLERANCE, Check, collect, worst_difference
from harness.images import write_image
from harness.memory import peak_rss_bytes, rss_bytes
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console
from torch import Tensor, nn

import sft
from sft.common.byte_units import format_bytes, parse_bytes
from sft.sources import ArraySource

#: Channels of the convolutions of each stage; a stage ends in a pool that halves height and width.
STAGES = ((8,), (16,), (32, 32), (64, 64), (64, 64))
NUM_CLASSES = 2
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
CHECK_STRIP_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step: the first `height` rows of the file."""

    path: Path
    height: int
    """Rows, pixels."""
    budget_bytes: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassNumbers:
    """One pass: its time, and that of reading."""

    seconds: float
    read_seconds: float
    """Seconds in the reader's thread, during the pass."""
    waited_seconds: float
    """Seconds in which the pass waited for strips."""
    hidden_fraction: float
    num_rows_read: int
    read_bytes: int
    """Delivered, as float32."""

    @property
    def cell(self) -> str:
        """For a table."""
        return f"{self.read_seconds:.1f} s, waited {self.waited_seconds:.1f} s ({100 * self.hidden_fraction:.0f} % hidden)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """One step in a fresh process."""

    height: int
    width: int
    file_bytes: int
    """Of the rows used, as uint8."""
    tensor_bytes: int
    """Of the same rows as a float32 tensor, which is never allocated."""
    plan: PlanNumbers
    prepare_seconds: float
    """Capture and planning."""
    start_bytes: int
    """Process memory before the step."""
    process_bytes: int
    """High-water mark of the process: Python, libraries, planning, and the step."""
    loss: float
    forward: PassNumbers
    backward: PassNumbers

    def cells(self) -> list[str]:
        """The row of the table."""
        cells = [f"{self.height:,} x {self.width:,}", mib(self.tensor_bytes), mib(self.process_bytes), mib(self.plan.projected_peak_bytes)]
        cells += [self.plan.strips, f"{self.plan.flops / self.plan.plain_flops:.2f}", f"{self.forward.seconds:.0f}"]
        return [*cells, f"{self.backward.seconds:.0f}", self.forward.cell, self.backward.cell]


HEADERS = (
    "rows x columns",
    "as a float32 tensor, MiB",
    "process, MiB",
    "projected, MiB",
    "plan",
    "FLOPs / plain",
    "forward, s",
    "backward, s",
    "reading, forward",
    "reading, backward",
)


def build_model() -> nn.Sequential:
    """A VGG-like network: five stages, a global mean, a linear layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for widths in STAGES:
        for width in widths:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES))


def take_step(net: Any, source: ArraySource) -> Tensor:
    """Forward, then backward from a cross-entropy; returns the output."""
    output: Tensor = net(source)
    torch.autograd.backward(nn.functional.cross_entropy(output, torch.tensor([1])))
    return output.detach()


def check(threads: int) -> Check:
    """The same step in float64 at a small size, against plain PyTorch on the same pixels."""
    torch.set_num_threads(threads)
    height, width = CHECK_SIZE
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (MEAN, STD))
    x = (torch.from_numpy(pixels).permute(2, 0, 1)[None].double() / 255 - mean) / std
    model = build_model().double()
    output = model(x)
    torch.autograd.backward(nn.functional.cross_entropy(output, torch.tensor([1])))
    reference = collect(model, output.detach())
    source = ArraySource(pixels, mean=MEAN, std=STD, dtype=torch.float64)
    try:
        smallest_bytes = sft.plan(model, source, budget=1).total_bytes
    except sft.BudgetError as error:
        smallest_bytes = error.needed_bytes
    ways: Sequence[dict[str, Any]] = (
        {"options": sft.Options(tile=(CHECK_STRIP_ROWS, None), state_every=2)},
        {"budget": smallest_bytes},
    )
    worst, described = (0.0, "output"), []
    for way in ways:
        model.zero_grad(set_to_none=True)
        net: Any = sft.compile(model, source, **way)
        worst = max(worst, worst_difference(reference, collect(model, take_step(net, source))))
        described.append(describe_plan(net.plan).strips)
    return Check(height=height, width=width, worst_error=worst[0], worst_tensor=worst[1], ways=tuple(described))


def measure(case: Case) -> StepNumbers:
    """Take one step; call it in a fresh process."""
    torch.set_num_threads(case.threads)
    model = build_model()
    mapped = np.load(case.path, mmap_mode="r")[: case.height]
    source = ArraySource(mapped, mean=MEAN, std=STD)
    started = time.perf_counter()
    net: Any = sft.compile(model, source, budget=case.budget_bytes)
    prepare_seconds = time.perf_counter() - started
    start_bytes = rss_bytes()
    started = time.perf_counter()
    loss = nn.functional.cross_entropy(net(source), torch.tensor([1]))
    turned = time.perf_counter()
    torch.autograd.backward(loss)
    ended = time.perf_counter()
    seconds = {"forward": turned - started, "backward": ended - turned}
    reading: sft.Reading = net.last_reading
    passes = {
        name: PassNumbers(
            seconds=seconds[name],
            read_seconds=read.read_seconds,
            waited_seconds=read.waited_seconds,
            hidden_fraction=read.hidden_fraction,
            num_rows_read=read.num_rows_read,
            read_bytes=read.read_bytes,
        )
        for name, read in (("forward", reading.forward), ("backward", reading.backward))
    }
    return StepNumbers(
        height=mapped.shape[0],
        width=mapped.shape[1],
        file_bytes=mapped.nbytes,
        tensor_bytes=4 * mapped.size,
        plan=describe_plan(net.plan),
        prepare_seconds=prepare_seconds,
        start_bytes=start_bytes,
        process_bytes=peak_rss_bytes(),
        loss=loss.item(),
        forward=passes["forward"],
        backward=passes["backward"],
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A training step on an image that is read from a file strip by strip.")
    parser.add_argument("--heights", nargs="+", type=positive_int, default=[4096, 16384], help="rows, pixels")
    parser.add_argument("--width", type=positive_int, default=16384, help="columns, pixels")
    parser.add_argument("--budget", default="1GiB", help="of the plan")
    parser.add_argument("--limit", default="2GiB", help="memory limit of the process")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 when the gradients are wrong, a step has no result, or a process exceeds the limit."""
    args = parse_arguments()
    console = Console()
    stem = result_stem(args.out, "inputs")
    limit_bytes = parse_bytes(args.limit)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.npy"
        try:
            checked: Check = call_in_process(check, args.threads)
            if not checked.passed:
                console.print(f"gradients are wrong: {checked.worst_tensor} is off by {checked.worst_error:.1e}, allowed {TOLERANCE:.0e}")
                return 1
            write_image(path, max(args.heights), args.width)
            for height in args.heights:
                case = Case(path=path, height=height, budget_bytes=parse_bytes(args.budget), threads=args.threads)
                results.append(call_in_process(measure, case))
                console.print(" | ".join(results[-1].cells()), markup=False)
        except WorkerError as error:
            console.print(f"{error.kind}: {error}", markup=False)
            return 1
    title = f"One training step, uint8 file, budget {args.budget}, float32, batch 1"
    table = Table(title=title, headers=HEADERS, rows=[result.cells() for result in results])
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "check": asdict(checked),
        "results": [asdict(result) for result in results],
    }
    widths = ", ".join("-".join(map(str, stage)) for stage in STAGES)
    notes = (
        f"A VGG-like network (3 x 3 convolutions of {widths} channels, a pool after each stage, a global mean, a linear layer), one "
        "forward and one backward pass, timed once. Process: high-water mark (VmHWM) of a fresh process with everything in it: Python, "
        "torch, capture and planning, the step, and the pages of the mapped file that it holds at a time. Reading happens in a thread; "
        "waited is what the pass noticed of it."
    )
    written = write_results(stem, raw, [table], notes, None)
    console.print(table.terminal())
    console.print(written)
    over = [result for result in results if result.process_bytes > limit_bytes]
    for result in over:
        console.print(f"{result.height} rows: {format_bytes(result.process_bytes)} used, limit {args.limit}", markup=False)
    return int(bool(over))


if __name__ == "__main__":
    raise SystemExit(main())
