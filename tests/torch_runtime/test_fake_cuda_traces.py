"""Programs of the standard networks on fake CUDA tensors: results match their slots, without waits for the device or pageable copies."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sft
from sft.backends.resolve import backend_for
from sft.cli.tune import STANDARD_NETWORKS
from sft.lower.row_gather import upload_table
from sft.lower.steps import Step
from sft.planner.materialize import ProjectedPlan
from sft.planner.problem import PlanningProblem
from sft.torch_runtime.machine import TorchMachine
from tests.helpers.fake_cuda_traces import trace_step

_STRIPS, _WHOLE = {"tile": (16, None)}, {"strategy": "none"}
#: Layers of the sequential networks in the short runs: all kinds of layers, and strides.
_NUM_LAYERS = {"vgg16": 11, "resnet18": 7, "resnet18 in training": 7}


def _planned(name: str, dtype: torch.dtype, options: dict[str, Any], *, full: bool) -> tuple[PlanningProblem, ProjectedPlan]:
    """Problem and plan of a network on the meta device, channels last."""
    plans: list[tuple[PlanningProblem, ProjectedPlan]] = []
    search = import_module("sft.api.plan_search")
    plan_segments = search.plan_segments

    def noting(problem: PlanningProblem, *arguments: Any) -> ProjectedPlan:
        plans.append((problem, plan_segments(problem, *arguments)))
        return plans[-1][1]

    with torch.device("meta"):
        model: Any = STANDARD_NETWORKS[name]()
    if isinstance(model, nn.Sequential) and not full:
        model = model[: _NUM_LAYERS[name]]
    model = model.to(dtype, memory_format=torch.channels_last)
    size = 64 if full else 32
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(search, "plan_segments", noting)
        patches.setattr("sft.api.problem_builder.backend_for", lambda name, device, folders, _: backend_for(name, device, folders, "cuda"))
        sft.compile(model, (1, 3, size, size), budget="64GiB", options=sft.Options(**options))
    return plans[-1]


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        pytest.param("vgg16", torch.bfloat16, _STRIPS, id="vgg16"),
        pytest.param("resnet18", torch.bfloat16, _WHOLE, id="frozen"),
        pytest.param("resnet18 in training", torch.float32, _STRIPS, id="training"),
        pytest.param("u-net", torch.bfloat16, _STRIPS, id="u-net"),
    ],
)
def test_programs_run_on_cuda_tensors(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    problem, planned = _planned(name, dtype, options, full=False)
    traced = trace_step(problem, planned.region)
    assert not traced.issues, traced.issues.most_common(5)
    assert traced.num_instructions > 20


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"tile": (32, None)}, {"tile": (32, 32)}, _WHOLE], ids=["strips", "tiles", "whole"])
@pytest.mark.parametrize("name", STANDARD_NETWORKS)
def test_programs_of_full_networks_run_on_cuda_tensors(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    problem, planned = _planned(name, dtype, options, full=True)
    traced = trace_step(problem, planned.region)
    assert not traced.issues, traced.issues.most_common(5)


def test_differences_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong layout and a copy from pageable memory are reported; the upload of a table is not."""
    problem, planned = _planned("vgg16", torch.bfloat16, _WHOLE, full=False)
    execute = TorchMachine._execute

    def wrong(machine: Any, step: Step, tensors: dict[int, Any]) -> None:
        execute(machine, step, tensors)
        instruction = step.instruction
        slot = instruction.outputs[0] if instruction.outputs else None
        if slot is not None and isinstance(tensors[slot.number], Tensor) and "max_pool" in str(instruction.function):
            tensors[slot.number] = tensors[slot.number].contiguous()
            upload_table(np.arange(5), machine.device)
            torch.empty(3, device="cpu").to(machine.device)

    monkeypatch.setattr(TorchMachine, "_execute", wrong)
    issues = trace_step(problem, planned.region).issues
    assert {issue[0] for issue in issues} == {"layout", "copy between devices"}
    assert [issue[2:] for issue in issues if issue[0].startswith("copy")] == [((3,), True)]
