"""``python -m sft tune``: measure on this machine's GPU which kernels are faster than PyTorch's own operators."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from sft.backends.laboratory import CudaBenchmarker, Benchmarker
from sft.backends.select import allows_tf32, computes_operands
from sft.backends.trials import CaseCollector, TuningCase
from sft.backends.tuning import TuningReport, tune
from sft.cli.models import ExampleInput
from sft.cli.standard_networks import STANDARD_NETWORKS
from sft.engine import Engine
from sft.errors import InputError
from sft.execute.costs import table_folders
from sft.options import Options
from sft.units import parse_bytes

__all__ = ["DTYPES", "TuneRequest", "collect_tuning_cases", "show_tune", "standard_models"]

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


def show_tune(request: TuneRequest, console: Console, *, as_json: bool, laboratory: Benchmarker | None = None) -> int:
    """Measure, extend the table, and say what was found; 1 where kernels were wrong or did not run.

    Args:
        request: what is asked.
        console: where the answer goes.
        as_json: for programs.
        laboratory: where to measure; the first GPU of this machine by default.
    """
    place = laboratory or CudaBenchmarker(torch.device("cuda", 0))
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
