"""Page faults of training steps on a CPU: their time, and what a heap that keeps the pages of freed buffers saves.

glibc maps each block of more than 32 MiB on its own and unmaps it when it is freed, so the kernel clears the pages of the next one again.
With settings in the environment all blocks share one heap, which keeps its pages. Each case runs in a process of its own: plain PyTorch in
channels last, and plans in two budgets, with glibc's default and with these settings. Freed aligned blocks do not fit into holes of their
size before glibc 2.38, so the heap grows beyond the bytes in use: the table has the process's peak, too.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from unittest.mock import patch

from budgets import NETWORKS, BudgetCase, build_case
from harness.memory import peak_rss_bytes, rss_bytes
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import call_in_process
from rich.console import Console

import sft
from sft.common.byte_units import parse_bytes

#: Environment variables of glibc by the name of the heap.
HEAPS: Mapping[str, dict[str, str]] = {
    "default": {},
    "keeps pages": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)},
}

_NOTES = """\
One training step, batch 1, float32, norm statistics frozen, images channels last; a process for each row. *keeps pages*: glibc's heap never
returns pages. *projected*: bytes of tensors in addition to weights; *process*: growth of the process, its first step included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRuns:
    """Steps of a case that run in one process."""

    case: BudgetCase
    heap: str
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Medians over the steps after the first one, and the peak of the process over its size before."""

    steps: StepRuns
    seconds: float
    system_seconds: float
    faults: float
    peak_bytes: int
    projected_bytes: int | None = None


def measure(steps: StepRuns) -> Cost:
    """Run the steps of a case."""
    body, x = build_case(steps.case)
    budget = steps.case.budget_bytes
    net = body if budget is None else sft.compile(body, x.shape, budget=budget, device="cpu")
    plan = None if budget is None else sft.of(net).plan
    before, costs = rss_bytes(), []
    for _ in range(steps.num_steps + 1):
        usage, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        net(x).square().mean().backward()
        seconds, now = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        costs.append((seconds, now.ru_stime - usage.ru_stime, now.ru_minflt - usage.ru_minflt))
        body.zero_grad()
    seconds, system_seconds, faults = (median(column) for column in zip(*costs[1:], strict=True))
    return Cost(
        steps=steps,
        seconds=seconds,
        system_seconds=system_seconds,
        faults=faults,
        peak_bytes=peak_rss_bytes() - before,
        projected_bytes=None if plan is None else plan.projected_peak_bytes,
    )


def cost_table(costs: list[Cost]) -> Table:
    """One row for each process."""
    size = costs[0].steps.case.size_px
    rows = [
        (
            cost.steps.case.network,
            cost.steps.case.label,
            cost.steps.heap,
            f"{cost.seconds:.2f}",
            f"{cost.system_seconds:.2f}",
            f"{cost.faults / 1e3:,.0f}",
            "" if cost.projected_bytes is None else mib(cost.projected_bytes),
            mib(cost.peak_bytes),
        )
        for cost in costs
    ]
    headers = ("network", "budget", "heap", "step, s", "in the system, s", "faults, thousands", "projected MiB", "process MiB")
    return Table(title=f"Steps at {size} x {size} px", headers=headers, rows=tuple(rows))


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_common_arguments(parser)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS])
    parser.add_argument("--size", type=positive_int, default=1536, metavar="PX")
    parser.add_argument("--steps", type=positive_int, default=3, help="steps after the first one (default 3)")
    parser.add_argument("--budgets", nargs="+", default=["600MiB", "3GiB"])
    args = parser.parse_args(arguments)
    console, costs = Console(), list[Cost]()
    for network in args.networks:
        plain = BudgetCase(network=network, size_px=args.size, threads=args.threads, channels_last=True)
        for case in (plain, *(replace(plain, budget_bytes=parse_bytes(budget)) for budget in args.budgets)):
            for heap, variables in HEAPS.items():
                with patch.dict(os.environ, variables):
                    costs.append(call_in_process(measure, StepRuns(case=case, heap=heap, num_steps=args.steps)))
                console.print(network, case.label, heap, f"{costs[-1].seconds:.2f} s", markup=False)
    table = cost_table(costs)
    console.print(table.terminal())
    raw = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "results": [asdict(cost) for cost in costs],
    }
    console.print(write_results(result_stem(args.out, "page-faults"), raw, [table], _NOTES, None))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
