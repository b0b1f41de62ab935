"""Published strategies of recomputation, and ours: the smallest memory of each model, and FLOPs at shares of its activations.

Plans only, of models on the meta device: a step takes the bytes and FLOPs of its plan (the tests measure that). A row is a strategy at a
share of the activation bytes of a step without recomputation. A strategy without a plan at a share shows its smallest share.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch
from harness.cases import load_models
from harness.report import Table, add_common_arguments, environment, result_stem, write_results
from rich.console import Console
from torch import nn

import sft

STRATEGIES = ("sqrt", "acg", "revolve", "bisect", "optimal", "sft", "auto")
SHARES = (1 / 2, 1 / 4, 1 / 8)

NOTES = """\
FLOPs of a step over plain PyTorch's, at 1/2, 1/4 and 1/8 of the bytes of a step without recomputation (inputs, outputs,
activations, new gradients). In brackets the least share with which the strategy has a plan; `-`: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the shape of its input.

    Attributes:
        name: name of the model.
        shape: shape of the input.
        frozen: True if norm statistics are frozen.
    """

    name: str
    shape: tuple[int, int, int, int]
    frozen: bool

    @property
    def label(self) -> str:
        """Text of the case."""
        return f"{self.name} {'x'.join(map(str, self.shape))}{', frozen statistics' if self.frozen else ''}"


CASES = (
    Case(name="resnet50", shape=(16, 3, 224, 224), frozen=False),
    Case(name="resnet50", shape=(1, 3, 2048, 2048), frozen=True),
    Case(name="vgg16", shape=(1, 3, 2048, 2048), frozen=True),
    Case(name="darknet19", shape=(1, 3, 2048, 2048), frozen=False),
    Case(name="unet", shape=(1, 3, 1024, 1024), frozen=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Plan of a strategy for a share of the memory."""

    model: str
    strategy: str
    share: float
    plain_bytes: int
    peak_bytes: int | None
    redundancy: float | None
    least_bytes: int | None
    """Smallest bytes of the strategy, if they exceed the share."""

    def cell(self) -> str:
        """FLOPs over plain's, or the least share."""
        if self.redundancy is None:
            return "-" if self.least_bytes is None else f"({self.least_bytes / self.plain_bytes:.2f})"
        return f"{self.redundancy:.3f}"


def make(case: Case) -> nn.Module:
    """The model, without memory."""
    models = load_models()
    with torch.device("meta"):
        model: nn.Module = models.unet(2) if case.name == "unet" else getattr(models, case.name)(1000)
    return models.freeze_norm(model) if case.frozen else model


def rows_of(case: Case) -> list[Row]:
    """All strategies at all shares."""
    model = make(case)
    plain = sft.plan(model, case.shape, budget="100TiB", options=sft.Options(strategy="none"))
    rows = []
    for strategy in STRATEGIES:
        for share in SHARES:
            budget = plain.resident_bytes + int(share * plain.projected_peak_bytes)
            common: dict[str, Any] = {"model": case.label, "strategy": strategy, "share": share, "plain_bytes": plain.projected_peak_bytes}
            try:
                plan = sft.plan(model, case.shape, budget=budget, options=sft.Options(strategy=strategy))
            except sft.BudgetError as error:
                least = error.needed_bytes - plain.resident_bytes
                rows.append(Row(**common, peak_bytes=None, redundancy=None, least_bytes=least))
            except sft.UnsupportedError:
                rows.append(Row(**common, peak_bytes=None, redundancy=None, least_bytes=None))
            else:
                rows.append(Row(**common, peak_bytes=plan.projected_peak_bytes, redundancy=plan.redundancy, least_bytes=None))
    return rows


def table_of(rows: list[Row]) -> Table:
    """One model's table: a line for each strategy, a column for each share."""
    cells = [[strategy, *(row.cell() for row in rows if row.strategy == strategy)] for strategy in STRATEGIES]
    title = f"{rows[0].model}: {rows[0].plain_bytes / 2**30:.2f} GiB when everything is kept"
    return Table(title=title, headers=("strategy", *(f"1/{round(1 / share)}" for share in SHARES)), rows=cells)


def main() -> int:
    """Run the benchmark; the results are saved after every model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted({case.name for case in CASES}), default=None)
    add_common_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console, stem = Console(), result_stem(args.out, "recomputing")
    tables, rows = [], []
    for case in CASES:
        if args.models is None or case.name in args.models:
            case_rows = rows_of(case)
            rows += [asdict(row) for row in case_rows]
            tables.append(table_of(case_rows))
            console.print(tables[-1].terminal())
            raw = {"environment": environment(args.threads), "settings": {"models": args.models}, "results": rows}
            written = write_results(stem, raw, tables, NOTES, None)
    console.print(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
