"""Streamed weights: the least device memory of a training step with AdamW, and its time.

For each network: the smallest budget that has a plan with resident weights, gradients and state, and with weights that are streamed from
the host and updated during the backward pass (projected, float32, values may wait on the host in both). The last network is run with each
at its own smallest budget: bytes metered in forward and backward, which with streamed weights is the whole step, and the ratio of step
times in one round. tests/optim/test_streamed_optimizer.py compares updates with `torch.optim`, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness.cases import load_models
from harness.report import Table, add_common_arguments, environment, mib, result_stem, write_results
from rich.console import Console
from torch import Tensor, nn

import sft

#: Host budget of both plans.
_HOST = "64GiB"
#: Networks and their inputs; the last one is run.
CASES = (("vgg16", (1, 3, 224, 224)), ("resnet18", (1, 3, 256, 256)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The smallest budgets of a network."""

    model: str
    parameter_bytes: int
    resident_bytes: int
    streamed_bytes: int
    resident_redundancy: float
    streamed_redundancy: float

    def cells(self) -> list[str]:
        """The row of the table."""
        return [
            self.model,
            mib(self.parameter_bytes),
            mib(self.resident_bytes),
            mib(self.streamed_bytes),
            f"{self.streamed_bytes / self.resident_bytes:.2f}",
            f"{self.resident_redundancy:.2f}",
            f"{self.streamed_redundancy:.2f}",
        ]


def build(name: str) -> nn.Module:
    """A network in training mode."""
    torch.manual_seed(0)
    model: nn.Module = getattr(load_models(), name)(1000)
    return model.train()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A network at the smallest budget, and its optimizer."""

    net: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def plan(self) -> sft.Plan:
        """Plan of the last call."""
        plan: sft.Plan = self.net.plan  # type: ignore[assignment]
        return plan

    def differentiate(self, x: Tensor) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad()
        self.net(x).square().mean().backward()

    def step(self, x: Tensor) -> None:
        """One training step."""
        self.differentiate(x)
        self.optimizer.step()


def trained(name: str, shape: tuple[int, ...], weights: str) -> Trained:
    """A network with resident or streamed weights."""
    model, options = build(name), sft.Options(weights=weights, host_budget=_HOST)
    common: dict[str, Any] = {"options": options}
    optimizer: torch.optim.Optimizer
    if weights == "resident":
        optimizer = common["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    else:
        optimizer = sft.StreamedOptimizer(sft.compile(model, shape, budget="1TiB", **common), "adamw", lr=1e-3, weight_decay=1e-2)
    try:
        net = sft.compile(model, shape, budget=1, **common)
    except sft.BudgetError as error:
        assert error.needed_bytes is not None
        net = sft.compile(model, shape, budget=error.needed_bytes, **common)
    return Trained(net=net, optimizer=optimizer)


def row_of(name: str, resident: Trained, streamed: Trained) -> Row:
    """Bytes and FLOPs of both plans."""
    return Row(
        model=f"{name} {'x'.join(map(str, resident.plan.input_shapes[0]))}",
        parameter_bytes=sum(p.nbytes for p in resident.net.parameters()),
        resident_bytes=resident.plan.total_bytes,
        streamed_bytes=streamed.plan.total_bytes,
        resident_redundancy=resident.plan.redundancy,
        streamed_redundancy=streamed.plan.redundancy,
    )


def executed(shape: tuple[int, ...], resident: Trained, streamed: Trained, rounds: int) -> dict[str, Any]:
    """Steps with resident and with streamed weights, in turns."""
    x = torch.randn(shape)
    numbers: dict[str, Any] = {}
    for label, each in (("resident", resident), ("streamed", streamed)):
        each.step(x)  # the optimizer's state is there from now on
        with sft.measure_peak("cpu") as peak:
            each.differentiate(x.clone())
        each.optimizer.step()
        numbers[f"{label}_metered_bytes"], numbers[f"{label}_projected_bytes"] = peak.num_bytes, each.plan.projected_peak_bytes
    ratios = []
    for number in range(rounds):
        seconds = {}
        for label, each in sorted({"resident": resident, "streamed": streamed}.items(), reverse=bool(number % 2)):
            started = time.perf_counter()
            each.step(x)
            seconds[label] = time.perf_counter() - started
        ratios.append(seconds["streamed"] / seconds["resident"])
    return {**numbers, "ratios": ratios}


def main() -> int:
    """Plan all, run one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, 0 for none (default 5)")
    add_common_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows, numbers = [], {}
    for name, shape in CASES:
        both = trained(name, shape, "resident"), trained(name, shape, "stream")
        rows.append(row_of(name, *both))
        if (name, shape) == CASES[-1]:
            numbers = executed(shape, *both, args.rounds)
    headers = ("network", "parameters, MiB", "smallest budget, resident", "streamed", "ratio", "FLOPs / plain, resident", "streamed")
    table = Table(title="Smallest budgets", headers=headers, rows=[row.cells() for row in rows])
    ran = Table(
        title=f"{rows[-1].model}, run",
        headers=("weights", "projected, MiB", "metered", "time of a step, ratio [least, most]"),
        rows=[
            ["resident", mib(numbers["resident_projected_bytes"]), mib(numbers["resident_metered_bytes"]), "1"],
            [
                "streamed",
                mib(numbers["streamed_projected_bytes"]),
                mib(numbers["streamed_metered_bytes"]),
                f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]" if (ratios := numbers["ratios"]) else "",
            ],
        ],
    )
    raw = {"environment": environment(args.threads), "rows": [asdict(row) for row in rows], "run": numbers}
    written = write_results(result_stem(args.out, "streamed"), raw, [table, ran], (__doc__ or "").partition("\n\n")[2].strip(), None)
    console = Console()
    console.print(table.terminal())
    console.print(ran.terminal())
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
