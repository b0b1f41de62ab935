"""Time of a training step over a ladder of budgets, from near the smallest one to that of the untiled step.

A larger budget must never give a slower step. For a VGG-like body, ResNet-18 and a U-Net, norm statistics frozen: one process for each
distinct plan and for plain PyTorch in both of its memory layouts, all taking turns in each round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from harness.cases import PlanNumbers, describe_plan, load_models
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import Steps, StepWorker, call_in_process
from rich.console import Console
from torch import Tensor, nn

import sft

#: Constructors of the networks: each returns a module with one tensor as result.
NETWORKS: Mapping[str, Callable[[Any], nn.Module]] = {
    "VGG-like": lambda models: models.freeze_norm(models.vgg16(num_classes=10, width=16)).features,
    "ResNet-18": lambda models: models.freeze_norm(models.resnet18(num_classes=10)).features,
    "U-Net": lambda models: models.unet(num_classes=2, levels=4, width=16),
}
#: Steps slower than those of a smaller budget by more than this share are marked.
_SLOWER = 0.05
_PLAIN = ("plain", "plain, channels last")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCase:
    """One network under one budget, or plain PyTorch."""

    network: str
    size_px: int
    threads: int
    budget_bytes: int | None = None
    """None: plain PyTorch."""
    channels_last: bool = False
    """Memory layout of plain PyTorch."""

    @property
    def label(self) -> str:
        """The case in the first column of a table."""
        return _PLAIN[self.channels_last] if self.budget_bytes is None else f"{mib(self.budget_bytes)} MiB"


@dataclass(slots=True, kw_only=True)
class BudgetRecord:
    """A case with its plan and its rounds."""

    case: BudgetCase
    plan: PlanNumbers | None = None
    seconds: list[float]

    @property
    def median_seconds(self) -> float:
        """Median of the rounds."""
        return median(self.seconds)


def build_case(case: BudgetCase) -> tuple[nn.Module, Tensor]:
    """The network of a case and its image."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    body, x = NETWORKS[case.network](load_models()), torch.randn(1, 3, case.size_px, case.size_px)
    if case.channels_last:
        converted: Any = body  # the stubs of PyTorch lack the argument
        converted.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    return body, x


def plan_ladder(case: BudgetCase, num_budgets: int, from_least: float) -> list[tuple[int, PlanNumbers]]:
    """Distinct plans over budgets in a geometric sequence, with the least budget of each.

    Args:
        case: the network and its image.
        num_budgets: length of the sequence.
        from_least: its first budget, over the smallest one; the last is that of the untiled step.
    """
    body, x = build_case(case)
    shape = tuple(x.shape)
    untiled = sft.plan(body, shape, budget=2**50, options=sft.Options(strategy="none")).total_bytes
    try:
        least = sft.plan(body, shape, budget=1).total_bytes
    except sft.BudgetError as error:
        least = error.needed_bytes
    least = min(untiled, round(from_least * least))
    ladder: list[tuple[int, PlanNumbers]] = []
    for index in range(num_budgets):
        budget_bytes = round(least * (untiled / least) ** (index / max(1, num_budgets - 1)))
        numbers = describe_plan(sft.plan(body, shape, budget=budget_bytes))
        if all(numbers.segments != other.segments or numbers.flops != other.flops for _, other in ladder):
            ladder.append((budget_bytes, numbers))
    return ladder


def _ladder_of(question: tuple[BudgetCase, int, float]) -> list[tuple[int, PlanNumbers]]:
    return plan_ladder(*question)


def start_budget(case: BudgetCase) -> Steps:
    """Build a case for timing and take its first step."""
    body, x = build_case(case)
    net: Any = body
    if case.budget_bytes is not None:
        net = sft.compile(body, tuple(x.shape), budget=case.budget_bytes)

    def step() -> None:
        net(x).sum().backward()

    def reset() -> None:
        body.zero_grad(set_to_none=True)

    step()
    reset()
    return Steps(step=step, reset=reset)


def time_records(records: Sequence[BudgetRecord], num_rounds: int, num_seconds: float) -> None:
    """Rounds in which all cases take turns of two steps, of which the second counts; each round begins with another case."""
    deadline = time.monotonic() + num_seconds
    with ExitStack() as stack:
        workers = [stack.enter_context(StepWorker(record.case, start_budget)) for record in records]
        for number in range(num_rounds):
            started = time.monotonic()
            for turn in range(len(records)):
                index = (turn + number) % len(records)
                workers[index].step()  # the first one touches fresh memory: that of the last turn went back to the system
                records[index].seconds.append(workers[index].step())
            if 2 * time.monotonic() - started > deadline:  # the next round would end later
                break


def over_smaller_budgets(records: Sequence[BudgetRecord]) -> list[float | None]:
    """Median of each plan's step over the least median of the plans of smaller budgets; None for plain PyTorch and the smallest budget.

    >>> cases = [BudgetCase(network="U-Net", size_px=8, threads=1, budget_bytes=size) for size in (3, 4, 5)]
    >>> over_smaller_budgets([BudgetRecord(case=case, seconds=[value]) for case, value in zip(cases, (2.0, 1.0, 1.5))])
    [None, 0.5, 1.5]
    """
    ratios: list[float | None] = []
    for record in records:
        budget_bytes = record.case.budget_bytes
        smaller = [
            other.median_seconds
            for other in records
            if budget_bytes is not None and other.case.budget_bytes is not None and other.case.budget_bytes < budget_bytes
        ]
        ratios.append(record.median_seconds / min(smaller) if smaller else None)
    return ratios


_HEADERS = ("budget", "projected MiB", "strips", "FLOPs x plain", "step, s [least, most]", "x plain", "x smaller budgets")


def ladder_table(records: Sequence[BudgetRecord]) -> Table:
    """Table of one network."""
    plain_seconds = min((record.median_seconds for record in records if record.case.budget_bytes is None), default=None)
    rows = []
    for record, ratio in zip(records, over_smaller_budgets(records), strict=True):
        plan = record.plan
        mark = "" if ratio is None or ratio <= 1 + _SLOWER else " slower"
        rows.append(
            [
                record.case.label,
                "" if plan is None else mib(plan.total_bytes),
                "" if plan is None else plan.strips,
                "" if plan is None else f"{plan.flops / plan.plain_flops:.3f}",
                f"{record.median_seconds:.2f} [{min(record.seconds):.2f}, {max(record.seconds):.2f}]",
                "" if plain_seconds is None else f"{record.median_seconds / plain_seconds:.2f}",
                "" if ratio is None else f"{ratio:.2f}{mark}",
            ]
        )
    case = records[0].case
    return Table(title=f"{case.network}, {case.size_px} x {case.size_px} px", headers=_HEADERS, rows=rows)


_NOTES = """\
One training step, batch 1, float32, norm statistics frozen. One process for each plan; the plans and plain PyTorch take turns of two steps.
The second one counts: it follows another one, as in training. *x plain*: over the faster one of plain PyTorch's two memory layouts. *x
smaller budgets*: over the fastest step of a smaller budget."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--size", type=positive_int, default=1536, help="height and width of the image, pixels (default 1536)")
    parser.add_argument("--budgets", type=positive_int, default=8, help="most budgets of each network (default 8)")
    parser.add_argument("--from-least", type=float, default=1.5, help="first budget, over the smallest that has a plan (default 1.5)")
    parser.add_argument("--rounds", type=positive_int, default=7, help="most rounds (default 7)")
    parser.add_argument("--minutes", type=float, default=5, help="minutes of rounds for each network (default 5)")
    add_common_arguments(parser)
    args = parser.parse_args(arguments)
    console, tables, results = Console(), [], []
    for network in args.networks:
        case = BudgetCase(network=network, size_px=args.size, threads=args.threads)
        console.print("plan", network, markup=False)
        records = [
            BudgetRecord(case=replace(case, budget_bytes=budget_bytes), plan=plan, seconds=[])
            for budget_bytes, plan in call_in_process(_ladder_of, (case, args.budgets, args.from_least))
        ]
        records += [BudgetRecord(case=replace(case, channels_last=is_last), seconds=[]) for is_last in (False, True)]
        time_records(records, args.rounds, 60 * args.minutes)
        tables.append(ladder_table(records))
        results += [asdict(record) for record in records]
        console.print(tables[-1].terminal())
        raw = {
            "environment": environment(args.threads),
            "settings": {name: value for name, value in vars(args).items() if name != "out"},
            "results": results,
        }
        written = write_results(result_stem(args.out, "budgets"), raw, tables, _NOTES, None)
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
