"""Predicted (``sft.Options(profile="measure")``) and measured time of a step.

For VGG-16, ResNet-18 with norms in training, and a U-Net, under budgets that force strips of several heights: the plan's
`projected_seconds`, and the median of steps that follow it in the same process. Both are read from the clock of the process (processor
seconds), with one thread, so that other work on the machine changes neither.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from unittest.mock import patch

import torch
from harness.cases import load_models
from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from rich.console import Console
from torch import nn

import sft
from sft.torch_runtime.profiling import CACHE_VARIABLE

MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg16": lambda: load_models().vgg16(num_classes=10, width=32),
    "resnet18": lambda: load_models().resnet18(num_classes=10, width=32),
    "unet": lambda: load_models().unet(num_classes=2, levels=4, width=16),
}
STRIP_ROWS = (64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One plan, predicted and measured; processor seconds."""

    model: str
    size_px: int
    plan: str
    projected_seconds: float
    measured_seconds: tuple[float, ...]
    profile_seconds: float
    """What predicting took."""

    @property
    def ratio(self) -> float:
        """Projected over the median of measured."""
        return self.projected_seconds / median(self.measured_seconds)

    def cells(self) -> list[str]:
        """The row of the table."""
        low, high = min(self.measured_seconds), max(self.measured_seconds)
        return [
            self.model,
            f"{self.size_px}²",
            self.plan,
            f"{self.projected_seconds:.3f}",
            f"{median(self.measured_seconds):.3f} [{low:.3f}, {high:.3f}]",
            f"{self.ratio:.2f}",
            f"{self.profile_seconds:.1f}",
        ]


HEADERS = ("model", "size", "plan", "projected s", "measured s [least, most]", "projected / measured", "predicting took s")


def predictions(size_px: int, num_steps: int) -> Iterator[Prediction]:
    """All models and plans, one after the other."""
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, x = make().train(), torch.rand(1, 3, size_px, size_px)
        for rows in (*STRIP_ROWS, None):
            options = sft.Options(tile=(rows, None)) if rows else sft.Options(strategy="none")
            yield _predicted(name, model, x, f"strips of {rows}" if rows else "whole", options, num_steps)


def _predicted(name: str, model: nn.Module, x: torch.Tensor, plan: str, options: sft.Options, num_steps: int) -> Prediction:
    net = sft.compile(model, x.shape, budget="64GiB", options=options)
    started = time.process_time()
    # The file of measured times is neither read nor written: its times are of another clock.
    with patch.dict(os.environ, {CACHE_VARIABLE: ""}), patch("sft.planner.measured.step_timer.time.perf_counter", time.process_time):
        timed = sft.plan(model, x.shape, budget="64GiB", options=replace(options, profile="measure"))
    profile_seconds = time.process_time() - started
    measured = []
    for _ in range(num_steps + 1):
        begun = time.process_time()
        net(x).sum().backward()
        measured.append(time.process_time() - begun)
        net.zero_grad(set_to_none=True)
    assert timed.projected_seconds is not None
    return Prediction(
        model=name,
        size_px=x.shape[-1],
        plan=plan,
        projected_seconds=timed.projected_seconds,
        measured_seconds=tuple(measured[1:]),
        profile_seconds=profile_seconds,
    )


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Predicted against measured time of a step.")
    parser.add_argument("--size", type=positive_int, default=1024, help="height and width in px (default: 1024)")
    parser.add_argument("--steps", type=positive_int, default=3, help="measured steps of each plan, after one to warm up (default: 3)")
    add_common_arguments(parser)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    console = Console()
    torch.set_num_threads(args.threads)
    predicted = []
    for prediction in predictions(args.size, args.steps):
        predicted.append(prediction)
        console.print(" | ".join(prediction.cells()), markup=False)
    table = Table(title="Predicted and measured time of a training step", headers=HEADERS, rows=[each.cells() for each in predicted])
    raw = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "results": [{**asdict(each), "ratio": each.ratio} for each in predicted],
    }
    notes = (
        "Processor seconds of one thread. Predicting runs each distinct program of the plan a few times; its seconds include capture and "
        "planning, which a compiled model has done already."
    )
    written = write_results(result_stem(args.out, "prediction"), raw, [table], notes, None)
    console.print(table.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
