"""An encoder of tiles trained end to end with labels of slides, against frozen features and against sampled tiles at equal FLOPs.

The task is synthetic, and made for this comparison. A slide is a grid of tiles with smooth stains, noise, and spots, dark and light ones,
alone and in pairs one above the other. On a few tiles of each slide lies one pair side by side. On slides of class 1 the dark spot is the
left one, on slides of class 0 the right one; everything else has the same distribution. So a tile's class is the order of two spots, which
the features of a random encoder hardly contain, and few tiles determine a slide.

Three methods train the same network from the same initial weights with the same optimizer:

- *end to end*: all tiles of a slide in each step, inside a byte budget (`sft.compile`).
- *frozen features*: vectors of all tiles from the initial encoder, computed once; the head alone trains, ten times as many steps.
- *sampled tiles*: an eighth of a slide's tiles, rounded down, drawn anew in each step; the total FLOPs are those of the first method.

All predict from all tiles of a test slide. Intervals are percentiles of a bootstrap that draws seeds, and test slides of each.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from rich.console import Console
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sft
from sft.common.interval import Interval
from sft.sources import ArrayImage, Tiles
from sft.wsi.model.bags import BagModel, build_bag_model

Method = Literal["end to end", "frozen features", "sampled tiles"]
METHODS: tuple[Method, ...] = ("end to end", "frozen features", "sampled tiles")
TILE_PX = 24
#: Distance of the spots of a pair, and their radius.
PAIR_PX, SPOT_PX = 5, 1.5
WIDTH = 32
#: Share of the tiles that a step on sampled tiles takes.
SAMPLED = 8
NUM_DRAWS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Sizes of the task and of the training.

    Attributes:
        num_train, num_test: slides.
        side: tiles along a side of a slide.
        num_marked: tiles with a pair side by side.
        epochs: passes over the training slides, end to end.
        accumulate: slides of a step.
        lr: learning rate at the start; it falls as a cosine.
        head: pooling over tiles.
        budget: bytes of training end to end.
    """

    num_train: int
    num_test: int
    side: int
    num_marked: int
    epochs: int
    accumulate: int
    lr: float
    head: Literal["max", "attention", "gap"]
    budget: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one method from one seed.

    Attributes:
        scores: of the test slides.
        labels: of the test slides.
        steps: optimizer steps.
        flops: of all steps; of frozen features without those of the head.
        projected_peak_bytes: of the plan, or None.
        gradient_error: largest difference of the first step's gradients from plain PyTorch's, relative; None for plain PyTorch.
    """

    scores: tuple[float, ...]
    labels: tuple[int, ...]
    steps: int
    flops: int
    projected_peak_bytes: int | None = None
    gradient_error: float | None = None


class Encoder(nn.Module):
    """Two convolutions, and the maximum of each channel over the tile."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 5, padding=2), nn.Conv2d(16, WIDTH, 5, padding=2)

    def forward(self, tiles: Tensor) -> Tensor:
        hidden = nn.functional.max_pool2d(self.first(tiles).relu(), 2)
        vectors: Tensor = self.second(hidden).relu().amax((2, 3))
        return vectors


def draw_slide(label: int, case: Case, draw: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Pixels of a slide, ``[height, width, 3]``."""
    side_px = case.side * TILE_PX
    coarse = draw.normal(0, 1, (case.side + 1, case.side + 1, 3)) * (14, 18, 14)
    stain = np.stack([_enlarged(coarse[..., channel], side_px) for channel in range(3)], axis=-1)
    pixels = np.array([205.0, 165.0, 200.0]) + draw.normal(0, 8, 3) + stain + draw.normal(0, 6, (side_px, side_px, 3))
    marked = set(draw.choice(case.side**2, case.num_marked, replace=False).tolist())
    for number in range(case.side**2):
        top, left = (TILE_PX * index for index in divmod(number, case.side))
        tile = pixels[top : top + TILE_PX, left : left + TILE_PX]
        if number in marked:
            _draw_pair(tile, (0, PAIR_PX), 1 if label else -1, draw)
        else:
            _draw_pair(tile, (PAIR_PX, 0), int(draw.choice((-1, 1))), draw)
        for sign in draw.choice((-1, 1), 2):
            row, column = draw.uniform(3, TILE_PX - 3, 2)
            _draw_spot(tile, row, column, int(sign), draw)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _enlarged(coarse: npt.NDArray[np.float64], side_px: int) -> npt.NDArray[np.float64]:
    """Linear interpolation of a small square image."""
    places = np.linspace(0, len(coarse) - 1, side_px)
    rows = np.stack([np.interp(places, np.arange(len(coarse)), column) for column in coarse.T], axis=1)
    return np.stack([np.interp(places, np.arange(len(coarse)), row) for row in rows])


def _draw_pair(tile: npt.NDArray[np.float64], step: tuple[int, int], sign: int, draw: np.random.Generator) -> None:
    """Draw two spots a step apart: the first darker for a positive sign, the second for a negative one."""
    room = [(3, TILE_PX - 3 - extent) for extent in step]
    row, column = (draw.uniform(low, high) for low, high in room)
    _draw_spot(tile, row, column, -sign, draw)
    _draw_spot(tile, row + step[0], column + step[1], sign, draw)


def _draw_spot(tile: npt.NDArray[np.float64], row: float, column: float, sign: int, draw: np.random.Generator) -> None:
    rows, columns = np.ogrid[:TILE_PX, :TILE_PX]
    shape = np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / (2 * SPOT_PX**2))
    tile += sign * draw.uniform(45, 65) * shape[..., None]


def draw_slides(num_slides: int, case: Case, seed: tuple[int, ...]) -> list[tuple[Tensor, int]]:
    """Tiles of slides ``[N, 3, h, w]`` and labels, of both classes in turn."""
    slides = []
    for number in range(num_slides):
        image = ArrayImage(draw_slide(number % 2, case, np.random.default_rng([*seed, number])), layout="HWC")
        tiles = Tiles(image, TILE_PX, mean=(0.8, 0.65, 0.78), std=(0.15, 0.15, 0.15))
        pixels = torch.empty(tiles.shape)
        tiles.rows(Interval(0, TILE_PX), pixels)
        slides.append((pixels, number % 2))
    return slides


def loss_of(scores: Tensor, label: int) -> Tensor:
    """Cross-entropy of a slide."""
    return nn.functional.cross_entropy(scores, torch.tensor([label]))


def initial_model(case: Case, seed: int) -> BagModel:
    """The network with the initial weights of a seed."""
    torch.manual_seed(seed)
    return build_bag_model(Encoder(), WIDTH, 2, head=case.head, attention_dim=32)


def run_seed(methods: Sequence[Method], case: Case, seed: int) -> dict[Method, Outcome]:
    """Outcomes of all methods on the slides of a seed."""
    torch.set_num_threads(1)
    training, testing = draw_slides(case.num_train, case, (seed, 0)), draw_slides(case.num_test, case, (seed, 1))
    return {method: run_method(method, case, seed, training, testing) for method in methods}


def run_method(method: Method, case: Case, seed: int, training: list[tuple[Tensor, int]], testing: list[tuple[Tensor, int]]) -> Outcome:
    """Train from the initial weights of a seed, and predict the test slides."""
    model = initial_model(case, seed)
    net: Any = sft.compile(copy.deepcopy(model), tuple(training[0][0].shape), budget=case.budget)
    steps = case.epochs * case.num_train // case.accumulate
    step_flops = net.plan.flops * case.accumulate
    labels = tuple(label for _, label in testing)
    if method == "end to end":
        error = _gradient_error(model, net, *training[0])
        _train(net, list(net.parameters()), training, case, seed, steps, net)
        with torch.no_grad():
            scores = [_score(net.eval()(tiles)) for tiles, _ in testing]
        peak = net.plan.projected_peak_bytes
        return Outcome(
            scores=tuple(scores), labels=labels, steps=steps, flops=steps * step_flops, projected_peak_bytes=peak, gradient_error=error
        )
    if method == "frozen features":
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            vectors = [(model.vectors(tiles), label) for tiles, label in training]
        mean, std = torch.cat([each for each, _ in vectors]).mean(0), torch.cat([each for each, _ in vectors]).std(0) + 1e-6
        scaled = [((each - mean) / std, label) for each, label in vectors]
        steps *= 10
        _train(model.head, list(model.head.parameters()), scaled, case, seed, steps, model)
        with torch.no_grad():
            scores = [_score(model.head((model.vectors(tiles) - mean) / std)) for tiles, _ in testing]
        return Outcome(scores=tuple(scores), labels=labels, steps=steps, flops=counter.get_total_flops())
    num_sampled = case.side**2 // SAMPLED
    with FlopCounterMode(display=False) as counter:
        loss_of(model(training[0][0][:num_sampled]), 0).backward()
    model.zero_grad()
    sampled_flops = counter.get_total_flops() * case.accumulate
    affordable = steps * step_flops // sampled_flops
    draw = np.random.default_rng([seed, 2])

    def sampled(tiles: Tensor) -> Tensor:
        scores: Tensor = model(tiles[torch.from_numpy(draw.choice(len(tiles), num_sampled, replace=False))])
        return scores

    _train(sampled, list(model.parameters()), training, case, seed, affordable, model)
    with torch.no_grad():
        scores = [_score(model(tiles)) for tiles, _ in testing]
    return Outcome(scores=tuple(scores), labels=labels, steps=affordable, flops=affordable * sampled_flops)


def _train(
    compute: Any, parameters: list[nn.Parameter], bags: list[tuple[Any, int]], case: Case, seed: int, steps: int, model: nn.Module
) -> None:
    """Optimizer steps on slides in a random order."""
    optimizer = torch.optim.AdamW(parameters, lr=case.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = np.random.default_rng([seed, 3])
    numbers = (number for _ in count() for number in order.permutation(len(bags)))
    model.train()
    for _ in range(steps):
        for number in islice(numbers, case.accumulate):
            inputs, label = bags[number]
            (loss_of(compute(inputs), label) / case.accumulate).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()


def _score(scores: Tensor) -> float:
    return float(scores[0, 1] - scores[0, 0])


def _gradient_error(model: BagModel, net: Any, tiles: Tensor, label: int) -> float:
    """Largest difference of gradients from plain PyTorch's, relative to the largest gradient of the parameter."""
    plain = copy.deepcopy(model)
    loss_of(plain(tiles), label).backward()
    loss_of(net(tiles), label).backward()
    errors = []
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        errors.append(float((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp_min(1e-12)))
    net.zero_grad()
    return max(errors)


def auc_interval(outcomes: list[Outcome], others: list[Outcome] | None = None) -> tuple[float, float, float]:
    """Mean area under the ROC curve over seeds, or its excess over that of others, with a 95 % interval."""
    draw = np.random.default_rng(0)

    def area(outcome: Outcome, rows: npt.NDArray[np.intp]) -> float:
        return float(roc_auc_score(np.array(outcome.labels)[rows], np.array(outcome.scores)[rows]))

    def value(seeds: npt.NDArray[np.intp], rows: list[npt.NDArray[np.intp]]) -> float:
        areas = [
            area(outcomes[seed], chosen) - (area(others[seed], chosen) if others else 0) for seed, chosen in zip(seeds, rows, strict=True)
        ]
        return float(np.mean(areas))

    everything = np.arange(len(outcomes[0].labels))
    middle = value(np.arange(len(outcomes)), [everything] * len(outcomes))
    by_class = [np.flatnonzero(np.array(outcomes[0].labels) == label) for label in (0, 1)]
    samples = []
    for _ in range(NUM_DRAWS):
        seeds = draw.integers(len(outcomes), size=len(outcomes))
        rows = [np.concatenate([draw.choice(each, len(each)) for each in by_class]) for _ in seeds]
        samples.append(value(seeds, rows))
    low, high = np.percentile(samples, (2.5, 97.5))
    return middle, float(low), float(high)


def plain_peak_bytes(case: Case) -> int:
    """Bytes of a step of plain PyTorch on all tiles of a slide."""
    model = initial_model(case, 0)
    ((tiles, label),) = draw_slides(1, case, (0, 0))
    with sft.measure_peak("cpu") as peak:
        loss_of(model(tiles), label).backward()
    return peak.num_bytes


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--train", type=positive_int, default=240, help="training slides (default: 240)")
    parser.add_argument("--test", type=positive_int, default=80, help="test slides of each seed (default: 80)")
    parser.add_argument("--side", type=positive_int, default=6, help="tiles along a side of a slide (default: 6)")
    parser.add_argument("--marked", type=positive_int, default=4, help="tiles that show a slide's class (default: 4)")
    parser.add_argument("--epochs", type=positive_int, default=12, help="passes over the slides, end to end (default: 12)")
    parser.add_argument("--accumulate", type=positive_int, default=4, help="slides of a step (default: 4)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--head", choices=("attention", "max", "gap"), default="max", help="pooling (default: max)")
    parser.add_argument("--budget", default="2MiB", help="budget of training end to end (default: 2MiB)")
    parser.add_argument("--seeds", type=positive_int, default=4, help="initial weights and sets of slides (default: 4)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="default: all")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the comparison; 1 if gradients of a step differ from plain PyTorch's."""
    args = parse_arguments()
    console, stem = Console(), result_stem(args.out, "tiles-task")
    case = Case(
        num_train=args.train,
        num_test=args.test,
        side=args.side,
        num_marked=args.marked,
        epochs=args.epochs,
        accumulate=args.accumulate,
        lr=args.lr,
        head=args.head,
        budget=args.budget,
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    outcomes: dict[Method, list[Outcome]] = {method: [] for method in args.methods}
    with ProcessPoolExecutor(args.threads) as pool:
        futures = [pool.submit(run_seed, args.methods, case, seed) for seed in range(args.seeds)]
        for seed, future in enumerate(futures):
            for method, outcome in future.result().items():
                outcomes[method].append(outcome)
                console.print(f"seed {seed}, {method}: AUC {auc_interval([outcome])[0]:.3f}, {outcome.steps} steps", markup=False)
    areas = {method: auc_interval(results) for method, results in outcomes.items()}
    if set(args.methods) != set(METHODS):
        console.print(areas)
        return 0
    ours = outcomes["end to end"]
    excess = {method: auc_interval(ours, outcomes[method]) for method in METHODS[1:]}
    plain_bytes = plain_peak_bytes(case)
    rows = [
        [
            method,
            f"{results[0].steps:,}",
            f"{np.mean([each.flops for each in results]) / 1e9:,.1f}",
            *(f"{value:.3f}" for value in areas[method][:1]),
            f"{areas[method][1]:.3f} to {areas[method][2]:.3f}",
            "" if method not in excess else f"{excess[method][0]:.3f} ({excess[method][1]:.3f} to {excess[method][2]:.3f})",
        ]
        for method, results in outcomes.items()
    ]
    error = max(each.gradient_error or 0.0 for each in ours)
    peak_bytes = max(each.projected_peak_bytes or 0 for each in ours)
    notes = (
        f"Synthetic slides, for this comparison: {case.side**2} tiles of {TILE_PX} px, of which {case.num_marked} show the class by the "
        f"order of two spots. {case.num_train} slides to train on, {case.num_test} to test; {args.seeds} seeds of slides and weights. "
        f"Two convolutions ({WIDTH} features), head {case.head}, AdamW with learning rate {case.lr:g} and {case.accumulate} slides a step. "
        f"Sampled tiles: {case.side**2 // SAMPLED} a slide and step, as many steps as take the FLOPs of the first row. Frozen features: "
        "the head alone, ten times the steps of the first row; the FLOPs are those of the features. Intervals: 95 %, bootstrap over seeds "
        f"and test slides. The step end to end takes {mib(peak_bytes)} MiB by plan, plain PyTorch {mib(plain_bytes)} MiB; its gradients "
        f"are plain PyTorch's to {error:.0e}."
    )
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "case": asdict(case),
        "num_seeds": args.seeds,
        "auc": {method: list(value) for method, value in areas.items()},
        "excess": {method: list(value) for method, value in excess.items()},
        "projected_peak_bytes": peak_bytes,
        "plain_peak_bytes": plain_bytes,
        "gradient_error": error,
        "outcomes": {method: [asdict(each) for each in results] for method, results in outcomes.items()},
    }
    headers = ("method", "steps", "GFLOP", "AUC", "95 % interval", "end to end, more by")
    table = Table(title="Labels of slides that few tiles show (synthetic)", headers=headers, rows=rows)
    console.print(write_results(stem, raw, [table], notes, None))
    return int(math.isnan(error) or error > 1e-3)


if __name__ == "__main__":
    raise SystemExit(main())
