"""Plans for a GPU, made on a CPU: modelled time, and simulated reserved memory with and without the steps' memory pool.

Nothing runs on a GPU here. Times are those of :mod:`sft.planner.cost.gpu_time`, with rates measured on an H100, in bfloat16 with
channels-last images. Reserved
memory is that of the simulated caching allocator (:mod:`sft.runtime.caching_allocator`) with its default settings. A test compares new
plans with the newest result.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from unittest.mock import patch

import torch
from harness.cases import load_models
from harness.report import Table, add_common_arguments, environment, result_stem, write_results
from rich.console import Console
from torch import nn

import sft
from sft.api.plan_search import PlanSearch
from sft.planner.measured.allocation_trace import record_step
from sft.planner.measured.fitted_plan import FittedPlan
from sft.planner.measured.reserved_memory import recorded_tensors, resident_sizes, simulate_reserved_memory
from sft.planner.problem import PlanningProblem
from sft.runtime.caching_allocator import AllocatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network at one size in one budget."""

    network: str
    size_px: int
    budget: str
    frozen_norms: bool = False

    @property
    def name(self) -> str:
        """Short name."""
        return f"{self.network}{' (frozen)' if self.frozen_norms else ''} {self.size_px} {self.budget}"

    @property
    def cells(self) -> list[str]:
        """The first cells of a table's row: network, size, budget."""
        return [f"{self.network}{', frozen norms' if self.frozen_norms else ''}", f"{self.size_px:,}²", self.budget]


CASES = (
    Case(network="vgg16", size_px=2048, budget="1.2GiB"),
    Case(network="vgg16", size_px=8192, budget="8GiB"),
    Case(network="vgg16", size_px=20_480, budget="11GiB"),
    Case(network="resnet18", size_px=2048, budget="400MiB", frozen_norms=True),
    Case(network="resnet18", size_px=2048, budget="250MiB", frozen_norms=True),
    Case(network="resnet18", size_px=20_480, budget="11GiB", frozen_norms=True),
    Case(network="resnet18", size_px=2048, budget="4GiB"),
    Case(network="resnet18", size_px=2048, budget="500MiB"),
    Case(network="resnet18", size_px=2048, budget="350MiB"),
    Case(network="resnet18", size_px=20_480, budget="40GiB"),
    Case(network="resnet18", size_px=20_480, budget="28GiB"),
    Case(network="unet", size_px=2048, budget="700MiB"),
    Case(network="unet", size_px=8192, budget="8GiB"),
    Case(network="unet", size_px=20_480, budget="40GiB"),
    Case(network="unet", size_px=20_480, budget="28GiB"),
    Case(network="resnet18", size_px=2048, budget="450MiB"),
    Case(network="resnet18", size_px=2048, budget="300MiB"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The plan of a case.

    Attributes:
        case: the case.
        seconds: modelled seconds of a step.
        plain_seconds: modelled seconds of the untiled step.
        flops_ratio: FLOPs over plain's.
        tensor_bytes: bytes of all tensors at the peak, resident ones and those of recorded passes included.
        reserved_bytes: bytes that the allocator reserves.
        reserved_without_pool_bytes: the same for a step in the default pool.
        host_bytes: bytes of values that wait on the host.
        replays_passes: true if whole passes are recorded as CUDA graphs, which have a pool of their own.
    """

    case: Case
    seconds: float
    plain_seconds: float
    flops_ratio: float
    tensor_bytes: int
    reserved_bytes: int
    reserved_without_pool_bytes: int
    host_bytes: int
    replays_passes: bool


def build(case: Case) -> nn.Module:
    """The network on the meta device."""
    models = load_models()
    with torch.device("meta"):
        model: nn.Module = getattr(models, case.network)(num_classes=10)
    model = model.to(torch.bfloat16)
    if case.frozen_norms:
        models.freeze_norm(model)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]  # torch's stub lacks it


def fitted_plan(model: nn.Module, shape: tuple[int, ...], budget: str) -> tuple[sft.Plan, FittedPlan]:
    """A plan, with its problem and region."""
    plans: list[FittedPlan] = []
    fit = PlanSearch.fit

    def recorded(search: PlanSearch, problem: PlanningProblem) -> FittedPlan:
        plans.append(fit(search, problem))
        return plans[-1]

    with patch.object(PlanSearch, "fit", recorded):
        plan = sft.plan(model, shape, budget=budget, device="cuda")
    segments = [segment.nodes for segment in plan.segments]  # of the form of the graph that was chosen
    return plan, next(fitted for fitted in reversed(plans) if [choice.nodes for choice in fitted.projected.choices] == segments)


def measure(case: Case) -> Result:
    """Plan a case."""
    model, shape = build(case), (1, 3, case.size_px, case.size_px)
    plan, fitted = fitted_plan(model, shape, case.budget)
    plain = sft.plan(model, shape, budget="4000GiB", device="cuda", options=sft.Options(strategy="none"))
    trace = record_step(fitted.problem, fitted.projected.region)
    recorded = recorded_tensors(fitted.problem).sizes if plan.replays_passes else ()
    without_pool = simulate_reserved_memory(trace, AllocatorSettings(), resident=[*resident_sizes(fitted.problem), *recorded])
    return Result(
        case=case,
        seconds=plan.estimated_seconds,
        plain_seconds=plain.estimated_seconds,
        flops_ratio=plan.redundancy,
        tensor_bytes=plan.total_bytes - plan.overhead_bytes + sum(recorded),
        reserved_bytes=plan.projected_reserved_bytes,
        reserved_without_pool_bytes=without_pool.reserved_bytes,
        host_bytes=plan.host_bytes,
        replays_passes=plan.replays_passes,
    )


HEADERS = (
    "network",
    "size",
    "budget",
    "model ms",
    "x plain",
    "FLOPs x plain",
    "reserved GiB",
    "x tensors",
    "x tensors, default pool",
    "host GiB",
    "CUDA graphs",
)


def cells(result: Result) -> list[str]:
    """The row of the table."""
    return [
        *result.case.cells,
        f"{1e3 * result.seconds:.1f}",
        f"{result.seconds / result.plain_seconds:.2f}",
        f"{result.flops_ratio:.3f}",
        f"{result.reserved_bytes / 2**30:.2f}",
        f"{result.reserved_bytes / result.tensor_bytes:.3f}",
        f"{result.reserved_without_pool_bytes / result.tensor_bytes:.3f}",
        f"{result.host_bytes / 2**30:.2f}",
        "of passes" if result.replays_passes else "",
    ]


def main() -> None:
    """Plan all cases and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for case in CASES:
        results.append(measure(case))
        Console().print("  ".join(cells(results[-1])), highlight=False)
    notes = (
        "Nothing ran on a GPU here: modelled seconds of an H100 (measured rates) in bfloat16, channels last, and reserved bytes of the "
        "simulated allocator."
    )
    raw = {"environment": environment(args.threads), "results": [asdict(result) for result in results]}
    stem = result_stem(args.out, "gpu-plans")
    write_results(stem, raw, [Table(title="Plans for a GPU", headers=HEADERS, rows=[cells(result) for result in results])], notes, None)


if __name__ == "__main__":
    main()
