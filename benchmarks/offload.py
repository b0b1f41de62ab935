"""Offloading: the least device memory of a step whose waiting values are on the host, and its cost.

Plans only, of models on the meta device: bytes and FLOPs of a plan are what its step takes (the tests measure that). A cell is a plan at a
share of the bytes that the step makes when everything is kept: its FLOPs over plain PyTorch's, what it takes of the host, and its
estimated time over plain's, at rates of the kind of device to the nearest power of ten (1e13 FLOPs a second, 1e10 bytes a second each
way): a projection, to compare plans with each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from harness.cases import load_models
from harness.plans import compare_plans, shares_table
from harness.report import Table
from torch import nn

import sft

SHARES = (1 / 2, 1 / 4, 1 / 8)
WAYS = {
    "auto, nothing on the host": sft.Options(host_budget=0),
    "auto": sft.Options(),
    "offload-dp": sft.Options(strategy="offload-dp"),
}

NOTES = """\
FLOPs of a step over plain PyTorch's, GiB on the host, and projected time over plain's (rates of a GPU to the nearest power of ten: not
measured), at 1/2, 1/4 and 1/8 of the bytes that the step makes when everything is kept. In brackets the least share with which there is
a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in training mode and the shape of its input."""

    name: str
    shape: tuple[int, int, int, int]


CASES = (
    Case(name="resnet18", shape=(1, 3, 1110, 1483)),
    Case(name="unet", shape=(1, 3, 512, 512)),
    Case(name="vgg16", shape=(1, 3, 1024, 1024)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Plan of a strategy for a share of the memory."""

    model: str
    way: str
    share: float
    plain_bytes: int
    peak_bytes: int | None
    host_bytes: int | None
    redundancy: float | None
    time_ratio: float | None
    least_bytes: int | None
    """What it needs at least, where that is more than the share."""

    def cell(self) -> str:
        """FLOPs, host bytes and time; or the least share."""
        if self.redundancy is None or self.host_bytes is None:
            return "-" if self.least_bytes is None else f"({self.least_bytes / self.plain_bytes:.2f})"
        return f"{self.redundancy:.3f}, {self.host_bytes / 2**30:.2f}, {self.time_ratio:.2f}"


def make(case: Case) -> nn.Module:
    """The model, without memory."""
    models = load_models()
    with torch.device("meta"):
        model: nn.Module = models.unet(2) if case.name == "unet" else getattr(models, case.name)(10)
    return model.train()


def rows_of(case: Case) -> list[Row]:
    """All ways at all shares."""
    model = make(case)
    label = f"{case.name} {'x'.join(map(str, case.shape))}"
    plain = sft.plan(model, case.shape, budget="100TiB", options=sft.Options(strategy="none"))
    rows = []
    for way, options in WAYS.items():
        for share in SHARES:
            budget = plain.resident_bytes + int(share * plain.projected_peak_bytes)
            plan, least = None, None
            try:
                plan = sft.plan(model, case.shape, budget=budget, options=options)
            except sft.BudgetError as error:
                least = error.needed_bytes - plain.resident_bytes
            row = Row(
                model=label,
                way=way,
                share=share,
                plain_bytes=plain.projected_peak_bytes,
                peak_bytes=None if plan is None else plan.projected_peak_bytes,
                host_bytes=None if plan is None else plan.host_bytes,
                redundancy=None if plan is None else plan.redundancy,
                time_ratio=None if plan is None else plan.estimated_seconds / plain.estimated_seconds,
                least_bytes=least,
            )
            rows.append(row)
    return rows


def table_of(rows: list[Row]) -> Table:
    """One model's table."""
    return shares_table(rows, tuple(WAYS), lambda row: row.way, SHARES, "plan")


if __name__ == "__main__":
    raise SystemExit(compare_plans(__doc__.splitlines()[0], "offload", CASES, rows_of, table_of, NOTES))
