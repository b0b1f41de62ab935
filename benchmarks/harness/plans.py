"""Common parts of benchmarks of plans: a table for each model, and all rows as data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console

from harness.report import Table, add_common_arguments, environment, result_stem, write_results

__all__ = ["ModelCase", "NamedCase", "PlanRow", "compare_plans", "shares_table"]


class NamedCase(Protocol):
    """A model to plan for."""

    @property
    def name(self) -> str: ...


class PlanRow(Protocol):
    """Plan of a strategy for a share of plain PyTorch's bytes."""

    @property
    def model(self) -> str: ...
    @property
    def plain_bytes(self) -> int: ...
    def cell(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCase:
    """A model and the shape of its input."""

    name: str
    shape: tuple[int, int, int, int]
    frozen: bool
    """Whether norm statistics are frozen."""

    @property
    def label(self) -> str:
        """Text of the case."""
        return f"{self.name} {'x'.join(map(str, self.shape))}{', frozen statistics' if self.frozen else ''}"


CaseT = TypeVar("CaseT", bound=NamedCase)
RowT = TypeVar("RowT", bound=PlanRow)


def shares_table(rows: Sequence[RowT], ways: Sequence[str], way_of: Callable[[RowT], str], shares: Sequence[float], header: str) -> Table:
    """One model's table: a line for each way to plan, a column for each share."""
    cells = [[way, *(row.cell() for row in rows if way_of(row) == way)] for way in ways]
    title = f"{rows[0].model}: {rows[0].plain_bytes / 2**30:.2f} GiB when everything is kept"
    return Table(title=title, headers=(header, *(f"1/{round(1 / share)}" for share in shares)), rows=cells)


def compare_plans(
    description: str,
    theme: str,
    cases: Sequence[CaseT],
    rows_of: Callable[[CaseT], list[Any]],
    table_of: Callable[[list[Any]], Table],
    notes: str,
) -> int:
    """Run a benchmark of plans from the command line.

    Args:
        description: of the script.
        theme: the result's name.
        cases: the models.
        rows_of: all rows of one, dataclasses.
        table_of: their table.
        notes: what stands above the tables.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", nargs="+", choices=sorted({case.name for case in cases}), default=None)
    add_common_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console, stem = Console(), result_stem(args.out, theme)
    tables, rows = [], []
    for case in cases:
        if args.models is None or case.name in args.models:
            case_rows = rows_of(case)
            rows += [asdict(row) for row in case_rows]
            tables.append(table_of(case_rows))
            console.print(tables[-1].terminal())
            raw = {"environment": environment(args.threads), "settings": {"models": args.models}, "results": rows}
            written = write_results(stem, raw, tables, notes, None)
    console.print(written)
    return 0
