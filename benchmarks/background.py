"""A training step on a masked slide, with strips of background left out (``sft.Options(skip_repeats=True)``) and with all of them run.

The region of a slide in ``examples/data``, made smaller, lies in the middle of an empty slide. A tissue mask is computed, and everything
else is painted in one colour, as ``python -m sft.wsi`` with ``data.tissue: mask`` does. The network is the stem and the first two stages of
ResNet-18 with frozen norm statistics, a mean and a linear layer. A strip is skipped if its receptive field is constant: a few hundredths of
the slide's height here, as for all of ResNet-18 on a slide of 20,000 px.

The saving is a number of FLOPs. Both variants are timed in turns, and only the ratio of their seconds counts. First a step in float64 on a
smaller slide of the same kind is compared with plain PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness.cases import load_models
from harness.gradcheck import TOLERANCE, collect, worst_difference
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console
from torch import Tensor, nn

import sft
from sft.common.interval import Interval
from sft.sources import ArrayImage, Normalized, open_image
from sft.tissue import Masked, find_tissue

SLIDE = Path(__file__).resolve().parents[1] / "examples" / "data" / "CMU-1-Small-Region.svs"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Between two orders of summation in float32.
TOLERANCE_SINGLE = 1e-4
#: Largest share of the slide's height that the region takes.
SHARE = 0.75
HEADERS = (
    "strips x panel",
    "strips",
    "left out, forward",
    "left out, backward",
    "FLOPs left out",
    "time / all strips",
    "projected, MiB",
    "measured, MiB",
    "error, float32",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One tiling of one slide."""

    height: int
    width: int
    rows: int
    columns: int | None
    """Columns to a panel; None is the full width."""
    rounds: int
    threads: int

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.rows} x {self.width if self.columns is None else self.columns}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipResult:
    """Seconds, bytes and error of a case."""

    tissue_share: float
    num_strips: int
    forward_skipped: int
    backward_skipped: int
    planned_flops: int
    skipped_flops: int
    projected_peak_bytes: int
    measured_peak_bytes: int
    plain_error: float
    """Of the step in float64 on a smaller slide, against plain PyTorch."""
    plain_skipped: int
    """Strips that were left out there."""
    error: float
    """Of the step in float32, against the same with all strips run."""
    seconds: list[tuple[float, float]]
    """Of each round: all strips, and without those that repeat others."""

    @property
    def ratio(self) -> float:
        """The median over rounds."""
        return median(ours / full for full, ours in self.seconds)

    @property
    def is_good(self) -> bool:
        """True if the step is exact, stays within the projected bytes, and takes fewer FLOPs than planned."""
        is_less = self.skipped_flops > 0 and self.plain_skipped > 0
        is_same = self.plain_error <= TOLERANCE and self.error <= TOLERANCE_SINGLE
        return is_same and is_less and self.measured_peak_bytes <= self.projected_peak_bytes


def model_of(dtype: torch.dtype) -> nn.Module:
    """The front of ResNet-18 with a pooled head, norm statistics frozen."""
    models = load_models()
    torch.manual_seed(0)
    whole: Any = models.freeze_norm(models.resnet18(2))
    front = nn.Sequential(whole.features[:8], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 2))
    return front.to(dtype)


def slide_of(height: int, width: int, dtype: torch.dtype) -> tuple[Normalized, float]:
    """The masked slide, and the share of it that is tissue."""
    region = open_image(SLIDE)
    step = max(math.ceil(region.height_px / (SHARE * height)), math.ceil(region.width_px / width))
    piece = region.read(0, 0, region.width_px, region.height_px)[::step, ::step]
    region.close()
    canvas = np.full((height, width, 3), region.background, np.uint8)
    top, left = (height - piece.shape[0]) // 2, (width - piece.shape[1]) // 2
    canvas[top : top + piece.shape[0], left : left + piece.shape[1]] = piece
    image = ArrayImage(canvas, layout="HWC", mpp=(0.5, 0.5))
    mask = find_tissue(image, downsample=8)
    return Normalized(Masked(image, mask), mean=MEAN, std=STD, dtype=dtype), mask.share


def step_of(net: nn.Module, x: Any) -> tuple[float, dict[str, Tensor]]:
    """Seconds and results of a step."""
    net.zero_grad(set_to_none=True)
    started = time.perf_counter()
    output = net(x)
    nn.functional.cross_entropy(output, torch.tensor([1])).backward()
    return time.perf_counter() - started, collect(net, output.detach())


def checked(case: Case) -> tuple[float, int]:
    """The error against plain PyTorch in float64, on a slide of a third of the size, and how many strips were left out."""
    source, _ = slide_of(case.height // 3, case.width // 3, torch.float64)
    pixels = torch.empty(source.shape, dtype=torch.float64)
    source.rows(Interval(0, source.shape[2]), pixels)
    plain = model_of(torch.float64)
    columns = None if case.columns is None else max(1, case.columns // 3)
    options = sft.Options(tile=(max(1, case.rows // 4), columns), skip_repeats=True)
    net: Any = sft.compile(copy.deepcopy(plain), source, options=options)
    error, _ = worst_difference(step_of(plain, pixels)[1], step_of(net, source)[1])
    return error, net.last_skipping.forward.num_skipped


def measured(case: Case) -> SkipResult:
    """Measurements of both variants, in turns; call it in a process of its own."""
    torch.set_num_threads(case.threads)
    plain_error, plain_skipped = checked(case)
    source, share = slide_of(case.height, case.width, torch.float32)
    model = model_of(torch.float32)
    nets: list[Any] = [
        sft.compile(copy.deepcopy(model), source, options=sft.Options(tile=(case.rows, case.columns), skip_repeats=skips))
        for skips in (False, True)
    ]
    seconds, results = [], []
    for number in range(case.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        took = {each: step_of(nets[each], source) for each in order}
        seconds.append((took[0][0], took[1][0]))
        results = [took[0][1], took[1][1]]
    skipping = nets[1].last_skipping
    nets[1].zero_grad(set_to_none=True)
    with sft.measure_peak("cpu") as peak:
        step_of(nets[1], source)
    return SkipResult(
        tissue_share=share,
        num_strips=skipping.forward.num_strips,
        forward_skipped=skipping.forward.num_skipped,
        backward_skipped=skipping.backward.num_skipped,
        planned_flops=nets[1].plan.flops,
        skipped_flops=skipping.skipped_flops,
        projected_peak_bytes=nets[1].plan.projected_peak_bytes,
        measured_peak_bytes=peak.num_bytes,
        plain_error=plain_error,
        plain_skipped=plain_skipped,
        error=worst_difference(*results)[0],
        seconds=seconds,
    )


def cells(case: Case, result: SkipResult) -> list[str]:
    """A row of the table."""
    return [
        case.name,
        f"{result.num_strips:,}",
        f"{result.forward_skipped:,}",
        f"{result.backward_skipped:,}",
        f"{100 * result.skipped_flops / result.planned_flops:.1f} %",
        f"{result.ratio:.2f}",
        mib(result.projected_peak_bytes),
        mib(result.measured_peak_bytes),
        f"{result.error:.0e}",
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--height", type=positive_int, default=2048, help="rows of the slide (default: 2048)")
    parser.add_argument("--width", type=positive_int, default=1536, help="columns of the slide (default: 1536)")
    parser.add_argument("--rows", type=positive_int, default=32, help="rows to a strip (default: 32)")
    parser.add_argument("--panel", type=positive_int, default=256, help="columns to a panel, in the second case (default: 256)")
    parser.add_argument("--rounds", type=positive_int, default=2, help="pairs of steps (default: 2)")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 when a step is not exact, or nothing was left out."""
    args = parse_arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin while they wait take processor time from other processes
    console, stem = Console(), result_stem(args.out, "background")
    rows, results, is_good, share, worst = [], [], True, 0.0, 0.0
    for columns in (None, args.panel):
        case = Case(height=args.height, width=args.width, rows=args.rows, columns=columns, rounds=args.rounds, threads=args.threads)
        try:
            result: SkipResult = call_in_process(measured, case)
        except WorkerError as error:
            console.print(f"{case.name}: {error.kind}: {error}", markup=False)
            return 1
        share, worst, is_good = result.tissue_share, max(worst, result.plain_error), is_good and result.is_good
        rows.append(cells(case, result))
        results.append({"case": asdict(case), "found": asdict(result), "ratio": result.ratio})
        console.print(" | ".join(rows[-1]), f"float64 against plain: {result.plain_error:.0e}", markup=False)
    raw: dict[str, Any] = {"environment": environment(args.threads), "settings": {"rounds": args.rounds}, "results": results}
    notes = (
        f"A slide of {args.height} x {args.width} px, {100 * share:.0f} % of it tissue (the region of `examples/data`, made smaller), "
        "the rest painted in one colour. Stem and first two stages of ResNet-18, norm statistics frozen, a mean and a linear layer; "
        "a training step, float32, the image read strip by strip. Time is that of a step over that of the same step with all strips run, "
        f"median of {args.rounds} rounds; error is the largest difference between the two over the largest value of the same module. "
        f"In float64 on a slide of a third of the size the step is plain PyTorch's to {worst:.0e}."
    )
    table = Table(title="Strips of background left out", headers=HEADERS, rows=rows)
    console.print(write_results(stem, raw, [table], notes, None))
    return int(not is_good)


if __name__ == "__main__":
    raise SystemExit(main())
