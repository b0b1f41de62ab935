"""Time that the training loop of `python -m sft.wsi` waits for pixels: for slides to be opened, and for strips.

A ResNet-18 is trained on whole compressed slides, one slide a step. The next slide is opened while the current one is trained on; within a
slide a thread reads ahead. ``steps.csv`` of the run says what each step took and what of that it waited.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from harness.images import write_slide
from harness.report import Table, add_common_arguments, environment, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console

_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run."""

    folder: Path
    config: Path
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step."""

    seconds: float
    waited_seconds: float


def train(case: Case) -> list[Step]:
    """Train; call it in a fresh process.

    Raises:
        RuntimeError: the run failed.
    """
    from sft.wsi.cli import main as run_wsi

    torch.set_num_threads(case.threads)
    sys.path.append(str(_ROOT))  # for examples.models
    code = run_wsi(["train", "--config", str(case.config), "--bootstrap", "0"], trust="examples.models")
    if code:
        raise RuntimeError(f"the run ended with exit code {code}")
    with (case.folder / "run" / "steps.csv").open(newline="", encoding="utf-8") as file:
        return [Step(seconds=float(row["seconds"]), waited_seconds=float(row["waited_seconds"])) for row in csv.DictReader(file)]


def write_run(folder: Path, *, num_slides: int, size: int, epochs: int, budget: str) -> Path:
    """Slides, table and configuration; returns the last."""
    rows = []
    for number in range(num_slides):
        # Each its own width: another mosaic, another plan.
        write_slide(folder / f"s{number}.tif", size, size + 16 * number)
        rows.append([f"s{number}.tif", "ab"[number % 2], "train"])
    with (folder / "slides.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["slide", "label", "split"], *rows])
    config = {
        "data": {"csv": str(folder / "slides.csv")},
        "model": {"backbone": "examples.models:resnet18", "options": {"num_classes": 2}, "budget": budget},
        "train": {"epochs": epochs, "accumulate": 1, "checkpoint_every": num_slides},
        "run": str(folder / "run"),
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time that the training loop waits for pixels.")
    parser.add_argument("--slides", type=positive_int, default=4, help="how many slides")
    parser.add_argument("--size", type=positive_int, default=2048, help="their rows and columns, pixels")
    parser.add_argument("--epochs", type=positive_int, default=2, help="passes over them; the first one plans")
    parser.add_argument("--budget", default="512MiB", help="of the training")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 when the loop waited for a tenth of its time or more, or there is no result."""
    args = parse_arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for the process to come: the machine may be shared
    console = Console()
    stem = result_stem(args.out, "waiting")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_run(folder, num_slides=args.slides, size=args.size, epochs=args.epochs, budget=args.budget)
        try:
            steps: list[Step] = call_in_process(train, Case(folder=folder, config=config, threads=args.threads))
        except WorkerError as error:
            console.print(f"{error.kind}: {error}", markup=False)
            return 1
    epochs = [steps[start : start + args.slides] for start in range(0, len(steps), args.slides)]
    rows = []
    for number, epoch in enumerate(epochs, 1):
        seconds, waited = sum(step.seconds for step in epoch), sum(step.waited_seconds for step in epoch)
        rows.append([str(number), str(len(epoch)), f"{seconds:.1f}", f"{waited:.2f}", f"{100 * waited / seconds:.1f} %"])
    last = epochs[-1]
    share = sum(step.waited_seconds for step in last) / sum(step.seconds for step in last)
    table = Table(title=f"ResNet-18, slides of {args.size:,} px", headers=("epoch", "steps", "s", "waited, s", "share"), rows=rows)
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "steps": [asdict(step) for step in steps],
    }
    notes = (
        "Training on whole slides (tiled TIFF, JPEG, content from a real slide), one slide a step, norm statistics frozen, float32. "
        "Waited: for a slide to be opened, which happens while the one before is trained on, and for strips to be decoded. The first "
        "epoch makes the plans, a size at a time. The first slide of an epoch is not opened ahead."
    )
    console.print(write_results(stem, raw, [table], notes, None))
    console.print(table.terminal())
    return int(share >= 0.1)


if __name__ == "__main__":
    raise SystemExit(main())
