"""``python -m sft plan`` and ``check``: memory, time and schedule of a model, without running it.

Also the parsers of model names, input shapes and tiles.
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

from sft.api.check import checked
from sft.api.compile import plan
from sft.api.memory_limits import automatic_budget, is_automatic
from sft.api.pareto import PlanningSession, pareto
from sft.common.atomic_files import atomic_write
from sft.common.byte_units import format_bytes, format_seconds, parse_bytes
from sft.common.errors import BudgetError, InputError, UnsupportedError
from sft.common.interval import Interval
from sft.common.model_zoo import ModelName
from sft.common.terminal.progress_display import steps
from sft.planner.cost.device_rates import DeviceRates
from sft.planner.measured.gpu_calibration import planning_model
from sft.planner.options import STRATEGIES, Options
from sft.planner.plan import Plan
from sft.planner.remedies import COMMAND_LINE, message_for
from sft.planner.reports.plan_page import check_page_name
from sft.solvers.plot import check_drawable
from sft.sources.source import check_rows
from sft.torch_runtime.profiling import table_folders

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

#: Description of an input: its shape, or for integer inputs a meta tensor.
ExampleInput = tuple[int, ...] | torch.Tensor

#: Names of integer types.
_INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "bool")


def load_model(name: str, options: Mapping[str, Any], *, meta: bool = True) -> nn.Module:
    """Build a named model.

    Args:
        name: ``"package.module:callable"``, ``"torchvision:resnet50"``, ``"timm:resnet50"``, or a bare name, which is looked up in
            torchvision, then in timm.
        options: keyword arguments of its factory.
        meta: whether to build it on the meta device, if its factory supports that.

    Raises:
        InputError: no such model exists, or its factory fails.
    """
    factory = ModelName(text=name, place="MODEL", options_place="--model-args").factory()
    if meta:
        try:
            with torch.device("meta"):
                return factory.make(options)
        except InputError:  # some factories compute with values
            return factory.make(options).to("meta")
    return factory.make(options)


def parse_input(text: str) -> ExampleInput:
    """Parse ``"1x3x20480x20480"``, or ``"4x512:int64"`` for integer inputs: token ids, labels, masks.

    >>> parse_input("1x3x512x640")
    (1, 3, 512, 640)
    >>> parse_input("4x512:int64")
    tensor(..., device='meta', size=(4, 512), dtype=torch.int64)

    Raises:
        InputError: the text is not a shape, or its type is not an integer type.
    """
    sizes, has_type, dtype_name = text.partition(":")
    repetition = "*" if has_type else "+"
    if re.fullmatch(rf"[1-9][0-9]{{0,17}}([x,][1-9][0-9]{{0,17}}){repetition}", sizes) is None:
        raise InputError(f"--input {text!r}: write batch, channels and sizes, such as 1x3x20480x20480, or 4x512:int64 for integers")
    shape = tuple(map(int, re.split("[x,]", sizes)))
    if not has_type:
        return shape
    if dtype_name not in _INTEGER_DTYPES:
        raise InputError(
            f"--input {text!r}: the type after the colon is one of {', '.join(_INTEGER_DTYPES)}; without one it is the model's"
        )
    return torch.empty(shape, dtype=getattr(torch, dtype_name), device="meta")


def parse_tile(text: str) -> tuple[int, int | None]:
    """Parse ``"512"`` (rows) or ``"512x1024"`` (rows, columns).

    >>> parse_tile("512"), parse_tile("512x1024")
    ((512, None), (512, 1024))

    Raises:
        InputError: the text is not a tile.
    """
    if re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)?", text) is None:
        raise InputError(f"--tile {text!r}: write rows, or rows and columns, such as 512 or 512x1024")
    rows, _, cols = text.partition("x")
    return int(rows), int(cols) if cols else None


def _caption(device: str) -> str:
    """Origin of estimated seconds."""
    if device == "cuda":
        return f"~ estimated by the rates of {planning_model(torch.device(device), table_folders()).name}"
    rate = f"{DeviceRates(device).flops_per_second:.0e}".replace("e+", "e")
    return f"~ estimated from FLOPs, at {rate} FLOPs a second on {'the CPU' if device == 'cpu' else 'a GPU'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Arguments of ``plan``.

    Attributes:
        model: the model, in the mode (training or not) to plan for.
        inputs: descriptions of its inputs.
        budget: device memory, or ``"auto"``.
        device: kind of device to plan for.
        options: planner options.
        out: a file for the plan as JSON.
        plot: a file for the plot of the plan.
        html: a file for the page of the plan.
        pareto: a file for the plot of time against memory.
        budgets: budgets of that plot; empty for a range from plain PyTorch's need down to the minimum.
        costs: whether to print the time of each segment.
        full: whether to print a block for each segment.
        mesh: replicas and bands, to plan for several ranks.
        link_bytes_per_second: bandwidth between a rank and the other ranks, for the time of messages.
        reads: whether the inputs are read in strips, and never resident.
    """

    model: nn.Module
    inputs: tuple[ExampleInput, ...]
    budget: int | str
    options: Options
    device: str = "cpu"
    out: Path | None = None
    plot: Path | None = None
    html: Path | None = None
    pareto: Path | None = None
    budgets: tuple[str, ...] = ()
    costs: bool = False
    full: bool = False
    mesh: tuple[int, int] | None = None
    link_bytes_per_second: float | None = None
    reads: bool = False


@dataclass(frozen=True, slots=True)
class _PlaceholderSource:
    """A blank source, for planning only."""

    shape: tuple[int, int, int, int]
    dtype: torch.dtype = torch.float32

    def rows(self, interval: Interval, out: torch.Tensor) -> None:
        check_rows("a blank image", self.shape, interval, out)
        out.zero_()

    def samples(self, batch: Interval) -> _PlaceholderSource:
        """A range of batch elements."""
        return _PlaceholderSource((len(batch), *self.shape[1:]), self.dtype)


def show_plan(request: PlanRequest, console: Console, *, as_json: bool) -> int:
    """Print the plan; write and plot it if requested."""
    if request.plot is not None:  # names are checked first, since planning may take long
        check_drawable(request.plot)
    if request.html is not None:
        check_page_name(request.html)
    result = _plan_request(request)
    if request.out is not None:
        with atomic_write(request.out) as temporary:
            temporary.write_text(result.to_json(), encoding="utf-8")
    if request.plot is not None:
        result.plot(request.plot)
    if request.html is not None:
        result.save_html(request.html)
    text = (
        result.to_json() if as_json else "\n".join([result.explain(costs=request.costs, full=request.full), *_link_lines(request, result)])
    )
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def _link_lines(request: PlanRequest, result: Plan) -> list[str]:
    """The time of messages next to that of the arithmetic."""
    if result.mesh is None or request.link_bytes_per_second is None:
        return []
    seconds = result.mesh.link_seconds(request.link_bytes_per_second)
    gigabits = 8 * request.link_bytes_per_second / 1e9
    return [
        "",
        f"Messages: {format_seconds(seconds)} a step on a link of {gigabits:g} Gbit/s a rank, beside ~"
        f"{format_seconds(result.estimated_seconds)} of arithmetic (estimated from FLOPs, at a rate of the kind of device)",
    ]


def show_pareto(request: PlanRequest, console: Console, *, as_json: bool, strategies: Sequence[str]) -> int:
    """Plot time against memory; print a line for each plan."""
    rows = pareto(
        request.model,
        list(request.inputs),
        budgets=request.budgets or None,
        strategies=strategies,
        options=request.options,
        path=request.pareto,
        device=request.device,
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
            table.caption = _caption(request.device)
        table.add_row(row.strategy, format_bytes(row.budget_bytes), format_bytes(row.total_bytes), f"{row.redundancy:.4f}", seconds)
    console.print(table)
    return 0


def _seconds_text(estimated: float, measured: float | None) -> str:
    """The time of a step; an estimate has a tilde."""
    return f"~{format_seconds(estimated)}" if measured is None else format_seconds(measured)


def compare_strategies(request: PlanRequest, console: Console, *, as_json: bool) -> int:
    """Print one line per strategy: whether it fits, its bytes (the minimum, if it does not fit), and its FLOPs."""
    if is_automatic(request.budget):
        budget_bytes, _ = automatic_budget(torch.device(request.device), request.options)
    else:
        budget_bytes = parse_bytes(request.budget)
    session = PlanningSession(request.model, list(request.inputs), device=request.device)
    rows = []
    with steps("strategies", len(STRATEGIES)) as advance:
        for strategy in STRATEGIES:
            rows.append(_strategy_row(session, budget_bytes, request.options, strategy))
            advance()
    if as_json:
        console.print(json.dumps(rows, indent=2), markup=False, highlight=False, soft_wrap=True)
        return 0
    console.print(_strategy_table(rows, request.device))
    if all(row["error"] for row in rows):
        console.print(_remedies_text(request), markup=False, highlight=False, soft_wrap=True)
    return 0


def _remedies_text(request: PlanRequest) -> str:
    """Changes with which a plan would fit."""
    try:
        _plan_request(request)
    except BudgetError as error:
        return f"No strategy fits: {message_for(error, COMMAND_LINE)}"
    return "A plan with other inputs fits; the table is for inputs on the device."


def _strategy_table(rows: Sequence[Mapping[str, Any]], device: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("fits")
    for header in ("total", "projected peak", "host", "FLOPs / plain", "time", "tiled segments", "strip rows", "panels"):
        table.add_column(header, justify="right")
    table.add_column("reason")
    for row in rows:
        total = "-" if row["total_bytes"] is None else format_bytes(row["total_bytes"])
        if row["error"]:
            table.add_row(row["strategy"], "no", total, *["-"] * 7, row["reason"])
            continue
        if row["projected_seconds"] is None:
            table.caption = _caption(device)
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


def _strategy_row(session: PlanningSession, budget_bytes: int, options: Options, strategy: str) -> dict[str, Any]:
    row: dict[str, Any] = {"strategy": strategy, "error": "", "reason": "", "total_bytes": None}
    try:
        result = session.plan(budget_bytes, replace(options, strategy=strategy))
    except BudgetError as error:
        reason = f"needs {format_bytes(error.needed_bytes)} of {format_bytes(budget_bytes)}"
        return {**row, "error": str(error), "reason": reason, "total_bytes": error.needed_bytes}
    except (UnsupportedError, InputError) as error:
        return {**row, "error": str(error), "reason": " ".join(str(error).split())}
    tiled = [segment for segment in result.segments if segment.mode == "tiled"]
    return {
        **row,
        "total_bytes": result.total_bytes,
        "projected_peak_bytes": result.projected_peak_bytes,
        "resident_bytes": result.resident_bytes,
        "host_bytes": result.host_bytes,
        "flops": result.flops,
        "plain_flops": result.plain_flops,
        "redundancy": result.redundancy,
        "estimated_seconds": result.estimated_seconds,
        "projected_seconds": result.projected_seconds,
        "num_tiled_segments": len(tiled),
        "strip_rows": [segment.strip_rows for segment in tiled],
        "num_panels": [segment.num_panels for segment in tiled],
    }


def show_check(model: nn.Module, inputs: Sequence[ExampleInput], console: Console, *, as_json: bool) -> int:
    """Print the operators that run in strips, the problems, and remedies; returns 1 if the model cannot be compiled.

    Raises:
        MissingValuesError: ``forward`` reads values, and the model is on the meta device.
    """
    report = checked(model, list(inputs))
    text = json.dumps(asdict(report), indent=2) if as_json else str(report)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(not report.ok)


def _plan_request(request: PlanRequest) -> Plan:
    inputs: list[Any] = list(request.inputs)
    if request.reads:
        dtype = next((p.dtype for p in request.model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        inputs = [_placeholder_source(description, dtype) for description in request.inputs]
    return plan(request.model, inputs, budget=request.budget, options=request.options, mesh=request.mesh, device=request.device)


def _placeholder_source(description: ExampleInput, dtype: torch.dtype) -> _PlaceholderSource:
    """A placeholder source for an input."""
    shape = tuple(description.shape) if isinstance(description, torch.Tensor) else description
    if len(shape) != 4:
        raise InputError(f"--read: an input of shape {shape} is not an image; give NxCxHxW, or leave --read out")
    return _PlaceholderSource(
        (shape[0], shape[1], shape[2], shape[3]), description.dtype if isinstance(description, torch.Tensor) else dtype
    )
