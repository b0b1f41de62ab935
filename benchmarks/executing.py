"""Executed plans with recomputation: bytes, FLOPs and gradients against the projection.

`optimal` and `auto` at 1/2, 1/4 and 1/8 of the activations of plain PyTorch (what a step makes when everything is kept, less the
parameters' new gradients), or at the least that the strategy has a plan for. Each plan takes one training step in float64, in which live
storages are metered, FLOPs are counted, and outputs, all gradients and running statistics are compared with eager PyTorch's. Exits with
1 where anything differs.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness.cases import load_models
from harness.gradcheck import TOLERANCE, collect, worst_difference
from harness.plans import ModelCase
from harness.report import Table, add_common_arguments, environment, mib, result_stem, write_results
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sft
from sft.common.model_zoo import ModelName

STRATEGIES = ("optimal", "auto")
SHARES = (1 / 2, 1 / 4, 1 / 8)

CASES = (
    ModelCase(name="resnet50", shape=(2, 3, 160, 160), frozen=False),
    ModelCase(name="resnet50", shape=(2, 3, 160, 160), frozen=True),
    ModelCase(name="densenet121", shape=(2, 3, 160, 160), frozen=False),
    ModelCase(name="densenet121", shape=(2, 3, 160, 160), frozen=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Projection of a plan and measurement of its step; bytes are in addition to resident ones."""

    model: str
    strategy: str
    share: float
    """That was asked for."""
    least_share: float | None
    """The least that the strategy has a plan for, where it is more: that one ran."""
    activation_bytes: int
    gradient_bytes: int
    budget_bytes: int
    projected_bytes: int
    metered_bytes: int
    planned_flops: int
    counted_flops: int
    plain_flops: int
    worst_error: float
    worst_tensor: str

    @property
    def holds(self) -> bool:
        """True if bytes, FLOPs and gradients are as projected."""
        are_bytes = self.metered_bytes == self.projected_bytes <= self.budget_bytes
        return are_bytes and self.planned_flops == self.counted_flops and self.worst_error <= TOLERANCE

    def cells(self) -> list[str]:
        """The row of the table."""
        ran = self.share if self.least_share is None else self.least_share
        return [
            self.model,
            self.strategy,
            f"{ran:.3f}{'' if self.least_share is None else ' (least)'}",
            mib(self.budget_bytes),
            mib(self.projected_bytes),
            mib(self.metered_bytes),
            f"{self.planned_flops / self.plain_flops:.4f}",
            f"{self.counted_flops / self.plain_flops:.4f}",
            "yes" if self.planned_flops == self.counted_flops else "no",
            f"{self.worst_error:.0e}",
        ]


HEADERS = (
    "network",
    "strategy",
    "of the activations",
    "budget, MiB",
    "projected",
    "metered",
    "FLOPs / plain, planned",
    "counted",
    "equal",
    "worst error",
)


def build(case: ModelCase) -> nn.Module:
    """The network in float64, in training mode."""
    torch.manual_seed(0)
    models = load_models()
    if case.name == "resnet50":
        model: nn.Module = models.resnet50(1000)
    else:
        model = ModelName(text=f"torchvision:{case.name}", place="network", options_place="build").factory().make({})
    return (models.freeze_norm(model) if case.frozen else model).double().train()


def state(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Results of a step: output, gradients, running statistics."""
    buffers = {f"{name} (buffer).": value.double().clone() for name, value in model.named_buffers()}
    return {**collect(model, output), **buffers}


def step(run: nn.Module, model: nn.Module, x: Tensor, gradient: Tensor) -> tuple[dict[str, Tensor], int]:
    """One step: its results, and its peak of bytes in addition to the parameters; the input counts."""
    model.zero_grad(set_to_none=True)
    with sft.measure_peak("cpu") as peak:
        output = run(x.clone())
        output.backward(gradient.clone())
    return state(model, output.detach()), peak.num_bytes


def rows_of(case: ModelCase) -> list[Row]:
    """All strategies at all shares."""
    model = build(case)
    x, gradient = torch.randn(case.shape, dtype=torch.float64), torch.randn(case.shape[0], 1000, dtype=torch.float64)
    eager = copy.deepcopy(model)
    reference, _ = step(eager, eager, x, gradient)
    plain = sft.plan(model, x, budget=2**62, options=sft.Options(strategy="none"))
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    activation_bytes = plain.projected_peak_bytes - gradient_bytes
    found, done = [], set()
    for strategy in STRATEGIES:
        for share in SHARES:
            budget, least_share = plain.resident_bytes + gradient_bytes + int(share * activation_bytes), None
            options = sft.Options(strategy=strategy)
            own = copy.deepcopy(model)
            try:
                net: Any = sft.compile(own, x, budget=budget, options=options)
            except sft.BudgetError as error:
                assert error.needed_bytes is not None
                budget = error.needed_bytes
                if (strategy, budget) in done:
                    continue
                net = sft.compile(own, x, budget=budget, options=options)
                least_share = (budget - plain.resident_bytes - gradient_bytes) / activation_bytes
            done.add((strategy, budget))
            first, metered = step(net, own, x, gradient)
            plan = net.plan
            counter = FlopCounterMode(display=False)
            with counter:
                step(net, own, x, gradient)
            counted = counter.get_total_flops()
            worst, where = worst_difference(reference, first)
            found.append(
                Row(
                    model=case.label,
                    strategy=strategy,
                    share=share,
                    least_share=least_share,
                    activation_bytes=activation_bytes,
                    gradient_bytes=gradient_bytes,
                    budget_bytes=budget - plain.resident_bytes,
                    projected_bytes=plan.projected_peak_bytes,
                    metered_bytes=metered,
                    planned_flops=plan.flops,
                    counted_flops=counted,
                    plain_flops=plan.plain_flops,
                    worst_error=worst,
                    worst_tensor=where,
                )
            )
    return found


def main() -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--networks", nargs="+", default=sorted({case.name for case in CASES}), help="resnet50, densenet121 (torchvision's)"
    )
    add_common_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console()
    cases = [case for case in CASES if case.name in args.networks]
    rows = [row for case in track(cases, description="executing", console=console) for row in rows_of(case)]
    table = Table(title="Executed in float64", headers=HEADERS, rows=[row.cells() for row in rows])
    raw: dict[str, Any] = {"environment": environment(args.threads), "rows": [asdict(row) for row in rows]}
    notes = (__doc__ or "").partition("\n\n")[2].rpartition(" Exits")[0].strip()
    written = write_results(result_stem(args.out, "executing"), raw, [table], notes, None)
    console.print(table.terminal())
    console.print(written)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
