"""Comparison of whole slides, downsampled slides and patches: a thousandth of each slide decides, and all three train on as many pixels.

python examples/needle/main.py --out out/needle
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

# The examples are not an installed package: this path makes the others importable from any folder.
sys.path.append(str(Path(__file__).resolve().parents[2]))

import sft
from examples.needle.baselines import WARMUP_STEPS, WEIGHT_DECAY, Settings, load_slides, train_downsampled, train_on_patches
from examples.needle.network import needle_net
from examples.needle.slides import make_slides
from sft.common.errors import SftError
from sft.sources import Slide
from sft.wsi import (
    CheckpointFolder,
    Estimate,
    Evidence,
    Prediction,
    SlideTable,
    TaskConfig,
    build_model,
    evaluate_predictions,
    load_experiment,
    read_table,
)
from sft.wsi.cli import main as run_wsi
from sft.wsi.cli import read_config
from sft.wsi.eval.map_drawing import cells_extent
from sft.wsi.model.backbones import num_features
from sft.wsi.model.tasks import Task, make_task
from sft.wsi.run.files import atomic_write_with_parents, write_text

LEVEL = 3  # of the pyramid: means of 8 x 8 px
SHUFFLED = 1  # the number of the class


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Result of one training method."""

    name: str
    auc: Estimate
    seconds: float
    """Of training and prediction, for one learning rate."""
    learning_rate: float


def main() -> int:
    """Make slides, train with three methods, write results.md; returns the exit status."""
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
    parser.add_argument("--slides", type=int, default=400, help="number of slides")
    parser.add_argument("--size", type=int, default=1024, help="their side in px")
    parser.add_argument("--needle", type=int, default=32, help="side in px of the deciding square")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training slides")
    parser.add_argument("--patch", type=int, default=128, help="side in px of the patches of the patch baseline")
    parser.add_argument("--head", choices=("gap", "max", "attention"), default="max", help="of the network, in all three")
    parser.add_argument("--accumulate", type=int, default=2, help="slides, or as many pixels, of one optimizer step")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of the whole-slide training")
    parser.add_argument(
        "--baseline-lr", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="of the others: the best in validation counts"
    )
    parser.add_argument("--more", type=int, default=4, help="also train the patch baseline on this multiple of the pixels; 0: do not")
    parser.add_argument("--budget", default="24MiB", help="bytes for the whole-slide training")
    parser.add_argument("--seed", type=int, default=0, help="of everything")
    chosen = parser.parse_args()
    for name in ("slides", "size", "needle", "epochs", "patch", "accumulate"):
        if not getattr(chosen, name) > 0:
            parser.error(f"--{name} {getattr(chosen, name)}: give a number above 0")
    return chosen


def run(arguments: argparse.Namespace) -> int:
    """Run with parsed arguments; returns the exit status."""
    started = time.perf_counter()
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
    print(f"{len(table.records)} slides of {arguments.size} x {arguments.size} px made in {time.perf_counter() - started:.0f} s")
    print(f"{settings.num_steps} steps of {arguments.accumulate} slides, or as many pixels, three ways", flush=True)

    started = time.perf_counter()
    code = run_wsi(["train", "--config", str(write_config(arguments, table_path)), "--bootstrap", "0"], trust="examples.needle")
    # The last weights, as for the other two methods, and not those of the best validation result.
    last = arguments.out / "test-last"
    code = code or run_wsi(
        ["evaluate", str(arguments.out / "run"), "--split", "test", "--checkpoint", "last", "--out", str(last)], trust="examples.needle"
    )
    if code:
        return code
    metrics = json.loads((last / "metrics.json").read_text(encoding="utf-8"))
    auc = metrics["slides"]["auc"]
    whole = {name: float("nan") if auc[name] is None else auc[name] for name in ("value", "low", "high")}
    seconds = time.perf_counter() - started
    rows = [Row(name="whole slides, sft", auc=Estimate(**whole), seconds=seconds, learning_rate=arguments.lr)]
    hits = find_needles(arguments, table_path)
    print(
        f"{rows[0].name}: AUC {rows[0].auc.value:.3f}; the map's maximum is in the needle of {sum(hits)} of {len(hits)} slides", flush=True
    )

    small = load_slides(table, LEVEL)
    rows += train_best(
        arguments, table, task, settings, lambda chosen: {f"downsampled {2**LEVEL} x {2**LEVEL}": train_downsampled(table, small, chosen)}
    )
    full = load_slides(table, 0)
    patches = f"random patches of {arguments.patch} px"

    def on_patches(chosen: Settings) -> dict[str, list[Prediction]]:
        predictions_by = train_on_patches(table, full, chosen, arguments.patch)
        return {f"{patches}, {name} of a slide's": predictions for name, predictions in predictions_by.items()}

    rows += train_best(arguments, table, task, settings, on_patches)
    num_test = sum(record.split == "test" for record in table.records)
    if arguments.more:
        write_results(arguments, rows, hits, num_test=num_test)  # the next step takes longest
        longer = replace(settings, num_steps=arguments.more * settings.num_steps)
        best = max(rows[2:], key=lambda row: row.auc.value).learning_rate
        more = train_best(arguments, table, task, longer, on_patches, rates=[best])
        rows += [replace(row, name=f"{row.name}, {arguments.more} times the pixels") for row in more]
    write_results(arguments, rows, hits, num_test=num_test)
    return 0


def train_best(
    arguments: argparse.Namespace,
    table: SlideTable,
    task: Task,
    settings: Settings,
    train: Callable[[Settings], dict[str, list[Prediction]]],
    *,
    rates: list[float] | None = None,
) -> list[Row]:
    """Train at each learning rate; for each way to predict the row of the rate that does best in validation."""
    best: dict[str, tuple[float, Row]] = {}
    for rate in rates or arguments.baseline_lr:
        started = time.perf_counter()
        predictions_by_name = train(replace(settings, learning_rate=rate))
        seconds = time.perf_counter() - started
        for name, predictions in predictions_by_name.items():
            splits = {split: [item for item in predictions if item.split == split] for split in ("val", "test")}
            validation = evaluate_predictions(task, splits["val"], num_draws=0)["auc"].value
            test = evaluate_predictions(task, splits["test"], seed=arguments.seed)["auc"]
            print(f"{name}, learning rate {rate:g}: AUC {validation:.3f} in validation, {test.value:.3f} in test", flush=True)
            if name not in best or validation > best[name][0]:
                best[name] = validation, Row(name=name, auc=test, seconds=seconds, learning_rate=rate)
    return [row for _, row in best.values()]


def find_needles(arguments: argparse.Namespace, table_path: Path) -> list[bool]:
    """True for each positive test slide with the maximum of its class-activation map in the needle; draws the first."""
    config = read_config(arguments.out / "run" / "config.yaml")
    experiment = load_experiment(config, trust="examples.needle")
    checkpoint = CheckpointFolder(arguments.out / "run" / "checkpoints").load("last")
    assert checkpoint is not None  # it was evaluated
    experiment.model.load_state_dict(checkpoint.weights)
    net = sft.compile(Evidence(experiment.model).eval(), (1, 3, None, None), budget=config.model.budget)
    with table_path.open(encoding="utf-8", newline="") as file:
        corners = {row["slide"]: (int(row["needle_top_px"]), int(row["needle_left_px"])) for row in csv.DictReader(file)}
    hits: list[bool] = []
    for record in experiment.records("test"):
        if record.target is None or record.target[0] != SHUFFLED:
            continue
        source = experiment.feed.source(record)
        with torch.no_grad():
            evidence = net(source)[1][0, SHUFFLED]
            grids = sft.position_grids(net, source)[1]
        assert grids is not None
        row, col = divmod(int(evidence.argmax()), evidence.shape[1])
        # A position is in the needle if its centre is.
        centre = grids[0].centre_px(row), grids[1].centre_px(col)
        if not hits:
            extent = cells_extent((grids[0], grids[1]), tuple(evidence.shape), 1)
            draw_map(arguments.out / "heatmap.png", record.path, evidence.numpy(), extent, corners[record.path.name], arguments.needle)
        hits.append(all(0 <= place - corner < arguments.needle for place, corner in zip(centre, corners[record.path.name], strict=True)))
    return hits


def draw_map(
    path: Path,
    slide_path: Path,
    evidence: NDArray[np.float32],
    extent: tuple[float, float, float, float],
    corner: tuple[int, int],
    needle_px: int,
) -> None:
    """Draw a slide, the deciding square with its surroundings, and the class-activation map over its cells; the square is framed."""
    with Slide(slide_path) as slide:
        pixels = slide.read(0, 0, slide.width_px, slide.height_px)
    (top, left), margin = corner, needle_px // 2
    first_row, first_col = max(0, top - margin), max(0, left - margin)
    near = pixels[first_row : top + needle_px + margin, first_col : left + needle_px + margin]
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    panels[0].imshow(pixels)
    panels[1].imshow(near, extent=(first_col, first_col + near.shape[1], first_row + near.shape[0], first_row))
    shown = panels[2].imshow(evidence, extent=extent, cmap="viridis", interpolation="nearest")
    panels[2].set(xlim=(0, pixels.shape[1]), ylim=(pixels.shape[0], 0))
    figure.colorbar(shown, ax=panels[2], label="evidence of shuffled blocks")
    titles = (f"{slide_path.stem}, {pixels.shape[1]} x {pixels.shape[0]} px", "the square that decides", "class-activation map")
    for panel, title in zip(panels, titles, strict=True):
        panel.add_patch(Rectangle((left, top), needle_px, needle_px, fill=False, edgecolor="red"))
        panel.set(title=title, xticks=[], yticks=[])
    with atomic_write_with_parents(path) as temporary:
        figure.savefig(temporary, dpi=100)


def write_config(arguments: argparse.Namespace, table_path: Path) -> Path:
    """The configuration of the whole-slide run."""
    config = {
        "data": {"csv": str(table_path), "host_budget": "16MiB"},  # more than a slide: decoded once a step
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
            "weight_decay": WEIGHT_DECAY,
            "warmup_steps": WARMUP_STEPS,
            "seed": arguments.seed,
            "checkpoint_every": 20,
        },
        "run": str(arguments.out / "run"),
    }
    path: Path = arguments.out / "config.yaml"
    write_text(path, yaml.safe_dump(config, sort_keys=False))
    return path


def plain_bytes(arguments: argparse.Namespace) -> int:
    """Projected bytes of a step of plain PyTorch on a slide."""
    model = build_model(needle_net(), num_features(needle_net(), "needle_net"), 2, head=arguments.head)
    options = sft.Options(strategy="none")
    return sft.plan(model, (1, 3, arguments.size, arguments.size), budget=2**60, options=options).total_bytes


def waited_share(steps: Path) -> float:
    """Share of the time of a run's steps that it waited for pixels."""
    with steps.open(encoding="utf-8", newline="") as file:
        rows = [(float(row["waited_seconds"]), float(row["seconds"])) for row in csv.DictReader(file)]
    return sum(waited for waited, _ in rows) / sum(seconds for _, seconds in rows)


def write_results(arguments: argparse.Namespace, rows: list[Row], hits: list[bool], *, num_test: int) -> None:
    """Print the table, and write it with the command and the machine."""
    share = arguments.needle**2 / arguments.size**2
    options = " ".join(
        f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in vars(arguments).items()
        if name != "out"
    )
    lines = [
        "# A thousandth of the slide decides",
        "",
        f"AUC on {num_test} test slides of {arguments.size} x {arguments.size} px; {100 * share:.3f} % of a slide's area decides.",
        "Intervals: 95 %, bootstrap over slides. All ways: the same network, optimizer, number of steps, and pixels a step, but for",
        "rows that say otherwise. Whole slides have one learning rate; the others were trained at each of "
        f"{', '.join(f'{rate:g}' for rate in arguments.baseline_lr)},",
        f"and the one with the best AUC in validation counts. Whole slides were trained within {arguments.budget};",
        f"plain PyTorch would hold {plain_bytes(arguments) / 2**20:.0f} MiB. "
        f"Of the steps' time {100 * waited_share(arguments.out / 'run' / 'steps.csv'):.1f} % was waiting for pixels.",
        "",
        "| trained on | AUC [95 %] | learning rate | seconds, with prediction |",
        "| --- | --- | --- | --- |",
        *(
            f"| {row.name} | {row.auc.value:.3f} [{row.auc.low:.3f}, {row.auc.high:.3f}] | {row.learning_rate:g} | {row.seconds:.0f} |"
            for row in rows
        ),
        "",
        f"The whole-slide model's class-activation map is highest in the square that decides on {sum(hits)} of {len(hits)} positive test",
        f"slides ({100 * sum(hits) / max(1, len(hits)):.0f} %; a place drawn at random would be there on {100 * share:.1f} % of them). "
        "The first of them is drawn in heatmap.png.",
        "",
        f"`python examples/needle/main.py {options}`; {platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}.",
    ]
    raw = {"arguments": {name: str(value) for name, value in vars(arguments).items()}, "rows": [asdict(row) for row in rows], "hits": hits}
    write_text(arguments.out / "results.json", json.dumps(raw, indent=1) + "\n")
    write_text(arguments.out / "results.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
