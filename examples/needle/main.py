"""Does it matter to train on whole slides? A thousandth of each slide decides, and three ways to learn it get the same pixels.

python examples/needle/main.py --out out/needle
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch
import yaml

# The examples are no installed package: let this one find the others from wherever it is started.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from examples.needle.baselines import Settings, train_downsampled, train_on_patches
from examples.needle.slides import make_slides
from sft.errors import SftError
from sft.wsi import Estimate, Prediction, TaskConfig, evaluate_predictions, read_table
from sft.wsi.cli import main as run_wsi
from sft.wsi.files import write_text
from sft.wsi.tasks import make_task

LEVEL = 3  # of the pyramid: means of 8 x 8 px


def main() -> int:
    """Make slides, train three ways, write results.md; returns the exit status."""
    arguments = parse_arguments()
    try:
        return run(arguments)
    except (SftError, OSError, ValueError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/needle"), help="folder for slides and results")
    parser.add_argument("--slides", type=int, default=288, help="how many slides to make")
    parser.add_argument("--size", type=int, default=1024, help="their side in px")
    parser.add_argument("--needle", type=int, default=32, help="side in px of what decides")
    parser.add_argument("--epochs", type=int, default=16, help="passes over the training slides")
    parser.add_argument("--patch", type=int, default=128, help="side in px of the patches of the patch baseline")
    parser.add_argument("--head", choices=("gap", "max", "attention"), default="max", help="of the network, in all three")
    parser.add_argument("--accumulate", type=int, default=4, help="slides, or as many pixels, of one optimizer step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--budget", default="24MiB", help="bytes for the whole-slide training")
    parser.add_argument("--seed", type=int, default=0, help="of everything")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    table_path = make_slides(
        arguments.out / "slides", num_slides=arguments.slides, size_px=arguments.size, needle_px=arguments.needle, seed=arguments.seed
    )
    table = read_table(table_path, TaskConfig())
    training = [record for record in table.records if record.split == "train"]
    task = make_task(TaskConfig(), table.classes, training)
    settings = Settings(
        size_px=arguments.size,
        num_steps=arguments.epochs * -(-len(training) // arguments.accumulate),
        slides_per_step=arguments.accumulate,
        learning_rate=arguments.lr,
        head=arguments.head,
        seed=arguments.seed,
    )
    print(
        f"{len(table.records)} slides of {arguments.size} x {arguments.size} px, {settings.num_steps} steps of as many pixels, three ways"
    )

    rows: list[tuple[str, Estimate, float]] = []
    started = time.perf_counter()
    code = run_wsi(["train", "--config", str(write_config(arguments, table_path)), "--bootstrap", "0"])
    # The last weights, as of the other two ways, and not those that did best in validation.
    last = arguments.out / "test-last"
    code = code or run_wsi(["evaluate", str(arguments.out / "run"), "--split", "test", "--checkpoint", "last", "--out", str(last)])
    if code:
        return code
    metrics = json.loads((last / "metrics.json").read_text(encoding="utf-8"))
    whole = {name: float("nan") if value is None else value for name, value in metrics["slides"]["auc"].items()}
    rows.append(("whole slides, sft", Estimate(**whole), time.perf_counter() - started))

    def add(name: str, predictions: list[Prediction], seconds: float) -> None:
        rows.append((name, evaluate_predictions(task, predictions, seed=arguments.seed)["auc"], seconds))

    started = time.perf_counter()
    small = train_downsampled(table, settings, LEVEL)
    add(f"downsampled {2**LEVEL} x {2**LEVEL}", small, time.perf_counter() - started)
    started = time.perf_counter()
    by_patches = train_on_patches(table, settings, arguments.patch)
    seconds = time.perf_counter() - started
    for name, predictions in by_patches.items():
        add(f"random patches of {arguments.patch} px, {name} of a slide's", predictions, seconds)
    write_results(arguments, rows, num_test=sum(record.split == "test" for record in table.records))
    return 0


def write_config(arguments: argparse.Namespace, table_path: Path) -> Path:
    """The configuration of the whole-slide run."""
    config = {
        "data": {"csv": str(table_path)},
        "model": {
            "backbone": "examples.needle.network:needle_net",
            "head": arguments.head,
            "attention_dim": 32,
            "budget": arguments.budget,
            "mean": [0.7] * 3,
            "std": [0.2] * 3,
        },
        "train": {
            "epochs": arguments.epochs,
            "accumulate": arguments.accumulate,
            "lr": arguments.lr,
            "weight_decay": 0.01,
            "seed": arguments.seed,
            "monitor": "auc",
        },
        "run": str(arguments.out / "run"),
    }
    path: Path = arguments.out / "config.yaml"
    write_text(path, yaml.safe_dump(config, sort_keys=False))
    return path


def write_results(arguments: argparse.Namespace, rows: list[tuple[str, Estimate, float]], *, num_test: int) -> None:
    """Print the table, and write it with the command and the machine."""
    share = arguments.needle**2 / arguments.size**2
    options = " ".join(f"--{name} {value}" for name, value in vars(arguments).items() if name != "out")
    lines = [
        "# A thousandth of the slide decides",
        "",
        f"AUC on {num_test} test slides of {arguments.size} x {arguments.size} px; {100 * share:.3f} % of a slide's area decides.",
        "Intervals: 95 %, bootstrap over slides. All ways: the same network, optimizer, number of steps, and pixels a step.",
        "",
        "| trained on | AUC [95 %] | seconds, with prediction |",
        "| --- | --- | --- |",
        *(f"| {name} | {auc.value:.3f} [{auc.low:.3f}, {auc.high:.3f}] | {seconds:.0f} |" for name, auc, seconds in rows),
        "",
        f"`python examples/needle/main.py {options}`; {platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}.",
    ]
    write_text(arguments.out / "results.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
