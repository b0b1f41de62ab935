"""The set-up of figure 8 of the SFT paper (Xu et al., CC 2022): its tiles, our strips and plain PyTorch.

VGG-16, VGG-19 and DarkNet-19 bodies, one image of batch 1 in float32, mean squared error, square sizes from 512 to 20,480. The paper's
method (`strategy="sft"`) runs with 2^n x 2^n tiles, n = 1..5, and the best counts; ours is the planner's choice.

Two parts. *Planned*, at every size and for the memories of the paper's two cards: the bytes and FLOPs of a step, from plans. Run*, at the
sizes that fit on this machine: counted FLOPs, metered peaks, and seconds in rounds in which the methods take turns. Both methods get the
same budget: the resident bytes, and a share of plain PyTorch's activations.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness.cases import load_models
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sft

MODELS = ("vgg16", "vgg19", "darknet19")
TILES = (2, 4, 8, 16, 32)
"""Along each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Projected cost of a step."""

    model: str
    size: int
    budget_gib: float
    plain_bytes: int
    tiles: int | None
    """Tiles along each side of the paper's plan with the fewest FLOPs; None when none fits."""
    tiles_bytes: int | None
    tiles_flops: float | None
    """Over plain's."""
    ours: str
    ours_bytes: int | None
    ours_flops: float | None

    def cells(self) -> list[str]:
        """The row of the table."""
        fits = "" if self.plain_bytes <= self.budget_gib * 2**30 else " (does not fit)"
        return [
            self.model,
            f"{self.size}²",
            f"{self.budget_gib:g}",
            f"{self.plain_bytes / 2**30:.2f}{fits}",
            *_plan_cells(f"{self.tiles} x {self.tiles}", self.tiles_bytes, self.tiles_flops),
            *_plan_cells(self.ours, self.ours_bytes, self.ours_flops),
        ]


@dataclass(kw_only=True)
class Run:
    """One method at one size, measured."""

    model: str
    size: int
    method: str
    budget_bytes: int
    peak_bytes: int = 0
    projected_bytes: int | None = None
    flops: int = 0
    planned_flops: int | None = None
    loss: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """The warm-up is left out."""


def _plan_cells(what: str, num_bytes: int | None, flops: float | None) -> list[str]:
    return ["no plan", "", ""] if num_bytes is None or flops is None else [what, f"{num_bytes / 2**30:.2f}", f"{flops:.3f}"]


def body_of(name: str) -> nn.Module:
    """The convolutional part of a model, statistics frozen."""
    models = load_models()
    model = getattr(models, name)(num_classes=10)
    models.freeze_norm(model)
    body: nn.Module = model.features
    return body


def tiled(size: int, tiles: int) -> sft.Options:
    """The paper's method with a number of tiles along each side."""
    side = -(-size // tiles)
    return sft.Options(strategy="sft", tile=(side, side))


def plan_or_none(model: nn.Module, size: int, budget: int, options: sft.Options) -> sft.Plan | None:
    """A plan, `None` when none fits."""
    try:
        return sft.plan(model, (1, 3, size, size), budget=budget, options=options)
    except sft.BudgetError:
        return None


def plan_one(name: str, size: int, budget_gib: float) -> Planned:
    """Plans of all methods for one model, size and memory."""
    with torch.device("meta"):
        model = body_of(name)
    budget = int(budget_gib * 2**30)
    plain = sft.plan(model, (1, 3, size, size), budget=2**50, options=sft.Options(strategy="none"))
    tiled_plans = {n: plan_or_none(model, size, budget, tiled(size, n)) for n in TILES}
    fitting = {n: plan for n, plan in tiled_plans.items() if plan is not None}
    best = min(fitting, key=lambda n: fitting[n].flops, default=None)
    ours = plan_or_none(model, size, budget, sft.Options())
    strips = {(s.strip_rows, s.panel_cols, s.state_every) for s in ours.segments if s.mode == "tiled"} if ours else set()
    return Planned(
        model=name,
        size=size,
        budget_gib=budget_gib,
        plain_bytes=plain.total_bytes,
        tiles=best,
        tiles_bytes=None if best is None else fitting[best].total_bytes,
        tiles_flops=None if best is None else fitting[best].redundancy,
        ours="; ".join(f"{rows} rows of {cols}, k={every}" for rows, cols, every in strips) or "whole",
        ours_bytes=None if ours is None else ours.total_bytes,
        ours_flops=None if ours is None else ours.redundancy,
    )


def plan_of(net: Any) -> sft.Plan:
    """The plan of a compiled model."""
    plan: sft.Plan = net.plan
    return plan


def step_of(net: Callable[[Tensor], Tensor], x: Tensor, target: Tensor) -> float:
    """One training step's forward and backward."""
    loss = nn.functional.mse_loss(net(x), target)
    loss.backward()
    return loss.item()


def run_one(name: str, size: int, share: float, rounds: int) -> list[Run]:
    """Measure all methods that have a plan, in turns."""
    torch.manual_seed(0)
    body = body_of(name)
    x = torch.randn(1, 3, size, size)
    plain = sft.plan(body, tuple(x.shape), budget=2**50, options=sft.Options(strategy="none"))
    budget = plain.resident_bytes + int(share * plain.projected_peak_bytes)
    with torch.no_grad():
        target = torch.randn_like(body(x))
    nets: dict[str, nn.Module] = {"plain": body}
    for method, options in [*((f"{n} x {n} tiles", tiled(size, n)) for n in TILES), ("ours", sft.Options())]:
        if plan_or_none(body, size, budget, options) is not None:
            nets[method] = sft.compile(copy.deepcopy(body), tuple(x.shape), budget=budget, options=options)
    runs = {method: Run(model=name, size=size, method=method, budget_bytes=budget) for method in nets}
    for method, net in nets.items():  # also the warm-up
        run = runs[method]
        with sft.measure_peak("cpu") as peak:
            run.loss = step_of(net, x.clone(), target)
        run.peak_bytes = peak.num_bytes
        net.zero_grad(set_to_none=True)
        with FlopCounterMode(display=False) as counter:
            step_of(net, x, target)
        run.flops = counter.get_total_flops()
        net.zero_grad(set_to_none=True)
        if method != "plain":
            plan = plan_of(net)
            run.projected_bytes, run.planned_flops = plan.projected_peak_bytes, plan.flops
            if run.planned_flops != run.flops:
                raise AssertionError(f"{name} {size} {method}: counted {run.flops} FLOPs, planned {run.planned_flops}")
    for _ in range(rounds):
        for method, net in nets.items():
            started = time.perf_counter()
            step_of(net, x, target)
            runs[method].seconds.append(time.perf_counter() - started)
            net.zero_grad(set_to_none=True)
    return list(runs.values())


def run_cells(run: Run, plain: Run) -> list[str]:
    """The row of the table; ratios are medians of the rounds' own."""
    ratios = [mine / theirs for mine, theirs in zip(run.seconds, plain.seconds, strict=True)]
    return [
        run.model,
        f"{run.size}²",
        run.method,
        f"{mib(run.peak_bytes)} ({run.peak_bytes / plain.peak_bytes:.2f})",
        f"{run.flops / plain.flops:.3f}",
        f"{statistics.median(run.seconds):.2f}",
        f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
        f"{abs(run.loss - plain.loss) / plain.loss:.1e}",
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--planned", nargs="+", type=positive_int, default=[512, 1024, 2048, 4096, 10_240, 20_480], metavar="SIZE")
    parser.add_argument("--budgets", nargs="+", type=float, default=[11.0, 40.0], metavar="GIB")
    parser.add_argument("--run", nargs="*", type=positive_int, default=[512, 1024], metavar="SIZE")
    parser.add_argument("--share", type=float, default=0.25, help="share of plain's activations: budget of measured steps (default: 0.25)")
    parser.add_argument("--rounds", type=positive_int, default=3)
    add_common_arguments(parser)
    return parser.parse_args()


def tables_of(planned: list[Planned], runs: list[list[Run]]) -> list[Table]:
    """The two parts' tables."""
    plan_headers = ("model", "size", "memory GiB", "plain GiB", "tiles", "GiB", "FLOPs / plain", "ours", "GiB", "FLOPs / plain")
    run_headers = ("model", "size", "method", "peak MiB (of plain)", "FLOPs / plain", "step s", "time / plain", "loss, rel. difference")
    return [
        Table(title="Planned", headers=plan_headers, rows=[item.cells() for item in planned]),
        Table(title="Run", headers=run_headers, rows=[run_cells(run, group[0]) for group in runs for run in group]),
    ]


def save(stem: Path, args: argparse.Namespace, planned: list[Planned], runs: list[list[Run]]) -> str:
    """Write the results so far."""
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "planned": [asdict(item) for item in planned],
        "runs": [asdict(run) for group in runs for run in group],
    }
    notes = (
        f"MSE loss, batch 1, float32. Tiles: the SFT paper's partition with n x n tiles, of n in {TILES} the fewest FLOPs that fit "
        f"(planned), or each that fits (run). Run with a budget of {args.share} of plain's activations. Time: median [least, most] of "
        f"{args.rounds} rounds."
    )
    return write_results(stem, raw, tables_of(planned, runs), notes, None)


def main() -> int:
    """Run the benchmark; the results are saved after every model and size."""
    args = parse_arguments()
    console = Console()
    torch.set_num_threads(args.threads)
    stem = result_stem(args.out, "figure8")
    planned: list[Planned] = []
    runs: list[list[Run]] = []
    written = ""
    cases = [(name, size, budget) for name in args.models for size in args.planned for budget in args.budgets]
    for case in track(cases, "planning", console=console):
        planned.append(plan_one(*case))
        written = save(stem, args, planned, runs)
    for name, size in track([(name, size) for name in args.models for size in args.run], "running", console=console):
        runs.append(run_one(name, size, args.share, args.rounds))
        written = save(stem, args, planned, runs)
    console.print(*(table.terminal() for table in tables_of(planned, runs)))
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
