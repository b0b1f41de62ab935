"""``python -m sft tune``: measure on this machine's GPU which kernels are faster than PyTorch's own operators.

Without a model it measures the standard networks defined here; most networks have the same layers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from sft.api.engine import Engine
from sft.api.inputs import hints_of
from sft.backends.autotune.benchmark import Benchmarker, CudaBenchmarker
from sft.backends.autotune.cases import CaseCollector, TuningCase
from sft.backends.autotune.loop import TuningReport, tune
from sft.backends.convolution_relu import FusionDevice
from sft.backends.resolve import allows_tf32, computes_operands
from sft.backends.selector import launch_variants
from sft.cli.parser import TUNED_DTYPES
from sft.cli.plans import ExampleInput
from sft.common.byte_units import parse_bytes
from sft.common.errors import InputError
from sft.planner.measured.gpu_calibration import calibrate, model_path, save_model
from sft.planner.options import Options
from sft.planner.plan import Plan
from sft.torch_runtime.profiling import table_folders

__all__ = ["STANDARD_NETWORKS", "STANDARD_STRIP_ROWS", "TuneRequest", "collect_tuning_cases", "list_cases", "show_tune", "standard_models"]


def _vgg16() -> nn.Module:
    """Convolutions of VGG-16 (Simonyan and Zisserman, 2015)."""
    layers: list[nn.Module] = []
    num_in = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(num_in, width, 3, padding=1), nn.ReLU()]
            num_in = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class _BasicBlock(nn.Module):
    """A basic block (He et al., 2016)."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or num_in != width:
            self.short = nn.Sequential(nn.Conv2d(num_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def _resnet18() -> nn.Module:
    """Convolutions of ResNet-18 (He et al., 2016), with frozen norms."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    num_in = 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(_BasicBlock(num_in, width, stride))
        num_in = width
    return nn.Sequential(*layers).eval()


def _resnet18_training() -> nn.Module:
    """ResNet-18 with norms over the image."""
    return _resnet18().train()


class _UNet(nn.Module):
    """A U-Net of four levels with bilinear interpolation (after Ronneberger, Fischer and Brox, 2015)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 128, 256)
        pairs = zip((3, *widths[:-1]), widths, strict=True)
        self.down = nn.ModuleList([self._level(num_in, width) for num_in, width in pairs])
        self.up = nn.ModuleList([self._level(below + width, width) for below, width in zip(widths[1:], widths[:-1], strict=True)])
        self.leave = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _level(num_in: int, width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(num_in, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level in self.down:
            x = level(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for level, skip in zip(reversed(self.up), reversed(skips[:-1]), strict=True):
            up = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = level(torch.cat([skip, up], 1))
        out: Tensor = self.leave(x)
        return out


#: Factories by name.
STANDARD_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vgg16": _vgg16,
    "resnet18": _resnet18,
    "resnet18 in training": _resnet18_training,
    "u-net": _UNet,
}


_STANDARD_SHAPE = (1, 3, 2048, 2048)
#: Strips of the standard networks, besides the untiled image: their deep layers have few pixels, as in plans for large images.
STANDARD_STRIP_ROWS = (256,)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """Arguments of ``tune``.

    Attributes:
        models: models with their inputs, on the meta device or any other.
        dtypes: element types to measure.
        options: options of the plans that provide the programs.
        budget: budget of these plans.
        strip_rows: heights of forced strips. Each gives further programs, with the smaller tensors that plans for large images have.
        plan: a plan made before; its strips are measured.
        folder: folder of the table; ``None`` for the one that ``backend="auto"`` reads.
        again: whether to measure known classes again.
        limit_seconds: time limit, planning included; another run continues the measurement.
    """

    models: Sequence[tuple[nn.Module, tuple[ExampleInput, ...]]]
    dtypes: Sequence[str]
    options: Options
    budget: int | str
    folder: Path | None = None
    again: bool = False
    limit_seconds: float = math.inf
    strip_rows: tuple[int, ...] = ()
    plan: Plan | None = None

    @property
    def all_options(self) -> list[Options]:
        """Options of each plan that provides programs."""
        return [self.options, *(replace(self.options, tile=(rows, None)) for rows in self.strip_rows)]


def standard_models() -> list[tuple[nn.Module, tuple[ExampleInput, ...]]]:
    """The standard networks, with their input."""
    with torch.device("meta"):
        return [(make(), (_STANDARD_SHAPE,)) for make in STANDARD_NETWORKS.values()]


def collect_tuning_cases(request: TuneRequest, device: torch.device) -> list[TuningCase]:
    """A tuning case for each class of operations in the plans of the models, those with the most work first; plans are made, but not run.

    Raises:
        UnsupportedError, BudgetError, InputError: as :func:`sft.plan`.
    """
    collector = CaseCollector(
        allows_tf32=allows_tf32(device),
        computes_operands=computes_operands(device),
        fusion_device=FusionDevice(device) if device.type == "cuda" else None,
    )
    for model, inputs in request.models:
        shapes = [tuple(description.shape) if isinstance(description, torch.Tensor) else description for description in inputs]
        hints = hints_of(inputs)
        for dtype_name in request.dtypes:
            if dtype_name not in TUNED_DTYPES:
                raise InputError(f"--dtype {dtype_name}: choose among {', '.join(TUNED_DTYPES)}")
            for options in request.all_options:
                engine = Engine(
                    model.to(getattr(torch, dtype_name)),
                    budget_bytes=parse_bytes(request.budget),
                    options=options,
                    optimizer=None,
                    plan=request.plan,
                    backend=collector,
                )
                engine.plan_for_shapes(shapes, hints)
    return sorted(collector.cases.values(), key=lambda case: -case.estimated_work)


def list_cases(request: TuneRequest, console: Console, *, as_json: bool) -> int:
    """Print the classes that ``tune`` would measure, in its order; needs no GPU."""
    cases = collect_tuning_cases(request, torch.device("cpu"))
    work = sum(case.estimated_work for case in cases)
    rows = [(case.shape_class.label, launch_variants(case.shape_class), case.estimated_work / work) for case in cases]
    if as_json:
        records = [{"class": label, "variants": variants, "share": share} for label, variants, share in rows]
        console.print(json.dumps({"cases": records}, indent=2), markup=False, highlight=False, soft_wrap=True)
        return 0
    lines = [f"{100 * share:5.1f} %  {label}: {', '.join(variants)}" for label, variants, share in rows]
    lines.append(
        f"{len(rows)} classes, {sum(len(variants) for _, variants, _ in rows)} kernels to measure; shares of the work are estimates"
    )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    return 0


def show_tune(request: TuneRequest, console: Console, *, as_json: bool, benchmarker: Benchmarker | None = None) -> int:
    """Measure, extend the table, and print a summary; returns 1 if a kernel was wrong or failed.

    Args:
        request: the arguments of ``tune``.
        console: the output.
        as_json: print JSON.
        benchmarker: measures cases; the first GPU of this machine by default.
    """
    started = time.monotonic()
    benchmark = benchmarker or CudaBenchmarker(torch.device("cuda", 0))
    folder = request.folder or next(iter(table_folders()), None)
    if folder is None:
        raise InputError("there is no folder for the table: SFT_CACHE_DIR is empty; name one with --out")
    rates = _calibrate(benchmark, folder, again=request.again) if benchmark.device.type == "cuda" else None
    cases = collect_tuning_cases(request, benchmark.device)
    with _progress_bar(console, len(cases), is_shown=not as_json) as advance:
        limit_seconds = request.limit_seconds - (time.monotonic() - started)
        report = tune(cases, benchmark, folder, again=request.again, limit_seconds=limit_seconds, advance=advance)
    if as_json:
        summary = {**_summary(report), "rates": rates and str(rates)}
        console.print(json.dumps(summary, indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        _print_report(report, console)
        if rates is not None:
            console.print(f"rates by which plans are ranked: {rates}", markup=False, highlight=False, soft_wrap=True)
    return int(bool(report.refused))


def _calibrate(benchmark: Benchmarker, folder: Path, *, again: bool) -> Path:
    """File of the rates of the device, which are measured if there is none."""
    path = model_path(folder, benchmark.device_name)
    if again or not path.exists():
        model = calibrate(benchmark.device, f"this {benchmark.device_name} (calibrated)")
        save_model(path, model)
    return path


def _summary(report: TuningReport) -> dict[str, object]:
    return {
        "table": str(report.path),
        "device": report.table.device,
        "triton": report.table.triton,
        "num_entries": len(report.table.entries),
        "num_known": report.num_known,
        "num_left": report.num_left,
        "num_kernels_faster": sum(entry.fastest == "triton" for entry in report.table.entries),
        "measured": [
            {
                "class": entry.shape_class.label,
                "fastest": entry.fastest,
                "variant": entry.variant,
                "speedup": entry.aten_seconds / entry.triton_seconds,
            }
            for entry in report.measured
        ],
        "refused": report.refused,
    }


def _print_report(report: TuningReport, console: Console) -> None:
    if report.measured:
        table = Table("operation", box=None, pad_edge=False)
        table.add_column("kernel")
        for header in ("error", "kernel µs", "ATen µs", "ATen / kernel"):
            table.add_column(header, justify="right")
        for entry in report.measured:
            times = (f"{1e6 * entry.triton_seconds:.0f}", f"{1e6 * entry.aten_seconds:.0f}")
            table.add_row(
                entry.shape_class.label, entry.variant, f"{entry.error:.1e}", *times, f"{entry.aten_seconds / entry.triton_seconds:.2f}"
            )
        console.print(table)
    lines = [f"refused: {line}" for line in report.refused]
    faster = sum(entry.fastest == "triton" for entry in report.table.entries)
    lines.append(f"{len(report.measured)} measured, {report.num_known} known before, {len(report.refused)} refused")
    if report.num_left:
        lines.append(f"no time for {report.num_left} more: the same command continues with them")
    lines.append(f"kernels are faster for {faster} of {len(report.table.entries)} classes; written: {report.path}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress_bar(console: Console, num_trials: int, *, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar with the class being measured; without a terminal, one line per class."""
    if is_shown and not console.is_terminal:
        numbers = count(1)
        yield lambda label: console.print(f"{next(numbers)} of {num_trials}: {label}", markup=False, highlight=False, soft_wrap=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task("", total=num_trials)
        num_begun = count()
        yield lambda label: bar.update(task, completed=next(num_begun), description=label)
