"""Planning time at sizes far above the memory of the planning machine.

The model lives on the meta device, so nothing is allocated. Timed are a first plan (capture, analysis and solving), a second and a third
size of the same compiled object (the analysis is done once per model; a size only evaluates it), and VGG-16 at 100,000 x 100,000 px, for
which the result is a plan or the smallest budget that works. Batch norms in training mode end runs of strips; deep networks have hundreds
of them. ResNet-50 is for comparison: images of ordinary size, a budget in which plain PyTorch fits. Each network plans in a process of its
own. Without torchvision (in the ``zoo`` extra) its networks are listed as left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from harness.cases import PlanNumbers, describe_plan, load_models
from harness.report import Table, add_common_arguments, environment, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console
from torch import nn

import sft
from sft.common.model_zoo import ModelName

Size = tuple[int, int, int, int]

_HUGE = ((1, 3, 20_480, 20_480), (1, 3, 16_384, 20_480), (1, 3, 18_016, 17_024))
_ORDINARY = ((1, 3, 512, 512), (1, 3, 480, 640), (1, 3, 427, 640))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A network, and its default sizes and budget.

    Attributes:
        budget: of the device.
        sizes: of the first plan, and of others of the same compiled object.
        of_torchvision: its name in torchvision; ``None`` for other networks.
        frozen: true if norms use their running statistics.
    """

    budget: str
    sizes: tuple[Size, ...] = _HUGE
    of_torchvision: str | None = None
    frozen: bool = False


NETWORKS = {
    "vgg16": Case(budget="11GiB"),
    "unet": Case(budget="24GiB"),
    "resnet152": Case(budget="24GiB", of_torchvision="resnet152", frozen=True),
    "densenet201": Case(budget="24GiB", of_torchvision="densenet201", frozen=True),
    "resnet152-training": Case(budget="24GiB", of_torchvision="resnet152"),
    "densenet201-training": Case(budget="24GiB", of_torchvision="densenet201"),
    "resnet50": Case(budget="11GiB", sizes=_ORDINARY, of_torchvision="resnet50"),
}
_ORDER = ("second", "third", "fourth", "fifth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Sizes and budget that one process plans."""

    network: str
    budget: str
    sizes: tuple[Size, ...]
    huge: Size | None
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One planning: its seconds, and the plan or the needed bytes."""

    network: str
    budget: str
    what: str
    height: int
    width: int
    seconds: float
    processor_seconds: float
    plan: PlanNumbers | None = None
    """None if no plan fits the budget."""
    needed_bytes: int | None = None
    """Smallest budget with a plan, if none fits."""
    message: str = ""

    def cells(self) -> list[str]:
        """The row of the table."""
        seconds = [f"{self.seconds:.2f}", f"{self.processor_seconds:.2f}"]
        cells = [self.network, self.budget, self.what, f"{self.height:,} x {self.width:,}", *seconds]
        if self.plan is None:
            needed = "" if self.needed_bytes is None else f"smallest budget {self.needed_bytes / 2**30:.2f} GiB"
            return [*cells, "no plan", needed, "", ""]
        peak, total = self.plan.projected_peak_bytes / 2**30, self.plan.total_bytes / 2**30
        return [*cells, f"{peak:.2f}", f"{total:.2f}", f"{self.plan.flops / self.plan.plain_flops:.3f}", self.plan.strips]


HEADERS = (
    "network",
    "budget",
    "what",
    "size",
    "seconds",
    "of the processor",
    "projected peak GiB",
    "total GiB",
    "FLOPs / plain",
    "plan",
)


def build(network: str) -> nn.Module:
    """The network on the meta device, in training mode."""
    models = load_models()
    with torch.device("meta"):
        if network == "vgg16":
            model: nn.Module = models.vgg16(num_classes=1000)
        elif network == "unet":
            model = models.unet(1)
        else:
            case = NETWORKS[network]
            model = ModelName(text=f"torchvision:{case.of_torchvision}", place="network", options_place="build").factory().make({})
            model = models.freeze_norm(model) if case.frozen else model
    return model.train()


def timed(question: Question, what: str, shape: Size, make: Callable[[], sft.Plan]) -> Planned:
    """Time one planning; for a budget that is too small, the result is the needed bytes."""
    outcome: dict[str, Any] = {}
    started, began = time.perf_counter(), time.process_time()
    try:
        plan = make()
    except sft.BudgetError as error:
        outcome = {"needed_bytes": error.needed_bytes, "message": str(error)}
    seconds, processor_seconds = time.perf_counter() - started, time.process_time() - began
    if not outcome:
        outcome = {"plan": describe_plan(plan)}
    return Planned(
        network=question.network,
        budget=question.budget,
        what=what,
        height=shape[2],
        width=shape[3],
        seconds=seconds,
        processor_seconds=processor_seconds,
        **outcome,
    )


def answer(question: Question) -> list[Planned]:
    """All plannings of one network; call it in a process of its own."""
    torch.set_num_threads(question.threads)
    model = build(question.network)
    first_size, *others = question.sizes
    first = timed(question, "sft.plan, cold", first_size, lambda: sft.plan(model, first_size, budget=question.budget))
    plannings = [first]
    if first.plan is not None:
        nets: list[Any] = []

        def compiled() -> sft.Plan:
            nets.append(sft.compile(model, first_size, budget=question.budget))
            plan: sft.Plan = nets[0].plan
            return plan

        plannings.append(timed(question, "sft.compile, warm", first_size, compiled))
        for number, size in zip(_ORDER, others, strict=False):
            plannings.append(timed(question, f"plan_for, {number} size", size, partial(nets[0].plan_for, size)))
    if question.huge is not None:
        huge = question.huge
        plannings.append(timed(question, "sft.plan, huge", huge, lambda: sft.plan(model, huge, budget=question.budget)))
    return plannings


def size_of(text: str) -> Size:
    """An argparse type: `20480x16384` (height x width) as an input shape."""
    height, separator, width = text.partition("x")
    if not separator or int(height) < 1 or int(width) < 1:
        raise argparse.ArgumentTypeError(f"write height x width, such as 20480x16384, got {text!r}")
    return (1, 3, int(height), int(width))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time to plan networks on huge images.")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    budgets = ", ".join(f"{name} {case.budget}" for name, case in NETWORKS.items())
    parser.add_argument("--budget", help=f"for all networks (default: {budgets})")
    parser.add_argument("--sizes", nargs="+", type=size_of, help="for all networks: the first, and others of the same compiled object")
    parser.add_argument("--huge", type=size_of, default="100000x100000", help="for VGG-16 alone")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 when a first size has no plan."""
    args = parse_arguments()
    console = Console()
    stem = result_stem(args.out, "planning")
    has_torchvision = importlib.util.find_spec("torchvision") is not None
    left_out = [name for name in args.networks if NETWORKS[name].of_torchvision and not has_torchvision]
    results: list[Planned] = []
    for network in args.networks:
        if network in left_out:
            continue
        huge = args.huge if network == "vgg16" else None
        case = NETWORKS[network]
        sizes = tuple(args.sizes or case.sizes)[: len(_ORDER) + 1]
        question = Question(network=network, budget=args.budget or case.budget, sizes=sizes, huge=huge, threads=args.threads)
        try:
            plannings: list[Planned] = call_in_process(answer, question)
        except WorkerError as error:
            console.print(f"{network}: {error.kind}: {error}", markup=False)
            return 1
        results += plannings
        console.print(*(f"{network}, {each.what}: {each.seconds:.2f} s" for each in plannings), sep="\n", markup=False)
    table = Table(title="Planning", headers=HEADERS, rows=[result.cells() for result in results])
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "results": [asdict(result) for result in results],
    }
    notes = (
        "A process for each network, in this order; its first line includes one-time imports, the first two the capture. The models are on "
        "the meta device, in training mode; norms of resnet152 and densenet201 use their running statistics, others the batch's."
    )
    if left_out:
        notes += f" Left out, as torchvision is not installed: {', '.join(left_out)}."
    written = write_results(stem, raw, [table], notes, None)
    console.print(table.terminal())
    for result in results:
        if result.message:
            console.print(result.message, markup=False)
    console.print(written)
    return int(any(result.plan is None for result in results if result.what == "sft.plan, cold"))


if __name__ == "__main__":
    raise SystemExit(main())
