"""How long planning takes at sizes far above the memory of the machine that plans.

The model lives on the meta device, so nothing is allocated. Timed are a first plan (capture, analysis and solving), a
second size of the same compiled object (the analysis is done once per model; a size only evaluates it), and a 100,000
x 100,000 image, where the answer is a plan or the smallest budget that works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness.cases import PlanNumbers, describe_plan, load_models
from harness.report import Table, add_common_arguments, environment, result_stem, write_results
from rich.console import Console

import sft


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One planning, and what came of it."""

    what: str
    height: int
    width: int
    seconds: float
    plan: PlanNumbers | None = None
    """None when no plan fits the budget."""
    needed_bytes: int | None = None
    """The smallest budget that works, when none fits."""
    message: str = ""

    def cells(self) -> list[str]:
        """The row of the table."""
        cells = [self.what, f"{self.height:,} x {self.width:,}", f"{self.seconds:.2f}"]
        if self.plan is None:
            needed = "" if self.needed_bytes is None else f"smallest budget {self.needed_bytes / 2**30:.2f} GiB"
            return [*cells, "no plan", needed, "", ""]
        peak, total = self.plan.projected_peak_bytes / 2**30, self.plan.total_bytes / 2**30
        return [
            *cells,
            f"{peak:.2f}",
            f"{total:.2f}",
            f"{self.plan.flops / self.plan.plain_flops:.3f}",
            self.plan.strips,
        ]


HEADERS = ("what", "size", "seconds", "projected peak GiB", "total GiB", "FLOPs / plain", "plan")


def timed_plan(what: str, shape: tuple[int, int, int, int], make: Callable[[], sft.Plan]) -> Planned:
    """Time one planning; a budget that is too small is an answer, not a failure."""
    started = time.perf_counter()
    try:
        plan = make()
    except sft.BudgetError as error:
        seconds = time.perf_counter() - started
        return Planned(
            what=what,
            height=shape[2],
            width=shape[3],
            seconds=seconds,
            needed_bytes=error.needed_bytes,
            message=str(error),
        )
    seconds = time.perf_counter() - started
    return Planned(what=what, height=shape[2], width=shape[3], seconds=seconds, plan=describe_plan(plan))


def size(text: str) -> tuple[int, int, int, int]:
    """An argparse type: `20480x16384` (height x width) as an input shape."""
    height, separator, width = text.partition("x")
    if not separator or int(height) < 1 or int(width) < 1:
        raise argparse.ArgumentTypeError(f"write height x width, such as 20480x16384, got {text!r}")
    return (1, 3, int(height), int(width))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time to plan VGG-16 with a pooled classifier on huge images.")
    parser.add_argument("--budget", default="11GiB")
    parser.add_argument("--first", type=size, default="20480x20480")
    parser.add_argument("--second", type=size, default="16384x20480", help="planned by the same compiled object")
    parser.add_argument("--huge", type=size, default="100000x100000")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 when the first size has no plan."""
    args = parse_arguments()
    console = Console()
    torch.set_num_threads(args.threads)
    stem = result_stem(args.out, "planning")
    with torch.device("meta"):
        model = load_models().vgg16(num_classes=1000)
    results = [timed_plan("sft.plan, cold", args.first, lambda: sft.plan(model, args.first, budget=args.budget))]
    console.print(f"first: {results[0].seconds:.2f} s")
    if results[0].plan is not None:
        started = time.perf_counter()
        net = sft.compile(model, args.first, budget=args.budget)
        compile_seconds = time.perf_counter() - started
        numbers = describe_plan(net.plan)
        height, width = args.first[2:]
        results += [
            Planned(what="sft.compile, warm", height=height, width=width, seconds=compile_seconds, plan=numbers),
            timed_plan("plan_for, second size", args.second, lambda: net.plan_for(args.second)),
        ]
        console.print(results[0].plan.explained, markup=False)
    results.append(timed_plan("sft.plan, huge", args.huge, lambda: sft.plan(model, args.huge, budget=args.budget)))
    title = f"Planning VGG-16 with a pooled classifier, budget {args.budget}"
    table = Table(title=title, headers=HEADERS, rows=[result.cells() for result in results])
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "results": [asdict(result) for result in results],
    }
    notes = "One process, in this order; the first line includes one-time imports. The model is on the meta device."
    written = write_results(stem, raw, [table], notes, None)
    console.print(table.terminal())
    for result in results:
        if result.message:
            console.print(result.message, markup=False)
    console.print(written)
    return int(results[0].plan is None)


if __name__ == "__main__":
    raise SystemExit(main())
