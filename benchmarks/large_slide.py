"""A training step of ResNet-18 on a whole compressed slide, read strip by strip from its file: memory of the process, and time.

The script writes the slides, each a tiled TIFF of JPEG tiles with a pyramid. The largest is 20,000 x 20,000 px; its first activation alone
takes 24 GiB. Before any of them, the same step is taken in float64 on a small slide and compared with plain PyTorch. Each size has a
process of its own and is saved when it ends.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from harness.cases import PlanNumbers, describe_plan, load_models
from harness.gradcheck import CHECK_SIZE, TOLERANCE, Check, collect, worst_difference
from harness.images import TILE_PX, write_slide
from harness.memory import peak_rss_bytes, rss_bytes
from harness.report import Table, add_common_arguments, environment, mib, positive_int, result_stem, write_results
from harness.workers import WorkerError, call_in_process
from rich.console import Console
from torch import Tensor, nn

import sft
from sft.common.byte_units import format_bytes, parse_bytes
from sft.sources import Normalized, open_image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NUM_CLASSES = 2
CHECK_STRIP_ROWS = 32
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step on one slide."""

    path: Path
    size: int
    """Rows and columns, pixels."""
    budget_bytes: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """One step in a fresh process: forward, backward, optimizer."""

    size: int
    file_bytes: int
    first_activation_bytes: int
    """Of the first convolution's result, which is never allocated."""
    plain_bytes: int
    """Peak of plain PyTorch, projected."""
    plan: PlanNumbers
    prepare_seconds: float
    """Capture and planning."""
    start_bytes: int
    """Process memory before the step."""
    process_bytes: int
    """High-water mark of the process: Python, libraries, planning, decoding, and the step."""
    seconds: float
    cpu_seconds: float
    """Processor seconds of all threads; other work on the machine hardly changes them."""
    read_seconds: float
    """Seconds in the reader's thread, during the step."""
    waited_seconds: float
    """Seconds in which the step waited for pixels."""
    num_rows_read: int
    loss: float
    is_finite: bool
    """True if all gradients are finite."""

    def cells(self) -> list[str]:
        """The row of the table."""
        cells = [f"{self.size:,}²", mib(self.plain_bytes), mib(self.plan.projected_peak_bytes), mib(self.process_bytes), self.plan.strips]
        cells += [f"{self.plan.flops / 1e12:.1f}", f"{self.plan.flops / self.plan.plain_flops:.2f}"]
        cells += [f"{self.seconds:,.0f}", f"{self.cpu_seconds:,.0f}"]
        return [*cells, f"{self.read_seconds:.1f}", f"{self.waited_seconds:.2f} ({100 * self.waited_seconds / self.seconds:.2f} %)"]


HEADERS = (
    "slide, px",
    "plain, MiB",
    "projected, MiB",
    "process, MiB",
    "plan",
    "TFLOP",
    "FLOPs / plain",
    "s",
    "CPU s",
    "reading, s",
    "waited for pixels, s",
)


def build_model() -> nn.Module:
    """ResNet-18 for two classes, norm statistics frozen."""
    torch.manual_seed(0)
    models = load_models()
    model: nn.Module = models.freeze_norm(models.resnet18(NUM_CLASSES))
    return model


def loss_of(output: Tensor) -> Tensor:
    """Cross-entropy of one slide of the second class."""
    return nn.functional.cross_entropy(output, torch.tensor([1]))


def check(case: Case) -> Check:
    """The step in float64 on a small slide, against plain PyTorch on the same pixels."""
    torch.set_num_threads(case.threads)
    image = open_image(case.path)
    model = build_model().double()
    source = Normalized(image, mean=MEAN, std=STD, dtype=torch.float64)
    x = torch.from_numpy(image.read(0, 0, image.width_px, image.height_px)).permute(2, 0, 1)[None].double() / 255
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in (MEAN, STD))
    output = model((x - mean) / std)
    torch.autograd.backward(loss_of(output))
    reference = collect(model, output.detach())
    try:
        smallest_bytes = sft.plan(model, source, budget=1).total_bytes
    except sft.BudgetError as error:
        smallest_bytes = error.needed_bytes
    ways: Sequence[dict[str, Any]] = (
        {"options": sft.Options(tile=(CHECK_STRIP_ROWS, image.width_px // 2), state_every=2)},
        {"budget": smallest_bytes},
    )
    worst, described = (0.0, "output"), []
    for way in ways:
        model.zero_grad(set_to_none=True)
        net: Any = sft.compile(model, source, **way)
        output = net(source)
        torch.autograd.backward(loss_of(output))
        worst = max(worst, worst_difference(reference, collect(model, output.detach())))
        described.append(describe_plan(net.plan).strips)
    return Check(height=image.height_px, width=image.width_px, worst_error=worst[0], worst_tensor=worst[1], ways=tuple(described))


def measure(case: Case) -> StepNumbers:
    """Take one step; call it in a fresh process."""
    torch.set_num_threads(case.threads)
    model = build_model()
    shape = (1, 3, case.size, case.size)
    source = Normalized(open_image(case.path), mean=MEAN, std=STD)
    started = time.perf_counter()
    net: Any = sft.compile(model, source, budget=case.budget_bytes)
    prepare_seconds = time.perf_counter() - started
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    start_bytes, cpu_started = rss_bytes(), _cpu_seconds()
    started = time.perf_counter()
    loss = loss_of(net(source))
    torch.autograd.backward(loss)
    optimizer.step()
    seconds, cpu_seconds = time.perf_counter() - started, _cpu_seconds() - cpu_started
    process_bytes = peak_rss_bytes()
    reading: sft.Reading = net.last_reading
    passes = (reading.forward, reading.backward)
    gradients = [parameter.grad for parameter in model.parameters()]
    return StepNumbers(
        size=case.size,
        file_bytes=case.path.stat().st_size,
        first_activation_bytes=64 * (case.size // 2) ** 2 * 4,
        plain_bytes=sft.plan(model, shape, budget=2**60, options=sft.Options(strategy="none")).total_bytes,
        plan=describe_plan(net.plan),
        prepare_seconds=prepare_seconds,
        start_bytes=start_bytes,
        process_bytes=process_bytes,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        read_seconds=sum(result.read_seconds for result in passes),
        waited_seconds=sum(result.waited_seconds for result in passes),
        num_rows_read=sum(result.num_rows_read for result in passes),
        loss=loss.item(),
        is_finite=all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients),
    )


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A training step of ResNet-18 on a whole compressed slide.")
    parser.add_argument("--sizes", nargs="+", type=positive_int, default=[5_000, 10_000, 20_000], help="columns and rows, pixels")
    parser.add_argument("--budget", default="2.5GiB", help="of the plan")
    parser.add_argument("--limit", default="4GiB", help="memory limit of the process")
    add_common_arguments(parser)
    return parser.parse_args()


def report(args: argparse.Namespace, stem: Path, checked: Check, results: list[StepNumbers]) -> str:
    """Write the results so far; returns the names of the files."""
    table = Table(title=f"ResNet-18, budget {args.budget}, float32, batch 1", headers=HEADERS, rows=[result.cells() for result in results])
    raw: dict[str, Any] = {
        "environment": environment(args.threads),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "check": asdict(checked),
        "results": [asdict(result) for result in results],
    }
    notes = (
        f"A tiled TIFF (JPEG, tiles of {TILE_PX} px, content from a real slide), read through `sft.sources.open_image`. A step is forward, "
        "backward, and SGD, timed once, on a machine that others use, too: CPU seconds are those of all threads of the process. Norm "
        "statistics are frozen. Process: high-water mark (VmHWM) of a fresh process with everything in it: Python, torch, capture and "
        "planning, decoding, the operators' scratch, and the step. Plain: what plain PyTorch would hold for the step, projected. Before, "
        f"the step in float64 on a slide of {checked.height} x {checked.width} px agreed with plain PyTorch's to "
        f"{checked.worst_error:.0e} in the output and every gradient."
    )
    return write_results(stem, raw, [table], notes, None)


def main() -> int:
    """Run the benchmark; 1 when gradients are wrong, a step has no result, or a process exceeds the limit."""
    args = parse_arguments()
    # Threads that spin while they wait take the time of a core that another process uses: 64 CPU seconds instead of 15 at 2,000 px
    # on a busy machine. Read by the OpenMP library of the processes to come.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    console = Console()
    stem = result_stem(args.out, "large-slide")
    limit_bytes, budget_bytes = parse_bytes(args.limit), parse_bytes(args.budget)
    results: list[StepNumbers] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slide.tif"
        try:
            write_slide(path, *CHECK_SIZE)
            checked: Check = call_in_process(check, Case(path=path, size=0, budget_bytes=budget_bytes, threads=args.threads))
            if not checked.passed:
                console.print(f"gradients are wrong: {checked.worst_tensor} is off by {checked.worst_error:.1e}, allowed {TOLERANCE:.0e}")
                return 1
            for size in args.sizes:
                write_slide(path, size, size)
                results.append(call_in_process(measure, Case(path=path, size=size, budget_bytes=budget_bytes, threads=args.threads)))
                console.print(" | ".join(results[-1].cells()), markup=False)
                console.print(report(args, stem, checked, results))
        except WorkerError as error:
            console.print(f"{error.kind}: {error}", markup=False)
            return 1
    broken = [result for result in results if result.process_bytes > limit_bytes or not result.is_finite]
    for result in broken:
        used = format_bytes(result.process_bytes)
        console.print(f"{result.size} px: {used} used, limit {args.limit}; gradients finite: {result.is_finite}", markup=False)
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
