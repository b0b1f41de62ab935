"""Networks that exceed a small machine's memory in plain PyTorch, each run once.

*unet*: a training step of a U-Net of five levels and 16 channels at full resolution, within a share of what plain PyTorch needs.
Overlapping tiles with a halo as wide as the receptive field compute much of the image twice. Carried strips compute each row once in the
forward pass and once more in the backward pass.

*segmentation*: a training step of that U-Net with 32 classes and its loss, cross-entropy of labels for each pixel, in less than the bytes
of the output alone. The loss is compiled with the model, so neither the output nor its gradient is stored whole.

*activation*: inference through a convolution whose result has more than 2^31 elements, which 32-bit indices cannot count, from a uint8 file
that is read strip by strip.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.cases import PlanNumbers, describe_plan, load_models
from harness.images import write_image
from harness.memory import peak_rss_bytes
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sft
from sft.common.byte_units import format_bytes, parse_bytes
from sft.sources import ArraySource


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case."""

    name: str
    size: int
    share: float
    """Of plain's bytes: the budget of the U-Net."""
    budget_bytes: int
    """Of the others."""
    path: Path
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """One case, measured."""

    name: str
    size: int
    largest_elements: int
    """Of a single activation."""
    plain_bytes: int
    budget_bytes: int
    plan: PlanNumbers
    measured_bytes: int
    """Metered peak of the step."""
    process_bytes: int
    counted_flops: int
    seconds: float

    def cells(self) -> list[str]:
        """The row of the table."""
        cells = [self.name, f"{self.size}²", f"{self.largest_elements / 2**31:.2f}", mib(self.plain_bytes), mib(self.budget_bytes)]
        cells += [mib(self.plan.projected_peak_bytes), mib(self.measured_bytes), mib(self.process_bytes), self.plan.strips]
        return [*cells, f"{self.counted_flops / self.plan.plain_flops:.3f}", f"{self.seconds:.0f}"]


HEADERS = (
    "case",
    "size",
    "largest activation, 2^31 elements",
    "plain, MiB",
    "budget, MiB",
    "projected, MiB",
    "measured, MiB",
    "process, MiB",
    "plan",
    "FLOPs / plain",
    "s",
)


def wide_network() -> nn.Sequential:
    """A convolution to 64 channels at full resolution, and a small classifier on its result."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(4), nn.Conv2d(64, 8, 3, padding=1), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip


def run_unet(case: Case) -> Numbers:
    """A training step of the U-Net, statistics frozen; call it in a fresh process."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    models = load_models()
    model = models.unet(2, levels=5, width=16)
    models.freeze_norm(model)
    shape = (1, 3, case.size, case.size)
    plain_bytes = sft.plan(model, shape, budget=2**50, options=sft.Options(strategy="none")).total_bytes
    budget_bytes = int(case.share * plain_bytes)
    net = sft.compile(model, shape, budget=budget_bytes)
    x = torch.rand(shape)
    started = time.perf_counter()
    with FlopCounterMode(display=False) as counter, sft.measure_peak("cpu") as peak:
        loss = net(x).square().mean()
        torch.autograd.backward(loss)
    seconds = time.perf_counter() - started
    return _numbers(case, net.plan, 16 * case.size**2, plain_bytes, budget_bytes, peak.num_bytes, counter.get_total_flops(), seconds)


def run_segmentation(case: Case) -> Numbers:
    """A training step of the U-Net and a loss per pixel, statistics frozen; call it in a fresh process."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    models = load_models()
    num_classes = 32
    model = models.unet(num_classes, levels=5, width=16)
    models.freeze_norm(model)
    training = sft.nn.WithLoss(model, nn.CrossEntropyLoss())
    x, labels = torch.rand(1, 3, case.size, case.size), torch.randint(num_classes, (1, case.size, case.size))
    plain_bytes = sft.plan(training, [x, labels], budget=2**50, options=sft.Options(strategy="none")).total_bytes
    net: Any = sft.compile(training, [x, labels], budget=case.budget_bytes)
    started = time.perf_counter()
    with FlopCounterMode(display=False) as counter, sft.measure_peak("cpu") as peak:
        net(x, labels).backward()
    seconds = time.perf_counter() - started
    measured_bytes = peak.num_bytes + x.nbytes + labels.nbytes  # made before, planned for
    elements = num_classes * case.size**2
    return _numbers(case, net.plan, elements, plain_bytes, case.budget_bytes, measured_bytes, counter.get_total_flops(), seconds)


def run_activation(case: Case) -> Numbers:
    """Inference of the wide network on a file; call it in a fresh process."""
    torch.set_num_threads(case.threads)
    model = wide_network()
    source = ArraySource(np.load(case.path, mmap_mode="r"))
    with torch.no_grad():
        plain_bytes = sft.plan(model, tuple(source.shape), budget=2**50, options=sft.Options(strategy="none")).total_bytes
        net: Any = sft.compile(model, source, budget=case.budget_bytes)
        started = time.perf_counter()
        with FlopCounterMode(display=False) as counter, sft.measure_peak("cpu") as peak:
            net(source)
    seconds = time.perf_counter() - started
    return _numbers(case, net.plan, 64 * case.size**2, plain_bytes, case.budget_bytes, peak.num_bytes, counter.get_total_flops(), seconds)


def _numbers(
    case: Case, plan: sft.Plan, elements: int, plain_bytes: int, budget_bytes: int, measured_bytes: int, flops: int, seconds: float
) -> Numbers:
    if flops != plan.flops:
        raise AssertionError(f"{case.name}: counted {flops} FLOPs, planned {plan.flops}")
    return Numbers(
        name=case.name,
        size=case.size,
        largest_elements=elements,
        plain_bytes=plain_bytes,
        budget_bytes=budget_bytes,
        plan=describe_plan(plan),
        measured_bytes=measured_bytes,
        process_bytes=peak_rss_bytes(),
        counted_flops=flops,
        seconds=seconds,
    )


RUNS: dict[str, Callable[[Case], Numbers]] = {"unet": run_unet, "segmentation": run_segmentation, "activation": run_activation}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    parser.add_argument("--unet-size", type=positive_int, default=4096, help="rows and columns, pixels")
    parser.add_argument("--segmentation-size", type=positive_int, default=4096, help="rows and columns, pixels")
    parser.add_argument("--segmentation-budget", default="1GiB", help="half of the output's bytes (default: 1GiB)")
    parser.add_argument("--activation-size", type=positive_int, default=6144, help="rows and columns, pixels")
    parser.add_argument("--share", type=float, default=0.2, help="of plain's bytes: the U-Net's budget (default: 0.2)")
    parser.add_argument("--limit", default="2GiB", help="memory limit of the process with the large activation")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> int:
    """Run the benchmark; 1 when a case has no result, or the large activation's process exceeds the limit."""
    args = parse_arguments()
    console = Console()
    # The result of some cases never replaces that of all.
    stem = result_stem(args.out, "large" if set(args.cases) == set(RUNS) else "-".join(["large", *args.cases]))
    limit_bytes = parse_bytes(args.limit)
    results: list[Numbers] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.npy"
        try:
            for name in args.cases:
                size = {"unet": args.unet_size, "segmentation": args.segmentation_size}.get(name, args.activation_size)
                budget_bytes = parse_bytes(args.segmentation_budget) if name == "segmentation" else limit_bytes // 2
                if name == "activation":
                    write_image(path, size, size)
                case = Case(name=name, size=size, share=args.share, budget_bytes=budget_bytes, path=path, threads=args.threads)
                results.append(call_in_process(RUNS[name], case))
                console.print(" | ".join(results[-1].cells()), markup=False)
        except WorkerError as error:
            console.print(f"{error.kind}: {error}", markup=False)
            return 1
    table = Table(title="Beyond the machine, float32, batch 1", headers=HEADERS, rows=[result.cells() for result in results])
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "results": [asdict(result) for result in results],
    }
    notes = (
        "`unet`: a training step of a U-Net of five levels and 16 channels, norm statistics frozen. `segmentation`: the same with 32 "
        "classes and cross-entropy compiled with it; measured includes image and labels. `activation`: inference from a uint8 file. "
        "Plain: resident bytes and peak, projected. Measured: metered live tensors during the step, a loss outside among them. "
        "Process: high-water mark of a fresh process with everything in it. One run each; FLOPs counted."
    )
    console.print(write_results(stem, raw, [table], notes, None))
    over = [result for result in results if result.name == "activation" and result.process_bytes > limit_bytes]
    for result in over:
        console.print(f"{format_bytes(result.process_bytes)} used, limit {args.limit}", markup=False)
    return int(bool(over))


if __name__ == "__main__":
    raise SystemExit(main())
