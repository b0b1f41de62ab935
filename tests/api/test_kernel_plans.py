"""Plans of ``backend="auto"`` with the committed table of an H200: by the time model none is slower than with PyTorch's operators alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_targets import measured_gpu
from torch import nn

import sft
from sft.analysis.ir.ops.resize_matrix import AxisResampling
from sft.api import plan_search, problem_builder, settings
from sft.backends.autotune.table import TableSelector
from sft.backends.convolution_relu import FusionDevice
from sft.backends.resize import ResizeCall
from sft.backends.rewriter import KernelBackend
from sft.cli.tune import STANDARD_NETWORKS
from sft.common.byte_units import parse_bytes
from sft.lower.rules.resampled_range import ResampledRange
from sft.planner.search import auto

_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
_LIBRARY = KernelBackend(selector=None, fusion_device=FusionDevice(None))


def _network(name: str) -> nn.Module:
    with torch.device("meta"):
        model = STANDARD_NETWORKS[name]()
    return model.to(torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]  # torch's stub lacks it


def _plans(monkeypatch: pytest.MonkeyPatch, name: str, size_px: int, budget: str) -> tuple[sft.Plan, sft.Plan]:
    """Plans of a training step on an H200 with the measured kernels, and without."""
    table, rates = measured_gpu()
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


def test_plans_are_searched_with_kernels_where_these_save_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's interpolation a U-Net in 700 MiB takes panels, with kernels strips over all columns."""
    table, rates = measured_gpu()
    monkeypatch.setattr(settings, "planning_model", lambda *_: rates)
    backend = replace(_LIBRARY, selector=TableSelector(table=table), computes_operands=False)
    monkeypatch.setattr(problem_builder, "backend_for", lambda *_: backend)
    plans = []
    monkeypatch.setattr(auto, "split_run_plans", lambda *_: ())
    for share in (plan_search._SEARCHED_SHARE, 0.0):
        monkeypatch.setattr(plan_search, "_SEARCHED_SHARE", share)
        plans.append(sft.plan(_network("u-net"), (1, 3, 2048, 2048), budget="700MiB", device="cuda"))
    searched, same = plans
    assert searched.estimated_seconds < 0.9 * same.estimated_seconds
    assert searched.projected_reserved_bytes <= parse_bytes("700MiB") and searched.replays_passes


def test_plans_are_searched_with_kernels_where_copies_hide_what_these_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's interpolation a U-Net in 700 MiB is split, and copies its skips; with kernels a plan without copies is faster."""
    plan, plain = _plans(monkeypatch, "u-net", 2048, "700MiB")
    assert plain.host_bytes and not plan.host_bytes
    assert plan.estimated_seconds < 0.75 * plain.estimated_seconds


def _step(name: str) -> dict[str, Any]:
    """The newest measured step of a case with ATen's operators, in half precision on an H200."""
    steps = json.loads(max(_RESULTS.glob("*-h200-gpu-steps.json")).read_text(encoding="utf-8"))["steps"]
    (step,) = (step for step in steps if (step["name"], step["dtype"], step["backend"]) == (name, "bf16", "aten"))
    return dict(step)


@pytest.mark.parametrize(
    ("name", "budget", "step_name"),
    [
        ("vgg16", "1.2GiB", "vgg16 step in 1.2 GiB"),
        ("resnet18 in training", "8GiB", "resnet18 training step in 8 GiB"),
        ("resnet18 in training", "500MiB", "resnet18 training step in 500 MiB"),
        ("u-net", "1GiB", "u-net step in 1 GiB"),
        ("u-net", "700MiB", "u-net step in 700 MiB"),
    ],
    ids=["vgg16", "untiled training", "training", "u-net", "u-net in less"],
)
def test_modelled_steps_take_the_measured_time(monkeypatch: pytest.MonkeyPatch, name: str, budget: str, step_name: str) -> None:
    """Within 25 %, and as a multiple of the untiled plan within 25 % of the multiple of eager PyTorch's step."""
    rates, step = measured_gpu()[1], _step(step_name)
    monkeypatch.setattr(settings, "planning_model", lambda *_: rates)
    monkeypatch.setattr(problem_builder, "backend_for", lambda *_: _LIBRARY)
    monkeypatch.setattr(auto, "split_run_plans", lambda *_: ())  # the measured plans are older
    plan = sft.plan(_network(name), (1, 3, 2048, 2048), budget=budget, device="cuda")
    untiled = sft.plan(_network(name), (1, 3, 2048, 2048), budget="4TiB", device="cuda", options=sft.Options(strategy="none"))
    measured, eager = step["seconds"][1], step["plain_seconds"][1]
    assert 1 / 1.25 < plan.estimated_seconds / measured < 1.25
    assert 1 / 1.25 < (plan.estimated_seconds / untiled.estimated_seconds) / (measured / eager) < 1.25


@pytest.mark.parametrize(("scale", "length", "uploads"), [(2.0, 32, False), (None, 64, False), (3.0, 48, True), (None, 17, True)])
def test_interpolation_by_powers_of_two_copies_no_table(scale: float | None, length: int, uploads: bool) -> None:
    sampling = AxisResampling(kind="linear", extent=16, length=length, scale=scale, is_double=False)
    call = ResizeCall(height=ResampledRange(sampling, 0, length, 16), width=None)
    assert call.uploads == uploads
    assert (call.scratch_bytes((1, 8, length, 16)) > 0) == uploads
