"""``python -m sft plan`` and ``check``: what a model would need, without running it.

Models by name, and shapes and tiles as people write them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from sft.api.check import check
from sft.api.compile import plan
from sft.api.pareto import PlanningSession, pareto
from sft.common.atomic_files import atomic_write
from sft.common.byte_units import format_bytes, parse_bytes
from sft.common.errors import BudgetError, InputError, UnsupportedError
from sft.common.interval import Interval
from sft.common.model_zoo import ModelName
from sft.planner.options import STRATEGIES, Options
from sft.planner.plan import Plan
from sft.sources.source import check_rows

__all__ = [
    "ExampleInput",
    "PlanRequest",
    "compare_strategies",
    "load_model",
    "parse_input",
    "parse_tile",
    "show_check",
    "show_pareto",
    "show_plan",
]

#: An input that is planned for: its shape, or where it holds whole numbers a tensor without memory.
ExampleInput = tuple[int, ...] | torch.Tensor

#: Types of whole numbers, as they are written.
_INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool")


def load_model(name: str, options: Mapping[str, Any], *, meta: bool = True) -> nn.Module:
    """Build a model that a name stands for.

    Args:
        name: ``"package.module:callable"``, ``"torchvision:resnet50"``, ``"timm:resnet50"``, or a bare name, which is looked up in
            torchvision, then in timm.
        options: keyword arguments of its maker.
        meta: without memory for its parameters, where its maker allows that.

    Raises:
        InputError: there is no such model, or its maker fails.
    """
    maker = ModelName(text=name, place="MODEL", options_place="--model-args").maker()
    if meta:
        try:
            with torch.device("meta"):
                return maker.make(options)
        except InputError:  # some makers compute with numbers
            pass
    return maker.make(options)


def parse_input(text: str) -> ExampleInput:
    """Read ``"1x3x20480x20480"``, or ``"4x512:int64"`` for what holds no numbers of the model's type: token ids, labels, masks.

    >>> parse_input("1x3x512x640")
    (1, 3, 512, 640)
    >>> parse_input("4x512:int64")
    tensor(..., device='meta', size=(4, 512), dtype=torch.int64)

    Raises:
        InputError: the text is no shape, or its type is none of whole numbers.
    """
    sizes, has_type, kind = text.partition(":")
    least = "*" if has_type else "+"
    if re.fullmatch(rf"[1-9][0-9]{{0,17}}([x,][1-9][0-9]{{0,17}}){least}", sizes) is None:
        raise InputError(f"--input {text!r}: write batch, channels and sizes, such as 1x3x20480x20480, or 4x512:int64 for whole numbers")
    shape = tuple(map(int, re.split("[x,]", sizes)))
    if not has_type:
        return shape
    if kind not in _INTEGER_DTYPES:
        raise InputError(
            f"--input {text!r}: the type after the colon is one of {', '.join(_INTEGER_DTYPES)}; without one it is the model's"
        )
    return torch.empty(shape, dtype=getattr(torch, kind), device="meta")


def parse_tile(text: str) -> tuple[int, int | None]:
    """Read ``"512"`` (rows) or ``"512x1024"`` (rows, columns).

    >>> parse_tile("512"), parse_tile("512x1024")
    ((512, None), (512, 1024))

    Raises:
        InputError: the text is no tile.
    """
    if re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)?", text) is None:
        raise InputError(f"--tile {text!r}: write rows, or rows and columns, such as 512 or 512x1024")
    rows, _, cols = text.partition("x")
    return int(rows), int(cols) if cols else None


_CAPTION = "~ estimated from FLOPs, at a rate of the kind of device"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked.

    Attributes:
        model: the model, in the mode (training or not) that is planned for.
        inputs: what it is called with.
        budget: what the device may hold.
        options: wishes about the plan.
        out: a file for the plan as JSON.
        plot: a file for its picture.
        pareto: a file for the picture of time against memory.
        budgets: for that picture; empty for some between plain PyTorch's need and the least.
        costs: whether to print what each segment takes of the time.
        mesh: replicas and bands, to plan for several ranks.
        link_bytes_per_second: of each of them to the others, to say how long their messages take.
        reads: whether the inputs are read in strips, and never resident.
    """

    model: nn.Module
    inputs: tuple[ExampleInput, ...]
    budget: int | str
    options: Options
    out: Path | None = None
    plot: Path | None = None
    pareto: Path | None = None
    budgets: tuple[str, ...] = ()
    costs: bool = False
    mesh: tuple[int, int] | None = None
    link_bytes_per_second: float | None = None
    reads: bool = False


@dataclass(frozen=True, slots=True)
class _PlaceholderSource:
    """A source that is only planned for."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32

    def rows(self, interval: Interval, out: torch.Tensor) -> None:
        check_rows("a blank image", self.shape, interval, out)
        out.zero_()

    def samples(self, batch: Interval) -> _PlaceholderSource:
        """Some batch elements."""
        return _PlaceholderSource((len(batch), *self.shape[1:]), self.dtype)


def show_plan(question: PlanRequest, console: Console, *, as_json: bool) -> int:
    """Print the plan; write and draw it where that is asked for."""
    found = _plan_request(question)
    if question.out is not None:
        with atomic_write(question.out) as part:
            part.write_text(found.to_json(), encoding="utf-8")
    if question.plot is not None:
        found.plot(question.plot)
    text = found.to_json() if as_json else "\n".join([found.explain(costs=question.costs), *_link_lines(question, found)])
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _link_lines(question: PlanRequest, found: Plan) -> list[str]:
    """How long messages take beside the arithmetic."""
    if found.mesh is None or question.link_bytes_per_second is None:
        return []
    seconds = found.mesh.link_seconds(question.link_bytes_per_second)
    gigabits = 8 * question.link_bytes_per_second / 1e9
    return [
        "",
        f"Messages: {seconds:.4g} s a step on a link of {gigabits:g} Gbit/s a rank, beside ~{found.estimated_seconds:.4g} s of arithmetic "
        "(estimated from FLOPs, at a rate of the kind of device)",
    ]


def show_pareto(question: PlanRequest, console: Console, *, as_json: bool, strategies: Sequence[str]) -> int:
    """Draw time against memory; print a line for each plan."""
    rows = pareto(
        question.model,
        list(question.inputs),
        budgets=question.budgets or None,
        strategies=strategies,
        options=question.options,
        path=question.pareto,
    )
    if as_json:
        console.print(json.dumps([asdict(row) for row in rows], indent=2), markup=False, highlight=False, soft_wrap=True)
        return 0
    table = Table("strategy", box=None, pad_edge=False)
    for header in ("budget", "total", "FLOPs / plain", "seconds"):
        table.add_column(header, justify="right")
    for row in rows:
        seconds = _seconds_text(row.estimated_seconds, row.projected_seconds)
        if row.projected_seconds is None:
            table.caption = _CAPTION
        table.add_row(row.strategy, format_bytes(row.budget_bytes), format_bytes(row.total_bytes), f"{row.redundancy:.4f}", seconds)
    console.print(table)
    return 0


def _seconds_text(estimated: float, measured: float | None) -> str:
    """The time of a step; what nobody measured has a tilde."""
    return f"~{estimated:.3g}" if measured is None else f"{measured:.3g}"


def compare_strategies(question: PlanRequest, console: Console, *, as_json: bool) -> int:
    """One line a strategy: whether it fits, what it needs (of one that does not, the least that would do), what it computes."""
    asking = PlanningSession(question.model, list(question.inputs))
    budget_bytes = parse_bytes(question.budget)
    rows = [_strategy_row(asking, budget_bytes, question.options, strategy) for strategy in STRATEGIES]
    if as_json:
        console.print(json.dumps(rows, indent=2), markup=False, highlight=False, soft_wrap=True)
        return 0
    console.print(_strategy_table(rows))
    return 0


def _strategy_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("fits")
    for header in ("total", "projected peak", "host", "FLOPs / plain", "seconds", "tiled segments", "strip rows", "panels"):
        table.add_column(header, justify="right")
    for row in rows:
        total = "-" if row["total_bytes"] is None else format_bytes(row["total_bytes"])
        if row["error"]:
            table.add_row(row["strategy"], "no", total, *["-"] * 7)
            continue
        if row["projected_seconds"] is None:
            table.caption = _CAPTION
        table.add_row(
            row["strategy"],
            "yes",
            total,
            format_bytes(row["projected_peak_bytes"]),
            format_bytes(row["host_bytes"]) if row["host_bytes"] else "-",
            f"{row['redundancy']:.4f}",
            _seconds_text(row["estimated_seconds"], row["projected_seconds"]),
            str(row["num_tiled_segments"]),
            ", ".join(map(str, row["strip_rows"])) or "-",
            ", ".join(map(str, row["num_panels"])) or "-",
        )
    return table


def _strategy_row(asking: PlanningSession, budget_bytes: int, options: Options, strategy: str) -> dict[str, Any]:
    row: dict[str, Any] = {"strategy": strategy, "error": "", "total_bytes": None}
    try:
        found = asking.plan(budget_bytes, replace(options, strategy=strategy))
    except BudgetError as error:
        return {**row, "error": str(error), "total_bytes": error.needed_bytes}
    except (UnsupportedError, InputError) as error:
        return {**row, "error": str(error)}
    tiled = [segment for segment in found.segments if segment.mode == "tiled"]
    return {
        **row,
        "total_bytes": found.total_bytes,
        "projected_peak_bytes": found.projected_peak_bytes,
        "resident_bytes": found.resident_bytes,
        "host_bytes": found.host_bytes,
        "flops": found.flops,
        "plain_flops": found.plain_flops,
        "redundancy": found.redundancy,
        "estimated_seconds": found.estimated_seconds,
        "projected_seconds": found.projected_seconds,
        "num_tiled_segments": len(tiled),
        "strip_rows": [segment.strip_rows for segment in tiled],
        "num_panels": [segment.num_panels for segment in tiled],
    }


def show_check(model: nn.Module, inputs: Sequence[ExampleInput], console: Console, *, as_json: bool) -> int:
    """Print what runs in strips, what cannot, and what to do; 1 where the model cannot be compiled."""
    report = check(model, list(inputs))
    text = json.dumps(asdict(report), indent=2) if as_json else str(report)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(not report.ok)


def _plan_request(question: PlanRequest) -> Plan:
    inputs: list[Any] = list(question.inputs)
    if question.reads:
        first = next((p.dtype for p in question.model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        inputs = [_placeholder_source(given, first) for given in question.inputs]
    return plan(question.model, inputs, budget=question.budget, options=question.options, mesh=question.mesh)


def _placeholder_source(given: ExampleInput, dtype: torch.dtype) -> _PlaceholderSource:
    """A source in the place of an input."""
    shape = tuple(given.shape) if isinstance(given, torch.Tensor) else given
    if len(shape) != 4:
        raise InputError(f"--read: an input of shape {shape} is no image; give NxCxHxW, or leave --read out")
    return _PlaceholderSource((shape[0], shape[1], shape[2], shape[3]), given.dtype if isinstance(given, torch.Tensor) else dtype)
