"""Plans of ``backend="auto"`` with the committed table of an H200: by the time model none is slower than with PyTorch's operators alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import sft
from sft.analysis.ir.ops.resize_matrix import AxisResampling
from sft.api import problem_builder, settings
from sft.backends.autotune.table import KernelTable, TableSelector
from sft.backends.convolution_relu import FusionDevice
from sft.backends.resize import ResizeCall
from sft.backends.rewriter import KernelBackend
from sft.cli.tune import STANDARD_NETWORKS
from sft.common.byte_units import parse_bytes
from sft.common.dataclass_json import dataclass_from_dict
from sft.lower.rules.resampled_range import ResampledRange
from sft.planner.cost.gpu_time import GpuModel

_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
_LIBRARY = KernelBackend(selector=None, fusion_device=FusionDevice(None))


def _measured() -> tuple[KernelTable, GpuModel]:
    """The table of kernels and the rates that ``python -m sft tune`` measured."""
    result = json.loads((_RESULTS / "2026-11-28-h200-gpu-table.json").read_text(encoding="utf-8"))
    rates = {name: value for name, value in result["rates"].items() if name != "format"}
    return KernelTable.from_json(json.dumps(result["table"])), dataclass_from_dict(GpuModel, rates)


def _network(name: str) -> nn.Module:
    with torch.device("meta"):
        model = STANDARD_NETWORKS[name]()
    return model.to(torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]  # torch's stub lacks it


def _plans(monkeypatch: pytest.MonkeyPatch, name: str, size_px: int, budget: str) -> tuple[sft.Plan, sft.Plan]:
    """Plans of a training step on an H200 with the measured kernels, and without."""
    table, rates = _measured()
    monkeypatch.setattr(settings, "planning_model", lambda *_: rates)
    plans = []
    for backend in (replace(_LIBRARY, selector=TableSelector(table=table, allows_tf32=True)), _LIBRARY):
        monkeypatch.setattr(problem_builder, "backend_for", lambda *_, backend=backend: backend)
        plans.append(sft.plan(_network(name), (1, 3, size_px, size_px), budget=budget, device="cuda"))
    return plans[0], plans[1]


def _kernels(plan: sft.Plan) -> set[str]:
    """Operators that kernels run."""
    return {name for segment in plan.segments for name in segment.kernels}


@pytest.mark.parametrize(
    ("name", "size_px", "budget"),
    [("u-net", 2048, "1GiB"), ("resnet18 in training", 2048, "500MiB"), ("vgg16", 2048, "1.2GiB"), ("resnet18", 2048, "400MiB")],
    ids=["u-net", "training", "vgg16", "frozen"],
)
def test_kernels_make_no_plan_slower(monkeypatch: pytest.MonkeyPatch, name: str, size_px: int, budget: str) -> None:
    plan, plain = _plans(monkeypatch, name, size_px, budget)
    assert not _kernels(plain)
    assert plan.estimated_seconds <= plain.estimated_seconds
    assert plan.projected_reserved_bytes <= parse_bytes(budget)
    if name == "u-net":  # interpolation is the larger share of its time
        assert _kernels(plan) and plan.replays_passes
        assert plan.estimated_seconds < 0.8 * plain.estimated_seconds


@pytest.mark.parametrize(("scale", "length", "uploads"), [(2.0, 32, False), (None, 64, False), (3.0, 48, True), (None, 17, True)])
def test_interpolation_by_powers_of_two_copies_no_table(scale: float | None, length: int, uploads: bool) -> None:
    sampling = AxisResampling(kind="linear", extent=16, length=length, scale=scale, is_double=False)
    call = ResizeCall(height=ResampledRange(sampling, 0, length, 16), width=None)
    assert call.uploads == uploads
    assert (call.scratch_bytes((1, 8, length, 16)) > 0) == uploads
