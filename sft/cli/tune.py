"""``python -m sft tune``: measure on this machine's GPU which kernels are faster than PyTorch's own operators.

Networks whose layers most others have too: what ``python -m sft tune`` measures where nobody names a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from sft.api.engine import Engine
from sft.backends.autotune.benchmark import Benchmarker, CudaBenchmarker
from sft.backends.autotune.cases import CaseCollector, TuningCase
from sft.backends.autotune.loop import TuningReport, tune
from sft.backends.resolve import allows_tf32, computes_operands
from sft.cli.plans import ExampleInput
from sft.common.byte_units import parse_bytes
from sft.common.errors import InputError
from sft.planner.options import Options
from sft.torch_runtime.profiling import table_folders

__all__ = ["DTYPES", "STANDARD_NETWORKS", "TuneRequest", "collect_tuning_cases", "show_tune", "standard_models"]


def _vgg16() -> nn.Module:
    """The convolutions of VGG-16 (Simonyan and Zisserman, 2015)."""
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
    """The convolutions of ResNet-18 (He et al., 2016), its norms frozen."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    num_in = 64
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(_BasicBlock(num_in, width, stride))
        num_in = width
    return nn.Sequential(*layers).eval()


def _resnet18_training() -> nn.Module:
    """The same with norms over the image."""
    return _resnet18().train()


class _UNet(nn.Module):
    """Four levels with bilinear interpolation (after Ronneberger, Fischer and Brox, 2015)."""

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


#: Makers by name.
STANDARD_NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "vgg16": _vgg16,
    "resnet18": _resnet18,
    "resnet18 in training": _resnet18_training,
    "u-net": _UNet,
}


#: What most layers are trained in.
DTYPES = ("bfloat16", "float16", "float32")
_STANDARD_SHAPE = (1, 3, 2048, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What is asked.

    Attributes:
        models: with their inputs, on the meta device or any other.
        dtypes: element types to measure.
        options: wishes about the plans whose programs are looked at.
        budget: for these plans.
        folder: of the table; ``None`` for the one that ``backend="auto"`` looks into.
        again: whether to measure what is known, too.
        limit_seconds: how long to measure; another run goes on from there.
    """

    models: Sequence[tuple[nn.Module, tuple[ExampleInput, ...]]]
    dtypes: Sequence[str]
    options: Options
    budget: int | str
    folder: Path | None = None
    again: bool = False
    limit_seconds: float = math.inf


def standard_models() -> list[tuple[nn.Module, tuple[ExampleInput, ...]]]:
    """Layers that most networks have, with their input."""
    with torch.device("meta"):
        return [(make(), (_STANDARD_SHAPE,)) for make in STANDARD_NETWORKS.values()]


def collect_tuning_cases(request: TuneRequest, device: torch.device) -> list[TuningCase]:
    """A trial for each class of operations in the plans of the models; plans are made, nothing is run.

    Raises:
        UnsupportedError, BudgetError, InputError: as :func:`sft.plan`.
    """
    collector = CaseCollector(allows_tf32=allows_tf32(device), computes_operands=computes_operands(device))
    for model, inputs in request.models:
        shapes = [tuple(given.shape) if isinstance(given, torch.Tensor) else given for given in inputs]
        whole = [given.dtype if isinstance(given, torch.Tensor) else None for given in inputs]
        for name in request.dtypes:
            if name not in DTYPES:
                raise InputError(f"--dtype {name}: choose among {', '.join(DTYPES)}")
            engine = Engine(
                model.to(getattr(torch, name)),
                budget_bytes=parse_bytes(request.budget),
                options=request.options,
                optimizer=None,
                plan=None,
                backend=collector,
            )
            engine.plan_for_shapes(shapes, whole)
    return list(collector.trials.values())


def show_tune(request: TuneRequest, console: Console, *, as_json: bool, benchmarker: Benchmarker | None = None) -> int:
    """Measure, extend the table, and say what was found; 1 where kernels were wrong or did not run.

    Args:
        request: what is asked.
        console: where the answer goes.
        as_json: for programs.
        benchmarker: where to measure; the first GPU of this machine by default.
    """
    place = benchmarker or CudaBenchmarker(torch.device("cuda", 0))
    folder = request.folder or next(iter(table_folders()), None)
    if folder is None:
        raise InputError("there is no folder for the table: SFT_CACHE_DIR is empty; name one with --out")
    trials = collect_tuning_cases(request, place.device)
    with _progress_bar(console, len(trials), is_shown=not as_json) as advance:
        found = tune(trials, place, folder, again=request.again, limit_seconds=request.limit_seconds, advance=advance)
    if as_json:
        console.print(json.dumps(_summary(found), indent=2), markup=False, highlight=False, soft_wrap=True)
    else:
        _print(found, console)
    return int(bool(found.refused))


def _summary(found: TuningReport) -> dict[str, object]:
    return {
        "table": str(found.path),
        "device": found.table.device,
        "triton": found.table.triton,
        "num_entries": len(found.table.entries),
        "num_known": found.known,
        "num_left": found.left,
        "num_kernels_faster": sum(entry.fastest == "triton" for entry in found.table.entries),
        "measured": [
            {
                "class": entry.shape_class.label,
                "fastest": entry.fastest,
                "variant": entry.variant,
                "speedup": entry.aten_seconds / entry.triton_seconds,
            }
            for entry in found.measured
        ],
        "refused": found.refused,
    }


def _print(found: TuningReport, console: Console) -> None:
    if found.measured:
        table = Table("operation", box=None, pad_edge=False)
        table.add_column("kernel")
        for header in ("error", "kernel µs", "ATen µs", "ATen / kernel"):
            table.add_column(header, justify="right")
        for entry in found.measured:
            times = (f"{1e6 * entry.triton_seconds:.0f}", f"{1e6 * entry.aten_seconds:.0f}")
            table.add_row(
                entry.shape_class.label, entry.variant, f"{entry.error:.1e}", *times, f"{entry.aten_seconds / entry.triton_seconds:.2f}"
            )
        console.print(table)
    lines = [f"refused: {line}" for line in found.refused]
    faster = sum(entry.fastest == "triton" for entry in found.table.entries)
    lines.append(f"{len(found.measured)} measured, {found.known} known before, {len(found.refused)} refused")
    if found.left:
        lines.append(f"no time for {found.left} more: the same command goes on with them")
    lines.append(f"kernels are faster for {faster} of {len(found.table.entries)} classes; written: {found.path}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress_bar(console: Console, num_trials: int, *, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar on the terminal, with the class that is being measured; where there is no terminal, a line for each."""
    if is_shown and not console.is_terminal:
        numbers = count(1)
        yield lambda label: console.print(f"{next(numbers)} of {num_trials}: {label}", markup=False, highlight=False, soft_wrap=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task("", total=num_trials)
        begun = count()
        yield lambda label: bar.update(task, completed=next(begun), description=label)
