"""Published strategies of recomputation, and ours: the least memory of each model, and the FLOPs at shares of it.

Plans only, of models on the meta device: bytes and FLOPs of a plan are what its step takes (the tests measure that). A row is a strategy
at a share of the bytes that the step makes when everything is kept, what is resident anyway left out. A strategy that has no plan for so
little says what it would need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from harness.cases import load_models
from harness.plans import ModelCase, compare_plans, shares_table
from harness.report import Table
from torch import nn

import sft

STRATEGIES = ("sqrt", "acg", "revolve", "bisect", "optimal", "sft", "auto")
SHARES = (1 / 2, 1 / 4, 1 / 8)

NOTES = """\
FLOPs of a step over plain PyTorch's, at 1/2, 1/4 and 1/8 of the bytes that the step makes when everything is kept (inputs, outputs,
activations, new gradients). In brackets the least share with which the strategy has a plan; `-`: it has none at all."""

CASES = (
    ModelCase(name="resnet50", shape=(16, 3, 224, 224), frozen=False),
    ModelCase(name="resnet50", shape=(1, 3, 2048, 2048), frozen=True),
    ModelCase(name="vgg16", shape=(1, 3, 2048, 2048), frozen=True),
    ModelCase(name="darknet19", shape=(1, 3, 2048, 2048), frozen=False),
    ModelCase(name="unet", shape=(1, 3, 1024, 1024), frozen=True),
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
    """What the strategy needs at least, where that is more than the share."""

    def cell(self) -> str:
        """FLOPs over plain's, or the least share."""
        if self.redundancy is None:
            return "-" if self.least_bytes is None else f"({self.least_bytes / self.plain_bytes:.2f})"
        return f"{self.redundancy:.3f}"


def make(case: ModelCase) -> nn.Module:
    """The model, without memory."""
    models = load_models()
    with torch.device("meta"):
        model: nn.Module = models.unet(2) if case.name == "unet" else getattr(models, case.name)(1000)
    return models.freeze_norm(model) if case.frozen else model


def rows_of(case: ModelCase) -> list[Row]:
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
    """One model's table."""
    return shares_table(rows, STRATEGIES, lambda row: row.strategy, SHARES, "strategy")


if __name__ == "__main__":
    raise SystemExit(compare_plans(__doc__.splitlines()[0], "recomputing", CASES, rows_of, table_of, NOTES))
